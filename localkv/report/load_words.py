"""What a load came to in sentences, plain text: the caller escapes it for where it goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localkv.analysis.exhausted import Exhaustion
from localkv.analysis.loaded import Load, Prefix
from localkv.snapshots import RecordingInfo
from localkv.units import plural


def exhaustion_texts(info: RecordingInfo, load: Load) -> list[list[str]]:
    """Return, for each time the server gave up, a sentence and what belongs to it.

    One sentence alone where it did not, and none where no ramp was run.
    """
    texts = []
    for found in load.exhaustion:
        seen = "" if found.peak_used is None else f", {found.peak_used:,} seen in the cache"
        texts.append(
            [
                f"exhausted: {found.word(info.server)} in step {found.step!r}: "
                f"{plural(found.concurrency, 'request')} of {found.prompt_tokens:,} + "
                f"{found.n_predict} tokens, {found.asked_tokens:,} in all{seen}",
                *(f"evidence: {said}" for said in found.evidence),
                f"predicted: {_predicted(found, load.predicted)}",
            ]
        )
    if not texts and {step.part for step in load.steps} & {"concurrency", "context"}:
        texts.append([f"exhausted: not within this load ({load.ended})"])
    return texts


def _predicted(found: Exhaustion, predicted: Mapping[str, Any]) -> str:
    """Return what was predicted for the step in which the server gave up, in words."""
    parts = []
    if found.predicted_requests is not None:
        parts.append(f"{plural(found.predicted_requests, 'such request')} at once")
    if found.predicted_tokens is not None:
        parts.append(f"a cache of {found.predicted_tokens:,} tokens (by {predicted['source']})")
    elif predicted.get("why"):
        parts.append(f"capacity unknown: {predicted['why']}")
    if predicted.get("per_request"):
        parts.append(f"room for {predicted['per_request']:,} tokens per request")
    return ", ".join(parts) or "unknown"


def prefix_texts(prefix: Prefix | None) -> list[str]:
    """Return sentences on what a shared prefix spares."""
    if prefix is None:
        return []
    shorter = f" ({prefix.asked:,} do not fit a request)" if prefix.shared < prefix.asked else ""
    cached = (
        "how many came from the cache is not told"
        if prefix.cached_tokens is None
        else f"{prefix.cached_tokens:,} came from the cache, by {prefix.source}"
    )
    texts = [
        f"prefix: {prefix.shared:,} of {prefix.prompt_tokens:,} prompt tokens shared{shorter}; "
        f"{cached}; first token after {seconds(prefix.first_token_without)} without and "
        f"{seconds(prefix.first_token_with)} with it"
    ]
    if prefix.saved_share is not None and prefix.saved_per_1000 is not None:
        texts.append(
            f"worth: at {prefix.price:g} per million tokens and {prefix.discount:g} % off for "
            f"cached ones, {prefix.saved_share:.1%} of a prompt's price: "
            f"{prefix.saved_per_1000:.4g} per 1,000 prompts"
        )
    return texts


def seconds(value: float | None) -> str:
    """Return a time, a dash where it is unknown."""
    return "-" if value is None else f"{value:.2f} s"
