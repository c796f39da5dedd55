"""How finely a dtype shows a norm's formula: input scales and tolerances, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The input scales and tolerances for a norm that is called in one dtype."""

    far: float
    """An input scale at which no usual eps is felt, and squares stay finite: 1e-3 outside the root shortens a row by
    1e-9 in float32, by 1e-4 in float16, which is half of its last digit."""
    growth: float
    """Factor by which a row grows to see that its output stays. Its squares are still finite."""
    scales: tuple[int, int]
    """Powers of two between which the response to small inputs is measured. At the first, a mean square is still a
    normal float32 (in float16: the input has a digit); at the last, no eps is felt."""
    rows: int
    """Number of features, over all rows, that are averaged at each scale: rounding to 8 or 11 bits moves each by
    1e-3."""
    window: tuple[float, float]
    """Range of responses from which eps is computed. Below it the output is lost in rounding; above it eps is not felt,
    and the rounding of an output counts ten times in eps."""
    fits: float
    """A fit with a smaller relative residual is right; a wrong formula leaves 0.03 or more."""
    homogeneous: float
    """A smaller relative change of the output of a grown row is rounding."""
    agrees: float
    """A sample with a smaller relative error against its formula in float64 agrees. The right formula leaves 1e-6 in
    float32, and 1 to 4 roundings of 2**-9 or 2**-12 in 16 bits."""
    offset: float
    """An offset that is this near to a rounder number is that number."""
    length: float
    """Five times the relative error of the measured length of rows."""
    eps: float
    """Lower limit for the relative error of a measured eps, which may have been rounded to the dtype."""
    constant: float
    """The eps of the right model varies less than this between scales; that of a wrong one by 0.28 or more."""
    least: float
    """The smallest number of the dtype. An eps that is rounded to the dtype may be off by half of it."""
    smallest: float
    """Rows of this size still have the value of the formula. In float16 the squares of smaller rows have too few
    digits."""
    spike: float
    """Size of the one large element in the rows that show a rescaled formula."""


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
_BFLOAT16 = replace(
    _FLOAT32,
    rows=16384,
    window=(0.03, 0.9),
    fits=0.015,
    homogeneous=0.02,
    agrees=0.05,
    offset=0.03,
    length=2e-3,
    eps=5e-3,
    constant=0.05,
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
    """The precision of a dtype; other dtypes than the four of norms count as float32."""
    return _PRECISIONS.get(dtype, _FLOAT32)
