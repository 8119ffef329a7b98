"""Ollama's store: from a model's name to its blob, and what the manifest keeps beside it.

``ROOT/manifests/HOST/NAMESPACE/MODEL/TAG`` is JSON that names ``ROOT/blobs/sha256-<hex>`` by media
type (Ollama: types/model/name.go, manifest/manifest.go and manifest/paths.go). Manifests come from
a registry: no name or digest in them becomes a path before it was checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from localkv.errors import ModelError
from localkv.gguf.places import listed
from localkv.gguf.text import shown
from localkv.tuples import NamedTuple

PREFIX = "ollama:"
_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_MEDIA = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256[:-]([0-9a-fA-F]{64})")
#: Letters of each part of a name: host, namespace, model, tag. None of them can be "..".
_PARTS = (
    re.compile(r"\w[\w.:-]{0,349}", re.ASCII),
    re.compile(r"\w[\w-]{0,79}", re.ASCII),
    re.compile(r"\w[\w.-]{0,79}", re.ASCII),
    re.compile(r"\w[\w.-]{0,79}", re.ASCII),
)
#: Bytes of a manifest or of the parameters: a real one has a few hundred.
_MAX_JSON = 4 << 20
#: Manifests looked at in one store, and names listed in a hint.
_MAX_NAMES = 5000
_LISTED = 6
_PULL_AGAIN = "pull the model again with `ollama pull`"


class OllamaName(NamedTuple):
    """A full name of a model."""

    host: str
    namespace: str
    model: str
    tag: str

    @property
    def short(self) -> str:
        """Return the name as people type it: what is Ollama's default is left out."""
        name = self.model if self.tag == _TAG else f"{self.model}:{self.tag}"
        if self.host != _HOST:
            return f"{self.host}/{self.namespace}/{name}"
        return name if self.namespace == _NAMESPACE else f"{self.namespace}/{name}"


class OllamaModel(NamedTuple):
    """A model of the store: ``path`` of its GGUF blob, and what Ollama loads or sets with it.

    ``params`` are the parameters of the Modelfile (num_ctx, num_batch, stop, ...), unchecked;
    ``projectors``, ``adapters`` and ``draft`` are paths of further blobs.
    """

    name: OllamaName
    path: str
    manifest: str
    params: Mapping[str, Any]
    projectors: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    draft: str | None = None

    def parameter(self, name: str) -> int | None:
        """Return a parameter that is a count (num_ctx, num_batch, num_gpu), None where unset."""
        value = self.params.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def parse_name(text: str) -> OllamaName:
    """Return the full name that ``text`` stands for: ``[HOST/][NAMESPACE/]MODEL[:TAG]``.

    Raises:
        ModelError: it is not a name that Ollama takes.
    """
    rest, tag = text, _TAG
    if text.rfind(":") > text.rfind("/"):
        rest, _, tag = text.rpartition(":")
    parts = rest.split("/")
    given = (_HOST, _NAMESPACE)[: max(0, 3 - len(parts))]
    name = (*given, *parts, tag)
    if len(name) != 4 or not all(p.fullmatch(s) for p, s in zip(_PARTS, name, strict=True)):
        raise ModelError(
            f"{shown(text)!r} is not a name of an Ollama model", "write ollama:NAME or NAME:TAG"
        )
    return OllamaName(*name)


def find_ollama(text: str, roots: Sequence[str]) -> OllamaModel:
    """Return the model named ``text`` (without ``ollama:``) from the first store that has it.

    Upper and lower case are the same, as they are to Ollama.

    Raises:
        ModelError: no such model here (the hint lists what there is), or its manifest is damaged.
    """
    name = parse_name(text)
    for root in roots:
        manifest = os.path.join(root, "manifests", *name)
        if os.path.isfile(manifest):
            return read_manifest(manifest, root, name)
    known = list(ollama_manifests(roots))
    for found, manifest, root in known:
        if [part.lower() for part in found] == [part.lower() for part in name]:
            return read_manifest(manifest, root, found)
    raise _unknown(name, roots, [found.short for found, _, _ in known])


def ollama_manifests(roots: Iterable[str]) -> Iterator[tuple[OllamaName, str, str]]:
    """Yield the name, the manifest's path and the store of every model, bounded; sorted by name.

    What cannot be listed and what Ollama would not take for a name is passed over.
    """
    for root in roots:
        top = os.path.join(root, "manifests")
        found: list[tuple[str, tuple[str, ...]]] = [(top, ())]
        for pattern in _PARTS:
            found = [
                (os.path.join(folder, entry), (*name, entry))
                for folder, name in found
                for entry in listed(folder)
                if pattern.fullmatch(entry)
            ][:_MAX_NAMES]
        for path, name in found:
            if os.path.isfile(path):
                yield OllamaName(*name), path, root


