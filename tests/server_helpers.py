"""The real servers, started for a test and gone after it: llama-server, Ollama, vLLM, Prometheus.

All run on 127.0.0.1, on ports that the kernel picks, with folders of their own for what they keep.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from servers import binary, vllm_python

from localkv.engines.serving import Serving, serving
from localkv.http import Client, ServerError

#: Seconds for a server to be ready on a busy machine; vLLM compiles on its first start.
READY = 60.0
READY_VLLM = 300.0


class Server:
    """A running server: its URL, process id and log, and one-line HTTP."""

    def __init__(self, running: Serving, folder: Path) -> None:
        self.url = running.url
        self.pid = running.pid
        self.log = running.log
        self.folder = folder
        self._running = running

    def lines(self) -> list[str]:
        """Return the log so far."""
        return self._running.lines()

    def get(self, path: str) -> Any:
        """Return the JSON at ``path``."""
        with Client(self.url) as client:
            return client.get_json(path, timeout=60)

    def text(self, path: str) -> str:
        """Return the text at ``path``."""
        with Client(self.url) as client:
            return client.get_text(path, timeout=60)

    def post(self, path: str, body: Mapping[str, Any], *, timeout: float = 120) -> Any:
        """Send ``body`` to ``path`` and return the JSON that comes back."""
        with Client(self.url) as client:
            return client.post_json(path, body, timeout=timeout)


def answers(path: str) -> Any:
    """Return a test of readiness: does ``path`` answer with success?"""

    def ask(url: str) -> bool:
        with Client(url, timeout=2) as client:
            try:
                client.request("GET", path)
            except ServerError:
                return False
        return True

    return ask


@contextmanager
def _running(folder: Path, command: list[Any], *, path: str, **how: Any) -> Iterator[Server]:
    folder.mkdir(parents=True, exist_ok=True)
    name = Path(how.pop("name", command[0])).name
    log = folder / f"{name}.log"
    family: list[psutil.Process] = []
    with serving(command, name=name, log=log, ready=answers(path), **how) as running:
        try:
            yield Server(running, folder)
        finally:
            family = family_of(running.pid)
    assert [p for p in family if alive(p)] == [], f"{name} left something running"


def family_of(pid: int) -> list[psutil.Process]:
    """Return the process ``pid`` and its descendants; none when it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def alive(process: psutil.Process) -> bool:
    """Return whether ``process`` still runs; one that waits to be reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def running_llama_server(
    folder: Path, model: Path, *flags: object, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start llama-server on ``model`` with ``flags``, its log at the level that tells of memory."""
    command = [binary("llama-server"), "-m", model, "--host", "127.0.0.1", "--port", "0"]
    command += ["-lv", "4", "--offline", *map(str, flags)]
    listening = re.compile(r"listening on http://127\.0\.0\.1:(\d+)")
    with _running(
        folder, command, path="/health", listening=listening, env=env, timeout=READY
    ) as server:
        yield server


@contextmanager
def running_ollama(folder: Path, *, old: bool = False, **env: str) -> Iterator[Server]:
    """Start ``ollama serve`` with a store and a home of its own; ``env`` are its settings."""
    settings = {
        "HOME": str(folder / "home"),
        "OLLAMA_HOST": "127.0.0.1:0",
        "OLLAMA_MODELS": str(folder / "models"),
        "OLLAMA_NO_CLOUD": "1",
        **env,
    }
    (folder / "home").mkdir(parents=True, exist_ok=True)
    command = [binary("ollama-old" if old else "ollama"), "serve"]
    listening = re.compile(r"Listening on 127\.0\.0\.1:(\d+)")
    with _running(
        folder, command, path="/api/version", listening=listening, env=settings, timeout=READY
    ) as server:
        yield server


def ollama_create(server: Server, name: str, gguf: Path, *, old: bool = False) -> None:
    """Make the model ``name`` of ``gguf`` as a person does: with a Modelfile and the command."""
    modelfile = server.folder / f"{name.replace(':', '_')}.modelfile"
    modelfile.write_text(f"FROM {gguf}\n", encoding="utf-8")
    program = binary("ollama-old" if old else "ollama")
    done = subprocess.run(
        [program, "create", name, "-f", modelfile],
        env={"HOME": str(server.folder / "home"), "OLLAMA_HOST": server.url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


#: A tiny llama of random weights: 4 layers of 2 KV heads, 64 wide; bfloat16: 4 KiB per token.
VLLM_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


@contextmanager
def running_vllm(
    folder: Path,
    *flags: object,
    blocks: int = 20,
    block_size: int = 32,
    max_model_len: int = 512,
    model: Mapping[str, Any] = VLLM_MODEL,
) -> Iterator[Server]:
    """Start vLLM's OpenAI server on a tiny model of random weights; prompts are token ids."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(model), encoding="utf-8")
    command = [vllm_python(), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", folder / "model", "--served-model-name", "tiny"]
    command += ["--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16"]
    command += ["--host", "127.0.0.1", "--port", str(_free_port()), "--enforce-eager"]
    command += ["--max-model-len", str(max_model_len), "--max-num-seqs", "16"]
    command += ["--block-size", str(block_size), "--num-gpu-blocks-override", str(blocks)]
    env = {
        "HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "2",
    }
    listening = re.compile(r"Starting vLLM server on http://127\.0\.0\.1:(\d+)")
    with _running(
        folder,
        [*command, *map(str, flags)],
        name="vllm",
        path="/health",
        listening=listening,
        env=env,
        timeout=READY_VLLM,
    ) as server:
        yield server


@contextmanager
def running_prometheus(
    folder: Path, targets: list[str], *, rules: Path | None = None, interval: str = "1s"
) -> Iterator[Server]:
    """Start Prometheus scraping ``targets`` (HOST:PORT), with the alert rules in ``rules``."""
    folder.mkdir(parents=True, exist_ok=True)
    configuration = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(rules)] if rules else [],
        "scrape_configs": [{"job_name": "localkv", "static_configs": [{"targets": targets}]}],
    }
    # JSON is YAML.
    (folder / "prometheus.yml").write_text(json.dumps(configuration), encoding="utf-8")
    command = [
        binary("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    listening = re.compile(r'"Listening on" address=127\.0\.0\.1:(\d+)')
    with _running(folder, command, path="/-/ready", listening=listening, timeout=READY) as server:
        yield server


def _free_port() -> int:
    """Return a port that was free a moment ago, for a program that tells no port of its own."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
