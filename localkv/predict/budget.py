"""A budget of memory, and what one model takes of it under settings that only differ in size.

One memory is a pool that holds everything: weights, caches, buffers; a machine's RAM, or unified
memory. Several, or one with layers offloaded, are GPUs: each holds what the engine places on it,
and the host's part is told beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localkv.errors import LocalkvError, UsageError
from localkv.model.shape import ModelShape
from localkv.predict.checks import check, effective_config
from localkv.predict.config import MAX_SEQ, RunConfig, effective_context
from localkv.predict.defaults import OLLAMA_SINGLE, run_config
from localkv.predict.devices import device_estimates, place
from localkv.predict.estimate import ComputeEstimate, DeviceEstimate, Estimate
from localkv.predict.kv import output_bytes, recurrent_state, sized_caches
from localkv.predict.predict import checked_settings, device_needs, estimate, predict
from localkv.tuples import NamedTuple
from localkv.units import parse_size

POOL = "all"
Memory = int | str | Sequence[int | str]

_NO_COMPUTE = ComputeEstimate(0, "formula", 0, 0)
#: Settings that follow from the number of slots and their size.
_SIZES = ("n_ctx", "n_seq_max", "n_outputs_max")
#: The engine's n_ctx is an uint32_t, and rounding up to 256 must not overflow it.
_MOST_TOKENS = (1 << 32) - (1 << 16)


class Budget(NamedTuple):
    """Bytes by name: "all" for a pool, or gpu0, gpu1, ...; ``reserved`` of each are kept free."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    reserved: int = 0

    @property
    def on_gpus(self) -> bool:
        """Return whether the budget is that of GPUs, with the host beside them."""
        return self.names != (POOL,)

    def used(self, devices: Sequence[DeviceEstimate]) -> tuple[int, ...]:
        """Return what ``devices`` hold of each memory, in bytes."""
        if not self.on_gpus:
            return (sum(device.total for device in devices),)
        held = {device.name: device.total for device in devices}
        return tuple(held.get(name, 0) for name in self.names)

    def margin(self, devices: Sequence[DeviceEstimate]) -> int:
        """Return the bytes left over where the least is; negative where it does not fit."""
        return min(
            size - self.reserved - used
            for size, used in zip(self.sizes, self.used(devices), strict=True)
        )


def memory_sizes(memory: Memory) -> tuple[int, ...]:
    """Return the bytes of each memory; a text may list several, as ``24G,24G``.

    Raises:
        UsageError: a text that is no size, or a size that is not positive.
    """
    entries = memory.split(",") if isinstance(memory, str) else memory
    if isinstance(entries, int):
        entries = (entries,)
    sizes = tuple(parse_size(size) if isinstance(size, str) else int(size) for size in entries)
    if not sizes or min(sizes) < 1:
        raise UsageError("a memory of no bytes", "give a size such as 24G")
    return sizes


def budget(memory: Memory, reserve: int, config: RunConfig) -> Budget:
    """Return the budget that ``memory`` is for a run with ``config``.

    Raises:
        UsageError: no size, or a reserve below zero.
    """
    if reserve < 0:
        raise UsageError("the reserve is negative", "give 0 or more bytes")
    sizes = memory_sizes(memory)
    if config.n_gpu_layers and config.n_devices:
        return Budget(tuple(f"gpu{index}" for index in range(len(sizes))), sizes, reserve)
    return Budget((POOL,), sizes, reserve)


def is_several(memory: Memory) -> bool:
    """Return whether ``memory`` is a list of devices rather than one size."""
    return "," in memory if isinstance(memory, str) else not isinstance(memory, int)


