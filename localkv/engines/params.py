"""RunConfig as the engine's own structures, every field set on purpose.

The defaults of the C API are not those of any program that people run (``swa_full`` is on there,
and ``n_outputs_max`` means the whole batch), so nothing here is left to them except the RoPE
fields, which mean "from the model" when zero or negative.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from localkv.gguf.types import cache_type
from localkv.predict.config import RunConfig

_FLASH = {"auto": -1, "off": 0, "on": 1}
_SPLIT = {"none": 0, "layer": 1}
#: llama_model_params.load_mode: none reads the file into memory, mmap maps it.
LOAD_NONE, LOAD_MMAP = 0, 1


def model_params(
    api: ModuleType, config: RunConfig, *, no_alloc: bool, mmap: bool = True, devices: bool = True
) -> Any:
    """Return ``llama_model_params`` for ``config``.

    ``no_alloc`` loads metadata only and lets contexts report sizes without allocating them;
    ``devices=False`` keeps the model off every GPU.
    """
    params = api.llama_model_default_params()
    params.n_gpu_layers = config.n_gpu_layers
    params.split_mode = _SPLIT[config.split_mode]
    params.main_gpu = config.main_gpu
    if config.tensor_split is not None:
        params.tensor_split = _tensor_split(api, config.tensor_split)
    params.load_mode = LOAD_NONE if no_alloc or not mmap else LOAD_MMAP
    params.vocab_only = False
    params.check_tensors = False
    params.use_extra_bufts = config.repack
    params.no_host = False
    params.no_alloc = no_alloc
    params.load_mtp = False
    if not devices:
        params.devices = ctypes.cast((ctypes.c_void_p * 1)(None), ctypes.c_void_p)
    return params


def _tensor_split(api: ModuleType, shares: Sequence[float]) -> Any:
    padded = (ctypes.c_float * api.llama_max_devices())(*shares)
    return ctypes.cast(padded, ctypes.POINTER(ctypes.c_float))


def context_params(api: ModuleType, config: RunConfig, *, n_threads: int) -> Any:
    """Return ``llama_context_params`` for ``config``; ``n_threads`` for both phases."""
    params = api.llama_context_default_params()
    params.n_ctx = config.n_ctx
    params.n_batch = config.n_batch
    params.n_ubatch = config.n_ubatch
    params.n_seq_max = config.n_seq_max
    params.n_rs_seq = 0
    params.n_outputs_max = config.n_outputs_max
    params.n_outputs_max_per_seq = 0
    params.n_threads = n_threads
    params.n_threads_batch = n_threads
    params.flash_attn_type = _FLASH[config.flash_attn]
    params.type_k = cache_type(config.cache_type_k).id
    params.type_v = cache_type(config.cache_type_v).id
    params.embeddings = False
    params.offload_kqv = not config.no_kv_offload
    params.op_offload = config.op_offload
    params.no_perf = True
    params.swa_full = config.swa_full
    params.kv_unified = config.kv_unified
    return params
