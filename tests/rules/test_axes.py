"""Group C, axes, on real tiny models: rows along other axes, and over other numbers of heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.olmo2.modeling_olmo2 import Olmo2Attention, Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import normkit as nk
from faulty_norms import OverAxes
from helpers import finding_of
from media_models import UNet, media_model
from normkit.conventions.rows import CHANNELS_LAST
from normkit.identification.passport import Passport
from normkit.inspection.result import infer
from normkit.measurement.intent import Intent
from normkit.rules.axes import mixed_heads, wrong_axis

WIDTH = 64


class WithoutGain(OverAxes):
    """Over time. With a gain along the features it would be a norm over a whole sample, in groups of one channel."""

    def __init__(self, _width):
        super().__init__(1)

    def affine(self, row, _x):
        return row


# C1.


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("norm", "axes"), [(WithoutGain, "axis 1"), (lambda _: OverAxes(1, 2), "the last 2 axes")])
def test_a_norm_over_tokens_among_norms_over_features(models, inspected, norm, axes):
    model = models.plain()
    assert finding_of(inspected(model), "C1") is None
    model.blocks[1].norm_2 = norm(WIDTH)
    found = finding_of(inspected(model), "C1")
    assert (found.severity, found.sites) == ("error", ("blocks.1.norm_2",))
    assert found.evidence[0].startswith(f"blocks.1.norm_2: a row is {axes}; that of 4 other norms is the last axis")


@pytest.mark.slow
def test_groups_of_features_against_the_config(models, inspected):
    class Groups(nn.Module):
        def forward(self, x):
            return F.rms_norm(x.unflatten(-1, (2, 32)), (32,)).flatten(-2)

    model = models.tiny("Llama")
    model.model.layers[1].input_layernorm = Groups()
    found = finding_of(inspected(model), "C1")
    assert found.sites == ("model.layers.1.input_layernorm",)
    assert found.evidence[0].endswith("a row is the last axis, in 2 groups, declared is the last axis")


@pytest.mark.slow
def test_other_axes_than_those_of_the_baseline(models, inspected):
    model = models.plain(WithoutGain)
    assert finding_of(inspected(model, intent=infer(inspected(model))), "C1") is None
    assert len(finding_of(inspected(model, intent=infer(inspected(models.plain()))), "C1").sites) == 5


@pytest.mark.slow
def test_rows_that_no_spec_describes(models, inspected, finding, status):
    class OverHeads(nn.Module):
        """Of (batch, token, head, feature), over the heads."""

        def forward(self, x):
            return x / (x.square().mean(2, keepdim=True) + 1e-6).sqrt()

    model = models.tiny("Qwen3", head_dim=16)
    assert status(inspected(model), "C1") == "clean"
    model.model.layers[1].self_attn.q_norm = OverHeads()
    found = finding(inspected(model), "C1")
    assert found.sites == ("model.layers.1.self_attn.q_norm",)
    assert "along axis 2; the config says that a row is the last axis" in found.evidence[0]


@pytest.mark.parametrize(("axes", "groups"), [(CHANNELS_LAST, 4), (CHANNELS_LAST, WIDTH), ("all_but_batch", 1)])
def test_groups_of_channels_last_hold_several_tokens(models, inspected, facts_of, axes, groups):
    facts = facts_of(inspected(models.plain()), models.plain())
    spec = facts.sites[0].spec.replace(axes=axes, groups=groups)
    site = replace(facts.sites[0], spec=spec)
    passport = Passport(verdict="norm", spec=spec, readings={}, shape=(2, 40, WIDTH))
    found = wrong_axis.check(
        replace(facts, sites=(site, *facts.sites[1:]), intent=None, passports={site.path: passport})
    )
    assert found.sites == (site.path,)
    assert "other norms is the last axis" in found.evidence[0]


# C2.


class HeadByHead(Olmo2Attention):
    """Olmo 2 whose query and key norms take each head by itself."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.q_norm, self.k_norm = (Reshaped(self.head_dim, config.rms_norm_eps) for _ in range(2))


class Reshaped(Olmo2RMSNorm):
    def forward(self, x):
        return super().forward(x.unflatten(-1, (-1, self.weight.numel()))).flatten(-2)


class Heads(nn.Module):
    """One head of attention after another, with a norm of each query, or of all together."""

    def __init__(self, together):
        super().__init__()
        self.together = together
        self.norm, self.query_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH if together else WIDTH // 4)
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        query, key, value = self.projection(self.norm(x)).chunk(3, -1)
        query = self.query_norm(query) if self.together else query
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (query, key, value))
        query = query if self.together else self.query_norm(query)
        return x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)


def headed(models, together):
    model = models.plain()
    model.blocks = nn.ModuleList(Heads(together) for _ in range(3))
    return model


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["Olmo2", "Qwen3", "GPT2"])
def test_query_norms_of_stock_classes_are_as_declared(models, inspected, status, family):
    options = {"head_dim": 16} if family == "Qwen3" else {}
    assert status(inspected(models.tiny(family, **options)), "C2") == "clean"


class AllHeads(Qwen3RMSNorm):
    """Of (batch, token, head, feature), over all heads at once."""

    def forward(self, x):
        return self.weight * (x / (x.square().mean((-2, -1), keepdim=True) + self.variance_epsilon).sqrt())


@pytest.mark.slow
def test_heads_mixed_where_the_config_takes_them_one_by_one(models, inspected):
    model = models.tiny("Qwen3", head_dim=16)
    model.model.layers[1].self_attn.k_norm = AllHeads(16, 1e-6)
    found = inspected(model).findings[0]
    assert (found.rule, found.severity, found.sites) == ("C2", "error", ("model.layers.1.self_attn.k_norm",))
    assert found.evidence == ("model.layers.1.self_attn.k_norm: a row holds 4 heads of 16 features, declared is one",)


