"""Group F, the depth: idle blocks, and gradients from block to block."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from normkit.rules.depth import idle_blocks, poor_start, profile_ratios, start_of, steep_gradients
from normkit.rules.rule import NO_TRAINING, NotChecked
from watched_runs import VOCABULARY, Tiny, block, calm, facts, parameter, series, site, trained, training

UNIFORM = math.log(VOCABULARY)


def silenced(model, *blocks, with_biases=True):
    """A GPT-2 in which some blocks add nothing."""
    with torch.no_grad():
        for index in blocks:
            for part in (model.transformer.h[index].attn.c_proj, model.transformer.h[index].mlp.c_proj):
                part.weight.zero_()
                if with_biases:
                    part.bias.zero_()
    return model


def constant_branch(model):
    model.transformer.h[1].mlp.c_fc.bias.data.fill_(-100.0)
    model.transformer.h[1].mlp.c_proj.bias.data.fill_(0.1)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "severity", "sites", "words"),
    [
        (
            lambda m: silenced(m.train(m.tiny("GPT2", layers=4)), 1, 3),
            *("warning", ("h.1", "h.3"), "cosine between before and after 1.0000"),
        ),
        (lambda m: silenced(m.tiny("GPT2", layers=4), 2), "warning", ("h.2",), "adds exactly nothing"),
        (lambda m: constant_branch(m.tiny("GPT2")), "warning", ("h.1.mlp",), "adds the same vector to every row"),
        # Branches that start at zero.
        (lambda m: silenced(m.tiny("GPT2"), 0, 1, with_biases=False), "note", ("h.0", "h.1"), "by 0 %"),
    ],
)
def test_blocks_that_do_nothing(models, inspected, finding, make, severity, sites, words):
    found = finding(inspected(make(models)), "F3")
    assert (found.severity, found.sites) == (severity, tuple(f"transformer.{site}" for site in sites))
    assert words in found.evidence[0]
    assert ("a usual initialisation" in found.measured) == (severity == "note")
    assert found.remedy[0].startswith("nothing" if severity == "note" else "scale each norm's output")


@pytest.mark.slow
def test_blocks_that_work_are_clean(models, inspected, status):
    assert status(inspected(models.train(models.tiny("GPT2", layers=4))), "F3") == "clean"


@pytest.mark.slow
def test_what_may_be_untrained_is_a_note(models, inspected, facts_of):
    idle = tuple(block(index, branch_share=0.0, cosine=1.0) for index in range(4))
    model = models.train(models.tiny("GPT2"))
    trained = replace(facts_of(inspected(model), model), blocks=idle)
    assert idle_blocks.check(trained).severity == "warning"
    # A watch compared the blocks when the run began.
    assert idle_blocks.check(replace(trained, training=training())).severity == "note"
    # Norms without gains do not tell.
    assert idle_blocks.check(replace(trained, sites=(site("a"),))).severity == "note"


@pytest.mark.parametrize(
    ("share", "cosine", "idle", "is_hit"),
    [(0.019, 0.9999, 2, True), (0.021, 0.9999, 2, False), (0.019, 0.997, 2, False), (0.019, 0.9999, 1, False)],
)
def test_each_threshold_of_idle_blocks(share, cosine, idle, is_hit):
    blocks = tuple(block(i, branch_share=share, cosine=cosine) if i < idle else block(i) for i in range(4))
    assert (idle_blocks.check(facts(None, blocks=blocks)) is not None) is is_hit


def test_blocks_that_were_not_compared_are_not_checked():
    assert isinstance(idle_blocks.check(facts(None)), NotChecked)
    assert isinstance(
        idle_blocks.check(facts(None, blocks=(block(0, branch_share=math.nan, cosine=math.nan),))), NotChecked
    )


def test_one_vector_in_most_blocks_is_a_design():
    seen = replace(facts(None, blocks=(block(0), block(1), block(2))), constant=("blocks.0.mlp", "blocks.1.mlp"))
    assert idle_blocks.check(seen).severity == "note"
    assert idle_blocks.check(replace(seen, constant=("blocks.0.mlp",))).severity == "warning"


def gradients(*levels, streams=()):
    measured = [calm("activation gradient", f"blocks.{i}", steps=12, level=v, every=5) for i, v in enumerate(levels)]
    measured += [calm("stream rms", f"blocks.{i}", steps=12, level=v, every=5) for i, v in enumerate(streams)]
    return training(*measured)


@pytest.mark.parametrize(("ratio", "is_hit"), [(9.0, False), (11.0, True), (1 / 9, False), (1 / 11, True)])
def test_gradients_over_the_depth(ratio, is_hit):
    outcome = steep_gradients.check(facts(gradients(1e-3, 1e-3 * math.sqrt(ratio), 1e-3 * ratio)))
    assert (outcome is not None) is is_hit
    if is_hit:
        assert outcome.severity == "warning"
        assert outcome.sites == ("blocks.0", "blocks.2")
        assert f"{math.sqrt(11):.2f} a block" in outcome.measured
        assert ("at the first block than" in outcome.measured) == (ratio > 1)


def test_gradients_of_stages_of_several_widths_are_not_compared():
    stages = block(0), replace(block(1), stream_out=replace(block(1).stream_out, features=7))
    outcome = steep_gradients.check(facts(gradients(1e-3, 1e-2, 1.0), blocks=stages))
    assert isinstance(outcome, NotChecked)


def test_a_stream_that_a_block_lengthens_shrinks_its_gradient():
    # As in OLMo 2, whose embedding is far shorter than what its norms add.
    assert steep_gradients.check(facts(gradients(1e-3, 1e-5, 1e-5, streams=(0.05, 5.0, 5.0)))) is None
    assert steep_gradients.check(facts(gradients(1e-3, 1e-5, 1e-5, streams=(1.0, 1.0, 1.0)))) is not None


def test_the_median_step_counts():
    run = gradients(1e-3, 1e-3, 1e-3)
    first = replace(run.series[2], values=(1.0, *run.series[2].values[1:]))
    assert steep_gradients.check(facts(training(*run.series[:2], first))) is None
    depth = [f"blocks.{index}" for index in range(3)]
    assert profile_ratios(training(*run.series[:2], first), depth)[0] == (0, 1.0 / run.series[0].values[0])


def test_encoder_and_decoder_are_a_depth_each():
    def run(*levels):
        paths = [f"{part}.layers.{place}" for part in ("encoder", "decoder") for place in range(3)]
        pairs = zip(paths, levels, strict=True)
        return facts(training(*(series("activation gradient", [level], path) for path, level in pairs), vocabulary=32))

    level, fading = run(1e-5, 1e-5, 1e-5, 1e-3, 1e-3, 1e-3), run(1e-5, 1e-5, 1e-5, 1e-3, 1e-2, 1e-1)
    assert steep_gradients.check(level) is None
    assert steep_gradients.check(fading).sites == ("decoder.layers.0", "decoder.layers.2")
    for each, ratio in ((level, None), (fading, "100 times as large")):
        start = replace(each.training, series=(*each.training.series, series("loss", [UNIFORM])))
        outcome = poor_start.check(replace(each, training=start))
        assert (outcome is None) == (ratio is None)
        assert ratio is None or ratio in outcome.evidence[0]


def test_a_block_without_any_gradient():
    run = gradients(0.0, 0.0, 1e-3)
    outcome = steep_gradients.check(facts(run))
    assert (outcome.severity, outcome.sites) == ("error", ("blocks.0", "blocks.1"))
    # Gates that start at 0 open within some steps; those of trained weights have done so.
    started = replace(run, series=tuple(replace(one, steps=one.steps[:1], values=one.values[:1]) for one in run.series))
    assert isinstance(steep_gradients.check(facts(started)), NotChecked)
    learnt = replace(started, series=(*started.series, series("gain mean", [1.0], "norm")))
    learnt = replace(learnt, parameters=(parameter("norm.weight", "gain", site="norm", first_spread=0.1),))
    assert steep_gradients.check(facts(learnt)).severity == "error"


def test_what_was_not_measured_is_not_checked():
    assert steep_gradients.check(facts(None, sites=(site("a"),))) is NO_TRAINING
    assert isinstance(steep_gradients.check(facts(gradients(1.0, 100.0))), NotChecked)
    broken = [series("activation gradient", [math.nan] * 3, f"blocks.{index}") for index in range(3)]
    assert isinstance(steep_gradients.check(facts(training(*broken))), NotChecked)


def test_a_real_start_and_one_ten_times_as_large():
    assert poor_start.check(facts(trained(Tiny(), steps=2))) is None
    model = Tiny()
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() > 1:
                tensor *= 30
    outcome = poor_start.check(facts(trained(model, steps=2)))
    assert outcome.severity == "error"
    assert f"an even guess over all {VOCABULARY} entries has {UNIFORM:.3g}" in outcome.evidence[0]


@pytest.mark.parametrize(("ratio", "severity"), [(1.0, None), (1.2, None), (1.3, "warning"), (2.1, "error")])
def test_how_large_the_first_loss_is(ratio, severity):
    outcome = poor_start.check(facts(training(series("loss", [ratio * UNIFORM, 1.0]))))
    assert (None if outcome is None else outcome.severity) == severity


def test_large_logits_of_an_untrained_model():
    logits = series("logit bound", [440.0], "attention")
    outcome = poor_start.check(facts(training(series("loss", [UNIFORM]), logits)))
    assert (outcome.severity, outcome.sites) == ("warning", ("attention",))
    # A trained one, which is trained on, may have them.
    assert poor_start.check(facts(training(series("loss", [0.5 * UNIFORM]), logits))) is None


def test_steep_gradients_of_an_untrained_model():
    steep = [series("activation gradient", [value], f"blocks.{place}") for place, value in enumerate((1e-4, 1e-2))]
    outcome = poor_start.check(facts(training(series("loss", [UNIFORM]), *steep)))
    assert outcome.severity == "warning"
    assert outcome.evidence == ("the first gradient is 100 times as large behind the last block as behind the first",)


def test_a_start_that_was_not_seen_is_not_checked():
    assert poor_start.check(facts(None)) is NO_TRAINING
    assert isinstance(poor_start.check(facts(training(calm("loss"), vocabulary=0))), NotChecked)
    assert isinstance(poor_start.check(facts(training(series("loss", [9 * UNIFORM], first=1)))), NotChecked)
    assert isinstance(poor_start.check(facts(training(series("loss", [math.nan])))), NotChecked)


def test_a_summed_loss_is_not_judged():
    assert isinstance(poor_start.check(facts(training(series("loss", [512 * UNIFORM])))), NotChecked)


@pytest.mark.parametrize(("spread", "mean", "is_fresh"), [(0.1, 0.4, False), (0.0, 1.0, True), (0.02, 0.002, True)])
def test_a_loss_above_chance_of_trained_weights_is_no_initialisation(spread, mean, is_fresh):
    gain = parameter("norm.weight", "gain", site="norm", first_spread=spread)
    measured = series("loss", [3 * UNIFORM]), series("gain mean", [mean], "norm")
    outcome = poor_start.check(facts(training(*measured, parameters=(gain,))))
    assert isinstance(outcome, NotChecked) != is_fresh


def test_the_start_of_a_series():
    assert start_of(training(series("loss", [3.0, 2.0])), "loss") == 3.0
    assert math.isnan(start_of(training(series("loss", [3.0], first=4)), "loss"))
