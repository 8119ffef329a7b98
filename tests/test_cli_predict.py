"""``localkv predict``: devices, programs, unknown architectures, and the check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import predict_helpers as truth
import pytest
from cli_helpers import told
from conftest import Run

from localkv.engines.dryrun import dry_run
from localkv.engines.llamacpp import cpu_features
from localkv.errors import EngineError, UsageError
from localkv.model import architectures, header
from localkv.predict.config import RunConfig
from localkv.predict.offload import MARGIN
from localkv.predict.predict import predict
from localkv.probes import gpu
from localkv.units import MIB

DATA = Path(__file__).parent / "data"
PLAIN = DATA / "headers" / "qwen2-dense.gguf"
SLIDING = DATA / "headers" / "gemma3-dense.gguf"

# -- devices ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (("-ngl", "2"), {"n_gpu_layers": 2, "n_devices": 1}),
        (("-ngl", "all"), {"n_gpu_layers": -1, "n_devices": 1}),
        (("-ngl", "all", "--devices", "2"), {"n_gpu_layers": -1, "n_devices": 2}),
        (
            ("-ngl", "3", "-ts", "3,1"),
            {"n_gpu_layers": 3, "n_devices": 2, "tensor_split": (3.0, 1.0)},
        ),
        (
            ("-ngl", "all", "-ts", "3/1", "--no-kv-offload"),
            {
                "n_gpu_layers": -1,
                "n_devices": 2,
                "tensor_split": (3.0, 1.0),
                "no_kv_offload": True,
            },
        ),
        (
            ("-ngl", "all", "--devices", "2", "-sm", "none", "-mg", "1"),
            {"n_gpu_layers": -1, "n_devices": 2, "split_mode": "none", "main_gpu": 1},
        ),
        (
            ("-ngl", "all", "--device-free", "1G,3G", "--no-op-offload", "--no-repack"),
            {
                "n_gpu_layers": -1,
                "n_devices": 2,
                "device_free": (1 << 30, 3 << 30),
                "op_offload": False,
                "repack": False,
            },
        ),
    ],
)
def test_options_about_devices_reach_the_prediction(
    run: Run, smollm2_path: Path, options: tuple[str, ...], settings: dict[str, Any]
) -> None:
    answer = told(run, smollm2_path, "-c", 4096, "-np", 2, *options)

    expected = predict(str(smollm2_path), n_ctx=4096, n_seq_max=2, n_outputs_max=2, **settings)
    assert answer["devices"] == expected.to_dict()["devices"]
    assert answer["config"] == expected.to_dict()["config"]
    assert len(answer["devices"]) > 1
    assert sum(device["total"] for device in answer["devices"]) == answer["total_bytes"]


def test_the_text_has_a_line_for_every_device(run: Run, smollm2_path: Path) -> None:
    _, out, _ = run("predict", smollm2_path, "-c", 4096, "-ngl", "20", "--devices", "2")

    table = out[out.index("device") :].splitlines()
    assert [line.split()[0] for line in table[:4]] == ["device", "host", "gpu0", "gpu1"]
    assert "device" not in run("predict", smollm2_path, "-c", 4096)[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-ngl", "some"), "number of layers"),
        (("-ngl", "-5"), "number of layers"),
        (("-ts", "3,x"), "shares"),
        (("-ngl", "1", "--devices", "1", "-ts", "1,2,3"), "3 devices"),
        (("-ngl", "1", "-sm", "none", "-mg", "4"), "main_gpu"),
        (("-ngl", "1", "--device-free", "much"), "size"),
        (("-ngl", "all", "--devices", "2", "--device-free", "8G"), "--device-free"),
        (("-ngl", "auto", "--devices", "2", "--device-free", "8G"), "--device-free"),
    ],
)
def test_a_wrong_value_is_one_line(run: Run, options: tuple[str, ...], said: str) -> None:
    code, out, err = run("predict", PLAIN, *options)

    assert code == 2
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("more", [100, 108, 116, 124, 300])
def test_auto_takes_the_most_layers_that_leave_room(
    run: Run, smollm2_path: Path, more: int
) -> None:
    free = MARGIN + more * MIB
    answer = told(run, smollm2_path, "-c", 8192, "-ngl", "auto", "--device-free", free)

    layers = answer["config"]["n_gpu_layers"]
    on_gpu = [
        predict(
            str(smollm2_path),
            RunConfig(n_ctx=8192, n_seq_max=4, kv_unified=True, n_outputs_max=4),
            n_gpu_layers=n,
        ).devices[1]
        for n in (layers, layers + 1)
    ]
    assert layers > 0
    assert on_gpu[0].total + MARGIN <= free
    assert layers == 31 or on_gpu[1].total + MARGIN > free
    assert any(f"{layers} of 31 layers" in note for note in answer["notes"])


def test_auto_without_a_gpu_stays_on_the_host(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpu_summary", lambda: gpu.GpuSummary(False, "no driver"))

    answer = told(run, PLAIN, "-c", 1024, "-ngl", "auto")

    assert [device["name"] for device in answer["devices"]] == ["host"]
    assert any("no GPU" in note for note in answer["notes"])


# -- whose defaults ---------------------------------------------------------------------------


def test_three_programs_give_three_answers_and_say_why(run: Run, gemma_path: Path) -> None:
    answers = {
        name: told(run, gemma_path, "-c", 4096, "-np", 2, "--defaults", name)
        for name in ("llama-server", "llama-cpp-python", "ollama")
    }

    assert len({answer["kv"]["bytes"] for answer in answers.values()}) == 3
    notes = {name: answer["notes"][0] for name, answer in answers.items()}
    assert "divided among 2 slots" in notes["llama-server"]
    assert "flash attention off" in notes["llama-cpp-python"]
    assert "at full size" in notes["llama-cpp-python"]
    assert "num_ctx 4096 x 2 parallel = 8192" in notes["ollama"]
    contexts = {name: answer["config"]["n_ctx"] for name, answer in answers.items()}
    assert contexts == {"llama-server": 4096, "llama-cpp-python": 4096, "ollama": 8192}
    assert answers["llama-cpp-python"]["config"]["swa_full"] is True
    assert answers["llama-cpp-python"]["config"]["flash_attn"] == "off"


def test_the_note_follows_what_was_asked_for(run: Run, gemma_path: Path) -> None:
    shared = told(run, gemma_path, "-c", 4096)["notes"][0]
    alone = told(run, gemma_path, "-c", 4096, "-np", 1)["notes"][0]
    python = told(run, gemma_path, "--defaults", "llama-cpp-python", "-fa", "on")["notes"][0]

    assert "4 slots share" in shared
    assert "one slot" in alone
    assert "flash attention on" in python


def test_rounding_that_gives_more_is_said_in_words(run: Run, gemma_path: Path) -> None:
    answer = told(run, gemma_path, "-c", 1024, "-np", 3)

    assert answer["config"]["n_ctx"] == 1536
    assert answer["kv"]["bytes"] == 27 * MIB
    assert any("1024 over 3 slots gives 1536" in note for note in answer["notes"])


# -- an architecture without a rule -----------------------------------------------------------


@pytest.fixture
def no_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the rule of the sliding model away."""
    known = {name: rule for name, rule in architectures.RULES.items() if name != "gemma3"}
    monkeypatch.setattr(header, "RULES", known)


