"""``localkv predict``: what one configuration needs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from localkv.cli import ollama_pages, server_pages
from localkv.cli import predict_pages as pages
from localkv.cli.options import (
    SETTINGS,
    chosen_model,
    json_option,
    model_argument,
    run_options,
)
from localkv.cli.terminal import print_json
from localkv.errors import EngineError, UsageError
from localkv.report.escape import escape_terminal as safe
from localkv.units import plural

if TYPE_CHECKING:
    from localkv.cli.ollama_pages import OllamaSettings
    from localkv.engines.check import Comparison
    from localkv.model.shape import ModelShape
    from localkv.predict.config import RunConfig
    from localkv.predict.estimate import Estimate
    from localkv.predict.kv_table import KvTable
    from localkv.predict.ollama_plan import OllamaPlan
    from localkv.predict.paged import PagedPlan
    from localkv.predict.server_memory import ServerMemory

#: Columns of the table of a model that a server keeps in pages.
_BATCHES = (1, 4, 16, 64)
_ROWS = 7


@click.command(
    "predict",
    epilog="\b\nExamples: localkv predict model.gguf -c 32768 -np 4 -ctk q8_0\n"
    "          localkv predict demo-swa --server",
)
@model_argument
@click.option("--config", metavar="PATH", help="A Hugging Face config.json, or its folder.")
@click.option(
    "-c",
    "--ctx-size",
    metavar="N",
    type=click.IntRange(0),
    help="Context of all slots together; 0: as trained.",
)
@click.option(
    "--ctx-per-slot", metavar="N", type=click.IntRange(1), help="Context of each slot, instead."
)
@click.option(
    "-np", "--parallel", metavar="N", type=int, help="Slots.  [default: 4 that share one cache]"
)
@run_options
@click.option(
    "--devices", metavar="N", type=click.IntRange(0), help="GPUs to plan for.  [default: 1]"
)
@click.option(
    "--device-free",
    metavar="SIZE,...",
    help="Free memory of each GPU: for the split and for -ngl auto.  [default: as NVML says]",
)
@click.option("--engine", is_flag=True, help="Ask the engine for its plan; it allocates nothing.")
@click.option(
    "--check", is_flag=True, help="Formula and engine side by side; exit code 1 if they differ."
)
@click.option(
    "--kv-dtype", metavar="TYPE", help="vLLM: type of the cache: f16, bf16, fp8, int8, ..."
)
@click.option("--block-size", metavar="N", type=click.IntRange(1), help="vLLM: tokens per block.")
@click.option("--memory", metavar="SIZE", help="vLLM: plan a cache of this size in blocks.")
@click.option(
    "--max-model-len", metavar="N", type=click.IntRange(1), help="vLLM: the longest request."
)
@server_pages.server_options
@json_option
def command(
    model: str | None,
    model_option: str | None,
    config: str | None,
    engine: bool,
    check: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compute what one configuration of a model needs: weights, KV cache, state, buffers.

    Only the header is read. Where localkv has no rule for an architecture, the engine's dry run
    answers and the page says so; without an engine the answer is no (exit code 1).

    ollama:NAME is answered as Ollama runs it: num_ctx from the model's parameters or
    OLLAMA_CONTEXT_LENGTH, and with what Ollama's own estimate will make of it.

    A Hugging Face config.json gives the KV per token and a table of contexts by batch sizes, every
    request full; with --memory also the blocks that vLLM makes of it.
    """
    from localkv.model import read_model

    named = chosen_model(model, model_option, config)
    shape = read_model(named)
    from_config = shape.path.endswith(".json")
    if from_config and (engine or check or options["gpu_layers"]):
        raise UsageError(
            "a config.json has neither tensors to place nor a header for the engine",
            "give a .gguf file, or leave --engine, --check and -ngl out",
        )
    ollama = None if from_config else ollama_pages.fill_in(named, options)
    asked = _run_config(shape, options)
    serving = _Serving.of(shape, options, always=from_config)
    if ollama is not None and not check:
        serving.ollama = ollama, ollama.plan(shape, asked)
    if server_pages.asked_for(options):
        serving.server = server_pages.memory_of(shape, asked, options, options["defaults"])
    if check:
        _check(shape, asked, as_json=as_json)
        return
    estimate = None if from_config and not as_json else _estimate(shape, asked, engine, options)
    if as_json:
        assert estimate is not None
        print_json({**estimate.to_dict(), **serving.to_dict()})
    else:
        lines = pages.config_page(shape) if estimate is None else pages.page(estimate)
        _print_page([*lines, *serving.lines()])
    if not (estimate.known if estimate else shape.rule == "exact"):
        raise SystemExit(1)


def _print_page(lines: list[str]) -> None:
    """Print ``lines``, folded to the terminal's width where there is a terminal."""
    if sys.stdout.isatty():
        from localkv.cli.terminal import fold, width

        lines = [part for line in lines for part in fold(line, width())]
    for line in lines:
        print(line)


def _run_config(shape: ModelShape, options: dict[str, Any]) -> RunConfig:
    """Return the settings that were asked for, with the program's defaults and the devices."""
    from localkv.predict.defaults import run_config

    program, total, each = options["defaults"], options["ctx_size"], options["ctx_per_slot"]
    if total is not None and each is not None:
        raise UsageError("both --ctx-size and --ctx-per-slot were given", "use one of them")
    if program == "ollama" and each is not None:
        total, each = each, None  # num_ctx is per request anyway
    settings = {name: options[option] for option, name in SETTINGS.items()}
    config = run_config(program, shape, n_ctx=total, **settings)
    if each is not None:
        config = config.with_(n_ctx=each * config.n_seq_max)
    config = config.with_(op_offload=not options["no_op_offload"], repack=not options["no_repack"])
    return _on_devices(shape, config, options)


