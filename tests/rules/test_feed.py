"""What is wrong with the data of a run, and what is not."""

from __future__ import annotations

import math

import pytest

from normkit.measurement.training import Origin
from normkit.rules.feed import described, flaws
from watched_runs import calm, raised, series, training

STEPS = 60


def judged(*measured, **changes):
    return [(flaw.kind, flaw.step, flaw.severity) for flaw in flaws(training(*measured, **changes))]


def digests(values):
    return series("batch digest", values)


def test_data_that_are_well():
    run = training(digests(range(STEPS)), calm("batch rms"), calm("batch distinct", level=90.0), calm("batch largest"))
    assert flaws(run) == ()
    assert described(run) == ("60 batches, no two in a row alike, 86 to 94 different values in a sample of each")
    assert described(training()) == ""
    assert flaws(training()) == ()


def test_numbers_that_are_none():
    bad = raised(calm("batch largest"), at_20=math.nan, at_21=math.inf)
    assert judged(bad) == [("not finite", 20, "error")]
    assert flaws(training(bad))[0].measured == "the input holds NaN or infinity in steps 20 to 21"


def test_numbers_that_are_too_large():
    assert judged(raised(calm("batch rms"), at_20=1e4)) == [("out of scale", 20, "error")]
    large = calm("batch rms", level=1e4)
    assert judged(large) == [("out of scale", 0, "warning")]
    began = Origin(kind="update", step=0, path="", detail="")
    assert judged(large, origin=began) == [("out of scale", 0, "error")]
    # Pictures whose values go to 255 are still usual, and so is a batch with one large value.
    assert judged(calm("batch rms", level=130.0)) == []
    assert judged(raised(calm("batch rms"), at_20=20.0)) == []


def test_one_value_in_all_places():
    constant = series("batch distinct", [90.0] * 20 + [1.0] * 40)
    assert judged(constant, digests([*range(20), *[7] * 40])) == [("constant", 20, "error")]
    assert judged(raised(calm("batch distinct", level=90.0), at_20=1.0)) == [("constant", 20, "warning")]
    assert judged(series("batch distinct", [90.0] * 20 + [2.0] * 40)) == [("constant", 20, "error")]
    # Two values are all that some data have.
    assert judged(series("batch distinct", [2.0] * 60)) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([*range(20), *[7] * 40], [("repeated", 20, "error")]),
        ([7] * 60, [("repeated", 0, "note")]),
        # Epochs over four batches; several passes over each batch; the end of a pass.
        (list(range(4)) * 15, []),
        ([step // 20 for step in range(60)], []),
        ([*range(50), *[7] * 10], []),
    ],
)
def test_batches_that_come_again(values, expected):
    assert judged(digests(values)) == expected


@pytest.mark.parametrize("quantity", ["labels copied", "labels back", "labels then"])
def test_labels_that_are_shifted_wrongly(quantity):
    labels = series("labels", [32.0] * STEPS)
    following = series("labels next", [0.1] * STEPS)
    wrong = series(quantity, [0.1] * 20 + [1.0] * 40)
    assert judged(labels, following, wrong) == [("shifted labels", 20, "error")]
    # What is the next input as well is so because the input repeats itself.
    assert judged(labels, series("labels next", [1.0] * STEPS), wrong) == []
    assert judged(labels, following, series(quantity, [0.8] * STEPS)) == []
    assert judged(labels, following, raised(calm(quantity, level=0.1), at_9=1.0)) == []


def test_labels_that_are_all_the_same():
    labels = series("labels", [32.0] * STEPS)
    assert judged(labels, series("label spread", [0.0] * STEPS)) == [("constant labels", 0, "warning")]
    assert judged(labels, series("label spread", [5.0] * 40 + [0.0] * 20)) == [("constant labels", 40, "warning")]
    # Of few labels it is chance.
    assert judged(labels, series("label spread", [5.0] * 54 + [0.0] * 6)) == []
