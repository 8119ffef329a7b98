"""What the tests of levers share: invented models, and one lever out of many."""

from __future__ import annotations

from functools import cache

import predict_zoo

from localkv.model import ModelShape, shape_from_header
from localkv.predict.levers import Lever


@cache
def invented(architecture: str, seed: int) -> ModelShape:
    return shape_from_header(predict_zoo.metadata(architecture, seed=seed), (), path="x.gguf")


def one(levers: tuple[Lever, ...], words: str) -> Lever:
    """Return the only lever whose change begins with ``words``."""
    (found,) = [lever for lever in levers if lever.change.startswith(words)]
    return found


def none(levers: tuple[Lever, ...], words: str) -> bool:
    return not any(lever.change.startswith(words) for lever in levers)
