"""What one block of a model allocates while it is computed, by the kind of its parts.

The recipes (see ``compute_alloc``) list tensors that get memory of their own; norms, scales,
biases and activations that work in place are left out. ``x`` is the residual stream. Sources:
build_attn_mha, build_attn, build_ffn, build_moe_ffn in src/llama-graph.cpp and the files below
src/models of llama.cpp. Widths are those of ``compute_sizes``.
"""

from __future__ import annotations

import re


class Mode:
    """How attention runs.

    ``flash``: flash attention; ``rotate_k``, ``rotate_v``: K (and Q) or V are rotated, as quantised
    caches are; ``cast``: K and V are f32 and copied to f16 first; ``turn``: V lies in the cache as
    it came and is transposed first; ``cached``: there is a cache.
    """

    def __init__(
        self, flash: bool, *, rotate_k: bool, rotate_v: bool, cast: bool, turn: bool, cached: bool
    ) -> None:
        self.flash = flash
        self.rotate_k = rotate_k
        self.rotate_v = rotate_v
        self.cast = cast
        self.turn = turn
        self.cached = cached


#: Projections from the normed ``h``, in the order in which build_attn expands them (plain caches
#: Q, V, K; with a window Q, K, V), and the tensors that Q, K and V then are. The second Q and K are
#: those after rope or norm; what is cut out of a fused matrix stays part of it.
_PROJECTIONS = {
    "qvk": ("q Q: h; q Q: q; {q}; v V: h; {v}; k K: h; k K: k; {k}", "q", "k", "v"),
    "qkv": ("q Q: h; q Q: q; {q}; k K: h; k K: k; {k}; v V: h; {v}", "q", "k", "v"),
    "no rope": ("q Q: h; {q}; v V: h; {v}; k K: h; {k}", "q", "k", "v"),
    "fused": ("w QKV: h; q Q: w; {q}; k K: w; {k}; {v}", "q", "k", "w"),
    "fused, no rope": ("w QKV: h; {q}; {k}; {v}", "w", "w", "w"),
    # a gate as wide as Q comes out of the same matrix: qwen3next.cpp, qwen35.cpp
    "gated": ("w QQ: h; q Q: w; {q}; v V: h; {v}; k K: h; k K: k; {k}", "q", "k", "v"),
    "shared": ("q Q: h; q Q: q; {q}", "q", "", ""),
}


def attend(projections: str, mode: Mode, *, mask: str = "", bias: bool = False) -> str:
    """Return attention, from ``h`` to ``o``: build_attn without the last matrix.

    ``mask`` are steps that make another mask ``m``; ``bias``: a bias per pair of positions is
    added, which flash attention cannot do (T5).
    """
    steps, q, k, v = _PROJECTIONS[projections]
    turned = {"q": mode.rotate_k, "k": mode.rotate_k and k, "v": mode.rotate_v and v}
    names = {"q": q, "k": k, "v": v}
    steps = steps.format(
        **{
            part: f"{part} {part.upper()}: {names[part]}" if on else ""
            for part, on in turned.items()
        }
    )
    q, k, v = (part if turned[part] else names[part] for part in "qkv")
    written = f"-: {k}; -: {v}" if mode.cached and k else ""
    if mode.cached:
        k = v = ""
    made = " m" if mask else ""
    if bias:
        t = f"t VT: {v}; " if mode.turn else ""
        mixed = f"{t}s KQ: {q} {k}; p KQ: ; b KQ: p; -: s b; y O: s{' t' if t else ''}; o O: y"
    elif mode.flash and mode.cast:
        mixed = f"c KF: {k}; t VF: {v}; o O: {q} c t{made}"
    elif mode.flash:
        mixed = f"o O: {q}{made}"
    elif mode.turn:
        mixed = f"t VT: {v}; s KQ: {q} {k}; -: s{made}; y O: t s; o O: y"
    else:
        mixed = f"s KQ: {q}; -: s{made}; y O: s; o O: y"
    after = "o O: o;" if mode.rotate_v else ""
    if projections == "gated":
        after += "g Q: w; -: o g"
    return f"{steps}; {written}; {mask}; {mixed}; !:; {after}"


