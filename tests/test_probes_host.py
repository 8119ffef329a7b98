"""Available memory under every kind of limit, and the facts of the machine, from fake trees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from probes_helpers import MIB, REPOSITORY, write_tree

from localkv.probes import available_memory, read_host, total_memory
from localkv.probes.cgroup import cgroup_limits
from localkv.probes.host import container_hint

GIB = 1 << 30
MEMINFO = """MemTotal:       67108864 kB
MemFree:         1048576 kB
MemAvailable:   16777216 kB
SwapTotal:       2097152 kB
SwapFree:        1048576 kB
"""
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
UNLIMITED_V1 = "9223372036854771712"


def v2_group(limit: object, current: int, inactive: int = 0, high: object = "max") -> dict:
    stat = f"anon 1\nfile 2\ninactive_file {inactive}\nactive_file 5\n"
    return {
        "memory.max": f"{limit}\n",
        "memory.high": f"{high}\n",
        "memory.current": f"{current}\n",
        "memory.stat": stat,
    }


def v1_group(limit: object, usage: int, inactive: int = 0) -> dict:
    stat = f"inactive_file 1\ntotal_inactive_file {inactive}\n"
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{usage}\n",
        "memory.stat": stat,
    }


def tree(root: Path, line: str, mount: str, groups: dict[str, dict]) -> Path:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": line,
        "proc/self/mountinfo": "22 1 0:21 / /proc rw - proc proc rw\n" + mount,
    }
    for folder, group in groups.items():
        files.update({f"sys/fs/cgroup{folder}/{name}": text for name, text in group.items()})
    return write_tree(root, files)


def test_without_limits_the_machine_decides(tmp_path):
    root = tree(tmp_path, "0::/a\n", V2_MOUNT.format(root="/"), {"/a": v2_group("max", GIB)})
    reading = available_memory(root)
    assert (reading.value, reading.source) == (16 * GIB, "/proc/meminfo MemAvailable")
    assert total_memory(root).value == 64 * GIB


def test_the_tightest_group_above_decides_and_inactive_files_are_free(tmp_path):
    groups = {
        "/user.slice/run": v2_group(12 * GIB, 1 * GIB),
        "/user.slice": v2_group(4 * GIB, 3 * GIB, inactive=GIB),
        "": {"memory.stat": "inactive_file 0\n"},
    }
    root = tree(tmp_path, "0::/user.slice/run\n", V2_MOUNT.format(root="/"), groups)
    reading = available_memory(root)
    assert (reading.value, reading.source) == (2 * GIB, "cgroup v2 /user.slice memory.max")
    assert total_memory(root).value == 4 * GIB
    assert [limit.limit for limit in cgroup_limits(root)] == [12 * GIB, 4 * GIB]


def test_a_high_mark_below_the_limit_counts(tmp_path):
    groups = {"/a": v2_group(8 * GIB, GIB, high=3 * GIB)}
    root = tree(tmp_path, "0::/a\n", V2_MOUNT.format(root="/"), groups)
    reading = available_memory(root)
    assert (reading.value, reading.source) == (2 * GIB, "cgroup v2 /a memory.high")


def test_a_full_group_leaves_nothing_rather_than_less(tmp_path):
    groups = {"/a": v2_group(GIB, GIB + MIB)}
    root = tree(tmp_path, "0::/a\n", V2_MOUNT.format(root="/"), groups)
    assert available_memory(root).value == 0


def test_container_that_sees_its_path_on_the_host(tmp_path):
    mount = V2_MOUNT.format(root="/docker/abc")
    groups = {"": v2_group(4 * GIB, GIB), "/inner": v2_group(2 * GIB, GIB)}
    root = tree(tmp_path, "0::/docker/abc/inner\n", mount, groups)
    names = [limit.name for limit in cgroup_limits(root)]
    assert names == ["cgroup v2 /inner memory.max", "cgroup v2 / memory.max"]
    assert available_memory(root).value == GIB


def test_group_outside_of_the_namespace_reads_only_what_is_mounted(tmp_path):
    groups = {"": v2_group(2 * GIB, GIB), "/../other": v2_group(MIB, 0)}
    root = tree(tmp_path, "0::/../other\n", V2_MOUNT.format(root="/"), groups)
    assert available_memory(root).value == GIB


def test_version_1_with_its_way_of_saying_unlimited(tmp_path):
    groups = {
        "/memory/docker/abc": v1_group(6 * GIB, 5 * GIB, inactive=2 * GIB),
        "/memory/docker": v1_group(UNLIMITED_V1, 20 * GIB),
        "/memory": v1_group(UNLIMITED_V1, 30 * GIB),
    }
    line = "9:cpu,cpuacct:/x\n4:hugetlb,memory:/docker/abc\n0::/\n"
    mount = V1_MOUNT.format(root="/").replace("rw,memory", "rw,hugetlb,memory")
    root = tree(tmp_path, line, mount, groups)
    reading = available_memory(root)
    assert (reading.value, reading.source) == (
        3 * GIB,
        "cgroup v1 /docker/abc memory.limit_in_bytes",
    )
    assert len(cgroup_limits(root)) == 1


def test_mount_points_with_a_space(tmp_path):
    mount = V2_MOUNT.format(root="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup\\040two")
    root = tree(tmp_path, "0::/a\n", mount, {"\x20two/a": v2_group(GIB, 0)})
    assert available_memory(root).value == GIB


def test_limits_of_the_shell(tmp_path):
    limits = (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max data size             3221225472           unlimited            bytes     \n"
        "Max address space         8589934592           unlimited            bytes     \n"
    )
    status = "VmSize:\t 1048576 kB\nVmData:\t 1048576 kB\n"
    root = tree(tmp_path, "", "", {})
    write_tree(root, {"proc/self/limits": limits, "proc/self/status": status})
    reading = available_memory(root)
    assert (reading.value, reading.source) == (2 * GIB, "ulimit -d (data)")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_what_is_called_available_can_be_had_and_not_much_more():
    code = """
