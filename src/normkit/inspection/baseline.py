"""What a model's norms are meant to be: declared by a file, or seen in a first run and held to from then on.

Some wirings are a bug in one model and the design of another: a norm on the branch only, one norm at two places, one
norm over all heads. No formula tells which; this file does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from normkit.inspection.result import Placement, Role
from normkit.spec import NormSpec


@dataclass(frozen=True, kw_only=True)
class DeclaredNorm:
    """What one norm is meant to be.

    Attributes:
        spec: What it computes.
        role: What it does there.
        features: Features a row, n: tells one head from all heads.
        calls: Calls in one forward pass: more than one where it is shared.
        dtype: Of what enters, as in "float32".
        output_dtype: Of what leaves.
    """

    spec: NormSpec
    role: Role
    features: int
    calls: int
    dtype: str
    output_dtype: str


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What a model is meant to be.

    Attributes:
        source: Where it is declared: the name of a file.
        norms: By path, in forward order.
        placements: Of the blocks, by path.
        final_norm: Path of the norm after the last block, or None.
    """

    source: str
    norms: Mapping[str, DeclaredNorm]
    placements: Mapping[str, Placement]
    final_norm: str | None
