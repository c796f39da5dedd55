"""Group B in training: where gains start, what decays them, whether they move, how their gradient is summed."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import normkit as nk
from helpers import finding_of
from normkit.rules.parameters import gradient_in_16_bits, untrained_norms, weight_decay, wrong_start
from normkit.rules.rule import NO_OPTIMIZER, NO_RUN, NotChecked
from watched_runs import parameter, series, training

VOCABULARY = 99
GUESSING = math.log(VOCABULARY)


class OwnLayerNorm(nn.LayerNorm):
    """A LayerNorm in float32 inside, whose gain's gradient is rounded once."""

    def forward(self, x):
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        row = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        return (self.weight.float() * row + self.bias.float()).to(x.dtype)


def parameters_of(model, sites, optimizer=None):
    """Every parameter as an optimizer with these groups has it; by default one that spares vectors."""
    if optimizer is None:
        vectors = [tensor for tensor in model.parameters() if tensor.dim() < 2]
        matrices = [tensor for tensor in model.parameters() if tensor.dim() > 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
    groups = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
    paths = {site.path for site in sites}
    for name, tensor in model.named_parameters():
        path, _, last = name.rpartition(".")
        is_norm, group = path in paths, groups.get(id(tensor), {"lr": math.nan, "weight_decay": math.nan})
        kind = {"weight": "gain", "bias": "bias of a norm"}[last] if is_norm else "bias" if last == "bias" else "weight"
        yield parameter(
            *(name, kind),
            site=path if is_norm else "",
            trained=tensor.requires_grad and id(tensor) in groups,
            gradient_steps=5 if tensor.requires_grad else 0,
            learning_rate=group["lr"],
            weight_decay=group["weight_decay"],
        )


def trained(facts, parameters=(), measured=(), loss=GUESSING):
    """The facts with a run of five steps."""
    run = training(
        *(series("loss", [loss, loss]), *measured), steps=5, parameters=tuple(parameters), vocabulary=VOCABULARY
    )
    return replace(facts, training=run)


@pytest.fixture
def run(inspected, facts_of):
    """`run(model, optimizer=None)`: the facts of a model in training."""

    def gather(model, optimizer=None):
        inspection = inspected(model)
        return trained(facts_of(inspection, model), parameters_of(model, inspection.sites, optimizer))

    return gather


def draw(model, path, mean=0.0, spread=0.02):
    # No two gains alike.
    generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
    weight = model.get_submodule(path).weight
    weight.data = mean + spread * torch.randn(weight.shape, generator=generator)
    return model


@pytest.mark.slow
def test_one_gain_that_was_initialised_as_a_matrix(models, inspected, finding, status):
    assert status(inspected(models.tiny("GPT2")), "B5") == "clean"
    found = finding(inspected(draw(models.tiny("GPT2"), "transformer.h.1.ln_1")), "B5")
    assert (found.severity, found.sites) == ("error", ("transformer.h.1.ln_1",))
    assert "the gain goes from -0.0" in found.evidence[0]


def test_all_gains_initialised_as_matrices_need_no_config(models, inspected, finding):
    model = models.plain()
    for path, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            draw(model, path)
    found = finding(inspected(model), "B5")
    assert (found.severity, len(found.sites)) == ("error", 5)


@pytest.mark.slow
def test_gains_that_start_elsewhere_by_design(models, inspected, status):
    assert status(inspected(models.tiny("Nemotron")), "B5") == "clean"
    plain = models.plain()
    for block in plain.blocks:
        nn.init.zeros_(block.norm_2.weight)
    assert finding_of(inspected(plain), "B5").severity == "note"


def test_how_a_trained_model_began_is_not_known(models, inspected, status):
    assert status(inspected(models.train(models.tiny("GPT2"))), "B5") == "not checked"


def test_a_model_whose_matrices_are_trained_is_not_new(models, inspected, status):
    # As where all gains but the last norm's were folded into the matrices.
    model = draw(models.shape(models.tiny("Llama", layers=2)), "model.norm", mean=0.6, spread=0.1)
    assert status(inspected(model), "B5") == "not checked"


def starts(facts, **values):
    paths = {site.path: values.get(site.path.replace(".", "_"), 1.0) for site in facts.sites}
    return [series("gain mean", [start, 1.0], path, every=4) for path, start in paths.items()]


@pytest.mark.parametrize(("start", "severity"), [(1.0, None), (0.003, "error"), (1.3, "warning"), (0.0, "note")])
def test_the_start_of_a_run(run, models, start, severity):
    facts = run(models.plain())
    hit = wrong_start.check(trained(facts, measured=starts(facts, blocks_1_norm_1=start)))
    assert (None if hit is None else hit.severity) == severity
    assert hit is None or hit.sites == ("blocks.1.norm_1",)


def test_a_run_from_trained_weights_has_no_start(run, models):
    facts = run(models.plain())
    measured = [replace(each, values=(0.4, 0.4)) for each in starts(facts)]
    assert isinstance(wrong_start.check(trained(facts, measured=measured, loss=0.5)), NotChecked)
    assert wrong_start.check(trained(facts, measured=measured)).severity == "warning"
    # As of a model that was cut, whose loss is that of one that knows nothing.
    learnt = [replace(each, first_spread=0.1) for each in facts.training.parameters]
    assert isinstance(wrong_start.check(trained(facts, learnt, measured)), NotChecked)
    assert isinstance(wrong_start.check(trained(facts)), NotChecked)


def test_a_norm_that_a_list_of_names_missed(run, models):
    model = models.plain()
    # Decay that spares the norms is clean.
    assert weight_decay.check(run(model)) is None
    missed = model.blocks[1].norm_2.weight
    others = [parameter for parameter in model.parameters() if parameter is not missed]
    groups = [{"params": [missed], "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    hit = weight_decay.check(run(model, torch.optim.AdamW(groups, lr=1e-3)))
    assert (hit.severity, hit.sites) == ("warning", ("blocks.1.norm_2",))
    assert "1 of 10 parameters of norms decayed, others are spared" in hit.measured
    assert (
        "blocks.1.norm_2.weight: weight decay 0.01 (others have 0) pulls it to 0, half of the way in 69,000 steps"
        in hit.evidence[0]
    )


@pytest.mark.parametrize(("decay", "severity"), [(0.1, "warning"), (0.01, "note")])
def test_decay_of_everything(run, models, decay, severity):
    model = models.plain()
    hit = weight_decay.check(run(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay)))
    assert (hit.severity, len(hit.sites)) == (severity, 5)
    assert f"weight decay {decay:g} (0.05 and more is a warning) pulls it to 0" in hit.evidence[0]


@pytest.mark.parametrize("place", ["before backward", "after zero_grad"])
def test_a_misplaced_step_of_the_watch_blames_no_norm(place):
    torch.manual_seed(0)
    model, said = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)), []
    optimizer = torch.optim.AdamW(model.parameters())
    with nk.watch(model, optimizer, every=2, say=said.append) as watch:
        for _ in range(6):
            loss = model(torch.randn(4, 8)).square().mean()
            if place == "before backward":
                watch.step(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if place == "after zero_grad":
                watch.step(loss)
    inspection = watch.inspection()
    words = "no parameter had a gradient at watch.step: call it between backward and optimizer.step"
    assert said.count(f"normkit: {words}") == 1
    assert words in inspection.training.remarks
    assert "B8" not in {found.rule for found in inspection.findings}
    assert {each.question: each.verdict for each in inspection.training.answers}["Is a norm wrong?"] != "yes"


def test_decay_that_sinks_gains_is_no_missing_1():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, weight_decay=8)
    with nk.watch(model, optimizer, every=5) as watch:
        for _ in range(40):
            tokens = torch.randint(64, (4, 16))
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            watch.step(loss)
            optimizer.step()
    findings = watch.inspection().findings
    assert (findings[0].rule, findings[0].severity) == ("B7", "error")
    assert "half of the way in 3 steps if nothing holds it; its mean went from 1 to " in findings[0].evidence[0]
    assert "steps of Adam hold none above 1 / 8" in findings[0].evidence[0]
    assert not {"B1", "B2"} & {found.rule for found in findings}


