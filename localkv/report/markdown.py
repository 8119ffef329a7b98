"""The report as Markdown: the answer first, the evidence after it."""

from __future__ import annotations

from localkv.report.answer import answer
from localkv.report.cache import cache_sections
from localkv.report.evidence import evidence
from localkv.report.method import method
from localkv.report.page import Page
from localkv.report.served import served
from localkv.report.trouble import not_measured, speed, warnings
from localkv.report.vram import vram


def render_report(page: Page) -> str:
    """Return the whole report; pictures are named relative to it."""
    lines = [
        *answer(page),
        *cache_sections(page),
        *evidence(page),
        *served(page),
        *vram(page),
        *speed(page),
        *not_measured(page),
        *warnings(page),
        *method(page),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"