import mmap, resource
from localkv.probes import available_memory
resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))
reading = available_memory()
print(reading.source)
mmap.mmap(-1, reading.value - (1 << 20)).close()
try:
    mmap.mmap(-1, reading.value + (1 << 20))
except (MemoryError, OSError):
    print("refused")
"""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stdout.splitlines() == ["ulimit -v (address space)", "refused"]


def test_no_meminfo_is_unknown_with_the_reason(tmp_path):
    reading = available_memory(tmp_path)
    assert reading.value is None
    assert reading.why == "/proc/meminfo has no MemAvailable"


def test_elsewhere_psutil_answers(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    host = read_host()
    assert host.memory_total.source == "psutil virtual_memory total"
    assert host.memory_total.value == psutil.virtual_memory().total
    assert host.memory_available.source == "psutil virtual_memory available"
    assert host.swap_total.source == "psutil swap_memory total"


def test_this_machine():
    host = read_host()
    assert 0 < host.memory_available.value <= host.memory_total.value
    assert host.memory_total.value <= psutil.virtual_memory().total
    assert host.cpus_logical == psutil.cpu_count()
    assert 1 <= host.cpus_usable <= host.cpus_logical
    assert host.cpus_physical is None or host.cpus_physical <= host.cpus_logical
    assert host.page_size % 4096 == 0
    assert host.to_dict()["memory_total"]["unit"] == "B"


X86 = """processor : 0
model name\t: Imaginary 9 CPU @ 3.00GHz
flags\t\t: fpu sse4_2 fma f16c avx avx2 avx512f avx512vbmi avx_vnni rdpid
"""
ARM = """processor : 0
Features\t: fp asimd aes asimdhp asimddp sve i8mm bf16
CPU implementer\t: 0x41
"""


def test_x86_processor(tmp_path):
    files = {"proc/cpuinfo": X86, "proc/loadavg": "0.50 1.25 2.00 1/200 4242\n"}
    for cpu in range(4):
        siblings = f"{cpu % 2},{cpu % 2 + 2}\n"
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings
    host = read_host(write_tree(tmp_path, files))
    assert host.cpu_model == "Imaginary 9 CPU @ 3.00GHz"
    assert host.cpu_features == (
        *("sse4_2", "fma", "f16c", "avx", "avx2", "avx512f", "avx512_vbmi", "avx_vnni"),
    )
    assert host.cpus_physical == 2
    assert host.load == (0.5, 1.25, 2.0)


def test_arm_processor_has_ggmls_names(tmp_path):
    files = {"proc/cpuinfo": ARM, "sys/firmware/devicetree/base/model": "Board 5\0"}
    host = read_host(write_tree(tmp_path, files))
    assert host.cpu_model == "Board 5"
    assert host.cpu_features == ("neon", "fp16", "dotprod", "sve", "i8mm")


def test_system_and_kernel_names(tmp_path):
    files = {
        "etc/os-release": 'NAME="X"\nPRETTY_NAME="Imaginary Linux 1"\n',
        "proc/sys/kernel/osrelease": "6.1.0-x\n",
    }
    host = read_host(write_tree(tmp_path, files))
    assert (host.system, host.kernel) == ("Imaginary Linux 1", "6.1.0-x")


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        ({".dockerenv": ""}, "docker"),
        ({"run/.containerenv": ""}, "podman"),
        ({"run/systemd/container": "systemd-nspawn\n"}, "systemd-nspawn"),
        ({"proc/self/cgroup": "0::/kubepods/burstable/pod1/x\n"}, "kubepods"),
        ({"proc/sys/kernel/osrelease": "5.15.1-Microsoft-standard-WSL2\n"}, "wsl"),
        ({"proc/self/ns/pid": "-> pid:[4026532999]"}, "pid namespace"),
        ({"proc/self/ns/pid": "-> pid:[4026531836]"}, None),
        ({}, None),
    ],
)
def test_container_hints(tmp_path, files, hint):
    assert container_hint(write_tree(tmp_path, files)) == hint
