"""The walk against the reference, and what a capture takes from a running model."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import PRESETS, arguments
from normkit import reference
from normkit.identification.passport import Passport
from normkit.identification.sites import NormSite, find_sites
from normkit.identification.tracing import trace
from normkit.inspection.first_text import TokenRow, walk
from normkit.spec import NormSpec

ROW_PRESETS = {name: spec for name, spec in PRESETS.items() if spec.axes == (-1,) and spec.groups == 1}


def capture(model, found, run, position=10, texts=1, tokens=11):
    counts = (torch.arange(tokens) <= position).expand(texts, tokens)
    listener = TokenRow(found, {"input_ids": torch.zeros(texts, tokens).long(), "attention_mask": counts})
    with torch.no_grad(), listener.listening(model):
        run()
    return listener.rows()


def site(spec, weight=None, bias=None):
    """A site that computes `spec`; the stored weight becomes the gain that acts."""
    gain = None if weight is None else reference.effective_weight(weight, spec, torch.float64)
    passport = Passport(spec=spec, verdict="norm", readings={})
    n = next((value.numel() for value in (weight, bias) if value is not None), 1)
    place = {"path": "norm", "parent": "norm", "function": None, "ordinal": 0, "module": None}
    return NormSite(
        **place,
        class_name="",
        order=0,
        shape=(n,),
        spec=spec,
        passport=passport,
        gain=gain,
        bias=bias,
        parameters=lambda: (gain, bias),
    )


def walked(spec, x, weight=None, bias=None):
    y = reference.forward(x[None], spec, weight, bias)[0]
    return walk(site(spec, weight, bias), x, y, token="t", position=3), y


@pytest.mark.parametrize("name", ROW_PRESETS)
def test_the_last_step_is_the_references_output(name):
    spec = ROW_PRESETS[name]
    x, weight, bias = arguments(spec, rows=1, features=24)
    result, y = walked(spec, x[0], weight, bias)
    last = result.steps[-1]
    # Float64 on both sides, in sums of 24.
    assert result.module_error < 1e-14
    assert last.norm == pytest.approx(float(y.norm()), rel=1e-14)
    assert last.mean == pytest.approx(float(y.mean()), abs=1e-14)
    assert last.values == pytest.approx(y[:8].tolist(), abs=1e-14)
    assert (result.path, result.token, result.position, result.features) == ("norm", "t", 3, 24)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (NormSpec(), ["raw", "centred", "scaled", "gain and bias"]),
        (PRESETS["LLAMA"], ["raw", "scaled", "gain and bias"]),
        (PRESETS["OLMO"], ["raw", "centred", "scaled"]),
        (PRESETS["NANOCHAT"], ["raw", "scaled"]),
        (PRESETS["MUSE_SPARK_INPUT_SCALED"], ["raw", "gain and bias", "scaled"]),
    ],
)
def test_only_the_stages_that_the_norm_has(spec, names):
    x, weight, bias = arguments(spec, rows=1)
    assert [step.name for step in walked(spec, x[0], weight, bias)[0].steps] == names


def test_what_holds_after_each_stage():
    x, weight, bias = arguments(NormSpec(), rows=1, features=24)
    result, _ = walked(NormSpec(eps=1e-3), x[0], weight, bias)
    raw, centred, scaled, affine = result.steps
    assert raw.mean == pytest.approx(float(x.mean()))
    assert centred.mean == pytest.approx(0.0, abs=1e-15)
    assert centred.angle_to_ones == pytest.approx(90.0)
    assert scaled.norm_over_sqrt_n < 1
    assert raw.holds.endswith("% of its energy lies along the all-ones direction")
    assert centred.holds == "mean 0: in the hyperplane orthogonal to 1"
    assert scaled.holds.startswith("on the sphere of radius sqrt(n), eps keeps it")
    assert affine.does == "times the gain, plus the bias"
    assert affine.holds.startswith("on the ellipsoid with centre b and normal 1/g, eps keeps it")


@pytest.mark.parametrize("spec", [NormSpec(), PRESETS["LLAMA"], PRESETS["GEMMA"], PRESETS["SCALE_NORM"]], ids=str)
def test_without_eps_the_output_lies_on_the_ellipsoid(spec):
    spec = spec.replace(eps=0.0)
    x, weight, bias = arguments(spec, rows=1, features=24)
    result, _ = walked(spec, x[0], weight, bias)
    assert result.ellipsoid_depth == pytest.approx(0.0, abs=1e-14)
    assert "eps" not in result.steps[-1].holds
    assert (result.plane_defect is None) == (not spec.centre_numerator)
    assert (result.plane_defect or 0.0) < 1e-14


def test_an_unbiased_variance_has_a_smaller_sphere():
    x, weight, bias = arguments(NormSpec(), rows=1, features=24)
    result, _ = walked(NormSpec(correction=1, eps=0.0), x[0], weight, bias)
    assert result.ellipsoid_depth == pytest.approx(0.0, abs=1e-14)
    assert result.steps[2].holds == "on the sphere of radius sqrt(n - 1)"


def test_one_sided_centring_has_no_ellipsoid():
    spec = PRESETS["POCKET_TTS"]
    x, weight, bias = arguments(spec, rows=1, features=24)
    result, _ = walked(spec, x[0], weight, bias)
    assert result.ellipsoid_depth is None
    assert result.plane_defect is None
    assert result.steps[1].holds.startswith("on no sphere")
    assert result.steps[2].holds == "on no ellipsoid, as it was on no sphere"


def test_a_machine_epsilon_is_that_of_what_entered():
    spec = NormSpec(eps=None, has_weight=False, has_bias=False)
    # Rows so short that float32's epsilon takes a good part of them, and float64's nothing.
    x = 1e-4 * torch.randn(24)
    result = walk(site(spec), x, reference.forward(x, spec), token="", position=0)
    assert result.ellipsoid_depth > 0.5
    assert result.module_error < 1e-6


def test_each_head_may_have_its_gain():
    spec = PRESETS["COHERE"]
    x, weight = torch.randn(3, 24, dtype=torch.float64), torch.rand(3, 24, dtype=torch.float64) + 0.5
    y = reference.forward(x, spec, weight)
    assert walk(site(spec, weight), x[0], y[0], token="", position=0).module_error < 1e-14


def test_depth_is_what_eps_takes_from_the_length():
    x, weight, bias = arguments(NormSpec(), rows=1, features=24)
    variance = float(x.var(correction=0))
    result, _ = walked(NormSpec(eps=0.1), x[0], weight, bias)
    assert result.ellipsoid_depth == pytest.approx(1 - math.sqrt(variance / (variance + 0.1)), rel=1e-12)


def test_a_gain_of_zero_hides_no_depth():
    x, weight, bias = arguments(NormSpec(), rows=1, features=24)
    whole, _ = walked(NormSpec(eps=0.1), x[0], weight, bias)
    weight[:5] = 0.0
    holed, _ = walked(NormSpec(eps=0.1), x[0], weight, bias)
    assert holed.ellipsoid_depth == pytest.approx(whole.ellipsoid_depth, rel=1e-12)
    assert holed.plane_defect < 1e-14


def test_an_output_that_the_spec_does_not_explain_is_measured():
    x = torch.randn(24)
    result = walk(site(PRESETS["OLMO"]), x, torch.zeros(24), token="", position=0)
    assert result.module_error > 1


def test_the_all_ones_direction_and_the_zero_vector():
    ones, _ = walked(PRESETS["NANOCHAT"], torch.full((24,), 2.0, dtype=torch.float64))
    assert ones.steps[0].angle_to_ones == 0.0
    assert ones.steps[0].holds.startswith("100 %")
    against, _ = walked(PRESETS["NANOCHAT"], torch.full((24,), -2.0, dtype=torch.float64))
    assert against.steps[0].angle_to_ones == 180.0
    zero, _ = walked(NormSpec(has_weight=False, has_bias=False), torch.zeros(24, dtype=torch.float64))
    assert math.isnan(zero.steps[0].angle_to_ones)
    assert zero.ellipsoid_depth == 1.0


class Model(nn.Module):
    """Embeds, splits heads and norms them in either layout, norms as a function, norms flattened rows."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 24)
        self.norm = nn.LayerNorm(24)
        self.heads_last, self.heads_first = nn.RMSNorm(6), nn.RMSNorm(6)
        self.flat = nn.LayerNorm(24)

    def forward(self, input_ids):
        x = self.norm(self.embedding(input_ids))
        x = x + F.layer_norm(x, (24,)) + F.layer_norm(2 * x, (24,))
        heads = self.heads_last(x.unflatten(-1, (4, 6)))
        heads = self.heads_first(heads.transpose(1, 2)).transpose(1, 2)
        return self.flat(heads.flatten(2).flatten(0, 1))


