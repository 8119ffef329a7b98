"""``localkv selftest``: formula against engine over a grid, for each model given."""

from __future__ import annotations

import os
import platform

import click

from localkv import __version__
from localkv.cli.options import complete_model, json_option
from localkv.cli.predict_pages import engine_name
from localkv.cli.terminal import print_json
from localkv.engines.check import DIFFERENT, EQUAL, NO_ANSWER, REFUSED, Comparison
from localkv.engines.llamacpp import engine_version
from localkv.engines.selftest import ModelTest, self_test
from localkv.errors import EngineError
from localkv.report.escape import escape_terminal as safe
from localkv.units import format_bytes


@click.command("selftest", epilog="Example: localkv selftest demo demo-swa model.gguf")
@click.argument("models", nargs=-1, metavar="[MODEL]...", shell_complete=complete_model)
@json_option
def command(models: tuple[str, ...], as_json: bool) -> None:
    """Compare the formula with the engine's own plan, for each MODEL (default: demo).

    The engine loads the header alone and allocates nothing. One row per model: in how many
    configurations caches, state, output buffer and context are the same, to the 0.01 MiB that the
    engine prints, and how many both refuse. Exit code 1 when anything differs or a file cannot be
    tested. Compute buffers are estimates: how often they lay outside their band is shown, and does
    not count. Attach the output to a bug report.
    """
    if engine_version() is None:
        raise EngineError(
            "llama-cpp-python is not installed", "run: python -m pip install llama-cpp-python"
        )
    results = [self_test(model) for model in models or ("demo",)]
    if as_json:
        print_json(_to_dict(results))
    else:
        for line in page(results):
            print(line)
    if not all(result.passed for result in results):
        raise SystemExit(1)


def _engine(results: list[ModelTest]) -> dict[str, object]:
    told = next((result.engine for result in results if result.engine), None)
    return dict(told or {"version": engine_version(), "commit": None})


def _to_dict(results: list[ModelTest]) -> dict[str, object]:
    return {
        "schema": 1,
        "localkv": __version__,
        "engine": _engine(results),
        "equal": all(result.passed for result in results),
        "models": [result.to_dict() for result in results],
    }


def page(results: list[ModelTest]) -> list[str]:
    """Return the header, the table, and the first configurations that differ."""
    engine = _engine(results)
    lines = [
        f"localkv {__version__}, {engine_name(engine)}, {platform.system()} {platform.machine()}",
        *([safe(engine["system_info"], 400)] if engine.get("system_info") else []),
        "",
        f"{'model':<28} {'architecture':<16} {'rule':<6} {'configs':>7} {'equal':>6} "
        f"{'differ':>6} {'refused':>7} {'died':>5} {'worst':>10}  compute",
    ]
    for result in results:
        lines.append(_row(result))
    lines.append("worst: of sizes; the engine prints them rounded to 0.01 MiB (10.24 KiB)")
    for result in results:
        lines += [f"{_name(result)}: {line}" for line in map(_difference, result.differing)]
    return lines


def _name(result: ModelTest) -> str:
    return safe(os.path.basename(result.argument) or result.argument, 28)


def _row(result: ModelTest) -> str:
    name = _name(result)
    if result.error is not None:
        return (
            f"{name:<28} {safe(result.architecture, 16):<16} not tested: {safe(result.error, 400)}"
        )
    compared = sum(comparison.compute is not None for comparison in result.comparisons)
    band = f"{compared - result.outside_band} of {compared} in the band"
    return (
        f"{name:<28} {safe(result.architecture, 16):<16} {result.rule:<6} "
        f"{len(result.comparisons):>7} {result.count(EQUAL):>6} {result.count(DIFFERENT):>6} "
        f"{result.count(REFUSED):>7} {result.count(NO_ANSWER):>5} "
        f"{format_bytes(result.worst):>10}  {band}"
    )


def _difference(comparison: Comparison) -> str:
    """Return one configuration that differs, and in what."""
    config = comparison.config
    settings = (
        f"-c {config.n_ctx} -np {config.n_seq_max} "
        f"{'--kv-unified' if config.kv_unified else '--no-kv-unified'} "
        f"{'--swa-full' if config.swa_full else '--no-swa-full'} -fa {config.flash_attn} "
        f"-ctk {config.cache_type_k} -ctv {config.cache_type_v}"
    )
    found = [
        f"{row.name} {row.formula} against {row.engine}"
        for row in comparison.rows
        if row.verdict == DIFFERENT
    ]
    if comparison.formula_refused:
        found.append(f"the formula refuses: {comparison.formula_refused}")
    if comparison.engine_refused:
        found.append(f"the engine: {comparison.engine_refused}")
    return f"{settings}: {safe('; '.join(found), 600)}"
