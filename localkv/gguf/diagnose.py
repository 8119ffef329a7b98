"""Say what a file is that should have been a GGUF file but is not, by its first bytes."""

from __future__ import annotations

import os
import stat

from localkv.errors import ModelError
from localkv.gguf.reader import MAGIC
from localkv.gguf.text import shown
from localkv.units import plural

_GET_ANOTHER = "give a .gguf file, or a name that `localkv models` lists"
_CONVERT = "convert it to GGUF first (llama.cpp: convert_hf_to_gguf.py)"
_PAGE = "the download saved a web page instead of the model: download the file itself"

#: First bytes, what they mean, what to do.
_MAGICS: tuple[tuple[bytes, str, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "a PNG picture", _GET_ANOTHER),
    (b"\xff\xd8\xff", "a JPEG picture", _GET_ANOTHER),
    (b"GIF8", "a GIF picture", _GET_ANOTHER),
    (b"%PDF", "a PDF document", _GET_ANOTHER),
    (b"PK\x03\x04", "a ZIP archive or a PyTorch checkpoint", f"unpack it, or {_CONVERT}"),
    (b"\x1f\x8b", "a gzip archive", "unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a zstandard archive", "unpack it first"),
    (b"BZh", "a bzip2 archive", "unpack it first"),
    (b"\xfd7zXZ\x00", "an xz archive", "unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
    (b"\x80\x02", "a PyTorch pickle", _CONVERT),
    (b"\x80\x04", "a Python pickle", _CONVERT),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", _CONVERT),
    (
        b"version https://git-lfs",
        "a git-lfs pointer, not the model itself",
        "run `git lfs pull` in its folder",
    ),
    # ggml's earlier containers; the letters stand reversed in the file.
    (b"lmgg", "an old GGML file", "get the model as GGUF: no current engine reads this one"),
    (b"fmgg", "an old GGMF file", "get the model as GGUF: no current engine reads this one"),
    (b"tjgg", "an old GGJT file", "get the model as GGUF: no current engine reads this one"),
    (b"algg", "an old GGLA adapter", "get the model as GGUF: no current engine reads this one"),
)


def check_file(path: str) -> int:
    """Return the size in bytes of the GGUF file at ``path``, judged by its first bytes alone.

    Raises:
        ModelError: nothing there, not a regular file, empty, or something else by its magic; the
            message names what was found and the hint what to do.
    """
    size = _regular_file_size(path)
    try:
        with open(path, "rb") as file:
            head = file.read(512)
    except OSError as error:
        raise _unreadable(path, error) from error
    if head[:4] == MAGIC:
        return size
    found, hint = identify(head, size)
    raise ModelError(f"{shown(path)} is {found}, not a GGUF file", hint)


def identify(head: bytes, size: int) -> tuple[str, str]:
    """Return what a file of ``size`` bytes beginning with ``head`` is, and what to do about it."""
    if size == 0:
        return "empty", "the download did not start or the disk was full: download it again"
    for magic, found, hint in _MAGICS:
        if head.startswith(magic):
            return found, hint
    if _is_safetensors(head, size):
        return "a safetensors file", _CONVERT
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml")):
        return "an HTML page", _PAGE
    if text.startswith((b"{", b"[")):
        return "JSON text", "a server's error message or a config.json: give the .gguf file itself"
    if head.strip(b"\0") == b"":
        return "all zeros at its start", "the download was reserved but never filled: repeat it"
    if head[:4] and MAGIC.startswith(head[:4]):
        hint = "the download stopped at once: download it again"
        return f"cut short after {plural(size, 'byte')}", hint
    if head.isascii() and all(c >= 32 or c in b"\t\r\n\f" for c in head):
        return f"text that begins with '{shown(head[:24].decode('ascii'))}'", _GET_ANOTHER
    return f"a file that begins with the bytes {head[:8].hex(' ')}", _GET_ANOTHER


def _is_safetensors(head: bytes, size: int) -> bool:
    # A 64-bit length of the JSON that follows it.
    return head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < size


def _regular_file_size(path: str) -> int:
    if not path:
        raise ModelError("no model is named", _GET_ANOTHER)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise ModelError(f"there is no file {shown(path)}", _missing_hint(path)) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        raise _unreadable(path, error) from error
    if stat.S_ISDIR(status.st_mode):
        raise ModelError(f"{shown(path)} is a directory", _directory_hint(path))
    if not stat.S_ISREG(status.st_mode):
        # Opening a pipe would wait for a writer for ever.
        raise ModelError(f"{shown(path)} is a pipe, socket or device", _GET_ANOTHER)
    return status.st_size


def _unreadable(path: str, error: Exception) -> ModelError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return ModelError(f"{shown(path)} cannot be opened: {reason}", "check the path and its rights")


def _missing_hint(path: str) -> str:
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f"its folder {shown(folder)} is not there either: check the path"
    return _directory_hint(folder)


def _directory_hint(folder: str) -> str:
    """Point at a .gguf file of ``folder``, where there is one."""
    try:
        with os.scandir(folder) as entries:
            names = sorted(e.name for e in entries if e.name.lower().endswith(".gguf"))
    except OSError:
        names = []
    if not names:
        return _GET_ANOTHER
    more = f" (or one of {len(names) - 1} more)" if len(names) > 1 else ""
    return f"try {shown(os.path.join(folder, names[0]))}{more}"
