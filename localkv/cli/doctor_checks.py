"""What a sweep needs of Python and of the engine, and the commands that bring what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from localkv.engines.info import EngineAnswer
from localkv.engines.llamacpp import PACKAGE, cpu_features, engine_version, package_version
from localkv.probes.gpu import GpuSummary
from localkv.sweep.environment import PACKAGES

OK, NOTE, FAIL = "ok", "note", "FAIL"

#: Command of a package manager -> how it installs a compiler.
_COMPILERS = {
    "apt-get": "sudo apt-get install -y build-essential",
    "dnf": "sudo dnf install -y gcc-c++ make",
    "pacman": "sudo pacman -S --needed base-devel",
    "zypper": "sudo zypper install -y gcc-c++ make",
    "apk": "sudo apk add build-base linux-headers",
    "xcode-select": "xcode-select --install",
    "winget": "winget install Microsoft.VisualStudio.2022.BuildTools",
}
#: Maker of a GPU -> llama.cpp's switch of the back end for it, and the program its build needs.
_BACKENDS = {
    "NVIDIA": ("-DGGML_CUDA=on", "nvcc", "NVIDIA's CUDA toolkit"),
    "AMD": ("-DGGML_VULKAN=on", "glslc", "the Vulkan SDK"),
    "Intel": ("-DGGML_VULKAN=on", "glslc", "the Vulkan SDK"),
    "Apple": ("-DGGML_METAL=on", "xcrun", "Xcode's command line tools"),
}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: ``found`` says what it is, ``cost`` what is lost by that.

    ``status``: ok; note, which a sweep can live with; FAIL, with which none can run. ``fix`` are
    commands to paste, in their order.
    """

    name: str
    status: str
    found: str
    cost: str = ""
    fix: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the check as plain JSON values."""
        return {**asdict(self), "fix": list(self.fix)}


def shell_line(words: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """Return a line that runs ``words`` with ``variables`` set, in this system's own shell."""
    given = (variables or {}).items()
    if sys.platform == "win32":
        settings = [f"$env:{name}={_powershell(text)}; " for name, text in given]
        plain = r"[\w./:=,][\w./:=,-]*|-m"
        quoted = [word if re.fullmatch(plain, word) else _powershell(word) for word in words]
        return "".join(settings) + "& " + " ".join(quoted)
    settings = [f"{name}={shlex.quote(text)} " for name, text in given]
    return "".join(settings) + shlex.join(words)


