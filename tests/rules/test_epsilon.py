"""Group A on real tiny models: eps as a lower bound or none, of the dtype, lost in 16 bits, under a rescale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from faulty_norms import EpsAsClamp, EpsOfTheDtype, EpsThatUnderflows, NoEps, Rescaled

PATH = "model.layers.1.input_layernorm"


def llama(models, norm=None, **options):
    """A Llama with its norm in the middle replaced."""
    model = models.tiny("Llama", layers=2, **options)
    if norm is not None:
        model.set_submodule(PATH, norm)
    return model


def of(inspection, rule):
    return next((found for found in inspection.findings if found.rule == rule), None)


@pytest.mark.slow
def test_eps_as_a_lower_bound(models, inspected, finding, status):
    assert status(inspected(llama(models)), "A3") == "clean"
    found = finding(inspected(llama(models, EpsAsClamp(64))), "A3")
    assert (found.severity, found.sites) == ("warning", (PATH,))
    assert "by its length or by 1e-06, whichever is larger" in found.evidence[0]


@pytest.mark.slow
def test_a_lower_bound_that_rows_feel_is_an_error(models, inspected, finding):
    found = finding(inspected(llama(models, EpsAsClamp(64, eps=0.05))), "A3")
    assert found.severity == "error"
    assert "shortens the output to" in found.evidence[0]


@pytest.mark.slow
def test_a_lower_bound_by_design_is_a_note(models, inspected):
    found = of(inspected(models.plain(EpsAsClamp)), "A3")
    assert (found.severity, len(found.sites)) == ("note", 7)
    felt = of(inspected(models.plain(lambda width: EpsAsClamp(width, eps=0.05), scale=0.04)), "A3")
    assert felt.severity == "warning"
    assert "of the rows lie below it" in " ".join(felt.evidence)


@pytest.mark.slow
def test_no_eps(models, inspected, finding):
    found = finding(inspected(llama(models, NoEps(64))), "A3")
    assert (found.severity, found.sites) == ("warning", (PATH,))
    assert "there is no eps, the config says 1e-06" in found.evidence[0]
    assert of(inspected(models.plain(NoEps)), "A3").severity == "note"


@pytest.mark.slow
def test_an_eps_that_follows_the_dtype(models, inspected, finding, status):
    assert status(inspected(llama(models)), "A6") == "clean"
    wide = finding(inspected(llama(models, EpsOfTheDtype(64))), "A6")
    assert (wide.severity, wide.sites) == ("warning", (PATH,))
    assert "0.00781 in bfloat16" in wide.evidence[0]
    half = finding(inspected(llama(models, EpsOfTheDtype(64)).bfloat16()), "A6")
    assert half.severity == "error"
    assert "eps is 0.00781 in bfloat16" in half.evidence[0]


@pytest.mark.slow
def test_torchs_default_eps_is_a_note_unless_the_config_has_it(models, inspected, status):
    found = of(inspected(models.plain(nn.RMSNorm)), "A6")
    assert (found.severity, len(found.sites)) == ("note", 7)
    assert "torch's default, 1.19e-07 for float32 input" in found.evidence[0]
    assert status(inspected(models.plain(lambda width: nn.RMSNorm(width, eps=1e-6))), "A6") == "clean"
    assert status(inspected(models.tiny("NanoChat", layers=2)), "A6") == "clean"


@pytest.mark.slow
def test_an_eps_lost_in_float16(models, inspected, status):
    small = llama(models, EpsThatUnderflows(64, eps=1e-8), rms_norm_eps=1e-8)
    wide = of(inspected(small), "A7")
    assert (wide.severity, wide.sites) == ("note", (PATH,))
    half = of(inspected(small.half()), "A7")
    assert half.severity == "error"
    assert "eps 1e-08 is added in the input's dtype" in half.evidence[0]
    assert status(inspected(llama(models, rms_norm_eps=1e-8).half()), "A7") == "clean"
    large = llama(models, EpsThatUnderflows(64, eps=1e-5), rms_norm_eps=1e-5).half()
    assert of(inspected(large), "A7") is None


@pytest.mark.slow
@pytest.mark.parametrize(("eps", "severity"), [(1e-5, "warning"), (1e-3, "error")])
def test_an_eps_under_a_rescale(models, inspected, status, eps, severity):
    found = of(inspected(models.plain(lambda width: Rescaled(width, eps=eps))), "A8")
    assert (found.severity, len(found.sites)) == (severity, 7)
    assert f"eps {eps:g} acts as {eps:g} times the square" in found.evidence[0]
    assert status(inspected(models.plain(lambda width: nn.RMSNorm(width, eps=eps))), "A8") == "clean"


def test_a_rescale_that_divides_eps_by_the_square_is_clean(models, inspected):
    class Divided(Rescaled):
        def forward(self, x):
            largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-30)
            small = x / largest
            return self.weight * small * torch.rsqrt(small.square().mean(-1, keepdim=True) + self.eps / largest**2)

    assert of(inspected(models.plain(lambda width: Divided(width, eps=1e-5))), "A8") is None
