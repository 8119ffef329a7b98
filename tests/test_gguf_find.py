"""From an argument to files and headers, and what is said when there is no model there."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
import sys
import zipfile

import pytest
from gguf_helpers import HEADERS, Builder, small_model

from localkv.errors import ModelError
from localkv.gguf import locate, open_model


def _refusal(argument: object) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(str(argument), need_data=True)
    assert caught.value.exit_code == 3
    assert caught.value.hint
    assert str(caught.value).isprintable()
    return str(caught.value)


def _zip(path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"")


def _safetensors(path) -> None:
    head = json.dumps({"w": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + bytes(2))


NOT_GGUF = {
    "empty": b"",
    "a PNG picture": b"\x89PNG\r\n\x1a\n" + bytes(40),
    "an HTML page": b"\n<!DOCTYPE html>\n<html><body>404</body></html>",
    "JSON text": b'{"error": "Repository not found"}',
    "a gzip archive": gzip.compress(b"GGUF"),
    "a PyTorch pickle": pickle.dumps({"w": 1}, protocol=2),
    "a git-lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    "an old GGML file": struct.pack("<I", 0x67676D6C) + bytes(40),
    "an old GGJT file": struct.pack("<I", 0x67676A74) + bytes(40),
    "an old GGMF file": struct.pack("<I", 0x67676D66) + bytes(40),
    "all zeros": bytes(1000),
    "cut short after 2 bytes": b"GG",
    "text that begins with 'hello\\nworld'": b"hello\nworld",
    "begins with the bytes ff 00 01": b"\xff\x00\x01",
    "a ZIP archive": _zip,
    "a safetensors file": _safetensors,
}


@pytest.mark.parametrize("found", NOT_GGUF)
def test_what_is_no_gguf_file_is_named(tmp_path, found):
    path = tmp_path / "model.gguf"
    content = NOT_GGUF[found]
    path.write_bytes(content) if isinstance(content, bytes) else content(path)
    assert f"{path} is {found}" in _refusal(path).replace("is a file that", "is")


def test_a_missing_file_points_at_one_that_is_there(tmp_path):
    assert f"there is no file {tmp_path}/x.gguf" in _refusal(tmp_path / "x.gguf")
    assert "folder" in _refusal(tmp_path / "nowhere" / "x.gguf")
    (tmp_path / "y.gguf").write_bytes(small_model())
    assert f"try {tmp_path}/y.gguf" in _refusal(tmp_path / "x.gguf")


def test_a_directory_points_at_the_model_in_it(tmp_path):
    assert "is a directory" in _refusal(tmp_path)
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).write_bytes(small_model())
    assert f"try {tmp_path}/a.gguf (or one of 1 more)" in _refusal(tmp_path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no named pipes in folders")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "a pipe" in _refusal(tmp_path / "pipe.gguf")


def test_odd_arguments_are_one_line(tmp_path):
    assert "no model is named" in _refusal("")
    assert "\\x00" in _refusal("a\0b")
    assert "cannot be opened: File name too long" in _refusal("x" * 5000)
    if sys.platform != "win32":
        path = tmp_path / "\x1b[31mred\n.gguf"
        path.write_bytes(b"")
        assert "\\x1b[31mred\\n.gguf is empty" in _refusal(path)


def test_a_file_cut_short_is_told_apart_in_header_and_data(tmp_path):
    path = tmp_path / "x.gguf"
    whole = small_model()
    path.write_bytes(whole[:100])
    assert "byte 24: a header of 4 keys and 2 tensors needs" in _refusal(path)
    path.write_bytes(whole[:-1])
    assert "cut short in the data: tensor blk.0.attn_q.weight ends" in _refusal(path)


def test_a_header_alone_is_enough_when_data_is_not_asked_for():
    path = HEADERS / "qwen2-dense.gguf"
    model = open_model(str(path))
    assert model.metadata["general.architecture"] == "qwen2"
    assert model.missing is not None
    assert "token_embd.weight" in model.missing
    assert model.file_bytes == path.stat().st_size
    assert "cut short in the data" in _refusal(path)


def _shards(folder, count=3, tensors=None, **changes) -> list:
    """Write a set of shards; ``changes`` maps ``number_key`` to another value."""
    paths = []
    for n in range(count):
        split = {"no": n, "count": count, "tensors_count": tensors or 2 * count}
        split |= {k.partition("_")[2]: v for k, v in changes.items() if k.startswith(f"s{n}_")}
        path = folder / f"m-{n + 1:05d}-of-{count:05d}.gguf"
        path.write_bytes(small_model(**split))
        paths.append(path)
    return paths


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_leads_to_all_of_them_in_order(tmp_path, given):
    paths = _shards(tmp_path)
    model = open_model(str(paths[given]), need_data=True)
    assert list(model.files.paths) == [str(p) for p in paths]
    assert model.path == str(paths[0])
    assert model.file_bytes == sum(p.stat().st_size for p in paths)
    assert [t.name for t in model.tensors][::2] == [f"token_embd.{n}.weight" for n in range(3)]
    assert model.metadata["split.no"] == 0


def test_a_missing_shard_is_named(tmp_path):
    paths = _shards(tmp_path)
    paths[1].unlink()
    assert f"shard {paths[1]} is missing of a set of 3" in _refusal(paths[2])
    with pytest.raises(ModelError, match="is missing"):
        locate(str(paths[0]))


def test_a_shard_out_of_order_is_refused(tmp_path):
    paths = _shards(tmp_path)
    second = paths[1].read_bytes()
    paths[1].write_bytes(paths[2].read_bytes())
    paths[2].write_bytes(second)
    assert f"{paths[1]} is shard 2 by its name, but shard 3 by its header" in _refusal(paths[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"s1_count": 4}, "one of 3 shards by its name, but its header says 4"),
        ({"s2_no": 0}, "shard 3 by its name, but shard 1"),
        ({"tensors": 7}, "hold 6 tensors, but the first one says 7"),
    ],
)
def test_shards_of_different_sets_are_refused(tmp_path, change, words):
    assert words in _refusal(_shards(tmp_path, **change)[0])


def test_shards_with_the_same_tensor_are_refused(tmp_path):
    paths = _shards(tmp_path)
    b = Builder()
    keys = [b.key("split.no", 2, 1), b.key("split.count", 2, 3), b.key("split.tensors.count", 5, 6)]
    head = b.header(keys, [b.tensor("token_embd.0.weight", (8,))])
    paths[1].write_bytes(head + bytes(-len(head) % 32) + bytes(32))
    assert "holds tensor token_embd.0.weight, which an earlier shard has too" in _refusal(paths[0])


def test_a_name_and_a_header_that_disagree_about_shards_are_refused(tmp_path):
    paths = _shards(tmp_path, 2)
    renamed = paths[1].rename(tmp_path / "whole.gguf")
    assert "one of 2 shards by its header" in _refusal(renamed)
    assert "NAME-00002-of-00002.gguf" in _refusal(renamed)
    for path in (paths[0], paths[1]):
        path.write_bytes(small_model())
    assert "by its name, but its header says nothing" in _refusal(paths[0])
    (tmp_path / "m-00004-of-00003.gguf").write_bytes(small_model())
    assert "shard 4 of 3 by its name" in _refusal(tmp_path / "m-00004-of-00003.gguf")


def test_a_set_of_one_is_a_single_file(tmp_path):
    path = tmp_path / "m-00001-of-00001.gguf"
    path.write_bytes(small_model())
    assert open_model(str(path), need_data=True).files.paths == (str(path),)


def test_a_damaged_sibling_is_named(tmp_path):
    paths = _shards(tmp_path)
    paths[2].write_bytes(b"<html>")
    assert f"{paths[2]} is an HTML page" in _refusal(paths[0])


def test_shards_joined_into_one_file_are_refused(tmp_path):
    paths = _shards(tmp_path)
    joined = tmp_path / "whole.gguf"
    joined.write_bytes(b"".join(path.read_bytes() for path in paths))
    said = _refusal(joined)
    assert f"another GGUF file begins at byte {len(paths[0].read_bytes())}" in said
    joined.write_bytes(small_model() * 2)
    assert "were joined into one" in _refusal(joined)
    paths[2].write_bytes(paths[2].read_bytes() * 2)
    assert f"{paths[2]}: another GGUF file" in _refusal(paths[0])


def test_files_joined_with_and_without_padding_are_refused(tmp_path):
    b = Builder()
    head = b.header([b.key("general.architecture", 8, "x")], [b.tensor("w", (3,))])
    first = head + bytes(-len(head) % 32 + 12)
    path = tmp_path / "x.gguf"
    path.write_bytes(first + small_model())
    assert f"begins at byte {len(first)}" in _refusal(path)
    path.write_bytes(first + bytes(20) + small_model())
    assert f"begins at byte {len(first) + 20}" in _refusal(path)
    path.write_bytes(first + bytes(400))
    assert open_model(str(path), need_data=True).missing is None