@pytest.mark.usefixtures("no_rule")
def test_without_rule_and_engine_the_answer_is_no(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise EngineError("llama-cpp-python is not installed", "install it")

    monkeypatch.setattr("localkv.engines.plan.dry_run_model", missing)

    answer = told(run, SLIDING, "-c", 4096, code=1)
    code, out, err = run("predict", SLIDING, "-c", 4096)

    assert answer["model"]["rule"] == "none"
    assert answer["total_bytes"] is None
    assert answer["kv"]["bytes"] is None
    assert 0 < answer["kv"]["low"] < answer["kv"]["high"]
    assert any("no rule" in note for note in answer["notes"])
    assert code == 1
    assert "unknown" in out
    assert "not installed" in err


@pytest.mark.engine
@pytest.mark.usefixtures("no_rule")
def test_the_engine_answers_for_an_unknown_architecture_within_the_range(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = told(run, SLIDING, "-c", 4096)
    monkeypatch.undo()
    with_rule = predict(str(SLIDING), n_ctx=4096, n_seq_max=4, kv_unified=True)

    assert answer["model"]["rule"] == "none"
    assert {term["source"] for term in answer["terms"] if term["name"] == "kv"} == {"engine"}
    assert answer["kv"]["bytes"] == pytest.approx(with_rule.kv_bytes, abs=0.03 * MIB)


# -- the engine's plan, and formula beside engine ----------------------------------------------


@pytest.mark.engine
def test_the_engine_tells_which_weights_its_cpu_repacks(run: Run, gemma_path: Path) -> None:
    answer = told(run, gemma_path, "-c", 1024, "--engine")
    plain = told(run, gemma_path, "-c", 1024, "--engine", "--no-repack")

    features = cpu_features(dry_run(gemma_path, [RunConfig(n_ctx=512)]).info["system_info"])
    expected = predict(str(gemma_path), n_ctx=1024, cpu_features=features)
    assert answer["config"]["cpu_features"] == list(features)
    assert answer["weights"]["bytes"] == expected.weights_bytes
    assert plain["weights"]["bytes"] == predict(str(gemma_path), n_ctx=1024).weights_bytes
    assert answer["compute"]["source"] == "engine"


@pytest.mark.engine
def test_an_engine_without_the_gpus_says_so(run: Run, smollm2_path: Path) -> None:
    options = ("-c", 1024, "-ngl", "all", "--devices", "9")

    answer = told(run, smollm2_path, *options, "--engine")

    assert answer["compute"]["source"] == "formula"
    assert any("of 9 GPUs asked for" in note for note in answer["notes"])
    checked = told(run, smollm2_path, *options, "--check")["check"]
    assert checked["verdict"] == "equal"
    assert "compute" not in [row["name"] for row in checked["rows"]]


@pytest.mark.engine
@pytest.mark.parametrize("model", ["smollm2_path", "gemma_path"])
def test_formula_and_engine_stand_side_by_side(
    run: Run, model: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)

    code, out, _ = run("predict", path, "-c", 5000, "-np", 3, "--check")
    checked = told(run, path, "-c", 5000, "-np", 3, "--check")

    assert code == 0
    assert "verdict: equal" in out
    rows = {row["name"]: row for row in checked["check"]["rows"]}
    assert {"n_ctx", "KV", "state", "output", "compute", "full cache, K"} <= rows.keys()
    assert rows["KV"]["formula"] == pytest.approx(rows["KV"]["engine"], abs=0.02 * MIB)
    assert rows["compute"]["low"] <= rows["compute"]["engine"] <= rows["compute"]["high"]
    assert checked["engine"]["version"]
    assert checked["engine"]["commit"]


@pytest.mark.engine
def test_a_formula_that_is_off_is_found(
    run: Run, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localkv.predict import predict as module  # type: ignore[attr-defined]

    right = module.output_bytes
    monkeypatch.setattr(module, "output_bytes", lambda *args: right(*args) + 20_000)

    code, out, _ = run("predict", smollm2_path, "-c", 4096, "--check")

    assert code == 1
    assert "verdict: different" in out
    (line,) = [line for line in out.splitlines() if line.endswith(" different")][:1]
    assert line.startswith("output")


@pytest.mark.engine
def test_what_both_refuse_is_a_wrong_request(run: Run, smollm2_path: Path) -> None:
    code, out, err = run("predict", smollm2_path, "-ctv", "q8_0", "-fa", "off", "--check")

    assert code == 2
    assert out == ""
    assert err.count("quantized V cache requires flash_attn") == 2


@pytest.mark.engine
def test_what_only_the_formula_refuses_is_a_difference(
    run: Run, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localkv.predict import predict as module  # type: ignore[attr-defined]

    def refuse(*_: object) -> None:
        raise UsageError("never", "ever")

    monkeypatch.setattr(module, "check", refuse)

    code, out, _ = run("predict", smollm2_path, "-c", 1024, "--check")

    assert code == 1
    assert "the formula refuses: never" in out


# -- the engine's refusals, in its own words ---------------------------------------------------

REFUSED: dict[str, tuple[Path | str, dict[str, Any], str]] = {
    "quantised V": (
        PLAIN,
        {"cache_type_v": "q8_0", "flash_attn": "off"},
        "quantized V cache requires flash_attn",
    ),
    "too many slots": (PLAIN, {"n_seq_max": 300}, "n_seq_max must be <= 256"),
    "K and V of an MLA model": (
        "deepseek4-moe",
        {"cache_type_k": "q8_0"},
        "does not support different K (q8_0) and V (f16)",
    ),
    "a block that does not divide": (
        "odd",
        {"cache_type_k": "q8_0"},
        "with block size 32 does not divide n_embd_head_k=80",
    ),
}


@pytest.mark.engine
@pytest.mark.parametrize("what", REFUSED)
def test_the_engines_error_is_named_and_not_a_warning_beside_it(what: str, tmp_path: Path) -> None:
    source, settings, said = REFUSED[what]
    path = source if isinstance(source, Path) else tmp_path / "model.gguf"
    if source == "odd":
        from sweep_helpers import patched

        patched(SLIDING, tmp_path / "model.gguf", "gemma3.attention.key_length", 80)
    elif isinstance(source, str):
        (tmp_path / "model.gguf").write_bytes(truth.header_bytes(source))

    (plan,) = dry_run(path, [RunConfig(n_ctx=1024, **settings)]).plans
    with pytest.raises(UsageError) as refusal:
        predict(str(path), n_ctx=1024, **settings)

    assert plan.engine is None
    assert said in (plan.refused or "")
    # Where the engine has words of its own, the formula uses them.
    if what != "too many slots":
        assert refusal.value.message in (plan.refused or "")
