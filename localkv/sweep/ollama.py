"""Points measured in Ollama: one that localkv starts with a store of its own, or a running one.

A running one is left as it was: what is loaded for somebody else stays, a model imported for the
sweep is removed, whatever ends it, and the server is never restarted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from localkv.engines import ollama
from localkv.engines.ollama import Ollama
from localkv.engines.ollama_host import ollama_command
from localkv.engines.ollama_program import PROGRAM, find_program, program_version
from localkv.errors import UsageError
from localkv.gguf.find import GgufModel, Progress, open_model
from localkv.gguf.ollama_store import PREFIX
from localkv.http import ServerError
from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig, effective_context
from localkv.predict.estimate import Estimate
from localkv.predict.ollama_plan import HEADROOM, Gpu, believed_kv
from localkv.probes import available_memory
from localkv.probes.listening import command_line, environment
from localkv.probes.runner import ollama_runners
from localkv.records import PointRecord
from localkv.sweep.decode import decoded_per_slot
from localkv.sweep.heap import STEADY_GO_HEAP
from localkv.sweep.llama_server import process_of
from localkv.sweep.measure import Job
from localkv.sweep.ollama_settings import (
    Serve,
    foretold_size,
    has_engine_inside,
    ollama_points,
    options_of,
    refused_by,
    serve_settings,
)
from localkv.sweep.plan import Point, SweepPlan
from localkv.sweep.served import (
    Measure,
    ServedPoint,
    WouldDisturbError,
    at_once,
    measured,
    wait_until_gone,
)
from localkv.units import format_bytes, plural

#: What the imported model is called in a store of localkv's own.
_NAME = "localkv-sweep"
_TAIL = 200
#: A word that is one token in most vocabularies.
_WORD = " the"


class OllamaBackend:
    """Ollama, started or attached; ``gpus`` are those that it would use."""

    def __init__(self, plan: SweepPlan, gpus: Sequence[Gpu]) -> None:
        """Find the program, or ask the server that runs.

        Raises:
            EngineError: there is neither.
        """
        self._plan = plan
        self._gpus = tuple(gpus)
        self._running: Ollama | None = None
        self._pid: int | None = None
        self._program: str | None = None
        self._serve: Serve | None = None
        if plan.server_url:
            self._attach(plan.server_url)
        else:
            program = find_program(plan.server_bin or None)
            self._program = program
            self._version = program_version(program)
        self._engine_inside = has_engine_inside(self._version, self._program)
        own = self._running is None
        self._heap = STEADY_GO_HEAP if self._engine_inside and own else {}

    def _attach(self, url: str) -> None:
        self._running = ollama.attached(url)
        self._version = self._running.version
        self._pid = process_of(self._running.url)
        words = command_line(self._pid) if self._pid else []
        self._program = words[0] if words else None
        variables = environment(self._pid) if self._pid else {}
        self._serve = serve_settings(variables, len(self._gpus))

    def facts(self) -> dict[str, Any]:
        """Return what the environment record says of the engine."""
        told = {
            "program": PROGRAM,
            "version": self._version,
            "attached": self._running is not None,
            "runner": "Ollama's own process" if self._engine_inside else "llama-server",
        }
        heap = [f"{name}={value}" for name, value in self._heap.items()]
        return {**told, "heap": heap} if heap else told

    def model(self, progress: Progress | None) -> GgufModel:
        """Return the model of the plan: a name in the running Ollama, or a file to import.

        Raises:
            ModelError: its file cannot be found or read here.
            UsageError: it is kept in several files.
        """
        named = self._named
        path = self._running.model_file(named) if self._running and named else None
        if path is not None and Path(path).is_file():
            return open_model(path, need_data=True)
        model = open_model(self._plan.model, need_data=True, progress=progress)
        if len(model.files.paths) > 1:
            raise UsageError(
                "Ollama imports a model from one file, not from shards", "join them first"
            )
        return model

    @property
    def _named(self) -> str | None:
        """Return the name in the running Ollama that the plan's model is, None for a file."""
        model = self._plan.model
        if self._running is None or not model.startswith(PREFIX):
            return None
        return model.removeprefix(PREFIX)

    def points(self, shape: ModelShape) -> list[Point]:
        """Return the points of the plan; of a running server, by default with its own slots."""
        plan = self._plan
        if self._serve is not None:
            own = self._serve
            if not plan.parallel:
                plan = replace(plan, parallel=(own.num_parallel,))
            if not (plan.cache_type or plan.cache_type_k or plan.cache_type_v):
                plan = replace(plan, cache_type=(own.cache_type,))
            if not plan.flash_attn:
                plan = replace(plan, flash_attn=(own.flash_attn,))
        return ollama_points(plan, shape, self._gpus, engine_inside=self._engine_inside)

    def refusal(self, config: RunConfig) -> str | None:
        """Return why this Ollama cannot be measured with ``config``."""
        return refused_by(self._serve, config) if self._serve else None

    def notes(self) -> list[str]:
        """Return what a killed localkv left in the running Ollama, and what removes it.

        It is not removed here: another localkv may be measuring it.

        Raises:
            ServerError: the running Ollama does not say which models it has.
        """
        left = self._running.temporary_models() if self._running else []
        if not left:
            return []
        assert self._running is not None
        remove = ollama_command(self._running.url, "rm", *left)
        return [
            f"this Ollama holds {plural(len(left), 'model')} of a localkv that was killed, or is "
            f"measuring now; if none is, remove what is left with: {remove}"
        ]

    @contextmanager
    def measuring(self, folder: Path, shape: ModelShape) -> Iterator[Measure]:
        """Give what measures a point; in the end nothing that it started or imported is left.

        Raises:
            ServerError: a running Ollama refuses the model.
        """
        with ExitStack() as stack:
            serve: _OwnServe | Attached
            if self._running is None:
                store = stack.enter_context(
                    tempfile.TemporaryDirectory(dir=folder, prefix=".server-")
                )
                serve = stack.enter_context(_OwnServe(self._program, Path(store), self._heap))
            else:
                serve = stack.enter_context(
                    Attached(self._running, self._pid, self._serve, self._named)
                )

            def measure(job: Job, gpu: Any, on_phase: Callable[[str], None]) -> PointRecord:
                point = ServedPoint(job, gpu, on_phase, PROGRAM)
                return measured(point, partial(self._run, serve, shape))

            yield measure

    def foretold(self, shape: ModelShape, estimate: Estimate, config: RunConfig) -> dict[str, Any]:
        """Return what /api/ps should show for ``config``."""
        size, why = foretold_size(shape, estimate, config, engine_inside=self._engine_inside)
        return {"ps_predicted": size, "ps_why": why or None}

    def _run(self, serve: _OwnServe | Attached, shape: ModelShape, point: ServedPoint) -> None:
        config = point.config
        with point.timed("serve"):
            server, pid, name = serve.ready(config, point.job.path)
        point.server |= {"version": self._version, "attached": self._running is not None}
        loaded = _Loaded(point, server, pid, serve.why)
        serve.refuse_to_disturb(shape, config)
        loaded.phase("baseline")
        options = options_of(config, self._plan)
        with _unloaded(server, name, point):
            with point.timed("load"):
                entry = server.load(name, options=options, timeout=point.seconds_left())
            loaded.find()
            loaded.phase("context")
            point.log = server.engine_log()
            point.server |= _said(entry)
            _decode(point, server, name, options, shape)
            loaded.phase("decode")
        loaded.phase("closed")


