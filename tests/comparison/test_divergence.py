"""Where two runs begin to differ: at a norm, between two, behind the last; and what rounding explains."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from normkit import specs
from normkit.comparison.divergence import Divergence, Place, Snapshot, diverged
from normkit.comparison.effects import Formula
from normkit.identification.passport import Passport
from normkit.measurement.sampling import RowPicker

SPEC = specs.TORCH_LAYER_NORM.replace(has_weight=False, has_bias=False)
PLACES = [
    Place(
        path=path,
        reference=path.upper(),
        formula=Formula.of(SPEC, Passport(verdict="norm", spec=SPEC, readings={})),
        span=1,
    )
    for path in ("a", "b", "c")
]


def rows(seed: int) -> Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))


def snapshot(tensors: dict[str, Tensor]) -> Snapshot:
    """Of "a<" what enters a, of "a>" what leaves it."""
    taken = Snapshot({}, RowPicker(0, None))
    taken.entered = {name[0]: tensor for name, tensor in tensors.items() if name.endswith("<")}
    taken.left = {name[0]: tensor for name, tensor in tensors.items() if name.endswith(">")}
    return taken


def run(
    changes: dict[str, float], *, outputs: float = 0.0, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> Divergence:
    """A run against one in which some tensors are so much larger."""
    names = ("a<", "a>", "b<", "b>", "c<", "c>")
    reference = {name.upper(): rows(seed) for seed, name in enumerate(names)}
    model = {name: reference[name.upper()] * (1 + changes.get(name, 0.0)) for name in names}
    out = rows(99)
    return diverged(PLACES, snapshot(model), snapshot(reference), (out * (1 + outputs), out), dtypes)


def test_no_difference() -> None:
    assert run({}) == Divergence(compared=3)


def test_a_difference_at_a_norm() -> None:
    found = run({"b>": 0.04, "c<": 0.1, "c>": 0.2})
    assert found.birth is not None
    assert (found.birth.where, found.birth.path, found.birth.since, found.birth.agreed) == ("at", "b", None, 0.0)
    assert found.birth.differs == pytest.approx(0.04, rel=1e-4)
    assert found.first_bits == found.birth
    assert (found.compared, found.largest) == (3, pytest.approx(0.2, rel=1e-4))


def test_the_first_of_two_differences_counts() -> None:
    found = run({"a>": 1e-3, "c>": 0.5})
    assert found.birth is not None
    assert (found.birth.path, found.largest) == ("a", pytest.approx(0.5, rel=1e-4))


def test_a_difference_between_two_norms() -> None:
    found = run({"b<": 0.1, "b>": 0.1, "c<": 0.1})
    assert found.birth is not None
    assert (found.birth.where, found.birth.path, found.birth.since) == ("before", "b", "a")


def test_a_difference_before_the_first_and_after_the_last_norm() -> None:
    first, last = run({"a<": 0.1}).birth, run({}, outputs=0.1).birth
    assert first is not None
    assert last is not None
    assert (first.where, first.path, first.since) == ("before", "a", None)
    assert (last.where, last.path, last.since) == ("after", None, "c")


def test_rounding_is_no_difference_but_its_first_bit_is_told() -> None:
    found = run({"b<": 3e-7, "b>": 4e-7, "c<": 8e-7, "c>": 6e-7}, outputs=9e-7)
    assert found.birth is None
    assert found.first_bits is not None
    assert (found.first_bits.where, found.first_bits.path) == ("before", "b")


@pytest.mark.parametrize(("dtype", "found"), [(torch.float32, True), (torch.bfloat16, False)])
def test_the_coarser_dtype_says_what_rounding_is(dtype: torch.dtype, found: bool) -> None:
    assert (run({"b>": 3e-3}, dtypes=(torch.float32, dtype)).birth is not None) == found


def test_rounding_that_grows_is_no_difference_until_it_jumps() -> None:
    growing = {"a<": 1e-7, "a>": 5e-7, "b<": 3e-6, "b>": 1e-5, "c<": 5e-5}
    assert run(growing).birth is None
    jump = run({**growing, "c>": 5e-3}).birth
    assert jump is not None
    assert (jump.where, jump.path) == ("at", "c")
    assert jump.agreed == pytest.approx(5e-5, rel=0.01)


def test_what_a_norm_makes_of_the_distance_of_its_inputs_is_not_its_own() -> None:
    # Rows far from zero: the mean goes, and what is left is relatively 1e4 times as far apart.
    x = rows(0) + 1e4
    y = x + 1e-3 * rows(1)
    normalized = [Formula.bare(SPEC)(each, torch.float32).float() for each in (x, y)]
    apart = float((normalized[0] - normalized[1]).norm() / normalized[1].norm())
    assert apart > 8 * 1e-6
    taken = [snapshot({"a<": each, "a>": out}) for each, out in zip((x, y), normalized, strict=True)]
    renamed = snapshot({"A<": y, "A>": normalized[1]})
    assert diverged(PLACES, taken[0], renamed, None, [torch.float32]).birth is None
    wrong = snapshot({"A<": y, "A>": normalized[1] * 1.1})
    found = diverged(PLACES, taken[0], wrong, None, [torch.float32]).birth
    assert found is not None
    assert (found.where, found.path) == ("at", "a")


def test_a_single_row_suffices() -> None:
    names = {"a<": rows(0), "a>": rows(1)}
    other = {"A<": rows(0), "A>": rows(1).index_fill(0, torch.tensor([3]), 0.0)}
    found = diverged(PLACES, snapshot(names), snapshot(other), None, [torch.float32])
    assert found.birth is not None
    assert found.birth.path == "a"


def test_norms_that_one_run_did_not_reach_are_left_out() -> None:
    found = diverged(PLACES, snapshot({"a<": rows(0), "a>": rows(1)}), snapshot({}), None, [torch.float32])
    assert found == Divergence(compared=0)