def read_manifest(manifest: str, root: str, name: OllamaName) -> OllamaModel:
    """Return the model that the file ``manifest`` of the store ``root`` describes.

    Raises:
        ModelError: the manifest or its parameters cannot be understood, or there is no GGUF blob.
    """
    layers = _layers(manifest)
    blobs: dict[str, list[str]] = {}
    for kind, digest in layers:
        if kind in ("model", "projector", "adapter", "draft", "params"):
            blobs.setdefault(kind, []).append(_blob(root, digest, manifest))
    if "model" not in blobs:
        what = "as separate tensors, not as" if "tensor" in dict(layers) else "without"
        raise ModelError(
            f"{shown(manifest)}: {shown(name.short)} is kept {what} a GGUF file",
            "it runs elsewhere (a cloud model) or by another engine: nothing to predict from",
        )
    path = blobs["model"][-1]  # as Ollama: the last one counts
    if not os.path.exists(path):
        raise ModelError(
            f"{shown(manifest)}: its blob {os.path.basename(path)} is not there", _PULL_AGAIN
        )
    params = _json(blobs["params"][-1]) if "params" in blobs else {}
    return OllamaModel(
        name=name,
        path=path,
        manifest=manifest,
        params=params,
        projectors=tuple(blobs.get("projector", ())),
        adapters=tuple(blobs.get("adapter", ())),
        draft=blobs["draft"][-1] if "draft" in blobs else None,
    )


def _layers(manifest: str) -> list[tuple[str, object]]:
    """Return the kind and the digest of every layer, neither of them trusted."""
    layers = _json(manifest).get("layers")
    if not isinstance(layers, list) or not all(isinstance(layer, dict) for layer in layers):
        raise ModelError(f"{shown(manifest)}: the manifest lists no layers", _PULL_AGAIN)
    return [
        (str(layer.get("mediaType")).removeprefix(_MEDIA), layer.get("digest")) for layer in layers
    ]


def _blob(root: str, digest: object, manifest: str) -> str:
    match = _DIGEST.fullmatch(digest) if isinstance(digest, str) else None
    if match is None:
        raise ModelError(
            f"{shown(manifest)}: {shown(str(digest)[:80])!r} is not a SHA-256 digest", _PULL_AGAIN
        )
    return os.path.join(root, "blobs", f"sha256-{match[1]}")


def _json(path: str) -> dict[str, Any]:
    """Return the JSON object in a small file."""
    import json

    try:
        if not os.path.isfile(path):  # opening a pipe would wait for ever
            raise ModelError(f"{shown(path)} is not there or not a file", _PULL_AGAIN)
        with open(path, "rb") as file:
            data = file.read(_MAX_JSON + 1)
    except OSError as error:
        raise ModelError(
            f"{shown(path)} cannot be read: {error.strerror}", "check its rights"
        ) from error
    if len(data) > _MAX_JSON:
        raise ModelError(f"{shown(path)} has more than {_MAX_JSON >> 20} MiB", _PULL_AGAIN)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ModelError(f"{shown(path)} is not a JSON object", _PULL_AGAIN)
    return found


def _unknown(name: OllamaName, roots: Sequence[str], known: list[str]) -> ModelError:
    message = f"there is no model {shown(name.short)} in Ollama's store"
    locked = [root for root in roots if os.path.isdir(root) and not os.access(root, os.R_OK)]
    if locked:
        message += f" ({shown(locked[0])} may not be read)"
    if not known:
        looked = " or ".join(shown(root) for root in roots)
        return ModelError(
            message, f"there is none at all in {looked}; set OLLAMA_MODELS if need be"
        )
    from difflib import get_close_matches

    near = get_close_matches(name.short, known, n=3, cutoff=0.5)
    same = [other for other in known if other.split(":")[0] == name.short.split(":")[0]]
    choice = list(dict.fromkeys((*same, *near))) or known
    more = f" and {len(choice) - _LISTED} more" if len(choice) > _LISTED else ""
    names = ", ".join(f"{PREFIX}{shown(one)}" for one in choice[:_LISTED])
    return ModelError(message, f"there is {names}{more}; `localkv models` lists all")
