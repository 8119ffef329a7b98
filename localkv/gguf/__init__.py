"""GGUF model files: find them, read their headers, fetch the built-in ones."""

from __future__ import annotations

from localkv.gguf.find import GgufModel, ModelFiles, locate, open_model
from localkv.gguf.reader import (
    ArrayRef,
    Header,
    TensorInfo,
    check_data,
    first_missing,
    load_array,
    read_header,
)
from localkv.gguf.types import CACHE_TYPES, cache_type, row_bytes

__all__ = [
    "CACHE_TYPES",
    "ArrayRef",
    "GgufModel",
    "Header",
    "ModelFiles",
    "TensorInfo",
    "cache_type",
    "check_data",
    "first_missing",
    "load_array",
    "locate",
    "open_model",
    "read_header",
    "row_bytes",
]
