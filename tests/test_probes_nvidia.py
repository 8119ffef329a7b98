"""NVIDIA's real Python client over the stub library: figures, and why there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nvml_stub import BASE, CONTEXT, MIB, TOTAL, build_nvml_stub
from probes_helpers import COUNTER_LAG, REPOSITORY, memory_child, write_tree

from localkv.probes.nvidia import VRAM_KEYS, Unknown

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the stub is a Linux library"
)

MARKER = "holds-the-stub-device"
GROWS = f"total {TOTAL}\nbase {BASE}\ncontext {CONTEXT}\nprocess cmdline:{MARKER} rss\n"
# Whatever these tests run in, the probe is shown the machine's own PID namespace.
FIRST_NAMESPACE = {"proc/self/ns/pid": "-> pid:[4026531836]"}

# Prints the answers of the probe as JSON; the process asked about is named by the argument.
_PROBE = """
import dataclasses, json, os, sys
from pathlib import Path
from localkv.probes.nvidia import Unknown, open_nvml
root, pid = Path(sys.argv[1]), int(sys.argv[2])
(root / "proc" / str(pid)).mkdir(parents=True, exist_ok=True)
with open_nvml(root) as gpu:
    answer = {
        "unknown": gpu.reason if isinstance(gpu, Unknown) else None,
        "driver": getattr(gpu, "driver", None),
        "cuda": getattr(gpu, "cuda", None),
        "devices": [dataclasses.asdict(device) for device in gpu.devices],
        "readings": {key: r.to_dict() for key, r in gpu.read(pid).items()},
    }
print(json.dumps(answer))
"""

PID = 4242
Probe = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build_nvml_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def probe(stub: dict[str, str], tmp_path: Path) -> Probe:
    """Return a function that asks the probe about a process, in a process of its own."""

    def ask(
        state: str,
        pid: int = PID,
        error: str = "",
        files: dict[str, str] = FIRST_NAMESPACE,
        env: dict[str, str] = stub,
    ) -> dict[str, Any]:
        root = write_tree(tmp_path / "root", files)
        state_file = tmp_path / "state"
        state_file.write_text(state, encoding="utf-8")
        selected = {"LOCALKV_NVML_STUB_STATE": str(state_file), "LOCALKV_NVML_STUB_ERROR": error}
        answer: dict[str, Any] = run(_PROBE, root, pid, env={**env, **selected})
        return answer

    return ask


def run(code: str, *arguments: object, env: dict[str, str]) -> Any:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_device_facts(probe: Probe):
    answer = probe(f"total {TOTAL}\nreserved {400 * MIB}\nbase {BASE}\n")
    assert (answer["driver"], answer["cuda"], answer["unknown"]) == ("550.54.15", "12.4", None)
    (device,) = answer["devices"]
    assert device["name"] == "NVIDIA Stub 24GB"
    assert device["uuid"].startswith("GPU-")
    assert (device["total"], device["reserved"], device["used"]) == (TOTAL, 400 * MIB, BASE)
    assert device["free"] == TOTAL - 400 * MIB - BASE
    assert device["mig"] is None


def test_growth_of_a_process_shows_from_outside_and_on_the_device(stub, tmp_path):
    state = tmp_path / "state"
    state.write_text(GROWS, encoding="utf-8")
    env = {**stub, "LOCALKV_NVML_STUB_STATE": str(state)}
    root = write_tree(tmp_path / "root", FIRST_NAMESPACE)

    def vram(pid: int) -> tuple[int, int]:
        readings = run(_PROBE, root, pid, env=env)["readings"]
        return readings["vram_process"]["value"], readings["vram_device"]["value"]

    with memory_child(MARKER, env) as child:
        process, device = vram(child.pid)
        assert process > CONTEXT
        assert device - process == BASE
        child.do("allocate", 64 * MIB)
        grown, device_grown = vram(child.pid)
        assert grown - process == pytest.approx(64 * MIB, abs=COUNTER_LAG)
        assert device_grown - device == grown - process
        assert vram(os.getpid())[0] == 0


def test_a_process_measures_itself(stub, tmp_path):
    state = tmp_path / "state"
    state.write_text(GROWS, encoding="utf-8")
    code = """
