"""The paged KV cache as vLLM plans it: blocks of a shared pool, groups of layers, concurrency.

Source: vLLM 0.32, v1/core/kv_cache_utils.py (get_kv_cache_groups, get_kv_cache_config_from_groups,
get_max_concurrency_for_kv_cache_config) and v1/kv_cache_interface.py (page sizes, blocks that a
request holds). What a platform decides before that is in :class:`Serving`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from localkv.errors import UsageError
from localkv.model import ModelShape, read_model
from localkv.model.hf_config import read_hf_model, shape_from_hf_config
from localkv.predict.paged_pages import CPU, Page, Serving, element_bytes, layer_pages
from localkv.predict.paged_pool import group_pages
from localkv.units import plural

__all__ = ["CPU", "PagedGroup", "PagedPlan", "Serving", "check_block_size", "paged_plan"]

#: What the block sizes of plain attention's kernels are multiples of, on any platform of vLLM's.
_KERNEL_STEP = 16


@dataclass(frozen=True)
class PagedGroup:
    """Layers that share one block table.

    ``kind`` is full, sliding (windows and chunks), mla or recurrent; ``page_bytes`` what one layer
    keeps in one block (the first layer's, where they differ); ``window`` tokens or None.
    """

    kind: str
    layers: int
    page_bytes: int
    window: int | None


@dataclass(frozen=True)
class PagedPlan:
    """How many blocks fit, and what that is worth.

    ``block_size`` in tokens is the resulting one: hybrid models raise it until an attention page
    is as large as a layer's recurrent state. ``tokens`` is ``max_concurrency`` x the longest
    request, as vLLM prints it, and not blocks x block size for hybrid models.
    ``bytes_per_token`` is what one more token of a request takes in all attention layers.
    ``block_bytes`` is one block over all layers of the largest group; ``blocks_per_request`` what
    one request of the longest length holds over all groups. ``fits`` is False where vLLM would
    refuse to start, because not even one such request has room. ``mixed_pages``: layers of one
    group have pages of different sizes.
    """

    block_size: int
    num_blocks: int
    tokens: int
    max_concurrency: float
    bytes_per_token: int
    groups: tuple[PagedGroup, ...]
    block_bytes: int = 0
    blocks_per_request: int = 0
    fits: bool = True
    mixed_pages: bool = False
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the stable JSON object of ``localkv.paged_plan``."""
        return {
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "tokens": self.tokens,
            "max_concurrency": self.max_concurrency,
            "bytes_per_token": self.bytes_per_token,
            "groups": [
                {
                    "kind": group.kind,
                    "layers": group.layers,
                    "page_bytes": group.page_bytes,
                    "window": group.window,
                }
                for group in self.groups
            ],
        }


def paged_plan(
    config_or_model: ModelShape | Mapping[str, Any] | str | os.PathLike[str],
    kv_memory: int,
    max_model_len: int,
    block_size: int = 16,
    kv_dtype: str = "auto",
    dtype: str = "bfloat16",
    *,
    serving: Serving = CPU,
) -> PagedPlan:
    """Return the paged cache that vLLM makes of ``kv_memory`` bytes.

    ``config_or_model`` is a Hugging Face config, a path to one (or to its folder), or a shape;
    ``max_model_len`` the longest request in tokens; ``block_size`` the tokens per block that are
    asked for. ``dtype`` is the model's type (auto: as the config says); ``kv_dtype`` auto (the
    model's), bfloat16, float16, fp8 and its kin (scales are per tensor and not in the cache), or
    int8_per_token_head and fp8_per_token_head (4 bytes of scale per head for K and for V).

    Raises:
        UsageError: a size that is not positive, or a dtype that is not known.
        ModelError: the configuration cannot be read.
    """
    shape = _shape(config_or_model)
    for name, value in (
        ("kv_memory", kv_memory),
        ("max_model_len", max_model_len),
        ("block_size", block_size),
    ):
        if value < 1:
            raise UsageError(f"{name} is {value}", "give at least 1")
    model_dtype = _model_dtype(shape, dtype)
    pages = layer_pages(shape, block_size, max_model_len, kv_dtype, model_dtype, serving)
    if not pages:
        return PagedPlan(
            block_size, 0, 0, 0.0, 0, (), notes=(f"{shape.name} keeps no KV cache to page",)
        )
    plan = _plan(group_pages(pages), kv_memory, max_model_len, serving)
    return replace(plan, notes=_notes(shape, plan, max_model_len, kv_dtype, serving))


def check_block_size(shape: ModelShape, block_size: int) -> None:
    """Refuse a block size that vLLM refuses wherever it runs.

    The kernels of plain attention take multiples of 16, some of them of 32 or 64 alone. MLA has
    kernels that take any size, and models with recurrent state are given another one. Source:
    get_supported_kernel_block_sizes of the back ends in v1/attention/backends, asked by
    select_common_block_size in v1/worker/utils.py, of vLLM 0.32.

    Raises:
        UsageError: vLLM would not start with it.
    """
    own = shape.mla or any(layer.state_width for layer in shape.layers)
    if block_size % _KERNEL_STEP and not own:
        raise UsageError(
            f"vLLM refuses blocks of {plural(block_size, 'token')}: its attention kernels take "
            f"multiples of {_KERNEL_STEP}",
            "give --block-size 16, 32 or 64",
        )


def _plan(
    groups: list[list[Page]], kv_memory: int, max_model_len: int, serving: Serving
) -> PagedPlan:
    block_bytes = max(sum(page.bytes for page in group) for group in groups)
    num_blocks = kv_memory // block_bytes
    needed = sum(
        group[0].blocks_per_request(max_model_len, serving.max_batched_tokens) for group in groups
    )
    concurrency = num_blocks / needed
    return PagedPlan(
        block_size=min(group[0].block_size for group in groups),
        num_blocks=num_blocks,
        tokens=int(concurrency * max_model_len),
        max_concurrency=concurrency,
        bytes_per_token=sum(page.token_bytes for group in groups for page in group),
        groups=tuple(
            PagedGroup(g[0].shown_kind, len(g), g[0].bytes, g[0].window or None) for g in groups
        ),
        block_bytes=block_bytes,
        blocks_per_request=needed,
        # One block is held back for ever: the null block that freed slots point to.
        fits=kv_memory - block_bytes >= needed * block_bytes,
        mixed_pages=any(page.bytes != group[0].bytes for group in groups for page in group),
    )


def _notes(
    shape: ModelShape, plan: PagedPlan, max_model_len: int, kv_dtype: str, serving: Serving
) -> tuple[str, ...]:
    notes = list(shape.notes)
    if not plan.fits:
        notes.append(
            f"one request of {plural(max_model_len, 'token')} needs "
            f"{plural(plan.blocks_per_request, 'block')} beside the one held back: vLLM refuses "
            "to start"
        )
    if plan.mixed_pages:
        notes.append("layers of one group differ in page size: the first layer's is shown")
    if any(layer.s_width for layer in shape.layers):
        notes.append(f"state-space state in {serving.ssm_dtype}, convolution in the model's type")
    if any(layer.indexer_width for layer in shape.layers):
        notes.append("the sparse attention indexer's own cache is not in this plan")
    if kv_dtype == "int8":
        notes.append("vLLM's int8 is int8_per_token_head: 4 bytes of scale per head, K and V")
    if shape.n_ctx_train and max_model_len > shape.n_ctx_train:
        notes.append(f"vLLM refuses a max_model_len above the model's {shape.n_ctx_train}")
    return tuple(notes)


def _shape(
    config_or_model: ModelShape | Mapping[str, Any] | str | os.PathLike[str],
) -> ModelShape:
    if isinstance(config_or_model, ModelShape):
        return config_or_model
    if isinstance(config_or_model, Mapping):
        return shape_from_hf_config(config_or_model)
    path = os.fspath(config_or_model)
    if path.endswith(".json") or os.path.isfile(os.path.join(path, "config.json")):
        return read_hf_model(path)
    return read_model(path)


def _model_dtype(shape: ModelShape, dtype: str) -> str:
    """Return the model's type; auto runs float32 models in 16 bit, as vLLM does."""
    if dtype != "auto":
        element_bytes(dtype)
        return dtype
    return "float16" if shape.dtype == "f16" else "bfloat16"
