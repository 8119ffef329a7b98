from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localkv.engines.log import (
    Buffer,
    EngineLog,
    Recurrent,
    allocation_failure,
    mebibytes,
    parse_log,
)
from localkv.units import MIB

CAPTURES = Path(__file__).parent / "data" / "captures"
REPOSITORY = Path(__file__).resolve().parents[1]
#: Half of the last printed digit, 0.01 MiB.
HALF_DIGIT = 0.005 * MIB

# What every engine line may be wrapped in on its way to us.
DRESSES = {
    "bare": "{}",
    "server": "0.01.743.740 I {}",
    "date": "2026-11-29T20:18:03.123456Z {}",
    "clock with colons": "[20:18:03] INFO: engine: {}",
    "compose": "llama-1  | {}",
    "kubernetes": "pod/llama-7d9f: stdout F {}",
    "journal": "Nov 29 20:18:03 host ollama[812]: {}",
    "colours": "\x1b[32m\x1b[1m{}\x1b[0m",
    "colour inside": "\x1b[90mtime\x1b[0m {}\x1b[K",
    "json": '{{"log":"{}\\n","stream":"stderr"}}',
    "carriage return": "{}\r\n",
}


def mib(value: float) -> int:
    return round(value * MIB)


def capture(name: str) -> list[str]:
    return (CAPTURES / name).read_text(encoding="utf-8").splitlines()


# -- logs of real servers --------------------------------------------------------------------

REAL: dict[str, dict[str, Any]] = {
    "llama_server_lv4.log": {
        "model": {"CPU_Mapped": 256.63},
        "output": {"CPU": 0.75},
        "compute": {"CPU": 15.51},
        "kv": {"CPU": 180.0},
        "context": (8192, 2048, 4, 2048, 512),
        "offloaded": (31, 31),
    },
    "llama_server_prompt_cache_gemma3_270m.log": {
        "model": {"CPU_Mapped": 235.16, "CPU_REPACK": 12.66},
        "output": {"CPU": 2.0},
        "compute": {"CPU": 22.77},
        "kv": {"CPU": 24.0 + 30.0},
        "context": (8192, 4096, 2, 2048, 512),
        "offloaded": None,
    },
    "llama_server_prompt_cache_smollm2.log": {
        "model": {"CPU_Mapped": 92.1},
        "output": {"CPU": 0.38},
        "compute": {"CPU": 17.51},
        "kv": {"CPU": 180.0},
        "context": (8192, 4096, 2, 2048, 512),
        "offloaded": None,
    },
    "llama_server_q8_kv.log": {
        "model": {"CPU_Mapped": 256.63},
        "output": {"CPU": 0.19},
        "compute": {"CPU": 14.42},
        "kv": {"CPU": 23.91},
        "context": (2048, 2048, 1, 2048, 512),
        "offloaded": (31, 31),
    },
    "llama_server_vulkan_ngl10.log": {
        "model": {"CPU_Mapped": 256.63, "Vulkan0": 114.79},
        "output": {"Vulkan_Host": 0.38},
        "compute": {"Vulkan0": 14.7, "Vulkan_Host": 3.26},
        "kv": {"CPU": 31.5, "Vulkan0": 13.5},
        "context": (2048, 1024, 2, 2048, 512),
        "offloaded": (10, 31),
    },
}


