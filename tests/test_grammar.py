"""One of a thing is called by its singular, wherever a person reads a count."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Run

HEADERS = Path(__file__).parent / "data" / "headers"
CONFIG = Path(__file__).resolve().parents[1] / "docs" / "models" / "llama-8b"
#: "1 slots", "1 more slots", but neither "1,401 slots" nor "0.1 tokens".
ONE_OF_MANY = re.compile(
    r"(?<![\d.,])1 (?:[A-Za-z]+ )?(?:\w*(?:slot|token|request|layer|stream|run|point|block|GPU|head"
    r"|file|line|look|checkpoint|conversation|expert|model|size|CPU)s|entries)\b"
)


def _one_each(text: str) -> None:
    found = ONE_OF_MANY.search(text)
    assert not found, text[max(found.start() - 60, 0) : found.end() + 30]


@pytest.mark.parametrize(
    "arguments",
    [
        ("predict", HEADERS / "gemma3-dense.gguf", "-c", 1024, "-np", 2, "--kv-unified"),
        ("predict", HEADERS / "mamba-dense.gguf", "-c", 256, "-np", 1, "--server"),
        ("predict", HEADERS / "gemma3-dense.gguf", "-c", 256, "--defaults", "ollama"),
        ("predict", "--config", CONFIG, "--max-model-len", 1, "--block-size", 16, "--memory", "4M"),
        ("inspect", HEADERS / "qwen2-dense.gguf", "--ctx-per-slot", 1, "-np", 1),
        ("inspect", HEADERS / "qwen2-dense.gguf", "--diagram", "--requests", 1),
        ("models", HEADERS / "qwen2-dense.gguf"),
        ("predict", HEADERS / "qwen2-dense.gguf", "--devices", 1, "--device-free", "1G,1G"),
        ("sweep", "-m", HEADERS / "qwen2-dense.gguf", "-c", 512, "-np", 1, "--dry-run"),
    ],
)
def test_a_page_calls_one_by_its_singular(run: Run, arguments: tuple[object, ...]) -> None:
    _, out, err = run(*arguments)

    assert "1" in out + err
    _one_each(out + err)
