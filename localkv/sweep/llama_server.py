"""Points measured in llama-server: one started for each point, or the one that runs at a URL."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from localkv.engines import llama_server
from localkv.engines.llama_server import PROGRAM, LlamaServer
from localkv.errors import UsageError
from localkv.gguf.find import GgufModel, Progress, open_model
from localkv.http import Client
from localkv.model.shape import ModelShape
from localkv.observe.command_line import is_unified, server_settings
from localkv.predict.config import RunConfig, effective_context
from localkv.predict.defaults import run_config
from localkv.predict.estimate import Estimate
from localkv.predict.flags import Limits
from localkv.probes.listening import command_line, environment, listener
from localkv.records import PointRecord
from localkv.sweep.decode import decoded_per_slot, token_at
from localkv.sweep.measure import Job
from localkv.sweep.plan import Point, SweepPlan, grid
from localkv.sweep.served import Measure, ServedPoint, at_once, measured, wait_until_gone

#: The prompt cache and the checkpoints are host memory beside the model: ``predict --server``
#: counts them, and here they would hide what is measured.
_LIMITS = Limits(cache_ram=0, ctx_checkpoints=0)
#: Setting of a plan -> the field of the configuration that it asks for.
_ASKED = {
    "parallel": "n_seq_max",
    "cache_type": "cache_type_k",
    "cache_type_k": "cache_type_k",
    "cache_type_v": "cache_type_v",
    "batch_size": "n_batch",
    "ubatch_size": "n_ubatch",
    "gpu_layers": "n_gpu_layers",
    "flash_attn": "flash_attn",
    "kv_unified": "kv_unified",
    "swa_full": "swa_full",
}


class _LlamaServer:
    """What a started and an attached llama-server have in common as a back end."""

    def refusal(self, config: RunConfig) -> str | None:
        """Return why this back end cannot measure ``config``; it measures every point it has."""
        return None

    def notes(self) -> list[str]:
        """Return nothing: a llama-server is one model, of which nothing is left."""
        return []

    def foretold(self, shape: ModelShape, estimate: Estimate, config: RunConfig) -> dict[str, Any]:
        """Return nothing: what it says is in its log."""
        return {}


class StartedLlamaServer(_LlamaServer):
    """A llama-server of its own for each point, with exactly the point's flags."""

    def __init__(self, plan: SweepPlan, n_gpus: int, n_threads: int) -> None:
        """Find the program.

        Raises:
            EngineError: there is none.
        """
        self._plan = plan
        self._n_gpus = n_gpus
        self._n_threads = n_threads
        self._program = llama_server.find_server(plan.server_bin or None)

    def facts(self) -> dict[str, Any]:
        """Return what the environment record says of the engine."""
        package = len(self._program) > 1
        return {"program": llama_server.PACKAGE if package else PROGRAM, "attached": False}

    def model(self, progress: Progress | None) -> GgufModel:
        """Return the model of the plan."""
        return open_model(self._plan.model, need_data=True, progress=progress)

    def points(self, shape: ModelShape) -> list[Point]:
        """Return the points of the plan; without a GPU all layers are on the host."""
        return grid(self._plan, shape.n_ctx_train, settle=self._settle)

    def _settle(self, config: RunConfig) -> RunConfig:
        layers = config.n_gpu_layers if self._n_gpus else 0
        return config.with_(n_gpu_layers=layers, n_devices=max(1, self._n_gpus))

    @contextmanager
    def measuring(self, folder: Path, shape: ModelShape) -> Iterator[Measure]:
        """Give what measures a point; logs are kept in ``folder`` while it goes on."""
        with tempfile.TemporaryDirectory(dir=folder, prefix=".server-") as logs:

            def measure(job: Job, gpu: Any, on_phase: Callable[[str], None]) -> PointRecord:
                point = ServedPoint(job, gpu, on_phase, PROGRAM)
                return measured(point, partial(self._run, Path(logs) / "server.log", shape))

            yield measure

    def _run(self, log: Path, shape: ModelShape, point: ServedPoint) -> None:
        point.phase("baseline", None)
        with ExitStack() as stack:
            stack.callback(_keep_tail, point, log)
            with point.timed("load"):
                server = stack.enter_context(
                    llama_server.started(
                        # The CPU's features are for the prediction; the server finds its own.
                        point.config.with_(cpu_features=()),
                        point.job.path,
                        log=log,
                        server_bin=self._plan.server_bin or None,
                        n_threads=self._n_threads,
                        limits=_LIMITS,
                        timeout=point.seconds_left(),
                    )
                )
                version = server.props().get("build_info")
            pid = server.pid
            assert pid is not None
            point.phase("context", pid)
            point.log = server.engine_log()
            point.server |= {"attached": False, "version": version}
            _decode(point, server, shape)
            point.phase("decode", pid)
        point.phase("closed", None if wait_until_gone(pid) else pid)


