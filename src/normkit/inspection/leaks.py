"""Rows that move when others, which they should not know of, are changed: samples, later tokens, padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Leak:
    """One way in which rows know of each other.

    Attributes:
        kind: Changed were another sample of the batch, later tokens of a causal model, or the content of padding.
        mode: The model was in "evaluation" or "training" mode.
        path: First norm in forward order whose output moved while its input had not, or "" if only the model's did.
        change: Largest difference of the output there over its largest magnitude.
    """

    kind: Literal["batch", "time", "padding"]
    mode: Literal["evaluation", "training"]
    path: str
    change: float