def _powershell(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def python_line(*words: str, variables: Mapping[str, str] | None = None) -> str:
    """Return a line that runs the Python that localkv runs in with ``words``."""
    return shell_line([sys.executable or "python3", *words], variables)


def wanted_engine() -> str:
    """Return the requirement of the engine that this localkv was made for, with its version."""
    try:
        wanted = importlib.metadata.requires("localkv") or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    return next((r for r in wanted if re.match(rf"{PACKAGE}\s*[=<>~!]", r)), PACKAGE)


def reinstall(requirement: str, **variables: str) -> str:
    """Return the line that builds the engine anew, with build settings in the environment."""
    build = ("--force-reinstall", "--no-cache-dir")
    return python_line("-m", "pip", "install", *build, requirement, variables=variables)


def check_python() -> Check:
    """Return which Python this is, and whether it can install anything."""
    found = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    if importlib.util.find_spec("pip") is None:
        return Check(
            "Python",
            NOTE,
            f"{found}, without pip",
            "the built-in models cannot be fetched, and nothing below can be installed",
            (python_line("-m", "ensurepip", "--upgrade"),),
        )
    return Check("Python", OK, found)


def check_packages() -> Check:
    """Return the versions of what a sweep imports besides the engine."""
    versions = {name: package_version(name) for name in PACKAGES if name != PACKAGE}
    missing = [name for name, version in versions.items() if version is None]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if not missing:
        return Check("packages", OK, found)
    return Check(
        "packages",
        NOTE if missing == ["nvidia-ml-py"] else FAIL,
        f"{', '.join(missing)} not installed",
        "video memory is not read"
        if missing == ["nvidia-ml-py"]
        else "a sweep cannot measure, or cannot write its report",
        (python_line("-m", "pip", "install", *missing),),
    )


def check_engine(answer: EngineAnswer) -> Iterator[Check]:
    """Yield what the engine is, or why there is none and which line brings it."""
    version, wanted = engine_version(), wanted_engine()
    if not answer.info:
        yield _no_engine(answer, version, wanted)
        return
    info = answer.info
    built = "with" if info["gpu_offload"] else "without"
    features = ", ".join(cpu_features(info["system_info"])) or "none it repacks for"
    found = (
        f"{PACKAGE} {info['version']}, llama.cpp {info['commit'] or 'of unknown commit'}, back "
        f"ends {', '.join(backends(info))}; CPU features: {features}; built {built} GPU support"
    )
    pinned = wanted.partition("==")[2].strip()
    if pinned and version != pinned:
        yield Check(
            "engine",
            NOTE,
            f"{found}; this localkv was made for {pinned}",
            "a rule may have changed between the two: localkv selftest tells",
            (python_line("-m", "pip", "install", wanted),),
        )
    else:
        yield Check("engine", OK, found)


def _no_engine(answer: EngineAnswer, version: str | None, wanted: str) -> Check:
    compiler = _compiler()
    cost = "nothing can be measured; predict, inspect and capacity work without it"
    if version is None:
        line = python_line("-m", "pip", "install", wanted)
        return Check("engine", FAIL, f"{PACKAGE} is not installed", cost, (*compiler, line))
    pinned = f"{PACKAGE}=={version}"
    if answer.signal == "SIGILL":
        why = f"{PACKAGE} {version} was built for a processor with more features than this one"
        # A wheel built elsewhere is the likeliest cause: build it for this processor.
        line = reinstall(pinned, CMAKE_ARGS="-DGGML_NATIVE=on", PIP_NO_BINARY=PACKAGE)
    else:
        why = f"{PACKAGE} {version} does not load: {answer.why}"
        line = reinstall(pinned)
    return Check("engine", FAIL, why, cost, (*compiler, line))


def _compiler() -> tuple[str, ...]:
    """Return the line that brings a C++ compiler, none where there is one."""
    if any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        return ()
    return next(((line,) for name, line in _COMPILERS.items() if shutil.which(name)), ())


def backends(info: Mapping[str, Any]) -> list[str]:
    """Return the back ends that the engine names: of its CPU features and of its devices."""
    told = re.findall(r"(?:^|\|)\s*(\w+) :", info["system_info"])
    devices = [re.sub(r"\d+$", "", device["name"]) for device in info["devices"]]
    return list(dict.fromkeys((*told, *devices))) or ["unknown"]


def check_gpu(nvml: GpuSummary, answer: EngineAnswer, machine: Sequence[str]) -> Check:
    """Return what NVML and the engine see, and the line that repairs it where they disagree.

    ``machine`` are the makers of the GPUs that the system lists.
    """
    seen = [device.name for device in nvml.devices]
    listed = [d for d in answer.info.get("devices", ()) if d["type"] in ("gpu", "igpu")]
    used = [f"{d['name']} ({d['description']})" for d in listed]
    if not answer.info:
        return Check("GPU", NOTE, f"NVML: {', '.join(seen) or nvml.reason}; no engine to ask")
    if seen and not used:
        return _engine_sees_none(seen, answer)
    if used and not seen:
        return Check(
            "GPU",
            NOTE,
            f"the engine sees {', '.join(used)}, NVML none: {nvml.reason}",
            "a sweep runs on it, and its video memory is not measured",
            (python_line("-m", "pip", "install", "nvidia-ml-py"),)
            if package_version("nvidia-ml-py") is None
            else (),
        )
    if not seen:
        return _none_anywhere(nvml, answer, machine)
    both = f"NVML sees {', '.join(seen)}; the engine {', '.join(used)}"
    if len(seen) != len(used):
        return Check(
            "GPU",
            NOTE,
            f"{both}{_hidden()}",
            "a sweep uses only those that the engine sees",
            _unhide(),
        )
    return Check("GPU", OK, f"{both}; driver {nvml.driver}, CUDA {nvml.cuda}")


def _engine_sees_none(seen: Sequence[str], answer: EngineAnswer) -> Check:
    found = f"NVML sees {', '.join(seen)}, and the engine none"
    cost = "sweeps run on the processor, in RAM alone"
    if answer.info["gpu_offload"]:
        found += f": it is built for GPUs, and finds none that it can use{_hidden()}"
        return Check("GPU", NOTE, found, cost, _unhide() or (_rebuild("NVIDIA"),))
    _, program, kit = _BACKENDS["NVIDIA"]
    found += ": it is built without GPU support"
    if not shutil.which(program):
        found += f"; a build with it needs {kit}, whose {program} is not on PATH"
    return Check("GPU", NOTE, found, cost, (_rebuild("NVIDIA"),))


def _none_anywhere(nvml: GpuSummary, answer: EngineAnswer, machine: Sequence[str]) -> Check:
    apple = sys.platform == "darwin" and platform.machine() == "arm64"
    maker = "Apple" if apple else next((m for m in machine if m in _BACKENDS), None)
    cost = "sweeps run on the processor, in RAM alone"
    if maker is None:
        return Check("GPU", OK, f"none, a sweep runs in RAM: {nvml.reason}")
    why = nvml.reason if not apple else "the machine has a GPU of Apple"
    if answer.info["gpu_offload"]:
        return Check("GPU", NOTE, f"{why}; the engine, built for GPUs, finds none", cost)
    return Check(
        "GPU", NOTE, f"{why}; the engine is built without GPU support", cost, (_rebuild(maker),)
    )


def _rebuild(maker: str) -> str:
    version = engine_version()
    requirement = f"{PACKAGE}=={version}" if version else wanted_engine()
    return reinstall(requirement, CMAKE_ARGS=_BACKENDS[maker][0])


def _hidden() -> str:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"


def _unhide() -> tuple[str, ...]:
    if os.environ.get("CUDA_VISIBLE_DEVICES") is None:
        return ()
    win = sys.platform == "win32"
    return ("Remove-Item Env:CUDA_VISIBLE_DEVICES" if win else "unset CUDA_VISIBLE_DEVICES",)