def by_device(log: EngineLog, kind: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for buffer in log.buffers:
        if buffer.kind == kind:
            found[buffer.device] = found.get(buffer.device, 0) + buffer.bytes
    return found


def test_every_capture_is_looked_at() -> None:
    assert sorted(path.name for path in CAPTURES.iterdir()) == sorted(REAL)


@pytest.mark.parametrize("dress", DRESSES)
@pytest.mark.parametrize("name", REAL)
def test_logs_of_real_servers(name: str, dress: str) -> None:
    truth = REAL[name]
    log = parse_log(DRESSES[dress].format(line) for line in capture(name))
    for kind, word in (("model", "model"), ("output", "output"), ("compute", "compute")):
        assert by_device(log, word) == {k: mib(v) for k, v in truth[kind].items()}
    assert by_device(log, "KV") == {k: mib(v) for k, v in truth["kv"].items()}
    names = ("n_ctx", "n_ctx_seq", "n_seq_max", "n_batch", "n_ubatch")
    assert {name: dict(log.context)[name] for name in names} == dict(
        zip(names, truth["context"], strict=True)
    )
    assert log.layers_offloaded == truth["offloaded"]
    assert log.flash_attn is True
    assert log.recurrent == ()


@pytest.mark.parametrize("name", REAL)
def test_colours_around_single_words_change_nothing(name: str) -> None:
    lines = capture(name)
    coloured = [re.sub(r"[\w.]+", "\x1b[1;32m\\g<0>\x1b[0m", line) for line in lines]
    assert parse_log(coloured) == parse_log(lines)


@pytest.mark.parametrize("name", REAL)
def test_the_parts_of_a_real_log_agree_with_each_other(name: str) -> None:
    log = parse_log(capture(name))
    assert log.caches
    # The devices' buffers hold the caches: two ways of printing the same bytes.
    assert abs(log.sum("KV") - log.kv_bytes) <= 2 * HALF_DIGIT * len(log.buffers)
    for cache in log.caches:
        assert abs(cache.k_bytes + cache.v_bytes - cache.bytes) <= 3 * HALF_DIGIT
        assert cache.cells % 256 == 0
    figures = log.to_dict()
    assert figures["kv_bytes"] == sum(cache["bytes"] for cache in figures["caches"])
    assert figures["model_bytes"] == sum(entry["bytes"] for entry in figures["model_buffers"])
    assert figures["compute_bytes"] == sum(entry["bytes"] for entry in figures["compute_buffers"])
    assert figures["output_bytes"] == sum(entry["bytes"] for entry in figures["output_buffers"])


def test_the_caches_of_a_sliding_window_model_are_added_up() -> None:
    log = parse_log(capture("llama_server_prompt_cache_gemma3_270m.log"))
    full, sliding = log.caches
    assert (full.cells, full.layers, full.seqs, full.streams) == (4096, 3, 2, 2)
    assert (sliding.cells, sliding.layers) == (1024, 15)
    assert log.kv_bytes == full.bytes + sliding.bytes == mib(54)


def test_the_types_of_a_quantised_cache_are_kept() -> None:
    (cache,) = parse_log(capture("llama_server_q8_kv.log")).caches
    assert (cache.k_type, cache.v_type) == ("q8_0", "q8_0")
    assert cache.k_bytes == cache.v_bytes == mib(11.95)


# -- what the engine prints, read back -------------------------------------------------------

SIZES = st.integers(0, 200_000 * 100).map(lambda hundredths: hundredths / 100)
DEVICES = st.sampled_from(
    ["CPU", "CPU_Mapped", "CPU_REPACK", "CUDA0", "CUDA_Host", "Vulkan1", "MTL0_Mapped", "ROCm0",
     "RPC0[127.0.0.1:50052]", "RPC1[[fe80::1]:50052]", "RPC0[a-host-with-a-name-that-is-cut"]
)  # fmt: skip
COUNTS = st.integers(0, 2**32 - 1)
TYPES = st.sampled_from(["f16", "bf16", "f32", "q8_0", "q4_0", "q5_1", "iq4_nl"])
DRESS = st.sampled_from(sorted(DRESSES.values()))
COMMA = st.booleans()


def printed(line: str, dress: str, comma: bool) -> str:
    """Return ``line`` dressed up, with the decimals of a locale that writes a comma."""
    if comma:
        line = re.sub(r"\.(\d\d MiB)", r",\1", line)
    return dress.format(line)


@given(
    st.sampled_from(["model", "KV", "RS", "output", "compute", "DSV4 csa state"]),
    DEVICES, SIZES, DRESS, COMMA,
)  # fmt: skip
def test_any_buffer_line_is_read_back(
    kind: str, device: str, size: float, dress: str, comma: bool
) -> None:
    line = f"some_function: {device:>10} {kind} buffer size = {size:8.2f} MiB"
    assert parse_log([printed(line, dress, comma)]).buffers == (Buffer(device, kind, mib(size)),)


@given(COUNTS, COUNTS, COUNTS, COUNTS, TYPES, SIZES, TYPES, SIZES, DRESS, COMMA)
def test_any_cache_line_is_read_back(
    cells: int, layers: int, seqs: int, streams: int,
    k_type: str, k: float, v_type: str, v: float, dress: str, comma: bool,
) -> None:  # fmt: skip
    line = (
        f"llama_kv_cache: size = {k + v:7.2f} MiB ({cells:6d} cells, {layers:3d} layers, "
        f"{seqs:2d}/{streams:d} seqs), K ({k_type}): {k:7.2f} MiB, V ({v_type}): {v:7.2f} MiB"
    )
    (cache,) = parse_log([printed(line, dress, comma)]).caches
    assert (cache.cells, cache.layers, cache.seqs, cache.streams) == (cells, layers, seqs, streams)
    assert (cache.k_type, cache.v_type) == (k_type, v_type)
    assert (cache.k_bytes, cache.v_bytes) == (mib(k), mib(v))
    assert abs(cache.bytes - (k + v) * MIB) <= HALF_DIGIT + 1


@given(COUNTS, COUNTS, SIZES, SIZES, st.none() | SIZES, DRESS, COMMA)
def test_any_line_of_recurrent_state_is_read_back(
    cells: int, layers: int, r: float, s: float, p: float | None, dress: str, comma: bool
) -> None:
    total = r + s + (p or 0)
    line = (
        f"llama_memory_recurrent: size = {total:7.2f} MiB ({cells:6d} cells, {layers:3d} layers, "
        f" 4 seqs  0 rs_seq), R (f32): {r:7.2f} MiB, S (f32): {s:7.2f} MiB"
    )
    line += "" if p is None else f", P (f32): {p:7.2f} MiB"
    log = parse_log([printed(line, dress, comma)])
    (state,) = log.recurrent
    assert state == Recurrent(cells, mib(r), mib(s), mib(p or 0), state.bytes)
    assert abs(state.bytes - total * MIB) <= HALF_DIGIT + 1
    assert (log.recurrent_bytes, log.kv_bytes, log.caches) == (state.bytes, 0, ())


def test_the_states_of_compressed_caches_count_once() -> None:
    log = parse_log(
        [
            "llama_kv_cache: size =    1.00 MiB (   256 cells,   2 layers,  1/1 seqs), "
            "K (f16):    1.00 MiB, V (f16):    0.00 MiB",
            "llama_dsv4_comp_state:        CPU DSV4 csa state buffer size =     0.01 MiB",
            "llama_dsv4_comp_state: csa ratio = 4, state = 8 x 128, streams = 1, rs_seq = 0, "
            "layers = 1, size =    0.01 MiB",
            "llama_dsv4_comp_state:        CPU DSV4 hca state buffer size =     0.06 MiB",
            "llama_dsv4_comp_state: hca ratio = 128, state = 128 x 64, streams = 1, rs_seq = 0, "
            "layers = 1, size =    0.06 MiB",
            "llama_dsv4_comp_state:        CPU DSV4 lid state buffer size =     0.02 MiB",
        ]
    )
    assert log.kv_bytes == mib(1) + mib(0.01) + mib(0.06) + mib(0.02)


def test_the_last_context_settles_the_context() -> None:
    log = parse_log(
        f"llama_context: {name:21} = {value}"
        for name, value in [
            ("n_ctx", 4096), ("n_ctx_seq", 2048), ("n_ctx", 8192), ("n_ctx_per_seq", 1),
            ("n_seq_max", 2), ("n_ctx_train", 32768), ("n_outputs_max", 2),
            ("n_outputs_max_per_seq", 1),
        ]
    )  # fmt: skip
    assert dict(log.context) == {"n_ctx": 8192, "n_ctx_seq": 2048, "n_seq_max": 2,
                                 "n_outputs_max": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "answer"),
    [
        ([], None),
        (["llama_context: flash_attn            = auto"], None),
        (["llama_context: flash_attn            = enabled"], True),
        (["llama_context: flash_attn            = disabled"], False),
        (["resolve_fused_ops: Flash Attention enabled"], True),
        (["resolve_fused_ops: Flash Attention not supported, set to disabled"], False),
        (["llama_context: flash_attn = auto", "f: Flash Attention not supported, set"], False),
        (["resolve_fused_ops: fused Gated Delta Net (chunked) enabled"], None),
    ],
)
def test_flash_attention_is_known_only_when_the_log_says_it(
    lines: list[str], answer: bool | None
) -> None:
    assert parse_log(lines).flash_attn is answer