class Planner:
    """One model, one program and one budget: what a number of slots of a size takes of it.

    ``config`` holds the settings that do not depend on the slots, ``settings`` single ones over
    it; without it the program's defaults fill in. ``engine`` asks the engine's dry run instead of
    the formula.

    Raises:
        UsageError: a setting that does not exist, or devices that the settings contradict.
        LocalkvError: no rule for the model's architecture, and the engine was not asked.
    """

    def __init__(
        self,
        shape: ModelShape,
        memory: Memory,
        *,
        reserve: int = 0,
        program: str = "llama-server",
        config: RunConfig | None = None,
        engine: bool = False,
        **settings: Any,
    ) -> None:
        self.shape = shape
        self.program = program
        self._engine = engine
        self._outputs = _fixed_outputs(config)
        self._asked = _asked(config, checked_settings(settings))
        self._place_on_devices(memory)
        self.budget = budget(memory, reserve, self.config(1, 256))
        self._known: dict[RunConfig, Estimate] = {}
        _refuse_unknown(shape, engine=engine, on_gpus=self.budget.on_gpus)

    def _place_on_devices(self, memory: Memory) -> None:
        """Put every layer on the GPUs of a list, split by their memory, unless told otherwise."""
        layers = self._asked.get("n_gpu_layers")
        sizes = memory_sizes(memory)
        if is_several(memory):
            if layers == 0:
                raise UsageError(
                    f"{len(sizes)} memories of GPUs, but no layer on them", "leave -ngl out"
                )
            self._asked.setdefault("n_gpu_layers", -1)
            self._asked["n_devices"] = len(sizes)
        elif layers:
            self._asked["n_devices"] = 1
        if self._asked.get("n_gpu_layers") and not self._asked.get("tensor_split"):
            self._asked.setdefault("device_free", sizes)

    def changed(self, **settings: Any) -> Planner:
        """Return the same question with other ``settings``, for the same budget."""
        other = object.__new__(Planner)
        other.__dict__.update(self.__dict__)
        other._asked = {**self._asked, **settings}
        return other

    def config(self, slots: int, ctx_per_slot: int) -> RunConfig:
        """Return the settings of ``slots`` slots of ``ctx_per_slot`` tokens each."""
        n_ctx = ctx_per_slot if self.program == "ollama" else ctx_per_slot * slots
        config = run_config(
            self.program, self.shape, **{"n_ctx": n_ctx, "n_seq_max": slots, **self._asked}
        )
        return config if self._outputs is None else config.with_(n_outputs_max=self._outputs)

    def engine_slots(self, ctx_per_slot: int) -> tuple[int, str]:
        """Return the most slots that the program takes, and why no more."""
        if self.program == "llama-cpp-python":
            return 1, "llama-cpp-python's class Llama has one slot"
        if self.program == "ollama":
            if self.shape.architecture in OLLAMA_SINGLE:
                return 1, f"Ollama runs {self.shape.architecture} with one request at a time"
            if not self.shape.causal or not _keeps_anything(self.shape):
                return 1, "Ollama runs embedding models with one request at a time"
        by_tokens = _MOST_TOKENS // max(1, self.config(1, ctx_per_slot).n_ctx)
        if by_tokens < MAX_SEQ:
            return by_tokens, "the engine counts tokens over all slots in 32 bits"
        return MAX_SEQ, f"the engine takes {MAX_SEQ} slots at most (LLAMA_MAX_SEQ)"

    @property
    def formula(self) -> bool:
        """Return whether the figures are the formula's own, not the engine's."""
        return not self._engine

    def batch_rows(self, slots: int, ctx_per_slot: int) -> int:
        """Return the tokens of the worst batch: a multiple of the slots (``Setting.rows``)."""
        config = self.config(slots, ctx_per_slot)
        context = effective_context(config, self.shape.n_ctx_train, causal=self.shape.causal)
        return -(-min(context.n_ctx, context.n_ubatch) // slots) * slots

    def estimate(self, slots: int, ctx_per_slot: int) -> Estimate:
        """Return what ``slots`` slots of ``ctx_per_slot`` tokens each need."""
        config = self.config(slots, ctx_per_slot)
        found = self._known.get(config)
        if found is None:
            ask = _ask_engine if self._engine else estimate
            found = self._known[config] = ask(self.shape, config)
        return found

    def devices(self, slots: int, ctx_per_slot: int) -> tuple[DeviceEstimate, ...]:
        """Return what each device then holds; by the formula without the rest of an estimate."""
        if self._engine:
            return self.estimate(slots, ctx_per_slot).devices
        return device_needs(self.shape, self.config(slots, ctx_per_slot))

    def margin(self, slots: int, ctx_per_slot: int) -> int:
        """Return the bytes left over; negative where it does not fit."""
        return self.budget.margin(self.devices(slots, ctx_per_slot))

    def floor_margin(self, slots: int, ctx_per_slot: int) -> int:
        """Return :meth:`margin` without compute buffers: cheap, and never rising with the slots."""
        return self.budget.margin(_without_compute(self.shape, self.config(slots, ctx_per_slot)))


def _keeps_anything(shape: ModelShape) -> bool:
    """Return whether the model keeps a cache or a state for the tokens it has seen."""
    return bool(shape.caches) or any(layer.state_width for layer in shape.layers)


def _asked(config: RunConfig | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that stay the same for any number of slots."""
    for name in ("n_ctx", "n_seq_max"):
        if name in settings:
            raise UsageError(f"{name} is what is asked for", "give ctx_per_slot alone")
    given = {name: value for name, value in settings.items() if value is not None}
    if config is None:
        return given
    kept = {name: value for name, value in config._asdict().items() if name not in _SIZES}
    if not kept["n_gpu_layers"]:
        del kept["n_gpu_layers"]
    if kept["device_free"] is None:
        del kept["device_free"]
    return {**kept, **given}


def _fixed_outputs(config: RunConfig | None) -> int | None:
    """Return n_outputs_max where ``config`` fixes it; None where it follows the slots."""
    if config is None or config.n_outputs_max == config.n_seq_max:
        return None
    return config.n_outputs_max


def _refuse_unknown(shape: ModelShape, *, engine: bool, on_gpus: bool) -> None:
    if shape.path.endswith(".json") and not shape.weights_bytes:
        raise UsageError(
            f"the weights of {shape.name} are unknown: there is a config alone",
            "plan it as vLLM does: localkv capacity --config, with --weights",
        )
    if shape.rule == "exact":
        return
    if not engine:
        raise LocalkvError(
            f"localkv has no rule for the architecture {shape.architecture}, so its cache is "
            "unknown",
            "ask the engine itself (--engine, or engine=True)",
        )
    if on_gpus:
        raise LocalkvError(
            f"localkv has no rule for the architecture {shape.architecture}, and the engine's "
            "plan does not say on which device a cache lies",
            "give the memory of everything together, without -ngl",
        )


def _ask_engine(shape: ModelShape, config: RunConfig) -> Estimate:
    return predict(shape, config, engine=True)


def _without_compute(shape: ModelShape, asked: RunConfig) -> tuple[DeviceEstimate, ...]:
    config = effective_config(shape, asked)
    check(shape, config)
    context = effective_context(config, shape.n_ctx_train, causal=shape.causal)
    return device_estimates(
        shape,
        config,
        place(shape, config),
        sized_caches(shape.caches, shape.window, config, context),
        tuple(recurrent_state(shape, config)),
        _NO_COMPUTE,
        output_bytes(shape, config),
    )
