"""What Ollama will think of a model before it loads it, beside what the model really needs.

Ollama's scheduler knows the file's size and three numbers of the header. It is blind to head_dim,
sliding windows, MLA, recurrent layers and cache types, and its belief decides how many GPUs a
model is spread over, how much is batched, and whether other models are put out.

Sources (0.33 line): PredictServerVRAM and memoryParsingWriter in llm/llama_server.go;
automaticGenerationBatch, bestSingleGPUFit, load and disableMmapDefaultReason in server/sched.go;
Serve in server/routes.go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localkv.errors import UsageError
from localkv.model.shape import ModelShape
from localkv.predict.config import RunConfig
from localkv.predict.defaults import OLLAMA_NUM_CTX, OLLAMA_SINGLE, ollama_batch, run_config
from localkv.predict.estimate import Estimate
from localkv.predict.offload import most_layers
from localkv.predict.predict import estimate
from localkv.tuples import NamedTuple
from localkv.units import GIB, MIB, format_bytes

#: num_ctx where nobody names one, by the VRAM of all GPUs together.
_NUM_CTX_BY_VRAM = ((47 * GIB, 262_144), (23 * GIB, 32_768))
#: Ollama plans with this part of the free memory, in percent.
HEADROOM = 80
#: Batch -> what it is believed to cost, and the percentage of the free memory that the belief may
#: take for it.
_BATCHES = {2048: (2 * GIB, 60), 1024: (768 * MIB, 75)}
_SMALLEST_BATCH = 512
#: Bytes of one element of K and one of V in f16.
_F16_K_AND_V = 4


class Gpu(NamedTuple):
    """A GPU's memory in bytes."""

    total: int
    free: int


class Belief(NamedTuple):
    """What Ollama's scheduler believes, in bytes: the file as weights, the textbook KV in f16."""

    weights: int
    kv: int
    surcharge: int

    @property
    def total(self) -> int:
        """Return all of it, in bytes."""
        return self.weights + self.kv + self.surcharge


class OllamaPlan(NamedTuple):
    """What Ollama will do with a model, what it believes, and what is true; bytes throughout.

    ``num_ctx`` are tokens per request and ``parallel`` requests at a time, as they come out;
    ``true`` is the prediction for the settings that Ollama chooses. ``ps_bytes`` is the size that
    /api/ps and ``ollama ps`` will show, None with ``ps_why`` where it cannot be said.
    ``gpu_layers`` of ``n_layers`` fit (the output counts as one), None without a GPU.
    ``evicts`` says that other loaded models are put out first. ``notes`` are the consequences.
    """

    num_ctx: int
    parallel: int
    n_batch: int
    mmap: bool
    gpus_used: int
    gpu_layers: int | None
    n_layers: int
    belief: Belief
    true: Estimate
    ps_bytes: int | None
    ps_why: str
    evicts: bool | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, the prediction's sums alone."""
        return {
            "num_ctx": self.num_ctx,
            "parallel": self.parallel,
            "n_batch": self.n_batch,
            "mmap": self.mmap,
            "gpus_used": self.gpus_used,
            "gpu_layers": self.gpu_layers,
            "n_layers": self.n_layers,
            "believed": {**self.belief._asdict(), "total": self.belief.total},
            "true": {
                "weights": self.true.weights_bytes,
                "kv": self.true.kv_bytes if self.true.known else None,
                "total": self.true.total_bytes if self.true.known else None,
            },
            "ps_bytes": self.ps_bytes,
            "ps_why": self.ps_why or None,
            "evicts": self.evicts,
            "notes": list(self.notes),
        }


