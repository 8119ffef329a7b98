"""The pasted commands run: real engines, real shell, and the KV that their logs tell.

The file's name has a space, quotes and letters beyond ASCII; what each engine allocates must be
what the predictor said for the settings that the command was made from.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from server_helpers import READY, answers
from servers import binary

from localkv.engines.log import EngineLog, parse_log
from localkv.engines.serving import Serving, serving
from localkv.http import Client
from localkv.model import ModelShape, read_model
from localkv.predict.commands import Command, model_commands
from localkv.predict.config import RunConfig
from localkv.predict.defaults import run_config
from localkv.predict.flags import NO_LIMITS, Limits
from localkv.predict.predict import estimate
from localkv.units import MIB

#: The engine prints two decimals, once per cache.
PRINTED = 0.0101 * MIB
HARD_NAME = 'it\'s a "größe" model.gguf'

CASES: dict[str, dict[str, Any]] = {
    "four slots in q8_0": {
        "n_ctx": 4096,
        "n_seq_max": 4,
        "cache_type_k": "q8_0",
        "cache_type_v": "q8_0",
        "n_ubatch": 256,
    },
    "one cache for two slots": {"n_ctx": 2048, "n_seq_max": 2, "kv_unified": True},
    "one slot": {"n_ctx": 1000, "n_seq_max": 1, "cache_type_k": "q8_0", "flash_attn": "on"},
}


@pytest.fixture(params=CASES)
def asked(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CASES[request.param]


def named_hard(model: Path, folder: Path, name: str = HARD_NAME) -> ModelShape:
    """Return the shape of ``model`` under another name in ``folder``."""
    path = folder / name
    path.symlink_to(model)
    return read_model(str(path))


def command_of(
    key: str, shape: ModelShape, config: RunConfig, limits: Limits = NO_LIMITS
) -> Command:
    return next(c for c in model_commands(shape, config, limits=limits) if c.key == key)


def same_kv(told: EngineLog, shape: ModelShape, config: RunConfig) -> None:
    """Assert that the engine holds the caches that were predicted, kind by kind."""
    expected = estimate(shape, config).caches
    assert len(told.caches) == len(expected)
    for cache, predicted in zip(told.caches, expected, strict=True):
        assert cache.cells == predicted.cells
        assert abs(cache.bytes - predicted.bytes) < PRINTED


# -- llama-server ----------------------------------------------------------------------------


@contextmanager
def pasted_server(command: Command, folder: Path) -> Iterator[Serving]:
    """Run the pasted line as a shell does, on a port of the kernel's and with a log that tells."""
    program = binary("llama-server")
    script = f"{command.text} --host 127.0.0.1 --port 0 -lv 4 -t 1 --offline"
    with serving(
        ["sh", "-c", script],
        name="llama-server",
        log=folder / "llama-server.log",
        listening=re.compile(r"listening on http://127\.0\.0\.1:(\d+)"),
        ready=answers("/health"),
        timeout=READY,
        env={"PATH": f"{program.parent}:{os.environ['PATH']}"},
    ) as running:
        yield running


def test_llama_server_runs_what_was_predicted(
    asked: dict[str, Any], smollm2_path: Path, tmp_path: Path
) -> None:
    shape = named_hard(smollm2_path, tmp_path)
    config = run_config("llama-server", shape, **asked)
    with pasted_server(command_of("llama-server", shape, config), tmp_path) as running:
        same_kv(parse_log(running.lines()), shape, config)
        with Client(running.url) as client:
            assert len(client.get_json("/slots")) == config.n_seq_max


def test_llama_server_bounds_its_host_memory_as_told(gemma_path: Path, tmp_path: Path) -> None:
    shape = named_hard(gemma_path, tmp_path)
    config = run_config("llama-server", shape, n_ctx=4096, n_seq_max=2, swa_full=True)
    command = command_of("llama-server", shape, config, Limits(3 * MIB, 5))
    with pasted_server(command, tmp_path) as running:
        log = "\n".join(running.lines())
        same_kv(parse_log(running.lines()), shape, config)
    assert "size limit: 3 MiB" in log


# -- llama-cpp-python ------------------------------------------------------------------------


