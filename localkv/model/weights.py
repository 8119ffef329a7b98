"""Which part of the engine holds each tensor: the input, a block, the output.

Source: LLM_TENSOR_INFOS in src/llama-arch.cpp gives each tensor its layer and operation,
llama_model_loader::create_tensor in src/llama-model-loader.cpp places it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import gcd

from localkv.model.specs import Tensor
from localkv.tuples import NamedTuple

#: Tensors of the input layer, which stays on the host (LLM_TENSOR_LAYER_INPUT).
_INPUT = ("token_embd.", "token_types.", "position_embd.", "per_layer_token_embd.")
#: Tensors without a block's name that the engine places with the first block.
_FIRST_BLOCK = (
    "token_embd_norm.",
    "per_layer_model_proj.",
    "per_layer_proj_norm.",
    "hrm.",
    "conv1d.",
)
#: Tensors that every device with blocks holds once.
_EVERY_DEVICE = ("rope_freqs.", "rope_factors_")

#: What ``--cpu-moe`` and ``--n-cpu-moe`` hold back (LLM_FFN_EXPS_REGEX in common/common.h).
_EXPERTS = tuple(
    f".ffn_{part}_{kind}"
    for part in ("up", "down", "gate", "gate_up")
    for kind in ("exps", "chexps")
)

INPUT, OUTPUT, EVERY_DEVICE = -1, -2, -3
#: Rows of a tensor that repacking asks to divide by, at most.
_ROWS = 16


class MatrixGroup(NamedTuple):
    """Quantised matrices of one block (or OUTPUT), of one type, whose rows ``rows`` divides.

    ``experts``: they are those of experts, which can stay on the host while their block does not.
    """

    place: int
    type: str
    rows: int
    nbytes: int
    experts: bool = False


class WeightPlan(NamedTuple):
    """The bytes of a model's tensors by where the engine places them.

    ``blocks`` by number; ``input`` on the host; ``output`` with layer n + 1; ``every_device`` on
    each device that has blocks; ``tied`` are the token embeddings where they serve as the output
    too. ``matrices`` are those that a CPU may repack, see ``predict.repack``. ``experts`` are the
    bytes of expert tensors by block.
    """

    input: int
    blocks: dict[int, int]
    output: int
    every_device: int
    tied: int
    matrices: tuple[MatrixGroup, ...]
    experts: dict[int, int]


def plan_weights(tensors: Iterable[Tensor], *, lfm2: bool = False, ties: bool = True) -> WeightPlan:
    """Return where the tensors go.

    ``lfm2``: token_embd_norm is the norm of the output, under a wrong name. ``ties``: a file
    without output matrix uses the token embeddings as such.
    """
    sizes: dict[int, int] = defaultdict(int)
    experts: dict[int, int] = defaultdict(int)
    matrices: dict[tuple[int, str, int, bool], int] = defaultdict(int)
    embedding: Tensor | None = None
    untied = False
    for tensor in tensors:
        name = tensor.name
        place = OUTPUT if lfm2 and name.startswith("token_embd_norm.") else _place(name)
        sizes[place] += tensor.nbytes
        if _of_experts(name):
            experts[place] += tensor.nbytes
        if place >= 0 or place == OUTPUT:
            _note_matrix(matrices, place, tensor)
        if name == "token_embd.weight":
            embedding = tensor
        untied = untied or name == "output.weight"
    tied = embedding if ties and not untied else None
    if tied is not None:
        _note_matrix(matrices, OUTPUT, tied)
    return WeightPlan(
        input=sizes[INPUT],
        blocks={place: size for place, size in sizes.items() if place >= 0},
        output=sizes[OUTPUT],
        every_device=sizes[EVERY_DEVICE],
        tied=tied.nbytes if tied is not None else 0,
        matrices=tuple(
            MatrixGroup(place, kind, rows, nbytes, experts)
            for (place, kind, rows, experts), nbytes in matrices.items()
        ),
        experts=dict(experts),
    )


def _place(name: str) -> int:
    if name.startswith("blk."):
        number = name[4:].partition(".")[0]
        return int(number) if number.isdecimal() else OUTPUT
    if name.startswith(_INPUT):
        return INPUT
    if name.startswith(_FIRST_BLOCK):
        return 0
    if name.startswith(_EVERY_DEVICE):
        return EVERY_DEVICE
    # enc.blk.N., dec.blk.N., convnext.N., posnet.N.
    return next((int(part) for part in name.split(".") if part.isdecimal()), OUTPUT)


def _of_experts(name: str) -> bool:
    return "exps" in name and any(part in name for part in _EXPERTS)


def _note_matrix(
    matrices: dict[tuple[int, str, int, bool], int], place: int, tensor: Tensor
) -> None:
    shape, name = tensor.shape, tensor.name
    dims = len(shape) - shape.count(1)
    if dims == (3 if "_exps." in name else 2) and name.endswith(".weight"):
        matrices[place, tensor.type, gcd(shape[1], _ROWS), _of_experts(name)] += tensor.nbytes
