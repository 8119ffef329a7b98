"""``localkv doctor``: what it finds here, and what it says where something is missing."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import LOCALKV, localkv
from conftest import Run
from nvml_stub import build_nvml_stub
from servers import binary

from localkv.cli import doctor, doctor_checks, doctor_places
from localkv.cli.doctor_checks import FAIL, NOTE, OK, Check, check_engine, check_gpu, python_line
from localkv.cli.doctor_places import LEAST_MEMORY
from localkv.engines.info import EngineAnswer, ask_engine
from localkv.engines.llamacpp import PACKAGE, engine_version
from localkv.engines.ollama_host import ollama_url
from localkv.gguf.demo import DEMOS
from localkv.probes.gpu import GpuSummary
from localkv.probes.nvidia import NvidiaDevice

GIB = 1 << 30
KNOWN = {"version": "0.3.36", "commit": "abc", "system_info": "CPU : AVX2 = 1 | REPACK = 1 |"}
CPU = {"name": "CPU", "description": "A CPU", "type": "cpu"}
CUDA = {"name": "CUDA0", "description": "A GPU", "type": "gpu"}
DEVICE = NvidiaDevice(0, "A GPU", None, 24 * GIB, 24 * GIB, 0, None, None)
SEEN = GpuSummary(True, "", (DEVICE,), "550", "12.4")
NONE = GpuSummary(False, "there is no NVIDIA driver library")


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the checks of ``doctor --json`` by name."""
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def engine(*devices: dict[str, str], gpu_offload: bool = True) -> EngineAnswer:
    return EngineAnswer({**KNOWN, "gpu_offload": gpu_offload, "devices": [CPU, *devices]})


# -- this machine ------------------------------------------------------------------------------


@pytest.mark.engine
def test_a_machine_that_can_sweep(
    run: Run, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "llama_cpp"]:
        monkeypatch.delitem(sys.modules, name)  # another test may have loaded it
    code, out, err = run("doctor", "--json")

    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["schema"], found["can_sweep"]) == (1, True)
    checks = {check["name"]: check for check in found["checks"]}
    assert f"{PACKAGE} {engine_version()}" in checks["engine"]["found"]
    assert found["engine"]["commit"] in checks["engine"]["found"]
    assert "CPU" in checks["engine"]["found"]
    assert "psutil" in checks["packages"]["found"]
    assert str(smollm2_path.parent) in checks["models"]["found"]
    assert {check["status"] for check in found["checks"]} <= {OK, NOTE}
    for check in found["checks"]:
        assert check["found"]
        assert bool(check["fix"]) <= bool(check["cost"])
        for line in check["fix"]:
            assert shlex.split(line)
    assert "llama_cpp.llama_cpp" not in sys.modules  # the engine is loaded in a child alone


@pytest.mark.engine
def test_the_page_is_readable_in_60_columns_and_says_what_to_do(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = run("doctor")
    lines = out.splitlines()
    assert code == 0
    assert lines[-1] == "A sweep can run: localkv sweep"
    assert all(len(line) <= 60 for line in lines if " fix: " not in line)


def test_a_fix_line_runs_this_very_python_with_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "a 'b' $HOME"
    odd.mkdir()
    (odd / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(odd / "python"))
    show = "import os, sys; print(os.environ['CMAKE_ARGS'], sys.argv[1], sep='\\n')"
    line = python_line("-c", show, "x y", variables={"CMAKE_ARGS": "-DA=on -DB='c d'"})
    said = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["-DA=on -DB='c d'", "x y"]


def test_a_fix_line_on_windows_is_for_powershell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "executable", r"C:\My Pythons\python.exe")
    line = python_line("-m", "pip", "install", "a==1", variables={"CMAKE_ARGS": "-DGGML_CUDA=on"})
    assert line == (
        r"$env:CMAKE_ARGS='-DGGML_CUDA=on'; & 'C:\My Pythons\python.exe' -m pip install a==1"
    )


# -- the engine --------------------------------------------------------------------------------


def broken_engine(directory: Path, code: str) -> dict[str, str]:
    """Put an engine that does ``code`` when it is loaded before the installed one."""
    package = directory / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "llama_cpp.py").write_text(code)
    return {"PYTHONPATH": str(directory)}


