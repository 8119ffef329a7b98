"""The child that asks the engine for its plan, without allocating it. Started by ``dryrun``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from localkv.engines.channel import Channel
from localkv.engines.llamacpp import Context, Engine, EngineFailure, Model
from localkv.errors import LocalkvError
from localkv.predict.config import RunConfig

#: Even a dry run keeps the engine's table of cells, 52 bytes for each: beyond this many it is not
#: asked, or the question alone could fill the machine.
MOST_CELLS = 1 << 24


def main() -> None:
    """Answer one job: one message for each configuration, in order."""
    channel = Channel()
    job = channel.job
    configs = [RunConfig.from_dict(entry) for entry in job["configs"]]
    try:
        with Engine() as engine:
            channel.send({"info": asdict(engine.info())})
            _plan(channel, engine, Path(job["path"]), configs, header_only=job["header_only"])
    except EngineFailure as failure:
        channel.send({"error": failure.message})
    except LocalkvError as error:
        channel.send({"error": error.message, "hint": error.hint})


def _plan(
    channel: Channel, engine: Engine, path: Path, configs: list[RunConfig], *, header_only: bool
) -> None:
    with Model.without_weights(engine, path, configs[0], header_only=header_only) as model:
        for config in configs:
            if config.n_ctx > MOST_CELLS:
                channel.send({"refused": f"not asked about more than {MOST_CELLS} cells"})
                continue
            engine.log.clear()
            try:
                with Context(model, config, n_threads=1):
                    channel.send({"engine": engine.parsed_log().to_dict()})
            except EngineFailure as failure:
                channel.send({"refused": failure.message})


if __name__ == "__main__":
    main()