@pytest.mark.slow
def test_heads_taken_one_by_one_where_the_config_mixes_them(models, inspected):
    model = models.tiny("Olmo2")
    model.model.layers[1].self_attn = HeadByHead(model.config, 1).eval()
    found = finding_of(inspected(model), "C2")
    assert found.severity == "error"
    assert found.sites == ("model.layers.1.self_attn.q_norm", "model.layers.1.self_attn.k_norm")
    assert "a row holds 16 features, declared are 64, 4 times that" in found.evidence[0]


@pytest.mark.parametrize(
    ("axes", "of_heads"),
    [((-1,), True), ("all_but_batch", False), (CHANNELS_LAST, False), ((1,), False), ((-2, -1), False)],
)
def test_what_else_a_row_holds_is_no_head(models, inspected, facts_of, axes, of_heads):
    """Of unknown role, with four times the features that are declared: in one row of (batch, token, feature)."""
    facts = facts_of(inspected(models.plain()), models.plain())
    spec = facts.sites[0].spec.replace(axes=axes)
    site = replace(facts.sites[0], role="unknown", spec=spec)
    passport = Passport(verdict="norm", spec=spec, readings={}, shape=(2, 40, WIDTH))
    intent = Intent(source="Stock", specs={}, features={site.path: site.input.features // 4})
    found = mixed_heads.check(replace(facts, sites=(site,), intent=intent, passports={site.path: passport}))
    assert (found is not None) == of_heads


@pytest.mark.slow
def test_heads_against_a_baseline(models, inspected, finding, status):
    together, apart = headed(models, together=True), headed(models, together=False)
    assert status(inspected(together), "C2") == "not checked"
    declared = infer(inspected(apart))
    assert {norm.features for path, norm in declared.norms.items() if "query" in path} == {16}
    assert status(inspected(apart, intent=declared), "C2") == "clean"
    found = finding(inspected(together, intent=declared), "C2")
    assert found.sites == tuple(f"blocks.{index}.query_norm" for index in range(3))
    assert "a row holds 4 heads of 16 features, declared is one" in found.evidence[0]


# C18.


@pytest.mark.parametrize(
    ("groups", "severity"),
    [
        ((4, 4, 4, 4), None),
        ((4, 16, 4, 4), "warning"),
        ((4, 1, 4, 4), "warning"),
        # Nothing says what is meant.
        ((16, 16), "note"),
        ((1, 1), "note"),
    ],
)
def test_groups_of_one_channel_and_one_group_of_all(groups, severity):
    torch.manual_seed(0)
    layers = [layer for number in groups for layer in (nn.Conv2d(16, 16, 1), nn.GroupNorm(number, 16))]
    found = finding_of(nk.inspect(nn.Sequential(*layers), torch.randn(2, 16, 4, 4)), "C18")
    assert (found and found.severity) == severity
    if severity == "warning":
        assert found.sites == ("3",)


def test_one_number_of_groups_for_all_widths():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 1), nn.GroupNorm(8, 8)]
    for _ in range(3):
        layers += [nn.LazyConv2d(32, 1), nn.GroupNorm(8, 32)]
    model, x = nn.Sequential(*layers), torch.randn(2, 3, 4, 4)
    model(x)
    assert finding_of(nk.inspect(model, x), "C18").severity == "note"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "number", "strided", "places", "narrow"])
def test_a_group_norm_over_other_rows_than_in_all_other_modules_of_a_class(fault):
    class Strided(nn.GroupNorm):
        """Gathers every eighth channel into a group."""

        def forward(self, x):
            parts = x.unflatten(1, (8, 4)).transpose(1, 2)
            y = F.layer_norm(parts.flatten(2), (parts[0, 0].numel(),), eps=self.eps)
            y = y.view_as(parts).transpose(1, 2).reshape(x.shape)
            return y * self.weight[:, None, None] + self.bias[:, None, None]

    class OverChannels(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.movedim(1, -1)).movedim(-1, 1)

    model, odd = UNet(), {"number": nn.GroupNorm(2, 32), "strided": Strided(4, 32), "places": OverChannels(32)}
    if fault in odd:
        model.middle[0].norm2 = odd[fault]
    if fault == "narrow":
        # No other norm of this place has as few channels, which might not divide into as many groups.
        model.up.norm2 = nn.GroupNorm(2, 16)
    batch = {"x": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([10.0, 500.0])}
    found = finding_of(nk.inspect(model, batch), "C1")
    if fault not in odd:
        assert found is None
        return
    assert (found.severity, found.sites[0].partition(":")[0]) == ("warning", "middle.0.norm2")
    assert found.evidence[0].endswith("of the same norm in 3 other modules of its class is a whole sample, in 4 groups")


@pytest.mark.slow
def test_a_group_norm_of_the_stock_class_with_another_number_of_groups():
    model, batch = media_model("Wav2Vec2")
    path = "feature_extractor.conv_layers.0.layer_norm"
    clean = nk.inspect(model, batch)
    assert finding_of(clean, "C1") is None
    assert finding_of(clean, "C18") is None
    model.get_submodule(path).num_groups = 1
    found = nk.inspect(model, batch)
    assert (finding_of(found, "C1").severity, finding_of(found, "C1").sites) == ("error", (path,))
    # C1 says it already.
    assert finding_of(found, "C18") is None
