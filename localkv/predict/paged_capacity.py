"""How many requests vLLM holds at once on GPUs of a given size, from a Hugging Face config.

vLLM takes a share of each GPU, loads the weights, runs one batch to see what activations need, and
makes blocks of what is left (Worker.determine_available_memory in v1/worker/gpu_worker.py). That
run is the one part no header tells: an allowance stands for it, and is named as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from localkv.errors import LocalkvError, UsageError
from localkv.model.shape import ModelShape
from localkv.predict.paged import PagedPlan, Serving, check_block_size, paged_plan
from localkv.predict.search import largest
from localkv.tuples import NamedTuple
from localkv.units import GIB, format_bytes, plural

#: The share of a GPU that vLLM takes: gpu_memory_utilization in vllm/config/cache.py (0.92 since
#: early 2026).
UTILIZATION = 0.9
#: Stands for activations of one batch, CUDA graphs and the driver's context, per GPU.
ALLOWANCE = 2 * GIB
#: Requests that run at once unless --max-num-seqs says otherwise; large GPUs get 1024.
MAX_NUM_SEQS = 256
_FULLER = 0.95
#: Blocks as the kernels of NVIDIA GPUs take them; tokens of one step as `vllm serve` on large GPUs.
GPU = Serving(kernel_block=16, mla_block_size=64, mla_kernel_block=64, max_batched_tokens=8192)


class PagedSetup(NamedTuple):
    """One vLLM: bytes of each GPU, the share taken of it, and what is not for the cache.

    ``weights`` are bytes over all GPUs, ``allowance`` bytes on each.
    """

    sizes: tuple[int, ...]
    weights: int
    utilization: float = UTILIZATION
    allowance: int = ALLOWANCE
    block_size: int = 16
    kv_dtype: str = "auto"
    max_num_seqs: int = MAX_NUM_SEQS

    @property
    def reserved(self) -> int:
        """Return the bytes that vLLM leaves alone."""
        return sum(size - int(size * self.utilization) for size in self.sizes)

    @property
    def kv_memory(self) -> int:
        """Return the bytes left for blocks, over all GPUs; negative where there are none.

        Every GPU holds an equal part, so the smallest counts for all.
        """
        count = len(self.sizes)
        share = int(min(self.sizes) * self.utilization)
        return (share - self.allowance) * count - self.weights


class PagedCapacity(NamedTuple):
    """The answer; ``plan`` is None where nothing is left for blocks.

    ``max_model_len`` is the longest single request that vLLM would start with, 0 for none.
    """

    setup: PagedSetup
    shape: ModelShape
    ctx_per_slot: int
    max_slots: int
    limit: str
    why: str
    plan: PagedPlan | None
    max_model_len: int
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Return whether vLLM starts and holds at least one request."""
        return self.max_slots > 0

    @property
    def blocks_bytes(self) -> int:
        """Return the bytes of all blocks, over all GPUs."""
        return self.plan.num_blocks * self.plan.block_bytes if self.plan else 0

    def parts(self) -> dict[str, int]:
        """Return what the GPUs hold by kind, in bytes, with what vLLM leaves alone."""
        setup = self.setup
        held = {
            "weights": setup.weights,
            "kv": self.blocks_bytes,
            "allowance": setup.allowance * len(setup.sizes),
            "reserve": setup.reserved,
        }
        return {**held, "free": sum(setup.sizes) - sum(held.values())}

    def to_dict(self) -> dict[str, Any]:
        """Return the stable JSON object, without levers and commands."""
        setup = self.setup
        fixed = setup.weights + setup.allowance * len(setup.sizes)
        return {
            "schema": 1,
            "memory_bytes": sum(setup.sizes),
            "reserved_bytes": setup.reserved,
            "ctx_per_slot": self.ctx_per_slot,
            "max_slots": self.max_slots,
            "fits": self.fits,
            "total_bytes_at_max": fixed + self.blocks_bytes if self.fits else None,
            "limit": self.limit,
            "why": self.why,
            "program": "vllm",
            "model": {"name": self.shape.name, "architecture": self.shape.architecture},
            "gpu_memory_utilization": setup.utilization,
            "weights_bytes": setup.weights,
            "allowance_bytes": setup.allowance * len(setup.sizes),
            "kv_memory_bytes": max(0, setup.kv_memory),
            "kv_cache_dtype": setup.kv_dtype,
            "max_model_len": self.max_model_len,
            "paged": {
                **self.plan.to_dict(),
                "block_bytes": self.plan.block_bytes,
                "blocks_per_request": self.plan.blocks_per_request,
            }
            if self.plan
            else None,
            "notes": list(self.notes),
        }


