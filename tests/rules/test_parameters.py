"""Group B in training: where gains start, what decays them, whether they move, how their gradient is summed."""

from __future__ import annotations

import math
import zlib
from dataclasses import replace

import pytest
import torch
from torch import nn

from normkit.measurement.training import Parameter, Series, Training
from normkit.rules.parameters import gradient_in_16_bits, untrained_norms, weight_decay, wrong_start
from normkit.rules.rule import NO_OPTIMIZER, NO_RUN, NotChecked

VOCABULARY = 99
GUESSING = math.log(VOCABULARY)


class OwnLayerNorm(nn.Module):
    """A LayerNorm in float32 inside, whose gain's gradient is rounded once."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        row = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        return (self.weight.float() * row + self.bias.float()).to(x.dtype)


def of(inspection, rule):
    return next((found for found in inspection.findings if found.rule == rule), None)


def parameters_of(model, sites, optimizer=None, gradient_steps=5):
    """Every parameter as an optimizer with these groups has it; by default one that spares vectors."""
    if optimizer is None:
        vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3
        )
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    paths = {site.path for site in sites}
    found = []
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".")
        is_norm, group = path in paths, groups.get(id(parameter))
        kind = {"weight": "gain", "bias": "bias of a norm"}[last] if is_norm else "bias" if last == "bias" else "weight"
        found.append(
            Parameter(
                path=name,
                kind=kind,
                site=path if is_norm else "",
                block=None,
                size=parameter.numel(),
                dtype="float32",
                trained=parameter.requires_grad and group is not None,
                gradient_steps=gradient_steps if parameter.requires_grad else 0,
                learning_rate=math.nan if group is None else group["lr"],
                weight_decay=math.nan if group is None else group["weight_decay"],
                rms=1.0,
                gradient_rms=1.0,
                update_ratio=1e-3,
                first_update_ratio=1e-3,
            )
        )
    return tuple(found)


def trained(facts, parameters=(), series=(), loss=GUESSING):
    """The facts with a run of five steps."""
    run = Training(
        steps=5,
        every=1,
        reports=5,
        reason="asked",
        reason_step=4,
        ranks=1,
        observer="",
        remarks=(),
        optimizers=(),
        series=(Series(quantity="loss", path="", steps=(0, 1), values=(loss, loss)), *series),
        parameters=tuple(parameters),
        vocabulary=VOCABULARY,
    )
    return replace(facts, training=run)


@pytest.fixture
def run(inspected, facts_of):
    """`run(model, optimizer=None, **options)`: the facts of a model in training."""

    def gather(model, optimizer=None, **options):
        inspection = inspected(model)
        facts = facts_of(inspection, model)
        return trained(facts, parameters_of(model, inspection.sites, optimizer, **options))

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
    assert (found.severity, len(found.sites)) == ("error", 7)


@pytest.mark.slow
def test_gains_that_start_elsewhere_by_design(models, inspected, status):
    assert status(inspected(models.tiny("Nemotron")), "B5") == "clean"
    plain = models.plain()
    for block in plain.blocks:
        nn.init.zeros_(block.norm_2.weight)
    assert of(inspected(plain), "B5").severity == "note"


def test_how_a_trained_model_began_is_not_known(models, inspected, status):
    assert status(inspected(models.train(models.tiny("GPT2"))), "B5") == "not checked"


def test_a_model_whose_matrices_are_trained_is_not_new(models, inspected, status):
    # As where all gains but the last norm's were folded into the matrices.
    model = draw(models.shape(models.tiny("Llama", layers=2)), "model.norm", mean=0.6, spread=0.1)
    assert status(inspected(model), "B5") == "not checked"


def starts(facts, **values):
    paths = {site.path: values.get(site.path.replace(".", "_"), 1.0) for site in facts.sites}
    return [Series(quantity="gain mean", path=path, steps=(0, 4), values=(start, 1.0)) for path, start in paths.items()]


def test_the_start_of_a_run(run, models):
    facts = run(models.plain())
    assert wrong_start.check(trained(facts, series=starts(facts))) is None
    hit = wrong_start.check(trained(facts, series=starts(facts, blocks_1_norm_1=0.003)))
    assert (hit.severity, hit.sites) == ("error", ("blocks.1.norm_1",))
    assert wrong_start.check(trained(facts, series=starts(facts, blocks_1_norm_1=1.3))).severity == "warning"
    assert wrong_start.check(trained(facts, series=starts(facts, blocks_1_norm_1=0.0))).severity == "note"


def test_a_run_from_trained_weights_has_no_start(run, models):
    facts = run(models.plain())
    series = [replace(each, values=(0.4, 0.4)) for each in starts(facts)]
    assert isinstance(wrong_start.check(trained(facts, series=series, loss=0.5)), NotChecked)
    assert wrong_start.check(trained(facts, series=series)).severity == "warning"
    # As of a model that was cut, whose loss is that of one that knows nothing.
    learnt = [replace(each, first_spread=0.1) for each in facts.training.parameters]
    assert isinstance(wrong_start.check(trained(facts, learnt, series=series)), NotChecked)
    assert isinstance(wrong_start.check(trained(facts)), NotChecked)


def test_decay_that_spares_the_norms_is_clean(run, models):
    assert weight_decay.check(run(models.plain())) is None


def test_a_norm_that_a_list_of_names_missed(run, models):
    model = models.plain()
    missed = model.blocks[1].norm_2.weight
    others = [parameter for parameter in model.parameters() if parameter is not missed]
    groups = [{"params": [missed], "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    hit = weight_decay.check(run(model, torch.optim.AdamW(groups, lr=1e-3)))
    assert (hit.severity, hit.sites) == ("warning", ("blocks.1.norm_2",))
    assert "1 of 14 parameters of norms decayed, others are spared" in hit.measured
    assert (
        "blocks.1.norm_2.weight: weight decay 0.01 (others have 0) pulls it to 0, half of the way in 69,000 steps"
        in hit.evidence[0]
    )


@pytest.mark.parametrize(("decay", "severity"), [(0.1, "warning"), (0.01, "note")])
def test_decay_of_everything(run, models, decay, severity):
    model = models.plain()
    hit = weight_decay.check(run(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay)))
    assert (hit.severity, len(hit.sites)) == (severity, 7)
    assert f"weight decay {decay:g} (0.05 and more is a warning) pulls it to 0" in hit.evidence[0]


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
    found = of(inspection, "B9")
    assert (found.severity, len(found.sites)) == ("note", 7)
    assert "LayerNorm in bfloat16: the gradient of its gain is off by" in found.evidence[0]
    assert gradient_in_16_bits.check(trained(facts_of(inspection, models.plain()))).severity == "warning"
    assert status(inspected(models.plain(OwnLayerNorm).bfloat16()), "B9") == "clean"
    assert status(inspected(models.plain()), "B9") == "clean"


@pytest.mark.slow
def test_gains_near_0(models, inspected, status):
    model = models.train(models.plain())
    assert status(inspected(model), "B10") == "clean"
    model.blocks[1].norm_1.weight.data[:20] *= 1e-3
    found = of(inspected(model), "B10")
    assert (found.severity, found.sites) == ("note", ("blocks.1.norm_1",))
    assert "at least 25 % of 64 gains are within ±0.01" in found.evidence[0]


def test_gains_far_above_the_others_are_a_note(models, inspected):
    model = models.train(models.plain())
    model.norm.weight.data[3:5] = torch.tensor([-80.0, 60.0])
    found = of(inspected(model), "B10")
    assert (found.severity, found.sites) == ("note", ("norm",))
    assert "times the median one" in found.evidence[0]


@pytest.mark.parametrize("value", [1e4, -80.0])
def test_one_gain_alone_above_all_others_is_an_error(models, inspected, value):
    model = models.train(models.plain())
    model.blocks[1].norm_1.weight.data[3] = value
    found = inspected(model).findings[0]
    assert (found.rule, found.severity, found.sites) == ("B10", "error", ("blocks.1.norm_1",))
    assert f"one gain of {value:.4g} (feature 3) is" in found.evidence[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gain_of_zeros_is_an_error_in_a_trained_model(models, inspected, dtype):
    model = models.train(models.plain()).to(dtype)
    model.blocks[1].norm_2.weight.data.zero_()
    found = inspected(model).findings[0]
    assert (found.rule, found.severity, found.sites) == ("B10", "error", ("blocks.1.norm_2",))
    assert "all of 64 gains are exactly 0" in found.evidence[0]


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
