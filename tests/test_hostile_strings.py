"""Every command that prints a model, given models whose strings attack the page they appear on.

A model file is a stranger's: its name, its architecture, its tensors, its tokens and the name of
the file itself may hold anything. What comes out must be lines of visible characters, valid JSON,
valid SVG, tame Markdown, and file names that any system takes.
"""

from __future__ import annotations

import json
import re
import unicodedata
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from analysis_helpers import grid, record, run_info
from conftest import Run
from gguf_helpers import STR, U32, Builder
from markdown_it import MarkdownIt

from localkv.cli.app import COMMANDS
from localkv.report.escape import safe_filename
from localkv.sweep.store import RunStore

MANY = 1_000_000
#: Kind of attack -> the string, or its bytes where it is no valid UTF-8.
HOSTILE: dict[str, str | bytes] = {
    "ansi": "\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b[2J\x08\x08\x7f",
    "c1": "\x9b31m\x85next\x90\x9d0;title\x9c",
    "nul": "a\0b\0",
    "bidi": "\u202egnp.exe\u202c \u2066x\u2069 \u200f\u200e\u061c",
    "invisible": "a\u200b\u200c\u200d\ufeff\u00ad\u2060\u3164\u115f\u2800\U000e0041\ufe0f\u034fb",
    "lines": "one\r\ntwo\x0bthree\x0cfour\u2028five\u2029six\x85seven",
    "markdown": "# [x](javascript:alert(1)) ![y](http://evil.example/z.png) **b** `c` ~~d~~ $e$",
    "html": "<script>alert(1)</script><img src=x onerror=alert(1)>&lt;b&gt; ]]> <!-- -->",
    "pipes": "a|b\\|c||d\n|---|---|",
    "accents": "Z" + "\u0301\u0489" * 5000 + "\u0301",
    "unassigned": "\ue000\U000f0000\ufffe\uffff\U0010ffff\u0378",
    "surrogates": b"\xed\xa0\x80 \xed\xbf\xbf \xff\xfe \xc0\xaf",
    "wide": "漢字" * 3000,
    "right to left": "דגם נהדר 7B نموذج",
    "path": "../../../etc/passwd",
    "reserved": "CON",
    "hidden": ".-rf *",
    "percent": "%s%n{0}{name}$(reboot)`reboot`;reboot",
    "long": "x" * MANY,
    "long line": "x \x1b[31m" * (MANY // 7),
    "nothing": "",
}
KINDS = tuple(HOSTILE)

#: Command -> the arguments of each run; MODEL, FOLDER (of models) and RUN (of a sweep) are put in.
#: Runs hold every kind at once, since drawing their pictures takes long.
PRINTS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect MODEL", "inspect MODEL --json", "inspect MODEL --diagram"),
    "predict": ("predict MODEL", "predict MODEL --json", "predict MODEL --memory 8G"),
    "capacity": (
        "capacity MODEL --memory 8G --ctx-per-slot 4096",
        "capacity MODEL --memory 8G --ctx-per-slot 4096 --json",
    ),
    "models": ("models FOLDER", "models FOLDER --json"),
    "compare": ("compare RUN RUN", "compare RUN RUN --json"),
    "report": (),  # below, with what it writes
}
#: These say nothing of a model file, or no more than its report does.
SILENT = {"doctor", "selftest", "observe", "export", "completion", "sweep"}
#: Exit codes of an answer: done, and no.
ANSWERED = (0, 1)
_LONGEST = 1200
HALF_PAIR = re.compile(r"\\ud[89ab]..(?!\\ud[c-f])|(?<!\\ud[89ab]..)\\ud[c-f]")


def text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("utf-8", "surrogateescape")


