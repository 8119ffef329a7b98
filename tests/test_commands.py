"""The commands that localkv offers say what was asked, whatever the file is called."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from localkv.gguf.types import CACHE_TYPES
from localkv.model import ModelShape
from localkv.predict.commands import (
    Paged,
    commands,
    llama_cpp_python,
    llama_server,
    model_commands,
    ollama,
    ollama_name,
    shell_path,
    vllm,
)
from localkv.predict.config import RunConfig
from localkv.predict.defaults import run_config
from localkv.predict.flags import Limits, llama_arguments
from localkv.units import GIB

CONFIG = RunConfig(n_ctx=8192, n_seq_max=4, n_outputs_max=4)
ONE = CONFIG.with_(n_seq_max=1, n_outputs_max=1)
#: Any name that a POSIX file system takes, one slash-free part of it.
NAMES = st.text(
    alphabet=st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20
).filter(lambda name: name not in (".", ".."))
HARD = ["it's here.gguf", 'a "b" c.gguf', "$(touch x) `y`.gguf", "-rf.gguf", "ünï çødé.gguf",
        "a\nb.gguf", "tab\there.gguf", "bidi\u202e.gguf", "nbsp\u00a0.gguf", "50%\\n.gguf",
        "a\\b.gguf", "!x #y.gguf", "\udcff.gguf", "~me.gguf"]  # fmt: skip


def words(line: str) -> list[str]:
    return shlex.split(line)


def as_the_shell_reads(word: str, folder: Path) -> str:
    """Return the one argument that ``word`` is for a POSIX shell in ``folder``."""
    script = f'set -- {word}; printf "%s/" "$#"; printf "%s" "$1"'
    done = subprocess.run(
        ["sh", "-c", script], capture_output=True, cwd=folder, check=True, timeout=60,
        env={**os.environ, "HOME": "/home/somebody", "LC_ALL": "C"},
    )  # fmt: skip
    count, _, value = done.stdout.partition(b"/")
    assert count == b"1"
    return os.fsdecode(value)


def test_settings_at_the_servers_default_are_left_away() -> None:
    assert words(llama_server(CONFIG, 8192, "/m.gguf").text) == [
        *("llama-server", "-m", "/m.gguf", "-c", "8192", "-np", "4"),
    ]


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"n_batch": 256}, "-b 256"),
        ({"n_ubatch": 128}, "-ub 128"),
        ({"kv_unified": True}, "--kv-unified"),
        ({"swa_full": True}, "--swa-full"),
        ({"flash_attn": "on"}, "-fa on"),
        ({"cache_type_k": "q8_0"}, "-ctk q8_0"),
        ({"cache_type_v": "q4_0"}, "-ctv q4_0"),
        ({"n_gpu_layers": 33}, "-ngl 33"),
        ({"n_gpu_layers": -1}, "-ngl all"),
        ({"tensor_split": (3.0, 1.5)}, "-ts 3,1.5"),
        ({"split_mode": "none", "main_gpu": 1}, "-sm none -mg 1"),
        ({"no_kv_offload": True}, "--no-kv-offload"),
        ({"op_offload": False}, "--no-op-offload"),
        ({"repack": False}, "--no-repack"),
        ({"n_cpu_moe": -1}, "--cpu-moe"),
        ({"n_cpu_moe": 7}, "--n-cpu-moe 7"),
    ],
)
def test_every_other_setting_becomes_its_flag(changes: dict[str, Any], flag: str) -> None:
    plain = llama_server(CONFIG, 4096, "/m.gguf").text
    assert llama_server(CONFIG.with_(**changes), 4096, "/m.gguf").text == f"{plain} {flag}"


def test_the_servers_host_memory_is_bounded_in_whole_mib() -> None:
    line = llama_server(CONFIG, 4096, "/m", Limits(cache_ram=2 * GIB + 1, ctx_checkpoints=4)).text
    assert line.endswith(" --cache-ram 2049 --ctx-checkpoints 4")
    assert llama_server(CONFIG, 1, "/m", Limits(cache_ram=-1)).text.endswith(" --cache-ram -1")
    env = ollama(CONFIG, 1024, "/m", "m", limits=Limits(0, 3)).lines[0]
    assert words(env)[1:3] == ["LLAMA_ARG_CACHE_RAM=0", "LLAMA_ARG_CTX_CHECKPOINTS=3"]


@settings(max_examples=25)
@given(NAMES)
def test_any_file_name_is_one_word_of_the_shell(name: str) -> None:
    if not name.endswith("\n"):
        path = f"/models/{name}"
        assert as_the_shell_reads(shell_path(path), Path("/")) == path


@pytest.mark.parametrize("name", HARD)
def test_hard_names_survive_the_shell_and_can_be_seen(name: str) -> None:
    written = shell_path(name)
    assert written.isprintable()
    assert as_the_shell_reads(written, Path("/")) in (name, f"./{name}")


def test_a_name_that_ends_a_line_is_kept_even_so() -> None:
    assert as_the_shell_reads(shell_path("a\n"), Path("/")) == "a\n"


def test_a_name_like_an_option_is_no_option() -> None:
    assert words(llama_server(CONFIG, 1, "-x.gguf").text)[2] == "./-x.gguf"
    assert words(vllm("-x", Paged(1, 1)).text)[2] == "./-x"


def test_the_home_directory_is_left_to_the_shell_and_to_python() -> None:
    assert as_the_shell_reads(shell_path("~/a b.gguf"), Path("/")) == "/home/somebody/a b.gguf"
    lines = llama_cpp_python(ONE, 1, 1, "~/a b.gguf").lines
    assert "os.path.expanduser('~/a b.gguf')" in lines[-1]
    assert lines[0] == "import os"
    assert "os.path.expanduser(b'~/a b.gguf')" in llama_cpp_python(CONFIG, 1, 1, "~/a b.gguf").text


@given(NAMES)
def test_a_file_name_is_one_string_of_python(name: str) -> None:
    path = f"/models/{name}"
    call = ast.parse(llama_cpp_python(ONE, 1024, 1024, path).text).body[-1]
    assert isinstance(call, ast.Assign)
    assert isinstance(call.value, ast.Call)
    assert ast.literal_eval(call.value.args[0]) == path
    low_level = llama_cpp_python(CONFIG, 1024, 256, path).text
    found = re.search(r"load_from_file\((.*), model_params\)", low_level)
    assert found
    assert ast.literal_eval(found[1]) == os.fsencode(path)


def test_the_python_class_takes_types_by_number_and_says_what_it_cannot() -> None:
    config = ONE.with_(cache_type_k="q8_0", cache_type_v="q8_0", repack=False)
    command = llama_cpp_python(config, 2048, 2048, "/m.gguf")
    for part in ("n_ctx=2048", "type_k=8, type_v=8", "swa_full=False", "flash_attn=True"):
        assert part in command.text
    assert "repacked" in command.note
    assert "logits" in command.note
    assert "flash_attn=False" in llama_cpp_python(ONE.with_(flash_attn="off"), 1, 1, "/m").text


def test_several_slots_take_the_low_level_calls() -> None:
    command = llama_cpp_python(CONFIG.with_(kv_unified=True), 8192, 8192, "/m.gguf")
    assert "one slot only" in command.note
    assert "Llama(" not in command.text
    for line in ("n_ctx = 8192", "n_seq_max = 4", "kv_unified = True", "swa_full = False"):
        assert f"context_params.{line}" in command.lines
    ast.parse(command.text)


def test_every_argument_is_one_of_the_class() -> None:
    import inspect

    import llama_cpp

    told = llama_arguments(
        ONE.with_(
            n_gpu_layers=3, split_mode="none", main_gpu=1, tensor_split=(1.0,), no_kv_offload=True,
            op_offload=False, cache_type_k="q8_0", cache_type_v="q4_0",
        ),
        1,
    )  # fmt: skip
    assert told.keys() <= inspect.signature(llama_cpp.Llama).parameters.keys()


@pytest.mark.parametrize("name", [name for name in CACHE_TYPES if name != "f16"])
def test_type_numbers_are_the_formats(name: str) -> None:
    told = llama_arguments(ONE.with_(cache_type_k=name), 1)
    assert GGMLQuantizationType[name.upper()] == told["type_k"]


def modelfile(path: str, folder: Path, **changes: Any) -> str:
    """Return the Modelfile that the lines write in ``folder``."""
    command = ollama(CONFIG.with_(**changes), 2048, path, "m")
    first = next(i for i, line in enumerate(command.lines) if line.startswith(("ln", "printf")))
    last = next(i for i, line in enumerate(command.lines) if line.startswith("ollama create"))
    script = "\n".join(command.lines[first:last])
    subprocess.run(["sh", "-c", script], cwd=folder, check=True, timeout=60)
    return (folder / "localkv.Modelfile").read_text(encoding="utf-8")


def test_ollamas_lines_write_the_modelfile_they_mean(tmp_path: Path) -> None:
    written = modelfile("/a 'b.gguf", tmp_path, n_gpu_layers=5)
    assert written == (
        'FROM "/a \'b.gguf"\nPARAMETER num_ctx 2048\nPARAMETER num_batch 512\nPARAMETER num_gpu 5\n'
    )


@pytest.mark.parametrize("name", HARD)
def test_what_a_modelfile_would_drop_gets_another_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text("weights")
    origin = modelfile(str(path), tmp_path).splitlines()[0].removeprefix("FROM ").strip('"')
    assert origin.isprintable()
    assert (tmp_path / origin).read_text() == "weights"


def test_ollamas_batch_is_named_where_it_is_not_its_own(tmp_path: Path) -> None:
    assert "num_batch 128" in modelfile("/m", tmp_path, n_batch=128, n_ubatch=128)
    assert "num_batch" not in modelfile("/m", tmp_path, n_batch=1024, n_ubatch=1024)


def test_a_model_of_ollamas_store_stays_there() -> None:
    command = ollama(CONFIG, 2048, "/blobs/sha256-0", "m", source="ollama:qwen3:8b")
    assert any("'FROM qwen3:8b'" in line for line in command.lines)
    assert not any("/blobs" in line for line in command.lines)


def test_ollamas_cache_type_needs_flash_attention() -> None:
    line = ollama(CONFIG.with_(cache_type_k="q8_0", cache_type_v="q8_0"), 1, "/m", "m").lines[0]
    assert words(line)[:3] == [
        "OLLAMA_NUM_PARALLEL=4",
        "OLLAMA_KV_CACHE_TYPE=q8_0",
        "OLLAMA_FLASH_ATTENTION=1",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cache_type_k": "q5_1", "cache_type_v": "q5_1"}, "f16, q8_0, q4_0"),
        ({"cache_type_k": "q8_0"}, "the same for K and V"),
        ({"kv_unified": True}, "cache of its own"),
        ({"swa_full": True}, "window"),
        ({"no_kv_offload": True}, "KV"),
        ({"n_cpu_moe": 3}, "experts"),
        ({"tensor_split": (1.0, 1.0)}, "free memory"),
    ],
)
def test_what_ollama_cannot_do_is_said(changes: dict[str, Any], said: str) -> None:
    plain = ollama(CONFIG, 1, "/m.gguf", "m").note
    note = ollama(CONFIG.with_(**changes), 1, "/m.gguf", "m").note
    assert said in note.removeprefix(plain)


def test_slots_that_share_a_cache_get_equal_parts_of_it_from_ollama() -> None:
    shared = commands(CONFIG.with_(kv_unified=True), 8192, 8192, path="/m.gguf")
    assert "PARAMETER num_ctx 2048" in shared[2].text


@given(st.text(max_size=100))
def test_ollama_takes_the_models_name(name: str) -> None:
    # isValidPart in types/model/name.go
    assert re.fullmatch(r"[a-z0-9_][a-z0-9_.-]{0,79}", ollama_name(name))


def test_a_saved_configuration_and_its_object_give_the_same() -> None:
    saved = {**CONFIG.to_dict(), "of_a_later_version": 1}
    assert commands(saved, 8192, 2048, path="/m") == commands(CONFIG, 8192, 2048, path="/m")


def test_a_model_behind_a_url_is_downloaded_first(smollm2: ModelShape) -> None:
    shape = smollm2._replace(path="https://host/a/my%20model.gguf?key=1&x=2")
    for command in model_commands(shape, ONE):
        assert "https:" not in command.text  # no program takes a URL for a file
        assert "my model.gguf" in command.text
        fetch = command.note.partition(";")[0].partition(": ")[2]
        assert words(fetch) == ["curl", "-L", "-o", "my model.gguf", shape.path]


def test_vllm_serves_the_folder_of_a_config(tmp_path: Path) -> None:
    told = Paged(8192, 50, 0.85, "fp8", 32)
    line = vllm(f"{tmp_path}/it's a model/config.json", told).text
    assert words(line) == [
        *("vllm", "serve", f"{tmp_path}/it's a model", "--max-model-len", "8192"),
        *("--max-num-seqs", "50", "--gpu-memory-utilization", "0.85"),
        *("--kv-cache-dtype", "fp8", "--block-size", "32"),
    ]
    assert "--block-size" not in vllm("/m", Paged(1, 1)).text
    assert "--tensor-parallel-size" not in vllm("/m", Paged(1, 1)).text
    assert words(vllm("config.json", Paged(1, 1)).text)[2] == "."


def test_the_commands_of_a_model_hold_the_engines_own_rounding(smollm2: ModelShape) -> None:
    config = run_config("llama-server", smollm2, n_ctx=1000, n_seq_max=3)
    server, python, served = model_commands(smollm2, config)
    assert [command.key for command in (server, python, served)] == [
        *("llama-server", "llama-cpp-python", "ollama"),
    ]
    assert "-c 1536 -np 3" in server.text
    assert "context_params.n_ctx = 1536" in python.text
    assert "num_ctx 512" in served.text


def test_a_model_known_by_its_config_is_vllms_alone(smollm2: ModelShape) -> None:
    shape = smollm2._replace(path="/hf/config.json")
    (only,) = model_commands(shape, RunConfig(n_ctx=2048, n_seq_max=2))
    assert only.key == "vllm"
    assert words(only.text)[2:7] == ["/hf", "--max-model-len", "1024", "--max-num-seqs", "2"]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> ModelShape:
    from localkv.model import read_model

    return read_model(str(smollm2_path))
