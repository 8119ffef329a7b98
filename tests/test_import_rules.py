"""The rooms of the house and who may enter where, read from the source."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "localkv"
HEADER = Path(__file__).parent / "data" / "headers" / "qwen2-dense.gguf"

#: What each room may import beside itself. What those may import comes along, so that predict,
#: which builds on model, may use gguf's types; nothing points the other way.
MAY_IMPORT = {
    "errors": set(),
    "tuples": set(),
    "units": {"errors"},
    "records": set(),
    "locks": set(),
    "gguf": {"errors", "units", "locks", "tuples"},
    "model": {"gguf"},
    "predict": {"model"},
    "http": {"errors", "units"},
    "engines": {"predict", "http"},
    "probes": {"units", "errors", "records"},
    "sweep": {"engines", "probes", "predict", "observe", "records", "locks", "localkv"},
    "analysis": {"records", "snapshots", "units", "errors", "tuples"},
    "report": {"analysis", "predict"},
    "snapshots": {"records"},
    "observe": {"probes", "engines", "analysis", "snapshots", "http", "predict"},
    # The package's own name holds the version, and its functions only on demand.
    "localkv": set(),
}
#: predict(..., engine=True) goes through this door, when it is asked to and not before.
LAZY_DOORS = {("localkv.predict.predict", "localkv.engines.plan")}

PURE_ROOMS = ("model", "predict", "analysis", "report")
PURE_GGUF = ("reader", "types", "cursor", "text", "shards")
WORLD = {"click", "psutil", "pynvml", "subprocess", "httpx", "llama_cpp", "matplotlib"}
CLOCKS = {"time", "datetime"}
ENVIRONMENT = {"environ", "environb", "getenv"}
#: Of the standard library: what answering from a header has no use for, and would wait for.
SLOW = {
    "asyncio", "dataclasses", "difflib", "email", "html", "http", "json", "logging",
    "multiprocessing", "pathlib", "pickle", "random", "shutil", "socket", "ssl", "subprocess",
    "tempfile", "textwrap", "unicodedata", "urllib", "zipfile",
}  # fmt: skip
#: Loaded by the command that needs them, never by starting up.
HEAVY = {"llama_cpp", "pandas", "scipy", "matplotlib", "httpx", "pydantic", "numpy"}


@dataclass(frozen=True)
class Import:
    """One import of ``target`` at ``line`` of ``module``; ``lazy`` inside a function."""

    module: str
    target: str
    line: int
    lazy: bool
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def name_of(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def room(module: str) -> str:
    """Return the part of the house that ``module`` is in."""
    return module.split(".")[1] if "." in module else module


def imports(module: str) -> list[Import]:
    return list(_walk(module, tree(module), lazy=False, typing_only=False))


def _walk(module: str, node: ast.AST, *, lazy: bool, typing_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for target in _targets(child):
            yield Import(module, target, getattr(child, "lineno", 0), lazy, typing_only)
        inner = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        types = typing_only or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        )
        yield from _walk(module, child, lazy=inner, typing_only=types)


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute here"
        base = node.module or ""
        # "from localkv.probes import nvidia" names a module; the others name what is inside one.
        found = [f"{base}.{alias.name}" for alias in node.names]
        return [name if name in MODULES else base for name in found]
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        argument = node.args[0]
        if isinstance(argument, ast.Constant):
            return [str(argument.value)]
    return []


def allowed(origin: str) -> set[str]:
    """Return the rooms that ``origin`` may import, those of its neighbours included."""
    if origin in ("cli", "__main__"):
        return {*MAY_IMPORT, "cli"}
    reached = {origin}
    waiting = list(MAY_IMPORT[origin])
    while waiting:
        if (next_room := waiting.pop()) not in reached:
            reached.add(next_room)
            waiting += MAY_IMPORT[next_room]
    return reached


def is_pure(module: str) -> bool:
    parts = module.split(".")
    return len(parts) > 1 and (
        parts[1] in PURE_ROOMS or (parts[1] == "gguf" and parts[-1] in PURE_GGUF)
    )


def test_the_table_knows_every_room() -> None:
    assert {room(module) for module in MODULES} == {*MAY_IMPORT, "cli", "__main__"}
    for name in PURE_GGUF:
        assert f"localkv.gguf.{name}" in MODULES


def test_the_table_has_no_circle() -> None:
    for name in MAY_IMPORT:
        assert all(name not in allowed(other) for other in MAY_IMPORT[name])


@pytest.mark.parametrize("module", MODULES)
def test_dependencies_point_only_one_way(module: str) -> None:
    origin = room(module)
    wrong = [
        str(found)
        for found in imports(module)
        if found.target.split(".")[0] == "localkv"
        and room(found.target) not in allowed(origin)
        and not (origin == "localkv" and (found.lazy or found.typing_only))
        and not (found.lazy and (module, found.target) in LAZY_DOORS)
    ]
    assert wrong == []


def test_the_doors_are_used() -> None:
    for module, target in LAZY_DOORS:
        assert target in {found.target for found in imports(module) if found.lazy}


@pytest.mark.parametrize("module", [module for module in MODULES if is_pure(module)])
def test_the_pure_rooms_know_nothing_of_the_world(module: str) -> None:
    at_once = [found for found in imports(module) if not (found.lazy or found.typing_only)]
    assert [str(found) for found in at_once if found.target.split(".")[0] in WORLD] == []


@pytest.mark.parametrize("module", [module for module in MODULES if is_pure(module)])
def test_the_pure_rooms_read_no_clock_and_no_environment(module: str) -> None:
    clocks = [str(found) for found in imports(module) if found.target.split(".")[0] in CLOCKS]
    environment = [
        f"{module}:{node.lineno} reads {ast.unparse(node)}"
        for node in ast.walk(tree(module))
        if (isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT)
        or (isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} & ENVIRONMENT)
    ]
    assert clocks + environment == []


@pytest.mark.parametrize("module", MODULES)
def test_no_module_loads_a_heavy_library_at_once(module: str) -> None:
    at_once = [found for found in imports(module) if not (found.lazy or found.typing_only)]
    heavy = HEAVY | {"rich"}
    assert [str(found) for found in at_once if found.target.split(".")[0] in heavy] == []


def test_the_reader_of_imports_sees_what_it_should() -> None:
    source = """