@contextmanager
def _unloaded(server: Ollama, name: str, point: ServedPoint) -> Iterator[None]:
    """Unload ``name`` in the end, whatever happens; what is in a log of ours is kept."""
    try:
        yield
    except BaseException:
        if server.serving is None:
            # What was refused is still loaded for somebody else.
            if server.is_ours(name):
                server.unload(name)
        else:
            # It ends with the sweep anyway, and may be dead: the first reason counts.
            point.log_tail = server.serving.lines()[-_TAIL:]
            with suppress(ServerError):
                server.unload(name)
        raise
    server.unload(name)


class _OwnServe:
    """An ``ollama serve`` that is started again when a point needs other settings."""

    why = ""

    def __init__(self, program: str | None, folder: Path, env: Mapping[str, str]) -> None:
        self._program = program
        self._folder = folder
        self._env = env
        self._stack = ExitStack()
        self._settings: tuple[object, ...] = ()
        self._server: Ollama | None = None
        self._imported = False

    def __enter__(self) -> _OwnServe:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ready(self, config: RunConfig, model: Path) -> tuple[Ollama, int | None, str]:
        """Return the server for ``config``, its process, and the model's name in it."""
        settings = (config.n_seq_max, config.cache_type_k, config.flash_attn)
        if self._server is None or settings != self._settings:
            self._stack.close()
            self._server = self._stack.enter_context(
                ollama.started(
                    self._folder,
                    program=self._program,
                    num_parallel=config.n_seq_max,
                    cache_type=config.cache_type_k,
                    flash_attn=config.flash_attn,
                    env=self._env,
                )
            )
            self._settings = settings
        if not self._imported:
            self._server.import_model(model, _NAME)
            self._imported = True
        return self._server, self._server.pid, _NAME

    def refuse_to_disturb(self, shape: ModelShape, config: RunConfig) -> None:
        """Do nothing: nobody else uses it."""


