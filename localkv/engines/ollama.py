"""Ollama as an engine: one that localkv starts with a store of its own, or one that runs already.

A running Ollama is left as it was: models are imported under a temporary name and removed, what
was loaded for a measurement is unloaded, and nobody's server is ever restarted.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localkv.engines.log import EngineLog
from localkv.engines.ollama_log import parse_ollama_log
from localkv.engines.ollama_program import PROGRAM, find_program
from localkv.engines.serving import Serving, serving
from localkv.http import TIMEOUT, Client, ServerError

_LISTENING = re.compile(r"Listening on 127\.0\.0\.1:(\d+)")
#: What a model is called that localkv imports; a leftover can be told by it.
TEMPORARY = "localkv-temporary-"
_TEMPORARY_NAME = re.compile(re.escape(TEMPORARY) + r"[0-9a-f]{8}")
#: Seconds: for the server to start, for a model to be copied or loaded, and to be gone again.
START, LOAD, UNLOAD = 60.0, 600.0, 60.0
_POLL = 0.05
_CHUNK = 1 << 20
_KEEP_ALIVE = "30m"
#: What the file is called that is sent: its real name may hold what Ollama refuses.
_FILE = "model.gguf"


@dataclass(frozen=True)
class Ollama:
    """An Ollama at ``url``; ``pid`` and ``serving`` are None where localkv did not start it."""

    url: str
    version: str
    pid: int | None = None
    serving: Serving | None = None
    _mine: set[str] = field(default_factory=set, repr=False, compare=False)

    def engine_log(self) -> EngineLog | None:
        """Return what the log says of the model loaded last; None when the log is not ours."""
        return parse_ollama_log(self.serving.lines()) if self.serving else None

    def loaded(self) -> list[dict[str, Any]]:
        """Return the models in memory, as ``/api/ps`` lists them: size, context_length, ...

        Raises:
            ServerError: no answer, or not Ollama's.
        """
        models = self._get("/api/ps").get("models")
        return [model for model in models or [] if isinstance(model, dict)]

    def loaded_as(self, name: str) -> dict[str, Any] | None:
        """Return the entry of ``name`` in ``/api/ps``, None when it is not in memory."""
        return next((model for model in self.loaded() if model.get("name") == tagged(name)), None)

    def temporary_models(self) -> list[str]:
        """Return the names that localkv gave: of sweeps at work, or left by one that was killed.

        Raises:
            ServerError: no answer, or not Ollama's.
        """
        models = self._get("/api/tags").get("models")
        listed = [str(model.get("name")) for model in models or [] if isinstance(model, dict)]
        bare = (name.removesuffix(":latest") for name in listed)
        return sorted(name for name in bare if _TEMPORARY_NAME.fullmatch(name))

    def show(self, name: str) -> dict[str, Any]:
        """Return ``/api/show`` of ``name``: model_info, parameters, details, capabilities.

        Raises:
            ServerError: there is no such model, or no answer.
        """
        return self._post("/api/show", {"model": name})

    def load(
        self,
        name: str,
        *,
        num_ctx: int | None = None,
        options: Mapping[str, Any] | None = None,
        timeout: float = LOAD,
    ) -> dict[str, Any]:
        """Load ``name`` with ``num_ctx`` tokens per request; return its entry in ``/api/ps``.

        It stays until it is unloaded, or for half an hour.

        Raises:
            ServerError: Ollama refuses, fails, or takes longer than ``timeout`` seconds, or the
                same file is loaded for somebody else.
        """
        self._refuse_to_replace(name)
        told = {**(options or {}), **({"num_ctx": num_ctx} if num_ctx else {})}
        body = {"model": name, "stream": False, "keep_alive": _KEEP_ALIVE, "options": told}
        self._post("/api/generate", body, timeout=timeout)
        entry = self.loaded_as(name)
        if entry is None:
            raise ServerError(
                f"{self.url} says that it loaded {name} but does not list it",
                "another program may have unloaded it: try again",
                "answer",
            )
        return entry

    def read_prompt(
        self, name: str, prompt: str, *, options: Mapping[str, Any], timeout: float = LOAD
    ) -> int | None:
        """Let ``name`` read ``prompt`` and generate one token; return the tokens that it read.

        ``options`` are those it was loaded with: others would load it again.

        Raises:
            ServerError: Ollama refuses, fails, or takes longer than ``timeout`` seconds.
        """
        body = {
            "model": name,
            "prompt": prompt,
            "raw": True,
            "stream": False,
            "keep_alive": _KEEP_ALIVE,
            "options": {**options, "num_predict": 1},
        }
        count = self._post("/api/generate", body, timeout=timeout).get("prompt_eval_count")
        return count if isinstance(count, int) else None

    def _refuse_to_replace(self, name: str) -> None:
        """Raise when somebody else has the file of ``name`` loaded.

        Ollama keeps one process per file, whatever the models of it are called, and starts it
        again for other settings (schedulerModelKey in server/sched.go).
        """
        file = self._file_of(name)
        for model in self.loaded():
            other = str(model.get("name"))
            mine = other == tagged(name) and name in self._mine
            if not mine and file and self._file_of(other) == file:
                raise ServerError(
                    f"{other} is loaded from the same file, and measuring would replace it",
                    f"run: ollama stop {other}",
                    "answer",
                )
        self._mine.add(name)

    def model_file(self, name: str) -> str | None:
        """Return the path of the model's GGUF in the server's store, None when it tells none.

        Raises:
            ServerError: there is no such model, or no answer.
        """
        self.show(name)  # says that there is none
        return self._file_of(name).removeprefix("FROM ").strip() or None

    def _file_of(self, name: str) -> str:
        """Return the file of ``name`` as its Modelfile names it; "" when the model is gone."""
        try:
            lines = str(self.show(name).get("modelfile", "")).splitlines()
        except ServerError as error:
            if error.status != 404:
                raise
            return ""
        return next((line for line in lines if line.startswith("FROM ")), "")

    def is_ours(self, name: str) -> bool:
        """Return whether ``name`` was loaded, or begun to be, through this object."""
        return name in self._mine

    def unload(self, name: str, *, timeout: float = UNLOAD) -> None:
        """Unload ``name`` and return when Ollama no longer lists it; the process may end later.

        Raises:
            ServerError: it is still there after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        self._post("/api/generate", {"model": name, "stream": False, "keep_alive": 0})
        while self.loaded_as(name) is not None:
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self.url} still holds {name} after {timeout:g} s",
                    f"run: ollama stop {name}",
                    "slow",
                )
            time.sleep(_POLL)
        self._mine.discard(name)

    @contextmanager
    def temporary_model(self, gguf: str | Path) -> Iterator[str]:
        """Import ``gguf`` and give its name; the model is unloaded and removed at the end.

        Raises:
            ServerError: Ollama refuses the file, or the copy takes too long.
            OSError: the file cannot be read.
        """
        name = f"{TEMPORARY}{secrets.token_hex(4)}"
        digest = f"sha256:{_sha256(Path(gguf))}"
        uploaded = not self._has_blob(digest)
        try:
            self._import(Path(gguf), digest, name, upload=uploaded)
            yield name
        finally:
            self._remove(name, digest if uploaded else None)

    def import_model(self, gguf: str | Path, name: str) -> None:
        """Make the model ``name`` of ``gguf``; it stays.

        Raises:
            ServerError: Ollama refuses the file, or the copy takes too long.
            OSError: the file cannot be read.
        """
        digest = f"sha256:{_sha256(Path(gguf))}"
        self._import(Path(gguf), digest, name, upload=not self._has_blob(digest))

    def _import(self, gguf: Path, digest: str, name: str, *, upload: bool) -> None:
        if upload:
            self._upload(gguf, digest)
        self._create({"model": name, "files": {_FILE: digest}, "stream": False})

    def _create(self, body: Mapping[str, Any]) -> None:
        """Have a model made, and wait for the end of it even under Ctrl-C.

        Ollama goes on with it when nobody waits any more, and the model would be there after it
        was removed.
        """
        failed: list[ServerError] = []
        done = threading.Event()

        def ask() -> None:
            try:
                self._post("/api/create", body, timeout=LOAD)
            except ServerError as error:
                failed.append(error)
            finally:
                done.set()

        threading.Thread(target=ask, daemon=True).start()
        try:
            done.wait()
        finally:
            # An event: a join that Ctrl-C ended counts as done in Python 3.11.
            done.wait()
        if failed:
            raise failed[0]

    def _has_blob(self, digest: str) -> bool:
        with Client(self.url) as client:
            try:
                client.request("HEAD", f"/api/blobs/{digest}")
            except ServerError as error:
                if error.status != 404:
                    raise
                return False
        return True

    def _upload(self, gguf: Path, digest: str) -> None:
        with Client(self.url) as client, gguf.open("rb") as file:
            client.request("POST", f"/api/blobs/{digest}", content=_pieces(file), timeout=LOAD)

    def _remove(self, name: str, uploaded: str | None) -> None:
        """Unload and delete ``name``, as far as it got, and the blob that was sent for it."""
        try:
            if self.loaded_as(name) is not None:
                self.unload(name)
        finally:
            if uploaded:
                self._adopt(name, uploaded)
            with Client(self.url) as client:
                try:
                    client.request("DELETE", "/api/delete", body={"model": name}, timeout=UNLOAD)
                except ServerError as error:
                    if error.status != 404:
                        raise

    def _adopt(self, name: str, digest: str) -> None:
        """Make the blob ``digest`` part of the model ``name``, so that it is deleted with it.

        Since 0.30 Ollama writes a file of its own from what is sent and forgets the original,
        which then takes its room until Ollama starts again. Blobs go with the last model that
        names them (deleteUnusedLayers in server/images.go), and a draft is taken as it is.
        """
        body = {"model": name, "from": name, "draft_files": {_FILE: digest}, "stream": False}
        # An older one knows no drafts, and uses the file that was sent.
        with suppress(ServerError):
            self._post("/api/create", body)

    def _get(self, path: str) -> dict[str, Any]:
        with Client(self.url) as client:
            return _object(self.url, client.get_json(path))

    def _post(self, path: str, body: Any, *, timeout: float = UNLOAD) -> dict[str, Any]:
        with Client(self.url) as client:
            return _object(self.url, client.post_json(path, body, timeout=timeout))


