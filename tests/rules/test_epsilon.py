"""Group A, eps, on real tiny models: its size and place, a lower bound or none, of the dtype, lost, under a rescale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from faulty_norms import EpsAsClamp, EpsOfTheDtype, EpsOutside, EpsThatUnderflows, NoEps, Rescaled
from helpers import finding_of
from normkit import specs
from normkit.inspection.result import infer
from normkit.rules.epsilon import misplaced_eps, wrong_eps
from normkit.rules.rule import NotChecked

PATH = "model.layers.1.input_layernorm"
GPT2 = "transformer.h.1.ln_1"


class Divided(Rescaled):
    """Divides eps by the square of the largest element, as the row."""

    def forward(self, x):
        largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        small = x / largest
        return self.weight * small * torch.rsqrt(small.square().mean(-1, keepdim=True) + self.eps / largest**2)


def layer_norm(eps):
    return lambda width: nn.LayerNorm(width, eps=eps)


def rms_norm(eps):
    return lambda width: nn.RMSNorm(width, eps=eps)


def llama(models, norm=None, **options):
    """A Llama with its norm in the middle replaced."""
    model = models.tiny("Llama", layers=2, **options)
    if norm is not None:
        model.set_submodule(PATH, norm)
    return model


def set_eps(model, **eps):
    for path, value in eps.items():
        model.get_submodule(path.replace("__", ".")).eps = value
    return model


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "norm", "dtype", "severity", "words"),
    [
        ("A3", lambda: EpsAsClamp(64), torch.float32, "warning", "by its length or by 1e-06, whichever is larger"),
        ("A3", lambda: EpsAsClamp(64, eps=0.05), torch.float32, "error", "shortens the output to"),
        ("A3", lambda: NoEps(64), torch.float32, "warning", "there is no eps, the config says 1e-06"),
        ("A6", lambda: EpsOfTheDtype(64), torch.float32, "warning", "0.00781 in bfloat16"),
        ("A6", lambda: EpsOfTheDtype(64), torch.bfloat16, "error", "eps is 0.00781 in bfloat16"),
    ],
)
def test_one_norm_of_another_kind(models, inspected, finding, status, rule, norm, dtype, severity, words):
    assert status(inspected(llama(models)), rule) == "clean"
    found = finding(inspected(llama(models, norm()).to(dtype)), rule)
    assert (found.severity, found.sites) == (severity, (PATH,))
    assert words in found.evidence[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "norm", "severity", "words"),
    [
        ("A3", EpsAsClamp, "note", "whichever is larger"),
        ("A3", NoEps, "note", "there is no eps: a row of zeros is divided by zero"),
        ("A6", nn.RMSNorm, "note", "torch's default, 1.19e-07 for float32 input"),
        ("A8", lambda width: Rescaled(width, eps=1e-5), "warning", "eps 1e-05 acts as 1e-05 times the square"),
        ("A8", lambda width: Rescaled(width, eps=1e-3), "error", "eps 0.001 acts as 0.001 times the square"),
        ("A6", rms_norm(1e-6), None, ""),
        ("A8", rms_norm(1e-3), None, ""),
        ("A8", lambda width: Divided(width, eps=1e-5), None, ""),
    ],
)
def test_all_norms_of_a_model_without_a_config(models, inspected, rule, norm, severity, words):
    found = finding_of(inspected(models.plain(norm)), rule)
    if severity is None:
        assert found is None
    else:
        assert (found.severity, len(found.sites)) == (severity, 5)
        assert words in found.evidence[0]


@pytest.mark.slow
def test_a_lower_bound_that_rows_feel_is_a_warning_without_a_config(models, inspected):
    found = finding_of(inspected(models.plain(lambda width: EpsAsClamp(width, eps=0.05), scale=0.04)), "A3")
    assert found.severity == "warning"
    assert "of the rows are below it" in " ".join(found.evidence)


@pytest.mark.slow
def test_torchs_default_eps_that_the_config_has_is_clean(models, inspected, status):
    assert status(inspected(models.tiny("NanoChat", layers=2)), "A6") == "clean"


@pytest.mark.slow
def test_an_eps_lost_in_float16(models, inspected, status):
    small = llama(models, EpsThatUnderflows(64, eps=1e-8), rms_norm_eps=1e-8)
    wide, half = finding_of(inspected(small), "A7"), finding_of(inspected(small.half()), "A7")
    assert (wide.severity, wide.sites, half.severity) == ("note", (PATH,), "error")
    assert "eps 1e-08 is added in the input's dtype" in half.evidence[0]
    assert status(inspected(llama(models, rms_norm_eps=1e-8).half()), "A7") == "clean"
    large = llama(models, EpsThatUnderflows(64, eps=1e-5), rms_norm_eps=1e-5).half()
    assert finding_of(inspected(large), "A7") is None


# A1.


@pytest.mark.slow
def test_one_norm_with_another_eps_is_named(models, inspected, healthy, finding, status):
    assert status(healthy, "A1") == "clean"
    found = finding(inspected(set_eps(models.tiny("GPT2"), transformer__h__1__ln_2=1e-2)), "A1")
    assert (found.severity, found.sites) == ("error", ("transformer.h.1.ln_2",))
    assert "eps is 0.01, the config says 1e-05" in found.evidence[0]
    assert "shortens the output to" in found.evidence[0]
    smaller = set_eps(models.tiny("GPT2", layer_norm_epsilon=1e-3), transformer__h__0__ln_1=1e-9)
    assert "lengthens the output to" in finding(inspected(smaller), "A1").evidence[0]


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("effect", "severity"), [(5e-4, "note"), (5e-3, "warning"), (5e-2, "error")])
def test_severity_follows_the_effect_at_the_observed_scale(models, inspected, healthy, finding, effect, severity):
    entering = healthy.sites[-1].input
    # The rows that feel it most are those of the 5 % quantile: 1 / sqrt(1 + e / v) = 1 - effect.
    variance = entering.rms_quantiles[0] ** 2 * (1 - entering.mean_energy)
    eps = 1e-5 + (variance + 1e-5) * ((1 - effect) ** -2 - 1)
    found = finding(inspected(set_eps(models.tiny("GPT2"), transformer__ln_f=eps)), "A1")
    assert (found.severity, found.sites) == (severity, ("transformer.ln_f",))


@pytest.mark.slow
def test_many_norms_are_one_finding_with_the_worst_lines(models, inspected, finding):
    model = models.tiny("GPT2", layers=4)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-2
    inspection = inspected(model)
    found = finding(inspection, "A1")
    assert found.sites == tuple(site.path for site in inspection.sites)
    assert found.evidence[0].startswith("transformer.h.0.")
    assert found.evidence[-1] == "and 3 more norms"
    two = set_eps(models.tiny("GPT2", layers=3), transformer__h__0__ln_1=2e-5, transformer__h__2__ln_2=1e-3)
    found = finding(inspected(two), "A1")
    assert found.sites == ("transformer.h.0.ln_1", "transformer.h.2.ln_2")
    assert found.evidence[0].startswith("transformer.h.2.ln_2:")


@pytest.mark.slow
def test_without_a_config_only_what_enters_counts(models, inspected, finding):
    check = next(check for check in inspected(models.plain()).checks if check.rule == "A1")
    assert (check.status, "no config or intent file" in check.reason) == ("not checked", True)
    found = finding(inspected(models.plain(layer_norm(1e-2), scale=0.15)), "A1")
    assert (found.severity, found.sites[0]) == ("warning", "blocks.0.norm_1")
    assert finding(inspected(models.plain(layer_norm(1e-2), scale=0.01)), "A1").severity == "error"


@pytest.mark.slow
def test_the_configs_own_eps_may_shorten_an_untrained_model(models, inspected, finding):
    model = models.tiny("GPT2", layer_norm_epsilon=0.1)
    assert finding(inspected(model), "A1").severity == "note"
    assert finding(inspected(models.train(model)), "A1").severity == "warning"
    # Rows of rms 0.65 keep 90 % of their length: less than the half that counts where eps is of a usual size.
    for eps, is_found in ((0.1, True), (1e-3, False)):
        model = models.train(models.tiny("GPT2", layer_norm_epsilon=eps))
        with torch.no_grad():
            for name in ("wte.weight", "h.0.attn.c_proj.weight", "h.0.mlp.c_proj.weight"):
                model.transformer.get_parameter(name).mul_(30)
        assert (finding_of(inspected(model), "A1") is not None) == is_found


def test_tokens_with_a_zero_embedding_are_no_short_rows(models, inspected, facts_of):
    model = models.plain()
    model.embedding.weight.data[5:30] = 0.0
    inspection = inspected(model)
    assert inspection.sites[0].input.zero_rows > 0
    assert isinstance(wrong_eps.check(facts_of(inspection, model)), NotChecked)


@pytest.mark.slow
def test_an_intent_file_is_named_where_it_says_what_is_meant(models, inspected, finding, status):
    model = models.plain()
    declared = infer(inspected(model), source="intent.json")
    assert status(inspected(model, intent=declared), "A1") == "clean"
    found = finding(inspected(set_eps(model, norm=1e-2), intent=declared), "A1")
    assert found.measured.startswith("1 norm with another eps than is meant")
    assert "norm: eps is 0.01, intent.json says 1e-05" in found.evidence[0]


# A2.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "eps", "severity"), [(GPT2, 1e-6, "warning"), ("transformer.h.0.ln_1", 1e-3, "error")]
)
def test_eps_outside_the_root(models, inspected, healthy, finding, status, path, eps, severity):
    assert status(healthy, "A2") == "clean"
    model = models.tiny("GPT2")
    model.set_submodule(path, EpsOutside(64, eps))
    found = finding(inspected(model), "A2")
    assert (found.severity, found.sites) == (severity, (path,))


@pytest.mark.slow
def test_eps_outside_the_root_without_a_config_and_by_intent(models, inspected, facts_of, finding, status):
    assert finding(inspected(models.plain(lambda width: EpsOutside(width, 1e-6))), "A2").severity == "warning"
    assert status(inspected(models.plain()), "A2") == "clean"
    model = models.tiny("GPT2")
    model.set_submodule(GPT2, EpsOutside(64, 1e-6))
    facts = facts_of(inspected(model), model)
    assert misplaced_eps.check(facts) is not None
    outside = dict(facts.intent.specs) | {GPT2: specs.ANNOTATED_TRANSFORMER}
    assert misplaced_eps.check(replace(facts, intent=replace(facts.intent, specs=outside))) is None
