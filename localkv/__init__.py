"""localkv: how much memory a local language model really needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localkv.model import read_model
    from localkv.predict.paged import paged_plan
    from localkv.predict.predict import predict

__version__ = "0.1.0"

__all__ = ["__version__", "paged_plan", "predict", "read_model"]

#: Public name -> module that holds it, imported on first use: start-up time is part of the deal.
_LAZY = {"read_model": "localkv.model", "paged_plan": "localkv.predict.paged", "predict": "localkv"}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    # The package localkv.predict is callable, so that the name means both.
    return (
        import_module("localkv.predict")
        if name == "predict"
        else getattr(import_module(module), name)
    )