class Attached:
    """A running Ollama with the model in it: under its own name, or under a temporary one."""

    def __init__(
        self, server: Ollama, pid: int | None, serve: Serve | None, named: str | None
    ) -> None:
        self._server = server
        self._pid = pid
        self._serve = serve
        self._named = named
        self._stack = ExitStack()
        self.why = "" if pid else "the server is another machine's or another user's"

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ready(self, config: RunConfig, model: Path) -> tuple[Ollama, int | None, str]:
        """Return the server, its process, and the model's name in it."""
        if self._named is None:
            self._named = self._stack.enter_context(self._server.temporary_model(model))
        return self._server, self._pid, self._named

    def refuse_to_disturb(self, shape: ModelShape, config: RunConfig) -> None:
        """Raise when loading the model would put out another one that is loaded.

        Source: server/sched.go, as :mod:`localkv.predict.ollama_plan` has it.
        """
        others = [str(model.get("name")) for model in self._server.loaded()]
        if not others:
            return
        assert self._serve is not None
        named = ", ".join(others)
        if len(others) >= self._serve.max_loaded:
            raise WouldDisturbError(
                f"the running Ollama holds as many models as it may ({self._serve.max_loaded}): "
                f"loading another would put out one of {named}",
                f"run: ollama stop {others[0]}",
            )
        believed = shape.file_bytes + believed_kv(shape, config.n_ctx)
        free = available_memory().value
        if free is not None and believed > free * HEADROOM // 100:
            raise WouldDisturbError(
                f"Ollama would expect {format_bytes(believed)} of {format_bytes(free)} free and "
                f"put out {named}",
                f"run: ollama stop {others[0]}",
            )


class _Loaded:
    """The process that holds the point's model, told from those of other models."""

    def __init__(self, point: ServedPoint, server: Ollama, serve: int | None, why: str) -> None:
        self._point = point
        self._server = server
        self._serve = serve
        self._why = why
        self._before = set(ollama_runners(serve)) if serve else set()
        self._runner: int | None = None

    def find(self) -> None:
        """Look for the process that has appeared."""
        new = sorted(set(ollama_runners(self._serve)) - self._before) if self._serve else []
        self._runner = new[-1] if new else None
        if not new and not self._why:
            self._why = "no process of the model was found among the server's descendants"

    def phase(self, name: str) -> None:
        """Read the memory of the model's process, and of the server itself."""
        if name == "closed" and self._runner and wait_until_gone(self._runner):
            self._runner = None
        self._point.phase(name, self._runner, self._why, serve=self._serve)


def _said(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what /api/ps says of the loaded model."""
    keys = {"size": "ps_bytes", "size_vram": "ps_vram_bytes", "context_length": "context_length"}
    return {name: value for key, name in keys.items() if isinstance(value := entry.get(key), int)}


def _decode(
    point: ServedPoint, server: Ollama, name: str, options: dict[str, int], shape: ModelShape
) -> None:
    """Let every slot read a prompt of about one ubatch, all at the same time: Ollama takes text."""
    context = effective_context(point.config, shape.n_ctx_train, causal=shape.causal)
    count = decoded_per_slot(context.n_ubatch, context.n_ctx_seq)
    left = point.seconds_left()

    def ask(slot: int) -> int | None:
        # Each begins with another word, so that no prompt is the beginning of another's.
        return server.read_prompt(
            name, f" {slot}" + _WORD * (count - 2), options=options, timeout=left
        )

    with point.timed("decode"):
        asks = [partial(ask, slot) for slot in range(point.config.n_seq_max)]
        point.server["read_tokens"] = at_once(asks, left)
