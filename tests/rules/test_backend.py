"""Group E on real tiny models: cast order, outputs off their own formula, dtypes that change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from faulty_norms import Gain, LlamaWithEps, MultiplyThenCast, SixteenBitStatistics
from helpers import finding_of
from normkit.checkpoint.misfits import Misfit
from normkit.inspection.result import infer
from normkit.rules.backend import changed_dtype, other_casts, parts_that_do_not_fit
from normkit.rules.rule import NotChecked
from normkit.text import counted

PATH = "model.layers.1.input_layernorm"


class WrongForManyRows(Gain):
    """A norm whose kernel for more than 32 rows is wrong in its last block of features."""

    def __init__(self, n: int, by: float = 1.01) -> None:
        super().__init__(n)
        self.by = by

    def forward(self, x):
        y = (self.rms(x) * self.weight.float()).to(x.dtype)
        if x.shape[-2] > 32:
            y[..., -8:] *= self.by
        return y


def llama(models, norm=None):
    model = models.tiny("Llama", layers=2)
    if norm is not None:
        model.set_submodule(PATH, norm)
    return model


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "severity"), [(torch.float32, "note"), (torch.bfloat16, "warning")])
def test_another_order_of_casts(models, inspected, status, dtype, severity):
    assert status(inspected(llama(models).to(dtype)), "E1") == "clean"
    found = finding_of(inspected(llama(models, MultiplyThenCast(64)).to(dtype)), "E1")
    assert (found.severity, found.sites) == (severity, (PATH,))
    assert (
        "rounded once at the end; the config says statistics in float32, rounded before the gain" in found.evidence[0]
    )


@pytest.mark.slow
def test_statistics_in_16_bits_are_another_rules(models, inspected):
    assert finding_of(inspected(llama(models, SixteenBitStatistics(64)).bfloat16()), "E1") is None


def test_without_a_config_no_order_is_meant(models, inspected, status):
    assert status(inspected(models.plain()), "E1") == "not checked"


@pytest.mark.slow
def test_the_order_of_an_earlier_run_is_meant(models, inspected, facts_of):
    model, other = models.plain(LlamaWithEps), models.plain(MultiplyThenCast)
    first = infer(inspected(model))
    inspection = inspected(other)
    facts = replace(facts_of(inspection, other), baseline=first)
    passports = {site.path: nk.identify(other.get_submodule(site.path), 64) for site in inspection.sites}
    hit = other_casts.check(replace(facts, passports=passports))
    assert (hit.severity, len(hit.sites)) == ("note", 5)
    assert other_casts.check(replace(facts, passports=passports, baseline=infer(inspection))) is None


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "dtype", "severity"),
    [
        (1.0, torch.float32, None),
        (1.01, torch.float32, "error"),
        # In 16 bits more is rounding.
        (1.01, torch.bfloat16, None),
        (1.06, torch.bfloat16, "warning"),
        (1.5, torch.bfloat16, "error"),
    ],
)
def test_a_kernel_that_is_wrong_for_the_models_rows(models, inspected, by, dtype, severity):
    found = finding_of(inspected(models.plain(lambda width: WrongForManyRows(width, by=by)).to(dtype)), "E5")
    assert (None if found is None else found.severity) == severity
    if dtype == torch.float32 and found is not None:
        assert len(found.sites) == 5
        assert "units of float32 off y = weight * x" in found.evidence[0]
        assert "1 % of the size of its terms" in found.evidence[0]


@pytest.mark.slow
def test_a_norm_of_no_known_formula(models, inspected, finding):
    class Longer(LlamaWithEps):
        def forward(self, x):
            return 1.01 * super().forward(x)

    plain = models.plain(Longer)
    assert "E5" not in [found.rule for found in inspected(plain).findings]
    model = models.train(models.tiny("Llama"))
    model.model.norm = Longer(64)
    found = finding(inspected(model), "E5")
    assert (found.severity, found.sites) == ("error", ("model.norm",))
    assert found.measured == "outputs of no known formula at 1 norm"
    assert "model.norm: the config says y = weight * x" in found.evidence[0]
    assert "no spec has" in found.evidence[0]


@pytest.mark.slow
def test_a_norm_that_rounds_to_16_bits_in_a_float32_model(models, inspected, finding):
    class Narrow(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.bfloat16().float())

    model = models.tiny("GPT2")
    model.transformer.ln_f = Narrow(64)
    found = finding(inspected(model), "E5")
    assert (found.severity, found.sites) == ("error", ("transformer.ln_f",))
    assert found.measured == "outputs rounded to 16 bits in a wider model at 1 norm"
    assert "it rounds its input to bfloat16" in found.evidence[0]


class Scaled(nn.LayerNorm):
    """A LayerNorm whose output is multiplied, bias and all."""

    def __init__(self, n: int, by: float = 1.02) -> None:
        super().__init__(n)
        self.by = by

    def forward(self, x):
        return self.by * super().forward(x)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("by", "severity"), [(1.0, None), (1.005, "warning"), (1.02, "error"), (-1.0, "error")])
def test_an_output_that_is_multiplied(models, inspected, by, severity):
    model = models.train(models.tiny("GPT2"))
    clean, model.transformer.ln_f = model.transformer.ln_f, Scaled(64, by)
    model.transformer.ln_f.load_state_dict(clean.state_dict())
    inspection = inspected(model)
    assert [(found.rule, found.severity) for found in inspection.findings] == ([("E5", severity)] if severity else [])
    assert inspection.sites[-1].factor == pytest.approx(by, rel=1e-5)
    if severity:
        found = inspection.findings[0]
        assert found.sites == ("transformer.ln_f",)
        assert found.measured == "outputs multiplied by a number that is not meant at 1 norm"
        line = f"transformer.ln_f: its output is {by:g} times the row with its gain and bias, the config says once"
        assert found.evidence == (line,)


@pytest.mark.slow
def test_a_factor_is_held_against_the_declared_one(models, inspected, finding):
    model = models.plain(Scaled)
    assert "E5" not in [found.rule for found in inspected(model).findings]
    declared = infer(inspected(model), source="intent.json")
    assert "E5" not in [found.rule for found in inspected(model, intent=declared).findings]
    found = finding(inspected(models.plain(), intent=declared), "E5")
    assert len(found.sites) == 5
    assert found.evidence[0].endswith(
        "its output is 1 times the row with its gain and bias, intent.json says 1.02 times"
    )


@pytest.mark.slow
def test_overflow_is_another_rules(models, inspected):
    model = models.plain(SixteenBitStatistics).half()
    model.embedding.weight.data *= 300.0
    inspection = inspected(model)
    assert finding_of(inspection, "E2").severity == "error"
    assert finding_of(inspection, "E5") is None


def mixed(models, norm):
    """A model in bfloat16 whose last norm and head have float32 parameters."""
    model = models.plain(norm).bfloat16()
    model.norm.float()
    model.head.float()
    return model


@pytest.mark.slow
def test_a_dtype_that_changes(models, inspected, status):
    assert status(inspected(models.plain(LlamaWithEps).bfloat16()), "E6") == "clean"
    found = finding_of(inspected(mixed(models, LlamaWithEps)), "E6")
    assert (found.severity, found.sites) == ("note", ("norm",))
    assert "bfloat16 enters, float32 leaves, bfloat16 is expected" in found.evidence[0]
    # The config keeps it.
    gemma = models.tiny("Gemma", layers=2, head_dim=16).bfloat16()
    assert status(inspected(gemma), "E6") == "clean"
    gemma.model.norm, gemma.lm_head = LlamaWithEps(64), nn.Linear(64, 99)
    found = finding_of(inspected(gemma), "E6")
    assert (found.severity, found.sites) == ("warning", ("model.norm",))
    # The config's class changes it itself.
    llama = models.tiny("Llama", layers=2).bfloat16()
    llama.model.norm.float()
    llama.lm_head.float()
    inspection = inspected(llama)
    assert inspection.sites[-1].output_dtype == "float32"
    assert status(inspection, "E6") == "clean"


@pytest.mark.slow
def test_a_dtype_that_changed_since_an_earlier_run(models, inspected, facts_of):
    model = models.plain(LlamaWithEps).bfloat16()
    first = infer(inspected(model))
    other = mixed(models, LlamaWithEps)
    hit = changed_dtype.check(replace(facts_of(inspected(other), other), baseline=first))
    assert (hit.severity, hit.sites) == ("warning", ("norm",))
    second = infer(inspected(other))
    assert changed_dtype.check(replace(facts_of(inspected(other), other), baseline=second)) is None


class Narrow(nn.Module):
    """A LayerNorm of float16 that rounds the float32 which enters."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(part.detach().half()) for part in (norm.weight, norm.bias))

    def forward(self, x):
        row = x.half().float()
        return F.layer_norm(row, row.shape[-1:], self.weight.float(), self.bias.float()).half().to(x.dtype)