def attached(url: str, *, timeout: float = TIMEOUT) -> Ollama:
    """Return the Ollama that runs at ``url`` and answers within ``timeout`` seconds.

    Raises:
        ServerError: nobody answers there, or another program does.
    """
    with Client(url, timeout=timeout) as client:
        answer = _object(url, client.get_json("/api/version"))
    version = answer.get("version")
    if not isinstance(version, str):
        raise ServerError(f"{url} is no Ollama", "give the URL of one, or start it", "answer")
    return Ollama(client.base_url, version)


@contextmanager
def started(
    folder: Path,
    *,
    program: str | None = None,
    num_parallel: int = 1,
    cache_type: str = "f16",
    flash_attn: str = "auto",
    env: Mapping[str, str] | None = None,
) -> Iterator[Ollama]:
    """Start ``ollama serve`` with its store, home and log in ``folder``, on a port of its own.

    Raises:
        EngineError: there is no ``program``, or it failed; with the end of its log.
    """
    found = find_program(program)
    settings = _environment(folder, num_parallel, cache_type, flash_attn)
    with serving(
        (found, "serve"),
        name=PROGRAM,
        log=folder / "ollama.log",
        listening=_LISTENING,
        ready=_answers,
        timeout=START,
        env={**settings, **(env or {})},
    ) as running:
        server = attached(running.url)
        yield Ollama(server.url, server.version, running.pid, running)


