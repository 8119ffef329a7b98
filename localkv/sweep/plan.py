"""What to sweep: a plan file and options become points, shuffled by a recorded seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from localkv.errors import UsageError
from localkv.predict.config import RunConfig, plain_fields, validate
from localkv.units import parse_int_values, parse_word_values

DEFAULT_CONTEXTS = (1024, 2048, 4096, 8192)
DEFAULT_SLOTS = (1, 2, 4)
DEFAULT_DEPTHS = (0, 512, 2048, 8192)
# Several hours of the smallest model; more is a slip of the keyboard.
MAX_RUNS = 10_000

#: What measures: the engine in a process of localkv's own, or a server that people run.
BACKENDS = ("llama-cpp-python", "llama-server", "ollama")
#: What a list that the plan leaves empty stands for, where the back end decides nothing else.
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "parallel": DEFAULT_SLOTS,
    "cache_type_k": ("f16",),
    "cache_type_v": ("f16",),
    "batch_size": (2048,),
    "ubatch_size": (512,),
    "gpu_layers": (-1,),
    "flash_attn": ("auto",),
    "kv_unified": (False,),
    "swa_full": (False,),
}


@dataclass(frozen=True)
class SweepPlan:
    """The settings of a sweep; every tuple is a list of values, and the grid is their product.

    An empty list was not asked for: ``DEFAULTS``, or what the back end does by itself.
    ``ctx_size`` are totals over all slots (0: the training context), ``ctx_per_slot`` sizes per
    slot; one of the two is used. ``cache_type`` sets K and V together and, when given, stands for
    both lists. ``speed_depths`` are tokens already in each slot when speed is taken, empty for
    none. ``timeout`` is in seconds for one run of one point. ``backend`` is one of ``BACKENDS``; a
    server is started from ``server_bin`` or found, or the one that runs at ``server_url`` is taken.
    """

    model: str = "demo"
    ctx_size: tuple[int, ...] = ()
    ctx_per_slot: tuple[int, ...] = ()
    parallel: tuple[int, ...] = ()
    cache_type: tuple[str, ...] = ()
    cache_type_k: tuple[str, ...] = ()
    cache_type_v: tuple[str, ...] = ()
    batch_size: tuple[int, ...] = ()
    ubatch_size: tuple[int, ...] = ()
    gpu_layers: tuple[int, ...] = ()
    flash_attn: tuple[str, ...] = ()
    kv_unified: tuple[bool, ...] = ()
    swa_full: tuple[bool, ...] = ()
    n_outputs_max: int | None = None
    threads: int = 0
    repeats: int = 1
    seed: int = 0
    timeout: float = 600.0
    speed_depths: tuple[int, ...] = ()
    title: str = ""
    backend: str = BACKENDS[0]
    server_bin: str = ""
    server_url: str = ""

    def values(self, name: str) -> tuple[Any, ...]:
        """Return the list ``name``, or what it stands for when it is empty."""
        asked: tuple[Any, ...] = getattr(self, name)
        return asked or DEFAULTS[name]

    def cache_types(self) -> list[tuple[str, str]]:
        """Return the pairs of K and V types."""
        if self.cache_type:
            return [(name, name) for name in self.cache_type]
        return list(product(self.values("cache_type_k"), self.values("cache_type_v")))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SweepPlan:
        """Return the plan written by :meth:`to_dict`."""
        return cls(**plain_fields(cls, data))


@dataclass(frozen=True)
class Point:
    """One configuration to measure; ``key`` names it within a run."""

    config: RunConfig
    key: str = field(default="")


def key_of(config: RunConfig) -> str:
    """Return the text that identifies ``config`` among the points of a run."""
    flags = ("u" if config.kv_unified else "") + ("s" if config.swa_full else "")
    return "-".join(
        [
            f"c{config.n_ctx}",
            f"np{config.n_seq_max}",
            f"k_{config.cache_type_k}",
            f"v_{config.cache_type_v}",
            f"fa_{config.flash_attn}",
            f"b{config.n_batch}",
            f"ub{config.n_ubatch}",
            f"ngl{config.n_gpu_layers}",
            f"o{config.n_outputs_max}",
            *([flags] if flags else []),
        ]
    )


def grid(
    plan: SweepPlan,
    n_ctx_train: int,
    *,
    settle: Callable[[RunConfig], RunConfig] = lambda config: config,
) -> list[Point]:
    """Return the points of ``plan``, each once, in the order of the lists.

    ``settle`` returns a configuration as the back end will really run it.

    Raises:
        UsageError: a value that the engine does not take, or more than ``MAX_RUNS`` runs.
    """
    lists = (
        plan.values("parallel"),
        _contexts(plan, n_ctx_train),
        plan.cache_types(),
        *(plan.values(name) for name in _AXES),
    )
    runs = plan.repeats * prod(len(values) for values in lists)
    if runs > MAX_RUNS:
        raise UsageError(
            f"{runs:,} runs are more than the {MAX_RUNS:,} of the largest sweep",
            "use larger steps, fewer lists or fewer repeats",
        )
    points: dict[str, Point] = {}
    for slots, size, (k, v), ubatch, batch, layers, flash, unified, full in product(*lists):
        config = RunConfig(
            n_ctx=size * slots if plan.ctx_per_slot else size,
            n_seq_max=slots,
            n_batch=batch,
            n_ubatch=ubatch,
            kv_unified=unified,
            swa_full=full,
            flash_attn=flash,
            cache_type_k=k,
            cache_type_v=v,
            n_outputs_max=slots if plan.n_outputs_max is None else plan.n_outputs_max,
            n_gpu_layers=layers,
        )
        config = settle(validate(config))
        key = key_of(config)
        points.setdefault(key, Point(config, key))
    return list(points.values())


#: The lists that are one setting each, in the order in which the grid goes through them.
_AXES = ("ubatch_size", "batch_size", "gpu_layers", "flash_attn", "kv_unified", "swa_full")


def _contexts(plan: SweepPlan, n_ctx_train: int) -> Sequence[int]:
    if plan.ctx_size and plan.ctx_per_slot:
        raise UsageError(
            "both a total context and a context per slot were given",
            "use either --ctx-size or --ctx-per-slot",
        )
    if plan.ctx_per_slot:
        if 0 in plan.ctx_per_slot:
            raise UsageError("--ctx-per-slot 0 has no meaning", "give tokens per slot, e.g. 4096")
        return plan.ctx_per_slot
    if plan.ctx_size:
        return tuple(dict.fromkeys(size or n_ctx_train for size in plan.ctx_size))
    within = [size for size in DEFAULT_CONTEXTS if size <= n_ctx_train]
    return within or [n_ctx_train]


def shuffled(points: Sequence[Point], repeats: int, seed: int) -> list[tuple[Point, int]]:
    """Return every (point, repeat) once, shuffled by ``seed``, so that drift looks like noise."""
    pairs = [(point, repeat) for repeat in range(repeats) for point in points]
    random.Random(seed).shuffle(pairs)
    return pairs


# -- plan files ------------------------------------------------------------------------------

_INTS = ("ctx-size", "ctx-per-slot", "parallel", "batch-size", "ubatch-size", "speed-depths")
_WORDS = ("cache-type", "cache-type-k", "cache-type-v", "flash-attn")
_FLAGS = ("kv-unified", "swa-full")
#: Whole numbers and the least that each may be.
_NUMBERS = {"repeats": 1, "seed": 0, "threads": 0, "n-outputs-max": 0}
_TEXTS = ("model", "title", "server-bin", "server-url")


def read_plan(path: Path) -> dict[str, Any]:
    """Return the settings of the plan file at ``path``, ready for ``SweepPlan(**settings)``.

    The file is TOML; its keys are the options of ``localkv sweep`` without the dashes in front. A
    value is one value, a list, or a text with the same ranges as on the command line.

    Raises:
        UsageError: the file cannot be read, is not TOML, or has a key or value it may not have.
    """
    data = _load(path)
    settings: dict[str, Any] = {}
    for key, value in data.items():
        try:
            if key == "speed":
                if _setting("kv-unified", value) == (True,):
                    settings.setdefault("speed_depths", DEFAULT_DEPTHS)
                continue
            settings[key.replace("-", "_")] = _setting(key, value)
        except UsageError as error:
            raise UsageError(f"plan {path.name}: {key}: {error.message}", error.hint) from None
    return settings


def _load(path: Path) -> dict[str, Any]:
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    if path.exists() and not path.is_file():
        raise UsageError(f"plan {path} is not a file", "see sweeps/ for plans")
    try:
        with path.open("rb") as file:
            data: dict[str, Any] = tomllib.load(file)
            return data
    except OSError as error:
        raise UsageError(f"plan {path}: {error.strerror}", "see sweeps/ for plans") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"plan {path} is not TOML: {error}", "see sweeps/ for plans") from None


def _setting(key: str, value: Any) -> Any:
    if key in _INTS:
        return _many(value, parse_int_values, int)
    if key == "gpu-layers":
        return parse_gpu_layers(",".join(str(part) for part in _listed(value)))
    if key in _WORDS:
        return _many(value, parse_word_values, str)
    if key in _FLAGS:
        if all(isinstance(part, bool) for part in _listed(value)):
            return tuple(_listed(value))
        raise UsageError(f"{value!r} is not true or false", "write true, false or [false, true]")
    if key in _NUMBERS:
        if isinstance(value, int) and not isinstance(value, bool) and value >= _NUMBERS[key]:
            return value
        raise UsageError(
            f"{value!r} is not a whole number", f"write a number of {_NUMBERS[key]} or more"
        )
    if key == "timeout":
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and 0 < value < float("inf"):
            return value
        raise UsageError(f"{value!r} is not a time", "write seconds, more than 0")
    if key == "backend":
        if value in BACKENDS:
            return value
        raise UsageError(f"{value!r} is no back end", f"use one of {', '.join(BACKENDS)}")
    if key in _TEXTS:
        if isinstance(value, str):
            return value
        raise UsageError(f"{value!r} is not a text", 'write it in quotes, e.g. "demo"')
    known = ", ".join(
        (*_TEXTS, "backend", *_INTS, "gpu-layers", *_WORDS, *_FLAGS, "speed", "timeout", *_NUMBERS)
    )
    raise UsageError("there is no such setting", f"known settings: {known}")


def _many(value: Any, parse: Any, kind: type) -> tuple[Any, ...]:
    if isinstance(value, str):
        parsed: tuple[Any, ...] = parse(value)
        return parsed
    parts = _listed(value)
    if not all(isinstance(p, kind) and not isinstance(p, bool) for p in parts):
        raise UsageError(f"{value!r} is not a list of values", "write [1, 2] or a text as '1,2'")
    if kind is int and any(part < 0 for part in parts):
        raise UsageError(f"{value!r} has a negative number", "write 0 or more")
    return tuple(dict.fromkeys(parts))


def _listed(value: Any) -> list[Any]:
    if value == []:
        raise UsageError("the list is empty", "name at least one value, or leave the key away")
    return value if isinstance(value, list) else [value]


def parse_gpu_layers(text: str) -> tuple[int, ...]:
    """Return the layers of a list of numbers, ``all`` or ``auto`` (-1: as many as there are).

    Raises:
        UsageError: an entry is none of them.
    """
    return tuple(dict.fromkeys(_layers(word) for word in text.lower().split(",")))


def _layers(text: str) -> int:
    word = text.strip()
    if word in ("all", "auto"):
        return -1
    if word.isascii() and word.isdigit() and len(word) < 10:
        return int(word)
    raise UsageError(f"{text!r} is not a number of layers", "write a number, all or auto")


def merge(settings: Mapping[str, Any], options: Mapping[str, Any]) -> SweepPlan:
    """Return the plan of ``settings`` from a file with ``options`` of the command line on top.

    A context or cache type given on the command line replaces whichever way the file said it.
    """
    merged = dict(settings)
    for group in (("ctx_size", "ctx_per_slot"), ("cache_type", "cache_type_k", "cache_type_v")):
        if any(name in options for name in group):
            for name in group:
                merged.pop(name, None)
    return SweepPlan(**{**merged, **options})
