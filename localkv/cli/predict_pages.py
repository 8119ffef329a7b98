"""The text of ``localkv predict``: results in, lines out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from localkv.report.escape import escape_terminal as safe
from localkv.units import format_bytes, format_count, plural

if TYPE_CHECKING:
    from localkv.engines.check import Comparison, Row
    from localkv.model.shape import ModelShape
    from localkv.predict.config import RunConfig
    from localkv.predict.estimate import DeviceEstimate, Estimate
    from localkv.predict.kv_table import KvTable
    from localkv.predict.paged import PagedPlan

_PARTS = ("weights", "kv", "recurrent", "compute", "output", "total")


def page(estimate: Estimate) -> list[str]:
    """Return the lines of an estimate."""
    config, model = estimate.config, estimate.model
    types = "/".join(dict.fromkeys((config["cache_type_k"], config["cache_type_v"])))
    slots = config["n_seq_max"]
    share = "sharing one cache" if config["kv_unified"] else "with a cache each"
    lines = [
        f"{safe(model['name'])} ({safe(model['architecture'])}): n_ctx "
        f"{format_count(config['n_ctx'])} in all, {format_count(config['n_ctx_per_slot'])} per "
        f"slot, {plural(slots, 'slot')}{f' {share}' * (slots > 1)}, {types}",
        "",
    ]
    lines += [
        f"{term.name:<18} {format_bytes(term.bytes):>12}  {term.source:<8} {term.formula}"
        for term in estimate.terms
    ]
    if not estimate.known:
        lines.append(f"{'KV':<18} {'unknown':>12}")
    else:
        lines.append(f"{'total':<18} {format_bytes(estimate.total_bytes):>12}{_band(estimate)}")
    if len(estimate.devices) > 1:
        lines += ["", *_devices(estimate.devices)]
    return lines + [f"note: {safe(note, 400)}" for note in estimate.notes]


def _band(estimate: Estimate) -> str:
    compute = estimate.compute
    if compute.low == compute.high:
        return ""
    low = estimate.total_bytes - compute.bytes + compute.low
    high = estimate.total_bytes - compute.bytes + compute.high
    return f"  {format_bytes(low)} to {format_bytes(high)}; --engine gives the exact figure"


def _devices(devices: Sequence[DeviceEstimate]) -> list[str]:
    shown = [part for part in _PARTS if any(getattr(device, part) for device in devices)]
    lines = [f"{'device':<8}" + "".join(f"{part:>13}" for part in shown)]
    for device in devices:
        sizes = (format_bytes(getattr(device, part)) for part in shown)
        lines.append(f"{device.name:<8}" + "".join(f"{size:>13}" for size in sizes))
    return lines


def auto_note(shape: ModelShape, config: RunConfig) -> str:
    """Return what ``-ngl auto`` came to, and by which rule."""
    if not config.n_devices or config.device_free is None:
        return "-ngl auto: no GPU was found here, so all layers stay on the host"
    return (
        f"-ngl auto: {config.n_gpu_layers} of {shape.n_layer + 1} layers leave 1 GiB free on "
        "every GPU, as llama.cpp does by default"
    )


def config_page(shape: ModelShape) -> list[str]:
    """Return what a config.json says about its model."""
    heads = sorted({layer.n_head_kv for layer in shape.layers if layer.n_head_kv})
    kinds = [layer.kind for layer in shape.layers]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    lines = [
        f"{safe(shape.name)} ({safe(shape.architecture)}), from config.json: "
        f"{plural(shape.n_layer, 'layer')} ({counts}), KV heads "
        f"{', '.join(map(str, heads)) or 'none'}, trained for "
        f"{plural(shape.n_ctx_train, 'token')}"
    ]
    if shape.weights_bytes:
        lines.append(f"weights       {format_bytes(shape.weights_bytes)}")
    lines += [f"note: {safe(note, 400)}" for note in shape.notes]
    return lines + [f"assumed: {safe(fact, 400)}" for fact in shape.assumed]


def contexts(n_ctx_train: int, rows: int) -> tuple[int, ...]:
    """Return up to ``rows`` context sizes, the last the training context, each twice the last."""
    last = n_ctx_train or 32768
    sizes = [last >> step for step in range(rows) if last >> step >= 512]
    return tuple(reversed(sizes or [last]))


def table_lines(table: KvTable) -> list[str]:
    """Return KV per token and the table of contexts by batch sizes."""
    lines = [
        "",
        f"KV per token  {table.bytes_per_token / 1024:.2f} KiB in {table.kv_dtype}: per layer, "
        "KV heads x (K + V head) x bytes of the type",
        f"KV cache by context and batch, all full ({table.kv_dtype}):",
        f"{'context':>10}" + "".join(f"{f'batch {count}':>13}" for count in table.batches),
    ]
    return lines + [
        f"{format_count(context):>10}" + "".join(f"{format_bytes(size):>13}" for size in row)
        for context, row in zip(table.contexts, table.rows, strict=True)
    ]


def paged_lines(plan: PagedPlan, max_model_len: int) -> list[str]:
    """Return the paged plan in the words that vLLM prints it with."""
    lines = [
        "",
        f"paged as vLLM does it: {plural(plan.num_blocks, 'block')}, "
        f"{plural(plan.block_size, 'token')} per block, {format_bytes(plan.block_bytes)} each",
        f"KV cache size: {plural(plan.tokens, 'token')}",
        f"maximum concurrency for {plural(max_model_len, 'token')} per request: "
        f"{plan.max_concurrency:.2f}x",
    ]
    for group in plan.groups:
        window = f", window {format_count(group.window)}" if group.window else ""
        lines.append(
            f"group: {plural(group.layers, f'{group.kind} layer')}, "
            f"{format_bytes(group.page_bytes)} per page{window}"
        )
    return lines + [f"note: {safe(note, 400)}" for note in plan.notes]


def check_page(shape: ModelShape, info: Mapping[str, Any], comparison: Comparison) -> list[str]:
    """Return formula and engine side by side, one figure per line."""
    lines = [
        f"{safe(shape.name)} ({safe(shape.architecture)}), {engine_name(info)}",
        "",
    ]
    if comparison.rows:
        lines.append(f"{'':<26}{'formula':>14}{'engine':>14}")
    lines += [_check_line(row) for row in comparison.rows]
    for who, why in (
        ("the formula", comparison.formula_refused),
        ("the engine", comparison.engine_refused),
    ):
        if why:
            lines.append(f"{who} refuses: {safe(why, 400)}")
    notes = [*shape.notes]
    if comparison.rows and comparison.compute is None:
        notes.append("compute buffers are not compared: the engine lacks the GPUs asked for")
    return [
        *lines,
        f"verdict: {comparison.verdict}",
        *(f"note: {safe(note, 400)}" for note in notes),
    ]


def _check_line(row: Row) -> str:
    def said(value: int | None) -> str:
        if value is None:
            return "none"
        return format_bytes(value) if row.unit == "bytes" else format_count(value)

    verdict = row.verdict
    if row.low is not None and row.high is not None:
        verdict += f" {format_bytes(row.low)} to {format_bytes(row.high)}"
    return f"{row.name:<26}{said(row.formula):>14}{said(row.engine):>14}  {verdict}"


def engine_name(info: Mapping[str, Any]) -> str:
    """Return the engine's version and commit: what a bug report must name."""
    commit = info.get("commit") or "unknown"
    return f"llama-cpp-python {info.get('version', 'unknown')} (llama.cpp {commit})"
