"""What the `kernels` package loads: normkit's layers."""

from normkit.hub_kernels import layers

__all__ = ["layers"]