# -- lines that say nothing ------------------------------------------------------------------

NOTHING = [
    "",
    "load_tensors:   CPU_Mapped model buffer size =",
    "load_tensors:   CPU_Mapped model buffer size =   256.6",
    "load_tensors:   CPU_Mapped model buffer size =   256.63 Mi",
    "load_tensors:   CPU_Mapped model buffer size =  -256.63 MiB",
    "load_tensors:   CPU_Mapped model buffer size = 17592186044415.00 MiB",
    "load_tensors:   CPU_Mapped model buffer size = 1,234.56 MiB",
    "load_tensors:   CPU_Mapped model buffer size = nan MiB",
    "load_tensors:   CPU_Mapped model buffer size = inf MiB",
    "load_tensors:   CPU_Mapped model buffer size = ... MiB",
    "load_tensors:   CPU_Mapped model buffer size = - MiB",
    "load_tensors:   CPU_Mapped model buffer size = " + "9" * 5000 + " MiB",
    "llama_kv_cache: size =  180.00 MiB (  2048 cells,  30 layers,  4/4 seqs), K (f16):   90.0",
    "llama_kv_cache: size = -180.00 MiB (  2048 cells,  30 layers,  4/4 seqs), "
    "K (f16):  -90.00 MiB, V (f16):   90.00 MiB",
    "llama_kv_cache: size =  180.00 MiB (" + "9" * 5000 + " cells,  30 layers,  4/4 seqs), "
    "K (f16):   90.00 MiB, V (f16):   90.00 MiB",
    "llama_kv_cache_iswa: creating     SWA KV cache, size = 1024 cells",
    "llama_context: n_ctx                 = " + "9" * 5000,
    "llama_context: n_ctx                 = -1",
    "llama_context: n_ctx_seq (2048) < n_ctx_train (8192) -- the full capacity",
    "offloaded " + "9" * 5000 + "/31 layers to GPU",
    "created context checkpoint 1 of 32 (pos_min = 0, pos_max = 95, n_tokens = 96, "
    "size = 1.408 MiB)",
    "saving prompt with length 103, total state size = 1.813 MiB (draft: 0.000 MiB)",
    "print_info: file size   = 256.63 MiB (16.00 BPW) ",
    "common_memory_breakdown_print: |   - CUDA0 (RTX 4090) | 24080 = 20000 + (-12 = 1 + 2 + -15)"
    " + 17592186044415 |",
    "\x00\x1b[\x1b[0;\x1b[999999;9",
]


