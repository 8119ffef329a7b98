"""docs/cookbook.md: every command as it is written, its figures from first principles."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import cookbook_helpers as models
import pytest
from conftest import Run

from localkv import predict, read_model
from localkv.units import GIB, KIB, MIB, format_bytes, format_count

COOKBOOK = models.ROOT / "docs" / "cookbook.md"
#: Bytes of K and V in 16 bits.
TWO_SIDES, TWO_BYTES = 2, 2
#: What vLLM takes of a GPU, and what localkv sets aside there.
SHARE, ALLOWANCE, BLOCK = 0.9, 2 * GIB, 16
RESERVE = 512 * MIB


class Recipe(NamedTuple):
    """A fenced command with the text above it."""

    command: str
    text: str

    @property
    def bold(self) -> list[str]:
        return re.findall(r"\*\*(.+?)\*\*", self.text)

    @property
    def code(self) -> int:
        return int("exit code 1" in self.text)


@cache
def recipes() -> dict[str, Recipe]:
    """Return the recipes by command; the text reaches back to the one before it."""
    _, *parts = re.split(r"```sh\n", "```sh\n\n```\n" + COOKBOOK.read_text(encoding="utf-8"))
    found = {}
    for before, part in pairwise(parts):
        text = before.split("```\n", 1)[1]
        command = part.split("\n```", 1)[0]
        # The introduction explains the bold figures and has none of its own.
        found[command] = Recipe(command, text.split("\n## ")[-1])
    return found


def token(name: str, element_bytes: float = TWO_BYTES) -> int:
    """Return the bytes of one token: 2 x layers x KV heads x head_dim x bytes per element."""
    layers, _, _, kv_heads, _, _ = models.CONFIGS[name]
    return round(TWO_SIDES * layers * kv_heads * models.HEAD_DIM * element_bytes)


def weights(name: str) -> int:
    return models.CONFIGS[name][-1]


def served(name: str, gpus: int, size: int, ctx: int, element_bytes: float = TWO_BYTES) -> int:
    """Return the requests that vLLM holds: whole blocks of what is left, one of them set aside."""
    left = gpus * (int(size * SHARE) - ALLOWANCE) - weights(name)
    blocks = left // (token(name, element_bytes) * BLOCK)
    return max(0, (blocks - 1) // (ctx // BLOCK))


def requests(count: int) -> str:
    return f"{format_count(count)} request" + "s" * (count != 1)


def one_token_and_eight_conversations(out: str) -> None:
    assert token("llama-8b") == 128 * KIB
    assert token("llama-8b") * 8192 * 8 == 8 * GIB
    assert "128.00 KiB" in out
    assert "8.00 GiB" in out


def without_gqa(out: str) -> None:
    assert token("mha-8b") * 4096 * 10 == 20 * GIB
    assert format_bytes(token("mha-8b")) in out
    assert "20.00 GiB" in out
    assert weights("mha-8b") == 16 * 10**9
    assert format_bytes(weights("mha-8b")) in out


def larger_than_the_weights(out: str) -> None:
    even = weights("llama-70b") / token("llama-70b")
    assert int(even) == 427_246
    assert format_count(int(even)) in COOKBOOK.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^ *([\d,]+)  +(.*\d%.*)$", out, re.MULTILINE))
    assert len(rows) >= 6
    for context, row in rows.items():
        tokens = int(context.replace(",", ""))
        cells = re.findall(r"[\d.]+ [KMG]iB +<?\d+%\*?", row)
        assert len(cells) == 4
        for slots, cell in zip((1, 2, 4, 8), cells, strict=True):
            assert cell.startswith(format_bytes(token("llama-70b") * tokens * slots))
            assert cell.endswith("*") == (tokens * slots > even)


def fifty_people(out: str) -> None:
    _of_8b(out, "f16", 24 * GIB, 18)
    assert "does not fit" in out
    assert re.search(r"q4_0: saves [\d.]+ GiB, then\s+67 requests", out)


def fifty_people_in_q4_0(out: str) -> None:
    _of_8b(out, "q4_0", 24 * GIB, 67)
    assert "fits" in out
    assert "llama-server -m docs/models/llama-8b-q4.gguf" in out


def _of_8b(out: str, kind: str, memory: int, most: int) -> None:
    """Check a GPU that holds all layers: weights but the embeddings, KV, and some buffers."""
    element = {"f16": 2, "q4_0": 18 / 32}[kind]
    kv = token("llama-8b", element) * 8192
    held = sum(models.size(s, k) for name, s, k in models.tensors() if "token_embd" not in name)
    assert most == (memory - RESERVE - held) // kv
    assert requests(most) + " at once" in out
    found = re.search(r"fits?, ([\d.]+) GiB\s+needed", out)
    assert found
    # The rest are compute buffers, which grow with the context.
    assert 0 < float(found[1]) * GIB - (held + 50 * kv + RESERVE) < 0.25 * GIB


def two_gpus(out: str) -> None:
    kv = token("llama-8b") * 8192
    assert "fits" in out
    most = int(re.search(r"^(\d+) requests at once", out, re.MULTILINE)[1])  # type: ignore[index]
    # Two thirds of 33 layers lie on the larger one, the output on the other: whole layers.
    assert 50 <= most <= (48 * GIB - RESERVE) // (kv * 22 / 32)
    assert "gpu0" in out
    assert "gpu1" in out


def by_vllm(out: str) -> None:
    count = served("llama-8b", 1, 48 * GIB, 8192)
    assert count == 26
    assert f"{requests(count)} at once" in out
    assert "50 requests do not fit" in out


def by_vllm_in_fp8(out: str) -> None:
    count = served("llama-8b", 1, 48 * GIB, 8192, 1)
    assert count == 52
    assert f"{requests(count)} at once" in out
    assert "--kv-cache-dtype fp8" in out


def seventy_on_one(out: str) -> None:
    assert served("llama-70b", 1, 80 * GIB, 32768) == 0
    assert "Not even one request fits" in out


def seventy_on_four(out: str) -> None:
    count = served("llama-70b", 4, 80 * GIB, 32768)
    assert count == 14
    assert f"{requests(count)} at once" in out


def twenty_people(out: str) -> None:
    need = predict("demo", n_ctx=20 * 8192, n_seq_max=20, n_outputs_max=20).total_bytes + RESERVE
    assert f"20 requests of 8,192 tokens: does not fit, {format_bytes(need)} needed" in out


def this_machine(out: str) -> None:
    assert re.search(r"NVML|RAM", out)
    assert "2,048 tokens per request" in out


def in_a_script(out: str) -> None:
    told = json.loads(out)
    shape = read_model("demo")
    each = shape.kv_bytes_per_token() * 8192
    assert told["memory_bytes"] == 8 * GIB
    # Each slot is its cache and its row of logits, in what the weights leave; buffers take a bit.
    each += shape.n_vocab * 4
    rest = told["memory_bytes"] - told["reserved_bytes"] - shape.weights_bytes
    assert told["max_slots"] == (rest - told["parts"]["compute"]) // each
    assert set(told["commands"]) == {"llama-server", "llama-cpp-python", "ollama"}


CHECKS: dict[str, Callable[[str], None]] = dict(
    zip(
        recipes(),
        (
            one_token_and_eight_conversations,
            without_gqa,
            larger_than_the_weights,
            fifty_people,
            fifty_people_in_q4_0,
            two_gpus,
            by_vllm,
            by_vllm_in_fp8,
            seventy_on_one,
            seventy_on_four,
            twenty_people,
            this_machine,
            in_a_script,
        ),
        strict=True,
    )
)


@pytest.mark.parametrize("command", recipes())
def test_a_recipe_gives_what_it_says(
    run: Run, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(models.ROOT)
    monkeypatch.setenv("COLUMNS", "100")
    recipe = recipes()[command]
    program, *arguments = shlex.split(command)
    assert program == "localkv"

    code, out, err = run(*arguments)

    assert code == recipe.code, err
    assert [figure for figure in recipe.bold if figure not in " ".join(out.split())] == []
    CHECKS[command](out)


def test_bold_figures_are_found() -> None:
    assert sum(len(recipe.bold) for recipe in recipes().values()) >= 12
    assert sum(recipe.code for recipe in recipes().values()) >= 4


def test_the_models_are_those_that_the_text_describes() -> None:
    for path, content in models.files().items():
        assert path.read_bytes() == content, "run: python tests/cookbook_helpers.py"
    kept = {path for path in models.MODELS.rglob("*") if path.is_file()}
    assert kept == set(models.files())
