"""What the chosen program makes of the settings, in one sentence."""

from __future__ import annotations

from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig
from localkv.predict.defaults import OLLAMA_SINGLE


def program_note(program: str, shape: ModelShape, config: RunConfig) -> str:
    """Return how ``program`` reads the context and what it sets by itself, for ``config``."""
    slots = config.n_seq_max
    if program == "ollama":
        return _ollama(shape, config)
    if program == "llama-cpp-python":
        windows = "at full size" if config.swa_full else "cut to their window"
        flash = {"off": "off", "on": "on", "auto": "where it can be"}[config.flash_attn]
        return (
            f"as llama-cpp-python: one context of {config.n_ctx or shape.n_ctx_train} tokens, "
            f"sliding layers {windows} (swa_full), flash attention {flash}"
        )
    if slots == 1:
        return "as llama-server: one slot has the whole of -c"
    if config.kv_unified:
        return f"as llama-server: -c is the total, in one cache that {slots} slots share"
    return f"as llama-server: -c is the total, divided among {slots} slots"


def _ollama(shape: ModelShape, config: RunConfig) -> str:
    slots = config.n_seq_max
    alone = shape.architecture in OLLAMA_SINGLE
    return (
        f"as Ollama: num_ctx {config.n_ctx // slots} x {slots} parallel = {config.n_ctx} tokens "
        f"in all, in batches of {config.n_batch}"
        + (f"; it runs {shape.architecture} with one request at a time" if alone else "")
    )
