"""Every figure of normkit with fixed data: the geometry on small clouds, and the two models that ship, measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normkit import specs
from normkit.geometry.invariance import invariances
from normkit.inspection.result import Inspection
from normkit.plots.axes import normalized_together
from normkit.plots.camera import helmert, upright
from normkit.plots.clouds import centred_clusters
from normkit.plots.drawing import Drawing
from normkit.plots.ellipsoid import ellipsoid_depth, interlacing
from normkit.plots.epsilons import two_epsilons
from normkit.plots.inspection import input_scale, mean_direction
from normkit.plots.invariance import invariance_marks
from normkit.plots.spectrum import jacobian_spectra
from normkit.plots.spheres import hyperplane_steps, rms_sphere
from normkit.plots.steps import three_steps

if TYPE_CHECKING:
    from collections.abc import Callable

_COUNT = 11
_GROUPS = tuple(group for group in range(3) for _ in range(_COUNT))
_KINDS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Twin:
    """One of the two models that ship, as the figures need it."""

    inspection: Inspection
    gains: Mapping[str, Tensor]
    """Path of each norm -> its gain as stored."""


def gallery(twins: Mapping[str, Twin]) -> tuple[Callable[[], Drawing], ...]:
    """The figures in the order of a lesson, each drawn when it is called, under the `theme.style` around that call.

    Args:
        twins: "layernorm" and "rmsnorm".
    """
    layer_norm, rms_norm = specs.TORCH_LAYER_NORM.replace(eps=0.0), specs.LLAMA.replace(eps=0.0)
    sphere_cloud = _cloud(2, ((1.65, 0.55, 0.3), (0.1, -1.3, -0.75), (-1.1, 0.45, 1.3)), (0.35, 0.35, 0.35))
    return (
        partial(
            three_steps,
            _cloud(5, ((1.43, -0.25, 0.95), (-0.61, 1.31, 0.35), (-0.83, -1.19, -0.65)), (0.5, 0.5, 0.33))
            @ upright().T,
            layer_norm,
            _vector(1.3, 0.6, 1.0),
            _vector(0.3, 0.1, 0.9),
            _GROUPS,
        ),
        partial(
            hyperplane_steps,
            sphere_cloud @ helmert(4).T,
            layer_norm,
            _vector(0.9, 1.5, 0.6, 1.0),
            _vector(0.5, 0.0, 0.0, 0.2),
            _GROUPS,
        ),
        partial(
            rms_sphere, (sphere_cloud + _vector(0, 0, 0.35)) @ upright().T, rms_norm, _vector(0.65, 1.35, 1), _GROUPS
        ),
        partial(
            centred_clusters,
            _cloud(7, ((1.7, -0.5, 2.7), (0.2, 1.8, 1.1), (2.5, 1.5, 1.9)), (0.3, 0.3, 0.45)) @ upright().T,
            _GROUPS,
        ),
        normalized_together,
        partial(invariance_marks, invariances()),
        two_epsilons,
        partial(jacobian_spectra, _vector(2.1, 0.9, -0.6, 1.4, -1.1, 0.3, 1.7, 0.1), 0.5),
        partial(_interlacing_of, twins["layernorm"]),
        *(
            partial(_of_twin, draw, name, twins[name])
            for draw in (ellipsoid_depth, mean_direction, input_scale)
            for name in _KINDS
        ),
    )


def _vector(*entries: float) -> Tensor:
    return torch.tensor(entries, dtype=torch.float64)


def _cloud(seed: int, centres: tuple[tuple[float, ...], ...], spread: tuple[float, ...]) -> Tensor:
    """Three groups of points around their centres: (36, 3)."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(3, _COUNT, 3, generator=generator, dtype=torch.float64)
    return (_vector(*sum(centres, ())).reshape(3, 1, 3) + _vector(*spread) * drawn).reshape(-1, 3)


def _interlacing_of(twin: Twin) -> Drawing:
    """Of a norm in the middle."""
    site = twin.inspection.sites[len(twin.inspection.sites) // 2]
    return interlacing(twin.gains[site.path], site.spec, f"{site.path} of the small LayerNorm model")


def _of_twin(draw: Callable[[Inspection], Drawing], name: str, twin: Twin) -> Drawing:
    drawing = draw(twin.inspection)
    return replace(
        drawing,
        name=f"{drawing.name}-{name}",
        title=f"{drawing.title}: {_KINDS[name]}",
        caption=f"{drawing.caption} Measured on the small {_KINDS[name]} model that ships with normkit.",
    )
