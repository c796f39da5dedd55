"""Effects of a row's size that a norm should not have: lengths change a little, or everything from a size on.

Both are looked for where the search has found no spec.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from normkit.errors import NormkitError
from normkit.identification.gating import Recover
from normkit.identification.passport import Reading
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.text import percent

_WIDE = (torch.float32, torch.float64)
_LONG, _OCTAVES = 256.0, 6
"""Rows of this size and six times twice as long do not feel eps; approximate roots repeat with the exponent."""
_SIZES = 97
_SAME = 1e-5
"""Rounding to float32 leaves less; an exact root varies less."""
_ORDINARY = 128.0
"""Relative to the size of their largest element; `Precision` of the search within it is below."""
_MOVED, _CLAMPED = 1e-4, 1e-3
_DIGITS = 1e-4
_ROWS = 16


def approximate_root(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> dict[str, Reading]:
    """Reading "root" of a norm over the last axis whose output keeps its direction, but not its length, as a row grows.

    The evidence says by how much it varies.
    """
    if specimen.dtype not in _WIDE:
        return {}
    sizes = _LONG * 2 ** torch.linspace(0, _OCTAVES, _SIZES).reshape(-1, *(1,) * (len(shape) - 1))
    x = (sizes * torch.randn(1, *shape[1:], generator=generator)).to(specimen.device)
    odd = (specimen(x) - specimen(-x)).cpu().double() / 2
    longest = odd[-1:]
    factor = (odd * longest).sum(-1, keepdim=True) / longest.square().sum(-1, keepdim=True)
    spread = float((factor.amax(0) / factor.amin(0)).max()) - 1
    if not spread > _SAME or not float((odd - factor * longest).norm() / odd.norm()) < _SAME:
        return {}
    # The share of a length that eps leaves falls from octave to octave; an approximate root repeats.
    octave = (_SIZES - 1) // _OCTAVES
    if not float((factor[octave:] / factor[:-octave] - 1).abs().max()) < spread / 4:
        return {}
    line = f"a row keeps its direction whatever its size, and its output varies in length by {percent(spread)}: its "
    return {"root": Reading(value="approximate", evidence=(f"{line}root is approximate",))}


def large_rows(
    specimen: Specimen, shape: tuple[int, ...], generator: torch.Generator, recover: Recover
) -> dict[str, Reading]:
    """Reading "large rows" of a norm that rows of ordinary size show, and large ones do not: its formula, up to where.

    Args:
        specimen: The norm.
        shape: Of an input.
        generator: Source of inputs.
        recover: The search.
    """
    if specimen.dtype not in _WIDE:
        return {}
    ordinary = specimen.in_dtype(specimen.dtype)
    ordinary.precision = replace(ordinary.precision, far=8.0, growth=4.0, scales=(-62, 3), spike=20.0)
    # Gains may be 0.
    ordinary.draw(generator)
    # Half of the elements are as large as the largest: that shows at once where these are clamped.
    signs, halves = torch.randn(2, _ROWS, *shape[1:], generator=generator).sign()
    x = (signs * (0.75 + 0.25 * halves)).to(specimen.device)

    def change(one: Tensor, other: Tensor) -> float:
        """Relative; infinite where something is not a number."""
        one, other = ordinary(one).double(), ordinary(other).double()
        return float(((one - other).norm() / one.norm()).nan_to_num(math.inf))

    low, high = _ORDINARY, specimen.precision.far
    try:
        if not change(low / 4 * x, low * x) < _MOVED or change(low * x, high * x) < _MOVED:
            return {}
        passport = recover(ordinary, shape)
        if passport is None or passport.spec is None:
            return {}
        while high > low * (1 + _DIGITS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if change(_ORDINARY * x, middle * x) < _MOVED else (low, middle)
        is_clamped = change((_ROWS * x).clamp(-1, 1) * low, _ROWS * low * x) < _CLAMPED
    except (NormkitError, UnrecognisedError):
        return {}
    there = "where its input is clamped" if is_clamped else "from where it is another"
    # How it rounds has no part in this.
    formula = passport.spec.replace(cast="late", round_rstd=False, statistics_dtype="float32", output_dtype="input")
    words = f"{formula} up to a magnitude of {float(f'{low:.3g}'):g}, {there}"
    return {"large rows": Reading(value=words, evidence=(words,))}
