"""vLLM, read from its metrics; the names of older versions are understood too."""

from __future__ import annotations

from localkv.observe.metrics import Metrics
from localkv.snapshots import Snapshot

SERVER = "vllm"
PREFIX = "vllm:"
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_CONFIG = ("vllm:cache_config_info",)
_COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "cached_prompt_tokens": ("vllm:prompt_tokens_cached_total",),
    "prefix_queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "generated_tokens": ("vllm:generation_tokens_total",),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "requests_done": ("vllm:request_success_total",),
}


def snapshot(metrics: Metrics) -> Snapshot:
    """Return what vLLM's ``/metrics`` say.

    The cache's usage counts blocks against all but one, the null block that is never handed out
    (v1/core/block_pool.py). Capacity is vLLM's own "cache size in tokens" where it gives one, else
    blocks x block size, which is only right for models with one kind of layer. Idle, the usage
    reads zero although blocks of a prefix stay cached.
    """
    usage = metrics.mean(*_USAGE)
    block_size, blocks = _number(metrics, "block_size"), _number(metrics, "num_gpu_blocks")
    told = _number(metrics, "kv_cache_size_tokens")
    usable = (blocks - 1) * block_size if blocks and block_size else None
    capacity = told or (blocks * block_size if blocks and block_size else None)
    unknown = {}
    if usage is None:
        unknown["used_tokens"] = "no sample of vllm:kv_cache_usage_perc"
    if capacity is None:
        unknown["capacity_tokens"] = "vllm:cache_config_info gives no number of blocks"
    facts = {
        "block_size": block_size,
        "num_blocks": blocks,
        "max_concurrency": metrics.label("kv_cache_max_concurrency", *_CONFIG) or None,
        "prefix_caching": metrics.label("enable_prefix_caching", *_CONFIG) or None,
        "kv_dtype": metrics.label("cache_dtype", *_CONFIG) or None,
    }
    return Snapshot(
        server=SERVER,
        model=metrics.label("model_name", "vllm:num_requests_running"),
        used_tokens=round(usage * usable) if usage is not None and usable else None,
        capacity_tokens=capacity,
        usage=usage,
        running=metrics.count("vllm:num_requests_running"),
        waiting=metrics.count("vllm:num_requests_waiting"),
        counters=metrics.counters(_COUNTERS),
        facts={name: value for name, value in facts.items() if value is not None},
        unknown=unknown,
        warnings=metrics.warnings,
    )


def _number(metrics: Metrics, label: str) -> int | None:
    text = metrics.label(label, *_CONFIG)
    # "None" and words stand where a version does not know.
    return int(float(text)) if text.replace(".", "", 1).isdigit() else None
