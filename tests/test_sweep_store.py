from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localkv.errors import LocalkvError, UsageError
from localkv.records import Phase, PointRecord, Reading, RunInfo
from localkv.sweep.store import RunStore

REPOSITORY = Path(__file__).resolve().parents[1]
PEAK = {"uss": Reading(1 << 28, source="psutil"), "vram_process": Reading(None, why="no GPU")}


def record(key: str, repeat: int = 0, outcome: str = "ok", **more: Any) -> PointRecord:
    return PointRecord(key, repeat, outcome, {"n_ctx": 1024}, peak=PEAK, **more)


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    directory = tmp_path / "reports" / "a model" / "now"
    made = RunStore(directory)
    made.prepare(1)
    return made


# -- what is written comes back --------------------------------------------------------------


def test_records_come_back_in_the_order_of_writing(store: RunStore) -> None:
    phases = (Phase("baseline", 0.1, PEAK), Phase("model", 0.2, PEAK))
    written = [
        record("b", phases=phases),
        record("a", 1, "oom", reason="no room for \u2192 the cache\n", stage="kv"),
        record("a", 0, "crashed", log_tail=("x\ty", "\x1b[31m")),
    ]
    for entry in written:
        store.append(entry)
    assert store.read_records() == written
    assert store.results.read_bytes().count(b"\n") == len(written)


def test_a_record_is_on_disk_when_append_returns(store: RunStore) -> None:
    for number in range(3):
        store.append(record(f"p{number}"))
        assert [r.key for r in RunStore(store.directory).read_records()][-1] == f"p{number}"


def test_the_last_record_of_a_point_wins(store: RunStore) -> None:
    for entry in (record("a", reason="first"), record("b"), record("a", reason="second")):
        store.append(entry)
    store.append(record("a", 1))
    found = {(entry.key, entry.repeat): entry.reason for entry in store.read_records()}
    assert found == {("a", 0): "second", ("b", 0): None, ("a", 1): None}
    assert len(store.read_records()) == 3


def test_a_run_that_has_no_record_yet_has_none(store: RunStore) -> None:
    assert store.read_records() == []
    store.mend()
    assert store.read_records() == []


def test_the_run_file_comes_back(store: RunStore) -> None:
    info = RunInfo(localkv="1", argv=("localkv", "sweep"), seed=7, points=2, plan={"a": [1]})
    assert not store.exists()
    store.create(info)
    assert store.exists()
    assert store.read_info() == info


# -- kills and damage ------------------------------------------------------------------------


