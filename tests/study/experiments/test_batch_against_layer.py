import math

import pytest

from normkit.study.arm_context import ArmContext
from normkit.study.chart import Bars, Marks
from normkit.study.experiments.batch_against_layer import STUDY
from normkit.study.experiments.batch_models import NORMS, VARIANCE_SIZES
from tiny_study import decided_claim

TINY = {
    **STUDY.quick,
    "width": 8,
    "layers": 1,
    "steps": 1,
    "batch_sizes": (1, 2, 64),
    "channels": 1,
    "image_steps": 1,
    "sequence_steps": 1,
    "text_steps": 1,
    "text_layers": 1,
    "text_batch": 2,
    "window": 8,
}


def test_names_of_arms_are_unique_and_follow_the_settings():
    names = [arm.name for arm in STUDY.arms(TINY)]
    assert len(names) == len(set(names))
    assert {name for name in names if name.startswith("MLP: BatchNorm")} == {
        f"MLP: BatchNorm, batch {size}" for size in (1, 2, 64)
    }
    assert "Transformer: LayerNorm, rate 0.003" in names
    assert len(STUDY.arms(STUDY.quick)) == 24 + 6 + 4 + 4 + 8 + 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_condition_but_those_of_sizes_left_out_finds_its_arms():
    lab = ArmContext(settings=TINY, seed=0)
    measured = {arm.name: STUDY.measure(lab, arm) for arm in STUDY.arms(TINY)}
    for claim in STUDY.claims:
        for condition in claim.conditions:
            if "2 or 4" not in condition.says and "every batch size" not in condition.says:
                assert isinstance(condition.statistic(measured), float), condition.says
    charts = STUDY.charts(TINY, [measured])
    assert len({chart.name for chart in charts}) == len(charts) == 7


SETTINGS = {
    "batch_sizes": (1, 2),
    "extra_rows": (0, 4),
    "image_steps": 3,
    "image_batch_sizes": (2,),
    "text_rates": (1e-3,),
}


def of_seed(seed):
    mlp = {
        f"MLP: {norm}, batch {size}": {"error": 10.0 * size + seed, "gap": None if size == 1 else 0.5}
        for norm in NORMS
        for size in (1, 2)
    }
    cnn = {f"CNN: {norm}, batch 2": {"losses": [2.0, None]} for norm in ("BatchNorm", "LayerNorm", "no norm")}
    rnn = {
        f"RNN: {norm}": {"errors": [5.0, 9.0 + seed]}
        for norm in ("one BatchNorm", "a BatchNorm for each time", "LayerNorm", "no norm")
    }
    text = {
        f"Transformer: {norm}, rate 0.001": {
            "held_out": 2.0,
            "held_out_training_mode": 1.5,
            "held_out_new_statistics": 1.8,
        }
        for norm in ("BatchNorm", "LayerNorm")
    }
    dependences = {
        f"dependence: {norm}, {mode}": dict.fromkeys(
            ("samples", "batch size", "future", "padding", "mode"), 0.5 if norm == "BatchNorm" else 0.0
        )
        for norm in NORMS
        for mode in ("training", "evaluation")
    }
    return {**mlp, **cnn, **rnn, **text, **dependences, "variance: Gaussian rows": {"scatter": [1.0] * 5}}


@pytest.fixture
def drawn():
    return {chart.name: chart for chart in STUDY.charts(SETTINGS, [of_seed(seed) for seed in range(3)])}


def test_charts_hold_medians_gaps_bars_and_marks(drawn):
    (_, lines), *_ = drawn["batch-size-error"].panels
    assert [line.label for line in lines] == list(NORMS)
    assert lines[0].x == (1.0, 2.0)
    assert lines[0].y == (11.0, 21.0)
    assert (lines[0].low, lines[0].high) == ((10.0, 20.0), (12.0, 22.0))
    gap = drawn["mode-gap"].panels[0][1][0]
    assert math.isnan(gap.y[0])
    assert gap.y[1] == 0.5
    losses = drawn["cnn-loss"].panels[0][1][0].y
    assert losses == (2.0, 2.0, math.inf)
    bars, marks = drawn["transformer-loss"], drawn["dependence"]
    assert isinstance(bars, Bars)
    assert isinstance(marks, Marks)
    assert dict(bars.values)["BatchNorm, training mode"] == (1.5, 1.5, 1.5)
    cells = dict(zip(marks.rows, marks.cells, strict=True))
    assert cells["BatchNorm, training"][0] == (True, 0.5)
    assert cells["LayerNorm, training"][0] == (False, 0.0)
    measured, theory = drawn["batch-variance"].panels[0][1]
    assert measured.y == (1.0,) * 5
    assert theory.y[0] == pytest.approx(math.sqrt(2))
    assert theory.x == tuple(map(float, VARIANCE_SIZES))


COUPLINGS = ("samples", "batch size", "future", "padding", "mode")


def scores(kind, errors, **more):
    return {f"{kind}: {arm}": {"error": error, **more} for arm, error in errors.items()}


