"""What was seen of a server is kept, summed up, and shown: recording, speeds, report, page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from localkv.analysis.observed import generated, summarise
from localkv.cli import observe_lines
from localkv.errors import UsageError
from localkv.observe.rates import rates
from localkv.observe.recording import RECORDING_FILE, Recorder, read_recording
from localkv.observe.watch import watch
from localkv.records import Reading
from localkv.report.observation import summary_lines, write_observation
from localkv.snapshots import SCHEMA, Loaded, Observed, RecordingInfo, Slot, Snapshot

INFO = RecordingInfo(
    server="llama-server",
    url="http://127.0.0.1:1",
    created="2026-01-01T00:00:00Z",
    predicted={"capacity_tokens": 2048, "kv_bytes": 1 << 20},
)


def said(decoded: dict[int, tuple[int, int]], **counters: float) -> Snapshot:
    """Return an answer with one busy slot for each (task, tokens) in ``decoded``."""
    slots = tuple(
        Slot(i, 1024, busy=i in decoded, tokens=0, task=decoded[i][0], decoded=decoded[i][1])
        if i in decoded
        else Slot(i, 1024, busy=False, tokens=0, task=99, decoded=50)
        for i in range(2)
    )
    return Snapshot("llama-server", used_tokens=100, slots=slots, counters=counters)


def seen(at: float, **told: Any) -> Observed:
    snapshot = Snapshot("llama-server", capacity_tokens=2048, **told)
    reading = Reading(int(at * 1000) + 1000)
    return Observed(at, 0.01, snapshot, process={"rss_anon": reading})


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        # A long request goes on: the counter stands still.
        (said({0: (7, 10)}, generated_tokens=500, decodes=100),
         said({0: (7, 16)}, generated_tokens=500, decodes=106), 6),
        # It ends: the counter jumps by all of it, of which most was told before.
        (said({0: (7, 300)}, generated_tokens=500, decodes=100),
         said({}, generated_tokens=804, decodes=104), 4),
        # It ends, and another one begins in its slot.
        (said({0: (7, 300)}, generated_tokens=500, decodes=100),
         said({0: (8, 5)}, generated_tokens=802, decodes=108), 7),
        # It ended between the two questions of the first look: not 300 tokens in 4 decodes.
        (said({}, generated_tokens=500, decodes=100),
         said({}, generated_tokens=800, decodes=104), 8),
        # Many short requests come and go between two looks.
        (said({}, generated_tokens=500, decodes=100),
         said({}, generated_tokens=540, decodes=130), 40),
        # Without metrics the slots alone tell.
        (said({0: (7, 10), 1: (8, 4)}), said({0: (7, 16), 1: (9, 3)}), 9),
    ],
)  # fmt: skip
def test_tokens_are_counted_as_they_come(before: Snapshot, now: Snapshot, expected: int) -> None:
    assert generated(before, now) == (expected, "slots")


def test_servers_without_slots_are_believed_their_counters() -> None:
    before, now = (Snapshot("vllm", counters={"generated_tokens": n}) for n in (10, 25))
    assert generated(before, now) == (15, "counters")
    assert generated(now, before) == (None, "counters")


def test_speeds_are_of_the_time_between_two_answers() -> None:
    before = seen(1.0, counters={"prompt_tokens": 10, "generated_tokens": 5})
    now = seen(3.0, counters={"prompt_tokens": 110, "generated_tokens": 25})
    assert (rates(before, now).prompt, rates(before, now).generated) == (50, 10)
    assert rates(before, replace(now, snapshot=None)).prompt is None
    assert rates(None, now).generated is None


def test_a_recording_comes_back_as_it_was(tmp_path: Path) -> None:
    looks = (
        seen(0.0, slots=(Slot(0, 512, True, 3, decoded=1, task=4),)),
        Observed(1.0, 5.0, error="no", error_kind="slow"),
        replace(seen(2.0, loaded=(Loaded("m", "d", 1, 0, 512, "x"),)), predicted={"why": "x"}),
    )
    with Recorder(tmp_path / RECORDING_FILE, INFO) as recorder:
        for each in looks:
            recorder.add(each)
    found = read_recording(tmp_path / RECORDING_FILE)
    assert (found.info, found.seen, found.left_out) == (INFO, looks, 0)


def test_one_of_each_is_called_by_its_singular() -> None:
    counted = ("preemptions", "prompt_tokens", "cached_prompt_tokens", "generated_tokens")
    looks = [
        seen(float(at), used_tokens=1, running=1, counters=dict.fromkeys(counted, float(at)))
        for at in (0, 1)
    ]
    said = summary_lines(replace(summarise(INFO, looks), slow=1, missed=1))
    for words in (
        "The cache held at most 1 of 2,048 tokens",
        "At most 1 request ran at once",
        "1 request preempted: ",
        "1 prompt token read.",
        "1 prompt token taken from the cache.",
        "1 token generated.",
        "1 slow look: ",
        "1 look had no answer",
    ):
        assert sum(line.startswith(words) for line in said) == 1, words


def test_half_a_last_line_is_left_out_and_said(run: Run, tmp_path: Path) -> None:
    path = tmp_path / RECORDING_FILE
    with Recorder(path, INFO) as recorder:
        recorder.add(seen(0.0, used_tokens=7, running=1))
        recorder.add(seen(1.0, used_tokens=9, running=2))
    path.write_bytes(path.read_bytes()[:-40])
    assert read_recording(path).left_out == 1
    code, out, err = run("report", tmp_path)
    assert code == 0
    assert "The cache held at most 7 of 2,048 tokens" in out
    assert f"1 line of {path} left out" in err
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "1 line of the recording left out as not whole." in text
    assert "observed-cache.svg" in text
    assert (tmp_path / "observed-cache.svg").exists()
    code, out, _ = run("report", tmp_path, "--json")
    told = json.loads(out)
    assert (told["kind"], told["peak_used"], told["answered"]) == ("observation", 7, 1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (json.dumps({"kind": "observation", "schema": SCHEMA + 1}), "newer localkv"),
        (json.dumps({"kind": "sweep"}), "is no recording"),
        ("", "is no recording"),
        ("[" * 100_000, "is no recording"),
    ],
)
def test_what_is_no_recording_is_refused(run: Run, tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / RECORDING_FILE).write_text(line, encoding="utf-8")
    code, _, err = run("report", tmp_path)
    assert code == 2
    assert words in err
    with pytest.raises(UsageError):
        read_recording(tmp_path / "elsewhere")


def test_a_summary_counts_what_was_missed_and_what_was_said() -> None:
    looks = [
        seen(0.0, used_tokens=5, warnings=("w",), counters={"preemptions": 3}),
        Observed(1.0, 5.0, error="slow", error_kind="slow"),
        replace(seen(2.0, used_tokens=9, warnings=("w",), counters={"preemptions": 5}),
                events=("e",), predicted={"capacity_tokens": 7}),
        Observed(3.0, 0.1, error="gone", error_kind="unreachable"),
    ]  # fmt: skip
    found = summarise(INFO, looks)
    assert (found.answered, found.slow, found.missed) == (2, 1, 1)
    assert (found.peak_used, found.capacity, found.peak_share) == (9, 2048, 9 / 2048)
    assert found.grown == {"preemptions": 2}
    assert (found.events, found.warnings) == (((2.0, "e"),), (("w", 2),))
    assert (found.last_error, found.predicted) == ("gone", {"capacity_tokens": 7})
    assert json.loads(json.dumps(found.to_dict()))["missed"] == 1


def test_a_report_of_nothing_is_a_report(tmp_path: Path) -> None:
    text = write_observation(tmp_path, INFO, []).read_text(encoding="utf-8")
    assert "The server gave no figures" in text
    assert list(tmp_path.glob("*.svg")) == []


def test_a_hostile_server_writes_no_markdown(tmp_path: Path) -> None:
    evil = "<script>x</script>\n# title\x1b[2J"
    looks = [replace(seen(0.0, model=evil, warnings=(evil,)), events=(evil,))]
    looks.append(Observed(1.0, 0.1, error=evil, error_kind="status"))
    info = replace(INFO, predicted={"why": evil})
    text = write_observation(tmp_path, info, looks).read_text(encoding="utf-8")
    assert "<script" not in text
    assert "\x1b" not in text
    assert "\n# title" not in text
    for width in (40, 60, 100):
        page = observe_lines.live_lines(
            info, info.predicted, looks[0], rates(None, looks[0]), [evil], width
        )
        page += observe_lines.head_lines(info, info.predicted, looks[0].snapshot, width)
        assert all(line.isprintable() and len(line) <= width for line in page)
    assert observe_lines.log_line(looks[1], rates(None, looks[1]), {}).isprintable()


def test_a_page_shows_what_there_is() -> None:
    look = seen(
        4.0,
        model="/models/a.gguf",
        used_tokens=1945,
        running=2,
        waiting=1,
        slots=(Slot(0, 1024, True, 1000), Slot(1, 1024, False, 945)),
        counters={"prompt_tokens": 5},
        warnings=("line 7 cannot be read",),
    )
    page = "\n".join(
        observe_lines.live_lines(INFO, INFO.predicted, look, rates(None, look), ["e"], 80)
    )
    for words in (
        "model      a.gguf",
        "predicted  2,048 tokens, KV 1.00 MiB",
        "95%",
        "slot 0   1,000/1,024 busy",
        "running 2 waiting 1",
        "event: e",
        "warning: line 7",
    ):
        assert words in page
    assert "speed      unknown" in page
    gone = Observed(5.0, 5.0, error="no answer", error_kind="slow")
    page = "\n".join(observe_lines.live_lines(INFO, {}, gone, rates(look, gone), [], 80))
    assert "slow: no answer" in page


class Clock:
    """Time that passes by waiting alone."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return False


class Still:
    """A server that always says the same, ``took`` seconds later."""

    server = "vllm"

    def __init__(self, clock: Clock, took: float) -> None:
        self.clock, self.took = clock, took

    def scrape(self) -> Snapshot:
        self.clock.now += self.took
        return Snapshot("vllm")

    def forget(self) -> None:
        raise AssertionError("it answered")

    def close(self) -> None:
        return


@pytest.mark.parametrize(
    ("took", "duration", "times"),
    [
        (0.25, 2.5, [0, 1, 2, 2.5]),
        (0, 2, [0, 1, 2]),
        (0, 0, [0]),
        # As long a pause as the answer took.
        (3, 13, [0, 6, 12]),
    ],
)
def test_looks_come_at_their_interval_and_at_the_end(
    took: float, duration: float, times: list[float]
) -> None:
    clock = Clock()
    looks = watch(Still(clock, took), interval=1, duration=duration, wait=clock.wait, clock=clock)
    assert [look.seconds for look in looks] == times
    assert all(wait >= 0 for wait in clock.waits)


def test_a_watch_ends_when_it_is_told_to() -> None:
    clock = Clock()
    looks = watch(Still(clock, 0), wait=lambda seconds: True, clock=clock)
    assert len(list(looks)) == 1
