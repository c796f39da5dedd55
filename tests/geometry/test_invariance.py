"""The invariance table against the two papers' tables, against torch's own norms, and at eps > 0."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from normkit.errors import InputError, ShapeError
from normkit.geometry import invariances

TRANSFORMATIONS = (
    "weight matrix re-scaling",
    "weight matrix re-centring",
    "single weight vector re-scaling",
    "dataset re-scaling",
    "dataset re-centring",
    "single case re-scaling",
)
# Batch, weight and layer norm: Ba et al. 2016, table 1. All four: Zhang and Sennrich 2019, table 1.
PUBLISHED = {"batch": "YNYYYN", "weight": "YNYNNN", "layer": "YYNYNY", "rms": "YNNYNY"}
CELLS = [
    (name, norm, mark == "Y")
    for norm, marks in PUBLISHED.items()
    for name, mark in zip(TRANSFORMATIONS, marks, strict=True)
]
SHIFTS = {("weight matrix re-centring", "layer"), ("dataset re-centring", "batch")}
SMALL, NAN = {"n": 1, "outputs": 2, "batch": 2}, math.nan


def torch_norms(x: Tensor, weight: Tensor, eps: float) -> dict[str, Tensor]:
    """The four columns by torch's own functions; weight norm by the paper's formula, as torch's has no eps."""
    summed = x @ weight.T
    lengths = torch.linalg.vector_norm(weight, dim=1)
    return {
        "batch": F.batch_norm(summed, None, None, training=True, eps=eps),
        "weight": summed / torch.hypot(lengths, lengths.new_tensor(math.sqrt(eps))),
        "layer": F.layer_norm(summed, summed.shape[1:], eps=eps),
        "rms": F.rms_norm(summed, summed.shape[1:], eps=eps),
    }


@pytest.mark.parametrize(("transformation", "norm", "is_invariant"), CELLS)
def test_the_measured_table_is_the_published_one(transformation: str, norm: str, is_invariant: bool):
    table = invariances()
    cell = table.cell(transformation, norm)
    assert cell.is_invariant == is_invariant
    assert cell.error <= table.tolerance if is_invariant else cell.error > 1e-3
    assert (table.norms, tuple(row.transformation for row in table.rows)) == (tuple(PUBLISHED), TRANSFORMATIONS)


# Worst of 1,500 such tables: 0.2 of the tolerance, and 0.03 for a cell that is not invariant.
@pytest.mark.slow
@given(n=st.integers(2, 200), outputs=st.integers(3, 100), batch=st.integers(3, 100), seed=st.integers(0, 10_000))
def test_rounding_and_change_stay_apart_for_all_sizes_and_draws(n: int, outputs: int, batch: int, seed: int):
    table = invariances(n=n, outputs=outputs, batch=batch, seed=seed)
    for transformation, norm, is_invariant in CELLS:
        error = table.cell(transformation, norm).error
        assert error <= table.tolerance < 1e-9 if is_invariant else error > 1e-3


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_every_error_is_that_of_torchs_norms_on_the_same_draws(eps: float):
    n, outputs, batch, seed = 7, 5, 9, 3
    table = invariances(n=n, outputs=outputs, batch=batch, seed=seed, eps=eps)
    generator = torch.Generator().manual_seed(seed)
    x, weight, shift, weight_shift = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((batch, n), (outputs, n), (n,), (n,))
    )
    weight, weight_shift, c = weight / n**0.5, weight_shift / n**0.5, table.scale
    first_case, first_vector = torch.ones(batch, 1).double(), torch.ones(outputs, 1).double()
    first_case[0] = first_vector[0] = c
    changed = (
        (x, c * weight),
        (x, weight + torch.outer(torch.ones(outputs).double(), weight_shift)),
        (x, first_vector * weight),
        (c * x, weight),
        (x + shift, weight),
        (first_case * x, weight),
    )
    before = torch_norms(x, weight, eps)
    for row, arguments in zip(table.rows, changed, strict=True):
        for norm, y in torch_norms(*arguments, eps).items():
            expected = (y - before[norm]).abs().max() / before[norm].abs().max()
            # Two ways of rounding the same 24 numbers; torch's BatchNorm multiplies out before it subtracts.
            assert abs(table.cell(row.transformation, norm).error - expected) < 1e-13