@pytest.mark.parametrize("rule", [weight_decay, untrained_norms], ids=["B7", "B8"])
def test_a_run_without_an_optimizer_is_not_checked(run, models, rule):
    facts = run(models.plain())
    idle = [replace(each, trained=False, weight_decay=math.nan) for each in facts.training.parameters]
    assert rule.check(trained(facts, idle)) is NO_OPTIMIZER


@pytest.mark.slow
def test_a_gain_with_an_offset_decays_to_1(run, models):
    model = models.tiny("Gemma", head_dim=16)
    hit = weight_decay.check(run(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)))
    assert hit.severity == "note"
    assert "pulls it to 1" in hit.evidence[0]


@pytest.mark.slow
def test_a_frozen_norm(run, models):
    assert untrained_norms.check(run(models.plain())) is None
    model = models.plain()
    model.blocks[0].norm_1.weight.requires_grad_(False)
    hit = untrained_norms.check(run(model))
    assert (hit.severity, hit.sites) == ("warning", ("blocks.0.norm_1",))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.requires_grad_(False)
    assert untrained_norms.check(run(model)).severity == "note"


def test_a_norm_that_no_optimizer_holds(run, models):
    model = models.plain()
    held = [parameter for parameter in model.parameters() if parameter is not model.norm.bias]
    hit = untrained_norms.check(run(model, torch.optim.SGD(held, lr=0.1)))
    assert hit.sites == ("norm",)
    assert hit.evidence == ("norm.bias: gets gradients, and no optimizer holds it",)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    # Frozen on purpose, they would have no gradients.
    assert untrained_norms.check(run(model, torch.optim.SGD(matrices, lr=0.1))).severity == "warning"