@pytest.fixture
def running():
    model = Model()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    ids = torch.arange(7, 18)[None]

    def run():
        return model(input_ids=ids)

    return model, run, find_sites(model, trace(model, run))[0]


@pytest.mark.slow
def test_every_kind_of_site_is_captured(running):
    model, run, sites = running
    assert [site.path for site in sites] == [
        "norm",
        ":layer_norm",
        ":layer_norm#2",
        "heads_last",
        "heads_first",
        "flat",
    ]
    for found in sites:
        x, y = capture(model, found, run)
        assert x.shape == y.shape == found.shape
        # The spec, the gain and the bias of the site explain what the module did, to float32's rounding.
        assert walk(found, x, y, token="", position=10).module_error < 1e-6


@pytest.mark.slow
def test_the_captured_row_is_that_of_the_token(running):
    model, run, sites = running
    for position in (10, 3):
        x, _ = capture(model, sites[0], run, position)
        assert torch.equal(x, model.embedding.weight[7 + position])
    x, y = capture(model, sites[3], run, 3)
    by_hand = model.heads_last(x)
    assert torch.allclose(y, by_hand)
    first, _ = capture(model, sites[4], run, 3)
    assert torch.equal(first, y)


@pytest.mark.slow
@pytest.mark.parametrize("texts", [3, 11])
def test_the_token_is_that_of_the_first_of_several_texts(running, texts):
    model, run, sites = running
    ids = torch.cat([torch.arange(7, 18)[None], torch.randint(50, (texts - 1, 11))])
    for found in sites:
        alone, among = capture(model, found, run, 4), capture(model, found, lambda: model(input_ids=ids), 4, texts)
        # Products of matrices are added in another order where there are more rows.
        for one, other in zip(alone, among, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_model_is_left_as_it_was(running):
    model, run, sites = running

    def broken():
        run()
        raise KeyboardInterrupt

    for found in sites:
        capture(model, found, run)
        with pytest.raises(KeyboardInterrupt):
            capture(model, found, broken)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def test_rows_that_are_not_tokens_are_not_captured():
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm = nn.Embedding(50, 24), nn.GroupNorm(2, 24)

        def forward(self, input_ids):
            return self.norm(self.embedding(input_ids).transpose(1, 2))

    model, ids = Grouped(), torch.arange(7, 18)[None]
    sites, _ = find_sites(model, trace(model, lambda: model(input_ids=ids)))
    assert sites[0].path == "norm"
    assert capture(model, sites[0], lambda: model(input_ids=ids)) is None
    assert capture(model, sites[0], lambda: None) is None


def test_the_difference_from_the_module_is_told_beside_what_rounding_explains():
    """0.0888 of a bfloat16 norm of Gemma read as a fault: it is one rounding of an entry of 23."""
    spec = ROW_PRESETS["GEMMA"]
    x, weight, _ = arguments(spec, rows=1, features=64)
    x, weight = x[0].bfloat16(), (20 * weight).bfloat16()
    y = reference.forward(x[None], spec, weight)[0]
    result = walk(site(spec, weight), x, y, token="", position=0)
    assert result.module_error > 0.02
    assert result.rounding == 2**-8
    # The product in float32 is rounded once.
    assert result.relative_error <= result.rounding
