"""What servers answer, read into one kind of snapshot, whatever is missing or broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.observe import llama_server, ollama, sglang, vllm
from localkv.observe.metrics import Metrics, parse_metrics
from localkv.snapshots import COUNTERS, Snapshot

VLLM = (Path(__file__).parent / "data/metrics/vllm_0.32.txt").read_text(encoding="utf-8")
# Written after the names and labels in SGLang's documentation: it has no CPU build to run.
SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 3.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m"} 5.0
# TYPE sglang:num_used_tokens gauge
sglang:num_used_tokens{model_name="m"} 900.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m"} 0.9
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{model_name="m"} 1000.0
# TYPE sglang:num_retracted_requests_total counter
sglang:num_retracted_requests_total{model_name="m"} 2.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",model_name="m"} 70.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 30.0
"""


def slot(number: int, tokens: int | None, n_ctx: int = 2048, busy: bool = False) -> dict[str, Any]:
    """Return a slot as llama-server gives it; without counts before its first task."""
    counted = {} if tokens is None else {"n_prompt_tokens": tokens, "n_prompt_tokens_cache": 7}
    return {"id": number, "n_ctx": n_ctx, "is_processing": busy, **counted}


def test_vllm_tells_usage_capacity_and_preemptions() -> None:
    shown = vllm.snapshot(parse_metrics(VLLM.replace("usage_perc{engine", "usage_perc{engine", 1)))
    assert (shown.server, shown.model) == ("vllm", "tiny")
    assert (shown.usage, shown.used_tokens) == (0.0, 0)
    assert shown.counters["preemptions"] == 17
    assert shown.counters["requests_done"] == 12  # over all the reasons to finish
    assert shown.counters["cached_prompt_tokens"] == 96
    assert shown.facts["num_blocks"] == 20
    assert shown.capacity_tokens == 20 * 32
    assert not shown.unknown
    assert set(shown.counters) <= set(COUNTERS)


def test_vllm_usage_is_of_all_blocks_but_the_null_block() -> None:
    half = VLLM.replace(
        'kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0',
        'kv_cache_usage_perc{engine="0",model_name="tiny"} 1.0',
    )
    assert vllm.snapshot(parse_metrics(half)).used_tokens == 19 * 32


def test_the_names_of_an_older_vllm_are_understood() -> None:
    old = (
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\n'
        'vllm:num_requests_running{model_name="m"} 2.0\n'
        'vllm:num_preemptions_total{model_name="m"} 1.0\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="101"} 1.0\n'
    )
    shown = vllm.snapshot(parse_metrics(old))
    assert (shown.usage, shown.used_tokens, shown.capacity_tokens) == (0.25, 400, 1616)
    assert shown.running == 2
    assert shown.waiting is None


def test_engines_of_one_vllm_are_added_up() -> None:
    two = "".join(
        f'vllm:num_requests_running{{engine="{e}"}} {e + 1}.0\n'
        f'vllm:kv_cache_usage_perc{{engine="{e}"}} {e}.0\n'
        for e in range(2)
    )
    shown = vllm.snapshot(parse_metrics(two))
    assert (shown.running, shown.usage) == (3, 0.5)


def test_sglang_tells_tokens_and_retractions() -> None:
    shown = sglang.snapshot(parse_metrics(SGLANG))
    assert (shown.used_tokens, shown.capacity_tokens, shown.usage) == (900, 1000, 0.9)
    assert (shown.running, shown.waiting) == (3, 5)
    assert shown.counters["preemptions"] == 2
    assert shown.counters["cached_prompt_tokens"] == 100
    assert sglang.snapshot(Metrics(())).unknown.keys() == {"used_tokens", "capacity_tokens"}


@pytest.mark.parametrize(
    ("unified", "n_ctx", "expected"), [(False, 2048, 8192), (True, 8192, 8192), (None, 2048, None)]
)
def test_capacity_of_llama_server_depends_on_the_kind_of_cache(
    unified: bool | None, n_ctx: int, expected: int | None
) -> None:
    slots = [slot(i, 100 * i or None, n_ctx) for i in range(4)]
    shown = llama_server.snapshot(None, slots, {"total_slots": 4}, unified=unified)
    assert shown.used_tokens == 600
    assert shown.capacity_tokens == expected
    assert ("capacity_tokens" in shown.unknown) == (expected is None)


def test_one_slot_needs_no_word_about_the_kind_of_cache() -> None:
    assert llama_server.snapshot(None, [slot(0, 5)], None).capacity_tokens == 2048


def test_llama_server_with_its_endpoints_off_says_what_is_unknown() -> None:
    shown = llama_server.snapshot(None, None, None)
    assert shown.used_tokens is None
    assert set(shown.unknown) == {"used_tokens", "capacity_tokens", "waiting"}
    assert "--slots" in shown.unknown["used_tokens"]


def test_ollama_tells_what_is_loaded_and_that_it_tells_no_more() -> None:
    ps = {
        "models": [
            {
                "name": "m:latest",
                "digest": "abc",
                "size": 5,
                "size_vram": 0,
                "context_length": 4096,
                "expires_at": "2026-01-01T00:00:00Z",
            },
            "junk",
        ]
    }
    shown = ollama.snapshot(ps, "0.33.1")
    (loaded,) = shown.loaded
    assert (loaded.name, loaded.bytes, loaded.vram_bytes) == ("m:latest", 5, 0)
    assert "used_tokens" in shown.unknown
    assert ollama.snapshot(None).loaded == ()


def test_a_malformed_line_is_a_warning_that_names_it() -> None:
    broken = VLLM.replace("vllm:generation_tokens_total{", "vllm:generation_tokens_total{{", 1)
    shown = vllm.snapshot(parse_metrics(broken))
    assert shown.counters["preemptions"] == 17
    assert "generated_tokens" not in shown.counters
    assert len(shown.warnings) == 1
    assert "vllm:generation_tokens_total" in shown.warnings[0]


def test_many_malformed_lines_are_counted() -> None:
    assert len(parse_metrics("x{\n" * 1000 + "a 1\n").warnings) == 4
    assert parse_metrics("<html>\n" * 9 + "a 1\n").total("a") == 1.0


@given(st.text(max_size=300))
def test_any_text_is_read_without_an_error(text: str) -> None:
    for read in (vllm.snapshot, sglang.snapshot):
        shown = read(parse_metrics(text))
        assert Snapshot.from_dict(json.loads(json.dumps(shown.to_dict()))) == shown


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["id", "n_ctx", "n_prompt_tokens", "models", "size", "name"]), inner
        )
    ),
    max_leaves=12,
)


@given(json_values, json_values)
def test_any_json_is_read_without_an_error(first: Any, second: Any) -> None:
    as_list = first if isinstance(first, list) else [first]
    as_dict = second if isinstance(second, dict) else {"models": as_list}
    for shown in (llama_server.snapshot(None, as_list, as_dict), ollama.snapshot(as_dict)):
        assert Snapshot.from_dict(json.loads(json.dumps(shown.to_dict()))) == shown
