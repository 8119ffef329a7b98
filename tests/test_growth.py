"""Pinned and hidden memory without a server: verdicts, slots, logs that grow, commands."""

from __future__ import annotations

import json
import shlex
from datetime import datetime, timezone
from pathlib import Path

import pytest

from localkv.analysis.growth import SLACK, explain
from localkv.cli.observe_memory import memory_lines
from localkv.cli.observe_screens import LogScreen
from localkv.engines.log_follow import LogFollower
from localkv.errors import UsageError
from localkv.observe.command_line import server_settings
from localkv.observe.growth import Ledger
from localkv.observe.pinned import pinned_by_llama_server, pinned_by_ollama, seconds_left
from localkv.observe.slot_history import SlotHistory
from localkv.probes.output import output_file
from localkv.report.growth import growth_words, memory_section, pinned_words
from localkv.snapshots import (
    HostMemory,
    Loaded,
    MemoryPart,
    Observed,
    Pinned,
    RecordingInfo,
    Slot,
    Snapshot,
)
from localkv.units import GIB, MIB

LOG = Path(__file__).parent / "data" / "server_memory" / "gemma3_270m.log"
NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=timezone.utc).timestamp()
URL = "http://127.0.0.1:9"


def part(name: str, grown: int, most: int | None = None, source: str = "log") -> MemoryPart:
    most = grown if most is None else most
    return MemoryPart(name, grown, most, grown, most, source, "5 saved prompts")


def memory(grown: int, *parts: MemoryPart, why: str = "") -> HostMemory:
    return HostMemory(7, "m", 100 * MIB + grown, 100 * MIB, parts, why=why)


CACHE = part("prompt cache", 200 * MIB)
SEEN = part("prompt cache", 200 * MIB, 8 * GIB, "slots")
COMPUTE = part("compute buffers", 0, 50 * MIB, "formula")


@pytest.mark.parametrize(
    ("found", "verdict", "rest", "words"),
    [
        (memory(0, part("KV cache", 0)), "explained", 0, "has not grown"),
        (memory(205 * MIB, CACHE), "explained", 5 * MIB, "the prompt cache, not a leak"),
        (memory(240 * MIB, CACHE, COMPUTE), "explained", 0, "All of it is explained"),
        (memory(260 * MIB, CACHE, COMPUTE), "explained", 10 * MIB, "MALLOC_MMAP_THRESHOLD_"),
        (memory(300 * MIB, CACHE), "not explained", 100 * MIB, "100.00 MiB are not explained"),
        (memory(300 * MIB, SEEN), "possible", 100 * MIB, "came and went between two looks"),
        (memory(9 * GIB, SEEN), "not explained", 9 * GIB - 200 * MIB, "are not explained"),
        (memory(100 * MIB, CACHE), "shrunk", -100 * MIB, "swapped out"),
        (memory(40 * MIB, part("KV cache", 0), COMPUTE), "explained", 0, "within what its parts"),
        (memory(40 * MIB, why="no model"), "unknown", 0, "not taken apart: no model"),
        (HostMemory(7), "unknown", 0, "cannot be read"),
    ],
)
def test_verdicts(found: HostMemory, verdict: str, rest: int, words: str) -> None:
    told = explain(found)
    assert (told.verdict, told.rest) == (verdict, rest)
    assert words in " ".join(growth_words(found))
    assert HostMemory.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_checkpoints_are_named_beside_the_prompt_cache() -> None:
    words = " ".join(growth_words(memory(260 * MIB, CACHE, part("context checkpoints", 60 * MIB))))
    assert "prompt cache, not a leak: 200.00 MiB" in words
    assert "+60.00 MiB context checkpoints" in words


def test_tolerance_is_a_part_of_what_is_saved() -> None:
    edge = SLACK + 20 * MIB
    assert explain(memory(200 * MIB + edge, CACHE)).verdict == "explained"
    assert explain(memory(200 * MIB + edge + 1, CACHE)).verdict == "not explained"


def slot(number: int, task: int | None, tokens: int, cached: int = 0, busy: bool = False) -> Slot:
    return Slot(number, 4096, busy, tokens, cached, 0, task)


def history(limit: int | None = None, *, idle_too: bool = True) -> SlotHistory:
    return SlotHistory(lambda tokens: 10 * tokens, limit, idle_too=idle_too)


def followed(kept: SlotHistory, *looks: list[Slot]) -> tuple[int, int]:
    for look in looks:
        kept.see(look)
    return kept.entries, kept.bytes