def dependence(value, mode):
    return {**dict.fromkeys(COUPLINGS, value), "mode": mode}


def as_claimed():
    """Measurements under which every statement holds."""
    mlp = scores(
        "MLP",
        {
            **{f"BatchNorm, batch {size}": error for size, error in ((2, 60.0), (4, 20.0), (64, 6.0))},
            **{f"LayerNorm, batch {size}": 10.0 for size in (1, 2, 4, 16, 64)},
        },
    )
    for arm, measured in mlp.items():
        measured["gap"] = -0.5 if arm in ("MLP: BatchNorm, batch 2", "MLP: BatchNorm, batch 4") else 0.0
    cnn = scores(
        "CNN",
        {
            "BatchNorm, batch 2": 40.0,
            "LayerNorm, batch 2": 20.0,
            "BatchNorm, batch 32": 5.0,
            "LayerNorm, batch 32": 5.0,
            "no norm, batch 32": 9.0,
        },
        scatter=0.1,
        losses=[2.0] * 10 + [0.1] * 30,
    )
    cnn["CNN: no norm, batch 32"]["losses"] = [2.0] * 30 + [0.1] * 10
    rnn = {
        "RNN: one BatchNorm": {"error": 40.0, "errors": [40.0, 60.0]},
        "RNN: a BatchNorm for each time": {"error": 30.0, "errors": [30.0, 60.0]},
        "RNN: LayerNorm": {"error": 10.0, "errors": [10.0, 20.0]},
    }
    texts = {
        f"Transformer: {norm}, rate {rate}": {
            "held_out": loss,
            "held_out_training_mode": loss - 0.5,
            "held_out_new_statistics": loss - 0.1,
            "scatter": 0.3,
        }
        for norm, losses in (("BatchNorm", (2.9, 2.8)), ("LayerNorm", (2.5, 2.4)))
        for rate, loss in zip(("0.001", "0.003"), losses, strict=True)
    }
    dependences = {
        f"dependence: {norm}, {mode}": dependence(0.0, 0.0)
        for norm in ("LayerNorm", "RMSNorm")
        for mode in ("training", "evaluation")
    }
    return {
        **mlp,
        **cnn,
        **rnn,
        **texts,
        **dependences,
        "dependence: BatchNorm, training": dependence(0.5, 0.5),
        "dependence: BatchNorm, evaluation": dependence(0.0, 0.5),
        "variance: Gaussian rows": {"scatter": [math.sqrt(2 / (size - 1)) for size in VARIANCE_SIZES]},
    }


def verdicts(measured):
    decided = [decided_claim(claim, dict.fromkeys(range(3), measured)) for claim in STUDY.claims]
    return [(each.verdict, each.only_if) for each in decided]


def test_verdicts_where_all_is_as_claimed_and_where_nothing_was_run():
    assert verdicts(as_claimed()) == [("reproduced", "")] * len(STUDY.claims)
    measured = as_claimed()
    measured["CNN: no norm, batch 32"]["losses"] = [2.0] * 40
    assert verdicts(measured)[4][0] == "reproduced"
    assert {verdict for verdict, _ in verdicts({})} == {"not run"}


@pytest.mark.parametrize(
    ("place", "arm", "change", "verdict"),
    [
        (0, "CNN: BatchNorm, batch 2", {"error": 21.0}, "reproduced only if"),
        (0, "MLP: BatchNorm, batch 64", {"error": 30.0}, "reproduced only if"),
        (1, "MLP: LayerNorm, batch 16", {"gap": 0.01}, "not reproduced"),
        (1, "MLP: BatchNorm, batch 64", {"gap": 0.2}, "not reproduced"),
        (2, "RNN: a BatchNorm for each time", {"error": 11.0}, "reproduced only if"),
        (2, "RNN: a BatchNorm for each time", {"errors": [30.0, 21.0]}, "reproduced only if"),
        (4, "CNN: BatchNorm, batch 32", {"losses": [2.0] * 40}, "not reproduced"),
        (3, "CNN: BatchNorm, batch 32", {"error": 9.5}, "not reproduced"),
        (5, "dependence: LayerNorm, training", {"future": 0.1}, "not reproduced"),
        (5, "dependence: BatchNorm, evaluation", {"padding": 0.1}, "not reproduced"),
        (5, "dependence: BatchNorm, training", {"future": 0.0}, "not reproduced"),
        (6, "Transformer: BatchNorm, rate 0.003", {"held_out": 2.45}, "reproduced only if"),
        (7, "Transformer: BatchNorm, rate 0.003", {"held_out_training_mode": 2.8}, "not reproduced"),
        (7, "CNN: BatchNorm, batch 32", {"scatter": 0.4}, "not reproduced"),
        (8, "variance: Gaussian rows", {"scatter": [1.0] * len(VARIANCE_SIZES)}, "not reproduced"),
    ],
)
def test_a_claim_falls_with_its_conditions(place, arm, change, verdict):
    measured = as_claimed()
    measured[arm] = {**measured[arm], **change}
    assert verdicts(measured)[place][0] == verdict
