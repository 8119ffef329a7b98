"""The models that lie on a machine, each with what it needs and whether that fits here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from localkv.errors import LocalkvError
from localkv.gguf.find import GgufModel, open_model
from localkv.gguf.reader import first_missing
from localkv.gguf.stores import StoredModel
from localkv.gguf.text import shown
from localkv.model.header import companion_kind, read_model, shape_from_header
from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig
from localkv.predict.predict import estimate
from localkv.tuples import NamedTuple

#: The context that is tried, or the training context where that is smaller.
N_CTX = 8192
MODEL, OTHER, BROKEN = "model", "not a model", "broken"
_KINDS = (MODEL, OTHER, BROKEN)
_TIME_UP = "not looked at: time was up"


class Room(NamedTuple):
    """The memory that is free here, in bytes: RAM (None: unknown), and each GPU's."""

    ram: int | None = None
    gpus: tuple[int, ...] = ()


class ShelfRow(NamedTuple):
    """A model that lies here; sizes in bytes, None where there is nothing to tell.

    ``argument`` is what to type for it. ``kind`` is "model", "not a model" or "broken", the last
    two with a ``reason``. ``kv_per_1k`` is what 1,024 tokens take in all caches while sliding
    windows have room, ``kv_per_1k_later`` once they are full. ``need`` is what it takes with one
    slot of ``n_ctx`` tokens; ``fits`` is "GPU", "RAM" or "no", None where ``reason`` says why it
    is not known. ``same_as`` is the argument of a row above that is the same file.
    """

    argument: str
    source: str
    path: str
    kind: str
    reason: str | None = None
    name: str | None = None
    architecture: str | None = None
    file_bytes: int | None = None
    n_ctx_train: int | None = None
    kv_per_1k: int | None = None
    kv_per_1k_later: int | None = None
    n_ctx: int | None = None
    need: int | None = None
    fits: str | None = None
    same_as: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values."""
        return self._asdict()


def shelf(
    models: Iterable[StoredModel], room: Room, *, going_on: Callable[[], bool]
) -> list[ShelfRow]:
    """Return one row for each of ``models``, sorted: models first, then by what to type.

    Headers are read, nothing else, and the same file under two names once. When ``going_on`` ends,
    the rest stays unread and says so.
    """
    known: dict[object, ShelfRow] = {}
    rows = []
    for model in models:
        place = _place(model.path)
        first = known.get(place) if not model.problem else None
        if first is not None:
            row = first._replace(
                argument=model.argument,
                source=model.source,
                path=model.path,
                same_as=first.argument,
            )
        elif going_on():
            row = known[place] = _row(model, room)
        else:
            row = ShelfRow(model.argument, model.source, model.path, BROKEN, _TIME_UP)
        rows.append(row)
    return sorted(rows, key=lambda row: (_KINDS.index(row.kind), row.argument.lower()))


def total_bytes(rows: Iterable[ShelfRow]) -> int:
    """Return the bytes of all files, each counted once."""
    return sum(row.file_bytes or 0 for row in rows if row.same_as is None)


def _place(path: str) -> object:
    """Return what tells a file from others: links to it have the same."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return path
    return (status.st_dev, status.st_ino)


def _row(model: StoredModel, room: Room) -> ShelfRow:
    row = ShelfRow(model.argument, model.source, model.path, BROKEN, model.problem)
    if model.problem:
        return row
    try:
        if model.path.endswith(".json"):
            return _facts(row, read_model(model.path), None, room)
        opened = open_model(model.path)
        row = row._replace(file_bytes=opened.file_bytes)
        other = companion_kind(opened.metadata)
        if not other and not opened.tensors:
            other = "a header without tensors, such as a vocabulary"
        if other:
            return row._replace(kind=OTHER, reason=other)
        shape = shape_from_header(
            opened.metadata, opened.tensors, path=opened.path, file_bytes=opened.file_bytes
        )
        return _facts(row, shape, _not_whole(opened), room)
    except LocalkvError as error:
        # Plenty of repositories hold a config.json of something else than a language model.
        kind = OTHER if model.path.endswith(".json") else BROKEN
        return row._replace(kind=kind, reason=str(error))


def _facts(row: ShelfRow, shape: ModelShape, lacking: str | None, room: Room) -> ShelfRow:
    """Return ``row`` with what ``shape`` says; ``lacking`` is what its files do not hold."""
    row = row._replace(
        kind=MODEL,
        reason=lacking,
        name=shape.name,
        architecture=shape.architecture,
        file_bytes=shape.file_bytes or None,
        n_ctx_train=shape.n_ctx_train or None,
    )
    if shape.rule == "none":
        return row._replace(reason=f"no rule for the architecture {shape.architecture}")
    row = row._replace(
        kv_per_1k=1024 * shape.first_token_bytes(),
        kv_per_1k_later=1024 * shape.marginal_token_bytes(),
        n_ctx=min(N_CTX, shape.n_ctx_train or N_CTX),
    )
    if shape.refused:
        return row._replace(kind=OTHER, reason=shape.refused)
    if not shape.weights_bytes:
        return row._replace(reason="its weights are not there: what it needs is not known")
    return _fitted(row, shape, room)


def _not_whole(opened: GgufModel) -> str | None:
    missing = (tensor for header in opened.headers if (tensor := first_missing(header)))
    tensor = next(missing, None)
    return tensor and f"not whole: no data from tensor {shown(tensor.name)} on"


def _fitted(row: ShelfRow, shape: ModelShape, room: Room) -> ShelfRow:
    """Return ``row`` with what one slot needs, on the GPUs where it fits there, or else in RAM."""
    config = RunConfig(n_ctx=row.n_ctx or 0, n_outputs_max=1)
    host = estimate(shape, config)
    row = row._replace(need=host.total_bytes)
    if room.gpus and _fits_gpus(shape, config, room):
        return row._replace(fits="GPU")
    if room.ram is None:
        return row._replace(reason=row.reason or "how much RAM is free is not known")
    return row._replace(fits="RAM" if host.total_bytes <= room.ram else "no")


def _fits_gpus(shape: ModelShape, config: RunConfig, room: Room) -> bool:
    """Return whether all layers fit on the GPUs, with what stays on the host in RAM."""
    placed = estimate(
        shape,
        config.with_(n_gpu_layers=-1, n_devices=len(room.gpus), device_free=room.gpus),
    )
    sizes = {"host": room.ram, **{f"gpu{i}": size for i, size in enumerate(room.gpus)}}
    return all(_holds(sizes.get(device.name), device.total) for device in placed.devices)


def _holds(size: int | None, total: int) -> bool:
    return size is None or total <= size


def counted(rows: Sequence[ShelfRow], kind: str) -> int:
    """Return how many of ``rows`` are of ``kind``."""
    return sum(row.kind == kind for row in rows)
