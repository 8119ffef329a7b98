"""A server's host memory: captured figures of real servers, worked examples, laws, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from hypothesis import given
from hypothesis import strategies as st
from predict_helpers import shape

from localkv.engines.server_log import parse_server_log
from localkv.errors import UsageError
from localkv.model import ModelShape, read_model, shape_from_header
from localkv.predict.config import RunConfig
from localkv.predict.server_memory import prompt_checkpoints, server_memory
from localkv.units import GIB, MIB

LOGS = Path(__file__).parent / "data" / "server_memory"
#: As the captured servers were run: two slots of 4096 tokens.
CAPTURED = RunConfig(n_ctx=8192, n_seq_max=2)


def printed(size: int | None) -> str:
    assert size is not None
    return f"{size / MIB:.3f}"


@pytest.mark.parametrize("model", ["smollm2", "gemma3_270m"])
def test_figures_of_captured_servers(model: str, smollm2_path: Path, gemma_path: Path) -> None:
    path = smollm2_path if model == "smollm2" else gemma_path
    log = parse_server_log((LOGS / f"{model}.log").read_text(encoding="utf-8").splitlines())
    found = read_model(str(path))
    assert log.cache is not None
    assert {entry.n_tokens for entry in log.cache.entries} == {103, 703, 1503, 3003}
    for saved in log.saved:
        memory = server_memory(found, CAPTURED, n_tokens=saved.n_tokens)
        assert printed(memory.state_bytes) == printed(saved.bytes)
    for entry in log.cache.entries:
        # The last three tokens were generated, so that the prompt was shorter.
        memory = server_memory(found, CAPTURED, n_tokens=entry.n_tokens)
        prompt = server_memory(found, CAPTURED, n_tokens=entry.n_tokens - 3)
        points = sum(point.bytes for point in prompt.checkpoints)
        assert len(prompt.checkpoints) == entry.checkpoints
        assert printed((memory.state_bytes or 0) + points) == printed(entry.bytes)
    sizes = {point.n_tokens: printed(point.bytes) for point in log.checkpoints}
    for prompt_tokens in (100, 700, 1500, 3000):
        for point in server_memory(found, CAPTURED, n_tokens=prompt_tokens).checkpoints:
            assert sizes[point.n_tokens] == printed(point.bytes)
    assert (log.ctx_checkpoints, log.cache_ram) == (32, 8 * GIB)


def hybrid_27b() -> ModelShape:
    """Return a hybrid of 27 billion parameters: 48 of 64 blocks keep a state."""
    keys = {
        "block_count": 64,
        "context_length": 262144,
        "embedding_length": 5120,
        "feed_forward_length": 17408,
        "attention.head_count": 24,
        "attention.head_count_kv": 4,
        "attention.key_length": 256,
        "attention.value_length": 256,
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 16,
        "ssm.time_step_rank": 48,
        "ssm.inner_size": 6144,
        "rope.dimension_sections": [11, 11, 10, 0],
    }
    metadata: dict[str, Any] = {f"qwen35.{key}": value for key, value in keys.items()}
    return shape_from_header({"general.architecture": "qwen35", **metadata}, ())


def test_the_hybrid_that_people_report() -> None:
    """149.6 MiB each, 32 of them in each of 4 slots: 18.7 GiB that no KV figure shows."""
    config = RunConfig(n_ctx=4 * 32768, n_seq_max=4)
    memory = server_memory(hybrid_27b(), config)
    assert memory.checkpoint_bytes is not None
    assert memory.slots_bytes is not None
    assert memory.total_bytes_most is not None
    assert round(memory.checkpoint_bytes / MIB, 1) == 149.6
    assert round(memory.slots_bytes / GIB, 1) == 18.7
    assert round(memory.total_bytes_most / GIB, 1) == 26.7
    fewer = server_memory(hybrid_27b(), config, ctx_checkpoints=4, cache_ram=0)
    assert fewer.total_bytes_most == memory.slots_bytes // 8


def test_a_chunk_of_a_window_is_largest_at_its_end() -> None:
    """A conversation just past a chunk's end has passed through its largest checkpoint."""
    model, config = shape("llama4-moe")._replace(n_ctx_train=16384), RunConfig(n_ctx=16384)
    full, past = (server_memory(model, config, n_tokens=n) for n in (8192, 8200))
    assert past.checkpoint_bytes == full.checkpoint_bytes
    assert max(point.bytes for point in past.checkpoints) <= (past.checkpoint_bytes or 0)


@pytest.mark.parametrize(
    ("prompt", "batch", "ubatch", "made"),
    [
        (3000, 2048, 512, (2484, 2996)),
        (516, 2048, 512, (512,)),
        (517, 2048, 512, (1, 513)),
        (4, 2048, 512, ()),
        (3000, 512, 512, (2488, 2996)),  # no more than a batch from the end, as under Ollama
        (100, 64, 4, (96,)),
    ],
)
def test_when_checkpoints_are_made(
    prompt: int, batch: int, ubatch: int, made: tuple[int, ...]
) -> None:
    assert prompt_checkpoints(prompt, batch, ubatch) == made


