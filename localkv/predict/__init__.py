"""Pure formulas: a model's shape and the settings of a run in, an estimate out.

The package itself can be called: ``localkv.predict(model, n_ctx=8192)`` is
:func:`localkv.predict.predict.predict`, although importing any module of the package binds the
name ``localkv.predict`` to the package.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from localkv.predict.config import RunConfig
from localkv.predict.estimate import Estimate


class _CallablePackage(ModuleType):
    """The package as a function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Estimate:
        """Call :func:`localkv.predict.predict.predict`."""
        from localkv.predict.predict import predict as run

        return run(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage

__all__ = ["Estimate", "RunConfig"]
