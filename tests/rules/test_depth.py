"""Group F, the depth: idle blocks, and gradients from block to block."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from normkit.rules.depth import RULES, profile_ratios, start_of
from normkit.rules.rule import NO_TRAINING, NotChecked
from watched_runs import VOCABULARY, Tiny, block, calm, facts, parameter, series, site, trained, training

IDLE, GRADIENTS, START = RULES
UNIFORM = math.log(VOCABULARY)


@pytest.mark.slow
def test_blocks_that_hand_their_stream_on(models, inspected, finding, status):
    model = models.train(models.tiny("GPT2", layers=4))
    assert status(inspected(model), "F3") == "clean"
    with torch.no_grad():
        for index in (1, 3):
            for part in (model.transformer.h[index].attn.c_proj, model.transformer.h[index].mlp.c_proj):
                part.weight.zero_()
                part.bias.zero_()
    found = finding(inspected(model), "F3")
    assert (found.severity, found.sites) == ("warning", ("transformer.h.1", "transformer.h.3"))
    assert found.measured.startswith("2 of 4 blocks")
    assert "cosine between before and after 1.0000" in found.evidence[0]


@pytest.mark.slow
def test_branches_that_start_at_zero_are_a_note(models, inspected):
    model = models.tiny("GPT2", layers=3)
    with torch.no_grad():
        for each in model.transformer.h:
            each.attn.c_proj.weight.zero_()
            each.mlp.c_proj.weight.zero_()
    (found,) = [found for found in inspected(model).findings if found.rule == "F3"]
    assert found.severity == "note"
    assert "a usual initialisation" in found.measured


@pytest.mark.slow
def test_what_may_be_untrained_is_a_note(models, inspected, facts_of):
    idle = tuple(block(index, branch_share=0.0, cosine=1.0) for index in range(4))
    model = models.train(models.tiny("GPT2"))
    trained = replace(facts_of(inspected(model), model), blocks=idle)
    assert IDLE.check(trained).severity == "warning"
    # A watch compared the blocks when the run began.
    assert IDLE.check(replace(trained, training=training())).severity == "note"
    # Norms without gains do not tell.
    assert IDLE.check(replace(trained, sites=(site("a"),))).severity == "note"


@pytest.mark.parametrize(
    ("share", "cosine", "idle", "is_hit"),
    [(0.019, 0.9999, 2, True), (0.021, 0.9999, 2, False), (0.019, 0.997, 2, False), (0.019, 0.9999, 1, False)],
)
def test_each_threshold_of_idle_blocks(share, cosine, idle, is_hit):
    blocks = tuple(block(i, branch_share=share, cosine=cosine) if i < idle else block(i) for i in range(4))
    assert (IDLE.check(facts(None, blocks=blocks)) is not None) is is_hit


def test_blocks_that_were_not_compared_are_not_checked():
    assert isinstance(IDLE.check(facts(None)), NotChecked)
    assert isinstance(IDLE.check(facts(None, blocks=(block(0, branch_share=math.nan, cosine=math.nan),))), NotChecked)


@pytest.mark.slow
def test_one_block_that_adds_nothing_among_others_that_work(models, inspected, finding):
    model = models.tiny("GPT2", layers=4)
    with torch.no_grad():
        for part in (model.transformer.h[2].attn.c_proj, model.transformer.h[2].mlp.c_proj):
            part.weight.zero_()
            part.bias.zero_()
    found = finding(inspected(model), "F3")
    assert (found.severity, found.sites) == ("warning", ("transformer.h.2",))
    assert "adds exactly nothing" in found.evidence[0]


@pytest.mark.slow
def test_a_branch_that_adds_one_vector_to_every_row(models, inspected, finding):
    model = models.tiny("GPT2")
    model.transformer.h[1].mlp.c_fc.bias.data.fill_(-100.0)
    model.transformer.h[1].mlp.c_proj.bias.data.fill_(0.1)
    found = finding(inspected(model), "F3")
    assert (found.severity, found.sites) == ("warning", ("transformer.h.1.mlp",))
    assert "adds the same vector to every row" in found.evidence[0]


def test_one_vector_in_most_blocks_is_a_design():
    seen = replace(facts(None, blocks=(block(0), block(1), block(2))), constant=("blocks.0.mlp", "blocks.1.mlp"))
    assert IDLE.check(seen).severity == "note"
    assert IDLE.check(replace(seen, constant=("blocks.0.mlp",))).severity == "warning"


def gradients(*levels, streams=()):
    measured = [calm("activation gradient", f"blocks.{i}", steps=12, level=v, every=5) for i, v in enumerate(levels)]
    measured += [calm("stream rms", f"blocks.{i}", steps=12, level=v, every=5) for i, v in enumerate(streams)]
    return training(*measured)


@pytest.mark.parametrize(("ratio", "is_hit"), [(9.0, False), (11.0, True), (1 / 9, False), (1 / 11, True)])
def test_gradients_over_the_depth(ratio, is_hit):
    outcome = GRADIENTS.check(facts(gradients(1e-3, 1e-3 * math.sqrt(ratio), 1e-3 * ratio)))
    assert (outcome is not None) is is_hit
    if is_hit:
        assert outcome.severity == "warning"
        assert outcome.sites == ("blocks.0", "blocks.2")
        assert f"{math.sqrt(11):.2f} a block" in outcome.measured
        assert ("at the first block than" in outcome.measured) == (ratio > 1)


def test_a_stream_that_a_block_lengthens_shrinks_its_gradient():
    # As in OLMo 2, whose embedding is far shorter than what its norms add.
    assert GRADIENTS.check(facts(gradients(1e-3, 1e-5, 1e-5, streams=(0.05, 5.0, 5.0)))) is None
    assert GRADIENTS.check(facts(gradients(1e-3, 1e-5, 1e-5, streams=(1.0, 1.0, 1.0)))) is not None


def test_the_median_step_counts():
    run = gradients(1e-3, 1e-3, 1e-3)
    first = replace(run.series[2], values=(1.0, *run.series[2].values[1:]))
    assert GRADIENTS.check(facts(training(*run.series[:2], first))) is None
    assert profile_ratios(training(*run.series[:2], first))[0] == (0, 1.0 / run.series[0].values[0])


def test_a_block_without_any_gradient():
    outcome = GRADIENTS.check(facts(gradients(0.0, 0.0, 1e-3)))
    assert (outcome.severity, outcome.sites) == ("error", ("blocks.0", "blocks.1"))


def test_what_was_not_measured_is_not_checked():
    assert GRADIENTS.check(facts(None, sites=(site("a"),))) is NO_TRAINING
    assert isinstance(GRADIENTS.check(facts(gradients(1.0, 100.0))), NotChecked)
    broken = [series("activation gradient", [math.nan] * 3, f"blocks.{index}") for index in range(3)]
    assert isinstance(GRADIENTS.check(facts(training(*broken))), NotChecked)


def test_a_real_start_and_one_ten_times_as_large():
    assert START.check(facts(trained(Tiny(), steps=2))) is None
    model = Tiny()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor *= 30
    outcome = START.check(facts(trained(model, steps=2)))
    assert outcome.severity == "error"
    assert f"one that guesses all {VOCABULARY} entries alike has {UNIFORM:.3g}" in outcome.evidence[0]


@pytest.mark.parametrize(("ratio", "severity"), [(1.0, None), (1.2, None), (1.3, "warning"), (2.1, "error")])
def test_how_large_the_first_loss_is(ratio, severity):
    outcome = START.check(facts(training(series("loss", [ratio * UNIFORM, 1.0]))))
    assert (None if outcome is None else outcome.severity) == severity


def test_large_logits_of_an_untrained_model():
    logits = series("logit bound", [440.0], "attention")
    outcome = START.check(facts(training(series("loss", [UNIFORM]), logits)))
    assert (outcome.severity, outcome.sites) == ("warning", ("attention",))
    # A trained one, which is trained on, may have them.
    assert START.check(facts(training(series("loss", [0.5 * UNIFORM]), logits))) is None


def test_steep_gradients_of_an_untrained_model():
    steep = [series("activation gradient", [value], f"blocks.{place}") for place, value in enumerate((1e-4, 1e-2))]
    outcome = START.check(facts(training(series("loss", [UNIFORM]), *steep)))
    assert outcome.severity == "warning"
    assert outcome.evidence == ("the first gradient is 100 times as large behind the last block as behind the first",)


def test_a_start_that_was_not_seen_is_not_checked():
    assert START.check(facts(None)) is NO_TRAINING
    assert isinstance(START.check(facts(training(calm("loss"), vocabulary=0))), NotChecked)
    assert isinstance(START.check(facts(training(series("loss", [9 * UNIFORM], first=1)))), NotChecked)
    assert isinstance(START.check(facts(training(series("loss", [math.nan])))), NotChecked)


def test_a_summed_loss_is_not_judged():
    assert isinstance(START.check(facts(training(series("loss", [512 * UNIFORM])))), NotChecked)


@pytest.mark.parametrize(("spread", "mean", "is_fresh"), [(0.1, 0.4, False), (0.0, 1.0, True), (0.02, 0.002, True)])
def test_a_loss_above_chance_of_trained_weights_is_no_initialisation(spread, mean, is_fresh):
    gain = parameter("norm.weight", "gain", site="norm", first_spread=spread)
    measured = series("loss", [3 * UNIFORM]), series("gain mean", [mean], "norm")
    outcome = START.check(facts(training(*measured, parameters=(gain,))))
    assert isinstance(outcome, NotChecked) != is_fresh


def test_the_start_of_a_series():
    assert start_of(training(series("loss", [3.0, 2.0])), "loss") == 3.0
    assert math.isnan(start_of(training(series("loss", [3.0], first=4)), "loss"))