def latent(mode: Mode, *, choice: str = "", indexed: bool = False, rotated: bool = False) -> str:
    """Return MLA with absorbed projections, from ``h`` to ``o``: Q meets the latent K.

    ``choice``: the mask is rewritten for chosen tokens, "tokens" (deepseek32.cpp) or "pools" of
    them (glm5-next.cpp); ``indexed``: by an indexer of this block, otherwise by that of a block
    before; ``rotated``: its keys and queries are rotated.
    """
    first, then = "", _MASKED if choice else ""
    if choice == "pools":
        then = "i IQ: l; g IC: ; s IS: i g; a PW: s; b PW: ; c PW: a; -: c b; f PM: a; m FM: f"
    elif indexed:
        turn = "i IQ: i;" if rotated else ""
        first = "k IK: h; k IK: k; k IK: k; -: k;"
        then = f"i IQ: l; i IQ: i; {turn} w IH: h; w IH: w; {_SPARSE}"
    mask = " m" if choice else ""
    if mode.flash:
        cast, copies = ("e KF: ; t VF: ;", " e t") if mode.cast else ("", "")
        mixed = f"{cast} o QA: q{copies}{mask}; z O: o; o O: z"
    else:
        mixed = f"t VT: ; s KQ: q; -: s{mask}; y QA: s t; z O: y; o O: z"
    return (
        f"{first} l QL: h; q Q: l; n QA: q; p QR: q; q QC: n p;"
        f"c KC: h; n KL: c; p KR: c; k KC: n p; -: k; {then}; {mixed}; !:"
    )


#: Scores of the indexer become a mask: build_attn over llm_graph_input_attn_k_dsa.
_MASKED = "f FM: ; m FM: f"
_SPARSE = "s IS: i w; t TK: s; t TK: t; f FM: ; -: t; m FM: f"


def sparse(mode: Mode, projections: str, kind: str) -> str:
    """Return attention that an indexer narrows, from ``h`` to ``o``.

    "pooled": scores per head over blocks of four tokens (qwen4exp.cpp); "blocks": the mask of each
    KV head is spread from blocks to tokens (minimax-m3.cpp, with flash attention alone).
    """
    if kind == "pooled":
        chosen = f"g IP: ; i IQ: h; j IQ: i; s BS: j g; r BS: s; i IS: r; w IH: ; {_SPARSE}"
    elif mode.flash:
        chosen = "i IQ: h; j IQ: i; r MR: j; t MR: r; m MM: t"
    else:
        chosen = ""
    return attend(projections, mode, mask=chosen)


def compressed(mode: Mode, indexed: bool) -> str:
    """Return DeepSeek V4's attention, from ``h`` to ``o``: deepseek4.cpp."""
    chosen = (
        "i IQ: l; j IQ: i; k IQ: j; w IH: h; s LS: k w; t LS: s; f LM: ; -: t;" if indexed else ""
    )
    mixed = f"{chosen} o O: q" if mode.flash else f"p KQ: q; {chosen} y O: p; o O: y"
    return f"l QL: h; q Q: l; q Q: q; k K: h; k K: k; -: k; {mixed}; !:"


_WKV = (
    "r RS: ; s SW: ; c E: r h; m E6: c; q E: m; b E: m; k E: m; a E: m; t E: k; w E: k; v E: m;"
    "f E: k; j E: f; u E: j; l E: j; d SS: q b w v u l s; -: d; n E: d; g E: m; -: n g;"
)

_DELTA = (
    "r RS: ; w CV: h; c CX: r w; -: c; s SW: ; y CV: c; {q}; b DT: h; a DT: h;"
    "d SS: q k y b a s; -: d; n I: d; z I: h; v I: z; -: n v; o I: n"
)

#: Blocks with a state of fixed size, from ``h`` to ``o``: "r" and "s" are what the memory holds,
#: "c" the convolution's window over it. Sources: mamba-base.cpp, delta-net-base.cpp, lfm2.cpp,
#: rwkv7-base.cpp, kimi-linear.cpp and minimax-01.cpp below src/models.
STATE = {
    "mamba": "r RS: ; z ZM: h; c CX: r z; -: c; y CV: c; p XP: y; t DT: p; d I: t; s SS: y d p;"
    "-: s; v I: z; m I: y; -: m s; o I: v m",
    "mamba2": "r RS: ; z ZX: h; c CX: r z; -: c; y CV: c; t DT: z; s SS: y t; -: s; v I: z; m I: y;"
    "-: m s; g I: v m; o I: g",
    "delta": _DELTA.format(q="q G: y; k G: y"),
    # Q and K are repeated for each head of V
    "delta repeated": _DELTA.format(q="q G: y; q I: q; k G: y; k I: k"),
    "shortconv": "r RS: ; z E3: h; m E: z; c CX: r m; -: c; y CV: c; o E: z y",
    "wkv": _WKV + "o E: n",
    # the first block's V is kept for the others (z)
    "wkv7": f"z E: ; {_WKV} -: h z; o E: n",
    "kda": "r RS: ; q I: h; c CI: r q; k I: h; d CI: r k; v I: h; e CI: r v; s SW: ; q I: c;"
    "q I: q; q I: q; k I: d; k I: k; k I: k; v I: e; v I: v; g I: h; g I: g; g I: g;"
    "m SS: q k v g s; -: m; n I: m; n I: n; z I: h; z I: z; -: n z; o I: n",
    "lightning": "s SW: ; w QKV: h; -: w; v O: w; p LL: w; d LL: p; n O: v d; -: s; u O: w;"
    "o O: n u",
}

