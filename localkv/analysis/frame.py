"""The records of a run as a table, for notebooks and spreadsheets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from localkv.analysis import points
from localkv.records import PointRecord, Reading

if TYPE_CHECKING:
    import pandas as pd

_CONFIG = (
    "n_seq_max",
    "cache_type_k",
    "cache_type_v",
    "kv_unified",
    "swa_full",
    "flash_attn",
    "n_batch",
    "n_ubatch",
    "n_gpu_layers",
)
_ENGINE = ("model_bytes", "kv_bytes", "recurrent_bytes", "output_bytes", "compute_bytes")


def frame(records: Iterable[PointRecord]) -> pd.DataFrame:
    """Return one row per run of a point, in the order of ``records``; sizes in bytes.

    Columns: key, repeat, outcome, reason, stage; n_ctx and n_ctx_per_slot after rounding and the
    settings; ``predicted_*`` and ``engine_*`` by kind; ``<phase>_<reading>`` and
    ``peak_<reading>``; ``seconds_*``. A figure that is not known is missing (NA), never 0.
    """
    import pandas as pd

    table: pd.DataFrame = pd.DataFrame([_row(record) for record in records]).convert_dtypes()
    return table


def _row(record: PointRecord) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": record.key,
        "repeat": record.repeat,
        "outcome": record.outcome,
        "reason": record.reason,
        "stage": record.stage,
        "n_ctx": points.n_ctx(record),
        "n_ctx_per_slot": points.n_ctx_seq(record),
    }
    row |= {name: record.config.get(name) for name in _CONFIG}
    row |= {f"predicted_{kind}_bytes": points.predicted(record, kind) for kind in points.KINDS}
    row["predicted_total_bytes"] = points.predicted_total(record)
    row["predicted_resident_compute_bytes"] = record.resident_compute
    row |= {f"engine_{name}": points.dig_int(record.engine, name) for name in _ENGINE}
    for phase in record.phases:
        row |= _readings(phase.name, phase.readings)
    row |= _readings("peak", record.peak)
    return row | {f"seconds_{name}": seconds for name, seconds in record.timings.items()}


def _readings(where: str, readings: dict[str, Reading]) -> dict[str, int | None]:
    return {f"{where}_{key}": reading.value for key, reading in readings.items()}