def paged_setup(
    shape: ModelShape, sizes: tuple[int, ...], *, weights: int | None = None, **given: Any
) -> PagedSetup:
    """Return the setup for ``shape`` on GPUs of ``sizes`` bytes.

    Raises:
        UsageError: weights unknown, a share that is none, blocks that vLLM refuses, or heads that
            the GPUs cannot share.
    """
    setup = PagedSetup(sizes, weights or shape.weights_bytes, **given)
    if not setup.weights:
        raise UsageError(
            f"the weights of {shape.name} are unknown: there is a config alone",
            "give their size with --weights, as 16G",
        )
    if not 0 < setup.utilization <= 1:
        raise UsageError(
            f"--gpu-memory-utilization {setup.utilization} is no share", "give 0.9, say"
        )
    if setup.block_size < 1 or setup.max_num_seqs < 1 or setup.allowance < 0:
        raise UsageError("a block size or number of requests below 1", "give at least 1")
    check_block_size(shape, setup.block_size)
    _check_shared(shape, len(sizes))
    return setup


def _check_shared(shape: ModelShape, gpus: int) -> None:
    """Refuse tensor parallelism that keeps the same cache more than once."""
    heads = {layer.n_head_kv for layer in shape.layers if layer.k_width}
    if gpus > 1 and (shape.mla or any(count % gpus for count in heads)):
        what = "the latent cache of MLA" if shape.mla else plural(min(heads), "KV head")
        raise UsageError(
            f"{what} cannot be divided among {gpus} GPUs: each would hold copies",
            "give one GPU, or a number that divides the KV heads",
        )


def paged_capacity(shape: ModelShape, setup: PagedSetup, ctx_per_slot: int) -> PagedCapacity:
    """Return how many requests of ``ctx_per_slot`` tokens vLLM holds at once.

    Raises:
        UsageError: a size that is not positive, or a cache type that is not known.
        LocalkvError: the model keeps nothing to page.
    """
    if ctx_per_slot < 1:
        raise UsageError(f"{ctx_per_slot} tokens per request", "give at least 1, as 8192")
    if not any(layer.k_width or layer.state_width for layer in shape.layers):
        raise LocalkvError(f"{shape.name} keeps no KV cache to page", "nothing limits it but time")
    trained = shape.n_ctx_train
    beyond = bool(trained) and ctx_per_slot > trained
    plan = _plan(shape, setup, trained if beyond else ctx_per_slot)
    slots = min(held(plan), 0 if beyond else setup.max_num_seqs)
    limit, why = "memory", _short(shape, setup, plan, ctx_per_slot)
    if beyond:
        limit = "training context"
        why = f"vLLM refuses requests above the {trained} tokens that the model was trained for"
    elif held(plan) > slots:
        limit = "engine"
        why = f"vLLM runs {plural(slots, 'request')} at once unless --max-num-seqs says more"
    notes = _notes(setup, plan)
    longest = _longest(shape, setup)
    return PagedCapacity(setup, shape, ctx_per_slot, slots, limit, why, plan, longest, notes)


