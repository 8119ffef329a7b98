"""Completion in real shells: bash, and zsh and fish where they are installed."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from conftest import Run

from localkv.cli.app import COMMANDS
from localkv.gguf.demo import DEMOS

REPOSITORY = Path(__file__).resolve().parents[1]
TIMEOUT_S = 60.0

#: Returns what is offered for the last of the words typed after ``localkv``.
Complete = Callable[[str], list[str]]


def shell(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model files of all kinds of names, and others."""
    home = tmp_path_factory.mktemp("home")
    (home / "bin").mkdir()
    script = home / "bin" / "localkv"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m localkv "$@"\n')
    script.chmod(0o755)
    folder = home / "here"
    (folder / "models").mkdir(parents=True)
    for file in ("tiny.gguf", "models/a file.gguf", "models/b:c.gguf", "notes.txt"):
        (folder / file).touch()
    manifests = home / ".ollama" / "models" / "manifests" / "registry.ollama.ai" / "library"
    for name, tag in (("llama3.2", "1b"), ("llama3.2", "3b"), ("qwen3", "latest")):
        (manifests / name).mkdir(parents=True, exist_ok=True)
        (manifests / name / tag).touch()
    return folder


def environment(place: Path) -> dict[str, str]:
    path = os.pathsep.join((str(place.parent / "bin"), os.environ["PATH"]))
    kept = {key: text for key, text in os.environ.items() if not key.startswith("COMP_")}
    return {
        **kept,
        "PATH": path,
        "PYTHONPATH": str(REPOSITORY),
        "TERM": "dumb",
        "HOME": str(place.parent),
        "ZDOTDIR": str(place.parent),
        "LC_ALL": "C.UTF-8",
    }


class Terminal:
    """A shell on a pseudo terminal: what is typed is read by the shell's own line editor."""

    def __init__(self, words: Sequence[str], place: Path, prepare: Sequence[str]) -> None:
        parent, child = pty.openpty()
        self.fd = parent
        self.process = subprocess.Popen(
            words,
            stdin=child,
            stdout=child,
            stderr=child,
            cwd=place,
            env=environment(place),
            start_new_session=True,
        )
        os.close(child)
        for line in (*prepare, r"printf '[%s]\n' ready"):
            self.type(line + "\r")
        self.until(r"\[ready\]")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until(self, pattern: str) -> re.Match[str]:
        """Read until ``pattern`` stands in what has come since the last call."""
        read, deadline = "", time.monotonic() + TIMEOUT_S
        while not (found := re.search(pattern, read)):
            ready, _, _ = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} did not come; read: {read!r}"
            read += os.read(self.fd, 65536).decode("utf-8", "replace")
        return found

    def completed(self, words: str) -> str:
        """Type ``localkv WORDS``, press Tab, and return the words of the line that then stands.

        The shell prints them itself, by a command that is put in front of the line. Keys are read
        in their order, so nothing has to wait for a time.
        """
        home, end = "\x01", "\x05"
        self.type(f"localkv {words}\t{home}printf '<%s>' {end} '.'\r")
        return self.until(r"<localkv>((?:<[^>]*>)*)<\.>")[1].replace("<.>", "")

    def close(self) -> None:
        os.close(self.fd)
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def bash(place: Path) -> Iterator[Terminal]:
    script = 'eval "$(localkv completion bash)"'
    prepare = ("bind 'set enable-bracketed-paste off'; PS1=", script)
    terminal = Terminal([shell("bash"), "--norc", "--noprofile", "-i"], place, prepare)
    yield terminal
    terminal.close()


@pytest.fixture(scope="module")
def zsh(place: Path) -> Iterator[Terminal]:
    script = 'autoload -U compinit; compinit -u -D; eval "$(localkv completion zsh)"'
    prepare = ("unset zle_bracketed_paste; unsetopt prompt_cr prompt_sp; PS1=; bindkey -e", script)
    terminal = Terminal([shell("zsh"), "-f", "-i"], place, prepare)
    yield terminal
    terminal.close()


@pytest.fixture(scope="module")
def fish(place: Path) -> Complete:
    program = shell("fish")

    def complete(words: str) -> list[str]:
        ask = f"localkv completion fish | source; complete -C 'localkv {words}'"
        done = subprocess.run(
            [program, "--no-config", "-c", ask],
            env=environment(place),
            cwd=place,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        return [line.split("\t")[0] for line in done.stdout.splitlines()]

    return complete


#: What is typed -> the words of the line after Tab. The last word is the only one that can follow.
LINES = {
    "insp": "<inspect>",
    "inspect --cache-type-k=f16 --js": "<inspect><--cache-type-k=f16><--json>",
    "predict --defaults llama-s": "<predict><--defaults><llama-server>",
    "inspect demo-": "<inspect><demo-swa>",
    "sweep -m demo-": "<sweep><-m><demo-swa>",
    "sweep --model=demo-": "<sweep><--model=demo-swa>",
    "selftest demo demo-": "<selftest><demo><demo-swa>",
    "inspect ti": "<inspect><tiny.gguf>",
    "completion fi": "<completion><fish>",
    "inspect ollama:llama3.2:1": "<inspect><ollama:llama3.2:1b>",
    "inspect ollama:q": "<inspect><ollama:qwen3>",
}


@pytest.mark.parametrize("words", LINES)
def test_bash_completes_the_line(bash: Terminal, words: str) -> None:
    assert bash.completed(words) == LINES[words]


@pytest.mark.parametrize("words", LINES)
def test_zsh_completes_the_line(zsh: Terminal, words: str) -> None:
    assert zsh.completed(words) == LINES[words]


@pytest.mark.parametrize("words", LINES)
def test_fish_offers_the_word(fish: Complete, words: str) -> None:
    assert fish(words) == [LINES[words].split("<")[-1].rstrip(">")]


def test_bash_takes_folders_spaces_and_colons(bash: Terminal) -> None:
    assert bash.completed("report mod") == "<report><models/>"
    assert bash.completed("inspect models/a") == "<inspect><models/a file.gguf>"
    assert bash.completed("inspect 'models/a") == "<inspect><models/a file.gguf>"
    assert bash.completed("inspect models/b:") == "<inspect><models/b:c.gguf>"
    assert bash.completed("inspect note") == "<inspect><note>"  # no model, not offered


Ask = Callable[[str], list[str]]


@pytest.fixture
def ask(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return a function that gives what localkv, in this process, answers to bash for a line."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(place.parent))
    monkeypatch.setenv("_LOCALKV_COMPLETE", "bash_complete")

    def call(line: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", line)
        code, out, err = run()
        assert (code, err) == (0, "")
        return out.splitlines()

    return call


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_completes_its_options(ask: Ask, command: str) -> None:
    assert ask(f"localkv {command} --he") == ["--help"]


def test_the_first_word_is_offered_from_the_table(ask: Ask) -> None:
    assert ask("localkv ") == list(COMMANDS)


def test_built_in_models_and_model_files_are_offered(ask: Ask) -> None:
    offered = ask("localkv inspect ")
    assert {*DEMOS, "tiny.gguf", "models/"} <= set(offered)
    assert "notes.txt" not in offered


def test_nothing_is_loaded_for_it_where_nobody_asks(place: Path) -> None:
    program = "import sys; from localkv.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, "inspect", "--help"],
        env=environment(place),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert "localkv.cli.app" in done.stdout
    assert "shell_completion" not in done.stdout
    assert "localkv.cli.shells" not in done.stdout


def test_an_unknown_shell_is_refused(run: Run) -> None:
    code, out, err = run("completion", "tcsh")
    assert (code, out) == (2, "")
    assert "bash" in err
