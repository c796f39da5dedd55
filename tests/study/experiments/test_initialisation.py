import pytest
import torch
from torch import nn

from normkit.study.arm_context import ArmContext
from normkit.study.experiments.initialisation import DEEP, SHALLOW, STUDY, build
from tiny_study import decided_claim

TINY = {**STUDY.quick, "depths": (2, 16), "layers": 1, "deep_layers": 2, "width": 16, "batch": 2, "window": 8}
TINY["steps"] = 2


@pytest.fixture(scope="module")
def measured():
    lab = ArmContext(settings=TINY, seed=0)
    return {0: {arm.name: STUDY.measure(lab, arm) for arm in STUDY.arms(TINY)}}


@pytest.mark.slow
def test_measured_starts_differ_as_their_names_say(measured):
    assert tuple(measured[0]) == (*SHALLOW, *DEEP)
    assert all(len(arm["losses"]) == 2 for arm in measured[0].values())
    assert len({arm["first"] for arm in measured[0].values()}) == len(measured[0])
    usual = measured[0]["gain 1, bias 0"]
    assert usual["affine"] == 0
    assert usual["whole"] > 0.1
    assert measured[0]["gain 0.5"]["affine"] == pytest.approx(0.5)
    assert measured[0]["gain 2"]["affine"] == pytest.approx(1.0)
    # Rows of a norm have length sqrt(n), and so has a bias of n normal numbers, about.
    assert measured[0]["random bias"]["affine"] == pytest.approx(1.0, rel=0.5)
    scaled, drawn, zero = (
        measured[0][name]["stream"] for name in ("outputs over sqrt(2L)", "gain 1, bias 0", "outputs at 0")
    )
    assert drawn[-1] > 3 * drawn[0]
    assert scaled[-1] < 2 * scaled[0]
    assert zero == pytest.approx([zero[0]] * 2)
    found = decided_claim(STUDY.claims[0], measured)
    assert (found.verdict, found.only_if) == ("reproduced only if", "only its affine part is meant")
    loss, end = STUDY.charts(TINY, list(measured.values()))
    assert [line.label for _, lines in loss.panels for line in lines] == [*SHALLOW, *DEEP]
    assert loss.panels[0][1][0].y == tuple(measured[0]["gain 1, bias 0"]["losses"])
    assert dict(end.values)["DeepNorm"] == (measured[0]["DeepNorm"]["loss"],)
    assert 1 < loss.reference[0] < 3.47


def invented(**losses):
    usual = {"gain 1, bias 0": 2.4, "gain 0.1": 2.6, "gain 0.5": 2.5, "gain 2": 2.5, "random bias": 2.5}
    others = {"outputs at 0": 2.4, "outputs over sqrt(2L)": 2.4}
    deep = {"post": 3.3, "alpha alone": 3.0, "beta alone": 3.0, "DeepNorm": 2.5}
    grown = {"gain 1, bias 0": 0.5, "outputs over sqrt(2L)": 0.0}
    depths = (12, 24, 48)
    return {
        0: {
            name: {
                "loss": losses.get(name, loss),
                "depths": list(depths),
                "stream": [layers ** (2 * losses.get(f"{name} grows", grown.get(name, 0))) for layers in depths],
            }
            for name, loss in {**usual, **others, **deep}.items()
        }
    }


def test_what_is_said_is_reproduced_by_measurements_that_say_it():
    assert [decided_claim(claim, invented()).verdict for claim in STUDY.claims[1:]] == ["reproduced"] * 4


@pytest.mark.parametrize(
    ("claim", "losses", "verdict"),
    [
        (1, {"gain 0.5": 2.3}, "reproduced only if"),
        (1, {"gain 1, bias 0": 3.0}, "not reproduced"),
        (2, {"outputs over sqrt(2L) grows": 0.5}, "not reproduced"),
        (3, {"outputs at 0": 2.6}, "not reproduced"),
        (4, {"DeepNorm": 3.3}, "not reproduced"),
    ],
)
def test_what_is_otherwise_is_not(claim, losses, verdict):
    assert decided_claim(STUDY.claims[claim], invented(**losses)).verdict == verdict


def built(name):
    return build(ArmContext(settings=TINY, seed=0), name, 2)


def norms(model):
    return [module for module in model.modules() if isinstance(module, nn.LayerNorm)]


@pytest.mark.parametrize(("name", "gain"), [("gain 1, bias 0", 1), ("gain 0.1", 0.1), ("gain 0.5", 0.5), ("gain 2", 2)])
def test_all_gains_start_at_the_arms(name, gain):
    found = norms(built(name))
    assert len(found) == 5
    assert all(torch.equal(norm.weight, torch.full((16,), gain)) and not norm.bias.any() for norm in found)


def test_random_biases_differ_from_norm_to_norm_and_not_from_run_to_run():
    first, second = norms(built("random bias")), norms(built("random bias"))
    assert all(torch.equal(a.bias, b.bias) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0].bias, first[1].bias)
    assert all((norm.weight == 1).all() for norm in first)


@pytest.mark.parametrize(("name", "factor"), [("outputs at 0", 0.0), ("outputs over sqrt(2L)", 0.5)])
def test_only_the_outputs_of_branches_are_scaled(name, factor):
    usual, scaled = built("gain 1, bias 0"), built(name)
    for (path, expected), weight in zip(usual.named_parameters(), scaled.parameters(), strict=True):
        output = path.endswith(("out.weight", "down.weight"))
        torch.testing.assert_close(weight, expected * (factor if output else 1))


def test_deep_arms_have_their_factors():
    configs = {name: build(ArmContext(settings=TINY, seed=0), name, 8).config for name in (*SHALLOW, *DEEP)}
    factors = {name: (configs[name].residual_scale, configs[name].branch_gain) for name in DEEP}
    alpha, beta = 2.0, pytest.approx(64**-0.25)
    assert factors == {
        "post": (1.0, 1.0),
        "alpha alone": (alpha, 1.0),
        "beta alone": (1.0, beta),
        "DeepNorm": (alpha, beta),
    }
    assert {configs[name].placement for name in DEEP} == {"post"}
    assert {configs[name].placement for name in SHALLOW} == {"pre"}
