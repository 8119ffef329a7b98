"""A server's host memory against what a real llama-server says that it saved.

Every size is compared in the digits that the server prints. The invented models run with zeroed
weights: a real server, real states, only the text is worthless.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from predict_helpers import header_bytes, records
from server_helpers import Server, ollama_create, running_llama_server, running_ollama
from servers import binary

from localkv.engines.server_log import ServerLog, parse_server_log
from localkv.model import ModelShape, read_model
from localkv.predict.defaults import run_config
from localkv.predict.server_memory import ServerMemory, server_memory
from localkv.units import MIB

#: Setting of a run -> the server's flag.
FLAGS = {
    "n_ctx": "-c",
    "n_seq_max": "-np",
    "n_batch": "-b",
    "n_ubatch": "-ub",
    "cache_type_k": "-ctk",
    "cache_type_v": "-ctv",
    "flash_attn": "-fa",
}
SWITCHES = {"kv_unified": "-kvu", "swa_full": "--swa-full"}
Q8 = {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "flash_attn": "on"}
SMALL = {"n_ctx": 1024, "n_seq_max": 2, "n_batch": 64, "n_ubatch": 32}
CASES = {
    "state in some blocks": ("qwen35-dense", {}),
    "state, q8_0, one cache": ("qwen35-dense", {**Q8, "kv_unified": True}),
    "state throughout": ("mamba-dense", {}),
    "windows": ("gemma3-dense", {}),
    "windows, q8_0, three slots": ("gemma3-dense", {**Q8, "n_seq_max": 3}),
    "windows, no flash attention": ("gemma3-dense", {"flash_attn": "off", "kv_unified": True}),
    "windows at full size": ("gemma3-dense", {"swa_full": True}),
    "a window that is not used": ("exaone4-dense", {}),
    "compressed caches": ("deepseek4-moe", {}),
    "plain": ("llama-moe", {"n_batch": 2048, "n_ubatch": 512}),
}
QUICK = ("state in some blocks", "windows, q8_0, three slots")
LENGTHS = (20, 65, 200)


@pytest.fixture(scope="module", autouse=True)
def _needs_the_server() -> None:
    binary("llama-server")


def flags_of(settings: dict[str, Any]) -> list[object]:
    flags: list[object] = ["-t", "1"]
    for name, value in settings.items():
        flags += [SWITCHES[name]] if name in SWITCHES else [FLAGS[name], value]
    return flags


def invented(name: str, folder: Path) -> Path:
    path = folder / f"{name}.gguf"
    path.write_bytes(header_bytes(name))
    size = next(entry["file_size"] for entry in records("engine_truth") if entry["name"] == name)
    os.truncate(path, max(size, path.stat().st_size))
    return path


def ask(server: Server, lengths: tuple[int, ...]) -> ServerLog:
    """Send a prompt of each length, none the beginning of another, and return the log."""
    for token, length in enumerate(lengths, start=5):
        body = {"prompt": [token] * length, "n_predict": 1, "temperature": 0}
        server.post("/completion", body)
    # One more, so that the slot of the last is idle and its state is saved.
    server.post("/completion", {"prompt": [4], "n_predict": 1})
    return parse_server_log(server.lines())


def printed(size: int | None) -> str:
    assert size is not None
    return f"{size / MIB:.3f}"


def compare(shape: ModelShape, settings: dict[str, Any], lengths: tuple[int, ...], log: ServerLog):
    """Compare what was saved of each prompt, its checkpoints, and its entry in the cache."""
    config = run_config("llama-server", shape, **settings)
    expected = {n: server_memory(shape, config, n_tokens=n) for n in lengths}
    saved = {s.n_tokens: printed(s.bytes) for s in log.saved if s.n_tokens in expected}
    assert saved == {n: printed(memory.state_bytes) for n, memory in expected.items()}
    assert log.cache is not None
    entries = [
        (e.n_tokens, e.checkpoints, printed(e.bytes))
        for e in log.cache.entries
        if e.n_tokens in expected
    ]
    assert entries == [
        (n, len(memory.checkpoints), printed(memory.entry_bytes)) for n, memory in expected.items()
    ]
    made = [(point.n_tokens, printed(point.bytes)) for point in log.checkpoints]
    assert made == [
        (point.n_tokens, printed(point.bytes))
        for memory in expected.values()
        for point in memory.checkpoints
    ]
    assert (log.n_slots, log.kv_unified) == (config.n_seq_max, config.kv_unified)


def run(path: Path, settings: dict[str, Any], lengths: tuple[int, ...], folder: Path) -> None:
    with running_llama_server(folder, path, *flags_of(settings)) as server:
        log = ask(server, lengths)
    compare(read_model(str(path)), settings, lengths, log)


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_what_the_server_saves(case: str, tmp_path: Path) -> None:
    name, settings = CASES[case]
    run(invented(name, tmp_path), {**SMALL, **settings}, LENGTHS, tmp_path)


def test_smollm2(smollm2_path: Path, tmp_path: Path) -> None:
    run(smollm2_path, {"n_ctx": 1024, "n_seq_max": 2}, (103,), tmp_path)


@pytest.mark.slow
def test_gemma(gemma_path: Path, tmp_path: Path) -> None:
    """Prompts on both sides of the window of 512 tokens."""
    run(gemma_path, {"n_ctx": 2048, "n_seq_max": 2, "n_ubatch": 256}, (100, 700), tmp_path)


def forget(folder: Path, count: int, *limits: object) -> tuple[ServerMemory, ServerLog]:
    """Send ``count`` prompts of 60 tokens to a server under ``limits``."""
    path = invented("qwen35-dense", folder)
    with running_llama_server(folder, path, *flags_of(SMALL), *limits) as server:
        log = ask(server, (60,) * count)
    shape = read_model(str(path))
    given = {"cache_ram": log.cache_ram, "ctx_checkpoints": log.ctx_checkpoints}
    config = run_config("llama-server", shape, **SMALL)
    return server_memory(shape, config, n_tokens=60, **given), log


def test_conversations_that_stay_warm(tmp_path: Path) -> None:
    """Under a limit of 2 MiB, then under none, when only the tokens of all slots count."""
    memory, log = forget(tmp_path, 8, "--cache-ram", 2)
    assert log.cache is not None
    assert memory.cache_ram == log.cache_ram == 2 * MIB
    assert 1 < log.cache.prompts == memory.conversations_warm < 8
    assert log.cache.bytes <= 2 * MIB


@pytest.mark.slow
def test_no_limit_in_bytes_is_one_in_tokens(tmp_path: Path) -> None:
    memory, log = forget(tmp_path, 20, "--cache-ram", -1)
    assert log.cache is not None
    assert memory.cache_ram is None
    assert log.cache_ram == -1
    assert log.cache.limit_tokens == memory.n_ctx
    assert log.cache.prompts == memory.conversations_warm == 1024 // 60


@pytest.mark.slow
def test_switched_off(tmp_path: Path) -> None:
    memory, log = forget(tmp_path, 2, "--cache-ram", 0, "--ctx-checkpoints", 0)
    assert (memory.conversations_warm, log.prompt_cache_bytes) == (0, 0)
    assert (memory.slots_bytes, log.checkpoint_bytes, log.checkpoints) == (0, 0, ())
    assert log.saved == ()


def test_a_slot_keeps_no_more_checkpoints_than_it_may(tmp_path: Path) -> None:
    """A conversation of many turns, told to the server as the environment that Ollama passes on."""
    path = invented("qwen35-dense", tmp_path)
    env = {"LLAMA_ARG_CTX_CHECKPOINTS": "3", "LLAMA_ARG_CACHE_RAM": "5"}
    settings = {**SMALL, "n_seq_max": 1}
    with running_llama_server(tmp_path, path, *flags_of(settings), env=env) as server:
        for turn in range(1, 7):
            body = {"prompt": [7] * (40 * turn), "n_predict": 1, "temperature": 0}
            server.post("/completion", body)
        log = parse_server_log(server.lines())
    shape = read_model(str(path))
    config = run_config("llama-server", shape, **settings)
    assert (log.ctx_checkpoints, log.cache_ram) == (3, 5 * MIB)
    memory = server_memory(shape, config, ctx_checkpoints=3)
    assert memory.flags()["ollama"].endswith("LLAMA_ARG_CTX_CHECKPOINTS=3")
    assert len(log.checkpoints) > 6
    assert {printed(point.bytes) for point in log.checkpoints} == {printed(memory.checkpoint_bytes)}
    assert max(point.number for point in log.checkpoints) == 3
    assert memory.slot_bytes == memory.slots_bytes == 3 * (memory.checkpoint_bytes or 0)
    # Three sizes, each printed to half of 0.001 MiB.
    assert abs(log.checkpoint_bytes - memory.slot_bytes) <= 3 * 0.0005 * MIB


@pytest.mark.slow
def test_checkpoints_of_a_chat(gemma_path: Path, tmp_path: Path) -> None:
    """Reading one long chat: at user messages far enough apart, at the last, and at the end."""
    turn = [
        {"role": "user", "content": "Tell me something that I do not know yet. " * 2},
        {"role": "assistant", "content": "No."},
    ]
    messages = [*turn * 5, {"role": "user", "content": "Well then."}]
    settings = {"n_ctx": 1024, "n_seq_max": 1, "n_batch": 64, "n_ubatch": 32}
    flags = [*flags_of(settings), "--checkpoint-min-step", 20]
    with running_llama_server(tmp_path, gemma_path, *flags) as server:
        body = {"messages": messages, "max_tokens": 1}
        tokens = server.post("/v1/chat/completions", body)["usage"]["prompt_tokens"]
        log = parse_server_log(server.lines())
    shape = read_model(str(gemma_path))
    memory = server_memory(
        shape,
        run_config("llama-server", shape, **settings),
        checkpoint_min_step=log.checkpoint_min_step or 0,
        n_tokens=tokens,
    )
    at = [point.n_tokens for point in log.checkpoints]
    assert {point.n_tokens for point in memory.checkpoints} < set(at)
    assert len(memory.checkpoints) + 5 < len(at) <= memory.chat_checkpoints


@pytest.mark.slow
def test_ollama_passes_the_limits_on(smollm2_path: Path, tmp_path: Path) -> None:
    """Without them its runner has llama-server's own; both are told in Ollama's log."""
    config = run_config("ollama", read_model(str(smollm2_path)), n_ctx=512)
    memory = server_memory(read_model(str(smollm2_path)), config, cache_ram=7 * MIB)
    name, _, value = memory.flags()["ollama"].partition("=")
    found = []
    for number, env in enumerate(({}, {name: value, "LLAMA_ARG_CTX_CHECKPOINTS": "3"})):
        with running_ollama(tmp_path / str(number), **env) as server:
            ollama_create(server, "small", smollm2_path)
            options = {"num_ctx": 512, "num_predict": 1}
            body = {"model": "small", "prompt": "Hi", "stream": False, "options": options}
            server.post("/api/generate", body)
            log = parse_server_log(server.lines())
            found.append((log.cache_ram, log.ctx_checkpoints))
    assert found == [(8192 * MIB, 32), (7 * MIB, 3)]
