"""The engine's own plan: what it would allocate, asked in a child process, no buffer allocated.

A header can make the engine abort rather than refuse, so it is never asked in this process.
One loaded model answers a whole grid of configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localkv.engines.channel import Child, Exit
from localkv.errors import EngineError, ModelError
from localkv.gguf.find import is_url
from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig

_WORKER = "localkv.engines.dryrun_worker"
_TIMEOUT_S = 120.0
#: A child answers this many: within the time limit, and often enough for a progress line.
_AT_ONCE = 500
#: Every context builds its graphs in megabytes of fresh memory. glibc would map and unmap them each
#: time, and clearing those pages takes a fifth of a dry run; other C libraries ignore this.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "1000000000", "MALLOC_TRIM_THRESHOLD_": "1000000000"}


@dataclass(frozen=True)
class DryRun:
    """The engine's plans, in the order asked, and what engine it was (``EngineInfo`` as a dict)."""

    info: dict[str, Any]
    plans: tuple[Plan, ...]


@dataclass(frozen=True)
class Plan:
    """The engine's answer to one configuration: ``engine`` as ``EngineLog.to_dict``, or why not.

    ``refused`` is the engine's message when it would not create this context, or how it died.
    ``died`` tells the second: it crashed or hung, and said nothing about the settings.
    """

    engine: dict[str, Any] | None
    refused: str | None = None
    died: bool = False


def dry_run(
    path: Path,
    configs: Sequence[RunConfig],
    *,
    header_only: bool = True,
    timeout: float = _TIMEOUT_S,
    jobs: int = 1,
    told: Callable[[int], None] = lambda _: None,
) -> DryRun:
    """Return the engine's plan for each of ``configs``, in order, over the model at ``path``.

    ``header_only`` needs nothing but the file's header; pass False for a set of shards, whose
    files must then all be there. The settings that concern the model itself (GPU layers, split)
    are taken from the first configuration. ``jobs`` children share the grid, each with a load of
    its own. ``told`` hears, now and then, how many more have been answered. ``timeout`` is in
    seconds for some hundreds of them.

    Raises:
        EngineError: the engine is not installed, or cannot load this model at all.
    """

    def part(configs: Sequence[RunConfig]) -> DryRun:
        return _in_turn(path, configs, told, header_only=header_only, timeout=timeout)

    size = -(-len(configs) // jobs)
    if size == len(configs):
        return part(configs)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(jobs) as pool:
        parts = pool.map(part, (configs[at : at + size] for at in range(0, len(configs), size)))
        found = list(parts)
    return DryRun(found[0].info, tuple(plan for each in found for plan in each.plans))


def dry_run_model(shape: ModelShape, configs: Sequence[RunConfig], *, jobs: int = 1) -> DryRun:
    """Return the plans for a model that was read, as :func:`dry_run`.

    The header of a model behind a URL is fetched into a file for as long as it takes.

    Raises:
        EngineError: the engine is not installed, or cannot load this model at all.
        ModelError: the header cannot be fetched, or the model is a set of shards on a server.
    """
    shards = len(shape.paths) > 1
    if not is_url(shape.path):
        return dry_run(Path(shape.path), configs, header_only=not shards, jobs=jobs)
    if shards:
        raise ModelError(
            "the engine plans for a set of shards only where all files are on this machine",
            "download them, or leave --engine and --check out",
        )
    from tempfile import TemporaryDirectory

    from localkv.gguf.remote import read_remote

    with TemporaryDirectory(prefix="localkv-") as folder:
        path = Path(folder, "header.gguf")
        path.write_bytes(read_remote(shape.path)[0].data)
        return dry_run(path, configs, jobs=jobs)


def _in_turn(
    path: Path,
    configs: Sequence[RunConfig],
    told: Callable[[int], None],
    *,
    header_only: bool,
    timeout: float,
) -> DryRun:
    plans: list[Plan] = []
    info: dict[str, Any] = {}
    while len(plans) < len(configs):
        rest = configs[len(plans) : len(plans) + _AT_ONCE]
        found, answered, end = _ask(path, rest, header_only=header_only, timeout=timeout)
        info = info or found
        plans += answered
        if len(answered) < len(rest):
            # The child died on this one; the others still get their answer from a fresh child.
            plans.append(Plan(None, _death(end), died=True))
        told(len(answered))
    return DryRun(info, tuple(plans))


def _ask(
    path: Path, configs: Sequence[RunConfig], *, header_only: bool, timeout: float
) -> tuple[dict[str, Any], list[Plan], Exit]:
    job = {
        "path": str(path),
        "configs": [config.to_dict() for config in configs],
        "header_only": header_only,
    }
    plans: list[Plan] = []
    info: dict[str, Any] = {}
    with Child(_WORKER, job, env=_KEEP_MEMORY) as child:
        for message in child.messages(timeout=timeout):
            if "error" in message:
                raise EngineError(
                    f"the engine gave no plan: {message['error']}",
                    message.get("hint") or "the model may need another engine version",
                )
            if "info" in message:
                info = message["info"]
                continue
            plans.append(Plan(message.get("engine"), message.get("refused")))
        end = child.finish()
    return info, plans, end


def _death(end: Exit) -> str:
    if end.timed_out:
        return "the engine did not answer in time"
    how = end.signal_name or f"exit code {end.code}"
    said = end.stderr_tail[-1] if end.stderr_tail else "it said nothing"
    return f"the engine died ({how}): {said}"
