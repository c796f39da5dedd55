import math

import pytest

from normkit.study.arm_context import ArmContext
from normkit.study.chart import Bars, Marks
from normkit.study.experiments.batch_against_layer import STUDY
from normkit.study.experiments.batch_models import NORMS, VARIANCE_SIZES

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
    charts = STUDY.charts(TINY, {0: measured})
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
    return {chart.name: chart for chart in STUDY.charts(SETTINGS, {seed: of_seed(seed) for seed in range(3)})}


def test_lines_are_medians_with_intervals_over_seeds(drawn):
    (_, lines), *_ = drawn["batch-size-error"].panels
    assert [line.label for line in lines] == list(NORMS)
    assert lines[0].x == (1.0, 2.0)
    assert lines[0].y == (11.0, 21.0)
    assert (lines[0].low, lines[0].high) == ((10.0, 20.0), (12.0, 22.0))


def test_a_number_that_is_missing_is_a_gap_and_a_run_that_ended_stands_at_the_edge(drawn):
    gap = drawn["mode-gap"].panels[0][1][0]
    assert math.isnan(gap.y[0])
    assert gap.y[1] == 0.5
    losses = drawn["cnn-loss"].panels[0][1][0].y
    assert losses == (2.0, 2.0, math.inf)


def test_bars_hold_each_seed_and_marks_say_what_depends(drawn):
    bars, marks = drawn["transformer-loss"], drawn["dependence"]
    assert isinstance(bars, Bars)
    assert isinstance(marks, Marks)
    assert dict(bars.values)["BatchNorm, training mode"] == (1.5, 1.5, 1.5)
    cells = dict(zip(marks.rows, marks.cells, strict=True))
    assert cells["BatchNorm, training"][0] == (True, 0.5)
    assert cells["LayerNorm, training"][0] == (False, 0.0)


def test_theory_stands_beside_the_measured_variance(drawn):
    measured, theory = drawn["batch-variance"].panels[0][1]
    assert measured.y == (1.0,) * 5
    assert theory.y[0] == pytest.approx(math.sqrt(2))
    assert theory.x == tuple(map(float, VARIANCE_SIZES))
