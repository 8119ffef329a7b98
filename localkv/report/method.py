"""The last sections: the model, the machine and engine, how it was measured, and the limits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from localkv.analysis import points
from localkv.report.escape import escape_markdown
from localkv.report.page import Page, size, tokens
from localkv.report.table import table
from localkv.report.trouble import command_line
from localkv.units import format_bytes, plural

#: A server's process has another number in every run.
_PROCESS = re.compile(r"/proc/\d+/")


def method(page: Page) -> list[str]:
    """Return the lines about model, machine, method and limits."""
    return [
        "## The model",
        "",
        *table(["", ""], _model(page)),
        "",
        "## The machine and the engine",
        "",
        *table(["", ""], _machine(page.run.environment)),
        "",
        *_how(page),
    ]


def _model(page: Page) -> list[list[str]]:
    model = page.run.model
    rows = [
        ["name", page.name],
        ["architecture", escape_markdown(model.get("architecture") or "unknown")],
        ["file", size(points.dig_int(model, "file_bytes"))],
        ["weights", size(points.dig_int(model, "weights_bytes"))],
        ["layers", _layers(model)],
        ["training context", tokens(points.dig_int(model, "n_ctx_train") or None)],
        ["embedding, vocabulary", _pair(model, "n_embd", "n_vocab")],
        ["quantisation", _quantisation(model)],
    ]
    rows += [["assumed", escape_markdown(x, 400)] for x in _texts(model.get("assumed"))]
    rows += [["note", escape_markdown(x, 400)] for x in _texts(model.get("notes"))]
    return [row for row in rows if row[1] not in ("", "unknown")]


def _layers(model: Mapping[str, Any]) -> str:
    kinds: dict[str, int] = {}
    for layer in model.get("layers") or ():
        kind = escape_markdown(points.dig(layer, "kind") or "unknown")
        window = points.dig_int(layer, "window")
        kind += f" (window {window})" if window else ""
        kinds[kind] = kinds.get(kind, 0) + 1
    if not kinds:
        return tokens(points.dig_int(model, "n_layer"))
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


def _pair(model: Mapping[str, Any], first: str, second: str) -> str:
    values = [points.dig_int(model, first), points.dig_int(model, second)]
    return ", ".join(tokens(v) for v in values) if any(values) else ""


def _quantisation(model: Mapping[str, Any]) -> str:
    parts = []
    for entry in model.get("quantisation") or ():
        if isinstance(entry, list | tuple) and len(entry) == 3:
            name, count, held = entry
            parts.append(
                f"{escape_markdown(name)} {plural(count, 'tensor')} ({format_bytes(held)})"
            )
    return ", ".join(parts)


def _texts(value: Any) -> list[str]:
    return [str(x) for x in value] if isinstance(value, list | tuple) else []


#: Facts that say nothing to a reader of the report; run.json keeps them.
_LEFT_OUT = ("cpu_features", "system_info", "page_size")


def _machine(environment: Mapping[str, Any]) -> list[list[str]]:
    rows = [[escape_markdown(name), text] for name, text in _flat(environment)]
    return rows or [["recorded", "nothing"]]


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        name = f"{prefix}{key}".replace("_", " ")
        if key in _LEFT_OUT or value is None or value in ("", [], (), {}):
            continue
        if isinstance(value, Mapping):
            if {"value", "unit"} <= set(value):
                yield name, _reading(value)
            else:
                yield from _flat(value, f"{name} ")
        elif isinstance(value, list | tuple):
            yield from _flat_list(name, value)
        else:
            yield name, _scalar(key, value)


def _flat_list(name: str, values: list[Any] | tuple[Any, ...]) -> Iterator[tuple[str, str]]:
    if not all(isinstance(value, Mapping) for value in values):
        yield name, escape_markdown(", ".join(str(value) for value in values))
        return
    for index, value in enumerate(values):
        text = "; ".join(f"{key}: {shown}" for key, shown in _flat(value))
        yield f"{name} {index}", text


def _reading(value: Mapping[str, Any]) -> str:
    count = points.dig_int(value, "value")
    if count is None:
        why = value.get("why")
        return "unknown" + (f", because {escape_markdown(why)}" if why else "")
    return format_bytes(count) if value.get("unit") == "B" else f"{count} {value.get('unit')}"


def _scalar(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and key in ("available", "total", "free", "used", "limit"):
        return format_bytes(value)
    return escape_markdown(value)


def _how(page: Page) -> list[str]:
    run = page.run
    counts = page.analysis.counts
    done = ", ".join(f"{count} {escape_markdown(name)}" for name, count in counts.items() if count)
    return [
        "## Method and limits",
        "",
        f"Made by localkv {escape_markdown(run.localkv)}"
        + (f" on {escape_markdown(run.created)}" if run.created else "")
        + f" with {command_line(page)}. Points: {done or 'none'}; "
        f"{plural(run.repeats, 'run')} of each, in an order shuffled with seed {run.seed}.",
        "",
        _phases(page),
        "",
        *table(
            ["figure", "where it comes from"],
            [
                *_terms(page),
                [
                    "table of cells",
                    "formula: 52 bytes per cell (llama-kv-cells.h), which no log line shows",
                ],
                ["growth, peak", f"measured: {_measured_source(page)}"],
                [
                    "held beyond the buffers",
                    "measured: the median of peak less prediction over all points",
                ],
                ["available memory", escape_markdown(page.analysis.answers.source or "unknown")],
            ],
        ),
        "",
        f"Limits: one machine, one engine build. {_weights(page)} Large contexts reserve "
        "a compute buffer that short prompts do not touch in full. The intercept belongs to this "
        "engine and this model.",
        "",
    ]


def _phases(page: Page) -> str:
    read = "Memory is read at the end of each phase, and the peak is the kernel's own mark."
    program = next((r.server.get("program") for r in page.points if r.server), None)
    if program is None:
        return (
            "Every run is a fresh process: baseline (interpreter and engine library), model "
            f"loaded, context created, one full ubatch decoded in every slot, closed. {read}"
        )
    attached = any(r.server.get("attached") for r in page.points)
    closed = "the server ended"
    if program == "ollama":
        closed = "unloaded"
    elif attached:
        closed = "never: the server ran already and goes on"
    text = (
        f"Every run is the model in {escape_markdown(program)}: baseline (no process holds it), "
        "context (loaded), decode (a prompt of about one ubatch read in every slot), closed "
        f"({closed}). A server loads weights and context in one go, so that the phase model is "
        "not told apart."
    )
    if program == "llama-server" and not attached:
        text += " Its prompt cache and checkpoints, host memory beside the model, are off."
    return f"{text}{_heap(page)} {read}"


def _heap(page: Page) -> str:
    """Return what became of the heap of a runner that is a Go program, "" for any other."""
    engine = page.run.environment.get("engine")
    if points.dig(engine, "heap"):
        return (
            " How much freed memory its runner holds would be chance: the settings above, engine "
            "heap, keep that steady."
        )
    if points.dig(engine, "runner") not in (None, "llama-server"):
        return (
            " How much freed memory its runner holds is chance, a MiB or more: --repeats evens "
            "that out, and a server that localkv starts (--server-bin) is kept steady."
        )
    return ""


def _weights(page: Page) -> str:
    if any(r.config.get("mmap") is False for r in page.points):
        return "Weights are read into memory, as this server does it, and stay there."
    return (
        "Weights are mapped from the file, so their pages count as memory of the process but can "
        "be dropped by the system."
    )


def _terms(page: Page) -> list[list[str]]:
    """Return where each predicted figure comes from, in the words of the largest point's terms."""
    record = max(page.points, key=lambda r: points.predicted_total(r) or 0, default=None)
    rows = []
    for term in (record.prediction.get("terms") or ()) if record else ():
        name, source = points.dig(term, "name"), points.dig(term, "source")
        if name and source:
            formula = points.dig(term, "formula")
            text = f"{source}: {formula}" if formula else str(source)
            rows.append([escape_markdown(name), escape_markdown(text, 400)])
    return rows


def _measured_source(page: Page) -> str:
    names = {s.source for s in page.analysis.growth.samples}
    names |= {s.source for s in page.analysis.peak.samples}
    read = {
        _PROCESS.sub("/proc/PID/", reading.source)
        for r in page.points
        for phase in r.phases
        for key, reading in phase.readings.items()
        if key in names and reading.source and reading.value
    }
    return escape_markdown(", ".join(sorted(read) or sorted(names)) or "nothing", 400)
