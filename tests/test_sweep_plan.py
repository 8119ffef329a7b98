from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.errors import UsageError
from localkv.predict.config import RunConfig
from localkv.sweep.plan import (
    DEFAULT_CONTEXTS,
    DEFAULT_DEPTHS,
    MAX_RUNS,
    Point,
    SweepPlan,
    grid,
    key_of,
    merge,
    parse_gpu_layers,
    read_plan,
    shuffled,
)

REPOSITORY = Path(__file__).resolve().parents[1]
PLANS = sorted((REPOSITORY / "sweeps").glob("*.toml"))
N_CTX_TRAIN = 8192


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Return a function that reads a plan from its text."""

    def read_text(text: str | bytes) -> dict[str, Any]:
        path = tmp_path / "mine.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_plan(path)

    return read_text


# -- plan files ------------------------------------------------------------------------------


def test_there_are_plans() -> None:
    assert len(PLANS) >= 5


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_plans_that_come_with_localkv_make_points(path: Path) -> None:
    settings = read_plan(path)
    plan = SweepPlan(**settings)
    assert plan.title
    assert len(grid(plan, N_CTX_TRAIN)) > 1
    # Every one of them says at its top what it answers and how it is run.
    head = path.read_text(encoding="utf-8").split("title =")[0]
    assert "# Run: localkv sweep" in head
    assert path.name in head


def test_the_quick_plan_is_the_default_sweep() -> None:
    quick = grid(SweepPlan(**read_plan(REPOSITORY / "sweeps" / "quick.toml")), N_CTX_TRAIN)
    assert {point.key for point in quick} == {point.key for point in grid(SweepPlan(), N_CTX_TRAIN)}


def test_a_value_may_be_single_a_list_or_a_text_with_ranges(read: Any) -> None:
    for text in ('ctx-size = "1024-4096*2"', "ctx-size = [1024, 2048, 4096]"):
        assert read(text) == {"ctx_size": (1024, 2048, 4096)}
    assert read("parallel = 2") == {"parallel": (2,)}
    assert read('cache-type-k = ["f16", "q8_0", "f16"]') == {"cache_type_k": ("f16", "q8_0")}
    assert read('cache-type = "f16,q8_0"') == {"cache_type": ("f16", "q8_0")}
    assert read("kv-unified = [false, true]") == {"kv_unified": (False, True)}
    for text in ('gpu-layers = "0,16,all"', 'gpu-layers = [0, 16, "all"]'):
        assert read(text) == {"gpu_layers": (0, 16, -1)}


def test_speed_stands_for_the_usual_depths(read: Any) -> None:
    assert read("speed = true") == {"speed_depths": DEFAULT_DEPTHS}
    assert read("speed = false") == {}
    assert read("speed = true\nspeed-depths = [0, 64]") == {"speed_depths": (0, 64)}
    assert read("speed-depths = [0, 64]\nspeed = true") == {"speed_depths": (0, 64)}


BAD = [
    ("ctx-size", '"8192-1024"', "1024-8192"),
    ("ctx-size", "[]", "at least one"),
    ("ctx-size", "[1.5]", "[1, 2]"),
    ("ctx-size", "-1", "0 or more"),
    ("ctx-size", "true", "[1, 2]"),
    ("ctx-size", "{ a = 1 }", "[1, 2]"),
    ("ctx-per-slot", '"1-10*1"', "at least 2"),
    ("parallel", '["1"]', "[1, 2]"),
    ("parallel", '"0-1000000000"', "larger step"),
    ("ubatch-size", "[[512]]", "[1, 2]"),
    ("speed-depths", '"a"', "write"),
    ("cache-type", "8", "[1, 2]"),
    ("cache-type-v", '"f16,,q8_0"', "single commas"),
    ("flash-attn", "true", "[1, 2]"),
    ("kv-unified", '"yes"', "true, false"),
    ("kv-unified", "[]", "at least one"),
    ("swa-full", "1", "true, false"),
    ("speed", '"yes"', "true, false"),
    ("gpu-layers", '"most"', "all or auto"),
    ("gpu-layers", "-5", "all or auto"),
    ("gpu-layers", "1.5", "all or auto"),
    ("gpu-layers", "[]", "at least one"),
    ("gpu-layers", '"' + "9" * 5000 + '"', "all or auto"),
    ("repeats", "0", "1 or more"),
    ("repeats", "1.5", "1 or more"),
    ("repeats", "true", "1 or more"),
    ("seed", "-1", "0 or more"),
    ("seed", '"7"', "0 or more"),
    ("threads", "2.5", "0 or more"),
    ("n-outputs-max", "-1", "0 or more"),
    ("timeout", "0", "more than 0"),
    ("timeout", "-3.5", "more than 0"),
    ("timeout", "nan", "more than 0"),
    ("timeout", "inf", "more than 0"),
    ("timeout", '"10"', "more than 0"),
    ("model", '["a.gguf", "b.gguf"]', "in quotes"),
    ("model", "7", "in quotes"),
    ("title", "7", "in quotes"),
    ("ctx_size", "1024", "ctx-size"),
    ("contexts", "1024", "ctx-size"),
]


@pytest.mark.parametrize(("key", "value", "remedy"), BAD, ids=[f"{k}={v[:12]}" for k, v, _ in BAD])
def test_a_bad_value_is_one_line_with_plan_key_and_remedy(
    read: Any, key: str, value: str, remedy: str
) -> None:
    with pytest.raises(UsageError) as caught:
        read(f"title = 'fine'\n{key} = {value}\n" if key != "title" else f"{key} = {value}\n")
    said = str(caught.value)
    assert said.startswith(f"plan mine.toml: {key}: ")
    assert remedy in caught.value.hint
    assert "\n" not in said
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        "ctx-size = [1024",
        "ctx-size 1024",
        "ctx-size = 1\nctx-size = 2",
        b"title = '\xff'",
        b"\x89PNG\r\n\x1a\n\0",
        "seed = " + "9" * 5000,
        "seed = " + "[" * 5_000,
    ],
    ids=["cut", "no sign", "twice", "no utf-8", "png", "endless number", "nested"],
)
def test_what_is_not_toml_is_one_line_with_a_remedy(read: Any, text: str | bytes) -> None:
    with pytest.raises(UsageError) as caught:
        read(text)
    said = str(caught.value)
    assert "mine.toml is not TOML" in said
    assert "sweeps/" in caught.value.hint
    assert "\n" not in said


def test_a_plan_that_is_not_there_or_a_directory_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(UsageError, match=path.name) as caught:
            read_plan(path)
        assert caught.value.exit_code == 2


def test_the_settings_named_as_known_are_known(read: Any) -> None:
    with pytest.raises(UsageError) as caught:
        read("nonsense = 1")
    for key in caught.value.hint.split(": ", 1)[1].split(", "):
        with pytest.raises(UsageError) as refused:
            read(f"{key} = 1979-05-27")  # a date fits nowhere
        assert "no such setting" not in refused.value.message


@pytest.mark.parametrize(
    ("text", "layers"), [("0", 0), ("16", 16), ("all", -1), ("AUTO", -1), (" 8 ", 8)]
)
def test_gpu_layers(text: str, layers: int) -> None:
    assert parse_gpu_layers(text) == (layers,)


# -- files and options together --------------------------------------------------------------


def test_an_option_wins_over_the_file_and_the_file_over_the_default() -> None:
    plan = merge({"parallel": (8,), "repeats": 3, "model": "a.gguf"}, {"model": "b.gguf"})
    assert (plan.model, plan.repeats, plan.parallel) == ("b.gguf", 3, (8,))
    assert plan.timeout == SweepPlan().timeout


def test_a_context_option_replaces_either_way_of_the_file_to_say_it() -> None:
    assert merge({"ctx_per_slot": (512,)}, {"ctx_size": (4096,)}).ctx_per_slot == ()
    assert merge({"ctx_size": (4096,)}, {"ctx_per_slot": (512,)}).ctx_size == ()
    assert merge({"ctx_size": (4096,)}, {"parallel": (2,)}).ctx_size == (4096,)


def test_a_cache_type_option_replaces_every_cache_type_of_the_file() -> None:
    file = {"cache_type": ("q8_0",)}
    plan = merge(file, {"cache_type_k": ("q4_0",)})
    assert plan.cache_types() == [("q4_0", "f16")]
    file = {"cache_type_k": ("q4_0",), "cache_type_v": ("q4_0",)}
    plan = merge(file, {"cache_type": ("f16",)})
    assert plan.cache_type == ("f16",)
    assert {p.config.cache_type_k for p in grid(plan, N_CTX_TRAIN)} == {"f16"}


def test_merging_leaves_the_settings_alone() -> None:
    settings = {"ctx_size": (4096,)}
    merge(settings, {"ctx_per_slot": (512,)})
    assert settings == {"ctx_size": (4096,)}


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_comes_back_from_a_run_file_as_it_was(path: Path) -> None:
    plan = SweepPlan(**read_plan(path))
    data = json.loads(json.dumps(plan.to_dict()))
    assert SweepPlan.from_dict({**data, "a field of the future": 1}) == plan
    assert SweepPlan.from_dict({}) == SweepPlan()


# -- points ----------------------------------------------------------------------------------

AXES: dict[str, tuple[str, st.SearchStrategy[Any]]] = {
    "ctx_size": ("n_ctx", st.sampled_from([256, 1000, 1024, 4096, 1 << 20])),
    "parallel": ("n_seq_max", st.integers(1, 256)),
    "batch_size": ("n_batch", st.sampled_from([512, 2048])),
    "ubatch_size": ("n_ubatch", st.sampled_from([128, 512])),
    "gpu_layers": ("n_gpu_layers", st.sampled_from([-1, 0, 16])),
    "flash_attn": ("flash_attn", st.sampled_from(["auto", "on", "off"])),
    "kv_unified": ("kv_unified", st.booleans()),
    "swa_full": ("swa_full", st.booleans()),
    "cache_type_k": ("cache_type_k", st.sampled_from(["f16", "q8_0"])),
    "cache_type_v": ("cache_type_v", st.sampled_from(["f16", "q8_0"])),
}
AXIS_VALUES = st.fixed_dictionaries(
    {
        name: st.lists(values, min_size=1, max_size=2).map(tuple)
        for name, (_, values) in AXES.items()
    }
)


@given(AXIS_VALUES)
def test_the_grid_is_the_product_of_the_lists_without_repeats(axes: dict[str, Any]) -> None:
    points = grid(SweepPlan(**axes), N_CTX_TRAIN)
    seen = Counter(
        tuple(getattr(point.config, field) for field, _ in AXES.values()) for point in points
    )
    assert set(seen) == set(product(*(axes[name] for name in AXES)))
    assert set(seen.values()) == {1}
    assert len({point.key for point in points}) == len(points)


@given(AXIS_VALUES, AXIS_VALUES)
def test_two_points_share_a_key_only_when_they_are_the_same(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    by_key: dict[str, RunConfig] = {}
    for axes in (one, other):
        for point in grid(SweepPlan(**axes), N_CTX_TRAIN):
            assert by_key.setdefault(point.key, point.config) == point.config
            assert key_of(point.config) == point.key


def test_one_cache_type_is_meant_for_k_and_v_together() -> None:
    points = grid(SweepPlan(cache_type=("f16", "q8_0"), parallel=(1,)), N_CTX_TRAIN)
    pairs = {(p.config.cache_type_k, p.config.cache_type_v) for p in points}
    assert pairs == {("f16", "f16"), ("q8_0", "q8_0")}


def test_a_context_per_slot_is_multiplied_by_the_slots() -> None:
    points = grid(SweepPlan(ctx_per_slot=(512, 1000), parallel=(1, 3)), N_CTX_TRAIN)
    assert sorted((p.config.n_seq_max, p.config.n_ctx) for p in points) == [
        (1, 512), (1, 1000), (3, 1536), (3, 3000),
    ]  # fmt: skip


def test_a_context_of_0_is_the_training_context() -> None:
    points = grid(SweepPlan(ctx_size=(0, 1024, N_CTX_TRAIN), parallel=(1,)), N_CTX_TRAIN)
    assert [point.config.n_ctx for point in points] == [N_CTX_TRAIN, 1024]


@pytest.mark.parametrize("n_ctx_train", [512, 1024, 3000, 8192, 131072])
def test_the_default_contexts_stay_within_training(n_ctx_train: int) -> None:
    sizes = {point.config.n_ctx for point in grid(SweepPlan(), n_ctx_train)}
    within = {size for size in DEFAULT_CONTEXTS if size <= n_ctx_train}
    assert sizes == (within or {n_ctx_train})


def test_the_logits_are_those_of_a_server_unless_told_otherwise() -> None:
    for point in grid(SweepPlan(), N_CTX_TRAIN):
        assert point.config.n_outputs_max == point.config.n_seq_max
    assert {p.config.n_outputs_max for p in grid(SweepPlan(n_outputs_max=0), N_CTX_TRAIN)} == {0}


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        (SweepPlan(parallel=(0,)), "256"),
        (SweepPlan(parallel=(1, 300)), "256"),
        (SweepPlan(parallel=(0,), ctx_per_slot=(512,)), "256"),
        (SweepPlan(ctx_size=(1024,), ctx_per_slot=(512,)), "--ctx-per-slot"),
        (SweepPlan(ctx_per_slot=(0,)), "per slot"),
        (SweepPlan(ctx_size=(1 << 32,)), "2**32"),
        (SweepPlan(ctx_per_slot=(1 << 31,), parallel=(2,)), "2**32"),
        (SweepPlan(batch_size=(0,)), "n_batch"),
        (SweepPlan(ubatch_size=(0,)), "n_ubatch"),
        (SweepPlan(flash_attn=("maybe",)), "flash_attn"),
    ],
)
def test_what_the_engine_does_not_take_is_refused_before_launch(plan: SweepPlan, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        grid(plan, N_CTX_TRAIN)
    assert caught.value.exit_code == 2
    assert word in str(caught.value)
    assert caught.value.hint


def test_a_sweep_of_a_million_runs_is_refused_before_it_is_laid_out() -> None:
    sizes = tuple(range(1, 10_001))
    plans = [
        SweepPlan(ctx_size=sizes, parallel=tuple(range(1, 257)), batch_size=sizes),
        SweepPlan(repeats=10**12),
    ]
    for plan in plans:
        with pytest.raises(UsageError, match="runs are more than"):
            grid(plan, N_CTX_TRAIN)
    largest = SweepPlan(ctx_size=sizes[: MAX_RUNS // 2], parallel=(1,), repeats=2)
    assert len(grid(largest, N_CTX_TRAIN)) * 2 == MAX_RUNS


# -- order -----------------------------------------------------------------------------------

POINTS = [Point(RunConfig(n_ctx=n), f"c{n}") for n in range(1, 13)]


@given(st.integers(0, len(POINTS)), st.integers(1, 4), st.integers(0, 2**64))
def test_shuffling_keeps_every_pair_once(count: int, repeats: int, seed: int) -> None:
    order = shuffled(POINTS[:count], repeats, seed)
    assert Counter((point.key, repeat) for point, repeat in order) == Counter(
        (point.key, repeat) for point in POINTS[:count] for repeat in range(repeats)
    )


def test_the_order_depends_on_the_seed() -> None:
    orders = {tuple(p.key for p, _ in shuffled(POINTS, 1, seed)) for seed in range(20)}
    assert len(orders) == 20
    assert tuple(point.key for point in POINTS) not in orders


def test_the_order_depends_on_nothing_but_the_seed() -> None:
    # A resumed sweep is another process: neither its hash seed nor earlier draws may matter.
    program = (
        "import random\nfrom localkv.sweep.plan import SweepPlan, grid, shuffled\n"
        "random.random()\n"
        f"order = shuffled(grid(SweepPlan(), {N_CTX_TRAIN}), 2, 5)\n"
        "print(*(f'{point.key}/{repeat}' for point, repeat in order))"
    )
    here = [f"{p.key}/{r}" for p, r in shuffled(grid(SweepPlan(), N_CTX_TRAIN), 2, 5)]
    for hash_seed in ("1", "2"):
        said = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert said.stdout.split() == here
