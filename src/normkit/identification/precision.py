"""How finely a dtype shows a norm's formula: input scales and tolerances, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Precision:
    """What can be asked of a norm that is called in one dtype.

    Attributes:
        far: An input scale at which no usual eps is felt, and squares stay finite: 1e-3 outside the root
            shortens a row by 1e-9 in float32, by 1e-4 in float16, which is half of its last digit.
        growth: How much further a row is grown to see that its output stays; with it, squares are still finite.
        scales: Powers of two between which the response to small inputs is asked for: from where a
            mean square still is a normal float32 (in float16: the input has a digit) to where no eps is felt.
        rows: Features in all rows that are averaged at each scale: rounding to 8 or 11 bits leaves 1e-3 of each.
        window: Responses from which eps is read off: below, the output drowns; above, eps is not felt, and what
            an output is rounded by counts ten times in eps.
        fits: A fit's relative residual below this is rounding; a wrong formula leaves 0.03 or more.
        homogeneous: Likewise for the output of a grown row.
        agrees: Relative error of a sample against its formula in float64 is below this: the formula's own
            error is 1e-6 in float32, and 1 to 4 roundings of 2**-9 or 2**-12 in 16 bits.
        offset: An offset this near a rounder number is that number.
        length: Relative error of the measured length of rows, five times over.
        eps: Relative error of a measured eps is never taken to be less: it may have been rounded to the dtype.
        constant: The right model's eps varies less than this between scales, a wrong one's by 0.28 or more.
        least: The least digit there is, half of which an eps may be off where it is rounded to the dtype.
        smallest: Rows this small still have their formula's value; in float16, the squares of smaller ones
            have too few digits where they are rounded to it.
        spike: How much one element of a row stands out in the row that tells rescaled formulas.
    """

    far: float
    growth: float
    scales: tuple[int, int]
    rows: int
    window: tuple[float, float]
    fits: float
    homogeneous: float
    agrees: float
    offset: float
    length: float
    eps: float
    constant: float
    least: float
    smallest: float
    spike: float


_FLOAT32 = Precision(
    far=2.0**20,
    growth=64.0,
    scales=(-62, 10),
    rows=1,
    window=(0.03, 0.98),
    fits=1e-4,
    homogeneous=1e-3,
    agrees=3e-5,
    offset=1e-5,
    length=1e-5,
    eps=1e-6,
    constant=2e-3,
    least=0.0,
    smallest=1e-12,
    spike=1000.0,
)
_BFLOAT16 = Precision(
    far=2.0**20,
    growth=64.0,
    scales=(-62, 10),
    rows=16384,
    window=(0.03, 0.9),
    fits=0.015,
    homogeneous=0.02,
    agrees=0.05,
    offset=0.03,
    length=2e-3,
    eps=5e-3,
    constant=0.05,
    least=0.0,
    smallest=1e-12,
    spike=1000.0,
)
_FLOAT16 = Precision(
    far=8.0,
    growth=4.0,
    scales=(-22, 3),
    rows=16384,
    window=(0.03, 0.9),
    fits=0.004,
    homogeneous=0.005,
    agrees=0.02,
    offset=0.005,
    length=3e-4,
    eps=1e-3,
    constant=0.05,
    least=2.0**-24,
    smallest=2.0**-10,
    spike=20.0,
)
_PRECISIONS = {
    # The formula is compared with itself in float64, so float64 shows no more than float32 does.
    torch.float64: _FLOAT32,
    torch.float32: _FLOAT32,
    torch.bfloat16: _BFLOAT16,
    torch.float16: _FLOAT16,
}


def precision_of(dtype: torch.dtype) -> Precision:
    """What a dtype shows; other dtypes than the four of norms are taken for float32."""
    return _PRECISIONS.get(dtype, _FLOAT32)