@pytest.mark.parametrize(
    ("code", "said", "build"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "more features", "GGML_NATIVE"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", ""),
        ("raise OSError('libcudart.so.12: cannot open')", "libcudart.so.12", ""),
        ("import os; os._exit(3)", "exit code 3", ""),
    ],
)
def test_an_engine_that_does_not_load_is_named_with_the_line_that_mends_it(
    tmp_path: Path, code: str, said: str, build: str
) -> None:
    done = localkv("doctor", "--json", env=broken_engine(tmp_path, code))

    assert done.returncode == 1, done.stderr
    check = told(done)["engine"]
    assert check["status"] == FAIL
    assert said in check["found"]
    line = check["fix"][-1]
    assert build in line
    words = [word for word in shlex.split(line) if "=" not in word or "==" in word]
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    assert words[-1] == f"{PACKAGE}=={engine_version()}"
    page = localkv("doctor", env={"PYTHONPATH": str(tmp_path)})
    assert page.stdout.splitlines()[-1].startswith("No sweep can run: see engine")


def test_an_engine_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = broken_engine(tmp_path, "import threading; threading.Event().wait()")
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    assert "did not load within 0.5 s" in (ask_engine(timeout=0.5).why or "")


def test_an_engine_that_is_not_installed_is_installed_in_the_version_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor_checks, "engine_version", lambda: None)
    (check,) = check_engine(EngineAnswer(why="not installed"))
    assert check.status == FAIL
    assert check.fix[-1] == python_line("-m", "pip", "install", doctor_checks.wanted_engine())
    assert doctor_checks.wanted_engine().startswith(PACKAGE)


def test_without_a_compiler_its_line_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_checks, "engine_version", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "apt-get").write_text("#!/bin/sh\n")
    (tmp_path / "apt-get").chmod(0o755)
    (check,) = check_engine(EngineAnswer(why="not installed"))
    assert "apt-get install" in check.fix[0]
    assert len(check.fix) == 2


def test_another_version_than_the_pinned_one_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "wanted_engine", lambda: f"{PACKAGE}==0.3.99")
    (check,) = check_engine(engine())
    assert check.status == NOTE
    assert "0.3.99" in check.found
    assert check.fix == (python_line("-m", "pip", "install", f"{PACKAGE}==0.3.99"),)


@pytest.mark.parametrize(
    ("missing", "status"), [("numpy", FAIL), ("psutil", FAIL), ("nvidia-ml-py", NOTE)]
)
def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, missing: str, status: str
) -> None:
    monkeypatch.setattr(
        doctor_checks, "package_version", lambda name: None if name == missing else "1"
    )
    check = doctor_checks.check_packages()
    assert check.status == status
    assert check.fix == (python_line("-m", "pip", "install", missing),)


# -- GPUs --------------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the stub is a Linux library")
@pytest.mark.engine
def test_a_gpu_that_the_engine_is_not_built_for_has_a_line_that_repairs_it(tmp_path: Path) -> None:
    done = localkv("doctor", "--json", env=build_nvml_stub(tmp_path))

    check = told(done)["GPU"]
    assert done.returncode == 0, done.stderr
    assert check["status"] == NOTE
    assert "NVIDIA Stub 24GB" in check["found"]
    assert "without GPU support" in check["found"]
    (line,) = check["fix"]
    assert shlex.split(line) == [
        "CMAKE_ARGS=-DGGML_CUDA=on", sys.executable, "-m", "pip", "install",
        "--force-reinstall", "--no-cache-dir", f"{PACKAGE}=={engine_version()}",
    ]  # fmt: skip


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the stub is a Linux library")
def test_a_driver_that_is_not_loaded_is_said(tmp_path: Path) -> None:
    env = build_nvml_stub(tmp_path, error="nvmlInitWithFlags:9")
    assert "its driver is not loaded" in told(localkv("doctor", "--json", env=env))["GPU"]["found"]


def test_both_see_the_gpu() -> None:
    check = check_gpu(SEEN, engine(CUDA), ("NVIDIA",))
    assert (check.status, check.fix) == (OK, ())
    assert "driver 550, CUDA 12.4" in check.found


