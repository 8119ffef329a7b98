from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.records import (
    OUTCOMES,
    PHASES,
    SCHEMA,
    Phase,
    PointRecord,
    Reading,
    RunInfo,
    Speed,
)

TEXT = st.text(max_size=12)
SECONDS = st.floats(0, 1e6, allow_nan=False)
JSON_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
JSON_OBJECT = st.dictionaries(TEXT, JSON_VALUE, max_size=3)
READINGS = st.builds(
    Reading, st.none() | st.integers(-(2**63), 2**63), TEXT, TEXT, why=st.none() | TEXT
)
KEYED_READINGS = st.dictionaries(TEXT, READINGS, max_size=3)
PHASE_RECORDS = st.builds(Phase, st.sampled_from(PHASES), SECONDS, KEYED_READINGS)
SPEEDS = st.builds(
    Speed, st.integers(0), st.integers(1, 256), st.none() | SECONDS, st.none() | SECONDS
)


def tuples(of: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(of, max_size=3).map(tuple)


POINTS = st.builds(
    PointRecord,
    key=TEXT,
    repeat=st.integers(0, 99),
    outcome=st.sampled_from(OUTCOMES),
    config=JSON_OBJECT,
    reason=st.none() | TEXT,
    stage=st.none() | TEXT,
    phases=tuples(PHASE_RECORDS),
    peak=KEYED_READINGS,
    engine=JSON_OBJECT,
    prediction=JSON_OBJECT,
    timings=st.dictionaries(TEXT, SECONDS, max_size=3),
    speed=tuples(SPEEDS),
    environment=TEXT,
    log_tail=tuples(TEXT),
)
RUNS = st.builds(
    RunInfo,
    localkv=TEXT,
    created=TEXT,
    argv=tuples(TEXT),
    seed=st.integers(0, 2**63),
    points=st.integers(0, 10**6),
    repeats=st.integers(1, 100),
    plan=JSON_OBJECT,
    model=JSON_OBJECT,
    environment=JSON_OBJECT,
)

#: The least that each kind of record consists of.
LEAST: dict[Any, dict[str, Any]] = {
    Reading: {"value": 4096},
    Phase: {"name": "context", "seconds": 1.5},
    Speed: {"depth": 0, "slots": 2, "prefill_tokens_per_s": 9.5, "decode_tokens_per_s": None},
    PointRecord: {"key": "k", "repeat": 0, "outcome": "ok", "config": {"n_ctx": 1024}},
    RunInfo: {},
}


def through_json(record: Any) -> Any:
    """Return ``record`` as it comes back from a file."""
    return type(record).from_dict(json.loads(json.dumps(record.to_dict())))


@given(st.one_of(READINGS, PHASE_RECORDS, SPEEDS, POINTS, RUNS))
def test_a_record_comes_back_from_a_file_as_it_was(record: Any) -> None:
    assert through_json(record) == record


@given(st.one_of(READINGS, PHASE_RECORDS, SPEEDS, POINTS, RUNS), JSON_VALUE)
def test_fields_that_a_newer_localkv_wrote_are_ignored(record: Any, value: Any) -> None:
    data = {**record.to_dict(), "a field of the future": value}
    assert type(record).from_dict(data) == record


@pytest.mark.parametrize("kind", LEAST, ids=lambda kind: kind.__name__)
def test_fields_that_an_older_localkv_did_not_write_take_their_default(kind: Any) -> None:
    record = kind.from_dict(LEAST[kind])
    assert record == kind(**LEAST[kind])
    # One field at a time, too: what stays is not disturbed by what is missing.
    for field in fields(kind):
        data = {name: value for name, value in record.to_dict().items() if name != field.name}
        if field.name in LEAST[kind]:
            continue
        assert kind.from_dict(data) == record


def test_a_record_carries_its_schema() -> None:
    assert PointRecord.from_dict(LEAST[PointRecord]).to_dict()["schema"] == SCHEMA
    assert RunInfo().to_dict()["schema"] == SCHEMA


@given(READINGS)
def test_a_phase_answers_none_for_what_was_not_or_could_not_be_read(reading: Reading) -> None:
    phase = Phase("model", 1.0, {"uss": reading})
    assert phase.value("uss") == reading.value
    assert phase.value("vram_process") is None


def test_a_point_finds_its_phases_by_name() -> None:
    phases = tuple(Phase(name, float(i)) for i, name in enumerate(PHASES[:3]))
    record = PointRecord(**LEAST[PointRecord], phases=phases)
    assert [record.phase(name) for name in PHASES] == [*phases, None, None, None]
