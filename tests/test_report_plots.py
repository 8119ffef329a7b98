"""The pictures: well-formed, text as text, the same every time, nothing where there is no data."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from analysis_helpers import grid, record, run_info

from localkv.analysis import analyse
from localkv.records import PointRecord, RunInfo, Speed
from localkv.report.diagram import draw_cache
from localkv.report.page import Page
from localkv.report.plots import draw_fit, draw_memory, draw_speed, draw_stacked
from localkv.report.style import tokens_text, unit_for

SVG = "{http://www.w3.org/2000/svg}"
DRAWERS = {
    "fit": draw_fit,
    "memory": draw_memory,
    "stacked": draw_stacked,
    "speed": draw_speed,
    "cache": draw_cache,
}
HOSTILE = "<script>\"'&\x1b]8;;x\x07 $x$ \u202e"


def page_of(records: list[PointRecord], run: RunInfo | None = None) -> Page:
    run = run or run_info(len(records))
    return Page(run, tuple(records), analyse(run, records))


def with_speed(records: list[PointRecord]) -> list[PointRecord]:
    measured = (Speed(0, 1, 500.0, 40.0), Speed(1024, 1, 400.0, None), Speed(2048, 1, None, 30.0))
    return [replace(records[0], speed=measured), *records[1:]]


def texts(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("name", DRAWERS)
def test_pictures_are_xml_with_text_a_card_and_a_title(name: str, tmp_path: Path) -> None:
    path = DRAWERS[name](page_of(with_speed(grid())), tmp_path / "x.svg")
    assert path is not None
    svg = path.read_text(encoding="utf-8")
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title") is not None
    assert len(texts(svg)) >= 8
    # Outlined letters would be glyphs that are defined once and used often.
    assert not re.search(r'id="(DejaVu|glyph)', svg)
    assert "#FFFFFF" in svg.upper()
    assert "<dc:date>" not in svg


@pytest.mark.parametrize("name", DRAWERS)
def test_the_same_run_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    first, second = (
        DRAWERS[name](page_of(with_speed(grid())), tmp_path / f"{i}.svg") for i in range(2)
    )
    assert first is not None
    assert second is not None
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", DRAWERS)
def test_nothing_is_drawn_of_nothing(name: str, tmp_path: Path) -> None:
    bare = PointRecord.from_dict({"key": "a", "repeat": 0, "outcome": "ok", "config": {}})
    for records in ([], [bare]):
        assert DRAWERS[name](page_of(records, RunInfo()), tmp_path / "x.svg") is None
        assert list(tmp_path.iterdir()) == []


def test_axes_are_labelled_in_a_unit_that_suits(tmp_path: Path) -> None:
    fit = draw_fit(page_of(grid()), tmp_path / "fit.svg")
    assert fit is not None
    found = texts(fit.read_text(encoding="utf-8"))
    assert {"predicted (MiB)", "measured (MiB)", "residual (KiB)", "1 slot", "4 slots"} <= set(
        found
    )
    memory = draw_memory(page_of(grid()), tmp_path / "memory.svg")
    assert memory is not None
    found = texts(memory.read_text(encoding="utf-8"))
    assert {"256", "512", "1k", "2k", "4k", "8k", "memory (MiB)"} <= set(found)


def test_several_cache_types_have_a_panel_each(tmp_path: Path) -> None:
    page = page_of(grid(types=("f16", "q8_0")))
    memory = draw_memory(page, tmp_path / "memory.svg")
    assert memory is not None
    found = texts(memory.read_text(encoding="utf-8"))
    assert {"Memory, cache in f16", "Memory, cache in q8_0"} <= set(found)


def test_a_large_grid_is_thinned_to_what_can_be_read(tmp_path: Path) -> None:
    records = grid(contexts=[1024 * i for i in range(1, 21)])
    stacked = draw_stacked(page_of(records), tmp_path / "s.svg")
    assert stacked is not None
    bars = [t for t in texts(stacked.read_text(encoding="utf-8")) if " tokens, " in t]
    assert len(bars) == 24
    assert any(t.startswith("1k tokens") for t in bars)
    assert any(t.startswith("20k tokens") for t in bars)
    assert "24 of 60 points" in stacked.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", DRAWERS)
def test_hostile_names_stay_text(name: str, tmp_path: Path) -> None:
    records = with_speed(grid(contexts=(1024, 2048)))
    records = [
        replace(r, config={**r.config, "cache_type_k": HOSTILE}) if i % 2 else r
        for i, r in enumerate(records)
    ]
    path = DRAWERS[name](page_of(records, run_info(model={"name": HOSTILE})), tmp_path / "x.svg")
    assert path is not None
    svg = path.read_text(encoding="utf-8")
    ET.fromstring(svg)
    assert "<script" not in svg
    assert "\x1b" not in svg


@pytest.mark.parametrize(
    ("values", "unit"),
    [([3 << 30], "GiB"), ([3 << 20, 1], "MiB"), ([-(3 << 10)], "KiB"), ([5], "B"), ([], "B")],
)
def test_the_unit_follows_the_largest_value(values: list[float], unit: str) -> None:
    assert unit_for(values)[1] == unit


def test_contexts_are_written_short() -> None:
    assert [tokens_text(c) for c in (512, 1024, 1536, 131072)] == ["512", "1k", "1.5k", "128k"]


def test_drawing_needs_no_measurement(tmp_path: Path) -> None:
    skipped = [record(c, outcome="skipped", reason="no") for c in (1024, 2048, 4096)]
    page = page_of(skipped)
    assert draw_memory(page, tmp_path / "m.svg") is not None
    assert draw_stacked(page, tmp_path / "s.svg") is not None
    assert draw_fit(page, tmp_path / "f.svg") is None
