"""What stands where a study's model normalizes: a spec's layer, BatchNorm over positions, or nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from normkit import specs
from normkit.layers import LayerNorm, Norm
from normkit.spec import NormSpec

NormLayer = NormSpec | Callable[[int], nn.Module] | None
"""A spec, what makes a layer of a width, or None for no norm at all."""


def norm_layer(norm: NormLayer, width: int) -> nn.Module:
    """A norm over the last `width` features, gain 1 and bias 0; `nn.Identity` for None.

    Args:
        norm: What to build.
        width: Features of a row.
    """
    if norm is None:
        return nn.Identity()
    if not isinstance(norm, NormSpec):
        return norm(width)
    if norm.eps is not None and norm == specs.TORCH_LAYER_NORM.replace(eps=norm.eps):
        return LayerNorm(width, eps=norm.eps)
    return Norm(norm, width)
