"""Decodes tokens with models of zeroed weights and prints the engine's size of their state.

Standard input: ``{"models": {NAME: PATH}, "runs": [{"config": {...}, "tokens": [1, ...]}]}``.
Standard output: a line per model and run,
``{"name", "run", "n_swa", "takes_back", "sizes": [[tokens, whole, partial], ...]}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from localkv.engines.llamacpp import Context, Engine, EngineFailure, Model
from localkv.predict.config import RunConfig

SLOT, PARTIAL, STEP = 1, 1, 64


def measure(engine: Engine, model: Model, run: dict[str, Any]) -> dict[str, Any]:
    config = RunConfig.from_dict(run["config"])
    size = engine.api.llama_state_seq_get_size_ext
    with Context(model, config, n_threads=1) as context:
        done, sizes = 0, []
        for tokens in run["tokens"]:
            for start in range(done, tokens, STEP):
                positions = range(start, min(start + STEP, tokens))
                context.decode([(SLOT, 0)] * len(positions), positions)
            done = tokens
            whole, partial = (size(context.handle, SLOT, flag) for flag in (0, PARTIAL))
            sizes.append((tokens, whole, partial))
        memory = engine.api.llama_get_memory(context.handle)
        takes_back = bool(engine.api.llama_memory_seq_rm(memory, SLOT, done - 1, -1))
    return {"sizes": sizes, "takes_back": takes_back}


def main() -> None:
    job = json.load(sys.stdin)
    with Engine() as engine:
        for name, path in job["models"].items():
            with Model(engine, Path(path), RunConfig()) as model:
                n_swa = engine.api.llama_model_n_swa(model.handle)
                for number, run in enumerate(job["runs"]):
                    try:
                        found = measure(engine, model, run)
                    except EngineFailure as failure:
                        found = {"refused": failure.message}
                    line = {"name": name, "run": number, "n_swa": n_swa, **found}
                    print(json.dumps(line), flush=True)


main()
