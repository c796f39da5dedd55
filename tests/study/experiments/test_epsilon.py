import math

import pytest

from normkit.study.arm_context import ArmContext
from normkit.study.experiments.epsilon import STUDY
from tiny_study import decided_claim

TINY = {**STUDY.quick, "width": 16, "layers": 1, "batch": 2, "window": 8, "steps": 2}


@pytest.fixture(scope="module")
def measured():
    lab = ArmContext(settings=TINY, seed=0)
    return {0: {arm.name: STUDY.measure(lab, arm) for arm in STUDY.arms(TINY)}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "kept"),
    [
        ("eps inside the root", lambda r: r / math.sqrt(r * r + 1e-5)),
        ("eps outside the root", lambda r: r / (r + 1e-5)),
        ("eps as a lower bound", lambda r: r / max(r, 1e-5)),
    ],
)
def test_lengths_are_those_of_the_formulas(measured, arm, kept):
    expected = [kept(scale) for scale in TINY["scales"]]
    assert measured[0][arm]["kept"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_float16_loses_small_eps_and_verdicts_follow(measured):
    finite = dict(zip(TINY["sizes"], measured[0]["statistics in float16"]["constant row finite"], strict=True))
    assert finite == {1e-12: False, 1e-8: False, 1e-7: True, 1e-6: True, 1e-5: True, 1e-3: True}
    assert all(measured[0]["statistics in float32"]["constant row finite"])
    verdicts = [decided_claim(claim, measured) for claim in STUDY.claims[:3]]
    assert [(each.verdict, each.only_if) for each in verdicts] == [
        ("reproduced only if", "eps stands outside the root"),
        ("reproduced", ""),
        ("reproduced only if", "the statistics are float32"),
    ]


def trained(usual, small):
    return {
        f"trained with eps {eps:g}{words}": {"last": loss}
        for words, losses in (("", usual), (", small embeddings", small))
        for eps, loss in zip(TINY["trained_sizes"], losses, strict=True)
    }


@pytest.mark.parametrize(
    ("usual", "small", "verdict"),
    [
        ([2.0] * 4, [2.01] * 4, "reproduced"),
        ([2.0] * 4, [2.0, 2.0, 2.0, 2.3], "reproduced only if"),
        ([2.0, 2.0, 2.0, 2.2], [2.0, 2.0, 2.0, 2.3], "not reproduced"),
    ],
)
def test_training_is_judged_by_the_largest_difference(usual, small, verdict):
    assert decided_claim(STUDY.claims[3], {0: trained(usual, small)}).verdict == verdict


@pytest.mark.exhaustive
def test_small_embeddings_start_shorter_and_the_sizes_of_eps_share_their_start(measured):
    runs = measured[0]
    starts = [runs[f"trained with eps {eps:g}"]["losses"][0] for eps in TINY["trained_sizes"]]
    assert starts == pytest.approx([starts[0]] * 4, abs=1e-3)
    assert abs(runs["trained with eps 0.001, small embeddings"]["losses"][0] - starts[0]) > 1e-3


def test_the_charts_are_of_what_was_measured(measured):
    length, training, marks = STUDY.charts(TINY, list(measured.values()))
    assert [line.label for line in length.panels[0][1]] == [
        "eps inside the root",
        "eps outside the root",
        "eps as a lower bound",
    ]
    assert training.panels[0][1][0].y[0] == measured[0]["trained with eps 1e-12"]["last"]
    assert [holds for holds, _ in marks.cells[0]] == [False, False, True, True, True, True]
