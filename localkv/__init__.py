"""localkv: how much memory a local language model really needs."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would load typing, which alone takes as long as Python
if TYPE_CHECKING:
    from typing import Any

    from localkv.model import read_model
    from localkv.predict.capacity import kv_capacity
    from localkv.predict.paged import paged_plan
    from localkv.predict.predict import predict

__version__ = "0.1.0"

__all__ = ["__version__", "kv_capacity", "paged_plan", "predict", "read_model"]

#: Public name -> module that holds it, imported on first use: start-up time is part of the deal.
_LAZY = {
    "kv_capacity": "localkv.predict.capacity",
    "paged_plan": "localkv.predict.paged",
    "predict": "localkv",
    "read_model": "localkv.model",
}


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
