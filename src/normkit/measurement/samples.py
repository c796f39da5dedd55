"""Properties of a batch's numbers: zeros that samples end with, samples that are equal, and a digest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normkit.measurement.running import Batch, first_of, unit

# Sounds of one length may end in a few zeros.
_PADDED, _FILLED = 0.05, 0.75


def zero_ends(batch: Batch) -> Tensor | None:
    """The first of the masks by `heard` that leaves something out, on the CPU; None without one."""
    return next((mask.cpu() for mask in heard(batch) if not bool(mask.all())), None)


def heard(batch: Batch) -> list[Tensor]:
    """Masks (B, T), False at the zeros of padding that samples (B, T) of sound, (B, T, F) or (B, F, T) end with.

    One for each axis that may be time, and no device is waited for. They are True everywhere where no sample is longer
    than another by a share of T, and some sample fills most of T. Rows (B, F) may end in zeros by chance.
    """
    samples = first_of(batch)
    is_sound = samples.dim() == 2 and unit(batch) == "recording"
    if not samples.is_floating_point() or not (samples.dim() == 3 or is_sound) or not samples.numel():
        return []
    masks = []
    for axis in range(1, samples.dim()):
        is_heard = (samples != 0).transpose(1, axis).flatten(2).any(2) if samples.dim() == 3 else samples != 0
        mask = is_heard.flip(1).cumsum(1).flip(1) > 0
        lengths, most = mask.sum(1), mask.shape[1]
        is_padded = (lengths.max() - lengths.min() > _PADDED * most) | (lengths.max() < _FILLED * most)
        masks.append(mask | ~is_padded)
    return masks


def stride(count: int, most: int) -> int:
    """The step that takes at most so many of `count` elements: without a common divisor, so that no axis is missed."""
    step = max(1, math.ceil(count / most))
    while math.gcd(step, count) > 1:
        step += 1
    return step


def digests(rows: Tensor, bits: int = 63) -> Tensor:
    """A whole number of so many bits for each row of (n, k), which another row hardly shares: (n,), int64."""
    numbers = rows.float().view(torch.int32) if rows.is_floating_point() else rows
    places = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    mixed = (numbers.to(torch.int64) + 1) * (places * 0x9E3779B97F4A7C15 % 2**61 | 1)
    mixed = (mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D
    found: Tensor = (mixed ^ (mixed >> 32)).sum(1) & (2**bits - 1)
    return found


def repetitions(samples: Tensor, most: int = 4096) -> Tensor:
    """How many samples (B, ...) are equal to an earlier one, as far as so many elements of each tell."""
    rows = samples.detach().flatten(1)
    ordered = digests(rows[:, :: stride(rows.shape[1], most)]).sort().values
    return (ordered[1:] == ordered[:-1]).sum()
