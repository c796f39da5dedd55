"""Group F, the data of a run: what is wrong with it, and what is not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from normkit.measurement.training import Origin
from normkit.rules.data import (
    RULES,
    constant_input,
    described,
    flaws,
    input_out_of_range,
    other_data,
    repeated_batch,
    wrong_labels,
)
from normkit.rules.rule import NO_RUN, NotChecked
from watched_runs import calm, facts, raised, series, training

WELL = (
    series("batch digest", range(60)),
    *(calm("batch distinct", level=90.0), calm("batch rms"), calm("batch largest")),
    *(series("labels", [32.0] * 60), series("label spread", [9.0] * 60)),
    calm("loss"),
)
LABELS = series("labels", [32.0] * 60)
FOLLOWING = series("labels next", [0.1] * 60)
BROKEN = {"origin": Origin(kind="update", step=0, path="", detail="")}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_healthy_run_is_clean(rule):
    assert rule.check(facts(training(*WELL))) is None
    assert rule.check(facts(None)) is NO_RUN
    assert isinstance(rule.check(facts(training())), NotChecked)
    assert flaws(training(*WELL)) == flaws(training()) == ()
    assert described(training(*WELL)) == (
        "60 batches, no two in a row alike, 86 to 94 different values in a sample of each"
    )
    assert described(training()) == ""


@pytest.mark.parametrize(
    ("rule", "flaw"),
    [
        (input_out_of_range, raised(calm("batch largest"), at_20=math.nan)),
        (input_out_of_range, raised(calm("batch rms"), at_20=1e4)),
        (constant_input, series("batch distinct", [90.0] * 20 + [1.0] * 40)),
        (repeated_batch, series("batch digest", [*range(20), *[7] * 40])),
        (wrong_labels, series("labels copied", [0.0] * 20 + [1.0] * 40)),
    ],
)
def test_each_flaw_is_found_with_its_step(rule, flaw):
    found = rule.check(facts(training(*(each for each in WELL if each.quantity != flaw.quantity), flaw)))
    assert (found.severity, found.sites) == ("error", ())
    assert "step 20" in found.evidence[0]


@pytest.mark.parametrize(
    ("quantity", "after", "words"),
    [
        ("batch distinct", [200.0] * 20, "the number of different values in a sample is 200 in step 40, usually 9"),
        ("batch distinct", [200.0] + [90.0] * 19, "and the loss rose from 3 to 9 there"),
        ("id rms", [150.0] * 20, "the ids' rms is 150 in step 40"),
        ("id rms", [40.0] * 20, "such batches came in steps 40 to 59"),
        ("batch rms", [0.3] * 20, "the input's rms is 0.3 in step 40"),
    ],
)
def test_data_that_changed_where_the_loss_rose(quantity, after, words):
    usual = calm(quantity, level=1.0 if quantity == "batch rms" else 90.0)
    well = [each for each in WELL if each.quantity not in ("loss", quantity)]
    changed = series(quantity, [*usual.values[:40], *after])
    risen = series("loss", [*([3.0, 3.05, 2.95] * 20)[:40], 9.0, *[6.0] * 19])
    found = other_data.check(facts(training(*well, changed, risen)))
    assert (found.severity, found.sites) == ("warning", ())
    assert words in found.measured
    # Either alone may be healthy: other texts that are no harder, and a spike on batches as they always were.
    for one, other in ((changed, calm("loss")), (usual, risen)):
        assert other_data.check(facts(training(*well, one, other))) is None
    # A spike long after the change, which the model has got used to, is none of the data's.
    late = series("loss", [*([3.0, 3.05, 2.95] * 20)[:55], 9.0, *[6.0] * 4])
    early = series(quantity, [*usual.values[:20], *[after[0]] * 40])
    assert other_data.check(facts(training(*well, early, late))) is None


@pytest.mark.parametrize(
    ("measured", "changes", "expected"),
    [
        ((raised(calm("batch largest"), at_20=math.nan, at_21=math.inf),), {}, [("not finite", 20, "error")]),
        ((raised(calm("batch rms"), at_20=1e4),), {}, [("out of scale", 20, "error")]),
        ((calm("batch rms", level=1e4),), {}, [("out of scale", 0, "warning")]),
        ((calm("batch rms", level=1e4),), BROKEN, [("out of scale", 0, "error")]),
        # Pictures whose values go to 255 are still usual, and so is a batch with one large value.
        ((calm("batch rms", level=130.0),), {}, []),
        ((raised(calm("batch rms"), at_20=20.0),), {}, []),
        (
            (series("batch distinct", [90.0] * 20 + [1.0] * 40), series("batch digest", [*range(20), *[7] * 40])),
            *({}, [("constant", 20, "error")]),
        ),
        ((raised(calm("batch distinct", level=90.0), at_20=1.0),), {}, [("constant", 20, "warning")]),
        ((series("batch distinct", [90.0] * 20 + [2.0] * 40),), {}, [("constant", 20, "error")]),
        # Two values are all that some data have.
        ((series("batch distinct", [2.0] * 60),), {}, []),
        ((series("batch digest", [*range(20), *[7] * 40]),), {}, [("repeated", 20, "error")]),
        ((series("batch digest", [7] * 60),), {}, [("repeated", 0, "note")]),
        # Batches of one sample, many times; some equal samples are how small data are filled up.
        ((series("batch digest", range(60)), series("batch copies", [1.0] * 60)), {}, [("copies", 0, "warning")]),
        ((series("batch digest", range(60)), series("batch copies", [0.9] * 60)), {}, []),
        # Epochs over four batches; several passes over each batch; the end of a pass.
        ((series("batch digest", list(range(4)) * 15),), {}, []),
        ((series("batch digest", [step // 20 for step in range(60)]),), {}, []),
        ((series("batch digest", [*range(50), *[7] * 10]),), {}, []),
        ((LABELS, series("label spread", [0.0] * 60)), {}, [("constant labels", 0, "warning")]),
        ((LABELS, series("label spread", [5.0] * 40 + [0.0] * 20)), {}, [("constant labels", 40, "warning")]),
        # Of few labels it is chance.
        ((LABELS, series("label spread", [5.0] * 54 + [0.0] * 6)), {}, []),
    ],
)
def test_flaws(measured, changes, expected):
    assert [(flaw.kind, flaw.step, flaw.severity) for flaw in flaws(training(*measured, **changes))] == expected


@pytest.mark.parametrize("quantity", ["labels copied", "labels back", "labels then"])
def test_labels_that_are_shifted_wrongly(quantity):
    def judged(*measured):
        return [(flaw.kind, flaw.step, flaw.severity) for flaw in flaws(training(LABELS, *measured))]

    wrong = series(quantity, [0.1] * 20 + [1.0] * 40)
    assert judged(FOLLOWING, wrong) == [("shifted labels", 20, "error")]
    # What is the next input as well is so because the input repeats itself.
    assert judged(series("labels next", [1.0] * 60), wrong) == []
    assert judged(FOLLOWING, series(quantity, [0.8] * 60)) == []
    assert judged(FOLLOWING, raised(calm(quantity, level=0.1), at_9=1.0)) == []


def test_steps_are_told():
    bad = raised(calm("batch largest"), at_20=math.nan, at_21=math.inf)
    assert flaws(training(bad))[0].measured == "the input holds NaN or infinity in steps 20 to 21"
    found = repeated_batch.check(facts(training(series("batch digest", [7] * 60))))
    assert (found.severity, found.measured) == ("note", "all 60 steps are on the same batch")


def test_an_inspection_on_one_token_again_and_again_says_so_first():
    seen = facts(None)
    same = replace(seen, model=replace(seen.model, distinct=1))
    found = constant_input.check(same)
    assert (found.severity, found.sites) == ("warning", ())
    assert found.measured == "all 100 tokens of the text are the same token"
    for other in (replace(same.model, tokens=1), replace(same.model, distinct=2)):
        assert constant_input.check(replace(same, model=other)) is NO_RUN


def test_labels_of_one_step_that_are_all_the_same_are_not_told_as_one_label():
    (flaw,) = flaws(training(LABELS, series("label spread", [0.0] * 60)))
    assert flaw.measured == "1920 sampled labels: those of one step are all the same, in steps 0 to 59"