@cache
def hostile_gguf(kind: str, *, architecture: bool = False) -> bytes:
    """Return a small llama whose strings are those of ``kind``; its architecture too, if asked."""
    b, bad = Builder(), HOSTILE[kind]
    raw = bad if isinstance(bad, bytes) else bad.encode()
    arch = raw if architecture else b"llama"
    numbers = {
        "block_count": 2, "context_length": 8192, "embedding_length": 256,
        "attention.head_count": 4, "attention.head_count_kv": 2, "feed_forward_length": 512,
    }  # fmt: skip
    prefix = "llama" if architecture else arch.decode()
    keys = [b.key("general.architecture", STR, arch), b.key("general.name", STR, raw)]
    keys += [b.key(f"{prefix}.{name}", U32, value) for name, value in numbers.items()]
    keys += [b.key(f"general.{name}", STR, raw) for name in ("description", "license", "url")]
    keys.append(b.array("tokenizer.ggml.tokens", STR, [raw, b"</s>", raw[:50]]))
    keys.append(b.key("tokenizer.chat_template", STR, raw))
    tensors = [b.tensor("token_embd.weight", (256, 3))]
    # Names of tensors end at 63 bytes, and no two are the same.
    tensors.append(b.tensor(b"blk.0." + raw[:40] + b".weight", (256, 4), offset=3072))
    head = b.header(keys, tensors)
    return head + bytes(-len(head) % 32) + bytes(3072 + 4096)


