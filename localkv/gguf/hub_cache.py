"""Models downloaded from a hub, found by repository and file: ``hf:ORG/NAME[/FILE][:QUANT]``.

Three programs keep them: the Hugging Face cache (which newer llama.cpp uses as well), the flat
cache of older llama.cpp, and LM Studio. None of them is asked over the network.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from localkv.errors import ModelError
from localkv.gguf.places import Places, listed
from localkv.gguf.shards import shard_place
from localkv.gguf.text import shown
from localkv.tuples import NamedTuple

PREFIX = "hf:"
#: What may stand in the name of a repository or its owner: hub names, and no path but themselves.
_WORD = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
# find_best_model and gguf_filename_is_model, common/download.cpp of llama.cpp.
_COMPANION = re.compile(r"mmproj|imatrix|mtp-|eagle3-|dflash-|dspark-")
_DEPTH = 4
_MAX_FILES = 2000
_LISTED = 6
_USAGE = "write hf:ORG/NAME/FILE.gguf, hf:ORG/NAME:Q4_K_M or hf:ORG/NAME"


class HubFile(NamedTuple):
    """A .gguf file of a repository: ``name`` within it, with slashes, and where it lies."""

    repo: str
    name: str
    path: str

    @property
    def argument(self) -> str:
        """Return what to type for this file."""
        return f"{PREFIX}{self.repo}/{self.name}"


def find_hub(text: str, places: Places) -> HubFile:
    """Return the one file that ``text`` (without ``hf:``) names; the first shard of a set.

    Raises:
        ModelError: nothing here has that name, or several do; the hint lists them.
    """
    repo, name, quant = _parse(text)
    files = list(repo_files(repo, places))
    if not files:
        raise ModelError(
            f"no .gguf file of {shown(repo)} is in the caches of this machine",
            f"download it, or {_USAGE}; `localkv models` lists what is here",
        )
    if name:
        found = [file for file in files if file.name == name]
        found = found or [file for file in files if os.path.basename(file.name) == name]
    else:
        found = [file for file in _models(files) if _has_quant(file.name, quant)]
    if len(found) == 1:
        return found[0]
    said = f"{PREFIX}{shown(text)}"
    choice = _models(found or files) or files
    names = ", ".join(shown(file.argument) for file in choice[:_LISTED])
    more = f" and {len(choice) - _LISTED} more" if len(choice) > _LISTED else ""
    if not found:
        raise ModelError(f"{said} is not in the caches of this machine", f"there is {names}{more}")
    raise ModelError(f"{said} may be {len(found)} files", f"name one: {names}{more}")


def find_config(text: str, places: Places) -> str | None:
    """Return the folder of ``ORG/NAME`` where it holds a config.json and no GGUF file, else None.

    That is a model as transformers and vLLM load it, in safetensors files. With
    ``ORG/NAME/config.json`` GGUF files do not matter.
    """
    repo, name, quant = _parse(text)
    if quant or (name != "config.json" and (name or next(repo_files(repo, places), None))):
        return None
    for hub in places.hubs:
        for snapshot in snapshots(os.path.join(hub, "models--" + repo.replace("/", "--"))):
            if os.path.isfile(os.path.join(snapshot, "config.json")):
                return snapshot
    return None


def repo_files(repo: str, places: Places) -> Iterator[HubFile]:
    """Yield the .gguf files of ``repo`` in every cache, each name once, best revision first."""
    seen = set()
    folders = [
        snapshot
        for hub in places.hubs
        for snapshot in snapshots(os.path.join(hub, "models--" + repo.replace("/", "--")))
    ]
    folders += [os.path.join(root, *repo.split("/")) for root in places.lm_studio]
    for folder in folders:
        for name, path in gguf_files(folder, _DEPTH):
            if name not in seen:
                seen.add(name)
                yield HubFile(repo, name, path)
    flat = repo.replace("/", "_") + "_"
    for root in places.llama_cpp:
        for name, path in gguf_files(root, 1):
            if name.startswith(flat) and (rest := name[len(flat) :]) not in seen:
                seen.add(rest)
                yield HubFile(repo, rest, path)


def snapshots(folder: str) -> list[str]:
    """Return the snapshot folders of a ``models--ORG--NAME``: main's, other refs', then the rest.

    huggingface_hub and llama.cpp (common/hf-cache.cpp) both follow refs to commits.
    """
    refs = sorted(listed(os.path.join(folder, "refs")), key=lambda name: name != "main")
    named = [_first_line(os.path.join(folder, "refs", name)) for name in refs]
    there = listed(os.path.join(folder, "snapshots"))
    commits = [commit for commit in named if _COMMIT.fullmatch(commit) and commit in there]
    return [
        os.path.join(folder, "snapshots", commit) for commit in dict.fromkeys((*commits, *there))
    ]


def hub_repos(hub: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the folder of every model repository in a Hugging Face cache."""
    for entry in listed(hub):
        repo = entry.removeprefix("models--").replace("--", "/")
        if entry.startswith("models--") and is_repo(repo):
            yield repo, os.path.join(hub, entry)


def gguf_files(folder: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield the .gguf files under ``folder``: the name within it, with slashes, and the path.

    At most ``depth`` folders deep and 2,000 of them; links to folders are not followed, links to
    files are what a Hugging Face snapshot is made of.
    """
    waiting = [("", folder, depth)]
    count = 0
    while waiting and count < _MAX_FILES:
        prefix, current, left = waiting.pop(0)
        for entry in listed(current):
            path = os.path.join(current, entry)
            if entry.lower().endswith(".gguf") and not os.path.isdir(path):
                count += 1
                yield prefix + entry, path
            elif left > 1 and os.path.isdir(path) and not os.path.islink(path):
                waiting.append((f"{prefix}{entry}/", path, left - 1))


def is_companion(name: str) -> bool:
    """Return whether a file goes with a model rather than being one, by llama.cpp's naming."""
    return _COMPANION.search(name.rpartition("/")[2]) is not None


def _models(files: list[HubFile]) -> list[HubFile]:
    return [
        file for file in files if not is_companion(file.name) and shard_place(file.name)[1] == 1
    ]


def _has_quant(name: str, quant: str) -> bool:
    return not quant or re.search(re.escape(quant) + "[.-]", name, re.IGNORECASE) is not None


def _parse(text: str) -> tuple[str, str, str]:
    """Return repository, file within it and quantisation; the last two may be empty."""
    rest, quant = text, ""
    if text.rfind(":") > text.rfind("/"):
        rest, _, quant = text.rpartition(":")
    owner, _, rest = rest.partition("/")
    repo, _, name = rest.partition("/")
    if not is_repo(f"{owner}/{repo}") or (quant and not _WORD.fullmatch(quant)):
        raise ModelError(f"{PREFIX}{shown(text)} names no repository", _USAGE)
    return f"{owner}/{repo}", name, quant


def is_repo(repo: str) -> bool:
    """Return whether ``repo`` can be the name of a repository: ORG/NAME, no path tricks."""
    words = repo.split("/")
    return len(words) == 2 and all(_WORD.fullmatch(word) for word in words)


def _first_line(path: str) -> str:
    try:
        if not os.path.isfile(path):
            return ""
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(64).strip()
    except OSError:
        return ""
