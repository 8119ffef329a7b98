"""The table of a run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from localkv.analysis.frame import frame
from localkv.records import Phase, PointRecord, Reading

OK = PointRecord(
    key="a",
    repeat=0,
    outcome="ok",
    config={"n_ctx": 4096, "n_seq_max": 2, "cache_type_k": "f16"},
    engine={"n_ctx": 4096, "n_ctx_seq": 2048, "kv_bytes": 300},
    prediction={"kv": {"bytes": 300}, "total_bytes": 1000},
    phases=(Phase("context", 1.0, {"rss_anon": Reading(400), "vram_process": Reading(None)}),),
    peak={"rss": Reading(900)},
    timings={"load": 0.5},
)
SKIPPED = PointRecord(
    key="b", repeat=0, outcome="skipped", config={"n_ctx": 8192, "n_seq_max": 1}, reason="no room"
)


def test_a_row_per_run_with_its_figures() -> None:
    row = frame([OK, SKIPPED]).iloc[0]

    assert row["n_ctx_per_slot"] == 2048
    assert row["predicted_kv_bytes"] == row["engine_kv_bytes"] == 300
    assert row["context_rss_anon"] == 400
    assert row["peak_rss"] == 900
    assert row["seconds_load"] == pytest.approx(0.5)


def test_what_is_not_known_is_missing_and_not_zero() -> None:
    table = frame([OK, SKIPPED])

    assert pd.isna(table["context_vram_process"]).all()
    assert pd.isna(table.loc[1, "peak_rss"])
    assert table.loc[1, "reason"] == "no room"


def test_the_table_survives_csv(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    frame([OK, SKIPPED]).to_csv(path, index=False)

    back = pd.read_csv(path).convert_dtypes()

    assert list(back["key"]) == ["a", "b"]
    assert back.loc[0, "context_rss_anon"] == 400
