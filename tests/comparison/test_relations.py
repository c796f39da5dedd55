"""The relation of one vector to another, against planted truth; and that none is claimed of unrelated vectors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from normkit.checkpoint.reader import NAME
from normkit.comparison.relations import Relation, plainest, relation, units

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def gain(seed: int, size: int = 96, *, centre: float = 1.0, spread: float = 0.3) -> Tensor:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (centre + spread * drawn).clamp_min(1e-3)


def related(port: Tensor, reference: Tensor) -> Relation:
    return relation(port.double(), reference.double(), NAME[port.dtype], NAME[reference.dtype])


PLANTED: dict[str, tuple[Callable[[Tensor], Tensor], str, float | None]] = {
    "equal": (lambda g: g, "equal", None),
    "+ 1": (lambda g: g + 1, "offset", 1.0),
    "- 1": (lambda g: g - 1, "offset", -1.0),
    "+ 2": (lambda g: g + 2, "offset", 2.0),
    "- 2": (lambda g: g - 2, "offset", -2.0),
    "negated": (lambda g: -g, "negated", None),
    "times 3": (lambda g: 3 * g, "scaled", 3.0),
    "times root": (lambda g: g * 640**0.5, "scaled", 640**0.5),
    "reciprocal": (lambda g: 1 / g, "reciprocal", None),
    "square": (lambda g: g * g, "square", None),
    "exponential": (lambda g: g.exp(), "exponential", None),
    "reversed": (lambda g: g.flip(0), "permuted", None),
    "ones": (torch.ones_like, "constant", 1.0),
    "zeros": (torch.zeros_like, "constant", 0.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reference_dtype", DTYPES)
@pytest.mark.parametrize("planted", PLANTED)
def test_what_was_planted_is_found(planted: str, dtype: torch.dtype, reference_dtype: torch.dtype) -> None:
    make, kind, constant = PLANTED[planted]
    for seed in range(4):
        reference = gain(seed, 64 + 37 * seed).to(reference_dtype)
        # The function is computed as a converter does: from the stored reference, rounded once.
        found = related(make(reference.double()).to(dtype), reference)
        assert found.kind == kind, found.words
        assert found.constant == (None if constant is None else pytest.approx(constant, rel=1e-3))


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_one_added_in_bfloat16_is_named_whatever_stores_it(stored: torch.dtype) -> None:
    reference = gain(0).bfloat16()
    found = related((1 + reference).to(stored), reference)
    assert (found.kind, found.constant, found.rounding, found.is_rounded_once) == ("offset", 1.0, "bfloat16", True)
    assert found.words == "reference + 1, rounded to bfloat16"


def test_one_added_before_the_reference_was_rounded_is_found() -> None:
    master = gain(0).float()
    found = related(master + 1, master.bfloat16())
    assert found.words == "reference + 1, before the reference was rounded to bfloat16"
    assert related(master, master.bfloat16()).words == "equal, before the reference was rounded to bfloat16"


def test_truncation_to_bfloat16_is_equal_within_a_unit() -> None:
    reference = gain(1).float()
    cut = (reference.view(torch.int32) & -65536).view(torch.float32)
    found = related(cut, reference)
    assert found.words == "equal within a unit of bfloat16"


@pytest.mark.parametrize("constant", [0.0, 1.0])
@pytest.mark.parametrize("levels", [16, 255])
@pytest.mark.parametrize("block", [32, 128, 256])
def test_a_quantized_gain_is_related_within_its_step(block: int, levels: int, constant: float) -> None:
    reference = gain(5, 256)
    blocks = (reference + constant).reshape(-1, block)
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    step = (high - low) / (levels - 1)
    port = (((blocks - low) / step).round() * step + low).reshape(-1).float()
    found = related(port, reference.float())
    assert (found.kind, found.constant) == ("offset" if constant else "equal", constant or None)
    assert found.step is not None or levels == 255
    assert "within a" in found.words


@pytest.mark.parametrize("width", [64, 128])
def test_rotary_permutations_have_their_name(width: int) -> None:
    reference = gain(2, 2 * width).bfloat16()
    interleaved = reference.reshape(-1, 2, width // 2).transpose(1, 2).reshape(-1)
    assert related(interleaved, reference).words == f"reference in another order (rotary halves of {width} interleaved)"
    assert related(reference, interleaved).order == f"rotary pairs of {width} parted into halves"
    drawn = reference[torch.randperm(2 * width, generator=torch.Generator().manual_seed(0))]
    assert (related(drawn, reference).kind, related(drawn, reference).order) == ("permuted", "")
    both = related((1 + interleaved.float()), reference)
    assert (both.kind, both.constant) == ("permuted", 1.0)
    assert related(reference.roll(5), reference).order == "rotated by 5"


@pytest.mark.parametrize(
    ("port", "reference", "words"),
    [
        (torch.ones(64), torch.zeros(64), "undecided: reference + 1, or all 1"),
        (torch.full((64,), 2.0), torch.ones(64), None),
        (torch.zeros(64), torch.full((64,), -1.0), "undecided: reference + 1, or all 0"),
        (torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]), None),
    ],
)
def test_constant_gains_and_short_ones_are_undecided(port: Tensor, reference: Tensor, words: str | None) -> None:
    found = related(port, reference)
    assert found.kind == "undecided"
    assert len(found.candidates) > 1 or found.candidates[0].kind == "offset"
    assert words is None or found.words == words


def test_equal_constants_are_equal() -> None:
    assert related(torch.ones(8), torch.ones(8)).kind == "equal"


def test_numbers_that_are_not_finite() -> None:
    bad = torch.tensor([1.0, float("nan"), float("inf"), 2.0])
    assert related(bad, torch.ones(4)).kind == "not finite"
    assert related(torch.ones(4), bad).kind == "undecided"


def test_one_number_of_many_is_different_and_said() -> None:
    reference = gain(3, 100).float()
    port = reference + 1
    port[7] += 0.5
    found = related(port, reference)
    assert found.kind == "different"
    assert found.differing == 1.0


CLAIMS = {"offset", "negated", "scaled", "reciprocal", "square", "exponential", "permuted", "equal"}


@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 300),
    spread=st.sampled_from([0.0, 1e-4, 4e-3, 0.02, 0.3, 5.0]),
    centre=st.sampled_from([0.0, 1.0, 12.0]),
    dtype=st.sampled_from(DTYPES),
    reference_dtype=st.sampled_from(DTYPES),
)
def test_nothing_is_claimed_of_unrelated_vectors(
    seed: int, size: int, spread: float, centre: float, dtype: torch.dtype, reference_dtype: torch.dtype
) -> None:
    port, reference = (
        (centre + spread * torch.randn(size, generator=torch.Generator().manual_seed(each), dtype=torch.float64))
        for each in (2 * seed, 2 * seed + 1)
    )
    port, reference = port.to(dtype), reference.to(reference_dtype)
    found = related(port, reference)
    assert found.kind not in CLAIMS or bool((port.double() == reference.double()).all()), found.words


@given(seed=st.integers(0, 10**6), levels=st.integers(1, 4), size=st.integers(1, 200))
def test_nothing_is_claimed_of_unrelated_vectors_of_few_levels(seed: int, levels: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    port, reference = (1 + torch.randint(0, levels, (size,), generator=generator) / 128 for _ in range(2))
    found = related(port.bfloat16(), reference.bfloat16())
    is_equal = bool((port == reference).all())
    assert found.kind not in CLAIMS or is_equal, found.words


@pytest.mark.parametrize("dtype", DTYPES)
def test_units_are_the_distances_of_neighbours(dtype: torch.dtype) -> None:
    values = torch.tensor([1e-3, 0.75, 1.0, 1.5, 2.0, 300.0]).to(dtype)
    above = torch.nextafter(values, torch.full_like(values, float("inf")))
    assert torch.equal(units(values.double(), NAME[dtype]), above.double() - values.double())


@pytest.mark.parametrize(("low", "high", "number"), [(1.69, 1.71, 1.7), (2.9, 3.2, 3), (-0.51, -0.49, -0.5), (1, 1, 1)])
def test_the_plainest_number_of_an_interval(low: float, high: float, number: float) -> None:
    assert plainest(low, high) == number