def test_a_norm_without_a_gradient(run, models):
    facts = run(models.plain())
    idle = tuple(replace(each, gradient_steps=0) if each.site == "norm" else each for each in facts.training.parameters)
    hit = untrained_norms.check(trained(facts, idle))
    assert (hit.severity, hit.sites) == ("warning", ("norm",))
    assert "had no gradient in 5 steps" in hit.evidence[0]
    short = trained(facts, idle)
    assert untrained_norms.check(replace(short, training=replace(short.training, steps=2))) is None


def test_an_adapter_trains_alone(run, models):
    model = models.plain()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    assert isinstance(untrained_norms.check(run(model)), NotChecked)


@pytest.mark.parametrize("rule", [weight_decay, untrained_norms], ids=["B7", "B8"])
def test_without_a_run_there_is_nothing_to_check(models, inspected, facts_of, rule):
    model = models.plain()
    assert rule.check(facts_of(inspected(model), model)) is NO_RUN


@pytest.mark.slow
def test_torchs_layer_norm_in_bfloat16(models, inspected, status, facts_of):
    inspection = inspected(models.plain().bfloat16())
    found = finding_of(inspection, "B9")
    assert (found.severity, len(found.sites)) == ("note", 5)
    assert "LayerNorm in bfloat16: the gradient of its gain is off by" in found.evidence[0]
    assert gradient_in_16_bits.check(trained(facts_of(inspection, models.plain()))).severity == "warning"
    assert status(inspected(models.plain(OwnLayerNorm).bfloat16()), "B9") == "clean"
    assert status(inspected(models.plain()), "B9") == "clean"


def near_0(gain):
    gain[:20] *= 1e-3


def two_large(gain):
    gain[3:5] = torch.tensor([-80.0, 60.0])


def one_huge(gain):
    gain[3] = 1e4


def one_large(gain):
    gain[3] = -80.0


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "dtype", "severity", "words"),
    [
        (near_0, torch.float32, "note", "at least 25 % of 64 gains are within ±0.01"),
        (two_large, torch.float32, "note", "times the median one"),
        (one_huge, torch.float32, "error", "one gain of 1e+04 (feature 3) is"),
        (one_large, torch.float32, "error", "one gain of -80 (feature 3) is"),
        (torch.Tensor.zero_, torch.float32, "error", "all of 64 gains are exactly 0"),
        (torch.Tensor.zero_, torch.bfloat16, "error", "all of 64 gains are exactly 0"),
        (torch.Tensor.numel, torch.float32, None, ""),
    ],
)
def test_gains_that_are_0_or_far_above_the_others(models, inspected, change, dtype, severity, words):
    model = models.train(models.plain()).to(dtype)
    change(model.blocks[1].norm_2.weight.data)
    found = finding_of(inspected(model), "B10")
    assert (None if found is None else found.severity) == severity
    assert found is None or found.sites == ("blocks.1.norm_2",)
    assert found is None or words in found.evidence[0]
    # An original file has such values too: what is said must be true of it.
    assert found is None or "where it has the same values, training gave them" in found.remedy[0]


def test_gains_that_start_at_0_by_design_are_none(models, inspected):
    model = models.plain()
    for block in model.blocks:
        block.norm_2.weight.data.zero_()
    assert "error" not in {found.severity for found in inspected(model).findings if found.rule == "B10"}


def test_one_bias_alone_above_all_others_is_an_error(models, inspected):
    model = models.train(models.tiny("GPT2"))
    model.transformer.h[1].ln_2.bias.data[7] = 1e4
    (found,) = [each for each in inspected(model).findings if each.rule == "B10"]
    assert (found.severity, found.sites) == ("error", ("transformer.h.1.ln_2",))
    assert "one bias of 1e+04 (feature 7)" in found.evidence[0]
