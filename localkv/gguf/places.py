"""Where programs keep their models on this machine: the one reader of the environment for that.

Everything else in this room is handed a :class:`Places`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from localkv.gguf.demo import cache_dir, user_cache
from localkv.tuples import NamedTuple

#: Ollama's store when it runs as a service of the system: a user of its own on Linux, and a snap.
_OLLAMA_SERVICES = ("/usr/share/ollama/.ollama/models", "/var/snap/ollama/common/models")


class Places(NamedTuple):
    """Folders that hold models, in the order in which they are searched; none need be there.

    ``ollama``: stores with ``manifests`` and ``blobs``; ``hubs``: Hugging Face caches with
    ``models--ORG--NAME``; ``llama_cpp``: llama.cpp's own cache of its older versions, one flat
    folder; ``lm_studio``: PUBLISHER/REPO/FILE; ``demo``: localkv's built-in models.
    """

    ollama: tuple[str, ...] = ()
    hubs: tuple[str, ...] = ()
    llama_cpp: tuple[str, ...] = ()
    lm_studio: tuple[str, ...] = ()
    demo: str = ""


def places() -> Places:
    """Return where models may lie for this user, by the environment and the programs' defaults.

    Sources: Models in envconfig/config.go of Ollama; the constants of huggingface_hub;
    get_cache_directory in common/hf-cache.cpp and fs_get_cache_directory in common/common.cpp of
    llama.cpp, whose newer versions download into the Hugging Face cache, or what LLAMA_CACHE names.
    """
    home = os.path.expanduser("~")
    cache = _variable("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    own_ollama = _variable("OLLAMA_MODELS") or os.path.join(home, ".ollama", "models")
    hub = (
        _variable("HF_HUB_CACHE")
        or _variable("HUGGINGFACE_HUB_CACHE")
        or os.path.join(_variable("HF_HOME") or os.path.join(cache, "huggingface"), "hub")
    )
    return Places(
        ollama=_distinct((own_ollama, *_OLLAMA_SERVICES)),
        hubs=_distinct((_variable("LLAMA_CACHE"), hub)),
        llama_cpp=_distinct((_variable("LLAMA_CACHE"), os.path.join(user_cache(), "llama.cpp"))),
        lm_studio=_distinct(
            (
                os.path.join(home, ".lmstudio", "models"),
                os.path.join(home, ".cache", "lm-studio", "models"),
            )
        ),
        demo=cache_dir(),
    )


def listed(folder: str) -> list[str]:
    """Return the sorted names in ``folder``; none where it is not there or may not be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _variable(name: str) -> str:
    return os.path.expanduser(os.environ.get(name, "").strip().strip("\"'"))


def _distinct(folders: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(os.path.abspath(folder) for folder in folders if folder))