def _short(shape: ModelShape, setup: PagedSetup, plan: PagedPlan | None, ctx_per_slot: int) -> str:
    """Return where the memory ends."""
    if held(plan):
        return "one more does not fit into the blocks"
    why = "not even one request has room for its blocks: vLLM refuses to start"
    if plan is None:
        short = format_bytes(1 - setup.kv_memory)
        why = f"weights and allowance alone take {short} more than the share of the GPUs"
    one = format_bytes(needed_bytes(shape, setup, 1, ctx_per_slot))
    return f"{why}; one request takes GPUs of {one} together"


def _plan(shape: ModelShape, setup: PagedSetup, max_model_len: int) -> PagedPlan | None:
    if setup.kv_memory < 1:
        return None
    return paged_plan(
        shape,
        setup.kv_memory,
        max_model_len,
        setup.block_size,
        setup.kv_dtype,
        "auto",
        serving=GPU,
    )


def held(plan: PagedPlan | None) -> int:
    """Return the whole requests that ``plan`` holds, with the null block set aside."""
    if plan is None or not plan.blocks_per_request:
        return 0
    return max(0, plan.num_blocks - 1) // plan.blocks_per_request


def _longest(shape: ModelShape, setup: PagedSetup) -> int:
    """Return the largest max_model_len with which vLLM starts, up to the training context."""
    if setup.kv_memory < 1:
        return 0

    def margin(tokens: int) -> int:
        plan = _plan(shape, setup, tokens)
        assert plan is not None
        return plan.num_blocks - 1 - plan.blocks_per_request

    return largest(margin, shape.n_ctx_train or 1 << 20)


def needed_bytes(shape: ModelShape, setup: PagedSetup, users: int, ctx_per_slot: int) -> int:
    """Return the bytes of GPU memory, over all, that ``users`` requests at once need.

    Blocks for each of them and the null block, weights and allowance, over the share taken.
    """
    roomy = setup._replace(sizes=(1 << 60,) * len(setup.sizes))
    plan = _plan(shape, roomy, ctx_per_slot)
    assert plan is not None
    blocks = users * plan.blocks_per_request + 1
    fixed = setup.weights + setup.allowance * len(setup.sizes)
    return int((blocks * plan.block_bytes + fixed) / setup.utilization) + len(setup.sizes)


def paged_levers(capacity: PagedCapacity) -> Iterator[dict[str, Any]]:
    """Yield single changes with the requests that they allow, where they allow more."""
    before = _plan(capacity.shape, capacity.setup, capacity.ctx_per_slot)
    for change, flag, price, setup, tokens in _changes(capacity.setup, capacity.ctx_per_slot):
        after = _plan(capacity.shape, setup, tokens)
        slots = min(held(after), setup.max_num_seqs)
        if slots > capacity.max_slots:
            yield {
                "change": change,
                "max_slots": slots,
                "saves_bytes": capacity.max_slots * (_per_request(before) - _per_request(after)),
                "flags": {"vllm": flag},
                "price": price,
            }


def _changes(setup: PagedSetup, context: int) -> Iterator[tuple[str, str, str, PagedSetup, int]]:
    if setup.kv_dtype == "auto":
        yield (
            "KV cache in fp8",
            "--kv-cache-dtype fp8",
            "hardly any loss of quality; needs a GPU that computes in fp8",
            setup._replace(kv_dtype="fp8"),
            context,
        )
    if context > 1:
        half = context // 2
        yield "half the context", f"--max-model-len {half}", "shorter requests", setup, half
    if setup.utilization < _FULLER:
        yield (
            f"{_FULLER:.0%} of each GPU instead of {setup.utilization:.0%}",
            f"--gpu-memory-utilization {_FULLER}",
            "less room for anything else on the GPU",
            setup._replace(utilization=_FULLER),
            context,
        )


def _per_request(plan: PagedPlan | None) -> int:
    return plan.blocks_per_request * plan.block_bytes if plan else 0


def _notes(setup: PagedSetup, plan: PagedPlan | None) -> tuple[str, ...]:
    notes = [
        f"{format_bytes(setup.allowance)} per GPU stand for activations, CUDA graphs and the "
        "driver: vLLM measures them when it starts (--allowance)"
    ]
    return (*notes, *(plan.notes if plan else ()))