import json, mmap
from localkv.probes import open_nvml
with open_nvml() as gpu:
    gpu.read()
    before = gpu.read()
    block = mmap.mmap(-1, 1 << 26, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block.write(bytes(1 << 20) * 64)
    after = gpu.read()
print(json.dumps({key: after[key].value - before[key].value for key in before}))
"""
    grown = run(code, MARKER, env={**stub, "LOCALKV_NVML_STUB_STATE": str(state)})
    assert grown["vram_process"] == pytest.approx(64 * MIB, abs=COUNTER_LAG)
    assert grown["vram_device"] == pytest.approx(64 * MIB, abs=COUNTER_LAG)


def test_computing_and_drawing_is_counted_once(probe: Probe):
    readings = probe(f"process pid:{PID} 1000 both\n")["readings"]
    assert readings["vram_process"]["value"] == 1000


def test_a_process_that_only_draws_is_found(probe: Probe):
    readings = probe(f"process pid:{PID} 1000 graphics\nprocess pid:1 7\n")["readings"]
    assert readings["vram_process"]["value"] == 1000
    assert readings["vram_device"]["value"] == 1007


def test_not_listed_is_zero_where_every_process_is_listed(probe: Probe):
    reading = probe("process pid:1 7\n")["readings"]["vram_process"]
    assert reading["value"] == 0
    assert "not among the running processes" in reading["source"]


def test_many_processes_are_read_in_full(probe: Probe):
    rules = "".join(f"process pid:{pid} {pid}\n" for pid in range(PID - 14, PID + 1))
    readings = probe(rules)["readings"]
    assert readings["vram_process"]["value"] == PID
    assert readings["vram_device"]["value"] == sum(range(PID - 14, PID + 1))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("nvmlInitWithFlags:9", "its driver is not loaded"),
        ("nvmlInitWithFlags:4", "this user may not ask"),
        ("nvmlInitWithFlags:18", "reboot first"),
        ("nvmlInitWithFlags:17", "The operating system has blocked the request"),
        ("nvmlInitWithFlags:777", "stub error 777"),
        ("nvmlDeviceGetCount_v2:999", "Unknown Error"),
        ("nvmlDeviceGetHandleByIndex_v2:15", "the device is lost"),
    ],
)
def test_nothing_can_be_opened(probe: Probe, error: str, reason: str):
    answer = probe("", error=error)
    assert reason in answer["unknown"]
    assert answer["devices"] == []
    for key in VRAM_KEYS:
        assert answer["readings"][key]["value"] is None
        assert reason in answer["readings"][key]["why"]


def test_driver_without_a_device(probe: Probe):
    assert probe("devices 0\n")["unknown"] == "the NVIDIA driver is loaded, but sees no device"


@pytest.mark.parametrize(
    ("error", "key", "reason"),
    [
        ("nvmlDeviceGetComputeRunningProcesses_v3:4", "vram_process", "this user may not ask"),
        ("nvmlDeviceGetGraphicsRunningProcesses_v3:3", "vram_process", "does not report"),
        ("nvmlDeviceGetMemoryInfo_v2:15", "vram_device", "the device is lost"),
        (
            "nvmlDeviceGetMemoryInfo_v2:3,nvmlDeviceGetMemoryInfo:3",
            "vram_device",
            "does not report it for this device",
        ),
    ],
)
def test_one_figure_fails_alone(probe: Probe, error: str, key: str, reason: str):
    readings = probe(f"base 5\nprocess pid:{PID} 7\n", error=error)["readings"]
    assert readings[key]["value"] is None
    assert readings[key]["why"].startswith("gpu0: ")
    assert reason in readings[key]["why"]
    (other,) = set(VRAM_KEYS) - {key}
    assert readings[other]["value"]


def test_memory_that_is_not_available_is_not_a_number(probe: Probe):
    readings = probe(f"process pid:{PID} na\n")["readings"]
    assert readings["vram_process"]["value"] is None
    assert "not its memory" in readings["vram_process"]["why"]
    assert readings["vram_device"]["value"] == 0


def test_others_without_a_figure_leave_absence_unproven(probe: Probe):
    assert probe("process pid:1 na\n")["readings"]["vram_process"]["value"] is None


def test_mig_parent_does_not_tell(probe: Probe):
    answer = probe("mig 1\nprocess pid:1 7\n")
    assert answer["devices"][0]["mig"] is True
    assert answer["readings"]["vram_process"]["value"] is None
    assert "MIG" in answer["readings"]["vram_process"]["why"]


def test_wsl_does_not_list(probe: Probe):
    kernel = {"proc/sys/kernel/osrelease": "5.15-microsoft-standard-WSL2"}
    reading = probe("", files={**FIRST_NAMESPACE, **kernel})["readings"]["vram_process"]
    assert reading["value"] is None
    assert "Windows Subsystem" in reading["why"]


CONTAINER = {"proc/self/ns/pid": "-> pid:[4026532999]"}


def test_container_where_the_driver_lists_the_hosts_ids(probe: Probe):
    # The same number is a process of ours and, by chance, one of the host's.
    state = f"process pid:{PID} 1000\nprocess pid:31000 2000\n"
    reading = probe(state, files=CONTAINER)["readings"]["vram_process"]
    assert reading["value"] is None
    assert "--pid=host" in reading["why"]


def test_container_where_the_driver_translates_the_ids(probe: Probe):
    state = f"process pid:{PID} 1000\nprocess pid:17 2000\n"
    files = {**CONTAINER, "proc/17/status": ""}
    assert probe(state, files=files)["readings"]["vram_process"]["value"] == 1000


def test_container_where_nothing_is_listed_proves_nothing(probe: Probe):
    reading = probe("", files=CONTAINER)["readings"]["vram_process"]
    assert reading["value"] is None
    assert "proves nothing" in reading["why"]


def test_a_process_that_is_gone_holds_nothing_known(stub: dict[str, str], tmp_path: Path):
    code = """
import json, subprocess, sys
from localkv.probes import open_nvml
ended = subprocess.Popen([sys.executable, "-c", ""])
ended.wait()
with open_nvml() as gpu:
    reading = gpu.read(ended.pid)["vram_process"]
print(json.dumps([reading.value, reading.why]))
"""
    value, why = run(code, env=stub)
    assert value is None
    assert why.endswith("is gone")


def test_two_devices_are_summed_and_told_apart(probe: Probe):
    state = f"devices 2\nbase 5\nprocess pid:{PID} 10\nprocess pid:{PID} 100 compute 1\n"
    readings = probe(state)["readings"]
    assert {key: reading["value"] for key, reading in readings.items()} == {
        "vram_process": 110,
        "vram_device": 120,
        "vram_process.gpu0": 10,
        "vram_process.gpu1": 100,
        "vram_device.gpu0": 15,
        "vram_device.gpu1": 105,
    }


def test_one_unknown_device_makes_the_sum_unknown(probe: Probe):
    state = f"devices 2\nprocess pid:{PID} 10\nprocess pid:{PID} na compute 1\n"
    readings = probe(state)["readings"]
    assert readings["vram_process.gpu0"]["value"] == 10
    assert readings["vram_process"]["value"] is None
    assert readings["vram_process"]["why"].startswith("gpu1: ")


def test_older_library_without_the_newer_functions(probe: Probe, tmp_path_factory):
    old = build_nvml_stub(tmp_path_factory.mktemp("old"), old=True)
    answer = probe(f"reserved 9\nbase 5\nprocess pid:{PID} 1000\n", env=old)
    assert answer["readings"]["vram_process"]["value"] == 1000
    (device,) = answer["devices"]
    assert (device["used"], device["reserved"], device["mig"]) == (1014, None, None)


def test_closed_connection_is_a_reason(stub: dict[str, str]):
    code = """
import json
from localkv.probes import open_nvml
gpu = open_nvml()
gpu.close()
print(json.dumps({key: [r.value, r.why] for key, r in gpu.read().items()}))
"""
    for value, why in run(code, env=stub).values():
        assert value is None
        assert "closed" in why


_SUMMARY = """
import dataclasses, json, sys
from pathlib import Path
from localkv.probes import gpu_summary
print(json.dumps(dataclasses.asdict(gpu_summary(Path(sys.argv[1])))))
"""


def test_summary_of_a_machine_with_a_device(stub: dict[str, str], tmp_path: Path):
    summary = run(_SUMMARY, tmp_path, env=stub)
    assert (summary["available"], summary["reason"]) == (True, "")
    assert [device["total"] for device in summary["devices"]] == [TOTAL]


NO_LIBRARY = "there is no NVIDIA driver library (libnvidia-ml) on this machine"


@pytest.mark.parametrize(
    ("vendors", "reason"),
    [
        ([], NO_LIBRARY),
        (["0x1234"], NO_LIBRARY),
        (["0x10de"], f"{NO_LIBRARY} (the machine has an NVIDIA GPU)"),
        (
            ["0x8086", "0x1002"],
            f"{NO_LIBRARY}; the machine has a GPU of Intel and AMD, whose memory is not read",
        ),
    ],
)
def test_summary_without_a_library_names_the_gpus_there_are(tmp_path, vendors, reason):
    # A file that is no library stops the loader, also on a machine that has a real one.
    write_tree(tmp_path, {"lib/libnvidia-ml.so.1": "not a library"})
    for index, vendor in enumerate(vendors):
        card = f"sys/class/drm/card{index}/device/vendor"
        write_tree(tmp_path, {card: f"{vendor}\n"})
    summary = run(_SUMMARY, tmp_path, env={"LD_LIBRARY_PATH": str(tmp_path / "lib")})
    assert (summary["available"], summary["reason"]) == (False, reason)


def test_summary_without_the_package(tmp_path: Path):
    code = "import sys\nsys.modules['pynvml'] = None\n" + _SUMMARY
    summary = run(code, tmp_path, env={})
    assert summary["reason"] == "the Python package nvidia-ml-py is not installed"


def test_unknown_has_the_readings_of_an_open_probe():
    with Unknown("no driver") as gpu:
        readings = gpu.read()
    assert tuple(readings) == VRAM_KEYS
    assert all(r.value is None and r.why == "no driver" for r in readings.values())