def test_a_negative_scale_turns_the_sign_and_weight_norm_passes_the_datas_scale_through():
    table = invariances(scale=-1.0)
    for transformation in ("weight matrix re-scaling", "dataset re-scaling"):
        for norm in PUBLISHED:
            assert table.cell(transformation, norm).error == 2.0
    invariant = {(name, norm) for name, norm, _ in CELLS if table.cell(name, norm).is_invariant}
    assert invariant == SHIFTS
    assert invariances(scale=3.0).cell("dataset re-scaling", "weight").error == pytest.approx(2.0, rel=1e-14)


def test_eps_makes_re_scaling_approximate_and_leaves_re_centring_exact():
    table, tenth = invariances(eps=1e-5), invariances(eps=1e-6)
    for transformation, norm, is_invariant in CELLS:
        cell = table.cell(transformation, norm)
        assert cell.is_invariant == ((transformation, norm) in SHIFTS)
        if is_invariant and not cell.is_invariant:
            assert 1e-7 < cell.error < 1e-3
            # First order in eps; the second is eps over the smallest variance, a few hundredths here.
            assert cell.error / tenth.cell(transformation, norm).error == pytest.approx(10.0, rel=1e-2)


@pytest.mark.parametrize("norm", ["weight", "layer", "rms"])
@pytest.mark.parametrize("scale", [0.5, 2.0, 10.0])
def test_the_effect_of_eps_is_the_documented_one(norm: str, scale: float):
    eps = 1e-6
    # With so many features the variance of each of the few rows is within a tenth of 1.
    table = invariances(n=2000, outputs=500, batch=4, eps=eps, scale=scale)
    expected = eps * abs(1 - scale**-2) / 2
    assert table.cell("weight matrix re-scaling", norm).error == pytest.approx(expected, rel=0.25)


def test_the_same_seed_gives_the_same_table_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    first, second, other = invariances(seed=1), invariances(seed=1), invariances(seed=2)
    assert first == second
    assert first != other
    assert 2.0 < first.scale < 4.0
    assert torch.equal(torch.get_rng_state(), state)


def test_it_prints_as_aligned_columns():
    table = invariances()
    header, *body, note = str(table).splitlines()
    starts = [0, body[0].index("W'"), *(header.index(norm) for norm in table.norms)]
    assert len(body) == len(table.rows)
    for line, row in zip(body, table.rows, strict=True):
        columns = [line[start:stop].strip() for start, stop in zip(starts, [*starts[1:], None], strict=True)]
        name, what, *cells = columns
        assert (name, what) == (row.transformation, row.what)
        assert [cell.split()[0] == "yes" for cell in cells] == [cell.is_invariant for cell in row.cells]
        assert [float(cell.split()[1]) for cell in cells] == pytest.approx([c.error for c in row.cells], rel=0.05)
        assert all(line[start - 2 : start] == "  " for start in starts[1:])
    assert note == f"yes: error <= {table.tolerance:.1e}; eps = 0; c = {table.scale:.4g}"


def test_json_holds_every_number():
    table = invariances(eps=1e-5)
    document = table.to_json()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert list(document) == ["norms", "rows", "eps", "scale", "tolerance"]
    assert document["norms"] == list(table.norms)
    for row, values in zip(table.rows, document["rows"], strict=True):
        assert (values["transformation"], values["what"]) == (row.transformation, row.what)
        assert values["cells"] == [
            {"norm": cell.norm, "error": cell.error, "is_invariant": cell.is_invariant} for cell in row.cells
        ]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        # Sizes at which norms give signs.
        *(({name: size}, ShapeError, "n >= 2, outputs >= 3 and batch >= 3 are needed") for name, size in SMALL.items()),
        *(
            ({"eps": eps}, InputError, "eps must be a finite number of at least 0")
            for eps in (-1e-9, math.nan, math.inf)
        ),
        # At 1 BatchNorm too ignored the re-scaling of a single case.
        *(
            ({"scale": scale}, InputError, "scale must be a finite number other than 0")
            for scale in (0.0, NAN, -math.inf, 1.0, 1.0 + 2**-40)
        ),
    ],
)
def test_what_makes_no_table_is_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        invariances(**arguments)


def test_a_cell_that_is_not_there_is_named():
    with pytest.raises(InputError, match=r"no cell \('dataset re-scaling', 'group'\).*batch, weight, layer, rms"):
        invariances().cell("dataset re-scaling", "group")