def tagged(name: str) -> str:
    """Return ``name`` with its tag, as Ollama lists it."""
    return name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest"


def _environment(
    folder: Path, num_parallel: int, cache_type: str, flash_attn: str
) -> dict[str, str]:
    """Return the variables of a serve whose store and home are in ``folder``."""
    home = folder / "home"
    home.mkdir(parents=True, exist_ok=True)
    # An empty one is one that is not set, whatever the caller's environment says.
    flash = {"auto": "", "on": "1", "off": "0"}[flash_attn]
    return {
        "HOME": str(home),
        "OLLAMA_HOST": "127.0.0.1:0",
        "OLLAMA_MODELS": str(folder / "models"),
        "OLLAMA_NO_CLOUD": "1",
        "OLLAMA_NUM_PARALLEL": str(num_parallel),
        "OLLAMA_KV_CACHE_TYPE": cache_type,
        "OLLAMA_FLASH_ATTENTION": flash,
        "OLLAMA_CONTEXT_LENGTH": "",
        "OLLAMA_GPU_OVERHEAD": "",
        "OLLAMA_MAX_LOADED_MODELS": "",
    }


def _answers(url: str) -> bool:
    try:
        attached(url)
    except ServerError:
        return False
    return True


def _object(url: str, answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise ServerError(f"{url} answered no object", "is it an Ollama?", "answer")
    return answer


def _sha256(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        for piece in _pieces(file):
            total.update(piece)
    return total.hexdigest()


def _pieces(file: Any) -> Iterator[bytes]:
    while piece := file.read(_CHUNK):
        yield piece
