"""Statistics of a run: records in, an :class:`~localkv.analysis.result.Analysis` out."""

from __future__ import annotations

from localkv.analysis.result import Analysis, analyse

__all__ = ["Analysis", "analyse"]
