"""The arithmetic of folding: each result is rounded once, and its bits depend on the values and the shape alone.

Products and casts are the exact value rounded to nearest, ties to even. Sums are taken in float64 in an order that the
shape determines, by numpy and not by a BLAS, so that other machines and other numbers of threads give the same bits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

CHUNK = 2**17
"""Elements per chunk: in float64 they fit into the cache of one core."""

# Significant bits.
_PRECISION = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}
# Integer types of the same width, signed and unsigned, and the bits of positive infinity.
_INFINITY = {
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80),
    torch.float16: (torch.int16, np.uint16, 0x7C00),
    torch.float32: (torch.int32, np.uint32, 0x7F800000),
    torch.float64: (torch.int64, np.uint64, 0x7FF0000000000000),
}
_WIDE = (torch.float32, torch.float64)

# A float32 halfway between two neighbours of 16 bits has these bits (mask, pattern).
# Below the normal range of float16 such a midpoint has more zeros than that, never fewer.
_MIDDLE = {torch.bfloat16: (0xFFFF, 0x8000), torch.float16: (0x0FFF, 0)}

# A float64 halfway between two neighbours of 32 bits or less has zeros in these bits.
_BELOW_MIDDLES = 2**28 - 1
_SPLITTER = 2.0**27 + 1


@contextmanager
def one_thread_an_operation() -> Iterator[None]:
    """Inside it torch splits no operation over threads: a chunk is too small, and the other cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def partition(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """(first row, row after the last) of each chunk of a matrix: about `CHUNK` elements, at least one whole row."""
    step = max(1, CHUNK // max(1, columns))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


# Bytes; just under the largest size that glibc adapts to.
_KEPT = 2**25 - 2**16


class _Room(threading.local):
    """Memory that a thread reuses: fresh pages cost as much time as the arithmetic."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        # Freeing this tensor raises the thresholds of the C library's allocator (glibc): from then on it keeps the
        # memory of smaller tensors for later ones and does not return the pages each time.
        torch.empty(_KEPT, dtype=torch.uint8)

    def take(self, use: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of arbitrary values, valid until the same use takes another."""
        size = math.prod(shape)
        held = self._held.get(use)
        if held is None or held.numel() < size:
            held = self._held[use] = torch.empty(size, dtype=dtype)
        return held[:size].view(tuple(shape))


_ROOM = _Room()


def wide_room(rows: int, columns: int) -> Tensor:
    """A float64 matrix of arbitrary values, valid until this thread asks again."""
    return _ROOM.take("wide", (rows, columns), torch.float64)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 values in another dtype, rounded once.

    torch casts float64 to 16 bits through float32, which rounds twice. That is wrong only where the float32 is halfway
    between two neighbours of 16 bits and the value is not: then the float32 is moved one step towards the value.

    Args:
        values: float64, contiguous.
        dtype: float64, float32, float16 or bfloat16.
    """
    if dtype not in _MIDDLE:
        return values.to(dtype)
    single = _ROOM.take("single", values.shape, torch.float32).copy_(values)
    mask, middle = _MIDDLE[dtype]
    masked = _ROOM.take("masked", values.shape, torch.int32).numpy()
    np.bitwise_and(single.view(torch.int32).numpy(), mask, out=masked)
    is_middle = np.equal(masked, middle, out=_ROOM.take("middle", values.shape, torch.bool).numpy())
    places = np.flatnonzero(is_middle)
    if places.size:
        exact, near = values.numpy().reshape(-1)[places], single.numpy().reshape(-1)
        is_off = exact != near[places]
        places, exact = places[is_off], exact[is_off]
        towards = np.where(exact > near[places], np.float32(np.inf), np.float32(-np.inf))
        near[places] = np.nextafter(near[places], towards)
    return single.to(dtype)


@dataclass(frozen=True, eq=False)
class Factor:
    """A gain, prepared for products with rows of one dtype."""

    values: Tensor
    """The gain in the dtype of the multiplication."""
    output: torch.dtype
    """The dtype of the products."""
    is_exact: bool = True
    """Whether a product in the dtype of `values` is exact, or `output` is that dtype."""

    def part(self, index: slice | Tensor) -> Factor:
        """The factors of some rows, as a column."""
        return Factor(self.values[index].unsqueeze(1), self.output, self.is_exact)


def factor(gain: Tensor, source: torch.dtype, output: torch.dtype) -> Factor:
    """The gain in the narrowest dtype in which its products with `source`, cast to `output`, are rounded once.

    float32 holds the product of two numbers of 16 bits exactly, and torch multiplies them in float32; a product below
    the range of float32 is too small for 16 bits as well.

    Args:
        gain: float64, of one axis.
        source: The dtype of the rows.
        output: The dtype of the products.
    """
    narrow = gain.to(output)
    fits = bool((narrow.to(torch.float64) == gain).all())
    if fits and (source is output or (output in _WIDE and _PRECISION[source] < _PRECISION[output])):
        return Factor(narrow, output)
    spare = gain.view(torch.int64).bitwise_and((1 << _PRECISION[source]) - 1)
    return Factor(gain, output, output is torch.float64 or not bool(spare.any()))


def scaled(rows: Tensor, by: Factor) -> Tensor:
    """Rows times a gain, each product rounded once.

    Args:
        rows: Two axes.
        by: One factor per column, or a column with one factor per row.
    """
    if by.values.dtype is by.output:
        return rows.to(by.output) * by.values
    wide = wide_room(*rows.shape).copy_(rows)
    product = wide.mul_(by.values)
    if not by.is_exact:
        _round_middles_to_odd(product, rows, by.values)
    return rounded(product, by.output)


def nearest_powers(values: Tensor) -> Tensor:
    """The power of two that leaves of each float64 |value| a mantissa in [0.707, 1.415), and 1 for zero."""
    mantissas, exponents = torch.frexp(values.abs())
    # Mantissas are in [0.5, 1).
    powers = torch.ldexp(torch.ones_like(values), exponents - (mantissas < math.sqrt(0.5)).to(exponents.dtype))
    return powers.masked_fill_(mantissas == 0, 1.0)


def underflow(rows: Tensor, powers: Tensor, product: Tensor) -> float:
    """The largest |error| of products with powers of two: of those below the normal numbers of their dtype.

    Args:
        rows: Two axes.
        powers: One per column, or a column with one per row.
        product: rows * powers, rounded.
    """
    small = (product.abs() < torch.finfo(product.dtype).tiny) & (rows != 0)
    if not bool(small.any()):
        return 0.0
    exact = rows[small].to(torch.float64) * powers.expand_as(rows)[small].to(torch.float64)
    return float((product[small].to(torch.float64) - exact).abs().max())


def quotient(numerator: Tensor, denominator: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 numerator / denominator rounded once to `dtype`; 0 / 0 is 0."""
    if dtype is torch.float64:
        return torch.where(numerator == 0, numerator, numerator / denominator)
    # Mantissas neither overflow nor underflow.
    above, exponents = (torch.from_numpy(part) for part in np.frexp(numerator.numpy()))
    below, below_exponents = (torch.from_numpy(part) for part in np.frexp(denominator.numpy()))
    value = torch.where(above == 0, above, above / below)
    product, error = _two_product(value, below)
    remainder = (above - product) - error
    # The rounding took away the remainder over the denominator; its sign is enough.
    odd = _odd(value, remainder * below.sign())
    return rounded(torch.from_numpy(_with_exponents(odd, (exponents - below_exponents).numpy())), dtype)


def row_sums(values: Tensor) -> Tensor:
    """The sum of each row of a float64 matrix: pairwise, in an order that its length determines."""
    return torch.from_numpy(np.add.reduce(values.numpy(), axis=1))


def add_rows(total: Tensor, block: Tensor) -> None:
    """Add the rows of a float64 block to a total, one after the other.

    Args:
        total: One number per column; changed in place.
        block: Two axes, contiguous; the first row is overwritten with the total.
    """
    block[0] = total
    if block.shape[1] == 1:
        # numpy would add a single column pairwise, so that the result would depend on the number of rows.
        total[0] = float(np.add.accumulate(block.numpy()[:, 0])[-1])
    else:
        np.add.reduce(block.numpy(), axis=0, out=total.numpy())


def all_finite(values: Tensor) -> bool:
    """Whether there is no NaN and no infinity: these have the largest exponent, so the largest bits show them."""
    if not values.numel():
        return True
    signed, unsigned, infinity = _INFINITY[values.dtype]
    bits = values.view(signed).numpy()
    return int(bits.max()) < infinity and int(bits.view(unsigned).max()) < infinity - np.iinfo(bits.dtype).min


def _round_middles_to_odd(product: Tensor, rows: Tensor, gain: Tensor) -> None:
    """Move a float64 product that may be halfway between two neighbours to the side of the exact product.

    Only there it matters that the product was rounded before it is cast.
    """
    low = np.bitwise_and(product.view(torch.int64).numpy(), _BELOW_MIDDLES)
    places = np.unravel_index(np.flatnonzero(low == 0), low.shape)
    if places[0].size:
        exact_rows = rows[tuple(torch.from_numpy(place) for place in places)].to(torch.float64)
        gains = np.broadcast_to(gain.numpy(), low.shape)[places]
        # Mantissas neither overflow nor underflow.
        parts, exponents = np.frexp(exact_rows.numpy())
        gain_parts, gain_exponents = np.frexp(gains)
        odd = _odd(*_two_product(torch.from_numpy(parts), torch.from_numpy(gain_parts)))
        product.numpy()[places] = _with_exponents(odd, exponents + gain_exponents)


def _two_product(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """(product rounded to float64, the exact rest), after Dekker 1971."""
    product = left * right
    left_high, left_low = _split(left)
    right_high, right_low = _split(right)
    error = (left_high * right_high - product) + left_high * right_low + left_low * right_high + left_low * right_low
    return product, error


def _split(values: Tensor) -> tuple[Tensor, Tensor]:
    wide = values * _SPLITTER
    high = wide - (wide - values)
    return high, values - high


def _odd(values: Tensor, missing: Tensor) -> Tensor:
    """values + missing rounded to odd: truncated towards zero, with the last bit set where `missing` is not 0."""
    bits = values.view(torch.int64)
    is_beyond = (missing != 0) & ((missing < 0) != (values < 0))
    cut = bits - is_beyond.to(torch.int64)
    return (cut | (missing != 0).to(torch.int64)).view(torch.float64)


def _with_exponents(values: Tensor, exponents: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    with np.errstate(over="ignore"):
        return np.asarray(np.ldexp(values.numpy(), exponents), dtype=np.float64)
