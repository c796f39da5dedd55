import numpy as np
import pytest
import torch
from torch.nn.functional import layer_norm, rms_norm

from normkit import NormSpec, specs
from normkit.errors import InputError, ShapeError
from normkit.plots.camera import upright
from normkit.plots.stages import course_of

GAIN, BIAS = torch.tensor([1.3, 0.6, 1.0]).double(), torch.tensor([0.3, 0.1, 0.9]).double()
SPEC = NormSpec(eps=1e-3)
RMS = specs.LLAMA.replace(eps=1e-3)


@pytest.fixture(scope="module")
def x():
    return torch.randn(17, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.4


def shown(course):
    return {stage.name: stage.points @ upright().numpy().T for stage in course.stages}


def test_the_stages_of_a_layer_norm_are_what_torch_computes(x):
    course = course_of(x, None, SPEC, GAIN, BIAS)
    expected = {
        "Raw": x,
        "Centre": x - x.mean(-1, keepdim=True),
        "Scale": layer_norm(x, (3,), eps=1e-3),
        "Gain": layer_norm(x, (3,), GAIN, None, 1e-3),
        "Bias": layer_norm(x, (3,), GAIN, BIAS, 1e-3),
    }
    found = shown(course)
    assert list(found) == list(expected)
    for name, rows in expected.items():
        assert found[name] == pytest.approx(rows.numpy(), abs=1e-13)


def test_an_rms_norm_is_not_centred(x):
    course = course_of(x, None, RMS, GAIN, None)
    found = shown(course)
    assert list(found) == ["Raw", "Scale", "Gain"]
    assert found["Gain"] == pytest.approx(rms_norm(x, (3,), GAIN, 1e-3).numpy(), abs=1e-13)
    assert not course.is_centred
    assert not any(stage.is_flat for stage in course.stages)


def test_gain_and_bias_can_be_left_out(x):
    assert [stage.name for stage in course_of(x, None, SPEC, None, None).stages] == ["Raw", "Centre", "Scale"]
    only_bias = course_of(x, None, SPEC, None, BIAS).stages[-1]
    assert only_bias.name == "Bias"
    assert only_bias.gain.tolist() == [1.0, 1.0, 1.0]


def test_an_offset_counts_to_the_gain(x):
    stage = course_of(x, None, specs.GEMMA, GAIN, None).stages[-1]
    assert stage.gain == pytest.approx(1 + GAIN.numpy())


def test_invariants_hold_and_are_said_with_the_defect(x):
    stages = {stage.name: stage for stage in course_of(x, None, SPEC.replace(eps=0.0), GAIN, BIAS).stages}
    assert stages["Raw"].holds.startswith("|x|² = 3 mean² + 3 variance   (defect at most ")
    assert stages["Scale"].holds.startswith("direction unchanged,  norm = √3,  mean = 0   (defect")
    assert stages["Bias"].holds.startswith("|(y - b) / g| = √3,  sum((y - b) / g) = 0   (defect")
    for stage in stages.values():
        # A few units in the last place: rows of three numbers.
        assert float(stage.holds.split("at most ")[1].removesuffix(")")) < 2e-15


def test_with_eps_the_sphere_is_not_reached(x):
    assert "norm = √3 · shrink" in course_of(x, None, SPEC, None, None).stages[-1].holds


def test_formulas_are_those_of_the_spec(x):
    formulas = [stage.formula for stage in course_of(x, None, SPEC, GAIN, BIAS).stages]
    assert "w" not in formulas[2]
    assert r"w \odot" in formulas[3]
    assert "+ b" not in formulas[3]
    assert "+ b" in formulas[4]
    assert "0.001" in formulas[2]


@pytest.mark.parametrize(
    ("spec", "words"),
    [(SPEC, "a circle of radius √3"), (RMS, "the whole sphere of radius √3"), (SPEC.replace(correction=1), "√2")],
)
def test_the_surface_is_named(x, spec, words):
    course = course_of(x, None, spec, None, None)
    assert words in course.stages[-1].shape
    assert course.radius == pytest.approx({"√3": 3, "√2": 2}[words[-2:]] ** 0.5)


def test_a_row_without_direction_is_counted():
    course = course_of([[2.0, 2.0, 2.0], [1.0, 2.0, 4.0]], None, SPEC.replace(eps=0.0), None, None)
    assert course.stages[2].holds.endswith("1 of 2 points: 0/0")
    assert np.isnan(course.stages[2].points).any(1).tolist() == [True, False]


def test_more_groups_than_colours_use_colours_again(x):
    assert course_of(x[:5], [0, 1, 2, 3, 7], SPEC, None, None).groups == [0, 1, 2, 0, 1]


def test_what_cannot_be_shown_is_refused_in_one_line(x):
    cases = [
        ((x[:, :2], None, SPEC, None, None), ShapeError, r"shape \(N, 3\) are needed, got \(17, 2\)"),
        ((x, None, SPEC, GAIN[:2], None), ShapeError, "a parameter for 3 features"),
        ((x[:0], None, SPEC, None, None), InputError, "at least 1 point"),
        ((x * torch.inf, None, SPEC, None, None), InputError, "finite ones"),
        ((x, [0, 1], SPEC, None, None), InputError, "a group for each of its 17 points, got 2"),
        ((x, None, SPEC.replace(centre_numerator=False), None, None), InputError, "a LayerNorm or an RMSNorm"),
        ((x, None, SPEC.replace(weight_placement="before"), None, None), InputError, "with its gain last"),
    ]
    for arguments, error, message in cases:
        with pytest.raises(error, match=message) as caught:
            course_of(*arguments)
        assert "\n" not in str(caught.value)
