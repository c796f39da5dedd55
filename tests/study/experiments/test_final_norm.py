import pytest

from normkit.study.arm_context import ArmContext
from normkit.study.experiments.final_norm import STUDY
from tiny_study import decided_claim

TINY = {
    **STUDY.quick,
    "depths": (2, 16),
    "rates": (1e-3, 1e-2),
    "start_width": 16,
    "start_window": 4,
    "start_tokens": 16,
    "layers": 1,
    "width": 16,
    "batch": 2,
    "window": 8,
    "steps": 3,
    "warmup": 1,
}


@pytest.fixture(scope="module")
def measured():
    lab = ArmContext(settings=TINY, seed=0)
    return {0: {arm.name: STUDY.measure(lab, arm) for arm in STUDY.arms(TINY)}}


@pytest.mark.slow
def test_a_final_norm_holds_the_logits_of_pre_norm_and_changes_nothing_after_post_norm(measured):
    with_norm, without = (measured[0][f"post, {words}"] for words in ("final norm", "none"))
    # The second norm divides by the root of 1 + 1e-5 of a mean square of 1.
    assert with_norm["logits"] == pytest.approx(without["logits"], rel=1e-4)
    assert with_norm["unembedding_gradient"] == pytest.approx(without["unembedding_gradient"], rel=1e-4)
    with_norm, without = (measured[0][f"pre, {words}"]["logits"] for words in ("final norm", "none"))
    assert without[-1] > 2 * without[0]
    assert with_norm[-1] == pytest.approx(with_norm[0], rel=0.2)
    lab = ArmContext(settings={**TINY, "rates": (1e-2,)}, seed=0)
    arm = STUDY.arms(TINY)[0]
    alone = STUDY.measure(lab, arm)
    assert alone["losses"] == measured[0][arm.name]["losses"][1:]
    assert alone["first"] == measured[0][arm.name]["first"]
    logits, gradient, rates = STUDY.charts(TINY, list(measured.values()))
    names = [line.label for line in logits.panels[0][1]]
    assert [*names, "no norm at all"] == [arm.name for arm in STUDY.arms(TINY)]
    assert logits.panels[0][1][1].y == tuple(measured[0]["pre, none"]["logits"])
    assert gradient.panels[0][1][0].y == tuple(measured[0]["pre, final norm"]["last_gradient"])
    assert rates.panels[0][1][0].x == TINY["rates"]
    # An entropy of 32 symbols: above 0 and below the logarithm of 32.
    assert 1 < rates.reference[0] < 3.47


def arm(logits, gradient, losses):
    depths = (2, 12, 24, 48)
    return {
        "depths": list(depths),
        "logits": [layers**logits for layers in depths],
        "last_gradient": [layers**gradient for layers in depths],
        "losses": list(losses),
    }


def invented(**changed):
    paired = {
        "pre, final norm": arm(0.0, -0.5, (2.4, 2.3, 2.5)),
        "pre, none": arm(0.5, 0.0, (2.5, 2.4, 3.3)),
        "post, final norm": arm(0.0, 0.0, (2.4, 2.3, 2.5)),
        "post, none": arm(0.0, 0.0, (2.42, 2.3, 2.47)),
        "no norm at all": {"losses": [2.6, 2.6, 3.3]},
    }
    return {0: {**paired, **changed}}


def test_what_theory_and_practice_say_is_reproduced():
    assert [decided_claim(claim, invented()).verdict for claim in STUDY.claims] == ["reproduced"] * 4
    (condition,) = STUDY.claims[3].conditions
    assert condition.statistic(invented()[0]) == pytest.approx(-0.03)


@pytest.mark.parametrize(
    ("claim", "changed", "verdict"),
    [
        (0, {"pre, none": arm(0.0, 0.0, (2.5, 2.4, 3.3))}, "not reproduced"),
        (0, {"pre, final norm": arm(0.5, -0.5, (2.4, 2.3, 2.5))}, "not reproduced"),
        (1, {"pre, none": arm(0.5, -0.5, (2.5, 2.4, 3.3))}, "not reproduced"),
        (2, {"pre, none": arm(0.5, 0.0, (2.4, 2.3, 2.5))}, "not reproduced"),
        (2, {"pre, none": arm(0.5, 0.0, (2.4, 2.3, 3.5))}, "reproduced only if"),
        (2, {"no norm at all": {"losses": [2.3, 2.6, 3.3]}}, "not testable here"),
        (3, {"post, none": arm(0.0, 0.0, (2.4, 2.3, 2.6))}, "not reproduced"),
    ],
)
def test_what_is_otherwise_is_not_reproduced(claim, changed, verdict):
    assert decided_claim(STUDY.claims[claim], invented(**changed)).verdict == verdict
