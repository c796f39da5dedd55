"""The layers of normkit, as the `kernels` package loads them."""

from normkit.hub_kernels import layers

__all__ = ["layers"]
