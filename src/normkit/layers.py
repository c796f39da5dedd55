"""Normalization as modules: `LayerNorm` and `RMSNorm` in place of torch's, `Norm` for any spec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit import functional
from normkit.errors import KindError
from normkit.spec import NormSpec


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, computed by normkit: same arguments, same state dict.

    y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias over the trailing `normalized_shape`. Nested tensors, which
    `nn.TransformerEncoder` makes of padded batches, go to torch. `torch.jit` and `torch.fx` write down torch's
    function.

    Example:
        >>> layer = LayerNorm(4)
        >>> layer.load_state_dict(nn.LayerNorm(4).state_dict())
        <All keys matched successfully>
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input` of shape (..., *normalized_shape)."""
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            if isinstance(input, Tensor) and input.is_nested:
                return super().forward(input)
            return functional.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, computed by normkit: same arguments, same state dict.

    y = weight * x / sqrt(mean(x**2) + eps) over the trailing `normalized_shape`. `torch.jit` and `torch.fx` write down
    torch's function.

    Example:
        >>> RMSNorm(2, eps=0.0)(torch.tensor([3.0, 4.0]))
        tensor([0.8485, 1.1314], grad_fn=<_NormalizeBackward>)
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x` of shape (..., *normalized_shape)."""
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class Norm(nn.Module):
    """Any convention as a module; starts as the identity on normalized rows.

    `NormSpec` defines the formula, and `print(spec)` shows that of one spec.

    Args:
        spec: The conventions.
        normalized_shape: Shape of gain and bias: the trailing sizes of the input, or the number of
            channels if the spec's axes are the channels.
        device: Of the parameters.
        dtype: Of the parameters.

    Attributes:
        spec: The conventions.
        weight: Stored gain, at the start the one that acts as 1, or None.
        bias: Bias, 0 at the start, or None.

    Raises:
        KindError: If spec is no NormSpec.

    Example:
        >>> from normkit import specs
        >>> Norm(specs.GEMMA, 8)
        Norm(y = (1 + weight) * x / sqrt(mean(x^2) + 1e-06), (8,))
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        spec: NormSpec,
        normalized_shape: int | Sequence[int],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(spec, NormSpec):
            raise KindError(f"Norm: spec must be a NormSpec such as normkit.specs.LLAMA, got {spec!r}")
        self.spec = spec
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        for name, present in (("weight", spec.has_weight), ("bias", spec.has_bias)):
            empty = nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype)) if present else None
            self.register_parameter(name, empty)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Make gain and bias the identity."""
        if self.weight is not None:
            nn.init.constant_(self.weight, self.spec.gain.neutral)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize `x`, whose sizes fit `normalized_shape`."""
        return functional.normalize(x, self.spec, self.weight, self.bias)

    def extra_repr(self) -> str:
        """The formula and the shape of the parameters."""
        return f"{self.spec}, {self.normalized_shape}"
