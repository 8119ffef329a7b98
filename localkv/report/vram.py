"""The section on device memory: what NVML told of this process, where there was a GPU."""

from __future__ import annotations

from localkv.analysis import points
from localkv.records import PointRecord, Reading
from localkv.report.escape import escape_markdown
from localkv.report.page import Page, size, tokens
from localkv.report.table import table

_PHASES = ("model", "context", "decode")


def vram(page: Page) -> list[str]:
    """Return the section; nothing where no point has a reading of device memory."""
    told = [record for record in page.points if _at_peak(record).value is not None]
    if not told:
        return []
    rows = [
        [
            tokens(points.n_ctx(record)),
            str(points.slots(record)),
            escape_markdown(points.types_text(record)),
            *(size(_after(record, phase)) for phase in _PHASES),
            size(_at_peak(record).value),
        ]
        for record in told
    ]
    headers = ["n_ctx", "slots", "cache", *(f"after {phase}" for phase in _PHASES), "peak"]
    return [
        "## VRAM",
        "",
        "What the NVIDIA driver counts as this process's own, after each step, and at the most.",
        "",
        *table(headers, rows, right=range(len(headers))),
        "",
    ]


def _after(record: PointRecord, phase: str) -> int | None:
    found = record.phase(phase)
    return found.value("vram_process") if found else None


def _at_peak(record: PointRecord) -> Reading:
    return record.peak.get("vram_process", Reading(None))
