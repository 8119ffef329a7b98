"""What ``localkv capacity`` is asked, where slots and vLLM are asked alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from localkv.errors import UsageError

if TYPE_CHECKING:
    from localkv.model.shape import ModelShape

_DEFAULT_CONTEXT = 8192
#: Option -> field of a vLLM's setup.
PAGED = {
    "gpu_memory_utilization": "utilization",
    "block_size": "block_size",
    "kv_cache_dtype": "kv_dtype",
    "max_num_seqs": "max_num_seqs",
    "weights": "weights",
    "allowance": "allowance",
}


def context_of(shape: ModelShape, options: dict[str, Any]) -> int:
    """Return the tokens of each request: as asked, else 8192 or what the model was trained for."""
    asked: int | None = options["ctx_per_slot"]
    return asked or min(_DEFAULT_CONTEXT, shape.n_ctx_train or _DEFAULT_CONTEXT)


def wants_levers(options: dict[str, Any], runs: bool) -> bool:
    """Return whether levers are told: where what was asked does not run, or when asked for.

    Each of them is a search for the most requests, together a tenth of the command's time.
    """
    return options["levers"] or options["as_json"] or not runs


def refuse(options: dict[str, Any], names: Iterable[str], why: str) -> None:
    """Return when none of the options ``names`` was given.

    Raises:
        UsageError: one was; ``why`` says what it is for.
    """
    for name in names:
        if options[name] is not None:
            raise UsageError(f"--{name.replace('_', '-')} {why}", "leave it out")
