"""What differs between two runs besides their figures: the model, the machine, the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from localkv.analysis.points import dig
from localkv.records import RunInfo
from localkv.units import format_bytes, format_count, plural

NOT_RECORDED = "not recorded"


@dataclass(frozen=True)
class FactChange:
    """A fact that is not the same in both runs; texts may come from a file: escape them."""

    name: str
    before: str
    after: str

    def to_dict(self) -> dict[str, Any]:
        """Return the change as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class _Fact:
    name: str
    path: tuple[str, ...]
    text: Callable[[Any], str] = str


def _size(value: Any) -> str:
    return f"{format_bytes(value)} ({format_count(value)} B)" if isinstance(value, int) else "?"


def _words(value: Any) -> str:
    if not isinstance(value, list | tuple):
        return str(value)
    return ", ".join(sorted(str(each) for each in value)) or "none"


def _devices(value: Any) -> str:
    names = [str(dig(each, "name") or dig(each, "description")) for each in value or ()]
    return ", ".join(names) or "none"


def _features(value: Any) -> str:
    """Return what the engine prints of itself in one order, so that only the features count."""
    told = (word.strip() for word in str(value).replace(" = 1", "").split("|"))
    return ", ".join(sorted(word.split(":")[-1].strip() for word in told if word))


def _layers(value: Any) -> str:
    kinds: dict[str, int] = {}
    for layer in value or ():
        heads = dig(layer, "n_head_kv")
        shown = plural(heads, "KV head") if isinstance(heads, int) else f"{heads} KV heads"
        kind = f"{dig(layer, 'kind')} with {shown}"
        kind += f", window {dig(layer, 'window')}" if dig(layer, "window") else ""
        kinds[kind] = kinds.get(kind, 0) + 1
    return "; ".join(f"{count} {kind}" for kind, count in kinds.items()) or NOT_RECORDED


def _quantisation(value: Any) -> str:
    entries = [each for each in value or () if isinstance(each, list | tuple) and len(each) == 3]
    return ", ".join(f"{count} {name}" for name, count, _ in entries) or NOT_RECORDED


_MODEL = (
    _Fact("name", ("name",)),
    _Fact("architecture", ("architecture",)),
    _Fact("file size", ("file_bytes",), _size),
    _Fact("header SHA-256", ("header_sha256",)),
    _Fact("weights", ("weights_bytes",), _size),
    _Fact("parameters", ("n_params",)),
    _Fact("tensors by type", ("quantisation",), _quantisation),
    _Fact("layers", ("layers",), _layers),
    _Fact("training context", ("n_ctx_train",)),
)

#: What could change a figure, the likeliest first. Load and free memory are left out: they are
#: never the same twice.
_ENVIRONMENT = (
    _Fact("localkv", ("localkv",)),
    _Fact("engine version", ("engine", "version")),
    _Fact("engine commit", ("engine", "commit")),
    _Fact("engine features", ("engine", "system_info"), _features),
    _Fact("engine with GPU support", ("engine", "gpu_offload")),
    _Fact("engine devices", ("engine", "devices"), _devices),
    _Fact("engine heap", ("engine", "heap"), _words),
    _Fact("threads", ("n_threads",)),
    _Fact("processor", ("host", "cpu_model")),
    _Fact("processor features", ("host", "cpu_features"), _words),
    _Fact("usable processors", ("host", "cpus_usable")),
    _Fact("memory", ("memory", "total"), _size),
    _Fact("page size", ("host", "page_size")),
    _Fact("system", ("host", "system")),
    _Fact("kernel", ("host", "kernel")),
    _Fact("machine", ("host", "machine")),
    _Fact("container", ("host", "container")),
    _Fact("GPUs", ("gpu", "devices"), _devices),
    _Fact("GPU driver", ("gpu", "driver")),
    _Fact("CUDA", ("gpu", "cuda")),
    _Fact("python", ("python",)),
    _Fact("platform", ("platform",)),
)
#: The engine's package has a row of its own; plots and tables change no measured figure.
_PACKAGES = ("psutil", "nvidia-ml-py", "numpy")


def model_changes(before: RunInfo, after: RunInfo) -> tuple[FactChange, ...]:
    """Return the facts of the model that differ."""
    return tuple(_changes(_MODEL, before.model, after.model))


def environment_changes(before: RunInfo, after: RunInfo) -> tuple[FactChange, ...]:
    """Return the facts of machine, engine and software that differ."""
    packages = tuple(_Fact(name, ("packages", name)) for name in _PACKAGES)
    old, new = ({"localkv": run.localkv or None, **run.environment} for run in (before, after))
    return tuple(_changes((*_ENVIRONMENT, *packages), old, new))


def _changes(
    facts: tuple[_Fact, ...], before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[FactChange]:
    for fact in facts:
        old, new = (_text(fact, dig(told, *fact.path)) for told in (before, after))
        if old != new:
            yield FactChange(fact.name, old, new)


def _text(fact: _Fact, value: Any) -> str:
    if value is None:
        return NOT_RECORDED
    if isinstance(value, bool):
        return "yes" if value else "no"
    try:
        return fact.text(value)
    except (TypeError, ValueError):
        return str(value)
