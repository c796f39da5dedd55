"""The five questions, what to change first, and how to confirm it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from normkit.identification.passport import without_spec
from normkit.identification.sites import OtherNorm
from normkit.measurement.facts import Attention
from normkit.rules import check
from normkit.rules.finding import Finding
from normkit.watching.answers import CLIPPING, DATA, NORM, RATE, START, answer
from normkit.watching.onset import origin
from watched_runs import VOCABULARY, Tiny, block, calm, facts, parameter, raised, rows, series, site, trained, training

UNIFORM = math.log(VOCABULARY)


def found(rule, severity="error", sites=("norm",), **changes):
    given = {
        "title": f"Title of {rule}",
        "measured": f"measured {rule}",
        "threshold": "t",
        "source": "s",
        "evidence": (f"evidence of {rule}",),
        "why": "w",
        "remedy": (f"remedy of {rule}", "another"),
        "confirm": f"confirm {rule}",
    }
    return Finding(rule=rule, severity=severity, sites=sites, **(given | changes))


NORMS = (site("norm"),)


def told(run, *findings, sites=NORMS, blocks=(), attentions=(), others=()):
    return answer(replace(run, origin=origin(run)), findings, sites, blocks, attentions, others=others)


def verdicts(run):
    return {each.question: each.verdict for each in run.answers}


def detail(run, question):
    return next(each.detail for each in run.answers if each.question == question)


def healthy():
    return training(
        series("loss", [UNIFORM, *calm("loss", steps=59).values]),
        calm("gradient norm"),
        calm("update ratio", "w", steps=12, level=1e-2, every=5),
        series("batch digest", range(60)),
        parameters=(parameter("w"),),
    )


def test_the_five_questions_come_in_order():
    run = told(healthy())
    assert [each.question for each in run.answers] == [DATA, NORM, RATE, CLIPPING, START]
    assert set(verdicts(run).values()) == {"no"}
    assert (run.origin, run.first_change) == (None, ())
    assert run.confirm == "Nothing is to be changed."


def test_norms_that_no_spec_describes_are_named_with_what_they_are():
    """The answer was "No norm was found", and "no" where other norms of the model had a spec."""
    others = [
        OtherNorm(path=path, reason="Norm: it halves its rows", passport=without_spec("norm", ""))
        for path in ("a.norm", "b.norm")
    ]
    for sites, number in (((), "2 norms"), (NORMS, "2 norms of 3")):
        run = told(healthy(), sites=sites, others=others)
        assert verdicts(run)[NORM] == "unknown"
        said = f"No spec describes {number}, so what they compute was not judged. a.norm: Norm: it halves its rows."
        assert detail(run, NORM) == said
    gated = OtherNorm(path="gated", reason="Norm: a gated norm", passport=without_spec("gated", ""))
    assert verdicts(told(healthy(), others=[gated]))[NORM] == "no"
    assert detail(told(healthy(), sites=(), others=[gated]), NORM).endswith("gated: Norm: a gated norm.")
    assert detail(told(healthy(), sites=()), NORM) == "The model has no norm."


@pytest.mark.slow
def test_a_healthy_real_run():
    run = trained(Tiny())
    findings, _ = check(facts(run))
    found = verdicts(told(run, *findings))
    # Of its batches nothing was measured.
    assert (found.pop(DATA), set(found.values())) == ("unknown", {"no"})


def test_an_empty_run_leaves_every_answer_unknown():
    run = told(training(vocabulary=0), sites=())
    assert set(verdicts(run).values()) == {"unknown"}


def test_the_numbers_of_a_healthy_run():
    run = told(healthy(), blocks=(block(0), block(1)))
    assert detail(run, NORM).startswith("1 norm, measured in 12 steps: formula")
    assert detail(run, RATE) == (
        "The largest of 12 measured steps changed the median weight by 1.05 %, w by 1.05 %: 23.3 % of the limit."
    )
    assert detail(run, CLIPPING).startswith("There was no spike to hold: over the last 60 steps")
    assert detail(run, START).startswith("The first loss is 3.47, 1 times log(32) = 3.47.")


def test_a_loss_that_is_a_sum_says_nothing_of_the_start():
    """A first loss of 878 was "no": the initialisation is not off, and in the same line 158 times log(256)."""
    run = healthy()
    summed = [
        replace(each, values=(1e4, *each.values[1:])) if each.quantity == "loss" and not each.path else each
        for each in run.series
    ]
    told_of = told(replace(run, series=tuple(summed)))
    assert verdicts(told_of)[START] == "unknown"
    assert detail(told_of, START) == "The first loss is 1e+04: it is a sum over tokens and no mean, and is not judged."


def test_encoder_and_decoder_have_a_stream_each():
    places = [f"{part}.layers.{place}" for part in ("encoder", "decoder") for place in (0, 1)]
    streams = [series("stream rms", [rms], path) for path, rms in zip(places, (1.0, 2.0, 0.5, 0.7), strict=True)]
    run = told(replace(healthy(), series=(*healthy().series, *streams)), blocks=(block(0), block(1)))
    assert detail(run, START).endswith(
        "The stream's rms goes from 1 behind encoder.layers.0 to 2 behind encoder.layers.1. "
        "The stream's rms goes from 0.5 behind decoder.layers.0 to 0.7 behind decoder.layers.1."
    )


def test_a_wrong_norm():
    run = told(healthy(), found("A1", sites=("a", "b")), found("F1", sites=("attention",)))
    assert verdicts(run)[NORM] == "yes"
    assert detail(run, NORM) == "title of A1: measured A1."
    assert run.answers[1].places == ("a", "b")
    assert run.first_change[0] == "at a and 1 more: remedy of A1"
    assert run.confirm.endswith("To see it at once: confirm A1.")


def test_weight_decay_on_gains_is_a_wrong_norm():
    assert verdicts(told(healthy(), found("B7", severity="warning")))[NORM] == "yes"


def test_a_parameter_that_no_optimizer_changed_is_a_wrong_norm_where_it_is_one():
    run = told(healthy(), found("F20", sites=("norm",)))
    assert (verdicts(run)[NORM], run.first_change[0]) == ("yes", "at norm: remedy of F20")
    assert verdicts(told(healthy(), found("F20", sites=("head.weight",))))[NORM] == "no"


@pytest.mark.parametrize("rule", ["F16", "F17", "F18", "F19"])
def test_data_come_first(rule):
    run = told(healthy(), found("A1"), found(rule, sites=()))
    assert verdicts(run)[DATA] == "yes"
    assert detail(run, DATA) == f"title of {rule}: measured {rule}."
    assert run.first_change[0] == f"remedy of {rule}"
    noted = told(healthy(), found(rule, severity="note", sites=()))
    assert (verdicts(noted)[DATA], noted.first_change) == ("unknown", ())


def test_a_loop_that_clips_is_not_told_to():
    kept = raised(calm("gradient kept", level=0.9), at_50=0.0625)
    spike = (raised(calm("loss"), at_50=5.0), raised(calm("gradient norm", level=0.8), at_50=16.0), kept)
    run = told(training(*spike), found("F5"))
    assert verdicts(run)[CLIPPING] == "no"
    assert detail(run, CLIPPING) == (
        "The loop clips already: it cut the gradient in 60 of 60 steps; in step 50 it was 16, 20 times its usual "
        "0.801, and was cut to 1."
    )
    assert not any("clip" in change for change in run.first_change)


def test_a_rate_that_rose_is_what_to_change():
    ratios = series("update ratio", [0.01] * 8 + [0.3] * 4, "w", every=5)
    rates = series("learning rate", [1e-3] * 40 + [3e-2] * 20)
    run = told(training(calm("loss"), ratios, rates, parameters=(parameter("w"),)), found("F11"))
    assert (run.origin.kind, run.origin.step) == ("learning rate", 40)
    assert detail(run, RATE) == "In step 40 the learning rate rose from 0.001 to 0.03 at once, 30 times."
    assert run.first_change[0].startswith("see what sets the learning rate in step 40")


@pytest.mark.parametrize("rule", ["E7", "E8", "F3"])
def test_findings_that_are_about_something_else(rule):
    run = told(healthy(), found(rule))
    assert verdicts(run)[NORM] == "no"
    assert run.first_change == (f"at norm: remedy of {rule}",)


def test_notes_answer_nothing():
    run = told(healthy(), found("A1", severity="note"))
    assert verdicts(run)[NORM] == "no"
    assert run.first_change == ()


def test_notes_on_formulas_are_not_denied():
    run = told(healthy(), found("A10", severity="note"), found("B7", severity="note"))
    assert verdicts(run)[NORM] == "no"
    assert "formula" not in detail(run, NORM)
    assert detail(run, NORM).endswith(" Noted: title of A10: measured A10.")
    assert "formula, gain, place and number type hold" in detail(told(healthy(), found("B7", severity="note")), NORM)


def test_nan_in_the_gain_of_the_norm_where_it_begins_is_its_fault():
    sites = (site("first", input=rows(nonfinite=3)), site("norm", input=rows(nonfinite=3)))
    broken = replace(training(series("non-finite", [0.0, math.nan], "norm")), broken=("norm.weight",))
    run = told(broken, found("E3", sites=("first", "norm")), sites=sites)
    assert verdicts(run)[NORM] == "yes"
    elsewhere = replace(broken, broken=("embedding.weight",))
    assert verdicts(told(elsewhere, found("E3", sites=("first", "norm")), sites=sites))[NORM] == "no"


def test_a_path_keeps_its_letters_at_the_start_of_an_answer():
    run = told(healthy(), found("B5", sites=("blocks.0.n1",), evidence=("blocks.0.n1: starts at a mean gain of 2",)))
    assert detail(run, START) == "blocks.0.n1: starts at a mean gain of 2."


def test_nan_that_a_norm_was_given_is_not_its_fault():
    given, made = site("norm", input=rows(nonfinite=3)), site("norm", output=rows(nonfinite=3))
    assert verdicts(told(healthy(), found("E3"), sites=(given,)))[NORM] == "no"
    assert verdicts(told(healthy(), found("E3"), sites=(made,)))[NORM] == "yes"


@pytest.mark.slow
def test_a_rate_that_is_too_high():
    run = trained(Tiny(), learning_rate=9e-2)
    findings, _ = check(facts(run))
    run = told(run, *findings)
    assert verdicts(run)[RATE] == "yes"
    assert "times the limit" in detail(run, RATE)
    assert run.answers[2].places
    assert any(change.startswith("lower the learning rate about ") for change in run.first_change)


def test_the_factor_of_the_rate_is_that_of_the_worst_step():
    ratios = series("update ratio", [0.01, 0.045 * 5.5], "w", every=5)
    run = told(training(calm("loss"), ratios, parameters=(parameter("w", learning_rate=0.18),)), found("F11"))
    assert run.first_change == ("lower the learning rate about 6 times, from 0.18 to 0.03",)


def test_a_first_step_alone_asks_for_a_warm_up():
    ratios = series("update ratio", [0.45, 0.01], "w", every=5)
    run = told(training(calm("loss"), ratios, parameters=(parameter("w"),)), found("F11"))
    assert run.first_change == ("warm the learning rate up: step 0 alone was 10 times past the limit",)


def test_a_step_past_the_limit_is_told_with_why_it_does_no_harm():
    """It said "no", and "223 % of the limit"."""
    large = series("update ratio", [0.1, *[1e-2] * 11], "w", every=5)
    run = training(*(each for each in healthy().series if each.quantity != "update ratio"), large)
    answer = detail(told(replace(run, parameters=(parameter("w"),))), RATE)
    assert answer.endswith("222 % of the limit, and fewer than 4 such steps, or Adam's first ones, do no harm.")


def test_large_logits_are_told_beside_the_rate():
    attention = Attention(
        path="attention",
        block=0,
        source="sdpa",
        heads=1,
        head_dim=8,
        bound=2e4,
        bounds=(2e4,),
        sampled_max=1e4,
        sampled_rows=1,
        entropy=0.0,
        entropy_min=0.0,
        uniform_entropy=1.0,
    )
    assert "Attention logits may reach 2e+04." in detail(told(healthy(), attentions=(attention,)), RATE)


def test_clipping_would_have_held_a_bad_batch():
    run = told(
        training(raised(calm("loss"), at_50=5.0), raised(calm("gradient norm", level=0.8), at_50=16.0)), found("F5")
    )
    assert verdicts(run)[CLIPPING] == "yes"
    assert detail(run, CLIPPING) == (
        "At 1.6, twice the usual gradient norm of 0.801: in step 50 it was 16, and would have been cut 10 times."
    )
    assert run.first_change == (
        "clip the gradient norm at 1.6",
        "look at the batch of step 50, and leave it out if it is not what the others are",
    )


def test_clipping_holds_no_gradient_that_did_not_grow():
    run = told(training(raised(calm("loss"), at_50=5.0), raised(calm("gradient norm"), at_50=1.5)))
    assert verdicts(run)[CLIPPING] == "no"
    assert detail(run, CLIPPING).startswith("The gradient norm had not grown: 1.5 in step 50, 1.5 times its usual 1")


@pytest.mark.parametrize("first", ["update ratio", "logit bound", "stream rms"])
def test_clipping_comes_too_late_where_something_moved_before(first):
    run = training(
        raised(calm("loss"), at_50=5.0),
        raised(calm("gradient norm"), at_50=20.0),
        raised(calm(first, "w", level=1e-3), at_48=0.02),
        parameters=(parameter("w"),),
    )
    run = told(run)
    assert verdicts(run)[CLIPPING] == "no"
    assert "this began before, in step 48" in detail(run, CLIPPING)


def test_clipping_holds_no_nan():
    forward = told(training(calm("loss"), calm("gradient norm"), series("non-finite", [7.0], "a", first=50)))
    assert verdicts(forward)[CLIPPING] == "no"
    assert "before there was a gradient to clip" in detail(forward, CLIPPING)
    assert forward.first_change[0] == "see what is computed in step 50 at a: the batch, masks, divisions, logarithms"
    backward = told(training(calm("loss"), raised(calm("gradient norm"), at_50=math.nan)))
    assert verdicts(backward)[CLIPPING] == "no"
    assert "stays so when it is clipped" in detail(backward, CLIPPING)


def test_a_few_steps_are_too_few_to_know_where_to_clip():
    run = told(training(calm("loss", steps=9), calm("gradient norm", steps=9)))
    assert verdicts(run)[CLIPPING] == "unknown"


def test_an_initialisation_that_is_off():
    run = trained(Tiny(), steps=2)
    run = training(series("loss", [3 * UNIFORM, 3.0]), *run.series[1:], parameters=run.parameters)
    findings, _ = check(facts(run))
    run = told(run, *findings, found("F1"), found("F4"))
    assert verdicts(run)[START] == "yes"
    assert detail(run, START).startswith("The first loss is 10.4; an even guess")
    # Logits and gradients follow from it.
    assert len(run.first_change) == 1
    assert run.first_change[0].startswith("draw weights")


def test_processes_come_before_all_else():
    run = told(healthy(), found("A1"), found("F12", sites=()), found("E7", sites=("gain",)))
    assert [change.split("remedy of ")[1] for change in run.first_change] == ["E7", "A1", "F12"]


def test_answers_leave_the_measurements_as_they_were():
    run = healthy()
    filled = told(run)
    assert filled.series == run.series
    assert filled.parameters == run.parameters
