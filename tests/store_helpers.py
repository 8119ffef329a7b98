"""Stores of models as other programs lay them out, made of tiny files."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from gguf_helpers import small_model

MEDIA = "application/vnd.ollama.image."
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def blob(root: Path, content: bytes) -> str:
    """Put ``content`` into an Ollama store and return its digest as manifests write it."""
    digest = hashlib.sha256(content).hexdigest()
    path = root / "blobs" / f"sha256-{digest}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return f"sha256:{digest}"


def manifest_path(root: Path, name: str) -> Path:
    """Return the manifest's place for a full ``HOST/NAMESPACE/MODEL/TAG``."""
    return root / "manifests" / name


def ollama_model(
    root: Path,
    name: str = "registry.ollama.ai/library/tiny/latest",
    content: bytes | None = None,
    params: object = None,
    **more: bytes,
) -> Path:
    """Write a model and return its manifest; ``more`` are further layers by kind."""
    layers = [{"mediaType": MEDIA + "model", "digest": blob(root, content or small_model())}]
    if params is not None:
        data = json.dumps(params).encode()
        layers.append({"mediaType": MEDIA + "params", "digest": blob(root, data)})
    layers += [{"mediaType": MEDIA + kind, "digest": blob(root, d)} for kind, d in more.items()]
    path = manifest_path(root, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": layers}))
    return path


def hub_file(
    hub: Path, repo: str, name: str, content: bytes | None = None, commit: str = COMMIT
) -> Path:
    """Put a file into a Hugging Face cache, as blob and link, and return the link."""
    folder = hub / f"models--{repo.replace('/', '--')}"
    data = small_model() if content is None else content
    stored = folder / "blobs" / hashlib.sha256(data).hexdigest()
    link = folder / "snapshots" / commit / name
    for path in (stored, link, folder / "refs" / "main"):
        path.parent.mkdir(parents=True, exist_ok=True)
    stored.write_bytes(data)
    link.symlink_to(os.path.relpath(stored, link.parent))
    if not (folder / "refs" / "main").exists():
        (folder / "refs" / "main").write_text(commit)
    return link