def _on_devices(shape: ModelShape, config: RunConfig, options: dict[str, Any]) -> RunConfig:
    """Return ``config`` with the GPUs that were asked for and the layers on them."""
    from localkv.cli.devices import free_memory, layers, shares

    split = shares(options["tensor_split"])
    wanted = layers(options["gpu_layers"])
    free = free_memory(options["device_free"], probe=wanted == "auto")
    count = options["devices"]
    if count is None:
        count = len(split or free or ()) or int(wanted != "auto")
    if options["device_free"] and len(free or ()) != count:
        raise UsageError(
            f"--device-free has {plural(len(free or ()), 'size')} for {plural(count, 'GPU')}",
            "give one for each",
        )
    config = config.with_(n_devices=count, tensor_split=split, device_free=free)
    if wanted != "auto":
        return config.with_(n_gpu_layers=wanted)
    if not count:
        return config
    from localkv.predict.offload import most_layers

    return config.with_(n_gpu_layers=most_layers(shape, config))


def _estimate(
    shape: ModelShape, config: RunConfig, engine: bool, options: dict[str, Any]
) -> Estimate:
    from localkv.predict.programs import program_note

    found = _answer(shape, config, engine=engine)
    notes = [program_note(options["defaults"], shape, config)]
    if options["gpu_layers"] == "auto":
        notes.append(pages.auto_note(shape, config))
    return found._replace(notes=(*notes, *found.notes))


def _answer(shape: ModelShape, config: RunConfig, *, engine: bool) -> Estimate:
    """Return the formula's answer, or the engine's where it was asked or there is no rule."""
    from localkv.predict.predict import estimate

    if not engine:
        found = estimate(shape, config)
        if found.known or shape.path.endswith(".json"):
            return found
    from localkv.engines.plan import planned

    try:
        return planned(shape, config)
    except EngineError as error:
        if engine:
            raise
        print(f"localkv: {safe(str(error), 2000)}", file=sys.stderr)
        return found


def _check(shape: ModelShape, config: RunConfig, *, as_json: bool) -> None:
    """Print formula and engine side by side; exit with 1 when they differ."""
    from localkv.engines.check import REFUSED, compare_with_engine

    info, (comparison,) = compare_with_engine(shape, [config])
    if comparison.verdict == REFUSED:
        raise UsageError(*_refusals(comparison))
    if as_json:
        print_json({"schema": 1, "engine": info, "check": comparison.to_dict()})
    else:
        for line in pages.check_page(shape, info, comparison):
            print(line)
    if not comparison.agrees:
        raise SystemExit(1)


def _refusals(comparison: Comparison) -> tuple[str, str]:
    return (
        f"formula and engine both refuse this: {comparison.engine_refused}",
        comparison.formula_refused or "",
    )


class _Serving:
    """The answers about servers: a paged cache, their host memory, Ollama's own opinion."""

    def __init__(self, table: KvTable | None = None, plan: PagedPlan | None = None) -> None:
        self.table = table
        self.plan = plan
        self.max_model_len = 0
        self.server: ServerMemory | None = None
        self.ollama: tuple[OllamaSettings, OllamaPlan] | None = None

    @classmethod
    def of(cls, shape: ModelShape, options: dict[str, Any], *, always: bool) -> _Serving:
        """Return what was asked for; nothing when no option is about paged caches."""
        from localkv.units import parse_size

        memory, longest = options["memory"], options["max_model_len"]
        kind, block = options["kv_dtype"] or "auto", options["block_size"] or 16
        if not (always or memory or longest or options["kv_dtype"] or options["block_size"]):
            return cls()
        from localkv.predict.kv_table import kv_table
        from localkv.predict.paged import check_block_size, paged_plan

        check_block_size(shape, block)
        context = options["ctx_size"] or options["ctx_per_slot"]
        found = cls(
            kv_table(
                shape,
                (context,) if context else pages.contexts(shape.n_ctx_train, _ROWS),
                (options["parallel"],) if options["parallel"] else _BATCHES,
                kind,
                block_size=block,
            )
        )
        if memory is not None:
            found.max_model_len = longest or shape.n_ctx_train
            found.plan = paged_plan(
                shape, parse_size(memory), found.max_model_len, block, kind, "auto"
            )
        elif longest is not None:
            raise UsageError("--max-model-len is for a paged plan", "give --memory as well")
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that stand beside the estimate."""
        found: dict[str, Any] = {}
        if self.table:
            found["kv_table"] = vars(self.table)
        if self.plan:
            found["paged"] = self.plan.to_dict()
        if self.server:
            found["server_memory"] = self.server.to_dict()
        if self.ollama:
            settings, plan = self.ollama
            found["ollama"] = ollama_pages.plan_dict(plan, settings)
        return found

    def lines(self) -> list[str]:
        """Return the lines that follow the estimate."""
        lines = pages.table_lines(self.table) if self.table else []
        if self.plan:
            lines += pages.paged_lines(self.plan, self.max_model_len)
        if self.ollama:
            settings, plan = self.ollama
            lines += ollama_pages.plan_lines(plan, settings)
        return lines + (server_pages.server_lines(self.server) if self.server else [])
