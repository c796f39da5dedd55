"""Batch norms whose running statistics are still as they were made, though their gain or bias is not."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from normkit.identification.sites import OtherNorm


def ungathered(model: nn.Module, others: Iterable[OtherNorm]) -> tuple[str, ...]:
    """Paths of batch norms that were trained, or loaded, without statistics: mean 0 and variance 1 in every channel.

    Args:
        model: Whose norms they are.
        others: Norms that no spec describes; those without running statistics are passed over.
    """
    return tuple(other.path for other in others if _is_ungathered(model.get_submodule(other.path)))


def _is_ungathered(module: nn.Module) -> bool:
    mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
    if not (isinstance(mean, Tensor) and isinstance(variance, Tensor)):
        return False
    if bool((mean != 0).any()) or bool((variance != 1).any()):
        return False
    starts = (("weight", 1.0), ("bias", 0.0))
    return any(
        isinstance(part := getattr(module, name, None), Tensor) and bool((part.detach() != start).any())
        for name, start in starts
    )
