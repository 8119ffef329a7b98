"""What the command line answers, and with which exit code, before anything is measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import LOCALKV
from conftest import Run
from sweep_helpers import patched

from localkv.errors import ModelError

HEADERS = Path(__file__).parent / "data" / "headers"
PLAIN = HEADERS / "qwen2-dense.gguf"


def test_the_overview_names_every_command(run: Run) -> None:
    code, out, _ = run("--help")

    assert code == 0
    for name in ("sweep", "inspect", "predict", "selftest", "report"):
        assert f"  {name}" in out


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (("-ctv", "q8_0", "-fa", "off"), "quantized V cache requires flash_attn"),
        (("-ctk", "q9_9"), "not a cache type"),
        (("-np", "0"), "1 to 256"),
        (("-np", "300"), "1 to 256"),
        (("-c", "4096", "--ctx-per-slot", "1024"), "both"),
    ],
)
@pytest.mark.parametrize("command", ["predict", "sweep"])
def test_a_request_that_the_engine_refuses_is_refused_before_launch(
    run: Run, smollm2_path: Path, tmp_path: Path, command: str, options: tuple[str, ...], rule: str
) -> None:
    output = ("-o", tmp_path / "run") if command == "sweep" else ()

    code, out, err = run(command, "-m", smollm2_path, *options, *output)

    assert code == 2
    assert out == ""
    assert rule in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_block_size_that_does_not_divide_is_refused(run: Run, tmp_path: Path) -> None:
    # 80 is not a multiple of the 32 elements of a q8_0 block.
    key = "gemma3.attention.key_length"
    odd = patched(HEADERS / "gemma3-dense.gguf", tmp_path / "odd.gguf", key, 80)

    code, _, err = run("predict", odd, "-ctk", "q8_0")

    assert code == 2
    assert "does not divide" in err


def bad_files(directory: Path, model: Path) -> dict[str, tuple[Path, str]]:
    """Return files that are no models: name -> (path, what the one line must say)."""
    content = model.read_bytes()
    header = PLAIN.read_bytes()
    found = {
        "missing": (directory / "missing.gguf", "no file"),
        "directory": (directory, "director"),
        "empty": (directory / "empty.gguf", "empty"),
        "png": (directory / "png.gguf", "PNG"),
        "html": (directory / "html.gguf", "HTML"),
        "cut header": (directory / "cut-header.gguf", "byte"),
        "cut data": (directory / "cut-data.gguf", "cut"),
    }
    (directory / "empty.gguf").touch()
    (directory / "png.gguf").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64))
    (directory / "html.gguf").write_text("<!DOCTYPE html><html><body>Sign in</body></html>")
    (directory / "cut-header.gguf").write_bytes(header[: len(header) // 2])
    (directory / "cut-data.gguf").write_bytes(content[: len(content) // 2])
    return found


KINDS = ("missing", "directory", "empty", "png", "html", "cut header", "cut data")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_no_model_is_named_for_what_it_is(
    run: Run, smollm2_path: Path, tmp_path: Path, kind: str
) -> None:
    path, said = bad_files(tmp_path, smollm2_path)[kind]

    code, out, err = run("sweep", "-m", path, "-o", tmp_path / "run")

    assert code == 3
    assert out == ""
    assert err.count("\n") == 1
    assert said.lower() in err.lower()


def test_a_header_without_data_can_be_inspected_but_not_swept(run: Run, tmp_path: Path) -> None:
    assert run("inspect", PLAIN)[0] == 0
    code, _, err = run("sweep", "-m", PLAIN, "-o", tmp_path / "run")
    assert code == 3
    assert err.count("\n") == 1


def test_a_shard_out_of_order_is_refused(run: Run, tmp_path: Path) -> None:
    for number in (1, 2):
        shutil.copy(PLAIN, tmp_path / f"m-0000{number}-of-00002.gguf")

    code, _, err = run("inspect", tmp_path / "m-00002-of-00002.gguf")

    assert code == 3
    assert "m-0000" in err


def test_predict_prints_the_schema(run: Run, smollm2_path: Path) -> None:
    code, out, _ = run("predict", smollm2_path, "-c", 4096, "-np", 3, "--json")

    told = json.loads(out)
    assert code == 0
    assert told["schema"] == 1
    assert told["model"]["rule"] == "exact"
    assert told["config"]["n_ctx_requested"] == 4096
    assert told["config"]["n_ctx"] == 4608
    assert told["total_bytes"] == sum(term["bytes"] for term in told["terms"])
    assert any("4608" in note for note in told["notes"])


@pytest.mark.engine
def test_an_architecture_without_a_rule_is_answered_by_the_engine(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localkv.model import architectures, header

    by_rule = json.loads(run("predict", PLAIN, "-c", 2048, "--json")[1])
    known = {name: rule for name, rule in architectures.RULES.items() if name != "qwen2"}
    monkeypatch.setattr(header, "RULES", known)

    code, out, _ = run("predict", PLAIN, "-c", 2048, "--json")

    told = json.loads(out)
    assert code == 0
    assert told["model"]["rule"] == "none"
    assert {term["name"]: term["source"] for term in told["terms"]}["kv"] == "engine"
    # The engine prints two decimals of a MiB.
    assert told["kv"]["bytes"] == pytest.approx(by_rule["kv"]["bytes"], abs=0.02 * (1 << 20))


def test_a_plan_that_is_a_model_is_pointed_out(run: Run, smollm2_path: Path) -> None:
    code, _, err = run("sweep", smollm2_path)

    assert code == 2
    assert "-m" in err


@pytest.mark.parametrize("way", [("",), ("-m", "")])
@pytest.mark.parametrize("name", ["inspect", "predict", "capacity"])
def test_an_empty_name_is_not_the_demo(run: Run, name: str, way: tuple[str, ...]) -> None:
    code, out, err = run(name, *way)

    assert (code, out) == (2, "")
    assert "empty" in err


EXAMPLE = Path(__file__).resolve().parents[1] / "reports" / "example"


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "-o", ""),
        ("sweep", "--resume", "-o", ""),
        ("sweep", ""),
        ("sweep", "-m", ""),
        ("sweep", "--backend", "llama-server", "--server-bin", ""),
        ("sweep", "--backend", "ollama", "--server-url", ""),
        ("report", ""),
        ("compare", "", EXAMPLE),
        ("compare", EXAMPLE, ""),
        ("compare", EXAMPLE, EXAMPLE, "-o", ""),
        ("models", ""),
        ("observe", "http://127.0.0.1:9", "-o", ""),
        ("observe", "http://127.0.0.1:9", "--log", ""),
    ],
)
def test_an_empty_value_is_not_the_current_directory_nor_the_default(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[object, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    dry = ("--dry-run",) if arguments[0] == "sweep" else ()

    code, out, err = run(*arguments, *dry)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "is empty" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1"])
def test_a_time_limit_is_a_finite_number_above_0(run: Run, seconds: str) -> None:
    code, out, err = run("sweep", "--timeout", seconds, "--dry-run")

    assert (code, out) == (2, "")
    assert "--timeout" in err
    assert seconds in err


def test_ctrl_c_is_130_and_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("localkv.model.read_model", interrupted)

    code, out, err = run("inspect", PLAIN)

    assert (code, out) == (130, "")
    assert err.strip() == "localkv: interrupted"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*LOCALKV, "inspect", str(PLAIN)], stdout=full, stderr=subprocess.PIPE, text=True
        )

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "space" in done.stderr


@pytest.mark.parametrize("arguments", [["inspect", PLAIN], ["inspect", PLAIN, "--json"], ["-h"]])
def test_a_reader_that_went_away_is_no_accident(arguments: list[str | Path]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as gone:
        done = subprocess.run(
            [*LOCALKV, *arguments], stdout=gone, stderr=subprocess.PIPE, text=True
        )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["capacity", PLAIN, "--memory", "24G"], 0),
        (["capacity", PLAIN, "--memory", "1M"], 1),
        (["inspect", "no-such.gguf"], ModelError.exit_code),
        (["inspect", "--no-such-option"], 2),
    ],
)
def test_a_process_of_its_own_prints_and_ends_as_main_does(
    run: Run, arguments: list[str | Path], code: int
) -> None:
    words = [str(word) for word in arguments]
    done = subprocess.run([*LOCALKV, *words], capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == run(*words)
    assert done.returncode == code


#: A thread that outlives the main one, however long that takes.
_LATE = (
    "import threading as t\n"
    "t.Thread(target=lambda: (t.main_thread().join(), print('tidied'))).start()"
)


@pytest.mark.parametrize(
    ("before", "printed"),
    [
        ("pass", "at once"),
        ("import atexit; atexit.register(print, 'tidied')", "tidied"),
        (_LATE, "tidied"),
        ("import ctypes", ""),
    ],
)
def test_a_process_ends_at_once_where_nothing_waits_for_its_end(before: str, printed: str) -> None:
    program = "import os, sys, localkv.cli\nos._exit = lambda code: print('at once')\n"
    program += f"{before}\nsys.argv[1:] = ['--version']\nlocalkv.cli.run()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.returncode == 0
    assert done.stdout.splitlines()[1:] == printed.splitlines()


def test_a_closed_standard_error_is_no_accident() -> None:
    done = subprocess.run(
        f"{sys.executable} -m localkv predict {PLAIN} -c 512 2>&-",
        shell=True,
        stdout=subprocess.PIPE,
        text=True,
    )

    assert done.returncode == 0
    assert "total" in done.stdout


def test_both_ways_to_name_cache_types_are_refused(run: Run, smollm2_path: Path) -> None:
    code, _, err = run("sweep", "-m", smollm2_path, "--cache-type", "q8_0", "-ctk", "f16")

    assert code == 2
    assert "--cache-type" in err
