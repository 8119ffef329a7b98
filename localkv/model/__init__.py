"""The facts of a model that decide its memory, read from a header by the engine's own rules."""

from __future__ import annotations

from localkv.model.header import read_model, shape_from_header
from localkv.model.shape import LAYER_KINDS, LayerSpec, ModelShape
from localkv.model.specs import CacheLayer, CacheSpec
from localkv.model.weights import MatrixGroup

__all__ = [
    "LAYER_KINDS",
    "CacheLayer",
    "CacheSpec",
    "LayerSpec",
    "MatrixGroup",
    "ModelShape",
    "read_model",
    "shape_from_header",
]
