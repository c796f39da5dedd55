"""Norms of a port that no name makes norms: vectors that hold what a norm of the reference holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from normkit.checkpoint.plan import FLOATS
from normkit.comparison.parameter_pairs import TensorPair
from normkit.comparison.parameters import NormTensors
from normkit.comparison.relations import EVIDENCE, evidence, relation
from normkit.comparison.runtimes import convention
from normkit.comparison.weights import Weights

# Pairs of vectors that are looked at; no model has as many, a file made to hurt may.
_MOST_PAIRS = 100_000

_NEAR = 2.0**-7
"""Twice the rounding of bfloat16: what is further apart is not looked at closely."""


def renamed(
    port: Weights,
    reference: Weights,
    norms: Sequence[NormTensors],
    vectors: Sequence[str],
    read: tuple[Callable[[str], Tensor], Callable[[str], Tensor]],
) -> list[TensorPair]:
    """Norms of the reference, and the vector of the port that holds the gain of each as the port's runtime stores it.

    A vector is a counterpart if it alone holds the gain, exactly or rounded, and the gain is no vector that another
    would meet by chance: constant ones, as of norms that were never trained, have no counterpart.

    Args:
        port: The parameters of the port.
        reference: Those of the reference.
        norms: The reference's norms that have no counterpart.
        vectors: Names of the port's tensors that are not known to be of norms.
        read: The values of a tensor by its name, of the port and of the reference, in float64, shape (n,).
    """
    tensors, there = port.source.tensors, reference.source.tensors
    vectors = [name for name in vectors if tensors[name].dtype in FLOATS and len(tensors[name].shape) == 1]
    if len(norms) * len(vectors) > _MOST_PAIRS:
        return []

    def holds(name: str, norm: NormTensors, role: str) -> bool:
        wanted = getattr(norm, role)
        if math.prod(tensors[name].shape) != math.prod(there[wanted].shape):
            return False
        conventions = convention(port, name), convention(reference, norm.path)
        added = 0.0
        if role == "weight" and conventions[0] is not None and conventions[1] is not None:
            added = conventions[1].adds - conventions[0].adds
        given, expected = read[0](name), read[1](wanted)
        stored = expected + added
        if not bool(((given - stored).abs() <= _NEAR * stored.abs()).all()):
            return False
        found = relation(given, expected, tensors[name].dtype, there[wanted].dtype)
        is_told = evidence(expected, torch.zeros_like(expected)) >= EVIDENCE
        return is_told and (found.kind, found.constant or 0.0) == ("offset" if added else "equal", added)

    made = []
    for norm in norms:
        chosen = {}
        for role in ("weight", "bias"):
            fitting = [name for name in vectors if getattr(norm, role) and holds(name, norm, role)]
            chosen[role] = fitting[0] if len(fitting) == 1 else None
        first = chosen["weight"] or chosen["bias"]
        if first is not None:
            own = NormTensors(path=first, shape=tensors[first].shape, is_named=False, **chosen)
            made.append(TensorPair(norm=own, reference=norm, paired_by="values"))
            vectors = [name for name in vectors if name not in chosen.values()]
    return made
