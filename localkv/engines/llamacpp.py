"""llama.cpp through the low-level bindings of llama-cpp-python.

The high-level ``Llama`` class cannot set slots, a unified cache or ``swa_full``, and its package
pulls in numpy, jinja2 and more, which would blur a memory baseline; so only the binding module
itself is loaded here. Everything that is created is a context manager and is freed.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from localkv.engines.log import EngineLog, allocation_failure, parse_log
from localkv.engines.params import context_params, model_params
from localkv.errors import EngineError
from localkv.predict.config import RunConfig

PACKAGE = "llama-cpp-python"
# enum ggml_log_level in ggml/include/ggml.h; the numbers in llama_cpp/_logger.py are stale.
_LOG_DEBUG, _LOG_WARN, _LOG_ERROR, _LOG_CONT = 1, 3, 4, 5
#: What the engine says last of any model that it cannot load; the reason stands before it.
_LAST_WORDS = "failed to load model"
_DEVICE_TYPES = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel", 4: "meta"}


class EngineFailure(Exception):
    """The engine refused or failed; ``stage`` is weights, context, kv, compute, output or decode.

    ``allocation`` is true when it failed because memory could not be had.
    """

    def __init__(self, message: str, stage: str, *, allocation: bool) -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.allocation = allocation


def load_api() -> ModuleType:
    """Return the binding module ``llama_cpp.llama_cpp`` without the rest of its package.

    Raises:
        EngineError: llama-cpp-python is not installed, or its library cannot be loaded.
    """
    if "llama_cpp" not in sys.modules:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or not spec.submodule_search_locations:
            raise EngineError(
                f"{PACKAGE} is not installed", f"run: python -m pip install {PACKAGE}"
            )
        # A package that is made but not run lets the binding be imported without the package's own
        # __init__, which imports numpy and jinja2 and installs a log callback of its own.
        sys.modules["llama_cpp"] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module("llama_cpp.llama_cpp")
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise EngineError(
            f"the library of {PACKAGE} cannot be loaded ({first})",
            f"run: python -m pip install --force-reinstall --no-cache-dir {PACKAGE}",
        ) from error


def package_version(name: str) -> str | None:
    """Return the installed version of a Python package, None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def engine_version() -> str | None:
    """Return the installed version of llama-cpp-python, None when it is not installed."""
    return package_version(PACKAGE)


#: What llama_print_system_info calls a CPU feature -> the name that repacking rules use.
_FEATURES = {
    "AVX2": "avx2",
    "AVX512": "avx512",
    "NEON": "neon",
    "DOTPROD": "dotprod",
    "MATMUL_INT8": "i8mm",
    "VXE": "vxe",
}


def cpu_features(system_info: str) -> tuple[str, ...]:
    """Return the CPU features that an engine repacks weights for; none when it does not repack.

    ``system_info`` is what the engine prints of itself: ``CPU : AVX2 = 1 | REPACK = 1 | ...``.
    """
    told = {name.split(":")[-1].strip() for name in system_info.replace(" = 1", "").split("|")}
    if "REPACK" not in told:
        return ()
    return tuple(name for word, name in _FEATURES.items() if word in told)


class _Log:
    """Collects the engine's log lines from "info" up; keeps warnings and errors apart.

    A context says a thousand lines about its graph at level "debug", and nothing about memory:
    keeping and parsing them would take half the time of a dry run.
    """

    def __init__(self, api: ModuleType) -> None:
        self.lines: deque[str] = deque(maxlen=20_000)
        self.warnings: deque[str] = deque(maxlen=200)
        self.errors: deque[str] = deque(maxlen=200)
        self._level = 0
        self._open = False
        # The engine keeps the pointer, so this object must outlive every call.
        self._callback = api.llama_log_callback(self._receive)
        api.llama_log_set(self._callback, None)

    def _receive(self, level: int, text: bytes | None, _: Any) -> None:
        if level != _LOG_CONT:
            self._level = level
        if self._level == _LOG_DEBUG:
            return
        piece = (text or b"").decode("utf-8", "replace")
        if self._open and level == _LOG_CONT and self.lines:
            self.lines[-1] += piece.rstrip("\n")
        else:
            self.lines.append(piece.rstrip("\n"))
            if self._level == _LOG_ERROR:
                self.errors.append(piece.strip())
            elif self._level == _LOG_WARN:
                self.warnings.append(piece.strip())
        self._open = not piece.endswith("\n")

    def clear(self) -> None:
        self.lines.clear()
        self.warnings.clear()
        self.errors.clear()


