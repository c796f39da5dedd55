"""Maps points in three dimensions to the drawing plane: coordinates in a hyperplane, and a view without perspective."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Points = NDArray[np.float64]


@dataclass(frozen=True)
class Camera:
    """A camera far from the origin, the third coordinate upwards; parallel lines stay parallel."""

    azimuth: float = -60.0
    """Degrees around the vertical axis, from the first coordinate."""
    elevation: float = 20.0
    """Degrees above the horizontal plane; 90 looks straight down."""

    def paper(self, points: Points) -> Points:
        """Coordinates of points (..., 3) in the drawing: (..., 2), to the right and upwards."""
        return points @ self._frame()[:, :2]

    def nearness(self, points: Points) -> Points:
        """Distance of points (..., 3) in front of the drawing plane, towards the reader: (...)."""
        return points @ self._frame()[:, 2]

    @property
    def upwards(self) -> Points:
        """The direction that appears as straight up, a unit vector (3,)."""
        return self._frame()[:, 1]

    def _frame(self) -> Points:
        """Unit vectors to the right, upwards and towards the reader, as columns."""
        turn, lift = math.radians(self.azimuth), math.radians(self.elevation)
        right = (-math.sin(turn), math.cos(turn), 0.0)
        upwards = (-math.cos(turn) * math.sin(lift), -math.sin(turn) * math.sin(lift), math.cos(lift))
        towards = (math.cos(turn) * math.cos(lift), math.sin(turn) * math.cos(lift), math.sin(lift))
        return np.array([right, upwards, towards]).T


def helmert(n: int) -> Tensor:
    """An orthonormal basis of the hyperplane of rows with mean 0, one vector per column: (n, n - 1).

    Column k has k equal entries, one that outweighs them, and zeros: (1, -1, 0, ...) / sqrt(2),
    (1, 1, -2, 0, ...) / sqrt(6), and so on.
    """
    basis = torch.zeros(n, n - 1, dtype=torch.float64)
    for k in range(1, n):
        basis[:k, k - 1] = 1.0
        basis[k, k - 1] = -float(k)
        basis[:, k - 1] /= math.sqrt(k * (k + 1))
    return basis


def upright() -> Tensor:
    """Coordinates for three features in which the all-ones direction points upwards: orthonormal columns (3, 3)."""
    ones = torch.full((3, 1), 1 / math.sqrt(3), dtype=torch.float64)
    return torch.cat([helmert(3), ones], dim=1)


def nearest_basis(directions: Tensor, basis: Tensor) -> Tensor:
    """The orthonormal basis of the columns of `directions` (n, m) that is nearest to `basis` (n, m).

    With it, a tilted hyperplane is drawn with the least rotation against an upright one.
    """
    left, _, right = torch.linalg.svd(directions.mT @ basis)
    turned: Tensor = directions @ left @ right
    return turned


def array(points: Tensor) -> Points:
    """A tensor as Matplotlib takes it."""
    return np.asarray(points.detach().double().cpu().numpy())
