"""The program of a call: conventions, dtypes and width as the compile-time arguments of the kernels."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from normkit.conventions.eps import machine_epsilon
from normkit.kernels import signatures
from normkit.kernels.signatures import unpacked

_HALF = (torch.float16, torch.bfloat16)


class Program(NamedTuple):
    """The arithmetic of one norm of one width."""

    n: int
    """Features of a row."""
    centre: bool
    """The mean is subtracted."""
    eps: float
    """In units of x squared, or of x where it is outside the root or a clamp."""
    placement: int
    """0 inside, 1 outside, 2 as a clamp."""
    divisor: float
    """The sum of squares is divided by it."""
    factor: float
    """The normalized row is multiplied by it."""
    most_power: float
    """The largest power of two that a row may be scaled by without losing its eps."""
    offset: float
    """Added to the gain."""
    offset_in_parameter: bool
    """The gain with its offset is rounded to the gain's dtype."""
    round_rstd: bool
    """1 / s and its product with the row are rounded to the input's dtype."""
    rounds: int
    """After how many of the steps "normalized", "times gain" and "plus bias" there is a cast."""
    cast_to_weight: bool
    """The cast is to the gain's dtype, otherwise to the input's."""
    output: torch.dtype
    """The dtype of y."""
    wide: bool
    """Some tensor is float32, so sums are taken in float64."""

    @property
    def aligned(self) -> int:
        """The largest power of two, up to 16, that divides n: rows begin at multiples of it."""
        return math.gcd(self.n, 16)

    @property
    def is_torch_rms_norm(self) -> bool:
        """Whether this is `torch.nn.functional.rms_norm`, of an input and a gain of one dtype."""
        is_root_mean_square = not self.centre and self.placement == 0 and self.divisor == self.n
        is_rounded_once = self.rounds == 0 and not self.round_rstd
        return is_root_mean_square and is_rounded_once and self.factor == 1 and self.offset == 0

    @property
    def statistics_lines(self) -> int:
        """How many numbers forward keeps for each row: see forward.py."""
        return statistics_lines(self.centre, self.placement, self.wide)


def is_wide(*dtypes: torch.dtype | None) -> bool:
    """Whether sums are float64: the rows, the gain or the bias are float32."""
    return torch.float32 in dtypes


def statistics_lines(centre: bool, placement: int, wide: bool) -> int:
    """How many numbers forward keeps for each row: `keep_statistics` in forward.py says which."""
    return (4 if centre else 2) + (placement != 0) + wide


@functools.lru_cache(maxsize=1024)
def program(
    conventions: int,
    eps: float,
    offset: float,
    n: int,
    input_dtype: torch.dtype,
    row_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> Program:
    """The program of a call.

    `conventions`, `eps` and `offset` are those of an operator. Early casts round to the input's dtype, which differs
    from that of the rows where x is added to a residual.
    """
    of = unpacked(conventions)
    eps = machine_epsilon(is_float64=False) if of.machine_eps else eps
    in_parameter = bool(of.offset_in_parameter_dtype)
    rounds = _rounds(of.cast, input_dtype, weight_dtype, bias_dtype, has_wide_offset=bool(offset) and not in_parameter)
    return Program(
        n=n,
        centre=bool(of.centre),
        eps=eps,
        placement=of.placement,
        divisor=float(1 if of.divisor == 2 else n - of.divisor),
        factor=math.sqrt(n) if of.sqrt_n else 1.0,
        most_power=_most_power(eps, of.placement),
        offset=offset,
        offset_in_parameter=in_parameter,
        round_rstd=bool(of.round_rstd) and input_dtype in _HALF,
        rounds=rounds,
        cast_to_weight=of.cast == 2 and weight_dtype is not None,
        output=signatures.output_dtype(of.output, input_dtype, weight_dtype, bias_dtype),
        wide=is_wide(row_dtype, weight_dtype, bias_dtype),
    )


def _rounds(
    cast: int,
    input_dtype: torch.dtype,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
    *,
    has_wide_offset: bool,
) -> int:
    """`Program.rounds`: after an early cast the affine part stays in 16 bits as long as its operands do."""
    if cast == 0 or (cast == 2 and weight_dtype is None):
        return 0
    dtype = weight_dtype if cast == 2 else input_dtype
    if dtype not in _HALF:
        return 0
    if cast == 3:
        return 4
    if weight_dtype is not None and (weight_dtype != dtype or has_wide_offset):
        return 1
    return 3 if bias_dtype == dtype else 2


def _most_power(eps: float, placement: int) -> float:
    """`Program.most_power`: a row that needs a larger power to come near 1 is negligible beside its eps."""
    if eps == 0:
        return 2.0**126
    exponent = math.floor(-math.log2(abs(eps)) / (2 if placement == 0 else 1))
    return 2.0 ** max(-126, min(126, exponent))
