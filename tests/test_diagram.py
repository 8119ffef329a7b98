"""The cache as notebooks and pages: what each page holds, in SVG and as text."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest
from analysis_helpers import prediction
from cli_helpers import Run
from hypothesis import given
from hypothesis import strategies as st

import localkv
from localkv.report.diagram import cache_diagram
from localkv.report.diagram_text import diagram_lines
from localkv.report.notebooks import BLOCK, Picture, picture

SVG = "{http://www.w3.org/2000/svg}"
SLIDING = [{"kind": "sliding", "window": 256}] * 3 + [{"kind": "full", "window": 0}]


def drawn(*arguments: Any, **named: Any) -> Picture:
    return picture(*arguments, **named, max_slots=6, max_pages=32)


def texts(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in ET.fromstring(svg).iter(f"{SVG}text")]


def with_sliding(slots: int = 4) -> dict[str, Any]:
    told = prediction(8192, slots, "f16")
    told["kv"]["caches"].append(
        {
            "kind": "sliding",
            "cells": 768,
            "streams": slots,
            "layers": 3,
            "k_bytes": 768 * slots,
            "v_bytes": 768 * slots,
        }
    )
    return told


def test_the_diagram_tells_kinds_slots_and_sizes() -> None:
    found = texts(cache_diagram(with_sliding(), SLIDING, name="X"))
    assert "The cache of X" in found
    assert {"4 x full attention", "3 x sliding window", "slot 1", "slot 4"} <= set(found)
    assert "4 layers in order" in found
    assert "keeps the last 256" in found
    assert "16.00 MiB" in found


def test_pages_are_used_as_far_as_the_request_goes() -> None:
    told = prediction(8192, 1, "f16")
    shown = drawn(told, requests=[4096])
    owners = shown.rows[0].strips[0].owners
    assert owners == (0,) * 16 + (None,) * 16
    lines = diagram_lines(told, requests=[4096])
    assert any("[" + "1" * 8 + "." * 8 + "]" in line and "4,096 of 8,192" in line for line in lines)
    assert not any("example" in line for line in lines)


def test_invented_lengths_are_called_an_example() -> None:
    told = prediction(8192, 4, "f16")
    assert drawn(told).example
    assert any("is an example" in line for line in texts(cache_diagram(told)))
    assert any("is an example" in line for line in diagram_lines(told))


def test_a_sliding_notebook_is_short_and_begins_again() -> None:
    shown = drawn(with_sliding(), SLIDING, [2000, 100, 256, 257])
    full, sliding = shown.rows
    assert len(sliding.strips[0].owners) < len(full.strips[0].owners)
    assert [strip.tokens for strip in sliding.strips] == [256, 100, 256, 256]
    assert [strip.wraps for strip in sliding.strips] == [True, False, False, True]
    assert not any(strip.wraps for strip in full.strips)
    assert sum("begins again" in line for line in diagram_lines(with_sliding(), SLIDING)) > 0


def test_sliding_layers_at_full_size_forget_nothing() -> None:
    told = with_sliding(1)
    told["config"]["swa_full"] = True
    told["kv"]["caches"][1]["cells"] = 8192
    strip = drawn(told, SLIDING, [5000]).rows[1].strips[0]
    assert (strip.tokens, strip.wraps) == (5000, False)


def test_cells_that_rounding_added_are_marked() -> None:
    told = localkv.predict("demo-swa", n_ctx=8000, n_seq_max=3).to_dict()
    strip = drawn(told, requests=[0, 0, 0]).rows[0].strips[0]
    # 8000 over 3 slots are 2666 each, which the engine rounds up to a multiple of 256.
    assert told["config"]["n_ctx_per_slot"] == 2816
    assert strip.padding == 1
    assert any("there by rounding" in line for line in diagram_lines(told))
    even = localkv.predict("demo-swa", n_ctx=8192, n_seq_max=4).to_dict()
    assert not any("there by rounding" in line for line in diagram_lines(even))


def test_a_shared_cache_is_one_notebook_and_a_state_one_page() -> None:
    told = prediction(8192, 4, "f16")
    told["config"]["kv_unified"] = True
    told["kv"]["caches"][0].update(cells=8192, streams=1)
    assert "all 4 slots write into the same notebooks" in texts(cache_diagram(told))
    (strip,) = drawn(told, requests=[256, 512, 0, 256]).rows[0].strips
    assert strip.owners[:5] == (0, 1, 1, 3, None)
    told["recurrent"]["bytes"] = 1 << 20
    layers = [{"kind": "recurrent"}] * 6 + [{"kind": "full"}] * 4
    assert "6 x recurrent" in texts(cache_diagram(told, layers))
    assert drawn(told, layers).rows[1].strips[0].owners == (0,)


def test_many_slots_are_counted_not_drawn() -> None:
    told = prediction(65536, 64, "f16")
    found = texts(cache_diagram(told))
    assert "and 58 more" in found
    assert "slot 7" not in found
    assert any("and 55 more like these" in line for line in diagram_lines(told))


@given(st.lists(st.integers(0, 2048), min_size=4, max_size=4))
def test_blocks_waste_less_than_one_per_request_and_cache(lengths: list[int]) -> None:
    told = prediction(8192, 4, "f16")
    paged = drawn(told, requests=lengths).paged
    assert paged is not None
    token = told["kv"]["bytes"] / 8192
    assert paged.held == pytest.approx(token * sum(lengths))
    waste = (paged.paged - paged.held) / token
    assert 0 <= waste < BLOCK * sum(length > 0 for length in lengths) + 1
    assert paged.paged <= paged.reserved == told["kv"]["bytes"]


def test_texts_of_the_diagram_stay_on_its_card() -> None:
    told = prediction(1 << 20, 16, "f16")
    told["recurrent"]["bytes"] = 1 << 34
    layers = [{"kind": "recurrent"}, {"kind": "full"}, {"kind": "sliding"}] * 30
    root = ET.fromstring(cache_diagram(told, layers, requests=[5], name="n" * 500))
    for element in root.iter(f"{SVG}text"):
        # No letter of a sans-serif face is wider on average than 0.62 of its size.
        width = len("".join(element.itertext())) * float(element.get("font-size", "0")) * 0.62
        x = float(element.get("x", "0"))
        left = x - width if element.get("text-anchor") == "end" else x
        assert left >= 0
        assert left + width <= 830, "".join(element.itertext())


@pytest.mark.parametrize("width", [20, 60, 100])
@pytest.mark.parametrize("slots", [1, 4, 64])
def test_the_text_keeps_within_its_width(width: int, slots: int) -> None:
    lines = diagram_lines(
        with_sliding(slots), SLIDING * 30, name="\x1b[31m" + "n" * 99, width=width
    )
    assert max(map(len, lines)) <= max(width, 60)
    assert not any("\x1b" in line for line in lines)


def test_inspect_draws_the_cache_that_was_asked_for(run: Run) -> None:
    code, out, _ = run(
        "inspect", "demo-swa", "--diagram", "--requests", "900,200", "--ctx-per-slot", "4096"
    )
    assert code == 0
    assert "2 slots of 4,096 tokens" in out
    assert "200 of 4,096" in out
    assert "512, begins again" in out
    assert "is an example" not in out
    code, out, _ = run("inspect", "demo-swa", "--diagram")
    assert code == 0
    assert "is an example" in out


@pytest.mark.parametrize("options", [("--requests", "3"), ("--diagram", "--json")])
def test_a_diagram_is_text_and_requests_are_for_it(run: Run, options: tuple[str, ...]) -> None:
    code, out, err = run("inspect", "demo", *options)
    assert (code, out) == (2, "")
    assert "diagram" in err
