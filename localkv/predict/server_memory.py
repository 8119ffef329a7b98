"""The host memory that llama-server takes beside its KV cache, and that no KV figure shows.

Prompt cache (``--cache-ram``): when a slot takes another prompt, or a request arrives while a slot
is idle, that slot's state is copied to host memory, together with its checkpoints.
Context checkpoints (``--ctx-checkpoints``): where a model's memory cannot be rolled back (sliding
windows, recurrent state), the server saves that part of it while it reads a prompt. Ollama's
runner is llama-server with these defaults.

Sources in tools/server of llama.cpp: server_prompt_cache in server-task.cpp; prompt_save,
get_available_slot, create_checkpoint and the loop over prompts of update_slots in
server-context.cpp. The size of a state is ``state_size``. A draft model's states come on top and
are not counted here; nor are the 4 bytes per token of an entry's text, which the server leaves out
of its own figures too.
"""

from __future__ import annotations

from typing import Any

from localkv.errors import UsageError
from localkv.model.shape import ModelShape
from localkv.predict.checks import effective_config
from localkv.predict.config import EffectiveContext, RunConfig, effective_context, validate
from localkv.predict.state_size import sequence_state_bytes
from localkv.tuples import NamedTuple
from localkv.units import MIB

#: What llama-server takes when nothing is said (common/common.h).
CACHE_RAM = 8192 * MIB
CTX_CHECKPOINTS = 32
CHECKPOINT_MIN_STEP = 8192
#: So many tokens before a prompt's end the last checkpoint is made.
_BEFORE_END = 4


class Checkpoint(NamedTuple):
    """A context checkpoint: what the server saves once ``n_tokens`` of a prompt are read."""

    n_tokens: int
    bytes: int


