"""The clouds of points that the page includes, from the file that its scripts read too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit.errors import InputError

GAIN, BIAS = (0.6, 1.3, 1.0), (-0.3, 0.6, 0.4)
"""Initial positions of the sliders of the page."""

_FILE = Path(__file__).parent / "page" / "clouds.json"


@dataclass(frozen=True, eq=False, kw_only=True)
class Cloud:
    """Labelled points."""

    label: str
    points: Tensor
    """Shape (N, n), in float64."""
    groups: tuple[int, ...]
    """The group of each point."""


def cloud(name: str) -> Cloud:
    """One of the clouds of the page.

    Raises:
        InputError: If there is no cloud of that name.

    Example:
        >>> cloud("scatter").points.shape[1]
        3
    """
    every = clouds()
    if name not in every:
        raise InputError(f"the clouds of the page are {', '.join(every)}, got {name!r}; choose one")
    found = every[name]
    return Cloud(
        label=found["label"],
        points=torch.tensor(found["points"], dtype=torch.float64),
        groups=tuple(found["groups"]),
    )


def clouds() -> dict[str, dict[str, Any]]:
    """All clouds as the page reads them: name -> label, n, points, groups."""
    return dict(json.loads(_FILE.read_text(encoding="utf-8")))
