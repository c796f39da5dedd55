"""A norm taken apart: the pieces make the reference's output, and each law holds, and fails on a wrong value."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import PRESETS, arguments, assert_close, assert_differentiable, valid_specs
from normkit import NormSpec, reference
from normkit.errors import DtypeError, SpecError
from normkit.geometry import centre, decompose, shrink_factor
from normkit.geometry.decomposition import (
    affine_invariants,
    centred_invariants,
    pulled_back,
    raw_invariants,
    scaled_invariants,
)
from normkit.geometry.rows import sphere_radius

ROW_PRESETS = {name: spec for name, spec in PRESETS.items() if spec.axes == (-1,) and spec.groups == 1}
# Defects are of a few roundings in sums of up to 24 terms, and the bias is about as long as what it is added to.
SMALL = 1e-14

row_specs = valid_specs(eps=st.sampled_from([0.0, 1e-12, 1e-5, 0.3]), max_groups=1).filter(
    lambda spec: spec.axes == (-1,)
)


def named(decomposition):
    return {step.name: step for step in decomposition.steps}


def defects(decomposition):
    return {
        (order, invariant.statement): invariant.defect
        for order, step in enumerate(decomposition.steps)
        for invariant in step.invariants
    }


@pytest.mark.parametrize("name", ROW_PRESETS)
def test_every_preset_keeps_its_laws_and_ends_in_the_references_output(name):
    spec = ROW_PRESETS[name]
    x, weight, bias = arguments(spec, rows=5, features=24)
    taken = decompose(x, spec, weight, bias)
    assert_close(taken.output, reference.forward(x, spec, weight, bias), units=2)
    for law, defect in defects(taken).items():
        assert defect.shape == (5,), law
        assert defect.abs().max() < SMALL, law


@pytest.mark.slow
@given(spec=row_specs, seed=st.integers(0, 99))
def test_every_convention_keeps_its_laws(spec, seed):
    x, weight, bias = arguments(spec, rows=3, features=24, seed=seed)
    taken = decompose(x, spec, weight, bias)
    assert_close(taken.output, reference.forward(x, spec, weight, bias), units=2)
    # A gain may be small, and what is pulled back through it that much less exact.
    room = 1.0 if weight is None else float(1.0 / (weight + spec.weight_offset).abs().min()) + 1.0
    for law, defect in defects(taken).items():
        assert defect.abs().max() < 4 * SMALL * room, law


@pytest.mark.parametrize(
    ("spec", "statements"),
    [
        (
            NormSpec(),
            {
                "raw": ["|x|^2 = n mean^2 + n variance"],
                "centred": ["mean = 0", "variance unchanged by centring", "variance = |y|^2 / n"],
                "scaled": ["direction unchanged", "norm = sqrt(n) * shrink", "mean = 0"],
                "gain and bias": [
                    "|(y - b) / g| = sqrt(n) * shrink",
                    "sum((y - b) / g) = 0",
                    "y = b where g = 0",
                ],
            },
        ),
        (
            PRESETS["GEMMA"],
            {
                "raw": ["|x|^2 = n mean^2 + n variance"],
                "scaled": ["direction unchanged", "norm = sqrt(n) * shrink"],
                "gain and bias": ["|y / g| = sqrt(n) * shrink", "y = 0 where g = 0"],
            },
        ),
        (
            PRESETS["POCKET_TTS"],
            {
                "raw": ["|x|^2 = n mean^2 + n variance"],
                "scaled": ["direction unchanged", "|y - mean(y)| = sqrt(n - 1) * shrink"],
                "gain and bias": ["|y / g - mean(y / g)| = sqrt(n - 1) * shrink", "y = 0 where g = 0"],
            },
        ),
        (
            NormSpec(centre_statistics=False, has_weight=False),
            {
                "raw": ["|x|^2 = n mean^2 + n variance"],
                "centred": ["mean = 0", "variance unchanged by centring", "variance = |y|^2 / n"],
                "scaled": [
                    "direction unchanged",
                    "norm = sqrt(n) * shrink * sin(angle to 1 before centring)",
                    "mean = 0",
                ],
                "gain and bias": [
                    "|y - b| = sqrt(n) * shrink * sin(angle to 1 before centring)",
                    "sum(y - b) = 0",
                ],
            },
        ),
    ],
    ids=str,
)
def test_what_is_said_of_each_step(spec, statements):
    x, weight, bias = arguments(spec)
    taken = decompose(x, spec, weight, bias)
    assert {step.name: [law.statement for law in step.invariants] for step in taken.steps} == statements


def test_a_gain_before_normalizing_is_a_step_of_its_own():
    spec = NormSpec(weight_placement="before", weight_offset=1.0)
    x, weight, bias = arguments(spec)
    steps = decompose(x, spec, weight, bias).steps
    assert [step.name for step in steps] == ["raw", "gain and bias", "centred", "scaled", "gain and bias"]
    assert torch.equal(steps[1].value, x * (weight + 1.0))
    assert torch.equal(steps[4].value, steps[3].value + bias)


def test_the_numbers_of_a_step_are_those_of_its_rows():
    spec = NormSpec()
    x, weight, bias = arguments(spec, rows=4, features=24)
    steps = named(decompose(x, spec, weight, bias))
    ones = torch.ones(24, dtype=torch.float64)
    for name, step in steps.items():
        value = step.value
        assert_close(step.mean, value.sum(-1) / 24, length=24, terms=value.abs().max())
        assert_close(step.variance, value.var(-1, correction=0), length=24)
        assert_close(step.norm, (value * value).sum(-1).sqrt(), length=24)
        cosine = torch.nn.functional.cosine_similarity(value, ones, dim=-1)
        assert_close(step.angle_to_ones, cosine.acos(), length=24)
        assert_close(step.energy_along_ones, cosine.square(), length=24, terms=torch.ones(()))
        assert {step.mean.shape, step.variance.shape, step.norm.shape} == {(4,)}, name
    # The textbook's three: mean 0, variance 1 but for eps, and moved by gain and bias.
    assert_close(steps["centred"].mean, torch.zeros(4).double(), length=24, terms=x.abs().max())
    variance = x.var(-1, correction=0)
    assert_close(steps["centred"].variance, variance, length=24)
    assert_close(steps["scaled"].variance, variance / (variance + 1e-5), length=24)


@pytest.mark.slow
@given(shift=st.floats(-1e6, 1e6), seed=st.integers(0, 99))
def test_variance_does_not_feel_a_translation_and_eps_leaves_its_share_of_the_length(shift, seed):
    x = arguments(NormSpec(), seed=seed)[0]
    moved = decompose(x + shift, NormSpec()).steps[0].variance
    # Adding the shift rounds the entries in proportion to it.
    assert_close(moved, x.var(-1, correction=0), length=12, terms=torch.tensor(10.0 * (1 + abs(shift))))
    scaled = named(decompose(x, NormSpec(eps=0.1)))["scaled"]
    assert_close(scaled.norm, math.sqrt(12) * shrink_factor(centre(x), eps=0.1), length=12)


def wrong(spec, wrongly):
    """The laws of each step when its value is replaced by `wrongly(value)`."""
    x, weight, bias = arguments(spec, rows=4, features=24)
    steps = named(decompose(x, spec, weight, bias))
    raw, scaled, affine = steps["raw"].value, steps["scaled"].value, steps["gain and bias"].value
    entered = steps["centred"].value if "centred" in steps else raw
    deviation = centre(raw) if spec.centre_statistics else raw
    radius = spec.divisor.radius(24)
    target = shrink_factor(deviation, eps=spec.eps * radius**2 / 24)
    gain = None if weight is None else weight + spec.weight_offset
    laws = [
        *centred_invariants(wrongly(entered), raw),
        *scaled_invariants(wrongly(scaled), entered, target, spec),
        *affine_invariants(wrongly(affine), scaled, target, gain, bias, spec),
    ]
    return {law.statement: float(law.defect.abs().min()) for law in laws}


@pytest.mark.parametrize(
    ("spec", "statement", "wrongly"),
    [
        (NormSpec(), "mean = 0", lambda value: value + 0.5),
        (NormSpec(), "variance unchanged by centring", lambda value: value * 1.25),
        (NormSpec(), "variance = |y|^2 / n", lambda value: value + 0.5),
        (NormSpec(), "direction unchanged", lambda value: value.flip(-1)),
        (NormSpec(), "norm = sqrt(n) * shrink", lambda value: value * 1.25),
        (NormSpec(), "|(y - b) / g| = sqrt(n) * shrink", lambda value: value * 1.25),
        (NormSpec(), "sum((y - b) / g) = 0", lambda value: value + 0.5),
        (PRESETS["POCKET_TTS"], "|y - mean(y)| = sqrt(n - 1) * shrink", lambda value: value * 1.25),
        (PRESETS["POCKET_TTS"], "|y / g - mean(y / g)| = sqrt(n - 1) * shrink", lambda value: value * 1.25),
    ],
)
def test_each_law_can_be_broken(spec, statement, wrongly):
    # Far above what rounding leaves, in every row.
    assert wrong(spec, wrongly)[statement] > 1e-3
    if spec == NormSpec():
        assert wrong(spec, lambda value: value)[statement] < SMALL


def test_pythagoras_can_be_broken(monkeypatch):
    x = arguments(NormSpec(), rows=4)[0]
    assert raw_invariants(x)[0].defect.abs().max() < SMALL
    # It speaks of the row alone, so it is the centring that must be wrong.
    monkeypatch.setattr("normkit.geometry.decomposition.centre", lambda row: row)
    assert raw_invariants(x)[0].defect.abs().min() > 1e-3


def test_entries_without_gain_are_pinned_to_the_bias():
    spec = NormSpec(eps=0.1)
    x, weight, bias = arguments(spec, rows=4, features=24)
    weight[:5] = 0.0
    taken = decompose(x, spec, weight, bias)
    # The lost entries are put in from before, so that the other laws still judge the rest.
    assert all(defect.abs().max() < SMALL for defect in defects(taken).values())
    scaled = named(taken)["scaled"].value
    assert_close(pulled_back(taken.output, scaled, weight, bias), scaled, units=64)
    assert torch.equal(pulled_back(taken.output, scaled, weight, bias)[:, :5], scaled[:, :5])
    broken = affine_invariants(taken.output + 1.0, scaled, scaled.norm(dim=-1), weight, bias, spec)
    assert {law.statement: float(law.defect.min()) for law in broken}["y = b where g = 0"] == 1.0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (NormSpec(), "sqrt(n)"),
        (NormSpec(correction=1), "sqrt(n - 1)"),
        (NormSpec(correction=1, multiplier="sqrt_n"), "sqrt(n - 1) * sqrt(n)"),
        (NormSpec(multiplier="sqrt_n"), "n"),
        (PRESETS["L2_NORM"], "1"),
        (PRESETS["X_TRANSFORMERS_RMS"], "sqrt(n)"),
    ],
    ids=str,
)
def test_the_radius_in_words_is_the_radius(spec, words):
    assert spec.divisor.radius_in_words == words
    assert eval(words, {"sqrt": math.sqrt, "n": 7}) == pytest.approx(sphere_radius(spec, 7))


ROWS = {
    "zero": torch.zeros(5),
    "constant": torch.full((5,), 0.1),
    "one-hot": torch.eye(5)[2],
    "one feature": torch.tensor([-3.0]),
    "two features": torch.tensor([1.0, -2.0]),
    "huge mean": 1e8 + torch.arange(5.0, dtype=torch.float64),
}
KINDS = {
    "layer": NormSpec(),
    "rms": PRESETS["LLAMA"],
    "outside": NormSpec(eps=1e-6, eps_placement="outside"),
    "clamp": PRESETS["X_TRANSFORMERS_RMS"],
    "mixed": PRESETS["POCKET_TTS"].replace(correction=0),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ROWS)
def test_degenerate_rows(name, kind):
    x, spec = ROWS[name].double(), KINDS[kind]
    weight = torch.ones_like(x)
    weight[0] = 0.0
    taken = decompose(x, spec, weight)
    # A row that is divided without being centred keeps its mean of 1e8, and rounds in proportion to it.
    room = max(1.0, float(taken.output.abs().max()))
    for law, defect in defects(taken).items():
        assert float(defect.abs()) < SMALL * room, law
    jacobian = torch.func.jacrev(lambda row: decompose(row, spec, weight).output)(x)
    assert jacobian.isfinite().all()
    forward = torch.func.jacfwd(lambda row: decompose(row, spec, weight).output)(x)
    # Entries are differences of terms of size 1 / s, and of 1e16 times that for an uncentred mean of 1e8.
    assert_close(forward, jacobian, terms=torch.tensor(max(1.0, float(jacobian.abs().max()), room**2)))


def test_without_eps_the_zero_row_is_nan_and_stays_in_its_row():
    x = torch.stack([torch.zeros(4), torch.arange(4.0)]).double()
    for step in decompose(x, NormSpec(eps=0.0)).steps[2:]:
        assert step.value.isnan().all(-1).tolist() == [True, False]
        assert [law.defect.isnan().tolist() for law in step.invariants] == [[True, False]] * len(step.invariants)


@pytest.mark.slow
def test_transforms_and_derivatives():
    spec = NormSpec(eps=0.1)
    x, weight, bias = arguments(spec, rows=3)

    def output(row):
        return decompose(row, spec, weight, bias).output

    def law(row):
        return decompose(row, spec, weight, bias).steps[2].invariants[1].defect

    assert_differentiable(output, x)
    assert torch.func.vmap(law)(x).abs().max() < SMALL
    jacobians = torch.func.vmap(torch.func.jacrev(output))(x)
    backward = torch.stack([reference.backward(row.expand_as(x), x, spec, weight, bias).x for row in torch.eye(12)])
    assert_close(jacobians, backward.movedim(0, 1), length=12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_kept_and_what_has_no_rows_is_refused(dtype):
    spec = NormSpec()
    x, weight, bias = arguments(spec, dtype=dtype, rows=3)
    taken = decompose(x, spec, weight, bias)
    assert {tensor.dtype for step in taken.steps for tensor in (step.value, step.norm, step.variance)} == {dtype}
    exact = reference.forward(x.double(), spec, weight.double(), bias.double())
    assert_close(taken.output, exact, dtype=dtype, length=12)
    # eps=None is the machine epsilon of that dtype's arithmetic.
    assert decompose(x, NormSpec(eps=None)).steps[-1].value.dtype == dtype
    with pytest.raises(SpecError, match=r"spec\.rows\.split"):
        decompose(x, NormSpec(groups=2))
    with pytest.raises(DtypeError, match="floating"):
        decompose(torch.arange(4), NormSpec())