@dataclass(frozen=True)
class EngineInfo:
    """What the installed engine is; ``devices`` as ggml registers them."""

    version: str
    commit: str | None
    system_info: str
    gpu_offload: bool
    devices: tuple[dict[str, Any], ...]


class Engine:
    """The engine library, initialised; a context manager."""

    def __init__(self) -> None:
        """Load the library and take over its log."""
        self.api = load_api()
        self.log = _Log(self.api)

    def __enter__(self) -> Engine:
        self.api.llama_backend_init()
        return self

    def __exit__(self, *_: object) -> None:
        self.api.llama_backend_free()

    def info(self) -> EngineInfo:
        """Return version, commit, CPU features and devices of the engine."""
        return EngineInfo(
            version=engine_version() or "unknown",
            commit=self._commit(),
            system_info=self.api.llama_print_system_info().decode("utf-8", "replace").strip(),
            gpu_offload=bool(self.api.llama_supports_gpu_offload()),
            devices=tuple(self._devices()),
        )

    def parsed_log(self) -> EngineLog:
        """Return what the log has said since it was last cleared."""
        return parse_log(self.log.lines)

    def failure(self, fallback: str, stage: str) -> EngineFailure:
        """Return the failure that the log explains: by an error, or else by a warning."""
        warnings, errors = (
            [text for line in lines if (text := _plain(line)) not in ("", fallback, _LAST_WORDS)]
            for lines in (self.log.warnings, self.log.errors)
        )
        for line in (*reversed(errors), *reversed(warnings)):
            if found := allocation_failure(line):
                return EngineFailure(line, found, allocation=True)
        said = (errors or warnings or [fallback])[-1]
        return EngineFailure(said, stage, allocation=False)

    def _commit(self) -> str | None:
        function = self._symbol("ggml_commit", ctypes.c_char_p)
        return function().decode() if function else None

    def _devices(self) -> list[dict[str, Any]]:
        count = self._symbol("ggml_backend_dev_count", ctypes.c_size_t)
        get = self._symbol("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
        name = self._symbol("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
        text = self._symbol("ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
        kind = self._symbol("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
        if not (count and get and name and text and kind):
            return []
        devices = [get(index) for index in range(count())]
        return [
            {
                "name": name(device).decode("utf-8", "replace"),
                "description": text(device).decode("utf-8", "replace"),
                "type": _DEVICE_TYPES.get(kind(device), "unknown"),
            }
            for device in devices
        ]

    def _symbol(self, name: str, result: Any, *arguments: Any) -> Any:
        # ggml's functions are found through libllama's own dependencies; opening libggml by its
        # file name would load a second copy with an empty device registry.
        try:
            function = getattr(self.api._lib, name)
        except AttributeError:
            return None
        function.restype = result
        function.argtypes = list(arguments)
        return function


def _plain(line: str) -> str:
    """Return a log line without the function name in front of it."""
    head, colon, rest = line.partition(": ")
    return rest.strip() if colon and " " not in head else line.strip()


class Model:
    """A loaded model; a context manager that frees it."""

    def __init__(self, engine: Engine, path: Path, config: RunConfig, *, mmap: bool = True) -> None:
        """Load the file at ``path``, the first shard of a set, with its weights.

        Raises:
            EngineFailure: the engine refused the file or could not have the memory.
        """
        params = model_params(engine.api, config, no_alloc=False, mmap=mmap)
        self._adopt(engine, engine.api.llama_model_load_from_file(_fs(path), params))

    @classmethod
    def without_weights(
        cls, engine: Engine, path: Path, config: RunConfig, *, header_only: bool
    ) -> Model:
        """Load metadata only, so that contexts report sizes without allocating them.

        ``header_only`` reads nothing beyond the header, which a cut-off file still has; a set of
        shards needs all its files.
        """
        model = cls.__new__(cls)
        params = model_params(engine.api, config, no_alloc=True)
        if header_only:
            handle = _from_header(engine, path, params)
        else:
            handle = engine.api.llama_model_load_from_file(_fs(path), params)
        model._adopt(engine, handle)
        return model

    def _adopt(self, engine: Engine, handle: Any) -> None:
        if not handle:
            raise engine.failure("the engine could not load the model", "weights")
        self.engine = engine
        self.handle = handle
        vocab = engine.api.llama_model_get_vocab(handle)
        self.n_vocab = int(engine.api.llama_vocab_n_tokens(vocab))

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.api.llama_model_free(self.handle)


def _fs(path: Path) -> bytes:
    return str(path).encode(sys.getfilesystemencoding(), "surrogateescape")


class _GgufInitParams(ctypes.Structure):
    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


def _from_header(engine: Engine, path: Path, params: Any) -> Any:
    init = engine._symbol("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _GgufInitParams)
    free = engine._symbol("gguf_free", None, ctypes.c_void_p)
    if not init or not free:
        raise EngineFailure("this engine cannot plan from a header", "weights", allocation=False)
    metadata = init(_fs(path), _GgufInitParams(True, None))
    if not metadata:
        raise engine.failure("the engine could not read the header", "weights")
    try:
        no_data = engine.api.llama_model_set_tensor_data_t(lambda *_: None)
        return engine.api.llama_model_init_from_user(metadata, no_data, None, params)
    finally:
        free(metadata)


class Context:
    """A context of a model; a context manager that frees it."""

    def __init__(self, model: Model, config: RunConfig, *, n_threads: int) -> None:
        """Create the context.

        Raises:
            EngineFailure: the engine refused the settings or could not have the memory.
        """
        self._api = model.engine.api
        self._engine = model.engine
        self.model = model
        params = context_params(self._api, config, n_threads=n_threads)
        self.handle = self._api.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise model.engine.failure("the engine could not create the context", "context")
        self.n_ctx = int(self._api.llama_n_ctx(self.handle))
        self.n_ctx_seq = int(self._api.llama_n_ctx_seq(self.handle))
        self.n_batch = int(self._api.llama_n_batch(self.handle))
        self.n_seq_max = int(self._api.llama_n_seq_max(self.handle))

    def decode(self, entries: Sequence[tuple[int, int]], positions: Sequence[int]) -> None:
        """Decode one batch: ``entries`` are (slot, token), ``positions`` theirs in their slot.

        Logits are asked for each slot's last token alone, as a server does.

        Raises:
            EngineFailure: the batch did not fit or the computation failed.
        """
        batch = self._api.llama_batch_init(len(entries), 0, 1)
        try:
            batch.n_tokens = len(entries)
            last = {slot: index for index, (slot, _) in enumerate(entries)}
            for index, (slot, token) in enumerate(entries):
                batch.token[index] = token
                batch.pos[index] = positions[index]
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = slot
                batch.logits[index] = last[slot] == index
            code = self._api.llama_decode(self.handle, batch)
            self._api.llama_synchronize(self.handle)
        finally:
            self._api.llama_batch_free(batch)
        if code != 0:
            raise self._engine.failure(f"decoding failed with code {code}", "decode")

    def clear(self) -> None:
        """Forget every token in every slot; the memory stays allocated."""
        memory = self._api.llama_get_memory(self.handle)
        if memory:
            self._api.llama_memory_clear(memory, False)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self._api.llama_free(self.handle)
