"""How what arms measured at several depths grows with the depth: the exponent that theory speaks of."""

from __future__ import annotations

import math
from collections.abc import Callable

from normkit.study.result import Paired
from normkit.study.statistics import slope

_DEEP = 12

Statistic = Callable[[Paired], float]


def exponent(name: str, quantity: str, power: float = 1.0) -> Statistic:
    """The statistic p of quantity^power ~ L^p, fitted on 12 layers and more: the laws are those of great L.

    Args:
        name: Of the arm, whose measurement holds "depths".
        quantity: Of its measurement, one value a depth; None is no finite number.
        power: 0.5 for the root of a square.
    """

    def fitted(paired: Paired) -> float:
        arm = paired[name]
        deep = [(x, y) for x, y in zip(arm["depths"], arm[quantity], strict=True) if x >= _DEEP]
        return power * slope([x for x, _ in deep], [math.inf if y is None else y for _, y in deep])

    return fitted
