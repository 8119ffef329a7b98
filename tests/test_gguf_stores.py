"""Models in the stores of other programs: names to files, and what a hostile store gets done."""

from __future__ import annotations

import json
import os
import sys
import tracemalloc
from pathlib import Path

import pytest
from gguf_helpers import HEADERS, small_model
from store_helpers import COMMIT, MEDIA, blob, hub_file, manifest_path, ollama_model

from localkv.errors import ModelError
from localkv.gguf import open_model
from localkv.gguf.hub_cache import find_hub
from localkv.gguf.ollama_store import find_ollama, parse_name
from localkv.gguf.places import Places, places
from localkv.gguf.stores import FOLDER, HUB, LLAMA_CPP, LM_STUDIO, OLLAMA, Search, model_names

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="needs links and pipes")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty home directory that this process takes for its user's."""
    for name in (
        *("OLLAMA_MODELS", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"),
        *("LLAMA_CACHE", "LOCALKV_CACHE", "LOCALAPPDATA"),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    return tmp_path


def _refusal(call, *args: object) -> str:
    with pytest.raises(ModelError) as caught:
        call(*args)
    assert caught.value.exit_code == 3
    assert caught.value.hint
    assert str(caught.value).isprintable()
    return str(caught.value)


def _ollama(text: str, root: Path):
    return find_ollama(text, [str(root)])


# -- where things are ------------------------------------------------------------------------


def test_the_defaults_are_the_programs_own(home: Path) -> None:
    found = places()
    assert found.ollama[0] == str(home / ".ollama/models")
    assert "/usr/share/ollama/.ollama/models" in found.ollama or sys.platform == "win32"
    assert found.hubs == (str(home / ".cache/huggingface/hub"),)
    assert found.lm_studio[0] == str(home / ".lmstudio/models")
    if sys.platform.startswith("linux"):
        assert found.llama_cpp == (str(home / ".cache/llama.cpp"),)


@pytest.mark.parametrize(
    ("variables", "hub"),
    [
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x", "HF_HOME": "/h"}, "/h/hub"),
        ({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/old"}, "/old"),
        ({"HUGGINGFACE_HUB_CACHE": "/old", "HF_HUB_CACHE": "/new"}, "/new"),
        ({"HF_HOME": "~/h"}, "~/h/hub"),
    ],
)
def test_the_hub_cache_follows_its_variables(home, monkeypatch, variables, hub) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert places().hubs == (os.path.abspath(os.path.expanduser(hub)),)


def test_further_variables_move_the_other_stores(home, monkeypatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", f'"{home}/o"')  # Ollama takes the quotes off as well
    monkeypatch.setenv("LLAMA_CACHE", str(home / "l"))
    found = places()
    assert found.ollama[0] == str(home / "o")
    assert found.hubs[0] == found.llama_cpp[0] == str(home / "l")


# -- Ollama ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "full", "short"),
    [
        ("tiny", "registry.ollama.ai/library/tiny/latest", "tiny"),
        ("tiny:8b-q4", "registry.ollama.ai/library/tiny/8b-q4", "tiny:8b-q4"),
        ("me/tiny", "registry.ollama.ai/me/tiny/latest", "me/tiny"),
        ("hf.co/org/Repo-GGUF:Q4_K_M", "hf.co/org/Repo-GGUF/Q4_K_M", "hf.co/org/Repo-GGUF:Q4_K_M"),
        ("localhost:5000/me/tiny:x", "localhost:5000/me/tiny/x", "localhost:5000/me/tiny:x"),
        (
            "registry.ollama.ai/library/tiny:latest",
            "registry.ollama.ai/library/tiny/latest",
            "tiny",
        ),
    ],
)
def test_names_are_filled_in_as_ollama_does(tmp_path, typed, full, short) -> None:
    manifest = ollama_model(tmp_path, full)
    found = _ollama(typed, tmp_path)
    assert found.manifest == str(manifest)
    assert found.name.short == short
    assert parse_name(found.name.short) == found.name
    assert open_model(found.path, need_data=True).tensors


@pytest.mark.parametrize(
    "name",
    ["", "..", "../x", "a/../b", ":x", "x:", "x:..", "a/b/c/d", "a b", "x/", "/x", "x\0", "é"],
)
def test_a_name_that_ollama_does_not_take_is_refused(tmp_path, name) -> None:
    assert "is not a name of an Ollama model" in _refusal(_ollama, name, tmp_path)


def test_case_does_not_matter_and_the_first_store_wins(tmp_path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    ollama_model(two, "registry.ollama.ai/library/Tiny/Q8")
    assert _ollama("tiny:q8", two).name.model == "Tiny"
    both = [str(one), str(two)]
    assert find_ollama("tiny:q8", both).path.startswith(str(two))
    ollama_model(one, "registry.ollama.ai/library/Tiny/Q8")
    assert find_ollama("Tiny:Q8", both).path.startswith(str(one))


def test_what_the_manifest_keeps_beside_the_model_is_remembered(tmp_path) -> None:
    params = {
        "num_ctx": 16384,
        "num_batch": 256,
        "stop": ["<|x|>"],
        "temperature": 0.5,
        "use_mmap": True,
    }
    ollama_model(tmp_path, params=params, projector=b"p", adapter=b"a", draft=b"d", system=b"s")
    found = _ollama("tiny", tmp_path)
    assert found.params == params
    assert found.parameter("num_ctx") == 16384
    assert found.parameter("temperature") is None
    assert found.parameter("use_mmap") is None
    assert found.parameter("num_gpu") is None
    assert [Path(p).read_bytes() for p in (*found.projectors, *found.adapters)] == [b"p", b"a"]
    assert found.draft is not None
    assert Path(found.draft).read_bytes() == b"d"


def test_an_unknown_name_lists_what_is_near_or_there(tmp_path) -> None:
    assert "there is none at all" in _refusal(_ollama, "tiny", tmp_path)
    for tag in ("1b", "3b"):
        ollama_model(tmp_path, f"registry.ollama.ai/library/llama3.2/{tag}")
    ollama_model(tmp_path, "registry.ollama.ai/library/qwen3/latest")
    said = _refusal(_ollama, "llama3.2", tmp_path)
    assert "there is ollama:llama3.2:1b, ollama:llama3.2:3b;" in said
    assert "ollama:qwen3" not in said
    assert "ollama:qwen3" in _refusal(_ollama, "qwen", tmp_path)
    assert "ollama:llama3.2:1b" in _refusal(_ollama, "zzzzz", tmp_path)


def _manifest(root: Path, text: bytes) -> Path:
    path = manifest_path(root, "registry.ollama.ai/library/evil/latest")
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    return path


def _layer(digest: object, kind: str = "model") -> bytes:
    return json.dumps({"layers": [{"mediaType": MEDIA + kind, "digest": digest}]}).encode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is not a JSON object"),
        (b"[]", "is not a JSON object"),
        (b"{", "is not a JSON object"),
        (b"\xff\xfe\x00", "is not a JSON object"),
        (b"[" * 100_000, "is not a JSON object"),
        (b'{"layers": ' + b"9" * 5000 + b"}", "is not a JSON object"),
        (b"{}", "lists no layers"),
        (b'{"layers": {}}', "lists no layers"),
        (b'{"layers": ["x"]}', "lists no layers"),
        (b'{"layers": []}', "without a GGUF file"),
        (b" " * (5 << 20), "has more than 4 MiB"),
        (_layer("sha256:" + "a" * 64), "its blob sha256-aaaa"),
        (_layer("sha256:../../../../etc/passwd"), "is not a SHA-256 digest"),
        (_layer("sha256:" + "a" * 63 + "/"), "is not a SHA-256 digest"),
        (_layer("sha256-" + "a" * 64 + "\n"), "is not a SHA-256 digest"),
        (_layer("x" * 100_000), "is not a SHA-256 digest"),
        (_layer(None), "is not a SHA-256 digest"),
        (_layer({"a": 1}), "is not a SHA-256 digest"),
        (_layer("sha256:" + "a" * 64, "tensor"), "as separate tensors"),
        (_layer("sha256:../x", "params"), "is not a SHA-256 digest"),
    ],
)
def test_a_hostile_manifest_is_one_line_with_its_name(tmp_path, text, words) -> None:
    path = _manifest(tmp_path, text)
    said = _refusal(_ollama, "evil", tmp_path)
    assert words in said
    assert str(path)[-100:] in said
    assert len(said) < 500


@pytest.mark.parametrize("params", [b"", b"[1]", b'{"num_ctx":', b" " * (5 << 20)])
def test_hostile_parameters_are_refused(tmp_path, params) -> None:
    digest = blob(tmp_path, params)
    model = blob(tmp_path, small_model())
    layers = [
        {"mediaType": MEDIA + "model", "digest": model},
        {"mediaType": MEDIA + "params", "digest": digest},
    ]
    _manifest(tmp_path, json.dumps({"layers": layers}).encode())
    assert digest.removeprefix("sha256:") in _refusal(_ollama, "evil", tmp_path)


def test_a_manifest_without_end_is_not_read_into_memory(tmp_path) -> None:
    path = _manifest(tmp_path, b"{")
    os.truncate(path, 200 << 20)
    tracemalloc.start()
    assert "has more than 4 MiB" in _refusal(_ollama, "evil", tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20


@POSIX
def test_a_pipe_in_the_store_is_not_waited_for(tmp_path) -> None:
    path = manifest_path(tmp_path, "registry.ollama.ai/library/evil/latest")
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    assert "there is none at all" in _refusal(_ollama, "evil", tmp_path)


def test_a_model_of_ollama_can_be_typed_everywhere(home, run) -> None:
    root = home / ".ollama/models"
    header = HEADERS / "qwen2-dense.gguf"
    ollama_model(root, content=header.read_bytes())
    for command in ("inspect", "predict"):
        code, out, err = run(command, "ollama:tiny", "--json")
        assert code == 0, err
    assert str(root / "blobs") in out
    code, out, err = run("inspect", "ollama:tinny")
    assert (code, out) == (3, "")
    assert "ollama:tiny" in err


# -- hubs ------------------------------------------------------------------------------------


def _hub(text: str, **where: object) -> str:
    return find_hub(text, Places(**{k: (str(v),) for k, v in where.items()})).path


def test_a_file_of_a_repository_is_found_in_every_cache(tmp_path) -> None:
    link = hub_file(tmp_path / "hub", "org/name", "sub/m.Q4_K_M.gguf")
    for typed in ("org/name/sub/m.Q4_K_M.gguf", "org/name/m.Q4_K_M.gguf", "org/name:q4_k_m"):
        assert _hub(typed, hubs=tmp_path / "hub") == str(link)
    assert _hub("org/name", hubs=tmp_path / "hub") == str(link)
    flat = tmp_path / "flat" / "org_name_m-Q8_0.gguf"
    studio = tmp_path / "studio" / "org" / "name" / "m-Q8_0.gguf"
    for path in (flat, studio):
        path.parent.mkdir(parents=True)
        path.write_bytes(small_model())
    for typed in ("org/name/m-Q8_0.gguf", "org/name:Q8_0", "org/name"):
        assert _hub(typed, llama_cpp=tmp_path / "flat") == str(flat)
        assert _hub(typed, lm_studio=tmp_path / "studio") == str(studio)


def test_the_revision_of_main_goes_first(tmp_path) -> None:
    old = hub_file(tmp_path, "org/name", "m.gguf", commit="f" * 40)
    main = hub_file(tmp_path, "org/name", "m.gguf", commit="a" * 40)
    (tmp_path / "models--org--name/refs/main").write_text("a" * 40 + "\n")
    (tmp_path / "models--org--name/refs/dev").write_text("f" * 40)
    assert _hub("org/name/m.gguf", hubs=tmp_path) == str(main)
    main.unlink()
    assert _hub("org/name/m.gguf", hubs=tmp_path) == str(old)
    (tmp_path / "models--org--name/refs/main").write_text("../../../../etc")
    assert _hub("org/name/m.gguf", hubs=tmp_path) == str(old)


def test_several_files_are_listed_and_companions_are_no_choice(tmp_path) -> None:
    for name in ("m-Q4_K_M.gguf", "mmproj-m-f16.gguf", "mtp-m-Q4_K_M.gguf"):
        hub_file(tmp_path, "org/name", name)
    assert _hub("org/name:Q4_K_M", hubs=tmp_path).endswith("/m-Q4_K_M.gguf")
    assert _hub("org/name/mmproj-m-f16.gguf", hubs=tmp_path).endswith("/mmproj-m-f16.gguf")
    for n in range(3):
        hub_file(tmp_path, "org/name", f"m-Q8_0-0000{n + 1}-of-00003.gguf")
    assert _hub("org/name:Q8_0", hubs=tmp_path).endswith("-00001-of-00003.gguf")
    said = _refusal(find_hub, "org/name", Places(hubs=(str(tmp_path),)))
    assert "may be 2 files" in said
    assert "hf:org/name/m-Q4_K_M.gguf, hf:org/name/m-Q8_0-00001-of-00003.gguf" in said
    said = _refusal(find_hub, "org/name/no.gguf", Places(hubs=(str(tmp_path),)))
    assert "there is hf:org/name/m-Q4_K_M.gguf" in said


@pytest.mark.parametrize(
    "text",
    ["", "x", "a//b", "../..", "../../etc/passwd", "a/..", "a/b:", "a/b:../c", "/etc/x", "a\0/b"],
)
def test_what_names_no_repository_is_refused(tmp_path, text) -> None:
    said = _refusal(find_hub, text, Places(hubs=(str(tmp_path),), llama_cpp=(str(tmp_path),)))
    assert "names no repository" in said or "no .gguf file of" in said


def test_a_file_name_leads_nowhere_else(tmp_path) -> None:
    secret = tmp_path / "secret.gguf"
    secret.write_bytes(small_model())
    hub_file(tmp_path / "hub", "org/name", "m.gguf")
    where = Places(hubs=(str(tmp_path / "hub"),), lm_studio=(str(tmp_path / "hub"),))
    for name in ("../../../../secret.gguf", str(secret)):
        assert "is not in the caches" in _refusal(find_hub, f"org/name/{name}", where)


def test_a_model_of_the_hub_can_be_typed_everywhere(home, run) -> None:
    header = HEADERS / "qwen2-dense.gguf"
    hub_file(home / ".cache/huggingface/hub", "org/name", "m-Q4_0.gguf", header.read_bytes())
    for typed in ("hf:org/name", "hf:org/name:Q4_0", "hf:org/name/m-Q4_0.gguf"):
        code, out, err = run("inspect", typed, "--json")
        assert code == 0, err
        assert json.loads(out)["architecture"] == "qwen2"


# -- what lies where -------------------------------------------------------------------------


def _found(where: Places, *folders: Path) -> dict[str, tuple[str, str]]:
    search = Search(where, [str(folder) for folder in folders], going_on=lambda: True)
    return {model.argument: (model.source, model.path) for model in search.models()}


@POSIX
def test_every_store_is_searched_and_names_can_be_typed(tmp_path) -> None:
    ollama_model(tmp_path / "o", "registry.ollama.ai/library/tiny/1b")
    link = hub_file(tmp_path / "h", "org/name", "a/m.gguf")
    studio = tmp_path / "s/pub/repo/x.gguf"
    flat = tmp_path / "l/org_name_y.gguf"
    own = tmp_path / "d/SmolLM2-135M-Instruct.Q4_1.gguf"
    loose = tmp_path / "f/deep/er/Z.GGUF"
    for path in (studio, flat, own, loose):
        path.parent.mkdir(parents=True)
        path.write_bytes(small_model())
    where = Places(
        (str(tmp_path / "o"),), (str(tmp_path / "h"),), (str(tmp_path / "l"),),
        (str(tmp_path / "s"),), str(tmp_path / "d"),
    )  # fmt: skip
    found = _found(where, tmp_path / "f")
    assert found == {
        "ollama:tiny:1b": (OLLAMA, find_ollama("tiny:1b", where.ollama).path),
        "hf:org/name/a/m.gguf": (HUB, str(link)),
        "hf:pub/repo/x.gguf": (LM_STUDIO, str(studio)),
        str(flat): (LLAMA_CPP, str(flat)),
        "demo": ("localkv", str(own)),
        str(loose): (FOLDER, str(loose)),
    }
    for argument, (_, path) in found.items():
        if argument.startswith("hf:"):
            assert find_hub(argument.removeprefix("hf:"), where).path == path
    names = model_names(where)
    assert names == sorted(names)
    assert set(names) == {"demo", "demo-swa", *(name for name in found if ":" in name)}


@POSIX
def test_a_name_that_two_caches_share_is_given_once(tmp_path) -> None:
    link = hub_file(tmp_path / "h", "org/name", "m.gguf")
    other = tmp_path / "s/org/name/m.gguf"
    other.parent.mkdir(parents=True)
    other.write_bytes(small_model())
    where = Places(hubs=(str(tmp_path / "h"),), lm_studio=(str(tmp_path / "s"),))
    assert _found(where) == {
        "hf:org/name/m.gguf": (HUB, str(link)),
        str(other): (LM_STUDIO, str(other)),
    }


def test_a_set_of_shards_is_one_model_even_without_its_first(tmp_path) -> None:
    for n in (2, 3):
        (tmp_path / f"m-0000{n}-of-00003.gguf").write_bytes(small_model())
    (tmp_path / "x.gguf").write_bytes(small_model())
    names = [Path(path).name for _, path in _found(Places(), tmp_path).values()]
    assert sorted(names) == ["m-00002-of-00003.gguf", "x.gguf"]


def test_a_store_of_ollama_that_is_named_as_a_folder_is_known(tmp_path) -> None:
    ollama_model(tmp_path)
    (argument, (source, path)), = _found(Places(), tmp_path).items()  # fmt: skip
    assert (argument, source) == (path, OLLAMA)
    assert "/blobs/sha256-" in path.replace(os.sep, "/")


@POSIX
def test_loops_and_hidden_folders_end_nowhere(tmp_path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/m.gguf").write_bytes(small_model())
    (tmp_path / "a/b/up").symlink_to(tmp_path / "a")
    (tmp_path / "a/again").symlink_to(tmp_path / "a/b")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden/m.gguf").write_bytes(small_model())
    (tmp_path / "gone.gguf").symlink_to(tmp_path / "nowhere")
    assert len(_found(Places(), tmp_path)) == 2


def test_a_search_is_bounded_in_depth_number_and_time(tmp_path, monkeypatch) -> None:
    deep = tmp_path.joinpath("d", *("x" * 12))
    deep.mkdir(parents=True)
    (deep / "m.gguf").write_bytes(b"")
    assert _found(Places(), tmp_path / "d") == {}
    for n in range(20):
        (tmp_path / f"{n}.gguf").write_bytes(b"")
    monkeypatch.setattr("localkv.gguf.stores.MAX_FILES", 5)
    search = Search(Places(), [str(tmp_path)], going_on=lambda: True)
    assert len(search.models()) == 5
    assert "too much" in search.notes[0]
    search = Search(Places(), [str(tmp_path)], going_on=iter([True] * 3 + [False] * 99).__next__)
    assert 0 < len(search.models()) < 20
    assert "time was up" in search.notes[0]


def test_names_open_no_file(tmp_path, monkeypatch) -> None:
    for n in range(30):
        ollama_model(tmp_path / "o", f"registry.ollama.ai/library/m{n}/latest")
    hub_file(tmp_path / "h", "org/name", "m.gguf")
    opened: list[str] = []
    real = open
    monkeypatch.setattr(
        "builtins.open", lambda p, *a, **k: opened.append(str(p)) or real(p, *a, **k)
    )
    names = model_names(Places((str(tmp_path / "o"),), (str(tmp_path / "h"),)))
    assert len(names) == 33
    assert [path for path in opened if not path.endswith("refs/main")] == []
    assert f"{COMMIT}" not in "".join(names)


def test_a_repository_of_safetensors_is_answered_by_its_config(home, run) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "intermediate_size": 128,
    }  # fmt: skip
    hub = home / ".cache/huggingface/hub"
    hub_file(hub, "org/plain", "config.json", json.dumps(config).encode())
    hub_file(hub, "org/other", "config.json", b'{"model_type": "whisper"}')
    code, out, err = run("inspect", "hf:org/plain", "--json")
    assert code == 0, err
    assert json.loads(out)["n_layer"] == 2
    rows = {row["argument"]: row for row in json.loads(run("models", "--json")[1])["models"]}
    assert rows["hf:org/plain"]["kv_per_1k"] == 1024 * 2 * 2 * 2 * 16 * 2
    assert "weights are not there" in rows["hf:org/plain"]["reason"]
    assert rows["hf:org/other"]["kind"] == "not a model"
    hub_file(hub, "org/plain", "m.gguf", (HEADERS / "qwen2-dense.gguf").read_bytes())
    assert "hf:org/plain" not in model_names(places())
    for typed, expected in {
        "hf:org/plain/config.json": "config.json",
        "hf:org/plain": "m.gguf",
    }.items():
        code, out, err = run("inspect", typed, "--json")
        assert (code, json.loads(out)["path"].endswith(expected)) == (0, True), err