def test_the_python_lines_run_what_was_predicted(
    asked: dict[str, Any], smollm2_path: Path, tmp_path: Path
) -> None:
    shape = named_hard(smollm2_path, tmp_path)
    config = run_config("llama-server", shape, **asked)
    command = command_of("llama-cpp-python", shape, config)
    done = subprocess.run(
        [sys.executable, "-c", command.text], capture_output=True, timeout=120, cwd=tmp_path
    )
    log = done.stderr.decode("utf-8", "replace")
    assert done.returncode == 0, log
    same_kv(parse_log(log.splitlines()), shape, config)


def test_the_python_lines_find_the_home_directory(smollm2_path: Path, tmp_path: Path) -> None:
    for slots in (1, 2):
        shape = read_model(str(smollm2_path))._replace(path=f"~/{HARD_NAME}")
        config = run_config("llama-server", shape, n_ctx=512, n_seq_max=slots)
        (tmp_path / HARD_NAME).unlink(missing_ok=True)
        (tmp_path / HARD_NAME).symlink_to(smollm2_path)
        done = subprocess.run(
            [sys.executable, "-c", command_of("llama-cpp-python", shape, config).text],
            capture_output=True,
            timeout=120,
            env={**os.environ, "HOME": str(tmp_path)},
        )
        log = done.stderr.decode("utf-8", "replace")
        assert done.returncode == 0, log
        same_kv(parse_log(log.splitlines()), shape, config)


# -- Ollama ----------------------------------------------------------------------------------


@contextmanager
def pasted_ollama(command: Command, folder: Path) -> Iterator[tuple[Serving, str]]:
    """Run the pasted lines but the last, which would chat; yield server and model."""
    program = binary("ollama")
    *lines, run = command.lines
    name = run.removeprefix("ollama run ")
    home = folder / "home"
    home.mkdir()

    def ready(url: str) -> bool:
        if not answers("/api/version")(url):
            return False
        with Client(url) as client:
            return any(m["name"].startswith(name) for m in client.get_json("/api/tags")["models"])

    with serving(
        ["sh", "-c", "\n".join([f"cd {home}", *lines, "wait"])],
        name="ollama",
        log=folder / "ollama.log",
        listening=re.compile(r"Listening on 127\.0\.0\.1:(\d+)"),
        ready=ready,
        timeout=READY,
        env={
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "HOME": str(home),
            "OLLAMA_HOST": f"127.0.0.1:{free_port()}",
            "OLLAMA_MODELS": str(folder / "models"),
            "OLLAMA_NO_CLOUD": "1",
        },
    ) as running:
        yield running, name


def free_port() -> int:
    """Return a port that was free a moment ago: server and client must name the same one."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name", "asked", "limits"),
    [
        pytest.param(
            "smollm2_path",
            HARD_NAME,
            {"n_ctx": 1024, "n_seq_max": 2, "cache_type_k": "q8_0", "cache_type_v": "q8_0"},
            Limits(cache_ram=0),
            id="two requests in q8_0, no prompt cache",
        ),
        pytest.param(
            "gemma_path",
            "it's a größe.gguf",
            {"n_ctx": 2048, "n_seq_max": 2, "n_batch": 128, "n_ubatch": 128},
            Limits(cache_ram=7 * MIB),
            id="windows with batches of its own",
        ),
    ],
)
def test_ollama_runs_what_was_predicted(
    model: str,
    name: str,
    asked: dict[str, Any],
    limits: Limits,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    shape = named_hard(request.getfixturevalue(model), tmp_path, name)
    config = run_config("ollama", shape, **asked)
    command = command_of("ollama", shape, config, limits)
    with pasted_ollama(command, tmp_path) as (running, called):
        with Client(running.url) as client:
            body = {"model": called, "prompt": "Hi", "stream": False, "options": {"num_predict": 1}}
            client.post_json("/api/generate", body, timeout=120)
        log = running.lines()
    same_kv(parse_log(log), shape, config)
    told = f"size limit: {limits.cache_ram // MIB} MiB" if limits.cache_ram else "disabled"
    assert any("prompt cache is" in line and told in line for line in log)