EMPTY = [slot(0, None, 0), slot(1, None, 0)]
FIRST = [slot(0, 1, 100), slot(1, None, 0)]


@pytest.mark.parametrize(
    ("looks", "saved"),
    [
        ([EMPTY, FIRST], []),
        ([EMPTY, FIRST, [slot(0, 1, 100), slot(1, 2, 50)]], [100]),  # idle when another began
        ([EMPTY, FIRST, [slot(0, 1, 100, busy=True), slot(1, 2, 50)]], []),  # still at work
        ([EMPTY, FIRST, [slot(0, 2, 50), slot(1, None, 0)]], [100]),  # replaced
        ([EMPTY, FIRST, [slot(0, 2, 150, 100), slot(1, None, 0)]], []),  # it goes on
        # The longer one takes the place of its beginning.
        (
            [
                EMPTY,
                FIRST,
                [slot(0, 1, 100), slot(1, 2, 50)],
                [slot(0, 3, 150, 100), slot(1, 2, 50)],
                [slot(0, 3, 150), slot(1, 4, 70)],
            ],
            [50, 150],
        ),
        # Emptied in a cache that slots share, then taken back by another slot.
        (
            [
                EMPTY,
                FIRST,
                [slot(0, 1, 0), slot(1, 2, 50)],
                [slot(0, 1, 0), slot(1, 3, 130, 100)],
            ],
            [50],
        ),
        # Emptied, and taken back by the same slot.
        (
            [
                EMPTY,
                FIRST,
                [slot(0, 1, 0), slot(1, 2, 50)],
                [slot(0, 3, 90, 80), slot(1, 2, 0)],
            ],
            [50],
        ),
        ([[slot(0, 1, 100), slot(1, 2, 50)]], []),  # what was before the first look is not seen
    ],
)
def test_what_the_slots_show(looks: list[list[Slot]], saved: list[int]) -> None:
    kept = history()
    assert followed(kept, *looks) == (len(saved), 10 * sum(saved))


def test_limits_of_the_prompt_cache() -> None:
    looks = [[slot(0, task, 100 + task)] for task in range(1, 8)]
    assert followed(history(), *looks)[0] == 6
    # The oldest goes: the last two that fit are of 105 and 106 tokens.
    assert followed(history(2500), *looks) == (2, 2110)
    assert followed(history(0), *looks) == followed(history(900), *looks) == (0, 0)
    pair = [[slot(0, 1, 100), slot(1, None, 0)], [slot(0, 1, 100), slot(1, 2, 50)]]
    assert followed(history(idle_too=False), *pair) == (0, 0)


def test_the_longest_prompt_that_was_read() -> None:
    kept = history()
    followed(kept, EMPTY, [slot(0, 1, 300), slot(1, 2, 900, 800)])
    assert kept.longest_read == 300
    assert kept.served == 2


def test_a_log_that_grows_is_read_in_pieces(tmp_path: Path) -> None:
    whole = LOG.read_bytes()
    path = tmp_path / "server.log"
    path.write_bytes(whole[:3000])
    log = LogFollower(path)
    log.read()
    with path.open("ab") as file:
        for at in range(3000, len(whole), 61):
            file.write(whole[at : at + 61])
            file.flush()
            log.read()
        file.write(b"\n")
    once = LogFollower(path).read()
    assert log.read() == once
    assert once.server.cache is not None
    assert once.server.cache.prompts == 4


def test_a_server_started_again_into_the_same_log_begins_anew(tmp_path: Path) -> None:
    whole = LOG.read_bytes()
    path = tmp_path / "server.log"
    path.write_bytes(whole + b"\nI srv load_model: loading model 'x.gguf'\n")
    told = LogFollower(path).read()
    assert told.server.cache is None
    assert told.engine.buffers == ()


def test_a_log_that_was_cut_short_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(LOG.read_bytes())
    log = LogFollower(path)
    assert log.read().server.cache is not None
    path.write_bytes(b"srv load_model: prompt cache is enabled, size limit: 5 MiB\n")
    told = log.read()
    assert (told.server.cache, told.server.cache_ram) == (None, 5 * MIB)
    path.unlink()
    assert log.read().server.cache_ram == 5 * MIB


