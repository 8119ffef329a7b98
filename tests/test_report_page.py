"""The report as text: the whole of a small one, and those of runs that went wrong.

After a change that is meant to change the text, ``python tests/test_report_page.py`` writes the
expected one again; read the difference before keeping it.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from analysis_helpers import GIB, MIB, grid, record, run_info
from markdown_it import MarkdownIt

from localkv.analysis import analyse
from localkv.predict.levers import Lever
from localkv.records import PointRecord, RunInfo, Speed
from localkv.report.markdown import render_report
from localkv.report.page import Page, percent, signed
from localkv.report.table import varying
from localkv.report.terminal import summary_lines
from localkv.report.write import write_report

GOLDEN = Path(__file__).parent / "data" / "report" / "small.md"
HOSTILE = "<img src=x onerror=alert(1)>|\x1b[31m# [a](http://evil.example)\n`x`\u202e"


def page_of(run: RunInfo, records: list[PointRecord]) -> Page:
    return Page(run, tuple(records), analyse(run, records))


def small() -> Page:
    records = [
        *grid(contexts=(1024, 4096, 8192), slots=(1, 2)),
        record(65536, 4, outcome="skipped", reason="needs 3 GiB, 2 GiB available"),
    ]
    records[0] = replace(records[0], speed=(Speed(0, 1, 512.34, 45.6), Speed(512, 1, None, 40.0)))
    pictures = {name: f"{name}.svg" for name in ("cache", "memory", "fit", "stacked", "speed")}
    levers = stored_levers(records[5].key)
    return replace(page_of(run_info(7, levers=levers), records), pictures=pictures)


def stored_levers(key: str) -> dict[str, Any]:
    """Return what a sweep keeps of its levers: one that fits, one that is only a bound."""
    served = {"llama-server": "-c 4096", "ollama": "PARAMETER num_ctx 2048"}
    table = [
        lever("half the context: 4096 tokens", 8 * MIB, 33, "host", served, "shorter *answers*"),
        lever("KV cache on the host", 16 * MIB, None, "gpu", {"llama-server": "-nkvo"}, "slow"),
        {**lever("no prompt cache", 8 * GIB, 30, "host", {}, "<b>read anew</b>"), "bound": True},
    ]
    return {"key": key, "table": table}


def lever(
    change: str, saves: int, slots: int | None, memory: str, flags: dict[str, str], price: str
) -> dict[str, Any]:
    return Lever(change, saves, memory, price, flags, {}, slots).to_dict()


def html(text: str) -> str:
    return str(MarkdownIt("commonmark").enable("table").render(text))


def headings(text: str) -> list[str]:
    return re.findall(r"^## (.*)$", text, re.MULTILINE)


def test_the_whole_of_a_small_report() -> None:
    assert render_report(small()) == GOLDEN.read_text(encoding="utf-8")


def test_the_answer_comes_first_and_the_limits_last() -> None:
    assert headings(render_report(small())) == [
        "Best settings",
        "The KV cache",
        "What to change to need less",
        "Measured against predicted",
        "Where the memory goes",
        "Speed against context",
        "Points without a measurement",
        "Warnings and notes",
        "The model",
        "The machine and the engine",
        "Method and limits",
    ]


def test_every_table_is_a_table() -> None:
    text = render_report(small())
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    page = html(text)
    assert page.count("<tr>") == len(rows) - page.count("<table>")
    assert "|" not in re.sub(r"<code>.*?</code>", "", page, flags=re.DOTALL)


def test_a_cell_larger_than_the_weights_is_marked() -> None:
    assert "**128.00 MiB (1.28x)**" in render_report(page_of(run_info(1), [record(65536)]))
    assert "larger than the weights" not in render_report(page_of(run_info(1), [record(1024)]))


def test_contexts_that_rounding_changed_say_so() -> None:
    one = record(1536, 3)
    told = {**one.prediction, "config": {**one.prediction["config"], "n_ctx_requested": 1024}}
    text = render_report(page_of(run_info(1), [replace(one, prediction=told)]))
    assert "| 1,024 | 3.00 MiB (0.03x), n_ctx 1,536 |" in text
    assert "1024 over 3 slots gives 1536" in text


def test_gqa_is_counted_against_a_kv_head_for_every_head() -> None:
    text = render_report(page_of(run_info(1), [record(8192)]))
    assert "2 KV heads for 8 attention heads" in text
    assert "16.00 MiB instead of 64.00 MiB" in text


def test_models_without_gqa_and_with_mla_claim_no_saving() -> None:
    layer = run_info().model["layers"][0]
    all_heads = run_info(model={"layers": [{**layer, "n_head_kv": layer["n_head"]}]})
    assert "no GQA" in render_report(page_of(all_heads, [record(1024)]))
    mla = run_info(model={"layers": [{**layer, "v_width": 0}]})
    assert "GQA" not in render_report(page_of(mla, [record(1024)]))


@pytest.mark.parametrize("outcome", ["skipped", "failed", "oom", "crashed", "timeout"])
def test_a_run_without_a_measurement_still_says_why(outcome: str) -> None:
    records = [record(c, outcome=outcome, reason="because of this") for c in (1024, 2048)]
    text = render_report(page_of(run_info(2), records))
    assert "No point of this sweep could be measured" in text
    assert text.count("because of this") == 2
    assert "Best settings" not in text
    assert "KV cache" in text


def test_an_empty_run_renders() -> None:
    text = render_report(page_of(run_info(12), []))
    assert "No point of this sweep could be measured" in text
    assert "0 of 12 planned runs made" in text


def test_an_interrupted_run_says_how_much_is_missing() -> None:
    text = render_report(page_of(run_info(24), grid()))
    assert "12 of 24 planned runs made" in text
    assert "resume" in text


def test_a_hostile_model_name_is_harmless_everywhere() -> None:
    run = run_info(
        7,
        model={"name": HOSTILE, "architecture": HOSTILE, "notes": [HOSTILE], "path": f"/{HOSTILE}"},
        environment={HOSTILE: HOSTILE, "host": {"cpu_model": HOSTILE}},
    )
    records = [
        *grid(contexts=(1024, 2048), slots=(1,)),
        record(4096, outcome="failed", reason=HOSTILE, stage=HOSTILE),
        record(8192, types="f16", flash_attn=HOSTILE, outcome=HOSTILE),
    ]
    text = render_report(page_of(run, records))
    assert "\x1b" not in text
    assert "\u202e" not in text
    page = html(text)
    without_details = re.sub(r"</?(details|summary)>", "", page)
    assert "<img src=x" not in without_details
    assert "href" not in page
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert page.count("<tr>") == len(rows) - page.count("<table>")


def test_records_of_an_older_localkv_render() -> None:
    bare = [
        PointRecord.from_dict({"key": "a", "repeat": 0, "outcome": "ok", "config": {}}),
        PointRecord.from_dict({"key": "b", "repeat": 0, "outcome": "failed", "config": {}}),
    ]
    text = render_report(page_of(RunInfo(), bare))
    assert "n_ctx of the model" in text.replace("\\", "")
    assert "no reason recorded" in text


def test_records_survive_their_own_json() -> None:
    records = [PointRecord.from_dict(json.loads(json.dumps(r.to_dict()))) for r in grid()]
    run = RunInfo.from_dict(json.loads(json.dumps(run_info().to_dict())))
    assert render_report(page_of(run, records)) == render_report(page_of(run_info(), grid()))


def test_only_columns_that_vary_are_shown() -> None:
    headers, rows, constant = varying(["a", "b", "c"], [["1", "x", ""], ["2", "x", ""]])
    assert (headers, rows, constant) == (["a"], [["1"], ["2"]], ["b x"])


def test_shares_that_round_to_nothing_have_no_sign() -> None:
    assert signed(-0.0001) == "0.0%"
    assert signed(-0.01) == "-1.0%"
    assert percent(None) == "unknown"


def test_the_summary_is_short_and_names_the_report() -> None:
    lines = summary_lines(small(), "reports/x/report.md")
    assert lines == [
        "Tiny Model: 6 ok, 1 skipped",
        "Largest context that ran, in tokens over all slots: 8,192 with 1 slot, 8,192 with 2 slots",
        *[line for line in lines if line.startswith("What ran fits: at most ")],
        "Should fit as well: 32,768 tokens over 2 slots (limit: training context)",
        *[line for line in lines if line.startswith("Formula against measurement: slope 1.0")],
        *[line for line in lines if line.startswith("One token of context: ")],
        "Warning: 1 run skipped: n_ctx 65536, 4 slots, f16",
        "Report: reports/x/report.md",
    ]
    assert len(lines) == 8


def test_the_summary_of_nothing_is_still_a_summary() -> None:
    lines = summary_lines(page_of(run_info(0), []), "r")
    assert lines[0] == "Tiny Model: no point measured"
    assert lines[-1] == "Report: r"


def test_the_summary_is_safe_on_a_terminal() -> None:
    page = page_of(run_info(12, model={"name": HOSTILE}), grid())
    assert not any(c in line for line in summary_lines(page, "r") for c in "\x1b\n\u202e")


def test_writing_makes_report_and_pictures_and_replaces_old_ones(tmp_path: Path) -> None:
    (tmp_path / "speed.svg").write_text("left over")
    written = write_report(tmp_path, run_info(), grid())
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("cache.svg", "fit.svg", "memory.svg", "report.md", "results.csv", "stacked.svg"),
    ]
    text = written.report.read_text(encoding="utf-8")
    for name in re.findall(r"\]\((\w+\.svg)\)", text):
        assert (tmp_path / name).exists()
    assert text.count(".svg)") == 4
    data = written.to_json()
    assert data["points"]["ok"] == 12
    assert set(data) == {"schema", "run", "report", "points", "fit", "peak_error"}
    assert list(data["fit"]) == [
        *("slope", "slope_low", "slope_high", "intercept_bytes", "r2"),
        *("max_residual_bytes", "held_out_error"),
    ]
    assert written.summary[-1] == f"Report: {tmp_path / 'report.md'}"


def test_the_callers_prediction_is_used(tmp_path: Path) -> None:
    written = write_report(tmp_path, run_info(), grid(), predict=lambda c, n: 9 * GIB)
    assert "nothing" in written.report.read_text(encoding="utf-8")


def test_the_levers_that_the_sweep_stored_are_shown() -> None:
    text = render_report(small())
    rows = [line for line in text.splitlines() if "`-c 4096`" in line or "`-nkvo`" in line]
    assert rows == [
        "| half the context: 4096 tokens | `-c 4096` | `PARAMETER num_ctx 2048` | 8.00 MiB | 33 "
        "| shorter \\*answers\\* |",
        "| KV cache on the host | `-nkvo` |  | 16.00 MiB (gpu) |  | slow |",
    ]
    assert "up to 8.00 GiB" in text
    assert "&lt;b&gt;read anew" in text
    assert "Counted from n\\_ctx 8192, 2 slots, f16" in text


def test_a_run_without_levers_says_which_command_shows_them() -> None:
    path = {"path": "/models/it's.gguf"}
    text = render_report(page_of(run_info(1, model=path), [record(1024)]))
    assert "`localkv capacity '/models/it'\"'\"'s.gguf' --memory auto" in text


def test_levers_that_were_tampered_with_do_no_harm() -> None:
    for table in ("x", [1], [{"change": HOSTILE, "flags": HOSTILE, "saves_bytes": "1"}]):
        levers = {"key": HOSTILE, "table": table}
        text = render_report(page_of(run_info(1, levers=levers), [record(1024)]))
        assert "<img src=x" not in html(text)


if __name__ == "__main__":
    GOLDEN.write_text(render_report(small()), encoding="utf-8")