@pytest.mark.parametrize("kept", range(1, 12))
def test_a_torn_last_line_is_dropped_and_the_next_record_starts_afresh(
    store: RunStore, kept: int
) -> None:
    store.append(record("a"))
    whole = store.results.read_bytes()
    store.append(record("b"))
    line = store.results.read_bytes()[len(whole) :]
    store.results.write_bytes(whole + line[: len(line) * kept // 12])
    assert [entry.key for entry in store.read_records()] == ["a"]
    store.mend()
    assert store.results.read_bytes() == whole
    store.append(record("b"))
    assert store.read_records() == [record("a"), record("b")]


def test_mending_changes_nothing_that_is_whole(store: RunStore) -> None:
    store.append(record("a"))
    with store.results.open("ab") as file:
        file.write(b"\xff\xfe not a record, but a line\n")
    store.append(record("b"))
    before = store.results.read_bytes()
    store.mend()
    assert store.results.read_bytes() == before
    with store.results.open("ab") as file:
        file.write(b'{"key":"\xc3')
    store.mend()
    assert store.results.read_bytes() == before


@pytest.mark.parametrize(
    "line",
    ["", "{}", "[]", "null", "1", '{"key": 1}', "\x00\x00", '"text"', "{" * 5,
     '{"key": [], "repeat": 0, "outcome": "ok", "config": {}}',
     '{"key": "k", "repeat": 0, "outcome": "ok", "config": {}, "phases": [{}]}',
     '{"key": "k", "repeat": 0, "outcome": "ok", "config": {}, "phases": 3}',
     '{"key": "k", "repeat": 0, "outcome": "ok", "config": {}, "peak": {"uss": 5}}'],
)  # fmt: skip
def test_a_line_that_is_no_record_is_passed_over(store: RunStore, line: str) -> None:
    store.append(record("a"))
    with store.results.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    store.append(record("b"))
    assert [entry.key for entry in store.read_records()] == ["a", "b"]
    (left,) = store.read_results().left_out
    assert left.line == 2
    assert left.why
    assert "1 line is no record" in (store.read_results().note or "")


def test_lines_left_out_are_counted_and_the_first_are_named(store: RunStore) -> None:
    store.append(record("a"))
    assert store.read_results().note is None
    with store.results.open("ab") as file:
        file.write(b"junk\n" * 7 + b'{"torn')
    note = store.read_results().note
    assert note is not None
    assert note.startswith("8 lines are no records")
    assert "line 2: not JSON" in note
    assert note.endswith("and 3 more)")
    assert store.read_results().left_out[-1].why == "torn, as a kill leaves it"


@pytest.mark.parametrize(
    "change",
    [{"config": None}, {"config": []}, {"timings": 5}, {"engine": "x"}, {"prediction": None},
     {"repeat": "0"}, {"outcome": None}, {"key": 7}, {"schema": 2}, {"schema": "new"},
     {"peak": {"rss": {"value": "many"}}}, {"peak": {"rss": {"value": 1.5}}},
     {"phases": [{"name": "model", "readings": {"rss": {"value": True}}}]}],
)  # fmt: skip
def test_a_record_with_a_field_of_another_kind_is_left_out(
    store: RunStore, change: dict[str, Any]
) -> None:
    store.results.write_text(json.dumps({**record("a").to_dict(), **change}) + "\n")
    results = store.read_results()
    assert results.records == ()
    assert len(results.left_out) == 1


def test_a_record_of_an_older_localkv_has_what_it_has(store: RunStore) -> None:
    written = {"key": "a", "repeat": 0, "outcome": "ok", "config": {}, "schema": 0, "gone": 1}
    store.results.write_text(json.dumps(written) + "\n")
    assert [entry.key for entry in store.read_results().records] == ["a"]


# -- one sweep at a time ---------------------------------------------------------------------

_HOLD = """
import pathlib, sys
from localkv.sweep.store import RunStore
with RunStore(pathlib.Path(sys.argv[1])).alone():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_sweep_into_a_directory_is_kept_out_until_the_first_ends(tmp_path: Path) -> None:
    directory = tmp_path / "reports" / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(directory)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        refused = pytest.raises(UsageError, match="another localkv is sweeping into")
        with refused as caught, RunStore(directory).alone():
            pass
        assert str(directory) in caught.value.message
        assert "-o" in caught.value.hint
        with RunStore(tmp_path / "other").alone():
            pass
        holder.kill()  # no chance to tidy up, as after a crash
    with RunStore(directory).alone():
        assert list(directory.iterdir()) == []  # nothing of the lock is left in a run


def test_a_directory_that_cannot_be_made_is_refused_when_it_is_locked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = pytest.raises(UsageError, match="cannot write the results")
    with refused, RunStore(tmp_path / "file" / "run").alone():
        pass


def test_an_error_while_the_lock_is_held_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), RunStore(tmp_path / "run").alone():
        raise FileNotFoundError("something else")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"argv": null}', '{"model": []}', '{"points": "1"}', "\x00"]
)
def test_a_damaged_run_file_is_named(store: RunStore, content: str) -> None:
    (store.directory / "run.json").write_text(content, encoding="utf-8")
    with pytest.raises(UsageError, match=r"run\.json is damaged") as caught:
        store.read_info()
    assert caught.value.hint


def test_a_run_file_of_a_newer_localkv_is_refused(store: RunStore) -> None:
    store.create(RunInfo(schema=2))
    with pytest.raises(UsageError, match="newer localkv") as caught:
        store.read_info()
    assert "update localkv" in caught.value.hint


def test_a_run_file_of_an_older_localkv_takes_defaults(store: RunStore) -> None:
    (store.directory / "run.json").write_text('{"localkv": "0", "schema": 0, "gone": 1}')
    assert store.read_info() == RunInfo(localkv="0", schema=0)


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run") as caught:
        RunStore(tmp_path / "absent").read_info()
    assert caught.value.exit_code == 2


def test_a_run_file_is_written_whole_or_not_at_all(
    store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create(RunInfo(seed=1))

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        store.create(RunInfo(seed=2))
    assert store.read_info().seed == 1


# -- places that cannot be written -----------------------------------------------------------


def assert_refused_at_once(directory: Path) -> None:
    with pytest.raises(UsageError) as caught:
        RunStore(directory).prepare(12)
    assert str(directory) in caught.value.message
    assert "-o" in caught.value.hint
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_directory_below_a_file_is_refused_before_the_first_point(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert_refused_at_once(file)
    assert_refused_at_once(file / "run")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system without files")
def test_a_file_system_that_takes_no_files_is_refused() -> None:
    assert_refused_at_once(Path("/proc/self"))
    assert_refused_at_once(Path("/proc/localkv"))


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() == 0, reason="permissions do not hold for this user"
)
def test_a_read_only_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert_refused_at_once(tmp_path)
    assert_refused_at_once(tmp_path / "run")
    tmp_path.chmod(0o755)


def in_namespace(mount: str, program: str, *arguments: str) -> str:
    """Return what ``program`` prints where ``mount`` was done; no other process sees it."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no unshare")
    inside = [unshare, "--map-root-user", "--mount", "sh", "-c"]
    if subprocess.run([*inside, mount], capture_output=True, timeout=60).returncode:
        pytest.skip("this user may not mount")
    done = subprocess.run(
        [*inside, f'{mount}; exec "$@"', "sh", sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


_PREPARE = """
import os, pathlib, sys
from localkv.errors import LocalkvError
from localkv.sweep.store import RunStore
store = RunStore(pathlib.Path(sys.argv[1]))
try:
    store.prepare(int(sys.argv[2]))
    print("prepared")
except LocalkvError as error:
    print(error.exit_code, error)
print(os.listdir(store.directory) if store.directory.exists() else "nothing")
"""


def test_a_disk_that_is_too_full_is_found_before_the_first_point(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=8m none {shlex.quote(str(tmp_path))}"
    run = str(tmp_path / "run")
    assert in_namespace(mount, _PREPARE, run, "12").splitlines() == ["prepared", "[]"]
    said, left = in_namespace(mount, _PREPARE, run, "1000").splitlines()
    assert said.startswith(f"2 cannot write the results to {run}: ")
    assert os.strerror(28) in said
    assert left == "[]"  # the probe does not keep the disk full


def test_a_read_only_file_system_is_found_before_the_first_point(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o ro none {shlex.quote(str(tmp_path))}"
    said, left = in_namespace(mount, _PREPARE, str(tmp_path / "run"), "12").splitlines()
    assert said.startswith("2 cannot write the results to ")
    assert left == "nothing"


def test_a_limit_on_file_size_is_found_before_the_first_point(tmp_path: Path) -> None:
    pytest.importorskip("resource", reason="process limits are POSIX")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20,) * 2)\n"
    done = subprocess.run(
        [sys.executable, "-c", limit + _PREPARE, str(tmp_path), "12"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said, left = done.stdout.splitlines()
    assert said.startswith(f"2 cannot write the results to {tmp_path}: ")
    assert left == "[]"


def test_preparing_leaves_what_is_there(store: RunStore) -> None:
    store.create(RunInfo(seed=3))
    store.append(record("a"))
    store.prepare(100)
    assert sorted(path.name for path in store.directory.iterdir()) == ["results.jsonl", "run.json"]
    assert (store.read_info().seed, len(store.read_records())) == (3, 1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_a_disk_that_fills_up_midway_says_how_to_go_on(store: RunStore) -> None:
    store.results.symlink_to("/dev/full")
    with pytest.raises(LocalkvError) as caught:
        store.append(record("a"))
    assert os.strerror(28) in caught.value.message
    command = caught.value.hint.split(": ", 1)[1]
    # It can be pasted as it stands, although the directory's name holds a space.
    assert shlex.split(command) == ["localkv", "sweep", "--resume", "-o", str(store.directory)]


def test_results_that_cannot_be_written_midway_say_how_to_go_on(store: RunStore) -> None:
    shutil.rmtree(store.directory)
    with pytest.raises(LocalkvError, match="cannot write to") as caught:
        store.append(record("a"))
    assert "--resume" in caught.value.hint
    with pytest.raises(LocalkvError, match="cannot write"):
        store.create(RunInfo())


def test_a_line_is_plain_json_that_names_its_schema(store: RunStore) -> None:
    store.append(record("a"))
    (line,) = store.results.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["schema"] == 1