def test_a_log_that_is_silent_on_the_cache_leaves_it_to_the_slots(
    smollm2_path: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    below_lv_4 = "I srv load_model: initializing, n_slots = 2, n_ctx_slot = 2048, kv_unified = "
    log.write_text(f"{below_lv_4}'false'\n", encoding="utf-8")
    facts = {"model_path": str(smollm2_path), "n_ctx_per_slot": 2048, "total_slots": 2}
    ledger = Ledger(7, {}, log=LogFollower(log))
    found = {}
    for slots in (EMPTY, FIRST, [slot(0, 2, 50), slot(1, None, 0)]):
        read = ledger.read(Snapshot("llama-server", slots=tuple(slots), facts=facts), 100 * MIB)
        found = {part.name: part for part in read.parts}
    cache = found["prompt cache"]
    assert (cache.source, cache.most) == ("slots", 8 * GIB)
    assert cache.grown > 0
    assert "1 saved prompt, at most 8.00 GiB" in cache.note


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the log .*none\.log"):
        LogFollower(tmp_path / "none.log")


def test_the_file_that_a_process_writes_to(tmp_path: Path) -> None:
    descriptors = tmp_path / "proc/7/fd"
    descriptors.mkdir(parents=True)
    assert output_file(7, tmp_path) is None
    (descriptors / "2").symlink_to("/dev/null")
    assert output_file(7, tmp_path) is None
    (tmp_path / "a.log").touch()
    (descriptors / "1").symlink_to(tmp_path / "a.log")
    assert output_file(7, tmp_path) == descriptors / "1"


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("2026-03-04T05:11:07.123456789Z", 300),
        ("2026-03-04T06:11:07.5+01:00", 300),
        ("2026-03-04T05:00:00Z", 0),
        ("2318-01-01T00:00:00Z", None),
        ("", None),
        ("never", None),
        ("2026-13-44T99:00:00Z", None),
    ],
)
def test_seconds_left(written: str, seconds: int | None) -> None:
    left = seconds_left(written, NOW)
    assert left == seconds or (seconds is None and (left is None or left > 1e9))


def ollama(name: str, expires: str) -> Pinned:
    said = Snapshot(server="ollama", loaded=(Loaded(name, "d", 5 * MIB, 0, 512, expires),))
    (pinned,) = pinned_by_ollama(URL, said, (), {}, 3 * MIB, NOW)
    return pinned


def test_a_name_cannot_become_a_command() -> None:
    name = "x'; touch /tmp/y; '$(id)"
    pinned = ollama(name, "2026-03-04T05:11:07Z")
    stop, curl = pinned.free
    assert shlex.split(stop) == [f"OLLAMA_HOST={URL}", "ollama", "stop", name]
    words = shlex.split(curl)
    assert words[:3] == ["curl", f"{URL}/api/generate", "-d"]
    assert json.loads(words[3]) == {"model": name, "keep_alive": 0}
    assert len(words) == 4


def test_keep_alive_for_ever_and_for_a_while() -> None:
    assert "another 5 min 0 s" in " ".join(pinned_words(ollama("m", "2026-03-04T05:11:07Z")))
    assert "for ever" in " ".join(pinned_words(ollama("m", "2318-01-01T00:00:00Z")))
    assert "held" not in " ".join(pinned_words(ollama("m", "soon")))


@pytest.mark.parametrize(
    ("words", "asleep", "until", "commands"),
    [
        ([], False, "as long as the server runs", ["kill 7"]),
        (["--sleep-idle-seconds", "60"], False, "for 60 s (--sleep-idle-seconds)", ["kill 7"]),
        (["--sleep-idle-seconds", "60"], True, "it sleeps", []),
        (["--slot-save-path", "/x"], False, "stays reserved", ["kill 7", "curl -X POST"]),
    ],
)
def test_how_a_llama_server_lets_go(
    words: list[str], asleep: bool, until: str, commands: list[str]
) -> None:
    settings = server_settings(["llama-server", *words], {})
    slots = () if asleep else (slot(0, None, 0), slot(1, 4, 30))
    said = Snapshot("llama-server", "a/m.gguf", running=0, slots=slots, facts={"sleeping": asleep})
    (pinned,) = pinned_by_llama_server(URL, said, memory(0), 9 * MIB, 2 * MIB, settings)
    assert until in " ".join(pinned_words(pinned))
    assert (pinned.name, pinned.kv_bytes) == ("m.gguf", 0 if asleep else 9 * MIB)
    assert len(pinned.free) == len(commands)
    assert all(told.startswith(start) for told, start in zip(pinned.free, commands, strict=True))
    if "POST" in "".join(pinned.free):
        assert "/slots/1?action=erase" in pinned.free[1]