class ServerMemory(NamedTuple):
    """Host memory of a server for conversations of ``n_tokens`` tokens; sizes in bytes.

    ``slots`` is n_seq_max, ``n_ctx`` the tokens of all slots. ``cache_ram`` is the limit of the
    prompt cache, 0: there is none, None: no limit in bytes. ``rolls_back`` says that the model
    needs no checkpoints; ``ctx_checkpoints`` is how many a slot keeps at most. ``state_bytes`` is
    a conversation's state without checkpoints, ``checkpoint_bytes`` the largest single checkpoint,
    ``checkpoints`` those that one prompt of ``n_tokens`` tokens leaves. Sizes are None where
    ``unknown`` says why.
    """

    n_tokens: int
    slots: int
    n_ctx: int
    cache_ram: int | None
    ctx_checkpoints: int
    checkpoint_min_step: int
    rolls_back: bool
    state_bytes: int | None
    checkpoint_bytes: int | None
    checkpoints: tuple[Checkpoint, ...] = ()
    unknown: str = ""

    @property
    def entry_bytes(self) -> int | None:
        """Return a prompt-cache entry: the state and the checkpoints of one prompt."""
        if self.state_bytes is None:
            return None
        return self.state_bytes + sum(point.bytes for point in self.checkpoints)

    @property
    def entry_bytes_most(self) -> int | None:
        """Return the entry after many turns, when the slot holds all the checkpoints it may."""
        if self.state_bytes is None or self.slot_bytes is None:
            return None
        return self.state_bytes + self.slot_bytes

    @property
    def chat_checkpoints(self) -> int:
        """Return the most checkpoints that one chat of ``n_tokens`` tokens leaves when it is read.

        One at the first user message and at each that begins more than ``checkpoint_min_step``
        tokens after the checkpoint before it, one at the last, and the two before the end.
        """
        apart = 1 + max(self.n_tokens - 2, 0) // (self.checkpoint_min_step + 1)
        return min(apart + 3, self.ctx_checkpoints)

    @property
    def slot_bytes(self) -> int | None:
        """Return the most that the checkpoints of one slot take."""
        return _times(self.checkpoint_bytes, self.ctx_checkpoints)

    @property
    def slots_bytes(self) -> int | None:
        """Return the most that the checkpoints of all slots take."""
        return _times(self.slot_bytes, self.slots)

    @property
    def conversations_warm(self) -> int | None:
        """Return how many conversations stay in the prompt cache, with one prompt's checkpoints."""
        return self._warm(self.entry_bytes)

    @property
    def conversations_warm_least(self) -> int | None:
        """Return how many stay when each has as many checkpoints as it may."""
        return self._warm(self.entry_bytes_most)

    @property
    def total_bytes_most(self) -> int | None:
        """Return the bound of both together: all slots' checkpoints and a full prompt cache.

        None where the prompt cache has no limit in bytes, or the sizes are unknown.
        """
        if self.slots_bytes is None or self.cache_ram is None:
            return None
        return self.slots_bytes + self.cache_ram

    def _warm(self, entry: int | None) -> int | None:
        if entry is None:
            return None
        if self.cache_ram == 0 or entry == 0:
            return 0
        if self.cache_ram is None:  # then the entries' tokens together may not exceed n_ctx
            return self.n_ctx // self.n_tokens
        return self.cache_ram // entry

    def flags(self) -> dict[str, str]:
        """Return how each program is told these limits: options, or environment for Ollama."""
        settings = [("CACHE_RAM", -1 if self.cache_ram is None else self.cache_ram // MIB)]
        if not self.rolls_back:
            settings.append(("CTX_CHECKPOINTS", self.ctx_checkpoints))
        return {
            "llama-server": " ".join(
                f"--{name.lower().replace('_', '-')} {value}" for name, value in settings
            ),
            "ollama": " ".join(f"LLAMA_ARG_{name}={value}" for name, value in settings),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain JSON values."""
        return {
            "n_tokens": self.n_tokens,
            "slots": self.slots,
            "state_bytes": self.state_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "checkpoints": [point._asdict() for point in self.checkpoints],
            "chat_checkpoints": self.chat_checkpoints,
            "entry_bytes": self.entry_bytes,
            "entry_bytes_most": self.entry_bytes_most,
            "ctx_checkpoints": self.ctx_checkpoints,
            "checkpoint_min_step": self.checkpoint_min_step,
            "slot_bytes": self.slot_bytes,
            "slots_bytes": self.slots_bytes,
            "cache_ram_bytes": self.cache_ram,
            "token_limit": self.n_ctx if self.cache_ram is None else None,
            "conversations_warm": self.conversations_warm,
            "conversations_warm_least": self.conversations_warm_least,
            "total_bytes_most": self.total_bytes_most,
            "flags": self.flags(),
            "unknown": self.unknown or None,
        }


def server_memory(
    shape: ModelShape,
    config: RunConfig,
    *,
    cache_ram: int = CACHE_RAM,
    ctx_checkpoints: int = CTX_CHECKPOINTS,
    checkpoint_min_step: int = CHECKPOINT_MIN_STEP,
    n_tokens: int | None = None,
) -> ServerMemory:
    """Return the host memory that llama-server takes for conversations of ``n_tokens`` tokens.

    ``cache_ram`` is in bytes, 0 turns the prompt cache off, below 0 lifts its limit;
    ``n_tokens`` None means each slot's share of the context.

    Raises:
        UsageError: more tokens than a slot holds (its share of the context, and no more than the
            training context), or a setting that the engine refuses.
    """
    if checkpoint_min_step < 0:
        raise UsageError(
            "checkpoint_min_step must not be negative", "0 sets no distance between checkpoints"
        )
    config = effective_config(shape, validate(config))
    context = effective_context(config, shape.n_ctx_train, causal=shape.causal)
    tokens = _tokens(n_tokens, shape, config, context)
    unknown = _unknown(shape)
    rolls_back = not makes_checkpoints(shape, config)
    most = 0 if rolls_back else max(ctx_checkpoints, 0)
    points: tuple[Checkpoint, ...] = ()
    if not unknown and most:
        points = _checkpoints(shape, config, context, tokens)[-most:]
    return ServerMemory(
        n_tokens=tokens,
        slots=config.n_seq_max,
        n_ctx=context.n_ctx,
        cache_ram=None if cache_ram < 0 else cache_ram,
        ctx_checkpoints=most,
        checkpoint_min_step=checkpoint_min_step,
        rolls_back=rolls_back,
        state_bytes=None if unknown else _state(shape, config, context, tokens),
        checkpoint_bytes=None if unknown else _largest(shape, config, context, tokens, most),
        checkpoints=points,
        unknown=unknown,
    )


def makes_checkpoints(shape: ModelShape, config: RunConfig) -> bool:
    """Return whether llama-server makes context checkpoints of this model.

    It does where tokens cannot be taken back (recurrent state, DeepSeek V4's compressors) and
    where the model declares a sliding window, unless ``swa_full`` keeps the whole of it.
    """
    if any(layer.state_width for layer in shape.layers):
        return True
    if any(cache.kind == "state" for cache in shape.caches):
        return True
    return bool(_declared_window(shape)) and not config.swa_full


def _declared_window(shape: ModelShape) -> int:
    """Return llama_model_n_swa, which for small EXAONE 4 is a window that no layer uses."""
    if shape.architecture == "exaone4" and not shape.window:
        window = shape.numbers.get("attention.sliding_window", 0)
        return window if isinstance(window, int) else 0
    return shape.window


def prompt_checkpoints(n_prompt: int, n_batch: int, n_ubatch: int) -> tuple[int, ...]:
    """Return after how many tokens of a prompt of ``n_prompt`` checkpoints are made.

    A prompt without chat messages that reaches an empty slot: one a micro-batch and four tokens
    before its end, one four tokens before it. A chat adds one where its last user message starts,
    and at starts of earlier user messages more than ``--checkpoint-min-step`` apart.
    """
    offsets = (min(n_batch, _BEFORE_END + n_ubatch), min(n_batch, _BEFORE_END))
    # A micro-batch of four tokens or fewer leaves the first too far from the end to count.
    made = offsets if n_ubatch > _BEFORE_END else offsets[1:]
    return tuple(n_prompt - offset for offset in made if offset < n_prompt)


def _state(shape: ModelShape, config: RunConfig, context: EffectiveContext, n_tokens: int) -> int:
    """Return the state of a conversation; 0 where the model keeps none, so that none is saved."""
    if not shape.caches and not any(layer.state_width for layer in shape.layers):
        return 0
    return sequence_state_bytes(shape, config, context, n_tokens)


def _checkpoints(
    shape: ModelShape, config: RunConfig, context: EffectiveContext, n_prompt: int
) -> tuple[Checkpoint, ...]:
    return tuple(
        Checkpoint(at, sequence_state_bytes(shape, config, context, at, partial=True))
        for at in prompt_checkpoints(n_prompt, context.n_batch, context.n_ubatch)
    )


def _largest(
    shape: ModelShape, config: RunConfig, context: EffectiveContext, n_tokens: int, most: int
) -> int:
    """Return the size of the largest checkpoint in a conversation of ``n_tokens``, 0 for none."""
    if not most:
        return 0
    # A chunked window is largest at the end of a chunk.
    at = n_tokens
    if shape.window and n_tokens >= shape.window:
        at = n_tokens - n_tokens % shape.window
    return sequence_state_bytes(shape, config, context, at, partial=True)


def _tokens(
    n_tokens: int | None, shape: ModelShape, config: RunConfig, context: EffectiveContext
) -> int:
    """Return the conversation's tokens; None: a slot's share, as large as the server lets it be."""
    most = min(context.n_ctx_seq, shape.n_ctx_train or context.n_ctx_seq)
    if n_tokens is None:
        share = context.n_ctx // config.n_seq_max if config.kv_unified else context.n_ctx_seq
        return min(share, most)
    if not 1 <= n_tokens <= most:
        trained = ", as the model was trained" if most < context.n_ctx_seq else ""
        raise UsageError(
            f"a conversation of {n_tokens} tokens: a slot holds 1 to {most}{trained}",
            "give a larger context, or shorter conversations",
        )
    return n_tokens


def _unknown(shape: ModelShape) -> str:
    if shape.rule != "exact":
        return f"localkv has no rule for the architecture {shape.architecture}"
    return ""


def _times(size: int | None, count: int) -> int | None:
    return None if size is None else size * count