def test_a_gpu_that_is_hidden_from_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check = check_gpu(SEEN, engine(), ("NVIDIA",))
    assert "CUDA_VISIBLE_DEVICES is ''" in check.found
    assert check.fix == ("unset CUDA_VISIBLE_DEVICES",)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "CMAKE_ARGS=-DGGML_CUDA=on" in check_gpu(SEEN, engine(), ("NVIDIA",)).fix[0]


def test_fewer_gpus_in_the_engine_than_in_the_machine() -> None:
    two = replace(SEEN, devices=(DEVICE, replace(DEVICE, index=1)))
    check = check_gpu(two, engine(CUDA), ("NVIDIA",))
    assert check.status == NOTE
    assert "uses only those" in check.cost


def test_a_gpu_that_nvml_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    vulkan = {"name": "Vulkan0", "description": "Radeon", "type": "gpu"}
    check = check_gpu(NONE, engine(vulkan), ("AMD",))
    assert check.status == NOTE
    assert "Radeon" in check.found
    assert "not measured" in check.cost
    monkeypatch.setattr(doctor_checks, "package_version", lambda _: None)
    assert check_gpu(NONE, engine(vulkan), ()).fix == (
        python_line("-m", "pip", "install", "nvidia-ml-py"),
    )


@pytest.mark.parametrize(
    ("maker", "switch"), [("AMD", "-DGGML_VULKAN=on"), ("NVIDIA", "-DGGML_CUDA=on")]
)
def test_a_gpu_that_neither_can_use_has_the_back_end_of_its_maker(maker: str, switch: str) -> None:
    check = check_gpu(NONE, engine(gpu_offload=False), (maker,))
    assert check.status == NOTE
    assert f"CMAKE_ARGS={switch}" in check.fix[0]
    assert check_gpu(NONE, engine(gpu_offload=False), ()).status == OK


# -- memory and disk ---------------------------------------------------------------------------


def limited(soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LOCALKV, "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (soft, hard)),
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are read from /proc")
def test_a_limit_of_the_shell_is_found_and_the_line_lifts_it() -> None:
    soft, hard = 3 * GIB, 6 * GIB
    done = limited(soft, hard)

    check = told(done)["memory"]
    assert done.returncode == 0, done.stderr
    assert check["status"] == NOTE
    assert "ulimit -v (address space) 3.00 GiB" in check["found"]
    (line,) = check["fix"]
    lifted = f"ulimit -S -v {soft // 1024}; ulimit -H -v {hard // 1024}; {line}; ulimit -v"
    said = subprocess.run(["sh", "-c", lifted], capture_output=True, text=True, check=True).stdout
    assert int(said) == hard // 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits are read from /proc")
def test_too_little_memory_for_any_sweep_is_a_no() -> None:
    limit = LEAST_MEMORY
    done = limited(limit, limit)

    check = told(done)["memory"]
    assert done.returncode == 1
    assert check["status"] == FAIL
    assert check["fix"] == []  # the hard limit is as low: no line here lifts it


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOCALKV_CACHE", str(tmp_path / "file" / "models"))
    check = doctor_places.check_cache()
    assert check.status == NOTE
    assert "cannot be written" in check.found
    assert "LOCALKV_CACHE=" in check.fix[0]
    assert "-m" in check.cost


@pytest.mark.skipif(sys.platform == "win32", reason="folders that may not be searched are POSIX")
def test_a_cache_below_a_folder_that_may_not_be_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: object, *_: object, **__: object) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "closed") + os.sep):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *_, **__)

    stat = os.stat
    monkeypatch.setattr(os, "stat", refused)  # as the system does for anyone but root
    monkeypatch.setenv("LOCALKV_CACHE", str(tmp_path / "closed" / "models"))

    assert doctor_places.check_cache().status == NOTE


def test_a_cache_without_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALKV_CACHE", str(tmp_path / "models"))
    check = doctor_places.check_cache()
    assert (check.status, check.fix) == (NOTE, (python_line("-m", "localkv.gguf.demo", "demo"),))
    assert "88.57 MiB" in check.cost
    (tmp_path / "models").mkdir()
    with (tmp_path / "models" / DEMOS["demo"].filename).open("wb") as file:
        file.truncate(DEMOS["demo"].size)
    assert doctor_places.check_cache().status == OK


