"""Every model that lies in given places: names and files, no header read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

from localkv.errors import ModelError
from localkv.gguf import hub_cache, ollama_store
from localkv.gguf.demo import DEMOS
from localkv.gguf.places import Places, listed
from localkv.gguf.shards import shard_place
from localkv.tuples import NamedTuple

OLLAMA, HUB, LM_STUDIO, LLAMA_CPP, OWN, FOLDER = (
    "Ollama",
    "Hugging Face cache",
    "LM Studio",
    "llama.cpp cache",
    "localkv",
    "folder",
)
#: Bounds of a search in a folder that was named: levels down, folders and files looked at.
MAX_DEPTH = 8
MAX_FOLDERS = 20_000
MAX_FILES = 2000


class StoredModel(NamedTuple):
    """A model somewhere: what to type for it, where it is kept, and its file.

    That is the first shard of a set, or the config.json of a model in safetensors files.

    ``problem`` says why there is no file to look into, "" otherwise.
    """

    argument: str
    source: str
    path: str
    problem: str = ""


class Search:
    """A walk through ``places`` and ``folders``; ``going_on`` may end it at any file.

    ``notes`` tell, once it is done, what was not looked at.
    """

    def __init__(
        self, places: Places, folders: Sequence[str] = (), *, going_on: Callable[[], bool]
    ) -> None:
        self.notes: list[str] = []
        self._places = places
        self._folders = folders
        self._going_on = going_on

    def models(self) -> list[StoredModel]:
        """Return what is there, each file of each store once, a set of shards as one."""
        found: dict[str, StoredModel] = {}
        for model in self._all():
            # Two caches may hold the same name: the second is reached by its path.
            key = model.argument if model.argument not in found else model.path
            found.setdefault(key, model._replace(argument=key))
            if not self._going_on():
                self.notes.append("time was up before every folder was looked at: name one folder")
                break
        return list(found.values())

    def _all(self) -> Iterator[StoredModel]:
        yield from _ollama(self._places.ollama, by_name=True)
        for source, argument, path in _repository_files(self._places):
            yield StoredModel(argument, source, path)
        for folder in self._places.llama_cpp:
            for _, path in first_shards(hub_cache.gguf_files(folder, 1)):
                yield StoredModel(path, LLAMA_CPP, path)
        for name, demo in DEMOS.items():
            path = os.path.join(self._places.demo, demo.filename)
            if os.path.exists(path):
                yield StoredModel(name, OWN, path)
        for folder in self._folders:
            yield from self._folder(folder)

    def _folder(self, folder: str) -> Iterator[StoredModel]:
        if os.path.isfile(folder) or not os.path.exists(folder):
            yield StoredModel(folder, FOLDER, folder)
            return
        if os.path.isdir(os.path.join(folder, "manifests")):
            yield from _ollama([folder], by_name=False)
        for _, path in first_shards((path, path) for path in self._walk(folder)):
            yield StoredModel(path, FOLDER, path)

    def _walk(self, top: str) -> Iterator[str]:
        """Yield the .gguf files under ``top``, links followed once, hidden folders passed over."""
        waiting = [(top, MAX_DEPTH)]
        seen: set[tuple[int, int]] = set()
        files = 0
        while waiting and self._going_on():
            folder, left = waiting.pop()
            if not _is_new(folder, seen):
                continue
            for name in listed(folder):
                path = os.path.join(folder, name)
                if os.path.isdir(path):
                    if left and not name.startswith("."):
                        waiting.append((path, left - 1))
                elif name.lower().endswith(".gguf"):
                    files += 1
                    yield path
                if len(seen) > MAX_FOLDERS or files >= MAX_FILES:
                    self.notes.append(f"{top} holds too much to look at: name a folder in it")
                    return


def _repository_files(places: Places) -> Iterator[tuple[str, str, str]]:
    """Yield source, argument and path of every file; a config.json where there is no GGUF file."""
    for source, repo, folder in _repositories(places):
        argument = f"{hub_cache.PREFIX}{repo}"
        files = list(first_shards(hub_cache.gguf_files(folder, 4)))
        for name, path in files:
            yield source, f"{argument}/{name}", path
        config = os.path.join(folder, "config.json")
        if source == HUB and not files and os.path.isfile(config):
            yield source, argument, config


def _repositories(places: Places) -> Iterator[tuple[str, str, str]]:
    """Yield source, ORG/NAME and folder of every repository in the caches, the best revision first.

    Only what ``hf:ORG/NAME/FILE`` finds has its name here.
    """
    for hub in places.hubs:
        for repo, folder in hub_cache.hub_repos(hub):
            for snapshot in hub_cache.snapshots(folder)[:1]:
                yield HUB, repo, snapshot
    for root in places.lm_studio:
        for owner in listed(root):
            for name in listed(os.path.join(root, owner)):
                if hub_cache.is_repo(f"{owner}/{name}"):
                    yield LM_STUDIO, f"{owner}/{name}", os.path.join(root, owner, name)


def model_names(places: Places) -> list[str]:
    """Return what can be typed for the models in the caches, sorted: quick, no file is opened.

    Paths are left out: a shell completes those by itself.
    """
    names = [*DEMOS]
    names += [
        ollama_store.PREFIX + name.short
        for name, _, _ in ollama_store.ollama_manifests(places.ollama)
    ]
    names += [argument for _, argument, _ in _repository_files(places)]
    return sorted(set(names))


def first_shards(files: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield ``files`` (name, path) with one file for each set of shards: the lowest there is."""
    sets: dict[tuple[str, int], tuple[int, str, str]] = {}
    for name, path in files:
        stem, number, count = shard_place(name)
        if count == 1:
            yield name, path
        elif (stem, count) not in sets or number < sets[stem, count][0]:
            sets[stem, count] = (number, name, path)
    for _, name, path in sets.values():
        yield name, path


def _ollama(roots: Sequence[str], *, by_name: bool) -> Iterator[StoredModel]:
    for name, manifest, root in ollama_store.ollama_manifests(roots):
        argument = ollama_store.PREFIX + name.short
        try:
            path = ollama_store.read_manifest(manifest, root, name).path
        except ModelError as error:
            yield StoredModel(argument, OLLAMA, manifest, str(error))
        else:
            yield StoredModel(argument if by_name else path, OLLAMA, path)


def _is_new(folder: str, seen: set[tuple[int, int]]) -> bool:
    try:
        status = os.stat(folder)
    except OSError:
        return False
    place = (status.st_dev, status.st_ino)
    if place in seen:
        return False
    seen.add(place)
    return True