@pytest.mark.parametrize("line", NOTHING, ids=range(len(NOTHING)))
def test_a_line_that_is_cut_or_absurd_says_nothing(line: str) -> None:
    assert parse_log([line]) == EngineLog()


def test_a_buffer_without_a_device_still_counts() -> None:
    log = parse_log(["load_tensors:  model buffer size =   256.63 MiB"])
    assert log.buffers == (Buffer("", "model", mib(256.63)),)


@given(st.lists(st.text(max_size=80) | st.sampled_from(NOTHING), max_size=6))
def test_no_text_breaks_the_parser(lines: list[str]) -> None:
    parse_log(lines).to_dict()


PIECES = [": ", ":\t a", "x", "\x1b[0;", "size = 1.00 MiB (1 cells,", "size = 1", "DSV4 a", "1,1.",
          " KV buffer size =  ", " ", "9", ": n_ctx ", ": a KV ", "(f16): 1 MiB, V ("]  # fmt: skip
_BOUNDED = """
import resource, sys
from localkv.engines.log import parse_log
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
for piece in eval(sys.argv[1]):
    line = piece * ((1 << 20) // len(piece))
    parse_log([line, " CPU KV buffer size =" + line, "f: size = 1.00 MiB (1 cells," + line])
print("done")
"""


def test_a_line_of_a_megabyte_costs_no_more_than_its_length() -> None:
    """Work that grows with the square of the length would need hours; the limit is seconds."""
    pytest.importorskip("resource", reason="process limits are POSIX")
    done = subprocess.run(
        [sys.executable, "-c", _BOUNDED, repr(PIECES)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=REPOSITORY,
    )
    assert done.stdout == "done\n", done


# -- allocations that fail -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("llama_init_from_model: failed to initialize the context: "
         "failed to allocate buffer for kv cache", "kv"),
        ("failed to allocate buffer for rs cache", "kv"),
        ("failed to allocate buffer for DSV4 compressor state", "kv"),
        ("failed to allocate compute pp buffers", "compute"),
        ("failed to allocate compute tg buffers", "compute"),
        ("process_ubatch: failed to allocate graph", "compute"),
        ("output_reserve: failed to allocate output buffer of size 12.00 MiB", "output"),
        ("llama_model_load: error loading model: unable to allocate CPU buffer", "weights"),
        ("quantized V cache requires flash_attn to be enabled", None),
        ("K cache type q8_0 with block size 32 does not divide n_embd_head_k=80", None),
        ("", None),
    ],
)  # fmt: skip
def test_a_failed_allocation_names_what_could_not_be_had(text: str, stage: str | None) -> None:
    assert allocation_failure(text) == stage


@pytest.mark.parametrize(
    ("text", "size"), [("180.00", 180 * MIB), ("0,50", MIB // 2), ("3", 3 * MIB)]
)
def test_printed_mebibytes(text: str, size: int) -> None:
    assert mebibytes(text) == size
