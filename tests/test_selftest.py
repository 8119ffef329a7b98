"""``localkv selftest``, and the comparison of formula and engine under it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import predict_zoo
import pytest
from conftest import Run

from localkv.engines import check, selftest
from localkv.engines.check import Comparison, Row, printed_slack
from localkv.engines.dryrun import Plan, dry_run
from localkv.engines.llamacpp import Engine, engine_version
from localkv.engines.log import parse_log
from localkv.errors import UsageError
from localkv.model import architectures, header
from localkv.predict.config import RunConfig
from localkv.predict.predict import predict
from localkv.units import MIB

HEADERS = Path(__file__).parent / "data" / "headers"
PLAIN = HEADERS / "qwen2-dense.gguf"
SMALL = [
    RunConfig(n_ctx=1000),
    RunConfig(n_ctx=5000, n_seq_max=3, swa_full=True),
    RunConfig(n_ctx=1000, flash_attn="off", cache_type_v="q8_0"),
    RunConfig(n_ctx=1000, n_seq_max=3, kv_unified=True, cache_type_k="q8_0"),
]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "grid", lambda: list(SMALL))


def test_the_grid_has_every_kind_of_setting_once_and_some_refusals() -> None:
    configs = selftest.grid()

    assert len(set(configs)) == len(configs) > 100
    for name in ("n_ctx", "n_seq_max", "kv_unified", "swa_full", "flash_attn", "cache_type_k"):
        assert len({getattr(config, name) for config in configs}) >= 2
    refused = 0
    for config in configs:
        try:
            predict(str(PLAIN), config)
        except UsageError:
            refused += 1
    assert 0 < refused < len(configs) / 2


@pytest.mark.engine
def test_formula_and_engine_agree_over_the_whole_grid(smollm2_path: Path) -> None:
    result = selftest.self_test(str(smollm2_path))

    told = result.to_dict()
    assert result.passed, result.differing
    assert told["configurations"] == len(selftest.grid())
    assert told["equal"] + told["refused_by_both"] == told["configurations"]
    assert told["refused_by_both"] > 0
    assert 0 <= told["worst_bytes"] < 0.01 * MIB


@pytest.mark.engine
@pytest.mark.usefixtures("small")
def test_a_row_for_every_model_and_a_file_that_is_none(run: Run, tmp_path: Path) -> None:
    missing = tmp_path / "missing.gguf"

    code, out, _ = run("selftest", PLAIN, missing, HEADERS / "mamba-dense.gguf")

    assert code == 1
    lines = out.splitlines()
    info = dry_run(PLAIN, SMALL[:1]).info
    assert str(engine_version()) in lines[0]
    assert info["commit"] in lines[0]
    rows = {line.split()[0]: line.split() for line in lines[4:7]}
    assert list(rows) == ["qwen2-dense.gguf", "missing.gguf", "mamba-dense.gguf"]
    assert rows["qwen2-dense.gguf"][1:8] == ["qwen2", "exact", "4", "3", "0", "1", "0"]
    assert "not tested" in " ".join(rows["missing.gguf"])


def test_without_a_model_to_load_nothing_stands_for_the_engine(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("selftest", tmp_path / "missing.gguf")

    assert code == 1
    assert out.splitlines()[1] == ""
    assert out.splitlines()[2].startswith("model ")


@pytest.mark.engine
@pytest.mark.usefixtures("small")
def test_all_equal_exits_with_0(run: Run) -> None:
    code, out, _ = run("selftest", PLAIN, "--json")

    told = json.loads(out)
    (model,) = told["models"]
    assert code == 0
    assert told["equal"] is True
    assert told["engine"]["commit"]
    assert (model["equal"], model["different"], model["refused_by_both"]) == (3, 0, 1)


@pytest.mark.engine
@pytest.mark.usefixtures("small")
def test_what_differs_is_shown_with_its_configuration(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = check.estimate

    def off(shape: Any, config: RunConfig) -> Any:
        found = right(shape, config)
        if config.n_seq_max == 1:
            return found
        return found._replace(output_bytes=found.output_bytes + MIB)

    monkeypatch.setattr(check, "estimate", off)

    code, out, _ = run("selftest", PLAIN)
    (model,) = json.loads(run("selftest", PLAIN, "--json")[1])["models"]

    assert code == 1
    assert "qwen2-dense.gguf: -c 5000 -np 3 --no-kv-unified --swa-full" in out
    assert (model["equal"], model["different"]) == (1, 2)
    assert abs(model["worst_bytes"] - MIB) < 0.01 * MIB
    assert [entry["config"]["n_ctx"] for entry in model["differing"]] == [5000, 1000]


@pytest.mark.engine
@pytest.mark.usefixtures("small")
def test_a_model_without_a_rule_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: rule for name, rule in architectures.RULES.items() if name != "qwen2"}
    monkeypatch.setattr(header, "RULES", known)

    told = selftest.self_test(str(PLAIN))

    assert told.rule == "none"
    assert not told.passed
    assert told.count(check.NO_RULE) == 3


@pytest.mark.engine
@pytest.mark.usefixtures("small")
def test_a_model_that_the_engine_will_not_load_is_a_row(tmp_path: Path) -> None:
    keys = predict_zoo.metadata("qwen2", seed=1, n_layer=4)
    del keys["qwen2.attention.layer_norm_rms_epsilon"]
    path = predict_zoo.write_header(tmp_path / "model.gguf", keys)

    told = selftest.self_test(str(path))

    assert not told.passed
    assert "layer_norm_rms_epsilon" in (told.error or "")


@pytest.mark.engine
def test_children_that_share_a_grid_answer_in_order() -> None:
    configs = [RunConfig(n_ctx=256 * size, n_seq_max=1 + size % 2) for size in range(1, 8)]

    alone = dry_run(PLAIN, configs)
    shared = dry_run(PLAIN, configs, jobs=3)

    assert shared == alone
    assert [plan.engine["n_ctx"] for plan in shared.plans if plan.engine] == [
        predict(str(PLAIN), config).config["n_ctx"] for config in configs
    ]


# -- the verdicts themselves ------------------------------------------------------------------


def test_sizes_are_equal_within_what_the_engine_prints() -> None:
    size = 22_500 * 1024
    printed = parse_log([f"x:        CPU  output buffer size = {size / MIB:8.2f} MiB"])

    assert Row("output", size, printed.sum("output")).verdict == "equal"
    assert Row("output", size + MIB // 50, printed.sum("output")).verdict == "different"
    assert Row("cells", 256, 257, "cells").verdict == "different"
    assert Row("cache", None, 5).verdict == "different"
    assert printed_slack(size) < printed_slack(size, lines=5) < printed_slack(1 << 40, lines=5)


@pytest.mark.parametrize(
    ("engine", "verdict"), [(90, "within the band"), (2 * MIB, "outside the band")]
)
def test_an_estimate_is_held_against_its_band(engine: int, verdict: str) -> None:
    row = Row("compute", 100, engine, low=80, high=120)
    comparison = Comparison(RunConfig(), (Row("KV", 1, 1), row))

    assert row.verdict == verdict
    assert comparison.verdict == "equal"
    assert comparison.agrees is (verdict == "within the band")


@pytest.mark.parametrize(
    ("formula", "plan", "verdict"),
    [
        (None, Plan(None, "no"), "different"),
        ("no", Plan(None, "no"), "refused by both"),
        (None, Plan(None, "SIGABRT", died=True), "the engine died"),
    ],
)
def test_refusals_and_deaths_are_told_apart(formula: str | None, plan: Plan, verdict: str) -> None:
    comparison = Comparison(
        RunConfig(), formula_refused=formula, engine_refused=plan.refused, died=plan.died
    )

    assert comparison.verdict == verdict
    assert not comparison.agrees


@pytest.mark.engine
def test_an_error_explains_a_failure_better_than_a_later_warning() -> None:
    engine = Engine()
    error, warning, info, debug = 4, 3, 2, 1
    for level, text in (
        (error, b"llama_init: model does not support this\n"),
        (warning, b"llama_init: enabling flash_attn since it is required\n"),
        (info, b"llama_init: goodbye\n"),
        (debug, b"graph: a thousand nodes\n"),
    ):
        engine.log._receive(level, text, None)

    assert engine.failure("failed", "context").message == "model does not support this"
    assert not any("thousand" in line for line in engine.log.lines)
    engine.log.clear()
    assert engine.failure("failed", "context").message == "failed"
    engine.log._receive(warning, b"llama_init: only a warning\n", None)
    assert engine.failure("failed", "context").message == "only a warning"
