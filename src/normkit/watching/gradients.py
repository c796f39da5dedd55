"""Norms of parameters and of their gradients, each process of what it holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normkit.identification.sharding import local


def squares(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Sum of squares of each tensor, in float64; -1 where there is none.

    Args:
        tensors: Parameters or gradients, of any dtypes, sparse or not; of a distributed one what this process holds.
        device: Where the result is.
    """
    held = [tensor for tensor in tensors if tensor is not None]
    if len(held) == len(tensors) and all(_is_usual(tensor, device) for tensor in held):
        norms: Sequence[Tensor] = torch._foreach_norm(held, 2) if held else (torch.zeros(0, device=device),)
        return torch.stack(tuple(norms)).detach().flatten().to(_widest(device)).square()
    found = torch.full((len(tensors),), -1.0, dtype=_widest(device), device=device)
    given = {place: _dense(local(tensor).detach()) for place, tensor in enumerate(tensors) if tensor is not None}
    for is_wide, dtype in ((False, torch.float32), (True, torch.float64)):
        places = [place for place, tensor in given.items() if (tensor.dtype == torch.float64) == is_wide]
        if places:
            norms = torch._foreach_norm([given[place] for place in places], 2, dtype)
            lengths = torch.stack([norm.to(device) for norm in norms]).to(found.dtype)
            found[torch.tensor(places, device=device)] = lengths.square()
    return found


def _is_usual(tensor: Tensor, device: torch.device) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.dtype is torch.float32
        and tensor.layout is torch.strided
        and tensor.device == device
    )


def _dense(tensor: Tensor) -> Tensor:
    """The entries that a tensor has, as real numbers."""
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.to_dense()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
