"""Options of ``localkv observe`` that cannot be meant: refused in one line, before any look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import click
import pytest
from conftest import Run
from load_helpers import llama_site
from observe_helpers import FakeServer, fake_server

from localkv.cli.attach import attach
from localkv.cli.observe import command as observe
from localkv.cli.options import FiniteRange
from localkv.observe.load_recording import LOAD_FILE
from localkv.observe.recording import RECORDING_FILE

FLOATS = ("--interval", "--duration", "--max-seconds", "--price", "--discount")
LOADED = [
    each.opts[0]
    for each in observe.params
    if isinstance(each, click.Option) and (each.help or "").startswith("With --load:")
]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as found:
        yield found


def refused(run: Run, *words: object) -> str:
    code, out, err = run("observe", *words)
    assert (code, out) == (2, ""), err
    return err


def test_every_number_with_a_fraction_is_finite() -> None:
    floats = {each.opts[0] for each in observe.params if isinstance(each.type, FiniteRange)}
    assert floats == set(FLOATS)
    plain = (click.types.FloatParamType, click.FloatRange)
    assert not [
        each.opts[0]
        for each in observe.params
        if isinstance(each.type, plain) and each.opts[0] not in floats
    ]


@pytest.mark.parametrize("option", FLOATS)
@pytest.mark.parametrize("value", ["nan", "inf", "1e999"])
def test_a_number_that_is_none_is_refused(
    run: Run, server: FakeServer, option: str, value: str
) -> None:
    said = refused(run, server.url, "--load", option, value)
    assert option in said
    assert f"'{value}' is not a finite number" in said
    assert server.site.asked == []


def test_a_range_still_holds(run: Run, server: FakeServer) -> None:
    assert "x>=0.05" in refused(run, server.url, "--interval", "0.01")
    assert "'soon' is not a valid float" in refused(run, server.url, "--duration", "soon")


@pytest.mark.parametrize("option", LOADED)
def test_an_option_of_a_load_needs_a_load(run: Run, server: FakeServer, option: str) -> None:
    # The default is refused as well: whoever gives it means a load.
    values = {"--only": ["prefix"], "--yes-remote": []}.get(option, ["32"])
    said = refused(run, server.url, "--duration", "0", option, *values)
    assert f"{option} is for --load: add --load" in said
    assert server.site.asked == []


def test_the_options_of_a_load_are_known() -> None:
    assert len(LOADED) == 7


def test_a_recording_needs_another_folder(run: Run, server: FakeServer, tmp_path: Path) -> None:
    for name in (RECORDING_FILE, LOAD_FILE):
        (tmp_path / name).write_text("precious", encoding="utf-8")
    said = refused(run, server.url, "--duration", "0", "-o", tmp_path)
    assert f"{tmp_path / RECORDING_FILE} is there already: name another folder" in said
    with llama_site() as site:
        said = refused(run, site.url, "--load", "--no-kv-unified", "-o", tmp_path)
    assert f"{tmp_path / LOAD_FILE} is there already: name another folder" in said
    for name in (RECORDING_FILE, LOAD_FILE):
        assert (tmp_path / name).read_text(encoding="utf-8") == "precious"


def test_a_recording_needs_a_folder(run: Run, server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "seen.jsonl"
    file.write_text("precious", encoding="utf-8")
    said = refused(run, server.url, "--duration", "0", "-o", file)
    assert f"{file} is a file: name a folder" in said
    assert file.read_text(encoding="utf-8") == "precious"


@pytest.mark.parametrize("more", [(), ("--load",)])
def test_a_model_that_cannot_be_read_is_said_at_once(
    run: Run, server: FakeServer, tmp_path: Path, more: tuple[str, ...]
) -> None:
    missing = tmp_path / "nosuch.gguf"
    code, out, err = run("observe", server.url, "--duration", "0", "--model", missing, *more)
    assert (code, out) == (3, "")
    assert str(missing) in err
    assert server.site.asked == []


def test_the_server_alone_may_have_the_model_that_it_is_to_load(server: FakeServer) -> None:
    with ExitStack() as stack:
        found = attach(stack, server.url, model="ollama:nosuch", kv_unified=None, loads=True)
    assert found.snapshot.used_tokens == 42
