"""The gains and biases of norms among named tensors: found by the tensors beside them first, by their names second."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from normkit.checkpoint.plan import FLOATS
from normkit.checkpoint.reader import TensorInfo

GAINS = ("weight", "gamma", "scale", "g", "gain")
BIASES = ("bias", "beta", "b", "offset")

LONGEST = 2**20
"""The most numbers of a gain: a longer vector belongs to something else."""

LEAST_WITHOUT_NAME = 16
"""The fewest numbers of a tensor (1, 1, n) that is a gain without a norm's name: a convolution's kernel is shorter."""

# One word of a name says that it is a norm: input_layernorm, ln_1, q_norm, LayerNorm, norm1, rmsnorm, ffn_norm.
_NORM = re.compile(r"norm|(?:^|[._])ln(?:[._\d]|$)|(?:^|_)ln$|(?:^|[._])[a-z]+_ln(?:[._]|$)", re.IGNORECASE)

_NOT_NORMS = {
    re.compile(r"layer_?scale|(?:^|\.)ls\d*(?:\.|$)|lambda_?\d*$|gamma_\d$", re.IGNORECASE): "scale of a branch",
    re.compile(r"(?:^|\.)(?:A_log|D|dt_bias|conv1d)(?:\.|$)"): "parameter of a state-space layer",
    re.compile(r"(?:^|[._])(?:act|prelu|snake|activation)\w*(?:\.|$)", re.IGNORECASE): "parameter of an activation",
    re.compile(r"(?:^|[._])(?:router|logit_scale|inv_freq|sinks?|e_score_correction_bias|embed\w*)$"): "no norm's name",
    re.compile(r"(?:input|weight|output|k|v)_scale(?:_inv|_2)?$|(?:^|\.)scales$|zero_point"): "scale of a quantization",
    re.compile(r"(?:^|[._])(?:rotary|rope)\w*(?:\.|$)|relative_attention", re.IGNORECASE): "of positions",
}


@dataclass(frozen=True, kw_only=True)
class NormTensors:
    """The tensors of one norm."""

    path: str
    """The path of the norm: the common part of the names of its tensors."""
    weight: str | None
    """Name of the gain."""
    bias: str | None
    """Name of the bias."""
    shape: tuple[int, ...]
    """Shape of the gain, or of the bias if there is no gain."""
    is_named: bool
    """The name says that it is a norm; else only the tensors beside it do."""


@dataclass(frozen=True, kw_only=True)
class Sorted:
    """The tensors of a model, sorted by what they are."""

    norms: tuple[NormTensors, ...]
    """In the source's order."""
    left_out: Mapping[str, str]
    """Name of a vector that could be taken for a norm's -> why it is not."""
    others: tuple[str, ...]
    """Names of all other tensors."""


def norm_tensors(tensors: Mapping[str, TensorInfo]) -> Sorted:
    """Find the gains and biases of norms among named tensors.

    A norm is a path with a vector called weight, gamma, scale, g or gain below it, and perhaps one called bias, beta or
    b of the same size, and no matrix. Where the path says norm or ln, a gain for each head, of two axes, is a norm's
    too. A vector with such a path but without a further name, as in "blocks.3.norm1", is a gain. A vector may be stored
    with axes of one number, as (1, 1, n) or, in an image model's norm, (1, n, 1, 1).

    Example:
        >>> shapes = {"ln_f.weight": (8,), "ln_f.bias": (8,), "lm_head.weight": (50, 8), "lm_head.bias": (50,)}
        >>> found = norm_tensors({name: TensorInfo("F32", shape) for name, shape in shapes.items()})
        >>> [(norm.path, norm.weight, norm.bias) for norm in found.norms], found.others
        ([('ln_f', 'ln_f.weight', 'ln_f.bias')], ('lm_head.weight', 'lm_head.bias'))
    """
    below: dict[str, dict[str, str]] = defaultdict(dict)
    for name in tensors:
        path, role = _parted(name)
        below[path][role] = name
    found, left_out, taken = [], {}, set()
    for path, held in below.items():
        gain = next((held[role] for role in GAINS if role in held), None)
        bias = next((held[role] for role in BIASES if role in held), None)
        first = gain or bias
        is_named = bool(_NORM.search(path))
        shapes = {name: _vector(tensors[name].shape, is_named=is_named) for name in held.values()}
        if first is None or any(len(shape) > 2 for shape in shapes.values()):
            continue
        shape = shapes[first]
        is_matrix = any(len(shape) == 2 for shape in shapes.values())
        is_per_head = is_named and len({*shapes.values()}) == 1
        if not shape or (is_matrix and not is_per_head) or (gain is None and not is_named):
            continue
        reason = _against(path, first, tensors[first], is_named=is_named)
        if reason:
            left_out[first] = reason
            continue
        if bias is not None and shapes[bias] != shape:
            bias = None
        found.append(NormTensors(path=path, weight=gain, bias=bias, shape=shape, is_named=is_named))
        taken |= {name for name in (gain, bias) if name is not None}
    others = tuple(name for name in tensors if name not in taken and name not in left_out)
    return Sorted(norms=tuple(found), left_out=left_out, others=others)


def _vector(shape: tuple[int, ...], *, is_named: bool) -> tuple[int, ...]:
    """The shape of what may be a gain, without axes of one number that only make it fit its rows.

    Two axes are those of a matrix, and three of a convolution, unless a norm's name is above or only the last is long.
    """
    sizes = tuple(size for size in shape if size > 1)
    only_last = len(shape) > 2 and math.prod(shape[:-1]) == 1 and shape[-1] >= LEAST_WITHOUT_NAME
    return sizes if len(sizes) == 1 and (is_named or only_last) else shape


def _parted(name: str) -> tuple[str, str]:
    """A tensor's path and role: "h.0.ln_1" and "weight"; "blocks.3.norm1" alone is a gain."""
    path, _, role = name.replace("/", ".").rpartition(".")
    if path and role in (*GAINS, *BIASES):
        return path, role
    whole = f"{path}.{role}" if path else role
    for end in (*GAINS[:3], *BIASES[:2]):
        if whole.endswith(f"_{end}") and _NORM.search(whole.removesuffix(f"_{end}")):
            return whole.removesuffix(f"_{end}"), end
    return (whole, "weight") if _NORM.search(role) else (path, role)


def _against(path: str, name: str, info: TensorInfo, *, is_named: bool) -> str:
    """Why the tensor is not a norm's, or ""."""
    for pattern, reason in _NOT_NORMS.items():
        if not is_named and (pattern.search(path) or pattern.search(name)):
            return reason
    if info.dtype not in FLOATS:
        return f"its numbers are {info.dtype}"
    count = math.prod(info.shape)
    if count > LONGEST:
        return f"it has {count:,} numbers"
    return "it has one number" if count < 2 else ""