class AttachedLlamaServer(_LlamaServer):
    """The llama-server that runs at a URL: one point, the one that it is; it is never restarted."""

    def __init__(self, plan: SweepPlan, n_gpus: int) -> None:
        """Ask it what it is.

        Raises:
            ServerError: no llama-server answers there.
            UsageError: its process cannot be read from here.
        """
        self._plan = plan
        self._n_gpus = n_gpus
        self._server = llama_server.attached(plan.server_url)
        self._props = self._server.props()
        pid = process_of(self._server.url)
        settings = server_settings(command_line(pid), environment(pid)) if pid else None
        if pid is None or settings is None:
            raise UsageError(
                f"the process behind {self._server.url} cannot be read from here",
                "measure a llama-server of this user on this machine, or start one: --server-bin",
            )
        self._pid, self._settings = pid, settings

    def facts(self) -> dict[str, Any]:
        """Return what the environment record says of the engine."""
        return {"program": PROGRAM, "version": self._props.get("build_info"), "attached": True}

    def model(self, progress: Progress | None) -> GgufModel:
        """Return the model that the server has loaded.

        Raises:
            UsageError: the plan names another one, or its file is not to be found here.
        """
        told = self._settings.get("model") or self._props.get("model_path") or ""
        asked = self._plan.model
        if not os.path.isfile(told):
            if not asked:
                raise UsageError(
                    f"{self._server.url} has a model that is not at its path here ({told!r})",
                    "name its file with -m",
                )
            return open_model(asked, progress=progress)
        if asked:
            named = open_model(asked, progress=progress)
            if not os.path.samefile(named.path, told):
                raise UsageError(
                    f"{self._server.url} has loaded {told}, not {asked}",
                    "leave -m away: an attached server is measured as it is",
                )
        return open_model(told)

    def points(self, shape: ModelShape) -> list[Point]:
        """Return the one point that the server is.

        Raises:
            UsageError: the plan asks for something else.
        """
        config = self._config(shape)
        self._refuse_other(config, shape)
        fixed = SweepPlan(ctx_size=(config.n_ctx,), parallel=(config.n_seq_max,))
        return grid(fixed, shape.n_ctx_train, settle=lambda _: config)

    def _config(self, shape: ModelShape) -> RunConfig:
        settings = self._settings
        known = {name: settings[name] for name in _ASKED.values() if name in settings}
        slots = int(self._props["total_slots"])
        per_slot = int(self._props["default_generation_settings"]["n_ctx"])
        unified = bool(is_unified(settings))
        layers = known.get("n_gpu_layers", -1) if self._n_gpus else 0
        return run_config("llama-server", shape, **known).with_(
            n_ctx=per_slot if unified else per_slot * slots,
            n_seq_max=slots,
            n_outputs_max=slots,
            kv_unified=unified,
            n_gpu_layers=layers,
            n_devices=max(1, self._n_gpus),
            no_kv_offload=settings.get("kv_offload") is False,
        )

    def _refuse_other(self, config: RunConfig, shape: ModelShape) -> None:
        context = effective_context(config, shape.n_ctx_train, causal=shape.causal)
        held: dict[str, Any] = {name: getattr(config, field) for name, field in _ASKED.items()}
        held |= {"ctx_size": context.n_ctx, "ctx_per_slot": context.n_ctx_seq}
        for name, value in held.items():
            asked = getattr(self._plan, name)
            if asked and set(asked) != {value}:
                shown = ",".join(map(str, asked))
                raise UsageError(
                    f"the server at {self._server.url} has {name} {value}, not {shown}",
                    "leave that option away: an attached server is measured as it is",
                )

    @contextmanager
    def measuring(self, folder: Path, shape: ModelShape) -> Iterator[Measure]:
        """Give what measures the point."""

        def measure(job: Job, gpu: Any, on_phase: Callable[[str], None]) -> PointRecord:
            return measured(ServedPoint(job, gpu, on_phase, PROGRAM), partial(self._run, shape))

        yield measure

    def _run(self, shape: ModelShape, point: ServedPoint) -> None:
        point.server |= self.facts()
        point.phase("baseline", None)
        point.phase("context", self._pid)
        if why := self._in_use():
            point.server["not_decoded"] = why
            return
        _decode(point, self._server, shape)
        point.phase("decode", self._pid)

    def _in_use(self) -> str | None:
        """Return why nothing may be decoded: a prompt of ours would put out somebody's cache."""
        slots = self._server.slots()
        if slots is None:
            return "the server gives no /slots: whether they hold conversations is not known"
        if any(slot.get("is_processing") or slot.get("n_prompt_tokens") for slot in slots):
            return "the slots hold conversations, which a prompt would put out"
        return None


def _keep_tail(point: ServedPoint, log: Path) -> None:
    if log.exists():
        point.log_tail = log.read_text("utf-8", "replace").splitlines()[-200:]


def _decode(point: ServedPoint, server: LlamaServer, shape: ModelShape) -> None:
    """Let every slot read a prompt of one ubatch and generate a token, all at the same time."""
    config = point.config
    context = effective_context(config, shape.n_ctx_train, causal=shape.causal)
    room = context.n_ctx // config.n_seq_max if config.kv_unified else context.n_ctx_seq
    count = decoded_per_slot(context.n_ubatch, room)
    left = point.seconds_left()

    def ask(slot: int) -> int | None:
        prompt = [token_at(shape.n_vocab, slot, position) for position in range(count)]
        return server.read_prompt(prompt, slot=slot, timeout=left)

    with point.timed("decode"):
        asks = [partial(ask, slot) for slot in range(config.n_seq_max)]
        point.server["read_tokens"] = at_once(asks, left)


def process_of(url: str) -> int | None:
    """Return the process that listens at ``url``; None: on another machine, or another user's."""
    with Client(url) as client:
        if not client.is_local:
            return None
        parts = urlsplit(client.base_url)
    return listener(parts.port or (443 if parts.scheme == "https" else 80))