@pytest.mark.slow
def test_one_norm_of_float16_in_a_model_of_float32(models, inspected):
    model = models.train(models.tiny("GPT2", layers=2))
    model.transformer.h[1].ln_1 = Narrow(model.transformer.h[1].ln_1)
    found = inspected(model).findings[0]
    assert (found.rule, found.severity, found.sites) == ("E6", "warning", ("transformer.h.1.ln_1",))
    assert "its parameters are float16, and it rounds its float32 input to that" in found.evidence[0]


class Rounding(nn.Module):
    """A root mean square norm with float32 parameters that takes its rows in float16, whatever it is given."""

    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        row = x.half()
        return self.weight * (row * torch.rsqrt(row.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@pytest.mark.slow
def test_norms_that_round_to_16_bits_whatever_they_are_given(models, inspected):
    """No spec describes such norms, and a run with nothing else in it had no finding."""
    model = models.plain(Rounding)
    inspection = inspected(model)
    assert not inspection.sites
    found = finding_of(inspection, "E6")
    assert (found.severity, found.measured) == (
        "warning",
        f"not that of the input at {counted(len(found.sites), 'norm')}",
    )
    assert set(found.sites) == {name for name, module in model.named_modules() if isinstance(module, Rounding)}
    assert (
        ": it rounds its input to float16 whatever dtype it is given: its formula in float16 is y ="
        in found.evidence[0]
    )


MORE = Misfit(path="model.layers", in_file=30, in_model=28)
FEWER = Misfit(path="model.layers", in_file=1, in_model=2)
HEAD = Misfit(path="lm_head", in_file=0, in_model=1, is_head=True)


@pytest.mark.parametrize(
    ("parts", "severity", "measured", "line"),
    [
        ([MORE], "error", "2 layers are not run", "model.layers: config.json asks for 28, the file has 30"),
        ([FEWER], "error", "1 layer is drawn at random", "model.layers: config.json asks for 2, the file has 1"),
        (
            [HEAD],
            "warning",
            "the head has no weights",
            "lm_head: config.json does not tie it to the table of embeddings, and the file has no weights of it",
        ),
        (
            [MORE, HEAD],
            "error",
            "2 layers are not run; the head has no weights",
            "model.layers: config.json asks for 28, the file has 30",
        ),
    ],
)
def test_what_does_not_fit_is_named(parts, severity, measured, line):
    found = parts_that_do_not_fit.check(SimpleNamespace(misfits=tuple(parts)))
    assert (found.severity, found.measured, found.evidence[0]) == (severity, measured, line)
    assert found.sites == tuple(part.path for part in parts)


def test_without_a_file_nothing_is_said():
    assert parts_that_do_not_fit.check(SimpleNamespace(misfits=())) is None
    assert isinstance(parts_that_do_not_fit.check(SimpleNamespace(misfits=None)), NotChecked)


@pytest.mark.filterwarnings("ignore:.*in the checkpoint but not used")
def test_a_folder_with_a_layer_too_many(models, inspected, status, tmp_path: Path):
    model = models.tiny("Llama", layers=2)
    assert status(inspected(model), "E10") == "not checked"
    model.save_pretrained(tmp_path)
    assert status(inspected(nk.load(tmp_path)), "E10") == "clean"
    model.config.num_hidden_layers = 1
    model.config.save_pretrained(tmp_path)
    found = finding_of(inspected(nk.load(tmp_path)), "E10")
    assert (found.severity, found.measured, found.sites) == ("error", "1 layer is not run", ("model.layers",))
