"""What there is to change in the settings of a run, whatever it may save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from localkv.errors import UsageError
from localkv.gguf.types import cache_type
from localkv.model.shape import ModelShape
from localkv.predict.checks import check, effective_config
from localkv.predict.config import CTX_PAD, RunConfig, effective_context
from localkv.predict.estimate import Estimate
from localkv.predict.flags import NO_LIMITS, Limits
from localkv.predict.server_memory import ServerMemory, server_memory
from localkv.tuples import NamedTuple

#: What a change costs the people who use the model; each step weighs twice the one before.
FREE, CHEAP, DEAR, VERY_DEAR = 1, 2, 4, 8

#: Tokens per physical batch below which prompts are read too slowly to be worth it.
_LEAST_UBATCH = 64
#: Context checkpoints that are enough for a conversation which only goes on.
_FEW_CHECKPOINTS = 4
#: Query heads that share a KV head: in models that have few to share, and in most newer ones.
_FEW, _MOST = 2, 4


class Change(NamedTuple):
    """One change: ``words`` say it, ``settings`` of RunConfig make it, ``price`` is what it costs.

    ``settings`` is None where it takes another model. ``cost`` weighs the price. ``memory`` is
    where it saves, "" for the memory that is short; ``saves_bytes`` are given where they do not
    follow from a prediction: bounds of what a server keeps, under ``limits``. ``ctx_per_slot`` are
    the tokens of a slot afterwards where they change.
    """

    words: str
    settings: Mapping[str, Any] | None
    price: str
    cost: int
    memory: str = ""
    saves_bytes: int = 0
    limits: Limits = NO_LIMITS
    ctx_per_slot: int | None = None


class Situation:
    """What there is now: a model under settings, and what it needs."""

    def __init__(
        self,
        shape: ModelShape,
        config: RunConfig,
        estimate: Estimate,
        program: str,
        limits: Limits,
    ) -> None:
        self.shape = shape
        self.config = config
        self.estimate = estimate
        self.program = program
        self.limits = limits


def single_changes(now: Situation) -> Iterator[Change]:
    """Yield every change that may save memory and that the engine takes."""
    for changes in (
        _context,
        _slots,
        _types,
        _window,
        _unified,
        _ubatch,
        _layers,
        _experts,
        _kv_off,
    ):
        yield from changes(now)
    yield from _server(now)
    yield from _other_model(now)


def _context(now: Situation) -> Iterator[Change]:
    config, shape = now.config, now.shape
    context = effective_context(config, shape.n_ctx_train, causal=shape.causal)
    half = context.n_ctx_seq // 2
    if half < CTX_PAD or not now.estimate.caches:
        return
    half -= half % CTX_PAD
    slots = 1 if config.kv_unified else config.n_seq_max
    shared = " for all slots" if config.kv_unified and config.n_seq_max > 1 else " per slot"
    yield Change(
        f"half the context: {half} tokens{shared if config.n_seq_max > 1 else ''}",
        {"n_ctx": half * slots},
        "shorter conversations",
        DEAR,
        ctx_per_slot=half,
    )


def _slots(now: Situation) -> Iterator[Change]:
    config = now.config
    if config.n_seq_max < 2:
        return
    context = effective_context(config, now.shape.n_ctx_train, causal=now.shape.causal)
    half = config.n_seq_max // 2
    if config.kv_unified:
        total = context.n_ctx * half // config.n_seq_max
        total = max(CTX_PAD, total - total % CTX_PAD)
    else:
        total = context.n_ctx_seq * half
    yield Change(
        f"fewer slots, each as long as now: {half}",
        {"n_seq_max": half, "n_ctx": total},
        "fewer answers at a time, the others wait",
        DEAR,
    )


def _types(now: Situation) -> Iterator[Change]:
    """Return smaller cache types: for K and V, or for K alone where V cannot be quantised."""
    config = now.config
    k, v = cache_type(config.cache_type_k), cache_type(config.cache_type_v)
    for name, price, cost in (
        ("q8_0", "hardly any loss of quality", CHEAP),
        ("q4_0", "answers may get worse: try it on your own prompts", DEAR),
    ):
        target = cache_type(name)
        smaller = [target.block_bytes * t.block < t.block_bytes * target.block for t in (k, v)]
        for new_k, new_v in ((name, name), (name, v.name)):
            if not smaller[0] and not (smaller[1] and new_v == name):
                continue
            settings = {"cache_type_k": new_k, "cache_type_v": new_v}
            if config.flash_attn == "off" and now.shape.flash_attn and new_v == name:
                settings["flash_attn"] = "on"
            if _taken(now, settings):
                which = "KV cache" if new_v == name else "K cache alone"
                needs = ", flash attention on" if "flash_attn" in settings else ""
                yield Change(f"{which} in {name}{needs}", settings, price, cost)
                break


def _taken(now: Situation, settings: Mapping[str, Any]) -> bool:
    """Return whether the engine takes the settings: see ``checks``."""
    try:
        check(now.shape, effective_config(now.shape, now.config.with_(**settings)))
    except UsageError:
        return False
    return True


def _window(now: Situation) -> Iterator[Change]:
    if now.config.swa_full:
        yield Change(
            "sliding layers keep their window only",
            {"swa_full": False},
            "a prompt that shares only its beginning with an older one is read anew",
            CHEAP,
        )


def _unified(now: Situation) -> Iterator[Change]:
    if now.config.n_seq_max > 1 and not now.config.kv_unified:
        yield Change(
            "one cache shared by all slots",
            {"kv_unified": True},
            "a long conversation can take the room of the others; when it is full, all of them end",
            CHEAP,
        )


def _ubatch(now: Situation) -> Iterator[Change]:
    context = effective_context(now.config, now.shape.n_ctx_train, causal=now.shape.causal)
    small = max(_LEAST_UBATCH, context.n_ubatch // 4)
    if small >= context.n_ubatch:
        return
    settings = {"n_ubatch": small}
    if now.program == "ollama":
        settings["n_batch"] = small  # its num_batch is both
    yield Change(f"smaller batches: {small} tokens", settings, "prompts are read slower", CHEAP)


def _offloaded(now: Situation) -> int:
    """Return the layers on GPUs, the output counted as one; 0 without any."""
    if not any(device.total for device in now.estimate.devices[1:]):
        return 0
    every = now.shape.n_layer + 1
    return every if now.config.n_gpu_layers < 0 else min(now.config.n_gpu_layers, every)


def _layers(now: Situation) -> Iterator[Change]:
    every, here = now.shape.n_layer + 1, _offloaded(now)
    if here > 1:
        fewer = here - max(1, here // 4)
        yield Change(
            f"fewer layers on the GPU: {fewer} of {every}",
            {"n_gpu_layers": fewer},
            "answers come slower: the host computes the others",
            DEAR,
        )
    if here < every and (here or now.config.device_free):
        yield Change(
            f"all {every} layers on the GPU",
            {"n_gpu_layers": -1},
            "none but the GPU's memory; answers come faster",
            FREE,
            memory="host",
        )


def _experts(now: Situation) -> Iterator[Change]:
    if _offloaded(now) and any(layer.expert_bytes for layer in now.shape.layers):
        yield Change(
            "expert weights on the host",
            {"n_cpu_moe": -1},
            "answers come slower: the host computes the experts",
            DEAR,
        )


def _kv_off(now: Situation) -> Iterator[Change]:
    if _offloaded(now) and not now.config.no_kv_offload:
        yield Change(
            "KV cache on the host",
            {"no_kv_offload": True},
            "answers come much slower, the more the longer the context",
            VERY_DEAR,
        )


def _server(now: Situation) -> Iterator[Change]:
    """Return what bounds the host memory of llama-server, which Ollama runs too."""
    if now.program not in ("llama-server", "ollama"):
        return
    kept = _kept_by_server(now)
    most = kept.cache_ram
    if most is None:  # then its limit is that of tokens
        most = (kept.entry_bytes or 0) * (kept.conversations_warm or 0)
    yield Change(
        "no prompt cache in host memory",
        {},
        "a conversation that lost its slot to another one is read anew",
        DEAR,
        memory="host",
        saves_bytes=most,
        limits=now.limits._replace(cache_ram=0),
    )
    yield Change(
        f"{_FEW_CHECKPOINTS} context checkpoints per slot",
        {},
        "going back to an early part of a conversation reads more of it anew",
        CHEAP,
        memory="host",
        saves_bytes=_times(kept.checkpoint_bytes, kept.ctx_checkpoints - _FEW_CHECKPOINTS, kept),
        limits=now.limits._replace(ctx_checkpoints=_FEW_CHECKPOINTS),
    )


def _kept_by_server(now: Situation) -> ServerMemory:
    asked = {name: value for name, value in now.limits._asdict().items() if value is not None}
    return server_memory(now.shape, now.config, **asked)


def _times(size: int | None, fewer: int, kept: ServerMemory) -> int:
    return max(0, (size or 0) * fewer * kept.slots)


def _other_model(now: Situation) -> Iterator[Change]:
    """Return a model with fewer KV heads, where this one has many; counted, not predicted."""
    shape = now.shape
    heads = [(x.n_head, x.n_head_kv) for x in shape.trunk if x.n_head and x.n_head_kv]
    if not heads or not now.estimate.kv_bytes or shape.mla:
        return
    n_head, n_head_kv = max(heads)
    fewer = n_head // _MOST
    if n_head > _FEW * n_head_kv or not fewer:
        return
    kept = now.estimate.kv_bytes * fewer // n_head_kv
    yield Change(
        f"a model with fewer KV heads: {fewer} instead of {n_head_kv} for {n_head} heads",
        None,
        f"another model; in most newer ones {_MOST} heads or more share a KV head",
        VERY_DEAR,
        saves_bytes=now.estimate.kv_bytes - kept,
    )