def test_without_a_rule_the_answer_is_unknown() -> None:
    model = shape_from_header({"general.architecture": "newer-than-this"}, ())
    memory = server_memory(model, RunConfig(n_ctx=4096))
    sizes = ("state_bytes", "entry_bytes", "checkpoint_bytes", "slots_bytes", "conversations_warm")
    assert [memory.to_dict()[name] for name in sizes] == [None] * len(sizes)
    assert "newer-than-this" in memory.unknown


def test_a_model_without_cache_saves_nothing() -> None:
    memory = server_memory(shape("dream-dense"), RunConfig(n_ctx=512))
    assert (memory.entry_bytes, memory.slots_bytes, memory.conversations_warm) == (0, 0, 0)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"n_tokens": 300}, "holds 1 to 256, as the model was trained"),
        ({"n_tokens": 0}, "holds 1 to 256"),
        ({"checkpoint_min_step": -1}, "must not be negative"),
    ],
)
def test_what_is_refused(asked: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        server_memory(shape("qwen35-dense"), RunConfig(n_ctx=1024, n_seq_max=2), **asked)


@given(
    name=st.sampled_from(["qwen35-dense", "gemma3-dense", "llama-moe", "deepseek4-moe"]),
    ram=st.integers(-1, 64 * MIB),
    checkpoints=st.integers(0, 40),
    tokens=st.integers(1, 128),
    slots=st.integers(1, 8),
)
def test_laws(name: str, ram: int, checkpoints: int, tokens: int, slots: int) -> None:
    config = RunConfig(n_ctx=512 * slots, n_seq_max=slots, n_ubatch=16)
    memory = server_memory(
        shape(name), config, cache_ram=ram, ctx_checkpoints=checkpoints, n_tokens=tokens
    )
    assert memory.entry_bytes is not None
    assert memory.entry_bytes_most is not None
    assert memory.checkpoint_bytes is not None
    assert memory.conversations_warm is not None
    assert memory.conversations_warm_least is not None
    assert memory.state_bytes <= memory.entry_bytes <= max(memory.entry_bytes_most, 1)
    assert len(memory.checkpoints) <= memory.chat_checkpoints <= memory.ctx_checkpoints
    assert all(point.bytes <= memory.checkpoint_bytes for point in memory.checkpoints)
    assert memory.conversations_warm_least <= memory.conversations_warm
    if ram >= 0:
        # So many fit, one more does not; an entry as large as the whole limit still fits.
        assert memory.conversations_warm * memory.entry_bytes <= ram
        assert (memory.conversations_warm + 1) * memory.entry_bytes > ram
    else:
        assert memory.total_bytes_most is None
        assert memory.conversations_warm == 512 * slots // tokens
    assert json.loads(json.dumps(memory.to_dict())) == memory.to_dict()


# -- the command ------------------------------------------------------------------------------


def test_the_command_prints_it(run: Run, gemma_path: Path) -> None:
    code, out, _ = run("predict", gemma_path, "-c", 8192, "-np", 2, "--server")
    memory = server_memory(read_model(str(gemma_path)), CAPTURED)
    assert code == 0
    assert "Host memory of llama-server" in out
    assert "checkpoint" in out
    assert f"{(memory.entry_bytes or 0) / MIB:.2f} MiB" in out
    assert "--cache-ram 8192 --ctx-checkpoints 32" in out
    assert "LLAMA_ARG_CACHE_RAM=8192 LLAMA_ARG_CTX_CHECKPOINTS=32" in out


def test_json_has_a_key_of_its_own(run: Run, gemma_path: Path) -> None:
    asked = ("predict", gemma_path, "-c", 8192, "-np", 2, "--json")
    plain = json.loads(run(*asked)[1])
    limits = ("--cache-ram", 512, "--ctx-checkpoints", 4, "--conversation", 1503)
    found = json.loads(run(*asked, *limits, "--checkpoint-min-step", 100)[1])
    memory = server_memory(
        read_model(str(gemma_path)),
        CAPTURED,
        cache_ram=512 * MIB,
        ctx_checkpoints=4,
        checkpoint_min_step=100,
        n_tokens=1503,
    )
    assert found.pop("server_memory") == memory.to_dict()
    assert found == plain


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (("--cache-ram", 0), "prompt cache                off"),
        (("--cache-ram", -1), "5 such conversations stay warm: 8,192 tokens at most"),
        (("--cache-ram", 1), "too small for one such conversation"),
        (("--ctx-checkpoints", 0), "none  turned off"),
    ],
)
def test_limits_in_words(run: Run, gemma_path: Path, limits: tuple[Any, ...], words: str) -> None:
    asked = ("predict", gemma_path, "-c", 8192, "-np", 2, "--conversation", 1503)
    code, out, _ = run(*asked, *limits)
    assert code == 0
    assert words in out


def test_a_model_that_needs_no_checkpoints(run: Run, smollm2_path: Path) -> None:
    code, out, _ = run("predict", smollm2_path, "--server")
    assert code == 0
    assert "rolls its memory back" in out
    assert "CTX_CHECKPOINTS" not in out


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (("--defaults", "llama-cpp-python"), "neither a prompt cache nor checkpoints"),
        (("--conversation", 10**6), "a slot holds 1 to"),
    ],
)
def test_the_command_refuses(
    run: Run, smollm2_path: Path, asked: tuple[Any, ...], words: str
) -> None:
    code, out, err = run("predict", smollm2_path, "--server", *asked)
    assert (code, out) == (2, "")
    assert words in err