def test_names_and_notes_are_escaped_on_every_page() -> None:
    name = "\x1b[31mred|<b>*x*"
    pinned = Pinned(name, 5 * MIB, free=(f"ollama stop '{name}'",), note=name)
    seen = Observed(0.0, 0.0, memory=(HostMemory(7, name, 5, 5, why=name),), pinned=(pinned,))
    terminal = "\n".join(memory_lines(seen, 100))
    assert "\x1b" not in terminal
    page = "\n".join(memory_section([seen]))
    assert "<b>" not in page.replace("`", "\n").split("to free it")[0]
    assert "\x1b" not in page
    assert Observed.from_dict(json.loads(json.dumps(seen.to_dict()))) == seen


def test_a_page_without_memory_has_no_section() -> None:
    assert memory_section([Observed(0.0, 0.0)]) == memory_lines(Observed(0.0, 0.0), 80) == []
    assert pinned_words(Pinned("m")) == ["nothing is known of its size"]


NOTED = MemoryPart(
    "context checkpoints", 0, 5 * GIB, 0, 5 * GIB, "formula", "of the sliding windows, " * 3 + "end"
)


@pytest.mark.parametrize(("most", "beside"), [(40, False), (60, False), (100, True)])
def test_a_note_without_room_beside_its_row_stands_below_it(most: int, beside: bool) -> None:
    seen = Observed(0.0, 0.0, memory=(memory(205 * MIB, CACHE, NOTED),))
    lines = memory_lines(seen, most)
    assert max(map(len, lines)) <= most
    row = next(i for i, line in enumerate(lines) if line.startswith("  context checkpoints"))
    assert ("of the sliding" in lines[row]) == beside
    # Words stay whole: the note takes a few lines, not one for each letter.
    assert [line.split()[-1] for line in lines[row : row + 6]].count("end") == 1
    if most > 40:
        heads = lines[2]
        assert heads.split() == ["part", "now", "grown"]
        cache = next(line for line in lines if line.startswith("  prompt cache"))
        for head, cell in (("now", "200.00 MiB"), ("grown", "+200.00 MiB")):
            ends = [i + len(cell) for i in range(len(cache)) if cache.startswith(cell, i)]
            assert heads.index(head) + len(head) in ends


@pytest.mark.parametrize(
    ("kinds", "gone"),
    [((), False), (("slow",), False), (("unreachable",), True), (("unreachable", "loading"), True)],
)
def test_a_server_that_is_gone_is_not_to_be_killed(
    kinds: tuple[str, ...], gone: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    held = Pinned("m", 5 * MIB, free=("kill 7  # ends the server",))
    said = Snapshot(server="llama-server")
    seen = Observed(0.0, 0.0, said, memory=(memory(205 * MIB, CACHE),), pinned=(held,))
    looks = [seen, *(Observed(1.0, 0.0, error="no", error_kind=kind) for kind in kinds)]
    with LogScreen(
        RecordingInfo(localkv="0", created="now", server="llama-server", url=URL, interval=1.0)
    ) as screen:
        for look in looks:
            screen.show(look)
    for page in (capsys.readouterr().out, "\n".join(memory_section(looks))):
        assert ("kill 7" in page) == ("inned while idle" in page) == (not gone)
        assert "ost memory of process 7" in page
        assert ("process 7 when last seen" in page) == gone


@pytest.mark.parametrize(
    ("looks", "words"),
    [
        ([[slot(0, 3, 90)]], "none seen since the watch began; earlier ones are not known, at"),
        ([[slot(0, None, 0)], [slot(0, 3, 90)]], "0 saved prompts, at"),
        ([[slot(0, 3, 90)], [slot(0, 4, 50)]], "1 saved prompt, at"),
    ],
)
def test_prompts_from_before_the_watch_are_not_known(
    smollm2_path: Path, looks: list[list[Slot]], words: str
) -> None:
    facts = {"model_path": str(smollm2_path), "n_ctx_per_slot": 2048, "total_slots": 1}
    ledger = Ledger(7, {})
    for slots in looks:
        said = Snapshot("llama-server", slots=tuple(slots), facts=facts)
        read = ledger.read(said, 100 * MIB)
    cache, samplers = read.part("prompt cache"), read.part("samplers")
    assert cache is not None
    assert cache.note.startswith(words)
    assert samplers is not None
    assert samplers.note.endswith("in its slot")
    page = "\n".join(memory_lines(Observed(0.0, 0.0, memory=(read,)), 80))
    assert "0 B seen" not in page
