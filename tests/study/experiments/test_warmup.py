import pytest

from normkit.study.arm_context import ArmContext
from normkit.study.corpus import MarkovChain
from normkit.study.experiments.warmup import STUDY, build
from tiny_study import decided_claim

TINY = {**STUDY.quick, "layers": 1, "width": 16, "batch": 2, "window": 8, "steps": 3, "warmup": 2}
NAMES = (
    "pre, no warm-up",
    "pre, warm-up",
    "post, no warm-up",
    "post, warm-up",
    "post, warm-up, 3 times the rate",
    "peri, no warm-up",
    "DeepNorm, no warm-up",
)


@pytest.fixture(scope="module")
def measured():
    lab = ArmContext(settings=TINY, seed=0)
    return {0: {arm.name: STUDY.measure(lab, arm) for arm in STUDY.arms(TINY)}}


@pytest.mark.slow
def test_arms_share_their_start_and_are_charted(measured):
    assert tuple(measured[0]) == NAMES
    assert all(len(arm["losses"]) == 3 for arm in measured[0].values())
    cold, warm = (measured[0][f"post, {words}"]["losses"] for words in ("no warm-up", "warm-up"))
    assert cold[0] == warm[0]
    assert cold[1] != warm[1]
    floor = MarkovChain(window=8).floor
    for arm in measured[0].values():
        assert arm["loss"] == pytest.approx(sum(min(loss, arm["losses"][0]) for loss in arm["losses"]) / 3)
        assert arm["above_floor"] == pytest.approx(arm["loss"] - floor)
    curves, bars = STUDY.charts(TINY, list(measured.values()))
    assert [title for title, _ in curves.panels] == ["pre-norm", "post-norm"]
    assert curves.panels[1][1][0].y == tuple(measured[0]["post, no warm-up"]["losses"])
    assert [name for name, _ in bars.values] == list(NAMES)
    assert 1 < curves.reference[0] < 3.47


def test_the_models_are_what_their_names_say():
    context = ArmContext(settings={**TINY, "layers": 8}, seed=0)
    built = {name: build(context, name, 32).config for name in ("pre", "post", "peri", "DeepNorm")}
    assert {name: config.placement for name, config in built.items()} == {
        "pre": "pre",
        "post": "post",
        "peri": "peri",
        "DeepNorm": "post",
    }
    assert (built["DeepNorm"].residual_scale, built["DeepNorm"].branch_gain) == (2.0, pytest.approx(64**-0.25))
    assert (built["post"].residual_scale, built["post"].branch_gain) == (1.0, 1.0)


def invented(**changed):
    losses = dict(zip(NAMES, (2.36, 2.40, 3.36, 3.0, 3.36, 2.4, 2.5), strict=True))
    losses.update({name.replace("_", " "): loss for name, loss in changed.items()})
    return {0: {name: {"loss": loss} for name, loss in losses.items()}}


def verdicts(measured):
    return [decided_claim(claim, measured).verdict for claim in STUDY.claims]


def test_post_norm_may_need_warm_up_and_catch_up_or_not():
    assert verdicts(invented()) == ["reproduced", "not reproduced", "reproduced"]
    assert verdicts(invented(**{"post, warm-up": 2.4, NAMES[4]: 2.4}))[1] == "reproduced"


@pytest.mark.parametrize(
    ("claim", "arm", "loss", "verdict"),
    [
        (0, "post, warm-up", 3.3, "not reproduced"),
        (0, "pre, no warm-up", 3.0, "not reproduced"),
        (2, "DeepNorm, no warm-up", 3.3, "not reproduced"),
        (2, "peri, no warm-up", 3.3, "not reproduced"),
    ],
)
def test_what_is_otherwise_is_not_reproduced(claim, arm, loss, verdict):
    assert verdicts(invented(**{arm: loss}))[claim] == verdict
