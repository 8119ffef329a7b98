"""``localkv models``: rows, and that every name it shows can be typed."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest
from cli_helpers import localkv
from gguf_helpers import HEADERS, STR, Builder, small_model
from store_helpers import hub_file, manifest_path, ollama_model

from localkv import predict, read_model
from localkv.gguf.stores import StoredModel
from localkv.predict.shelf import Room, shelf

QWEN = (HEADERS / "qwen2-dense.gguf").read_bytes()
GEMMA = (HEADERS / "gemma3-dense.gguf").read_bytes()
POSIX = pytest.mark.skipif(sys.platform == "win32", reason="needs links")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home directory with no model in it but the built-in ones elsewhere."""
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("OLLAMA_MODELS", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("XDG_CACHE_HOME", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCALKV_CACHE", str(folder / "own"))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    monkeypatch.setenv("COLUMNS", "60")
    return folder


def _rows(run, *args: object) -> dict[str, dict]:
    code, out, err = run("models", *args, "--json")
    assert code == 0, err
    return {row["argument"]: row for row in json.loads(out)["models"]}


def _companion(kind: str, architecture: str = "llama") -> bytes:
    b = Builder()
    keys = [
        b.key("general.architecture", STR, architecture),
        b.key("general.type", STR, kind),
    ]
    head = b.header(keys, [b.tensor("w", (8,))])
    return head + bytes(-len(head) % 32 + 32)


@pytest.fixture
def full(home: Path) -> Path:
    """Return the home directory with a model in every store."""
    ollama_model(home / ".ollama/models", "registry.ollama.ai/library/tiny/1b", QWEN)
    ollama_model(home / ".ollama/models", "hf.co/org/name/Q4_0", QWEN)
    broken = manifest_path(home / ".ollama/models", "registry.ollama.ai/library/evil/latest")
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    hub_file(home / ".cache/huggingface/hub", "org/name", "g.gguf", GEMMA)
    hub_file(home / ".cache/huggingface/hub", "org/name", "mmproj-g.gguf", _companion("mmproj"))
    return home


def test_every_store_has_its_rows_and_every_name_can_be_typed(full: Path, run) -> None:
    rows = _rows(run)
    assert {name: row["kind"] for name, row in rows.items()} == {
        "hf:org/name/g.gguf": "model",
        "ollama:hf.co/org/name:Q4_0": "model",
        "ollama:tiny:1b": "model",
        "hf:org/name/mmproj-g.gguf": "not a model",
        "ollama:evil": "broken",
    }
    for name, row in rows.items():
        code, out, err = run("inspect", name, "--json")
        assert code == (0 if row["kind"] == "model" else 3), err
        if code == 0:
            assert json.loads(out)["path"] == row["path"]
            assert json.loads(out)["architecture"] == row["architecture"]


def test_figures_are_those_of_predict(full: Path, run) -> None:
    row = _rows(run)["hf:org/name/g.gguf"]
    shape = read_model(row["path"])
    assert row["file_bytes"] == len(GEMMA)
    assert row["n_ctx_train"] == shape.n_ctx_train == row["n_ctx"] < 8192
    assert row["kv_per_1k"] == 1024 * shape.first_token_bytes()
    assert row["kv_per_1k_later"] == 1024 * shape.marginal_token_bytes() < row["kv_per_1k"]
    expected = predict(shape, n_ctx=row["n_ctx"], n_seq_max=1, n_outputs_max=1)
    assert row["need"] == expected.total_bytes
    assert "no data from tensor token_embd.weight on" in row["reason"]


def test_sorted_models_first_and_the_same_each_time(full: Path, run) -> None:
    first = list(_rows(run))
    assert first == list(_rows(run))
    assert first[:3] == sorted(first[:3], key=str.lower)


@POSIX
def test_the_same_file_under_two_names_is_told(full: Path, run, tmp_path: Path) -> None:
    original = tmp_path / "m.gguf"
    original.write_bytes(small_model())
    (tmp_path / "other").mkdir()
    (tmp_path / "other/link.gguf").symlink_to(original)
    os.link(original, tmp_path / "other/hard.gguf")
    rows = _rows(run, tmp_path)
    assert rows["ollama:tiny:1b"]["same_as"] == "ollama:hf.co/org/name:Q4_0"
    same = [
        rows[str(tmp_path / name)]["same_as"] for name in ("other/hard.gguf", "other/link.gguf")
    ]
    names = {str(original), str(tmp_path / "other/hard.gguf"), str(tmp_path / "other/link.gguf")}
    assert sum(one is None for one in [*same, rows[str(original)]["same_as"]]) == 1
    assert {one for one in same if one} <= names
    _, out, _ = run("models", tmp_path)
    assert "  the same file as ollama:hf.co/org/name:Q4_0" in out.splitlines()


def test_a_set_of_shards_is_one_row_and_a_missing_one_is_named(home: Path, run, tmp_path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for n in range(3):
        split = {"no": n, "count": 3, "tensors_count": 6}
        (folder / f"m-0000{n + 1}-of-00003.gguf").write_bytes(small_model(**split))
    (row,) = _rows(run, folder).values()
    assert row["kind"] == "model"
    assert row["file_bytes"] == 3 * len(small_model(no=0, count=3, tensors_count=6))
    (folder / "m-00001-of-00003.gguf").unlink()
    (row,) = _rows(run, folder).values()
    assert row["kind"] == "broken"
    assert "m-00001-of-00003.gguf is missing" in row["reason"]


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        (b"", "broken", "is empty"),
        (b"<html>", "broken", "is an HTML page"),
        (small_model()[:100], "broken", "byte 24"),
        (small_model() * 2, "broken", "were joined into one"),
        (_companion("adapter"), "not a model", "a LoRA adapter"),
        (_companion("imatrix"), "not a model", "an importance matrix"),
        (_companion("model", "clip"), "not a model", "projector"),
        (Builder().header([Builder().key("general.architecture", STR, "llama")]), "not a model",
         "without tensors"),
        (_companion("model", "nobody-knows"), "model", "no rule for the architecture"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_a_row_with_the_reason(
    home, run, tmp_path, content, kind, words
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    good = tmp_path / "good.gguf"
    good.write_bytes(QWEN)
    rows = _rows(run, tmp_path / "x.gguf", good)
    assert rows[str(path)]["kind"] == kind
    assert words in rows[str(path)]["reason"]
    assert rows[str(path)]["need"] is None
    assert rows[str(good)]["kind"] == "model"
    code, out, _ = run("models", path, good)
    assert code == 0
    assert words in " ".join(out.split())


def test_a_folder_that_is_not_there_is_a_row(home, run, tmp_path) -> None:
    (row,) = _rows(run, tmp_path / "nowhere").values()
    assert row["kind"] == "broken"
    assert "there is no file" in row["reason"]


def test_nothing_at_all_says_what_to_do(home, run) -> None:
    assert _rows(run) == {}
    code, out, _ = run("models")
    assert code == 0
    assert "name a folder" in out


@POSIX
def test_a_folder_that_cannot_be_read_is_told_with_the_reason(home, run) -> None:
    """A link to itself, which no user can read, root neither."""
    for name in (".ollama/models/manifests", ".cache/huggingface/hub"):
        (home / name).parent.mkdir(parents=True)
        (home / name).symlink_to(home / name)
    code, out, _ = run("models", "--json")
    assert code == 0
    notes = json.loads(out)["notes"]
    assert [note.partition(" (")[0] for note in notes] == [
        f"{home / '.ollama/models/manifests'} cannot be read",
        f"{home / '.cache/huggingface/hub'} cannot be read",
    ]
    assert os.strerror(errno.ELOOP) in notes[0]
    _, out, _ = run("models")
    assert out.startswith("No models found")
    assert out.count("note:") == 2


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_the_page_fits_the_terminal_and_names_stay_whole(full, run, monkeypatch, columns) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    (full / "x").mkdir()
    odd = full / "x" / ("long" * 40 + ".gguf")
    odd.write_bytes(QWEN)
    rows = _rows(run, full / "x")
    _, out, _ = run("models", full / "x")
    lines = out.splitlines()
    assert set(rows) <= set(lines)
    assert [line for line in lines if len(line) > columns and line not in rows] == []
    assert "fits" in out
    assert lines[lines.index("ollama:hf.co/org/name:Q4_0") + 1].endswith("RAM")


@POSIX
def test_hostile_names_are_harmless(home, run, tmp_path) -> None:
    b = Builder()
    keys = [
        b.key("general.architecture", STR, "\x1b[31mx\n|<b>"),
        b.key("general.name", STR, "\x9b"),
    ]
    head = b.header(keys, [b.tensor("w\x1b", (8,))])
    (tmp_path / "\x1b]0;evil\x07.gguf").write_bytes(head + bytes(-len(head) % 32 + 32))
    (tmp_path / "a\nb.gguf").write_bytes(b"\x1b[2J")
    _, out, _ = run("models", tmp_path)
    assert all(line.isprintable() for line in out.splitlines())
    code, out, _ = run("models", tmp_path, "--json")
    assert code == 0
    assert out.isascii()
    assert len(json.loads(out)["models"]) == 2


@pytest.mark.parametrize(
    ("room", "fits"),
    [
        (Room(1 << 40), "RAM"),
        (Room(1), "no"),
        (Room(1 << 40, (1 << 40,)), "GPU"),
        (Room(1 << 40, (1,)), "RAM"),
        (Room(1, (1,)), "no"),
        (Room(None), None),
    ],
)
def test_what_fits_goes_by_the_room_there_is(room: Room, fits: str | None) -> None:
    path = str(HEADERS / "qwen2-dense.gguf")
    model = StoredModel("x", "folder", path)
    (row,) = shelf([model], room, going_on=lambda: True)
    assert row.fits == fits
    if fits is None:
        assert row.reason is not None


def test_every_gpu_must_hold_its_part() -> None:
    path = str(HEADERS / "qwen2-dense.gguf")
    equal = predict(path, n_ctx=256, n_gpu_layers=-1, n_devices=2, n_outputs_max=1)
    largest = max(device.total for device in equal.devices if device.name != "host")
    for size, fits in ((largest, "GPU"), (largest - 1, "RAM")):
        model = StoredModel("x", "folder", path)
        (row,) = shelf([model], Room(1 << 40, (size, size)), going_on=lambda: True)
        assert row.fits == fits


def test_the_very_byte_decides(smollm2_path: Path) -> None:
    model = StoredModel("x", "folder", str(smollm2_path))
    (row,) = shelf([model], Room(1 << 40), going_on=lambda: True)
    assert row.reason is None
    for ram, fits in ((row.need, "RAM"), (row.need - 1, "no")):
        (found,) = shelf([model], Room(ram), going_on=lambda: True)
        assert found.fits == fits


def test_when_time_is_up_the_rest_says_so() -> None:
    models = [StoredModel(f"m{n}", "folder", str(HEADERS / name)) for n, name in enumerate(
        ("qwen2-dense.gguf", "gemma3-dense.gguf", "llama-moe.gguf"))]  # fmt: skip
    rows = shelf(models, Room(1 << 40), going_on=iter([True, False, False]).__next__)
    assert [row.kind for row in rows] == ["model", "broken", "broken"]
    assert "time was up" in str(rows[1].reason)


def test_a_whole_process_starts_light_and_prints_no_colour_to_a_pipe(full: Path) -> None:
    done = localkv("models", env={"HOME": str(full), "PYTHONPROFILEIMPORTTIME": "1"})
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    loaded = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "localkv" in loaded
    assert not loaded & {"rich", "llama_cpp", "numpy", "pandas", "matplotlib", "httpx", "scipy"}
