"""Every field of the spec against the one that is meant, on real tiny models and field by field."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from faulty_norms import Gain
from normkit import specs
from normkit.identification.passport import Passport, Reading
from normkit.measurement.intent import Intent
from normkit.rules import RULES, Facts
from normkit.rules.meant import RULE_OF, compared
from normkit.rules.rule import Hit, NotChecked
from normkit.spec import NormSpec

CHECKS = {rule.id: rule.check for rule in RULES}
PATH = "model.layers.1.input_layernorm"

MEANT = NormSpec(eps=1e-3, weight_offset=1.0, output_dtype="promote")
# A value of each field that is not the one of MEANT, and what else has to be so for it.
OTHER = {
    "centre_numerator": {"centre_numerator": False},
    "centre_statistics": {"centre_statistics": False},
    "eps": {"eps": 1e-1},
    "eps_placement": {"eps_placement": "outside"},
    "correction": {"correction": 1},
    "reduction": {"reduction": "sum"},
    "multiplier": {"multiplier": "sqrt_n"},
    "axes": {"axes": (-2, -1)},
    "groups": {"groups": 2},
    "has_weight": {"has_weight": False, "weight_offset": 0.0},
    "has_bias": {"has_bias": False},
    "weight_offset": {"weight_offset": 0.0},
    "offset_dtype": {"offset_dtype": "parameter"},
    "weight_placement": {"weight_placement": "before"},
    "statistics_dtype": {"statistics_dtype": "input"},
    "round_rstd": {"round_rstd": True},
    "cast": {"cast": "early"},
    "output_dtype": {"output_dtype": "input"},
}


@pytest.fixture(scope="module")
def known(healthy):
    """One trained norm of a healthy model as facts, with the spec that it has and the one that is meant."""
    site = next(site for site in healthy.sites if site.path == "transformer.ln_f")
    gain = replace(site.gain, quantiles=(0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1), mean=0.8, at_initialisation=False)

    def facts(spec: NormSpec, meant: NormSpec = MEANT, undecidable: str = "") -> Facts:
        readings = {undecidable: Reading.open("nobody knows")} if undecidable else {}
        passport = Passport(verdict="norm", spec=spec, readings=readings, weight=torch.linspace(-0.5, 0.1, 64))
        return Facts(
            model=healthy.model,
            sites=(replace(site, spec=spec, gain=gain if spec.has_weight else None, dtype="float32"),),
            blocks=(),
            attentions=(),
            final_norm=None,
            intent=Intent(source="Stock", specs={site.path: meant}, declared=frozenset({site.path})),
            passports={site.path: passport},
            patches=(),
        )

    return facts


@pytest.mark.parametrize("field", [field.name for field in fields(NormSpec)])
def test_every_field_is_compared_by_its_rule(known, field):
    wrong = MEANT.replace(**OTHER[field])
    assert getattr(wrong, field) != getattr(MEANT, field)
    found = CHECKS[RULE_OF[field]](known(wrong))
    assert isinstance(found, Hit), f"{RULE_OF[field]} does not see another {field}"
    assert found.sites == ("transformer.ln_f",)


@pytest.mark.parametrize("field", [field.name for field in fields(NormSpec)])
def test_the_reverse_is_seen_too(known, field):
    meant = MEANT.replace(**OTHER[field])
    # An offset too many is the rule next door.
    rule = {"weight_offset": "B2"}.get(field, RULE_OF[field])
    if field == "statistics_dtype":
        # Statistics wider than meant are another order of rounding.
        rule = "E1"
    assert isinstance(CHECKS[rule](known(MEANT, meant)), Hit), f"{rule} does not see that {field} is meant otherwise"


def test_a_spec_as_it_is_meant_is_clean(known):
    assert {rule: CHECKS[rule](known(MEANT)) for rule in set(RULE_OF.values())} == dict.fromkeys(set(RULE_OF.values()))


@pytest.mark.parametrize(
    ("reading", "rules"), [("casts", ("E1", "E2")), ("offset dtype", ("B3",)), ("eps", ("A1", "A2", "A3"))]
)
def test_what_was_not_decided_is_not_clean(known, reading, rules):
    for rule in rules:
        found = CHECKS[rule](known(MEANT, undecidable=reading))
        assert isinstance(found, NotChecked), f"{rule} says {found}"
        assert found.reason == "not decided at 1 norm, first at transformer.ln_f: nobody knows"


def test_statistics_that_overflow_are_found_where_no_program_gives_the_bits(known):
    facts = known(MEANT.replace(statistics_dtype="input"), undecidable="casts")
    (path,) = facts.passports
    casts = replace(facts.passports[path].readings["casts"], value={"statistics_dtype": "input"})
    facts = replace(facts, passports={path: replace(facts.passports[path], readings={"casts": casts})})
    assert isinstance(CHECKS["E2"](facts), Hit)
    assert isinstance(CHECKS["E1"](facts), NotChecked)


def test_a_norm_of_the_stock_class_needs_no_decision(known):
    facts = known(MEANT, undecidable="casts")
    assert CHECKS["E1"](replace(facts, intent=replace(facts.intent, stock=frozenset({"transformer.ln_f"})))) is None


def test_sqrt_n_of_a_sum_and_of_the_multiplier_cancel(known):
    rms = specs.OLMO2.replace(eps=1e-3)
    l2 = rms.replace(reduction="sum", multiplier="sqrt_n", eps=1e-3 * 768)
    facts = known(l2, rms)
    features = facts.sites[0].input.features
    facts = known(rms.replace(reduction="sum", multiplier="sqrt_n", eps=1e-3 * features), rms)
    assert [rule for rule in ("A1", "A2", "A12") if CHECKS[rule](facts) is not None] == []


@pytest.mark.parametrize(
    ("changed", "is_hit"),
    [
        ({}, True),
        ({"class_name": "LlamaRMSNorm"}, True),
        ({"class_name": "LayerNorm"}, True),
        # These names promise no mean of squares.
        ({"class_name": "L2Norm"}, False),
        ({"class_name": "ScaleNorm"}, False),
        ({"class_name": "TwoNorms"}, False),
        ({"role": "query-key"}, False),
        ({"role": "unknown"}, True),
        ({"spec": specs.L2_NORM.replace(multiplier="sqrt_n")}, False),
        ({"spec": specs.TORCH_RMS_NORM}, False),
    ],
)
def test_without_an_intent_the_name_of_a_class_promises_a_length(known, changed, is_hit):
    facts = replace(known(specs.L2_NORM), intent=None)
    (site,) = facts.sites
    site = replace(site, class_name="RMSNorm", output=replace(site.output, rms_quantiles=(0.12, 0.125, 0.13)))
    found = CHECKS["A12"](replace(facts, sites=(replace(site, **changed),)))
    assert isinstance(found, Hit if is_hit else NotChecked)
    if is_hit:
        assert found.severity == "warning"
        assert "leave with a median rms of 0.125, sqrt(n) = 8 times too short (n = 64)" in found.evidence[0]


def test_a_gain_of_sqrt_n_makes_up_for_a_sum_of_squares(known):
    facts = replace(known(specs.L2_NORM), intent=None)
    (site,) = facts.sites
    sites = (replace(site, class_name="RMSNorm", output=replace(site.output, rms_quantiles=(0.9, 1.0, 1.1))),)
    assert isinstance(CHECKS["A12"](replace(facts, sites=sites)), NotChecked)


def test_heads_of_length_1_are_those_of_cosine_attention(known):
    facts = replace(known(specs.L2_NORM), intent=None)
    (site,) = facts.sites
    heads = replace(site, class_name="RMSNorm", role="unknown", input=replace(site.input, features=16))
    heads = replace(heads, output=replace(site.output, rms_quantiles=(0.25, 0.25, 0.25)))
    assert isinstance(CHECKS["A12"](replace(facts, sites=(heads,))), NotChecked)
    assert CHECKS["A12"](replace(facts, sites=(replace(heads, role="pre"),))).sites == (site.path,)


def test_without_an_intent_nothing_is_compared(known):
    facts = replace(known(MEANT), intent=None)
    assert isinstance(compared(facts, ("has_bias",), lambda *_: None, ""), NotChecked)


class Std(Gain):
    """Divides by a standard deviation and keeps the mean."""

    def forward(self, x):
        return self.weight * x / torch.sqrt(x.var(-1, keepdim=True, correction=0) + 1e-6)


class Unscaled(Gain):
    """An L2 norm without sqrt(n)."""

    def forward(self, x):
        return self.weight * F.normalize(x, dim=-1)


class RMSNorm(Unscaled):
    """A name that promises sqrt(n)."""


class Unweighted(Gain):
    """A gain that nothing reads."""

    def forward(self, x):
        return self.rms(x)


class Half(Gain):
    """Statistics over the first half of the features."""

    def forward(self, x):
        half = x[..., : x.shape[-1] // 2]
        return self.weight * x * torch.rsqrt(half.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "rule", "words"),
    [
        (lambda n: nn.LayerNorm(n, eps=1e-6), "A11", "the mean is subtracted, the config says not subtracted"),
        (Std, "A11", "the mean is subtracted for the statistics only"),
        (
            Unscaled,
            "A12",
            "the sum of squares is not divided (L2), the config says divided by n:",
        ),
        (Unweighted, "B11", "no gain acts on its output"),
        (Half, "E5", "its statistics leave features out: 9 of 17 that were tried"),
    ],
)
def test_another_formula_is_named_where_it_is(models, inspected, norm, rule, words):
    model = models.train(models.tiny("Llama", layers=2))
    other = norm(64)
    with torch.no_grad():
        other.weight.copy_(model.get_submodule(PATH).weight)
    model.set_submodule(PATH, other)
    found = inspected(model).findings[0]
    assert (found.rule, found.severity, found.sites) == (rule, "error", (PATH,))
    assert words in found.evidence[0]


@pytest.mark.slow
def test_norms_without_a_mean_of_squares_are_named_where_only_their_class_tells(models, inspected):
    found = inspected(models.plain(RMSNorm)).findings[0]
    assert (found.rule, found.severity, len(found.sites)) == ("A12", "warning", 5)
    assert found.measured == "rows sqrt(n) times shorter than the name of the class says at 5 norms"
    # The same formula under a name that does not promise more.
    assert "A12" not in [found.rule for found in inspected(models.plain(Unscaled)).findings]


def test_rows_without_a_mean_leave_both_formulas_alike(known):
    facts = known(MEANT.replace(centre_numerator=False, centre_statistics=False))
    (site,) = facts.sites
    for share, severity in ((1e-15, "note"), (1e-9, "warning")):
        rows = replace(site, input=replace(site.input, mean_energy=share))
        assert CHECKS["A11"](replace(facts, sites=(rows,))).severity == severity


@pytest.mark.slow
def test_a_dropped_bias(models, inspected, finding):
    model = models.train(models.tiny("GPT2"))
    model.transformer.ln_f.bias = None
    found = finding(inspected(model), "B12")
    assert found.sites == ("transformer.ln_f",)
    assert "no bias is added, the config says" in found.evidence[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stock_norms_that_pass_their_input_through_or_are_skipped(models, inspected, finding, dtype):
    model = models.train(models.tiny("Llama", layers=2)).to(dtype)
    model.get_submodule(PATH).forward = lambda x: x
    found = finding(inspected(model), "D3")
    assert found.sites == (PATH,)
    assert "the module that is called here normalizes nothing" in found.evidence[0]
    model = models.train(models.tiny("GPT2")).to(dtype)
    block = model.transformer.h[1]
    block.forward = lambda x, *_args, **_kwargs: x + block.mlp(x)
    found = finding(inspected(model), "D3")
    assert found.sites == ("transformer.h.1.ln_1", "transformer.h.1.ln_2")
    assert "here it is never called, though norms like it in other blocks are" in found.evidence[0]


@pytest.mark.slow
def test_cast_orders_that_no_program_gives_are_not_checked(models, inspected):
    class Odd(Gain):
        """Rounds half of the features early and half of them late, as no known program does."""

        def forward(self, x):
            late = self.rms(x.float()) * self.weight.float()
            early = self.weight * self.rms(x.float()).to(x.dtype)
            return torch.where(torch.arange(x.shape[-1]) % 2 == 0, early.float(), late).to(x.dtype)

    model = models.train(models.tiny("Llama", layers=2)).bfloat16()
    model.set_submodule(PATH, Odd(64).bfloat16())
    checks = {check.rule: check for check in inspected(model).checks}
    assert checks["E1"].status == "not checked"
    assert PATH in checks["E1"].reason


@pytest.mark.slow
@pytest.mark.parametrize(("names", "rules"), [((), ()), (("weight", "bias"), ("B11", "B12")), (("bias",), ("B12",))])
def test_parameters_that_a_norm_holds_and_never_applies(models, inspected, names, rules):
    class Partly(nn.LayerNorm):
        """Without a config nothing else tells that these parameters were meant to act."""

        def forward(self, x):
            held = {name: None if name in names else getattr(self, name) for name in ("weight", "bias")}
            return F.layer_norm(x, self.normalized_shape, **held, eps=self.eps)

    model = models.train(models.plain())
    model.blocks[1].norm_1 = Partly(64)
    model.train(False)
    found = [each for each in inspected(models.train(model)).findings if each.rule in ("B11", "B12")]
    assert [(each.rule, each.severity, each.sites) for each in found] == [
        (rule, "error", ("blocks.1.norm_1",)) for rule in rules
    ]
