"""The page of ``localkv inspect --diagram``: a cache drawn with requests in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from localkv.errors import LocalkvError
from localkv.predict.config import RunConfig
from localkv.predict.predict import estimate

if TYPE_CHECKING:
    from localkv.model.shape import ModelShape

_SLOTS, _CONTEXT = 4, 8192


def diagram_page(
    shape: ModelShape,
    width: int,
    *,
    contexts: Sequence[int] | None,
    slots: Sequence[int] | None,
    requests: Sequence[int] | None,
    cache_types: tuple[str, str],
) -> list[str]:
    """Return the lines of the diagram of ``shape``, laid out as llama-server does.

    The largest of ``contexts`` (tokens per slot) and of ``slots`` are drawn; without any, as many
    slots as there are ``requests``, and 8192 tokens or the training context.

    Raises:
        LocalkvError: the architecture has no rule, so that there is nothing to draw.
    """
    from localkv.report.diagram_text import diagram_lines

    told, layers = drawn(shape, contexts, slots, requests, cache_types)
    return diagram_lines(told, layers, requests, name=shape.name, width=width)


def drawn(
    shape: ModelShape,
    contexts: Sequence[int] | None,
    slots: Sequence[int] | None,
    requests: Sequence[int] | None,
    cache_types: tuple[str, str],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the estimate and the layers of the configuration that is drawn."""
    count = max(slots) if slots else len(requests or ()) or _SLOTS
    each = max(contexts) if contexts else min(shape.n_ctx_train or _CONTEXT, _CONTEXT)
    k, v = cache_types
    config = RunConfig(n_ctx=count * each, n_seq_max=count, cache_type_k=k, cache_type_v=v)
    found = estimate(shape, config)
    if not found.known:
        raise LocalkvError(
            f"localkv has no rule for {shape.architecture}: its cache cannot be drawn",
            "localkv predict --engine asks the engine for its size",
        )
    layers = [{"kind": layer.kind, "window": layer.window} for layer in shape.layers]
    return found.to_dict(), layers
