"""``localkv predict``: what one configuration needs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from localkv.cli import predict_pages as pages
from localkv.cli.options import chosen_model, json_option, model_argument
from localkv.errors import EngineError, UsageError
from localkv.report.escape import escape_terminal as safe

if TYPE_CHECKING:
    from localkv.engines.check import Comparison
    from localkv.model.shape import ModelShape
    from localkv.predict.config import RunConfig
    from localkv.predict.estimate import Estimate
    from localkv.predict.kv_table import KvTable
    from localkv.predict.paged import PagedPlan

#: Columns of the table of a model that a server keeps in pages.
_BATCHES = (1, 4, 16, 64)
_ROWS = 7

#: Option -> setting of a run.
_SETTINGS = {
    "parallel": "n_seq_max",
    "cache_type_k": "cache_type_k",
    "cache_type_v": "cache_type_v",
    "batch_size": "n_batch",
    "ubatch_size": "n_ubatch",
    "flash_attn": "flash_attn",
    "kv_unified": "kv_unified",
    "swa_full": "swa_full",
    "split_mode": "split_mode",
    "main_gpu": "main_gpu",
    "no_kv_offload": "no_kv_offload",
}


@click.command("predict", epilog="Example: localkv predict model.gguf -c 32768 -np 4 -ctk q8_0")
@model_argument
@click.option("--config", metavar="PATH", help="A Hugging Face config.json, or its folder.")
@click.option("-c", "--ctx-size", type=click.IntRange(0), help="Total context; 0: as trained.")
@click.option("--ctx-per-slot", type=click.IntRange(1), help="Context of each slot, instead.")
@click.option("-np", "--parallel", type=int, help="Slots.  [default: 4 sharing one cache]")
@click.option("-ctk", "--cache-type-k", help="Type of the K cache.  [default: f16]")
@click.option("-ctv", "--cache-type-v", help="Type of the V cache.  [default: f16]")
@click.option("-b", "--batch-size", type=int, help="Logical batch size.")
@click.option("-ub", "--ubatch-size", type=int, help="Physical batch size.")
@click.option(
    "-fa", "--flash-attn", type=click.Choice(["auto", "on", "off"]), help="Flash attention."
)
@click.option("--kv-unified/--no-kv-unified", default=None, help="One cache shared by the slots.")
@click.option("--swa-full/--no-swa-full", default=None, help="Sliding layers at full size.")
@click.option(
    "-ngl",
    "--gpu-layers",
    metavar="N|all|auto",
    help="Layers on GPUs, the output counts as one.  [default: 0]",
)
@click.option("--devices", type=click.IntRange(0), help="GPUs to plan for.  [default: 1]")
@click.option(
    "--device-free",
    metavar="SIZE,...",
    help="Free memory of each GPU: for the split and for auto.  [default: as NVIDIA tells]",
)
@click.option("-ts", "--tensor-split", metavar="N,...", help="Share of each GPU, as 3,1.")
@click.option(
    "-sm", "--split-mode", type=click.Choice(["layer", "none"]), help="Over all GPUs, or one."
)
@click.option("-mg", "--main-gpu", type=int, help="The GPU used with --split-mode none.")
@click.option("-nkvo", "--no-kv-offload", is_flag=True, default=None, help="KV stays on the host.")
@click.option("--no-op-offload", is_flag=True, help="The host's layers compute on the host alone.")
@click.option("-nr", "--no-repack", is_flag=True, help="No repacked copies of weights.")
@click.option(
    "--defaults",
    type=click.Choice(["llama-server", "llama-cpp-python", "ollama"]),
    default="llama-server",
    show_default=True,
    help="Whose defaults fill in what is not given.",
)
@click.option(
    "--engine", is_flag=True, help="Ask the engine for its plan (no buffer is allocated)."
)
@click.option("--check", is_flag=True, help="Formula and engine side by side; 1 if they differ.")
@click.option(
    "--kv-dtype", help="Cache type in the table and the paged plan: f16, bf16, fp8, int8, ..."
)
@click.option("--block-size", type=click.IntRange(1), help="Tokens per block of a paged cache.")
@click.option("--memory", metavar="SIZE", help="Plan a paged cache of this size, as vLLM does.")
@click.option("--max-model-len", type=click.IntRange(1), help="Longest request of that plan.")
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

    Only the header is read. An architecture for which localkv has no rule is answered by the
    engine's dry run, and labelled so; without an engine the answer is no (exit code 1).

    A Hugging Face config.json is answered with KV per token and a table of contexts by batch
    sizes, every request full; with --memory also with the blocks that vLLM makes of it.
    """
    from localkv.model import read_model

    shape = read_model(chosen_model(model or config, model_option or config))
    from_config = shape.path.endswith(".json")
    if from_config and (engine or check or options["gpu_layers"]):
        raise UsageError(
            "a config.json has neither tensors to place nor a header for the engine",
            "give a .gguf file, or leave --engine, --check and -ngl out",
        )
    asked = _run_config(shape, options)
    serving = _Serving.of(shape, options, always=from_config)
    if check:
        _check(shape, asked, as_json=as_json)
        return
    estimate = None if from_config and not as_json else _estimate(shape, asked, engine, options)
    if as_json:
        assert estimate is not None
        print(json.dumps({**estimate.to_dict(), **serving.to_dict()}))
    else:
        lines = pages.config_page(shape) if estimate is None else pages.page(estimate)
        for line in (*lines, *serving.lines()):
            print(line)
    if not (estimate.known if estimate else shape.rule == "exact"):
        raise SystemExit(1)


def _run_config(shape: ModelShape, options: dict[str, Any]) -> RunConfig:
    """Return the settings that were asked for, with the program's defaults and the devices."""
    from localkv.predict.defaults import run_config

    program, total, each = options["defaults"], options["ctx_size"], options["ctx_per_slot"]
    if total is not None and each is not None:
        raise UsageError("both --ctx-size and --ctx-per-slot were given", "use one of them")
    if program == "ollama" and each is not None:
        total, each = each, None  # num_ctx is per request anyway
    settings = {name: options[option] for option, name in _SETTINGS.items()}
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
    return replace(found, notes=(*notes, *found.notes))


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
        print(json.dumps({"schema": 1, "engine": info, "check": comparison.to_dict()}))
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
    """The answers about a paged cache: a table, and the plan for one size of memory."""

    def __init__(self, table: KvTable | None = None, plan: PagedPlan | None = None) -> None:
        self.table = table
        self.plan = plan
        self.max_model_len = 0

    @classmethod
    def of(cls, shape: ModelShape, options: dict[str, Any], *, always: bool) -> _Serving:
        """Return what was asked for; nothing when no option is about paged caches."""
        from localkv.units import parse_size

        memory, longest = options["memory"], options["max_model_len"]
        kind, block = options["kv_dtype"] or "auto", options["block_size"] or 16
        if not (always or memory or longest or options["kv_dtype"] or options["block_size"]):
            return cls()
        from localkv.predict.kv_table import kv_table

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
            from localkv.predict.paged import paged_plan

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
        return found

    def lines(self) -> list[str]:
        """Return the lines that follow the estimate."""
        lines = pages.table_lines(self.table) if self.table else []
        return lines + (pages.paged_lines(self.plan, self.max_model_len) if self.plan else [])
