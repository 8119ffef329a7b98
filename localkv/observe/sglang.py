"""SGLang, read from its metrics (``--enable-metrics``).

Source of the names: SGLang's metrics collector. Read, not run: there is no CPU build to test with.
"""

from __future__ import annotations

from localkv.observe.metrics import Metrics
from localkv.snapshots import Snapshot

SERVER = "sglang"
PREFIX = "sglang:"
_COUNTERS = {
    "prompt_tokens": ("sglang:prompt_tokens_total",),
    "cached_prompt_tokens": ("sglang:cached_tokens_total",),
    "generated_tokens": ("sglang:generation_tokens_total",),
    # Its word for a preemption is a retraction.
    "preemptions": ("sglang:num_retracted_requests_total",),
    "requests_done": ("sglang:num_requests_total",),
}


def snapshot(metrics: Metrics) -> Snapshot:
    """Return what SGLang's ``/metrics`` say; tokens that may be evicted do not count as used."""
    used = metrics.count("sglang:num_used_tokens", "sglang:kv_used_tokens")
    capacity = metrics.count("sglang:max_total_num_tokens")
    unknown = {}
    if used is None:
        unknown["used_tokens"] = "no sample of sglang:num_used_tokens"
    if capacity is None:
        unknown["capacity_tokens"] = "no sample of sglang:max_total_num_tokens"
    facts = {
        "page_size": metrics.count("sglang:page_size"),
        "context_length": metrics.count("sglang:context_len"),
        "swa_usage": metrics.mean("sglang:swa_token_usage"),
        "state_usage": metrics.mean("sglang:mamba_usage"),
        "evictable_tokens": metrics.count("sglang:kv_evictable_tokens"),
        "retracted_now": metrics.count("sglang:num_retracted_reqs"),
    }
    return Snapshot(
        server=SERVER,
        model=metrics.label("model_name", "sglang:num_running_reqs", "sglang:token_usage"),
        used_tokens=used,
        capacity_tokens=capacity,
        usage=metrics.mean("sglang:token_usage", "sglang:full_token_usage"),
        running=metrics.count("sglang:num_running_reqs"),
        waiting=metrics.count("sglang:num_queue_reqs"),
        speed_generated=metrics.total("sglang:gen_throughput"),
        counters=metrics.counters(_COUNTERS),
        facts={name: value for name, value in facts.items() if value is not None},
        unknown=unknown,
        warnings=metrics.warnings,
    )
