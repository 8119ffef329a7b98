"""``localkv inspect``: one page about a model file."""

from __future__ import annotations

import json
from typing import Any

import click

from localkv.cli.options import chosen_model, json_option, model_argument
from localkv.report.escape import escape_terminal as safe
from localkv.units import format_bytes, format_count

_LETTERS = {"full": "F", "sliding": "s", "recurrent": "R", "none": "-"}


@click.command("inspect", epilog="Example: localkv inspect model.gguf -ctk q8_0 -ctv q8_0")
@model_argument
@click.option("-ctk", "--cache-type-k", default="f16", show_default=True, help="K cache type.")
@click.option("-ctv", "--cache-type-v", default="f16", show_default=True, help="V cache type.")
@json_option
def command(
    model: str | None,
    model_option: str | None,
    cache_type_k: str,
    cache_type_v: str,
    as_json: bool,
) -> None:
    """Show what a model file says about its memory: layers, KV heads, KV per token, KV table.

    Only the header is read. The table is for llama-server's layout: a cache of its own for every
    slot, sliding layers at their window.
    """
    from localkv.model import read_model
    from localkv.predict.inspection import inspect_model

    shape = read_model(chosen_model(model, model_option))
    facts = inspect_model(shape, cache_type_k, cache_type_v)
    if as_json:
        print(json.dumps(facts))
        return
    for line in page(facts):
        print(line)


def page(facts: dict[str, Any]) -> list[str]:
    """Return the lines of the page; ``facts`` as ``inspect_model`` returns them."""
    lines = [
        f"{safe(facts['name'])} ({safe(facts['architecture'])})",
        "",
        *(f"{label:<16}  {value}" for label, value in _facts(facts)),
    ]
    if facts["kv_table"]:
        types = "/".join(dict.fromkeys((facts["cache_type_k"], facts["cache_type_v"])))
        lines += ["", f"KV cache by context per slot and slots ({types}), * where it exceeds the"]
        lines += ["weights:", *_table(facts)]
    for heading, key in (("assumed", "assumed"), ("note", "notes")):
        lines += [f"{heading}: {safe(text)}" for text in facts[key]]
    return lines


def _facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    mix = sorted(facts["quantisation"], key=lambda entry: -entry["bytes"])
    kinds = ", ".join(f"{entry['type']} {format_bytes(entry['bytes'])}" for entry in mix[:4])
    found = [
        ("parameters", format_count(facts["n_params"])),
        ("weights", f"{format_bytes(facts['weights_bytes'])} ({kinds})"),
        ("training context", f"{format_count(facts['n_ctx_train'])} tokens"),
        ("vocabulary", format_count(facts["n_vocab"])),
        ("layers", f"{facts['n_layer']}: {_strip(facts['layers'])}"),
    ]
    found += [("heads", text) for text in dict.fromkeys(map(_heads, facts["layers"])) if text]
    if facts["window"]:
        found.append(("sliding window", f"{format_count(facts['window'])} tokens"))
    per_token = facts["kv_per_token"]
    if per_token is None:
        return [*found, ("KV cache", "unknown: localkv has no rule for this architecture")]
    found.append(("KV per token", format_bytes(per_token["first"])))
    if per_token["marginal"] != per_token["first"]:
        full = f"{format_bytes(per_token['marginal'])} once the sliding windows are full"
        found.append(("", full))
    if per_token["textbook"] != per_token["first"]:
        found.append(("textbook figure", f"{format_bytes(per_token['textbook'])} per token"))
    if facts["gqa"] and facts["gqa"]["ratio"] > 1:
        whole = format_bytes(facts["gqa"]["multi_head_bytes_per_token"])
        ratio = f"{facts['gqa']['ratio']:.3g}"
        found.append(("GQA saves", f"{ratio} times less than one KV head per head ({whole})"))
    return found


def _strip(groups: list[dict[str, Any]]) -> str:
    letters = "".join(_LETTERS.get(group["kind"], "?") * group["count"] for group in groups)
    words = {"F": "full", "s": "sliding", "R": "recurrent", "-": "no cache"}
    legend = ", ".join(f"{c} {words[c]}" for c in dict.fromkeys(letters) if c in words)
    return f"{letters if len(letters) <= 64 else letters[:61] + '...'} ({legend})"


def _heads(group: dict[str, Any]) -> str:
    if not group["n_head_kv"]:
        return ""
    widths = f"head_dim {group['head_dim_k']}"
    if group["head_dim_v"] != group["head_dim_k"]:
        widths += f" (V {group['head_dim_v']})"
    return f"{group['n_head']} heads, {group['n_head_kv']} KV heads, {widths}"


def _table(facts: dict[str, Any]) -> list[str]:
    slots = list(dict.fromkeys(row["slots"] for row in facts["kv_table"]))
    cells: dict[int, list[str]] = {}
    for row in facts["kv_table"]:
        mark = "*" if (row["of_weights"] or 0) > 1 else " "
        cells.setdefault(row["ctx_per_slot"], []).append(format_bytes(row["bytes"]) + mark)
    header = f"{'ctx per slot':>12}" + "".join(
        f"{f'{count} slot' + 's' * (count > 1):>14}" for count in slots
    )
    return [header] + [
        f"{size:>12}" + "".join(f"{cell:>14}" for cell in row) for size, row in cells.items()
    ]
