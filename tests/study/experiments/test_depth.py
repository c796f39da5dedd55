import math

import pytest

from normkit.study.arm_context import ArmContext
from normkit.study.experiments.depth import LONG, NARROW, STUDY, TRAINED, VARIANTS, build
from tiny_study import decided_claim

TINY = {
    **STUDY.quick,
    "depths": (2, 12, 24),
    "width": 16,
    "tokens": 16,
    "window": 4,
    "long_window": 8,
    "trained_layers": (4, 12),
    "trained_width": 16,
    "trained_batch": 2,
    "trained_window": 8,
    "steps": 2,
}


@pytest.fixture(scope="module")
def measured():
    lab = ArmContext(settings=TINY, seed=0)
    return {0: {arm.name: STUDY.measure(lab, arm) for arm in STUDY.arms(TINY)}}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_variant_is_measured_at_every_depth_and_two_are_trained(measured):
    assert set(measured[0]) == {
        *VARIANTS,
        LONG,
        NARROW,
        *(f"{name}, {layers} layers trained" for layers in (4, 12) for name in TRAINED),
    }
    for name in (*VARIANTS, NARROW):
        arm = measured[0][name]
        assert arm["depths"] == [2, 12, 24]
        assert len(arm["stream"]) == len(arm["last_gradient"]) == len(arm["change"]) == 3
        assert len(arm["deepest_stream"]) == 25
        assert len(arm["deepest_gradients"]) == 24
        assert arm["stream"][-1] == arm["deepest_stream"][-1]


def test_gradients_of_all_blocks_are_put_together():
    lab = ArmContext(settings={**TINY, "depths": (2,)}, seed=1)
    arm = STUDY.measure(lab, STUDY.arms(TINY)[1])
    assert arm["all_gradients"] == pytest.approx([math.hypot(*arm["deepest_gradients"])])


def test_the_variants_are_what_their_names_say():
    models = {name: build(ArmContext(settings=TINY, seed=0), name, 8) for name in VARIANTS}
    deep = models["DeepNorm"].config
    assert (deep.placement, deep.residual_scale, deep.branch_gain) == ("post", 2.0, pytest.approx(64**-0.25))
    assert models["depth-scaled"].config.depth_scaled
    assert [models[name].config.placement for name in ("post", "pre", "peri")] == ["post", "pre", "peri"]
    assert models["no norm"].config.norm is None
    assert not any("norm" in path for path, _ in models["no norm"].named_parameters())


@pytest.mark.slow
def test_a_tiny_model_explodes_and_norms_keep_it_level(measured):
    exploded, with_gradient, spread = (
        condition.statistic(measured[0]) for condition in STUDY.claims[0].conditions if condition.low != -0.1
    )
    assert exploded > 30
    assert with_gradient > 30
    assert 1 <= spread < 100
    assert measured[0]["post"]["deepest_stream"][1:] == pytest.approx([1.0] * 24, abs=1e-3)
    before = measured[0][NARROW]["before_norms"]
    # 1 from the norm before, and the mean of gelu(z)^2, 0.425; a width of 16 draws it with an error of a few tenths.
    assert (len(before), sum(before) / 24) == (24, pytest.approx(1.43, abs=0.15))
    assert measured[0][LONG]["stream"] != measured[0]["pre"]["stream"]
    assert measured[0][LONG]["depths"] == measured[0]["pre"]["depths"]
    arm = next(arm for arm in STUDY.arms(TINY) if arm.name == "no norm, 4 layers trained")
    again = STUDY.measure(ArmContext(settings=TINY, seed=0), arm)
    assert again == measured[0][arm.name]
    other = STUDY.measure(ArmContext(settings=TINY, seed=1), arm)
    assert other["losses"] != again["losses"]
    charts = {chart.name: chart for chart in STUDY.charts(TINY, list(measured.values()))}
    assert list(charts) == ["depth-stream", "depth-gradient", "depth-blocks", "depth-change", "depth-training"]
    stream = {line.label: line for line in charts["depth-stream"].panels[0][1]}
    assert stream["pre"].y == measured[0]["pre"]["deepest_stream"]
    assert stream["pre"].x == tuple(range(25))
    assert charts["depth-blocks"].panels[0][1][0].x == tuple(range(1, 25))
    assert charts["depth-gradient"].panels[0][1][1].x == (2, 12, 24)
    assert [title for title, _ in charts["depth-training"].panels] == ["4 layers", "12 layers"]


def start(stream, gradient, change=1.0, profile=(1.0, 1.0)):
    depths = (2, 12, 24, 48)
    return {
        "depths": list(depths),
        "stream": [layers**stream for layers in depths],
        "last_gradient": [layers**gradient for layers in depths],
        "all_gradients": [layers**gradient for layers in depths],
        "change": [layers**change for layers in depths],
        "deepest_stream": [1.0, 2.0, 3.0] if stream else [0.5, 1.0, 1.0],
        "deepest_gradients": list(profile),
    }


def as_published(**changed):
    paired = {
        "no norm": start(20.0, 10.0),
        "post": start(0.0, 0.0, 1.0),
        "pre": start(1.0, -0.5, 0.3),
        LONG: start(1.2, -0.6),
        NARROW: {"before_norms": [1.4, 1.6]},
        "peri": start(1.0, -0.5),
        "DeepNorm": start(0.0, -0.5),
        "depth-scaled": start(0.3, -0.6),
        "pre, 4 layers trained": {"loss": 2.5},
        "pre, 12 layers trained": {"loss": 2.5},
        "no norm, 4 layers trained": {"loss": 2.45},
        "no norm, 12 layers trained": {"loss": 100.0},
    }
    return {0: {**paired, **changed}}


def verdicts(measured):
    return [decided_claim(claim, measured).verdict for claim in STUDY.claims]


def test_what_theory_says_is_reproduced():
    expected = ["reproduced", "reproduced only if", "reproduced", "reproduced", "reproduced", "reproduced"]
    assert verdicts(as_published()) == expected
    assert decided_claim(STUDY.claims[1], as_published()).only_if == "the model has 12 layers"
    shown = [condition.statistic(as_published()[0]) for condition in STUDY.claims[2].conditions[2:4]]
    assert shown == pytest.approx([-0.6, -1.0])
    lost = {**start(20.0, 10.0), "all_gradients": [1.0, 10.0, 1e9, None], "deepest_gradients": [None, 1e9]}
    assert verdicts(as_published(**{"no norm": lost}))[0] == "reproduced"


@pytest.mark.parametrize(
    ("claim", "changed"),
    [
        (0, {"no norm": start(1.0, 0.0)}),
        (0, {"pre": start(2.0, -0.5)}),
        (0, {"post": start(0.0, 0.0, profile=(11.0, 1.0))}),
        (1, {"no norm, 12 layers trained": {"loss": 2.6}}),
        (2, {"post": start(0.0, 0.2)}),
        (2, {"pre": start(1.0, 0.0)}),
        (3, {"pre": {**start(1.0, -0.5), "deepest_stream": [0.5, 0.6, 0.7]}}),
        (3, {NARROW: {"before_norms": [1.0, 1.3]}}),
        (4, {"pre": start(1.0, -0.5, 1.0)}),
        (5, {"post": start(0.0, 0.0, 1.6)}),
    ],
)
def test_what_is_otherwise_is_not_reproduced(claim, changed):
    assert verdicts(as_published(**changed))[claim] == "not reproduced"