def ollama_plan(
    shape: ModelShape,
    *,
    num_ctx: int | None = None,
    parallel: int = 1,
    gpus: Sequence[Gpu] = (),
    **settings: Any,
) -> OllamaPlan:
    """Return what Ollama of the 0.33 line will do with ``shape``, and what it will believe.

    ``num_ctx`` is what the request, the Modelfile or OLLAMA_CONTEXT_LENGTH says, None where none
    of them does; ``parallel`` is OLLAMA_NUM_PARALLEL; ``gpus`` are those that Ollama would use.
    ``settings`` are further fields of :class:`RunConfig` (cache types, flash attention, CPU
    features).

    Raises:
        UsageError: a setting is out of range, or the engine refuses it.
    """
    if parallel < 1:
        raise UsageError("OLLAMA_NUM_PARALLEL must be at least 1", "leave it away for 1")
    slots = parallel if shape.causal else 1
    asked = num_ctx or num_ctx_by_vram(sum(gpu.total for gpu in gpus))
    config = run_config("ollama", shape, n_ctx=asked, n_seq_max=slots, **settings)
    chosen, belief, batch = _believed(shape, config.n_ctx, gpus)
    config, layers = _placed(shape, config.with_(n_batch=batch, n_ubatch=batch), chosen)
    true = estimate(shape, config)
    told, ps_why = ps_bytes(shape, true, layers)
    free = sum(gpu.free for gpu in chosen)
    plan = OllamaPlan(
        num_ctx=config.n_ctx // config.n_seq_max,
        parallel=config.n_seq_max,
        n_batch=batch,
        mmap=config.mmap,
        gpus_used=len(chosen),
        gpu_layers=layers,
        n_layers=shape.n_layer + 1,
        belief=belief,
        true=true,
        ps_bytes=told,
        ps_why=ps_why,
        evicts=belief.total > free * HEADROOM // 100 if gpus else None,
        notes=(),
    )
    return plan._replace(notes=tuple(_notes(shape, plan, num_ctx, parallel, gpus)))


def _believed(
    shape: ModelShape, cells: int, gpus: Sequence[Gpu]
) -> tuple[tuple[Gpu, ...], Belief, int]:
    """Return the GPUs that are chosen on belief, the belief, and the batch that follows."""
    bare = Belief(shape.file_bytes, believed_kv(shape, cells), 0)
    chosen = _one_gpu(bare.total, gpus) or tuple(gpus)
    batch = _batch(cells, bare.total, sum(gpu.free for gpu in chosen))
    surcharge = _BATCHES[batch][0] if batch in _BATCHES else 0
    return chosen, bare._replace(surcharge=surcharge), batch


def num_ctx_by_vram(vram: int) -> int:
    """Return num_ctx where nobody names one; ``vram`` is that of all GPUs together, in bytes."""
    return next((tokens for least, tokens in _NUM_CTX_BY_VRAM if vram >= least), OLLAMA_NUM_CTX)


def believed_kv(shape: ModelShape, cells: int) -> int:
    """Return the KV cache that the scheduler expects for ``cells`` tokens in all, in bytes.

    2 x blocks x fewest KV heads x (embedding / most heads) x cells x 2 bytes, from the header as
    it is: a key that it lacks counts as 1, and a block without KV heads makes the fewest 1.
    """
    blocks = _numbers(shape, "block_count", shape.n_layer)[0]
    fewest = min(_numbers(shape, "attention.head_count_kv", 1)) or 1
    most = max(_numbers(shape, "attention.head_count", 1))
    width = _numbers(shape, "embedding_length", shape.n_embd)[0] // most if most else 0
    return _F16_K_AND_V * blocks * fewest * width * cells


def _numbers(shape: ModelShape, key: str, default: int) -> tuple[int, ...]:
    value = shape.numbers.get(key, default)
    return value if isinstance(value, tuple) else (value,)