def file_name(kind: str) -> str:
    """Return the string of ``kind`` as the name of a file, as far as the system takes it."""
    name = text(HOSTILE[kind]).replace("/", "\u2215").replace("\0", "")[:60]
    while len(name.encode("utf-8", "surrogateescape")) > 200:
        name = name[:-1]
    return f"{name}.gguf"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a model for each kind, in a folder of hostile models."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for number, kind in enumerate(KINDS):
        found[kind] = folder / f"{number} {file_name(kind)}"
        found[kind].write_bytes(hostile_gguf(kind))
    (folder / "odd.gguf").write_bytes(hostile_gguf("ansi", architecture=True))
    return found


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of a sweep in which a stranger wrote whatever can be written."""
    bad = {kind: text(value)[:20_000] for kind, value in HOSTILE.items()}
    # Of each kind so much that all of them are in what is shown of a name.
    name = " ".join(value[:9] for value in bad.values())
    info = run_info(
        9,
        model={"name": name, "architecture": bad["ansi"], "notes": list(bad.values()),
               "path": f"/models/{name}.gguf"},
        environment={"host": {"cpu_model": bad["bidi"]},
                     "engine": {"version": bad["html"], "commit": bad["surrogates"]}},
    )  # fmt: skip
    records = [
        *grid(contexts=(1024, 2048, 4096), slots=(1, 2)),
        *(
            record(8192 + 256 * at, outcome="failed", reason=value, stage=value)
            for at, value in enumerate(bad.values())
        ),
    ]
    records[1] = replace(records[1], engine={**records[1].engine, "notes": [name], name: name})
    directory = tmp_path_factory.mktemp("run")
    store = RunStore(directory)
    store.create(replace(info, argv=("localkv", "sweep", "-m", name)))
    for one in records:
        store.append(one)
    return directory


def assert_harmless(shown: str, longest: int = _LONGEST) -> None:
    """Fail unless ``shown`` is lines of bounded length that hold visible characters alone."""
    for line in shown.split("\n"):
        assert len(line) <= longest, f"a line of {len(line)} characters: {line[:80]!r}"
        acting = {c for c in line if c != " " and unicodedata.category(c)[0] in "CZ"}
        assert not acting, f"{[f'U+{ord(c):04X}' for c in acting]} in {line!r}"
        marks = re.search(r"[\u0300-\u036f\u0489]{4}", line)
        assert marks is None, f"a tower of accents in {line[:80]!r}"


def wanted() -> list[str]:
    return [line for name, lines in PRINTS.items() if name in COMMANDS for line in lines]


def filled(line: str, model: Path, directory: Path) -> list[str]:
    known = {"MODEL": model, "FOLDER": model.parent, "RUN": directory}
    return [str(known.get(word, word)) for word in line.split()]


@pytest.mark.parametrize("line", wanted())
def test_what_a_command_prints_is_harmless(
    run: Run,
    models: dict[str, Path],
    hostile_run: Path,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "--diagram" in line and "--diagram" not in run("inspect", "--help")[1]:
        pytest.skip("there is no diagram yet")
    monkeypatch.setenv("COLUMNS", "80")
    for kind in KINDS if "MODEL" in line else KINDS[:1]:
        code, out, err = run(*filled(line, models[kind], hostile_run))

        assert code in ANSWERED, f"{kind}: {err}"
        assert "unexpected error" not in err
        if line.endswith("--json"):
            json.loads(out).items()
            assert out.isascii(), kind
            assert "\x7f" not in out
            assert HALF_PAIR.search(out) is None, kind
        else:
            # A command to paste names the file as it is, accents and all.
            assert_harmless(out.replace(models[kind].name, "NAME"))
        assert_harmless(err, 5000)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if HOSTILE[kind]])
def test_an_architecture_that_attacks_is_an_unknown_one(
    run: Run, tmp_path: Path, kind: str
) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(hostile_gguf(kind, architecture=True))

    code, out, err = run("inspect", model)

    assert code == 1, err
    assert "unknown" in out
    assert_harmless(out)
    assert_harmless(err)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_no_model_is_named_harmlessly(run: Run, tmp_path: Path, kind: str) -> None:
    path = tmp_path / file_name(kind)
    path.write_bytes(b"GGUF" + bytes(3))

    code, out, err = run("inspect", path)

    assert (code, out) == (3, "")
    assert err.count("\n") == 1
    assert_harmless(err)


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_json_is_no_safer(run: Run, tmp_path: Path, kind: str) -> None:
    bad = text(HOSTILE[kind])
    folder = tmp_path / f"m{file_name(kind)}"
    folder.mkdir()
    config = {
        "model_type": "llama", "_name_or_path": bad, "num_hidden_layers": 2, "hidden_size": 256,
        "num_attention_heads": 4, "vocab_size": 10, "torch_dtype": bad, "rope_scaling": {bad: bad},
        "max_position_embeddings": 4096, "architectures": [bad],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    for arguments in (("inspect",), ("predict", "--config"), ("inspect", "--json")):
        code, out, err = run(*arguments, *[folder][: len(arguments)])
        assert code in ANSWERED, err
        assert_harmless(out, MANY)

    (folder / "config.json").write_text(json.dumps({**config, "model_type": bad}))
    code, out, err = run("inspect", folder)

    assert code == (1 if bad else 3), err
    assert_harmless(out)
    assert_harmless(err)


def test_the_report_and_its_pictures_are_harmless(run: Run, hostile_run: Path) -> None:
    code, out, err = run("report", hostile_run)
    assert code == 0, err
    assert_harmless(out)
    assert_harmless(err)

    page = (hostile_run / "report.md").read_text(encoding="utf-8")
    assert_harmless(page.replace("\t", " "), 4000)
    html = MarkdownIt("commonmark").enable("table").render(page)
    assert not re.search(r"<(script|img[^>]*onerror|a [^>]*(evil|javascript))", html)
    pictures = sorted(hostile_run.glob("*.svg"))
    assert pictures
    for picture in pictures:
        drawn = picture.read_text(encoding="utf-8")
        assert_harmless(drawn, 1 << 20)
        names = {element.tag.rpartition("}")[2] for element in ET.fromstring(drawn).iter()}
        assert not names & {"script", "foreignObject", "img", "image"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_becomes_a_tame_file_name(kind: str) -> None:
    name = safe_filename(text(HOSTILE[kind]))

    assert 0 < len(name.encode()) <= 100
    assert name.isascii()
    assert name.isprintable()
    assert not set(name) & set('/\\:*?"<>|%$`;\0 ')
    assert name[0] not in ".-"
    assert name[-1] != "."
    assert not re.fullmatch(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?", name)


def test_no_command_is_forgotten() -> None:
    assert set(COMMANDS) <= {*PRINTS, *SILENT}
