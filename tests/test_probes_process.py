"""The readings of a process are true: what it takes shows, where it belongs, and goes again."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import psutil
import pytest
from probes_helpers import COUNTER_LAG, MIB, NOISE, REPOSITORY, Child, memory_child, write_tree

from localkv.probes.process import (
    PROCESS_KEYS,
    read_process,
    reset_peak,
    sample_process,
)

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
SIZE = 64 * MIB


def values(pid: int) -> dict[str, int]:
    readings = read_process(pid)
    assert tuple(readings) == PROCESS_KEYS
    return {key: r.value for key, r in readings.items() if r.value is not None}


def growth(child: Child, word: str, argument: object = "") -> dict[str, int]:
    before = values(child.pid)
    assert child.do(word, argument) == "ok"
    after = values(child.pid)
    return {key: after[key] - before[key] for key in before}


@linux
def test_touched_memory_is_anonymous_and_private_to_the_page():
    with memory_child() as child:
        grown = growth(child, "allocate", SIZE)
    assert grown["rss_anon"] == pytest.approx(SIZE, abs=NOISE)
    assert grown["uss"] == pytest.approx(SIZE, abs=NOISE)
    assert grown["rss"] == pytest.approx(SIZE, abs=COUNTER_LAG)
    assert grown["rss_file"] == pytest.approx(0, abs=COUNTER_LAG)


@linux
def test_a_mapped_file_is_file_memory_not_anonymous():
    spec = importlib.util.find_spec("numpy")
    assert spec
    assert spec.origin
    libraries = Path(spec.origin).parents[1].glob("numpy*/**/*.so*")
    largest = max(libraries, key=lambda path: path.stat().st_size)
    with memory_child() as child:
        grown = growth(child, "map", largest)
    assert grown["rss_file"] == pytest.approx(largest.stat().st_size, abs=COUNTER_LAG)
    assert grown["rss_anon"] == pytest.approx(0, abs=NOISE)


@linux
def test_peak_stays_when_memory_is_given_back_until_it_is_reset():
    with memory_child() as child:
        start = values(child.pid)
        child.do("allocate", SIZE)
        freed = growth(child, "free")
        assert freed["rss_anon"] == pytest.approx(-SIZE, abs=NOISE)
        held = values(child.pid)
        assert held["peak_rss"] >= start["rss"] + SIZE - COUNTER_LAG
        answer = child.do("reset")
        if answer != "ok":
            pytest.skip(answer)
        now = values(child.pid)
        assert now["peak_rss"] == pytest.approx(now["rss"], abs=COUNTER_LAG)


@linux
def test_memory_shared_with_a_fork_is_not_unique():
    with memory_child() as child:
        child.do("allocate", SIZE)
        shared = growth(child, "fork")
    assert shared["uss"] == pytest.approx(-SIZE, abs=SIZE // 4)
    assert shared["rss_anon"] == pytest.approx(0, abs=NOISE)


@linux
def test_sampler_follows_from_outside():
    with memory_child() as child:
        before = sample_process(child.pid)
        child.do("allocate", SIZE)
        after = sample_process(child.pid)
    assert set(after) == {"rss_anon", "rss_file", "peak_rss"}
    for key in ("rss_anon", "peak_rss"):
        assert after[key].value - before[key].value == pytest.approx(SIZE, abs=COUNTER_LAG)


@linux
def test_sources_name_file_and_field():
    readings = read_process()
    assert readings["peak_rss"].source == "/proc/self/status VmHWM"
    assert readings["rss_anon"].source == "/proc/self/smaps_rollup Anonymous"
    assert all(r.why is None and r.unit == "B" for r in readings.values())


@linux
def test_ended_and_gone_processes_are_unknown_not_zero():
    with memory_child() as child:
        child.finish()
        ended = read_process(child.pid)
        child.popen.wait()
        gone = read_process(child.pid)
        sampled = sample_process(child.pid)
    for readings, word in ((ended, "has ended"), (gone, "is gone"), (sampled, "is gone")):
        assert all(r.value is None for r in readings.values())
        assert all(word in (r.why or "") for r in readings.values())


STATUS = """Name:\tx
VmHWM:\t     500 kB
VmRSS:\t     400 kB
RssAnon:\t     300 kB
RssFile:\t     100 kB
VmSwap:\t       8 kB
"""
MAPPING = """55560d536000-7fff9239e000 rw-p 00000000 00:00 0
Rss:                 200 kB
Private_Clean:        10 kB
Private_Dirty:       140 kB
Anonymous:           150 kB
"""


@linux
def test_kernel_without_rollup_sums_the_mappings(tmp_path):
    root = write_tree(tmp_path, {"proc/7/status": STATUS, "proc/7/smaps": MAPPING * 2})
    readings = read_process(7, root)
    assert readings["uss"].value == 300 * 1024
    assert readings["rss_anon"].value == 300 * 1024
    assert readings["rss_anon"].source == "/proc/7/smaps Anonymous"
    assert readings["swap"].value == 8 * 1024


@linux
def test_without_page_counts_the_counters_remain(tmp_path):
    root = write_tree(tmp_path, {"proc/7/status": STATUS})
    readings = read_process(7, root)
    assert readings["rss_anon"].value == 300 * 1024
    assert readings["rss_anon"].source == "/proc/7/status RssAnon"
    assert readings["uss"].value is None
    assert "smaps" in (readings["uss"].why or "")


@linux
def test_rollup_that_cannot_be_read_costs_only_what_it_tells(tmp_path):
    root = write_tree(tmp_path, {"proc/7/status": STATUS, "proc/7/smaps_rollup/x": ""})
    readings = read_process(7, root)
    assert readings["uss"].value is None
    assert "cannot be read" in (readings["uss"].why or "")
    assert readings["rss_anon"].value == 300 * 1024


@linux
def test_field_the_kernel_lacks_is_named(tmp_path):
    status = "VmHWM:\t 500 kB\nVmRSS:\t 400 kB\n"
    root = write_tree(tmp_path, {"proc/7/status": status})
    reading = sample_process(7, root)["rss_anon"]
    assert reading.value is None
    assert reading.why == "/proc/7/status has no RssAnon on this kernel"


@linux
def test_refused_reset_says_why(tmp_path):
    done, why = reset_peak(tmp_path)
    assert not done
    assert "clear_refs" in why


def test_macos_gives_psutils_own_readings(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    readings = read_process()
    assert readings["uss"].source == readings["rss_anon"].source == "psutil uss"
    assert readings["uss"].value == readings["rss_anon"].value
    assert readings["uss"].value > MIB
    assert readings["rss_file"].value is None
    assert readings["rss_file"].why == "macOS does not tell this apart"
    assert readings["peak_rss"].source == "getrusage ru_maxrss"
    assert set(sample_process()) == {"rss_anon", "rss_file", "peak_rss"}


def test_macos_peak_of_another_process_is_unknown(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    reading = read_process(os.getppid())["peak_rss"]
    assert reading.value is None
    assert "itself only" in (reading.why or "")


def test_windows_peak_is_the_working_sets(monkeypatch):
    basic = namedtuple("basic", "rss peak_wset")(10 * MIB, 12 * MIB)
    full = namedtuple("full", "uss")(7 * MIB)
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _self: basic)
    monkeypatch.setattr(psutil.Process, "memory_full_info", lambda _self: full)
    readings = read_process()
    assert readings["peak_rss"].value == 12 * MIB
    assert readings["peak_rss"].source == "psutil peak_wset"
    assert readings["rss_anon"].value == 7 * MIB
    assert readings["swap"].why == "Windows does not tell this apart"


def test_denied_access_elsewhere_is_a_reason(monkeypatch):
    def denied(self):
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(psutil.Process, "memory_full_info", denied)
    readings = read_process()
    assert readings["rss"].value
    assert readings["uss"].value is None
    assert "psutil" in (readings["uss"].why or "")


def test_importing_the_probes_loads_neither_psutil_nor_nvml():
    code = (
        "import sys, localkv.probes.gpu, localkv.probes.host, localkv.probes.process\n"
        "from localkv.probes import read_process, available_memory, open_nvml\n"
        "print(*{'psutil', 'pynvml', 'resource', 'platform', 'ctypes'} & set(sys.modules))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert loaded.stdout.split() == []