def _one_gpu(believed: int, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the freest GPU that the belief fits on with headroom; none: it is spread."""
    fitting = [gpu for gpu in gpus if believed <= gpu.free * HEADROOM // 100]
    return (max(fitting, key=lambda gpu: gpu.free),) if fitting else ()


def _batch(n_ctx: int, believed: int, free: int) -> int:
    """Return the batch for ``n_ctx`` tokens in all, smaller where memory seems short."""
    batch = ollama_batch(n_ctx)
    while batch > _SMALLEST_BATCH and free:
        surcharge, percent = _BATCHES[batch]
        roomy = believed + surcharge <= free * HEADROOM // 100
        if roomy and believed <= free * percent // 100:
            break
        batch //= 2
    return batch


def _placed(
    shape: ModelShape, config: RunConfig, gpus: tuple[Gpu, ...]
) -> tuple[RunConfig, int | None]:
    """Return ``config`` with as many layers on ``gpus`` as llama-server itself fits there."""
    if not gpus:
        # Without a GPU the file is read into memory instead of mapped.
        return config.with_(mmap=False, n_gpu_layers=0), None
    config = config.with_(n_devices=len(gpus), device_free=tuple(gpu.free for gpu in gpus))
    layers = most_layers(shape, config)
    return config.with_(n_gpu_layers=layers), layers


def ps_bytes(shape: ModelShape, true: Estimate, layers: int | None) -> tuple[int | None, str]:
    """Return the size in /api/ps, or why it cannot be said.

    Ollama adds up the buffer lines of the log and keeps one line per device and kind: of a model
    with two caches the first one's line is overwritten. With all layers on GPUs it leaves the
    host's buffers out.
    """
    if not true.known:
        return None, "the caches of this architecture are not known"
    if layers is not None and layers <= shape.n_layer:
        return None, "with layers on both sides Ollama corrects for parts of the file mapped twice"
    if layers is not None and true.config["n_devices"] > 1:
        return None, "which caches share a device is not told apart here"
    counted = true.devices if layers is None else true.devices[1:]
    lost = sum(cache.bytes for cache in true.caches[:-1])
    return sum(device.total for device in counted) - lost, ""


def _notes(
    shape: ModelShape,
    plan: OllamaPlan,
    num_ctx: int | None,
    parallel: int,
    gpus: Sequence[Gpu],
) -> list[str]:
    said = [
        *_context_notes(shape, plan, num_ctx, gpus),
        *_parallel_notes(shape, plan, parallel),
        *_belief_notes(plan, gpus),
    ]
    if plan.ps_bytes is not None and len(plan.true.caches) > 1:
        lost = plan.true.caches[:-1]
        kinds = " and ".join(cache.kind for cache in lost)
        size = format_bytes(sum(cache.bytes for cache in lost))
        said.append(f"ollama ps will not count the {kinds} layers' cache, {size}")
    if plan.gpu_layers is not None and plan.gpu_layers < plan.n_layers:
        left = plan.n_layers - plan.gpu_layers
        said.append(f"the CPU keeps {left} of {plan.n_layers} layers, and is slower")
    return said


def _context_notes(
    shape: ModelShape, plan: OllamaPlan, num_ctx: int | None, gpus: Sequence[Gpu]
) -> list[str]:
    said = []
    if num_ctx is None:
        vram = sum(gpu.total for gpu in gpus)
        chosen = num_ctx_by_vram(vram)
        said.append(
            f"num_ctx is not set: Ollama takes {chosen} for {format_bytes(vram)} of VRAM in all, "
            "whatever the model needs"
        )
    asked = num_ctx or num_ctx_by_vram(sum(gpu.total for gpu in gpus))
    if asked > plan.num_ctx:
        said.append(f"num_ctx is cut to {plan.num_ctx}, the context {shape.name} was trained for")
    return said


def _parallel_notes(shape: ModelShape, plan: OllamaPlan, parallel: int) -> list[str]:
    if plan.parallel == parallel:
        return []
    who = (
        shape.architecture if shape.architecture in OLLAMA_SINGLE else "a model without generation"
    )
    return [f"OLLAMA_NUM_PARALLEL={parallel} counts as 1: Ollama gives {who} one request at a time"]


def _belief_notes(plan: OllamaPlan, gpus: Sequence[Gpu]) -> list[str]:
    if not plan.true.known:
        return []
    said = []
    believed, true = plan.belief.kv, plan.true.kv_bytes + plan.true.recurrent_bytes
    if believed != true:
        ratio = f", {believed / true:.1f} times as much" if true and believed > true else ""
        said.append(
            f"Ollama's scheduler expects {format_bytes(believed)} of KV cache{ratio}; "
            f"it will be {format_bytes(true)}"
        )
    if plan.evicts:
        fits = plan.true.total_bytes <= sum(gpu.free for gpu in gpus)
        told = "although it would fit" if fits else "and it does not fit either way"
        said.append(f"other loaded models are put out first, {told}")
    if plan.gpus_used > 1 and any(plan.true.total_bytes <= gpu.free for gpu in gpus):
        said.append(f"the model is spread over {plan.gpus_used} GPUs, although one would hold it")
    usual = ollama_batch(plan.num_ctx * plan.parallel)
    if plan.n_batch < usual:
        said.append(
            f"batches are {plan.n_batch} tokens instead of {usual}: prompts are read slower"
        )
    return said
