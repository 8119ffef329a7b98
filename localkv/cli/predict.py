"""``localkv predict``: what one configuration needs."""

from __future__ import annotations

import json
from typing import Any

import click

from localkv.cli.options import chosen_model, json_option, model_argument
from localkv.predict.estimate import Estimate
from localkv.report.escape import escape_terminal as safe
from localkv.units import format_bytes, format_count


@click.command("predict", epilog="Example: localkv predict model.gguf -c 32768 -np 4 -ctk q8_0")
@model_argument
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
    "--defaults",
    type=click.Choice(["llama-server", "llama-cpp-python", "ollama"]),
    default="llama-server",
    show_default=True,
    help="Whose defaults fill in what is not given.",
)
@click.option("--engine", is_flag=True, help="Ask the engine for its plan (nothing is allocated).")
@json_option
def command(
    model: str | None,
    model_option: str | None,
    ctx_size: int | None,
    ctx_per_slot: int | None,
    defaults: str,
    engine: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compute what one configuration of a model needs: weights, KV cache, state, buffers.

    Only the header is read. An architecture for which localkv has no rule is answered by the
    engine's dry run, and labelled so; without an engine the answer is no (exit code 1).
    """
    from localkv.errors import UsageError
    from localkv.model import read_model
    from localkv.predict.defaults import run_config

    if ctx_size is not None and ctx_per_slot is not None:
        raise UsageError("both --ctx-size and --ctx-per-slot were given", "use one of them")
    shape = read_model(chosen_model(model, model_option))
    settings = {_FIELDS[name]: value for name, value in options.items()}
    config = run_config(defaults, shape, n_ctx=ctx_size, **settings)
    if ctx_per_slot is not None:
        config = config.with_(n_ctx=ctx_per_slot * config.n_seq_max)
    estimate = _estimate(shape, config, engine=engine)
    if as_json:
        print(json.dumps(estimate.to_dict()))
    else:
        for line in page(estimate):
            print(line)
    if not estimate.known:
        raise SystemExit(1)


_FIELDS = {
    "parallel": "n_seq_max",
    "cache_type_k": "cache_type_k",
    "cache_type_v": "cache_type_v",
    "batch_size": "n_batch",
    "ubatch_size": "n_ubatch",
    "flash_attn": "flash_attn",
    "kv_unified": "kv_unified",
    "swa_full": "swa_full",
}


def _estimate(shape: Any, config: Any, *, engine: bool) -> Estimate:
    from localkv.errors import EngineError
    from localkv.predict.predict import estimate

    if engine:
        from localkv.engines.plan import planned

        return planned(shape, config)
    found = estimate(shape, config)
    if found.known:
        return found
    from localkv.engines.plan import planned

    try:
        return planned(shape, config)
    except EngineError as error:
        import sys

        print(f"localkv: {safe(str(error), 2000)}", file=sys.stderr)
        return found


def page(estimate: Estimate) -> list[str]:
    """Return the lines of the answer."""
    config, model = estimate.config, estimate.model
    types = "/".join(dict.fromkeys((config["cache_type_k"], config["cache_type_v"])))
    slots = config["n_seq_max"]
    share = "sharing one cache" if config["kv_unified"] else "with a cache each"
    lines = [
        f"{safe(model['name'])} ({safe(model['architecture'])}): n_ctx "
        f"{format_count(config['n_ctx'])} in all, {format_count(config['n_ctx_per_slot'])} per "
        f"slot, {slots} slot{'s' * (slots != 1)}{f' {share}' * (slots > 1)}, {types}",
        "",
    ]
    lines += [
        f"{term.name:<12} {format_bytes(term.bytes):>12}  {term.source:<8} {term.formula}"
        for term in estimate.terms
    ]
    if not estimate.known:
        lines.append(f"{'KV':<12} {'unknown':>12}")
    else:
        lines.append(f"{'total':<12} {format_bytes(estimate.total_bytes):>12}{_band(estimate)}")
    if len(estimate.devices) > 1:
        lines += ["", *(f"{d.name:<12} {format_bytes(d.total):>12}" for d in estimate.devices)]
    lines += [f"note: {safe(note, 400)}" for note in estimate.notes]
    return lines


def _band(estimate: Estimate) -> str:
    compute = estimate.compute
    if compute.low == compute.high:
        return ""
    low = estimate.total_bytes - compute.bytes + compute.low
    high = estimate.total_bytes - compute.bytes + compute.high
    return f"  {format_bytes(low)} to {format_bytes(high)}; --engine gives the exact figure"
