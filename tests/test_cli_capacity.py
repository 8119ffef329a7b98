"""``localkv capacity``: the page, the JSON, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cookbook_helpers as models
import pytest
from conftest import Run

from localkv import paged_plan, read_model
from localkv.cli import capacity_pages, memory
from localkv.predict.capacity import kv_capacity
from localkv.predict.compute import estimate_compute
from localkv.predict.predict import predict
from localkv.predict.server_memory import server_memory
from localkv.probes import gpu
from localkv.probes import memory as ram
from localkv.probes.nvidia import NvidiaDevice
from localkv.records import Reading
from localkv.units import GIB, MIB

DATA = Path(__file__).parent / "data"
PLAIN = DATA / "headers" / "qwen2-dense.gguf"
SLIDING = DATA / "headers" / "gemma3-dense.gguf"
FOLDER = models.MODELS / "llama-8b"
NONE = "0"


def told(run: Run, *args: object, code: int = 0) -> Any:
    ended, out, err = run("capacity", *args, "--json")
    assert ended == code, err
    return json.loads(out)


# -- the JSON ----------------------------------------------------------------------------------


def test_one_answer_computes_no_configuration_twice(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = []

    def counted(shape: Any, config: Any, *others: Any) -> Any:
        computed.append(config)
        return estimate_compute(shape, config, *others)

    monkeypatch.setattr("localkv.predict.predict.estimate_compute", counted)
    answer = told(run, PLAIN, "--memory", "64M", "--reserve", "1M", "--ctx-per-slot", 2048)

    assert answer["levers"]
    assert len(computed) == len(set(computed))


def test_the_json_is_the_library_s_answer(run: Run) -> None:
    answer = told(run, PLAIN, "--memory", "64M", "--reserve", "1M", "--ctx-per-slot", 2048)
    found = kv_capacity(str(PLAIN), "64M", 2048, reserve=MIB)

    assert {key: answer[key] for key in found.to_dict()} == json.loads(json.dumps(found.to_dict()))
    stable = {"memory_bytes", "reserved_bytes", "ctx_per_slot", "max_slots", "fits", "limit"}
    assert answer.keys() >= stable | {"total_bytes_at_max", "levers", "commands"}
    assert answer["memory_bytes"] == 64 * MIB
    assert answer["reserved_bytes"] == MIB


def test_levers_say_what_they_change_save_and_allow(run: Run) -> None:
    answer = told(run, PLAIN, "--memory", "64M", "--reserve", "1M", "--ctx-per-slot", 2048)

    assert all(lever.keys() >= {"change", "max_slots", "saves_bytes"} for lever in answer["levers"])
    (q8,) = (lever for lever in answer["levers"] if lever["change"] == "KV cache in q8_0")
    settings = {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "reserve": MIB}
    assert q8["max_slots"] == kv_capacity(str(PLAIN), "64M", 2048, **settings).max_slots
    assert q8["max_slots"] > answer["max_slots"]


def test_the_command_runs_what_was_computed(run: Run) -> None:
    answer = told(run, PLAIN, "--memory", "64M", "--reserve", "1M", "--ctx-per-slot", 2048)
    slots = answer["max_slots"]

    assert f"-c {slots * 2048} -np {slots}" in answer["commands"]["llama-server"]
    asked = told(run, PLAIN, "--memory", "64M", "--reserve", "1M", "--ctx-per-slot", 2048, "-np", 2)
    assert "-c 4096 -np 2" in asked["commands"]["llama-server"]


def test_host_memory_is_that_of_the_server(run: Run) -> None:
    options = ("--memory", "64M", "--reserve", NONE, "--ctx-per-slot", 2048, "-np", 3)
    answer = told(run, SLIDING, *options, "--cache-ram", 100, "--ctx-checkpoints", 5)

    shape = read_model(str(SLIDING))
    config = predict(shape, n_ctx=3 * 2048, n_seq_max=3).config
    expected = server_memory(
        shape,
        kv_capacity(shape, "64M", 2048).config.with_(n_ctx=config["n_ctx"], n_seq_max=3),
        cache_ram=100 * MIB,
        ctx_checkpoints=5,
    )
    assert answer["host_memory"] == json.loads(json.dumps(expected.to_dict()))
    python = told(
        run, SLIDING, "--memory", "64M", "--reserve", NONE, "--defaults", "llama-cpp-python"
    )
    assert python["host_memory"] is None


def test_options_reach_the_prediction(run: Run) -> None:
    options = {
        "-ctk": ("cache_type_k", "q8_0"),
        "-ctv": ("cache_type_v", "q8_0"),
        "-fa": ("flash_attn", "on"),
        "-ub": ("n_ubatch", 64),
        "-b": ("n_batch", 128),
    }
    words = [word for flag, (_, value) in options.items() for word in (flag, value)]
    answer = told(
        run, SLIDING, "--memory", "64M", "--reserve", NONE, "--ctx-per-slot", 2048,
        *words, "--kv-unified", "--swa-full",
    )  # fmt: skip

    settings = dict(options.values())
    found = kv_capacity(str(SLIDING), "64M", 2048, kv_unified=True, swa_full=True, **settings)
    assert answer["config"] == found.to_dict()["config"]
    assert answer["max_slots"] == found.max_slots


@pytest.mark.parametrize("program", ["llama-server", "ollama", "llama-cpp-python"])
def test_each_program_has_its_own_answer(run: Run, program: str) -> None:
    options = ("--memory", "64M", "--reserve", NONE, "--ctx-per-slot", 2048)
    answer = told(run, SLIDING, *options, "--defaults", program)

    found = kv_capacity(str(SLIDING), "64M", 2048, program=program)
    assert (answer["program"], answer["max_slots"]) == (program, found.max_slots)
    assert answer["total_bytes_at_max"] == found.total_bytes_at_max


def test_gpus_are_a_list_or_one_with_layers(run: Run) -> None:
    options = ("--reserve", NONE, "--ctx-per-slot", 2048)
    two = told(run, PLAIN, "--memory", "30M,20M", "-ts", "1,1", *options)
    one = told(run, PLAIN, "--memory", "30M", "-ngl", "all", *options)
    pool = told(run, PLAIN, "--memory", "30M", *options)

    assert [device["name"] for device in two["devices"]] == ["gpu0", "gpu1"]
    assert two["config"]["tensor_split"] == [1, 1]
    assert [device["name"] for device in one["devices"]] == ["gpu0"]
    assert one["config"]["n_gpu_layers"] == -1
    assert [device["name"] for device in pool["devices"]] == ["all"]


# -- how it ends ---------------------------------------------------------------------------------


def test_not_even_one_ends_with_1_and_says_what_would_help(run: Run) -> None:
    ended, out, _ = run("capacity", PLAIN, "--memory", "1M", "--reserve", NONE)
    answer = told(run, PLAIN, "--memory", "1M", "--reserve", NONE, code=1)

    assert ended == 1
    assert "Not even one request fits" in out
    assert "missing" in out
    assert "What to change" in out
    assert (answer["fits"], answer["max_slots"], answer["total_bytes_at_max"]) == (False, 0, None)
    assert answer["limit"] == "memory"
    assert answer["next_bytes"] > MIB
    assert answer["commands"] == {}


def test_fewer_than_asked_for_ends_with_1(run: Run) -> None:
    options = ("--memory", "64M", "--reserve", "1M", "--ctx-per-slot", 2048)
    most = told(run, PLAIN, *options)["max_slots"]

    enough = told(run, PLAIN, *options, "-np", most)["needed"]
    short = told(run, PLAIN, *options, "--users", most + 1, code=1)["needed"]
    assert enough["memory_bytes"] <= 64 * MIB < short["memory_bytes"]
    assert (enough["users"], short["users"]) == (most, most + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "much"), "not a size"),
        (("--memory", "1G", "--reserve", "some"), "not a size"),
        (("--memory", "1G", "-ngl", "auto"), "give a number, or all"),
        (("--memory", "1G", "-np", "400"), "400 users"),
        (("--memory", "1G", "-ctk", "q8_0", "-ctv", "q8_0", "-fa", "off"), "quantized V"),
        (("--memory", "1G", "--gpu-memory-utilization", "0.8"), "is for a config.json"),
        (("--memory", "1G", "--weights", "2G"), "is for a config.json"),
    ],
)
def test_usage_errors_end_with_2(run: Run, options: tuple[str, ...], message: str) -> None:
    ended, out, err = run("capacity", PLAIN, *options)

    assert (ended, out) == (2, "")
    assert message in err


def test_an_unknown_architecture_asks_the_engine_or_says_that_it_cannot(
    run: Run, tmp_path: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "odd.gguf"
    header = PLAIN.read_bytes()
    path.write_bytes(header.replace(b"qwen2", b"qwenX"))
    ended, out, err = run("capacity", path, "--memory", "1G")

    assert ended == 4, out + err
    assert "engine" in err


# -- the page ------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 100])
def test_every_line_fits_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for model, options in (
        (SLIDING, ("--memory", "64M,64M", "--reserve", "1M", "-np", "3")),
        (SLIDING, ("--memory", "1M")),
        (FOLDER, ("--memory", "48G", "-np", "50")),
    ):
        _, out, _ = run("capacity", model, *options)
        commands = out.split("To run it")[0]  # what is there to be pasted is not broken
        assert [line for line in commands.splitlines() if len(line) > columns] == []


def test_the_page_is_plain_text_without_a_terminal(run: Run) -> None:
    _, out, _ = run("capacity", SLIDING, "--memory", "64M", "--reserve", "1M", "-np", "2")

    assert "\x1b" not in out
    for part in ("requests at once", "limit: memory", "K KV cache", "x reserve", "slots"):
        assert part in out
    assert "2 requests of" in out


def test_a_reserve_is_said_and_kept_by_default(run: Run) -> None:
    answer = told(run, PLAIN, "--memory", "2G")
    _, out, _ = run("capacity", PLAIN, "--memory", "2G")

    assert answer["reserved_bytes"] == memory.RESERVE == 512 * MIB
    assert "x reserve               512.00 MiB" in out


def test_a_size_and_its_share_stay_apart_however_large() -> None:
    (line,) = capacity_pages.part_lines({"kv": 10**13}, 1, 80)[1:]

    assert line.split()[-2:] == ["TiB", "1000000000000000.0%"]


def test_a_change_that_lets_nobody_in_says_so() -> None:
    lever = {"change": "smaller", "saves_bytes": 5, "flags": {}, "price": "slower"}
    page = capacity_pages.lever_lines(
        [{**lever, "max_slots": 2}, {**lever, "max_slots": 3}], "llama-server", 2, 80
    )

    assert page[2].endswith("saves 5 B, no more requests")
    assert page[4].endswith("saves 5 B, then 3 requests")


@pytest.mark.parametrize(
    ("options", "told_of"),
    [
        (("--memory", "1G"), False),
        (("--memory", "1G", "-np", 1), False),
        (("--memory", "1G", "--levers"), True),
        (("--memory", "1G", "-np", 100), True),
        (("--memory", "4M"), True),
    ],
)
def test_levers_are_told_where_something_does_not_fit_or_on_demand(
    run: Run, options: tuple[object, ...], told_of: bool
) -> None:
    _, page, err = run("capacity", PLAIN, "--reserve", "1M", "--ctx-per-slot", 8192, *options)

    assert not err
    assert ("What to change, by what it saves" in page) is told_of
    assert ("add --levers" in page) is not told_of


def test_no_lever_is_promised_where_the_engine_is_the_limit(run: Run) -> None:
    _, page, _ = run("capacity", PLAIN, "--memory", "100T", "--ctx-per-slot", 256)

    assert "limit: engine" in page
    assert "levers" not in page


def test_the_bar_has_a_letter_for_everything_that_is_there() -> None:
    parts = {"weights": 1000, "kv": 10, "recurrent": 0, "reserve": 1, "free": 400}

    bar = capacity_pages.bar(parts, 40)

    assert len(bar) == 40
    assert "R" not in bar
    assert bar.count("W") > bar.count(".") > bar.count("K") == bar.count("x") == 1
    assert capacity_pages.bar({"free": 0}, 40) == ""
    assert set(capacity_pages.bar({"weights": 5, "free": -3}, 20)) == {"W"}


def test_strings_of_the_file_are_harmless(run: Run, tmp_path: Path) -> None:
    name = b"Llama 8B in 4 bits"
    evil = "\x1b[31mx\N{RIGHT-TO-LEFT OVERRIDE}".encode()
    path = tmp_path / "x.gguf"
    path.write_bytes(models.header().replace(name, evil.ljust(len(name), b"y")))
    assert "\x1b" in read_model(str(path)).name

    for options in ((), ("--json",)):
        _, out, _ = run("capacity", path, "--memory", "8G", *options)
        assert "\x1b" not in out
        assert "\N{RIGHT-TO-LEFT OVERRIDE}" not in out


# -- this machine --------------------------------------------------------------------------------


def summary(*free: int | None) -> gpu.GpuSummary:
    devices = tuple(
        NvidiaDevice(index, f"GPU {index}", None, 40 * GIB, size, None, None, False)
        for index, size in enumerate(free)
    )
    return gpu.GpuSummary(bool(devices), "" if devices else "no NVIDIA driver here", devices)


def test_auto_is_the_free_memory_of_the_gpus(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpu_summary", lambda: summary(3 * GIB, 2 * GIB))
    answer = told(run, PLAIN)

    assert [device["memory_bytes"] for device in answer["devices"]] == [3 * GIB, 2 * GIB]
    assert answer["reserved_bytes"] == 2 * memory.RESERVE
    assert "NVML" in answer["memory_source"]
    assert "GPU 0" in answer["memory_source"]


@pytest.mark.parametrize("found", [summary(), summary(None)])
def test_auto_is_the_available_ram_without_a_gpu(
    run: Run, monkeypatch: pytest.MonkeyPatch, found: gpu.GpuSummary
) -> None:
    monkeypatch.setattr(gpu, "gpu_summary", lambda: found)
    monkeypatch.setattr(ram, "available_memory", lambda: Reading(3 * GIB, source="cgroup limit"))
    answer = told(run, PLAIN)

    assert (answer["memory_bytes"], answer["devices"][0]["name"]) == (3 * GIB, "all")
    assert "cgroup limit" in answer["memory_source"]
    assert "no GPU" in answer["memory_source"]
    _, out, _ = run("capacity", PLAIN)
    assert "cgroup limit" in out


def test_auto_on_the_host_does_not_look_for_gpus(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpu_summary", lambda: summary(3 * GIB))
    monkeypatch.setattr(ram, "available_memory", lambda: Reading(GIB, source="MemAvailable"))

    assert told(run, PLAIN, "-ngl", NONE)["memory_bytes"] == GIB


def test_auto_of_a_machine_that_does_not_tell(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpu_summary", summary)
    monkeypatch.setattr(ram, "available_memory", lambda: Reading(None, why="no /proc"))
    ended, _, err = run("capacity", PLAIN)

    assert ended == 1
    assert "no /proc" in err
    assert "--memory" in err


def test_auto_asks_this_machine(run: Run) -> None:
    answer = told(run, PLAIN)

    assert answer["memory_bytes"] > 64 * MIB
    assert answer["memory_source"]


# -- as vLLM serves it ---------------------------------------------------------------------------


def test_a_folder_is_planned_as_vllm_does(run: Run) -> None:
    answer = told(run, "--config", FOLDER, "--memory", "48G", "--ctx-per-slot", 8192)

    weights = models.CONFIGS["llama-8b"][-1]
    left = int(48 * GIB * 0.9) - 2 * GIB - weights
    assert answer["kv_memory_bytes"] == left
    plan = paged_plan(str(FOLDER), left, 8192, 16, "auto", "auto")
    assert answer["paged"]["num_blocks"] == plan.num_blocks
    assert answer["max_slots"] == int(plan.max_concurrency)
    assert answer["limit"] == "memory"
    parts = answer["weights_bytes"] + answer["allowance_bytes"]
    assert answer["total_bytes_at_max"] == parts + plan.num_blocks * plan.block_bytes
    assert answer["total_bytes_at_max"] <= answer["memory_bytes"] - answer["reserved_bytes"]
    assert told(run, FOLDER, "--memory", "48G", "--ctx-per-slot", 8192) == answer


def test_the_longest_model_length_starts_and_one_token_more_does_not(run: Run) -> None:
    answer = told(run, FOLDER, "--memory", "20G", "--ctx-per-slot", 512)
    longest, left = answer["max_model_len"], answer["kv_memory_bytes"]

    assert 512 < longest < models.TRAINED
    for tokens, starts in ((longest, True), (longest + 1, False)):
        assert paged_plan(str(FOLDER), left, tokens, 16, "auto", "auto").fits == starts
        code = 0 if starts else 1
        assert (
            told(run, FOLDER, "--memory", "20G", "--ctx-per-slot", tokens, code=code)["fits"]
            == starts
        )


def test_needed_memory_is_memory_enough(run: Run) -> None:
    options = (FOLDER, "--ctx-per-slot", 8192)
    need = told(run, *options, "--memory", "20G", "-np", 30, code=1)["needed"]["memory_bytes"]

    assert told(run, *options, "--memory", need, "-np", 30)["max_slots"] == 30
    assert told(run, *options, "--memory", need - 4 * MIB)["max_slots"] == 29


def test_more_gpus_share_the_cache(run: Run) -> None:
    one = told(run, FOLDER, "--memory", "80G", "--ctx-per-slot", 8192)
    two = told(run, FOLDER, "--memory", "80G,80G", "--ctx-per-slot", 8192)

    assert two["kv_memory_bytes"] == 2 * one["kv_memory_bytes"] + one["weights_bytes"]
    assert "--tensor-parallel-size 2" in two["commands"]["vllm"]  # or vLLM takes one GPU alone
    assert "--tensor-parallel-size" not in one["commands"]["vllm"]
    ended, _, err = run("capacity", FOLDER, "--memory", "80G,80G,80G")
    assert ended == 2
    assert "8 KV heads cannot be divided among 3 GPUs" in err


def test_vllm_s_own_limits_are_told(run: Run) -> None:
    many = told(run, FOLDER, "--memory", "80G", "--ctx-per-slot", 16, "--max-num-seqs", 7)
    beyond = told(run, FOLDER, "--memory", "80G", "--ctx-per-slot", models.TRAINED + 1, code=1)

    assert (many["max_slots"], many["limit"]) == (7, "engine")
    assert (beyond["max_slots"], beyond["limit"]) == (0, "training context")


def test_settings_of_vllm_change_its_plan(run: Run) -> None:
    options = (FOLDER, "--memory", "48G", "--ctx-per-slot", 8192)
    plain = told(run, *options)
    fp8 = told(run, *options, "--kv-cache-dtype", "fp8")
    blocks = told(run, *options, "--block-size", 32)
    share = told(run, *options, "--gpu-memory-utilization", 0.5)
    allowance = told(run, *options, "--allowance", "4G")

    assert fp8["paged"]["bytes_per_token"] * 2 == plain["paged"]["bytes_per_token"]
    assert blocks["paged"]["block_size"] == 32
    assert share["reserved_bytes"] == 24 * GIB
    assert allowance["kv_memory_bytes"] == plain["kv_memory_bytes"] - 2 * GIB
    (lever,) = (lever for lever in plain["levers"] if "fp8" in lever["change"])
    assert lever["max_slots"] == fp8["max_slots"]
    assert "--kv-cache-dtype fp8" in fp8["commands"]["vllm"]
    assert f"--max-num-seqs {plain['max_slots']}" in plain["commands"]["vllm"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--memory", "48G", "-ngl", "all"), "is for a .gguf file"),
        (("--memory", "48G", "-ctk", "q8_0"), "is for a .gguf file"),
        (("--memory", "48G", "--reserve", "1G"), "is for a .gguf file"),
        (("--memory", "48G", "--gpu-memory-utilization", "1.5"), "is no share"),
        (("--memory", "48G", "--kv-cache-dtype", "q5"), "not a cache type"),
    ],
)
def test_settings_that_vllm_has_not_are_refused(
    run: Run, options: tuple[str, ...], message: str
) -> None:
    ended, _, err = run("capacity", FOLDER, *options)

    assert ended == 2
    assert message in err


def test_weights_must_be_known(run: Run) -> None:
    bare = DATA / "hf_configs" / "llama"
    ended, _, err = run("capacity", bare, "--memory", "1G")

    assert ended == 2
    assert "--weights" in err
    assert told(run, bare, "--memory", "1G", "--weights", "100M", "--allowance", "100M")["fits"]


def test_vllm_on_this_machine_needs_a_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "gpu_summary", summary)
    ended, _, err = run("capacity", FOLDER)
    assert ended == 1
    assert "no NVIDIA driver here" in err

    monkeypatch.setattr(gpu, "gpu_summary", lambda: summary(3 * GIB))
    assert told(run, FOLDER)["memory_bytes"] == 40 * GIB  # a share of all, not of what is free
