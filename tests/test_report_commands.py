"""The commands a report offers say what was measured, whatever the file is called."""

from __future__ import annotations

import ast
import shlex
import subprocess
from pathlib import Path

from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st

from localkv.report.commands import _GGML_TYPES, llama_cpp_python, llama_server, ollama

CONFIG = {
    "n_ctx": 8192,
    "n_seq_max": 4,
    "n_batch": 2048,
    "n_ubatch": 512,
    "kv_unified": False,
    "swa_full": False,
    "flash_attn": "auto",
    "cache_type_k": "f16",
    "cache_type_v": "f16",
    "n_gpu_layers": 0,
}
NAMES = st.text(alphabet=st.characters(exclude_categories=["C", "Z"]), min_size=1).map(
    lambda name: f"/models/{name} x'y.gguf"
)


def words(line: str) -> list[str]:
    return shlex.split(line)


def test_settings_at_the_servers_default_are_left_away() -> None:
    assert words(llama_server(CONFIG, 8192, "/m.gguf").lines[0]) == [
        *("llama-server", "-m", "/m.gguf", "-c", "8192", "-np", "4"),
    ]


def test_every_other_setting_becomes_its_flag() -> None:
    config = {
        **CONFIG,
        "n_batch": 256,
        "n_ubatch": 128,
        "kv_unified": True,
        "swa_full": True,
        "flash_attn": "on",
        "cache_type_k": "q8_0",
        "cache_type_v": "q4_0",
        "n_gpu_layers": 33,
    }
    line = llama_server(config, 4096, "/m.gguf").lines[0]
    for part in (
        ["-b", "256"],
        ["-ub", "128"],
        ["-ctk", "q8_0"],
        ["-ctv", "q4_0"],
        ["-fa", "on"],
        ["--kv-unified"],
        ["--swa-full"],
        ["-ngl", "33"],
    ):
        assert " ".join(part) in line


@given(NAMES)
def test_a_file_name_is_one_word_of_the_shell(path: str) -> None:
    assert words(llama_server(CONFIG, 1024, path).lines[0])[2] == path


@given(NAMES)
def test_a_file_name_is_one_string_of_python(path: str) -> None:
    lines = llama_cpp_python({**CONFIG, "n_seq_max": 1}, 1024, path).lines
    call = ast.parse("\n".join(lines)).body[-1]
    assert isinstance(call, ast.Assign)
    assert isinstance(call.value, ast.Call)
    assert ast.literal_eval(call.value.args[0]) == path


def test_the_home_directory_is_left_to_the_shell_and_to_python() -> None:
    assert (
        llama_server(CONFIG, 1, "~/a b.gguf").lines[0].startswith("llama-server -m ~/'a b.gguf' ")
    )
    lines = llama_cpp_python({**CONFIG, "n_seq_max": 1}, 1, "~/a b.gguf").lines
    assert "os.path.expanduser('~/a b.gguf')" in lines[-1]
    assert lines[0] == "import os"


def test_a_name_like_an_option_is_no_option() -> None:
    assert words(llama_server(CONFIG, 1, "-x.gguf").lines[0])[2] == "./-x.gguf"


def test_the_python_class_takes_types_by_number_and_one_slot() -> None:
    config = {**CONFIG, "n_seq_max": 1, "cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    line = llama_cpp_python(config, 2048, "/m.gguf").lines[-1]
    assert "n_ctx=2048" in line
    assert "type_k=8, type_v=8" in line
    assert "swa_full=False" in line
    assert "flash_attn=True" in line
    assert (
        "flash_attn=False" in llama_cpp_python({**config, "flash_attn": "off"}, 1, "/m").lines[-1]
    )
    several = llama_cpp_python(CONFIG, 2048, "/m.gguf")
    assert several.lines == ()
    assert "one slot" in several.note


def test_type_numbers_are_the_formats() -> None:
    for name, number in _GGML_TYPES.items():
        assert GGMLQuantizationType[name.upper()] == number


def test_ollamas_lines_write_the_modelfile_they_mean(tmp_path: Path) -> None:
    command = ollama(
        {**CONFIG, "cache_type_k": "q8_0", "cache_type_v": "q8_0"}, 2048, "/a 'b.gguf", "m"
    )
    assert words(command.lines[0])[:3] == [
        "OLLAMA_NUM_PARALLEL=4",
        "OLLAMA_KV_CACHE_TYPE=q8_0",
        "OLLAMA_FLASH_ATTENTION=1",
    ]
    subprocess.run(["sh", "-c", command.lines[1]], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "Modelfile").read_text() == 'FROM "/a \'b.gguf"\nPARAMETER num_ctx 2048\n'


def test_what_ollama_cannot_do_is_said() -> None:
    assert "rename it" in ollama(CONFIG, 1, 'a"b.gguf', "m").note
    assert "f16, q8_0, q4_0" in ollama({**CONFIG, "cache_type_k": "q5_1"}, 1, "/m.gguf", "m").note