#: Feed-forward parts, from the normed ``n`` to ``d``: build_ffn.
DENSE = {
    "gated": "g F: n; u F: n; y F: g u; d E: y",
    "plain": "u F: n; d E: u",
    "fused": "u FF: n; y F: u; d E: y",
}

_SHARED = "; g S: n; u S: n; y S: g u; e E: y; -: d e"


def experts(
    *, gated: bool = True, shared: bool = False, merged: bool = False, biased: bool = False
) -> str:
    """Return a mixture of experts, from ``n`` to ``d``: build_moe_ffn, then shared experts.

    ``merged``: gate and up are one matrix; ``biased``: the choice of experts has a bias.
    """
    chosen = "b X: l; s X: b" if biased else "s X: l"
    inner = "g GG: n s; y GU: g" if merged else "g GU: n s; u GU: n s; y GU: g u"
    if not gated:
        inner = "y GU: n s"
    return (
        f"l X: n; {chosen}; w U: l s; {inner}; e EU: y s; -: e w; d E: e{_SHARED if shared else ''}"
    )


def block(attention: str, feed_forward: str, layout: str, *, kept: bool = False) -> str:
    """Return a whole block: how norms and residuals join attention and feed-forward.

    "pre": a norm before each part; "post": none before, one after (in place); "parallel": both
    from one norm, added together; "falcon": so too, from a norm each; "cohere": so too, the
    feed-forward before attention's last matrix; "streams": several residual streams
    (hyper-connections), mixed before and after each part; "altup": so too, around one that is
    computed (gemma3n). ``kept``: the sum goes into the stream's own memory, since what is added to
    it is only a view.
    """
    if not feed_forward and layout != "post":
        layout = "pre"
    if layout == "falcon":
        return (
            f"h E: x; {attention}; n E: x; {feed_forward}; a E: o; |: d a x; -: d a; -: d x; =: d"
        )
    if layout in ("parallel", "cohere"):
        feed_forward = _renamed(feed_forward, "n", "h")
    if layout == "parallel":
        return f"h E: x; {attention}; a E: o; |: a x h; {feed_forward}; -: a d; -: a x; =: a"
    if layout == "cohere":
        return f"h E: x; {attention}; |: o x h; {feed_forward}; -: d x; a E: o; -: d a; =: d"
    if layout == "altup":
        return (
            f"p HC: x; t HC: p; h E: t; {attention}; a E: o; l E: h; n E: a; {feed_forward};"
            "-: d l; -: d a; e E: d t; r HC: e; -: t r; c E: t; =: t"
        )
    if layout == "streams":
        after = f"n E: x; {feed_forward}; c HC: d x; =: c"
        return f"h E: x; {attention}; a E: o; c HC: a x; =: c; {after}"
    first, second = "h E: x;", "n E: x;"
    if layout == "post":
        first = second = ""
        attention = _renamed(attention, "h", "x")
        feed_forward = _renamed(feed_forward, "n", "x")
    after = f"{second} {feed_forward}; -: d x; =: d" if feed_forward else ""
    added = "x" if kept else "a"
    return f"{first} {attention}; a E: o; |: a x; -: a x; =: {added}; {after}"


def outputs_last(recipe: str) -> str:
    """Return ``recipe`` with the output rows picked after the block, not before its last part."""
    return re.sub(r"\|:[^;]*;", "", recipe) + "; |: x"


def _renamed(recipe: str, name: str, to: str) -> str:
    return re.sub(rf"\b{name}\b", to, recipe)
