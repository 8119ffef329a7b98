"""The formula against what the engine did: every handed model in every handed configuration."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import predict_helpers as truth
import pytest
from predict_helpers import printed

from localkv.errors import UsageError
from localkv.model import ModelShape, read_model, shape_from_header
from localkv.predict.estimate import Estimate
from localkv.predict.predict import predict
from localkv.predict.repack import repacked_bytes
from localkv.units import MIB

MODELS = {
    entry["name"]: entry for name in ("engine_truth", "deep_truth") for entry in truth.records(name)
}
DEVICE_RECORDS = truth.records("device_truth")


@pytest.mark.parametrize("name", MODELS)
def test_every_configuration_is_what_the_engine_made_of_it(name: str) -> None:
    shape = truth.shape(name)
    assert shape.rule == "exact"
    for config in MODELS[name]["configs"]:
        if config.get("ok"):
            estimate = predict(shape, **truth.settings(config))
            assert_caches(estimate, config)
            assert_state(estimate, config)
            assert str(estimate.config["n_ctx"]) == config["n_ctx_eff"], config
            assert str(estimate.config["n_ctx_per_slot"]) == config["n_ctx_seq"], config
            assert printed(estimate.output_bytes, float(config["output"][0][1])), config
        else:
            with pytest.raises(UsageError) as refusal:
                predict(shape, **truth.settings(config))
            # Some records kept no message: there the engine's own rule is not known.
            said = "".join(config.get("err", [])) or refusal.value.message
            assert refusal.value.message in said, config


def assert_caches(estimate: Estimate, config: dict[str, Any]) -> None:
    caches = [cache for cache in estimate.caches if cache.kind != "state"]
    expected = config.get("kv", [])
    assert [(c.cells, c.layers) for c in caches] == [(e["cells"], e["layers"]) for e in expected]
    for cache, entry in zip(caches, expected, strict=True):
        assert printed(cache.k_bytes, entry["k_mib"]), (cache, entry, config)
        assert printed(cache.v_bytes, entry["v_mib"]), (cache, entry, config)
        assert printed(cache.bytes, entry["mib"]), (cache, entry, config)
    states = [cache for cache in estimate.caches if cache.kind == "state"]
    lines = [line for line in config.get("other", []) if "ratio" in line]
    assert len(states) == len(lines)
    for state, line in zip(states, lines, strict=True):
        assert printed(state.bytes, float(line.split("size =")[1].split()[0])), (state, line)


def assert_state(estimate: Estimate, config: dict[str, Any]) -> None:
    if "rs" not in config:
        assert estimate.recurrent_bytes == 0
        return
    (entry,) = config["rs"]
    assert printed(estimate.recurrent_bytes, entry["mib"]), (estimate, config)
    if "r_mib" in entry:
        assert printed(estimate.r_bytes, entry["r_mib"]), config
        assert printed(estimate.s_bytes, entry["s_mib"]), config


@pytest.fixture(scope="module")
def shapes(smollm2_path: Path, gemma_path: Path) -> dict[str, ModelShape]:
    """Return the models of the device records: two real ones and the handed headers."""
    found = {
        "smollm2-135m": read_model(str(smollm2_path)),
        "gemma-3-270m": read_model(str(gemma_path)),
    }
    for name in truth.named(DEVICE_RECORDS):
        if name not in found:
            found[name] = truth.shape(name)
    return found


def on_devices(shape: ModelShape, record: dict[str, Any], **more: Any) -> Estimate:
    keys = ("n_devices", "n_gpu_layers", "tensor_split", "split_mode", "no_kv_offload")
    return predict(shape, **truth.settings(record), **{k: record[k] for k in keys}, **more)


@pytest.mark.parametrize("name", truth.named(DEVICE_RECORDS))
def test_every_device_holds_what_the_engine_put_there(
    name: str, shapes: dict[str, ModelShape]
) -> None:
    for record in (entry for entry in DEVICE_RECORDS if entry["name"] == name):
        estimate = on_devices(shapes[name], record)
        assert sum(device.total for device in estimate.devices) == estimate.total_bytes
        for kind, part in (
            ("model", "weights"),
            ("kv", "kv"),
            ("rs", "recurrent"),
            ("output", "output"),
        ):
            expected: Counter[str] = Counter()
            for device, size in record[kind].items():
                expected["host" if device.startswith("CPU") else f"gpu{device[3:]}"] += size
            held = {device.name: getattr(device, part) for device in estimate.devices}
            for device in held.keys() | expected.keys():
                assert printed(held.get(device, 0), expected[device], 0.03), (record, kind, device)


def test_repacked_matrices_are_those_that_the_engine_repacked(
    shapes: dict[str, ModelShape],
) -> None:
    shape = shapes["gemma-3-270m"]
    seen = set()
    for record in DEVICE_RECORDS:
        if record["name"] != "gemma-3-270m":
            continue
        on_host = shape.n_layer - max(0, min(record["n_gpu_layers"] - 1, shape.n_layer))
        repacked = repacked_bytes(shape.matrices, range(on_host), {"avx2"})
        assert printed(repacked, record["model"].get("CPU_REPACK", 0.0)), record
        seen.add(repacked)
    assert len(seen) > 2


def test_a_mapped_file_keeps_the_originals_of_repacked_matrices(
    shapes: dict[str, ModelShape],
) -> None:
    shape = shapes["gemma-3-270m"]
    plain = predict(shape, n_ctx=512, cpu_features=("avx2",), repack=False)
    repacked = predict(shape, n_ctx=512, cpu_features=("avx2",))
    read_in = predict(shape, n_ctx=512, cpu_features=("avx2",), mmap=False)
    assert printed(plain.weights_bytes, 235.16)
    assert printed(repacked.weights_bytes, 235.16 + 12.66, 0.02)
    assert read_in.weights_bytes == plain.weights_bytes
    assert [term.name for term in repacked.terms][:2] == ["weights", "weights held again"]


# Figures of real users' logs. Left out, by name, with what makes them differ from this engine:
OTHER_ENGINE = {
    "L007": "sliding blocks at full size: the caller had swa_full on",
    "L064": "sliding blocks at full size: ik_llama.cpp has no sliding cache",
    "L080": "ik_llama.cpp keeps the compressed cache for a file without the MLA key lengths",
    "L082": "ik_llama.cpp keeps the compressed cache for a file without the MLA key lengths",
    "L084": "an engine that still cached V for MLA models",
}
PUBLIC = {record["id"]: record for record in truth.records("public_records")}


def public_shape(record: dict[str, Any]) -> ModelShape:
    """Return the shape of a header with the facts that the record gives."""
    architecture = record["arch"] or "llama"
    other = record["other_hparams"]
    n_head = record["n_head"] or 32
    n_layer = other.get("n_layer_all", record["n_layer"])
    facts: dict[str, Any] = {
        "block_count": n_layer,
        "context_length": other.get("n_ctx_train", record["n_ctx"]),
        "embedding_length": other.get("n_embd", 4096),
        "attention.head_count": n_head,
        "attention.head_count_kv": record["n_head_kv"],
        "attention.key_length": record["head_dim_k"],
        "attention.value_length": record["head_dim_v"] or record["head_dim_k"],
        "attention.sliding_window": record["n_swa"] or None,
        "nextn_predict_layers": n_layer - record["n_layer"] or None,
        "shortconv.l_cache": other.get("shortconv.l_cache"),
        "attention.kv_lora_rank": other.get("n_lora_kv"),
        "attention.key_length_mla": other.get("n_embd_head_k_mla"),
        "attention.value_length_mla": other.get("n_embd_head_v_mla"),
        "attention.indexer.key_length": other.get("indexer_head_dim"),
        "rope.dimension_count": None if architecture != "glm-dsa" else 64,
    }
    if architecture == "glm-dsa":
        facts["context_length"] = 1048576  # the record leaves it out; GLM 5.2 was trained for it
    metadata = {f"{architecture}.{k}": v for k, v in facts.items() if v is not None}
    return shape_from_header({"general.architecture": architecture, **metadata}, ())


@pytest.mark.parametrize("record_id", sorted(PUBLIC.keys() - OTHER_ENGINE.keys()))
def test_public_records_are_met(record_id: str) -> None:
    record = PUBLIC[record_id]
    shape = public_shape(record)
    assert shape.rule == "exact", shape.notes
    estimate = predict(
        shape,
        n_ctx=record["n_ctx"],
        n_seq_max=record["n_seq_max"] or 1,
        kv_unified=bool(record["kv_unified"]),
        cache_type_k=record["type_k"],
        cache_type_v=record["type_v"] or record["type_k"],
        n_ubatch=record["n_ubatch"] or 512,
    )
    kinds: Counter[str] = Counter()
    for cache in estimate.caches:
        kinds[cache.kind] += cache.bytes
    main = kinds["full"]
    assert printed(main, record["engine_kv_mib"], 0.02), (estimate.caches, record)
    if record["swa_kv_mib"]:
        assert printed(kinds["sliding"], record["swa_kv_mib"])
    if record["recurrent_mib"]:
        assert printed(estimate.recurrent_bytes, record["recurrent_mib"])
    if "indexer_kv_mib" in record["other_hparams"]:
        assert printed(kinds["indexer"], record["other_hparams"]["indexer_kv_mib"])


def test_the_public_records_left_out_are_there() -> None:
    assert PUBLIC.keys() >= OTHER_ENGINE.keys()


def test_records_with_full_size_sliding_blocks_are_met_with_swa_full() -> None:
    for record_id in ("L007", "L064"):
        record = PUBLIC[record_id]
        estimate = predict(public_shape(record), n_ctx=record["n_ctx"], swa_full=True)
        assert estimate.kv_bytes == record["engine_kv_mib"] * MIB
