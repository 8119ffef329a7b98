"""llama-server's command line for the package xllamacpp, which brings the server without one.

``python -m localkv.engines.xllamacpp_server FLAGS...`` takes the flags that
:mod:`localkv.engines.llama_server` gives, sets the fields of xllamacpp's ``CommonParams`` that
they stand for, and serves until it is told to stop. A flag that it does not know is refused: what
runs must be what was asked for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

_FLASH = {"auto": -1, "off": 0, "on": 1}
_SPLIT = {"none": 0, "layer": 1}
_LOAD = {"none": 0, "mmap": 1}

#: Flag -> (field of CommonParams, how its word becomes the value).
_VALUES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "-c": ("n_ctx", int),
    "-np": ("n_parallel", int),
    "-b": ("n_batch", int),
    "-ub": ("n_ubatch", int),
    "-mg": ("main_gpu", int),
    "-lv": ("verbosity", int),
    "--port": ("port", int),
    "--cache-ram": ("cache_ram_mib", int),
    "--ctx-checkpoints": ("n_ctx_checkpoints", int),
    # As common/arg.cpp reads them: -1 is auto, -2 all.
    "-ngl": ("n_gpu_layers", lambda word: -2 if word == "all" else int(word)),
    "--host": ("hostnames", lambda word: [word]),
    "--fit": ("fit_params", lambda word: word == "on"),
}
#: Switch -> (field, value).
_SWITCHES: dict[str, tuple[str, Any]] = {
    "--kv-unified": ("kv_unified", True),
    "--swa-full": ("swa_full", True),
    "--no-kv-offload": ("no_kv_offload", True),
    "--no-op-offload": ("no_op_offload", True),
    "--no-repack": ("no_extra_bufts", True),
    "--offline": ("offline", True),
    "--metrics": ("endpoint_metrics", True),
    "--slots": ("endpoint_slots", True),
}


def params_for(words: list[str], module: Any) -> Any:
    """Return ``module.CommonParams`` set as ``words`` say.

    Raises:
        ValueError: a flag that is not known here.
    """
    params = module.CommonParams()
    enums = {
        "-ctk": ("cache_type_k", lambda word: _cache_type(module, word)),
        "-ctv": ("cache_type_v", lambda word: _cache_type(module, word)),
        "-fa": ("flash_attn_type", lambda word: module.llama_flash_attn_type(_FLASH[word])),
        "-sm": ("split_mode", lambda word: module.llama_split_mode(_SPLIT[word])),
        "--load-mode": ("load_mode", lambda word: module.llama_load_mode(_LOAD[word])),
    }
    rest = iter(words)
    for flag in rest:
        if flag in _SWITCHES:
            field, value = _SWITCHES[flag]
        elif flag in ("-m", "-t"):
            _set_inner(params, flag, next(rest))
            continue
        elif known := {**_VALUES, **enums}.get(flag):
            field, value = known[0], known[1](next(rest))
        else:
            raise ValueError(f"xllamacpp's server is not started with {flag} here")
        setattr(params, field, value)
    return params


def _set_inner(params: Any, flag: str, word: str) -> None:
    if flag == "-m":
        params.model.path = word
    else:
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(word)


def _cache_type(module: Any, word: str) -> Any:
    return getattr(module.ggml_type, f"GGML_TYPE_{word.upper()}")


def main(words: list[str]) -> int:
    """Serve with the settings in ``words`` until a signal ends the process."""
    import xllamacpp

    try:
        params = params_for(words, xllamacpp)
    except (ValueError, KeyError, AttributeError, StopIteration) as error:
        print(error, file=sys.stderr)
        return 2
    server = xllamacpp.Server(params)
    # Its log says so only at some levels.
    print(f"listening on {server.listening_address}", file=sys.stderr, flush=True)
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
