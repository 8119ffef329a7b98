"""The page of ``localkv inspect``: facts in, lines of a given width out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from localkv.cli.terminal import columns, cut, table, wrap
from localkv.predict.layer_pattern import SIGNS
from localkv.report.escape import escape_terminal as safe
from localkv.units import format_bytes, format_count, plural

_LABEL = 18
_WIDE = 10_000
_MOST_TYPES = 6
_MOST_CROSSINGS = 4
#: What is painted on this page alone, see cli.terminal.show.
STYLES = {
    r"(?<=^ {18})[FsRH=-]{3,}$": "bold",
    r"^From .* on \(\*\).*": "bold",
}


def page(facts: Mapping[str, Any], width: int) -> list[str]:
    """Return the lines of the page, none wider than ``width`` columns.

    ``facts`` as ``predict.inspection.inspect_model`` returns them.
    """
    lines = [_title(facts, width), ""]
    for label, value in _facts(facts):
        lines += wrap(value, width, f"{label:<{_LABEL}}", " " * _LABEL)
    if facts["kv_table"]:
        lines += ["", *_kv_table(facts, width)]
    lines.append("")
    for heading, key in (("assumed", "assumed"), ("note", "notes")):
        for text in facts[key]:
            if not text.startswith("weights unknown: "):  # said where the weights stand
                lines += wrap(f"{heading}: {safe(text, 400)}", width, "", "  ")
    lines += [line for text in _advice(facts) for line in wrap(f"hint: {text}", width, "", "  ")]
    return lines if lines[-1] else lines[:-1]


def _title(facts: Mapping[str, Any], width: int) -> str:
    kind = f" ({cut(safe(facts['architecture'], 60), width // 3)})"
    return cut(safe(facts["name"]), width - columns(kind)) + kind


def _facts(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "parameters", _parameters(facts)
    yield "weights", _weights(facts)
    context = facts["n_ctx_train"]
    yield (
        "training context",
        plural(context, "token") if context else _why(facts, "n_ctx_train"),
    )
    yield "vocabulary", format_count(facts["n_vocab"])
    yield from _layers(facts)
    yield from _cache(facts)
    yield from _savings(facts)


def _bytes(count: int) -> str:
    """Return a size whose unit stays on its line, see cli.terminal.wrap."""
    return format_bytes(count).replace(" ", "\xa0")


def _why(facts: Mapping[str, Any], name: str) -> str:
    return f"unknown: {safe(facts['unknown'].get(name, 'the file does not say'), 300)}"


def _parameters(facts: Mapping[str, Any]) -> str:
    if facts["n_params"] is None:
        return _why(facts, "n_params")
    text = format_count(facts["n_params"])
    if not facts["n_expert"]:
        return text
    active = facts["n_params_active"]
    said = format_count(active) if active is not None else _why(facts, "n_params_active")
    return f"{text}; active for one token: {said} ({plural(facts['n_expert'], 'expert')})"


def _weights(facts: Mapping[str, Any]) -> str:
    if facts["weights_bytes"] is None:
        return _why(facts, "weights_bytes")
    text = _bytes(facts["weights_bytes"])
    mix = sorted(facts["quantisation"], key=lambda entry: -entry["bytes"])
    kinds = [f"{safe(entry['type'], 20)} {_bytes(entry['bytes'])}" for entry in mix]
    if len(kinds) > _MOST_TYPES:
        kinds[_MOST_TYPES:] = [plural(len(kinds) - _MOST_TYPES, "more type")]
    said = ", ".join(kinds) or facts["dtype"]
    files = len(facts["paths"])
    shards = f" in {files} files" if files > 1 and facts["quantisation"] else ""
    return f"{text}{shards}{f': {said}' if said else ''}"


def _layers(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    signs = facts["layer_signs"]
    if signs is None:
        yield "layers", f"{facts['n_layer']}, of unknown kinds"
        return
    nextn = facts["n_layer_nextn"]
    extra = f", the last {nextn} for predicting ahead (NextN)" if nextn else ""
    kinds = dict.fromkeys(signs)
    if len(kinds) == 1:
        yield "layers", f"{len(signs)}, all {SIGNS[signs[0]]}{extra}"
    else:
        yield "layers", f"{len(signs)}: {facts['layer_pattern']}{extra}"
        yield "", signs
        yield "", ", ".join(f"{sign} {SIGNS[sign]}" for sign in kinds)
    for text in _heads(facts["layers"], mla=facts["uses_mla"]):
        yield "heads", text
    windows = sorted({group["window"] for group in facts["layers"]} - {0})
    if windows:
        yield "sliding window", f"{', '.join(map(format_count, windows))} tokens"


def _heads(groups: Sequence[Mapping[str, Any]], *, mla: bool) -> list[str]:
    """Return the heads of the layers that have a cache; with their number where they differ."""
    counts: dict[str, int] = {}
    for group in groups:
        if group["kind"] in ("full", "sliding") and group["n_head_kv"]:
            text = _latent_text(group) if mla else _head_text(group)
            counts[text] = counts.get(text, 0) + group["count"]
    if len(counts) < 2:
        return list(counts)
    return [f"{text} in {plural(n, 'layer')}" for text, n in counts.items()]


def _head_text(group: Mapping[str, Any]) -> str:
    kv, k, v = group["n_head_kv"], group["head_dim_k"], group["head_dim_v"]
    width = f"head_dim {k}" if k == v else f"head_dim {k} for K, {v} for V"
    return f"{plural(group['n_head'], 'head')}, {plural(kv, 'KV head')}, {width}"


def _latent_text(group: Mapping[str, Any]) -> str:
    heads = plural(group["n_head"], "head")
    return f"{heads}, one latent of {group['head_dim_k']} elements for all of them (MLA)"


def _cache(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if facts["cache"] == "unknown":
        yield "KV per token", _why(facts, "kv_per_token")
        return
    if facts["cache"] == "none":
        yield "KV cache", "none: this model keeps nothing from one token to the next"
        return
    per_token = facts["kv_per_token"]
    if "kv" in facts["cache"]:
        first, marginal = per_token["first"], per_token["marginal"]
        text = _bytes(first)
        if marginal != first:
            text += f" for the first, {_bytes(marginal)} once the sliding windows are full"
        yield "KV per token", text
        if per_token["textbook"] != first:
            yield "", f"(the textbook formula says {_bytes(per_token['textbook'])})"
    else:
        yield "KV cache", "none: the state below has the same size at any context"
    if facts["state_bytes_per_slot"]:
        size = _bytes(facts["state_bytes_per_slot"])
        yield "state per slot", f"{size} of recurrent state, whatever the context"


def _savings(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    gqa, mla, sliding = facts["gqa"], facts["mla"], facts["sliding"]
    if gqa and gqa["ratio"] > 1:
        yield (
            "GQA saves",
            _less(gqa, "multi_head_bytes", "a KV head for each head", per_token=True),
        )
    elif gqa:
        yield "GQA saves", "nothing: there are as many KV heads as heads"
    if mla:
        yield "MLA saves", _less(mla, "per_head_bytes", "K and V of each head", per_token=True)
    elif "mla" in facts["unknown"]:
        yield "MLA saves", _why(facts, "mla")
    if sliding:
        yield "windows save", _less(sliding, "all_full_bytes", "every layer full")


def _less(saving: Mapping[str, Any], other: str, how: str, *, per_token: bool = False) -> str:
    """Return a saving in words: the ratio, then the bytes with it and without it."""
    if saving["ratio"] <= 1:
        return f"nothing at {plural(saving['ctx_per_slot'], 'token')}"
    text = f"a factor of {saving['ratio']:.3g} against {how}: "
    if per_token:
        each = saving[f"{other}_per_token"]
        text += f"{_bytes(saving['bytes_per_token'])} per token, not {_bytes(each)}; "
    return text + (
        f"{_bytes(saving['bytes'])} for {plural(saving['ctx_per_slot'], 'token')}, not "
        f"{_bytes(saving[other])}"
    )


def _kv_table(facts: Mapping[str, Any], width: int) -> list[str]:
    """Return the table under its heading: one if it fits, else sizes and percentages apart."""
    types = "/".join(dict.fromkeys((facts["cache_type_k"], facts["cache_type_v"])))
    what = "KV cache" if facts["cache"] == "kv" else "KV cache and state"
    if facts["cache"] == "state":
        what, types = "Recurrent state", "f32"
    weights = facts["weights_bytes"]
    heading = f"{what} in {types} by tokens per slot and slots"
    if weights:
        heading += f", % of the weights ({_bytes(weights)})"
    lines = wrap(f"{heading}:", width)
    grid = _grid(facts["kv_table"])
    if not weights:
        lines += _split(grid, _size, width)
    elif _fits(both := _block(grid, lambda r: f"{_size(r)} {_percent(r)}{_mark(r)}"), width):
        lines += both
    else:
        lines += _split(grid, lambda row: _size(row) + _mark(row), width)
        lines += ["", *_split(grid, lambda row: _percent(row) + _mark(row), width)]
    return lines + wrap(_crossing(facts), width)


#: Rows of the table: tokens per slot, then the figures of that row by number of slots.
_Grid = Mapping[int, Mapping[int, Mapping[str, Any]]]


def _grid(rows: Sequence[Mapping[str, Any]]) -> _Grid:
    grid: dict[int, dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        grid.setdefault(row["ctx_per_slot"], {})[row["slots"]] = row
    return grid


def _block(
    grid: _Grid, cell: Callable[[Mapping[str, Any]], str], slots: Sequence[int] | None = None
) -> list[str]:
    """Return the table of ``slots`` (all of them by default), as wide as it comes."""
    shown = slots or list(next(iter(grid.values())))
    # The blank stands where the mark of a cell does, so that numbers and headings line up.
    headers = ["tokens", *(f"{plural(count, 'slot')} " for count in shown)]
    rows = [
        [format_count(tokens), *(cell(by_slots[count]) for count in shown)]
        for tokens, by_slots in grid.items()
    ]
    return table(headers, rows, _WIDE, left=())


def _split(grid: _Grid, cell: Callable[[Mapping[str, Any]], str], width: int) -> list[str]:
    """Return the table in as many parts, side by side no more, as it takes to fit."""
    slots = list(next(iter(grid.values())))
    for most in range(len(slots), 0, -1):
        parts = [_block(grid, cell, slots[at : at + most]) for at in range(0, len(slots), most)]
        if most == 1 or all(_fits(part, width) for part in parts):
            break
    lines = parts[0]
    for part in parts[1:]:
        lines += ["", *part]
    return lines


def _fits(lines: Sequence[str], width: int) -> bool:
    return max(map(len, lines)) <= width


def _size(row: Mapping[str, Any]) -> str:
    return format_bytes(row["bytes"])


def _percent(row: Mapping[str, Any]) -> str:
    share = 100 * row["of_weights"]
    return f"{'<1%' if 0 < share < 0.5 else f'{share:.0f}%':>4}"


def _mark(row: Mapping[str, Any]) -> str:
    return "*" if (row["of_weights"] or 0) > 1 else " "


def _crossing(facts: Mapping[str, Any]) -> str:
    """Return in words from where on the cache is larger than the weights."""
    if facts["weights_bytes"] is None:
        return "The weights are not known, so the cache is not compared with them."
    edge: list[Mapping[str, int]] = []
    for cell in facts["exceeds_weights"]:  # more slots each time: only shorter contexts tell more
        if not edge or cell["ctx_per_slot"] < edge[-1]["ctx_per_slot"]:
            edge.append(cell)
    if not edge:
        return "In none of these is the cache larger than the weights."
    said = [f"{cell['slots']} x {format_count(cell['ctx_per_slot'])}" for cell in edge]
    said[0] = f"{plural(edge[0]['slots'], 'slot')} x {plural(edge[0]['ctx_per_slot'], 'token')}"
    *others, last = said[:_MOST_CROSSINGS]
    where = f"{', '.join(others)} or {last}" if others else last
    return f"From {where} on (*) the cache is larger than the weights."


def _advice(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield what to do about what is missing here."""
    if facts["cache"] != "unknown":
        return
    if facts["refused"]:
        yield "the engine will not load this file: convert it again, or get another one"
    else:
        yield "`localkv predict MODEL --engine` asks the installed engine for its own figures"