import a.b, c
from localkv.probes import nvidia, open_nvml
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import d
def f():
    import e
    import_module("localkv.engines.plan")
"""
    found = {
        (one.target, one.lazy, one.typing_only)
        for one in _walk("m", ast.parse(source), lazy=False, typing_only=False)
    }
    assert found == {
        ("a.b", False, False), ("c", False, False), ("localkv.probes.nvidia", False, False),
        ("localkv.probes", False, False), ("typing", False, False), ("d", False, True),
        ("e", True, False), ("localkv.engines.plan", True, False),
    }  # fmt: skip


# -- what is loaded in the end ---------------------------------------------------------------

_RUN = """
import sys
try:
    {statement}
except SystemExit as end:
    if end.code:
        raise
finally:
    print(*sorted({{name.split(".")[0] for name in sys.modules}}), file=sys.stderr)
"""
_COMMAND = "from localkv.cli import main; main()"


def loaded(
    statement: str, *arguments: str, stdout: int = subprocess.PIPE, **environment: str
) -> set[str]:
    """Return the top-level modules in a fresh interpreter after ``statement``."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN.format(statement=statement), *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def test_importing_localkv_loads_nothing_of_it() -> None:
    found = loaded("import localkv")
    assert "localkv" in found
    assert found & (HEAVY | WORLD | {"rich"}) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["inspect", str(HEADER)],
        ["inspect", str(HEADER), "--json"],
        ["predict", str(HEADER)],
        ["predict", str(HEADER), "-c", "4096", "-np", "2", "--json"],
        ["capacity", str(HEADER), "--memory", "1G"],
        ["capacity", str(HEADER), "--memory", "1G", "--json"],
        ["sweep", "--help"],
        ["report", "--help"],
    ],
    ids=lambda arguments: " ".join(Path(word).name for word in arguments),
)
def test_a_command_that_does_not_measure_starts_light(arguments: list[str]) -> None:
    found = loaded(_COMMAND, *arguments)
    assert "click" in found
    assert found & (HEAVY | {"rich", "pynvml"}) == set()


ANSWERS = {"inspect": [], "predict": [], "capacity": ["--memory", "1G"]}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_from_the_header_loads_no_slow_module(name: str) -> None:
    found = loaded(_COMMAND, name, str(HEADER), *ANSWERS[name])
    assert found & (SLOW - loaded("import click")) == set()


@pytest.mark.parametrize("name", ANSWERS)
def test_rich_is_loaded_for_a_terminal_alone(name: str) -> None:
    openpty = getattr(os, "openpty", None)
    if openpty is None:
        pytest.skip("there are no pseudo-terminals here")
    for no_colour in ("", "1"):
        ours, theirs = openpty()
        try:
            found = loaded(
                _COMMAND,
                name,
                str(HEADER),
                *ANSWERS[name],
                stdout=theirs,
                TERM="xterm",
                FORCE_COLOR="",
                NO_COLOR=no_colour,
            )
        finally:
            os.close(theirs)
            os.close(ours)
        assert ("rich" in found) <= (not no_colour)
        # The other page has no colours so far.
        assert no_colour or "rich" in found or name == "predict"