def test_results_that_cannot_be_written_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor_places.check_reports().status == OK
    assert list(tmp_path.iterdir()) == []  # nothing was made
    (tmp_path / "reports").touch()
    check = doctor_places.check_reports()
    assert check.status == NOTE
    assert shlex.split(check.fix[0])[:4] == [sys.executable, "-m", "localkv", "sweep"]


# -- servers -----------------------------------------------------------------------------------

Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Return a function that puts a shell script of a name first on an otherwise empty PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.1:9")  # the port "discard": nobody listens

    def make(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    return make


def servers() -> dict[str, Check]:
    return {check.name: check for check in doctor_places.check_servers()}


def test_servers_that_are_not_there_cost_something_and_can_be_had(program: Program) -> None:
    found = servers()
    assert {check.status for check in found.values()} == {NOTE}
    assert all(check.cost and check.fix for check in found.values())
    assert "127.0.0.1:9" in found["Ollama"].found


def test_servers_on_the_path_tell_their_versions(program: Program) -> None:
    program(
        "ollama",
        "echo 'Warning: could not connect to a running Ollama instance';"
        "echo 'Warning: client version is 0.17.1'",
    )
    program("llama-server", "echo 'version: 6789 (abc1234)' >&2; echo 'built with cc' >&2")
    found = servers()
    assert "version 0.17.1" in found["Ollama"].found
    assert "version 6789 (abc1234)" in found["llama-server"].found


def test_a_program_that_hangs_or_says_nothing_is_no_end(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_places, "_ASK_S", 0.2)
    program("ollama", "while :; do :; done")
    program("llama-server", "printf '\\033[2J'; exit 3")
    found = servers()
    assert "did not tell its version within 0.2 s" in found["Ollama"].found
    assert "exit code 3" in found["llama-server"].found
    assert "\x1b" not in "".join(doctor.page(list(found.values()), True, 80))


@pytest.mark.parametrize("name", ["llama-server", "ollama"])
def test_a_real_server_tells_its_version(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = binary(name)
    monkeypatch.setenv("PATH", str(path.parent))
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.1:9")
    title = "Ollama" if name == "ollama" else name
    assert f"{path}, version " in servers()[title].found


class _Ollama(BaseHTTPRequestHandler):
    body = b'{"version": "0.33.1"}'

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/version" else 404)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def ollama(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Ollama]]:
    """Serve as a running Ollama does, on a port that the kernel picks."""
    handler = type("Handler", (_Ollama,), {})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{server.server_port}")
        monkeypatch.setenv("PATH", "")
        yield handler
        server.shutdown()
        thread.join()


def test_a_running_ollama_is_asked(ollama: type[_Ollama]) -> None:
    check = servers()["Ollama"]
    assert check.status == OK
    assert "Ollama 0.33.1 answers at http://127.0.0.1:" in check.found


@pytest.mark.parametrize("body", [b"", b"[]", b"<html>", b'{"version": 3}', b"x" * 100_000])
def test_something_else_on_its_port_is_no_ollama(ollama: type[_Ollama], body: bytes) -> None:
    ollama.body = body
    assert servers()["Ollama"].status == NOTE


@pytest.mark.parametrize(
    ("host", "url"),
    [
        (None, "http://127.0.0.1:11434"),
        ("", "http://127.0.0.1:11434"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        ("0.0.0.0:8080", "http://127.0.0.1:8080"),
        ("box", "http://box:11434"),
        (" 'box:99' ", "http://box:99"),
        ("http://box", "http://box:80"),
        ("https://box/", "https://box:443"),
        ("[::]:5", "http://127.0.0.1:5"),
        ("[::1]", "http://[::1]:11434"),
        ("box:notaport", "http://box:11434"),
        ("box:99999999", "http://box:11434"),
    ],
)
def test_where_ollama_listens(host: str | None, url: str) -> None:
    assert ollama_url(host) == url


def test_the_environment_of_a_bad_address_is_no_end(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bad in ("http://u:p@box", "://", "[", "ftp://box", "\x00", "box:" + "9" * 5000):
        if "\x00" not in bad:
            monkeypatch.setenv("OLLAMA_HOST", bad)
            assert servers()["Ollama"].status == NOTE
    assert os.environ["OLLAMA_HOST"]
