"""Real servers driven to where they give up, which is where localkv says that they do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from server_helpers import (
    Server,
    ollama_create,
    running_llama_server,
    running_ollama,
    running_vllm,
)

from localkv.observe.load_recording import LOAD_FILE, read_load
from localkv.report.load import LOAD_REPORT

pytestmark = pytest.mark.slow

#: One thread, as other tests run beside these: two that wait for each other are slower.
THREADS = ("-t", 1, "-tb", 1)
GENERATE = 4


def loaded(run: Run, server: Server, folder: Path, *more: object) -> dict[str, Any]:
    """Load ``server`` and return what the command printed."""
    code, out, err = run(
        "observe", server.url, "--load", "--generate", GENERATE, "--max-seconds", 600, "--json",
        "-o", folder, *more,
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    assert isinstance(found, dict)
    assert found["ended"] in ("all steps done", "the server gave up")
    assert len(read_load(folder / LOAD_FILE).steps) == len(found["steps"])
    longest = found["load"]["limits"]["per_request"]
    for step in found["steps"]:
        # Prompts have the length that was asked for, by the server's own count.
        other = [note for note in step["notes"] if note.startswith("asked for")]
        assert not other or step["prompt_tokens"] > longest
    return found


def step(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(s for s in found["steps"] if s["name"] == name)


def kept(requests: int, prompt: int) -> int:
    """Return the tokens that stay in the cache: the last one generated was never read."""
    return requests * (prompt + GENERATE - 1)


def test_a_split_cache_defers_what_has_no_slot(
    run: Run, tmp_path: Path, smollm2_path: Path
) -> None:
    flags = ("-c", 8192, "-np", 4, "--metrics", *THREADS)
    with running_llama_server(tmp_path, smollm2_path, *flags) as server:
        found = loaded(
            run, server, tmp_path / "kept", "--only", "scenarios", "--only", "concurrency"
        )
    assert found["load"]["limits"] == {
        "slots": 4,
        "per_request": 2048,
        "capacity": 8192,
        "unified": False,
        "block_size": None,
    }
    assert found["predicted"]["tokens"] == 8192
    assert found["predicted"]["source"] == "localkv"
    one = step(found, "a 100-token prompt")
    assert one["used_after"] == one["peak_used"] == kept(1, 100)
    assert one["first_token"]["p50"] > 0
    assert not step(found, "a 3,000-token prompt")["fits"]
    ten = step(found, "ten 100-token prompts")
    assert ten["answered"] == 10
    assert ten["peak_running"] == 4
    assert ten["used_after"] == kept(4, 100)
    assert [point["kind"] for point in found["exhaustion"]] == ["queued"]
    point = found["exhaustion"][0]
    assert (point["concurrency"], point["predicted_requests"]) == (5, 4)
    assert "deferred" in point["evidence"][0]


def test_a_unified_cache_is_exhausted_where_it_is_predicted_to_be(
    run: Run, tmp_path: Path, smollm2_path: Path
) -> None:
    flags = ("-c", 1024, "-np", 4, "--kv-unified", "--metrics", *THREADS)
    with running_llama_server(tmp_path, smollm2_path, *flags) as server:
        found = loaded(run, server, tmp_path / "kept", "--only", "context")
    assert found["predicted"]["tokens"] == found["load"]["limits"]["capacity"] == 1024
    full = found["steps"][-2]
    assert full["answered"] == 4
    assert full["used_after"] == kept(4, 1024 // 4 - GENERATE)
    (point,) = found["exhaustion"]
    assert point["kind"] == "cache full"
    assert "Context size has been exceeded" in point["evidence"][0]
    assert point["concurrency"] == 4
    assert point["predicted_requests"] == 3
    assert point["asked_tokens"] > 1024
    assert found["ended"] == "the server gave up"


def test_a_shared_prefix_comes_from_the_cache(run: Run, tmp_path: Path, smollm2_path: Path) -> None:
    with running_llama_server(tmp_path, smollm2_path, "-c", 1024, "-np", 1, *THREADS) as server:
        found = loaded(run, server, tmp_path / "kept", "--only", "prefix", "--price", 3)
    prefix = found["prefix"]
    assert prefix["shared"] == 1024 - GENERATE - 100
    assert prefix["cached_tokens"] == prefix["shared"]
    assert prefix["source"] == "the answer"
    share = prefix["shared"] / prefix["prompt_tokens"] * 0.9
    assert prefix["saved_share"] == pytest.approx(share)
    assert step(found, "prefix not cached")["cached_tokens"] == 0


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_vllm(tmp_path_factory.mktemp("vllm")) as server:
        yield server


def test_vllm_preempts_where_its_blocks_are_predicted_to_be_too_few(
    run: Run, tmp_path: Path, vllm: Server
) -> None:
    code, out, err = run(
        "observe", vllm.url, "--load", "--generate", 32, "--json", "-o", tmp_path / "kept",
        "--max-seconds", 600,
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out)
    # localkv's capacity from config.json, and vLLM's own.
    assert found["predicted"]["tokens"] == found["load"]["limits"]["capacity"] == 20 * 32
    assert found["predicted"]["source"] == "localkv"
    # The ramp of contexts, after it, can end in one of its own.
    (point,) = (each for each in found["exhaustion"] if each["part"] == "concurrency")
    assert point["kind"] == "preempted"
    # 132 tokens are 5 blocks of 32, and 19 of the 20 are handed out: three fit, the fourth grows.
    # (Where one of four ends before another grows, the next step of the ramp is the first.)
    assert point["predicted_requests"] == 3 < point["concurrency"] <= 8
    running, waiting, preempted = (
        [row[i] for row in point["over_time"] if row[i] is not None] for i in (1, 2, 3)
    )
    assert 0 < max(running) <= point["concurrency"]
    assert waiting
    assert preempted[-1] > preempted[0]
    prefix = found["prefix"]
    # Whole blocks of the prefix stay, and the counters tell where no answer does.
    assert prefix["cached_tokens"] == prefix["shared"] // 32 * 32
    assert prefix["source"] == "the server's counters"
    report = (tmp_path / "kept" / LOAD_REPORT).read_text(encoding="utf-8")
    assert "preempted in step" in report
    assert "| seconds | running | waiting | preemptions | used tokens |" in report


@pytest.mark.parametrize("old", [False, True], ids=["runner-is-llama-server", "engine-inside"])
def test_ollama_queues_what_it_has_no_slot_for(
    run: Run, tmp_path: Path, smollm2_path: Path, old: bool
) -> None:
    with running_ollama(
        tmp_path, old=old, OLLAMA_NUM_PARALLEL="2", OLLAMA_CONTEXT_LENGTH="1024"
    ) as server:
        ollama_create(server, "small", smollm2_path, old=old)
        found = loaded(
            run, server, tmp_path / "kept", "--only", "concurrency", "--model", "ollama:small"
        )
    (point,) = found["exhaustion"]
    assert point["kind"] == "queued"
    assert all("waited longer" in said or "ran at once" in said for said in point["evidence"])
    if old:
        # Nothing tells how many slots it has: requests are added one by one.
        assert found["load"]["limits"]["slots"] is None
        assert point["concurrency"] >= 3
        return
    assert (point["concurrency"], point["predicted_requests"]) == (3, 2)
    assert point["peak_running"] == 2
    assert step(found, "2 at once")["used_after"] == kept(2, 100)


def test_ollama_cuts_what_is_too_long(run: Run, tmp_path: Path, smollm2_path: Path) -> None:
    with running_ollama(tmp_path, OLLAMA_CONTEXT_LENGTH="256") as server:
        ollama_create(server, "small", smollm2_path)
        found = loaded(
            run, server, tmp_path / "kept", "--model", "ollama:small",
            "--only", "context", "--only", "prefix",
        )  # fmt: skip
    (point,) = found["exhaustion"]
    assert point["kind"] == "cut"
    assert point["prompt_tokens"] + GENERATE > 256
    assert [s["fits"] for s in found["steps"]] == [True] * (len(found["steps"]) - 1) + [False]
    # Its runner tells of the cache while the request lasts: a short one may be missed.
    prefix = found["prefix"]
    assert prefix["cached_tokens"] in (None, prefix["shared"])
