"""From forward calls to a spec: every preset, formulas written by others, and what is not a norm."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import normkit as nk
from helpers import PRESETS
from normkit import NormSpec, specs
from normkit.errors import ShapeError
from normkit.identification.behaviour import agrees, examine, identify


@pytest.mark.sampled(8)
@pytest.mark.parametrize("n", [6, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_comes_back(name, n):
    spec = PRESETS[name]
    shape = (2, n, 3, 2) if spec.axes in ((1,), "all_but_batch") else (2, 3, n)
    passport = identify(nk.Norm(spec, n), shape)
    assert passport.verdict == "norm"
    assert passport.spec == spec
    assert passport.confidence == 1.0


def layer_norm(x, gamma, beta, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    var = x.var(-1, keepdim=True)
    return gamma * (x - mean) / torch.sqrt(var + eps) + beta


@pytest.mark.parametrize(("gamma", "beta"), [(1.0, 0.0), (torch.linspace(0.5, 2, 6), torch.linspace(-1, 1, 6))])
def test_the_snippet_that_calls_itself_layer_norm_is_not_torchs(gamma, beta):
    passport = identify(lambda x: layer_norm(x, gamma, beta), 6)
    assert passport.spec.correction == 1
    assert passport.spec.eps == 1e-5
    assert passport.spec.has_weight is passport.spec.has_bias is isinstance(gamma, torch.Tensor)
    assert passport.confidence < 1
    assert any("gain" in line for line in passport.evidence if line.startswith("undecided:"))


def stock(path):
    """A class of `transformers.models` by family and name, and its spec here."""
    from importlib import import_module

    family, name = path.split(".")
    return getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("path", "arguments", "shape", "spec"),
    [
        ("llama.LlamaRMSNorm", (64,), (2, 64), specs.LLAMA),
        ("gemma.GemmaRMSNorm", (64,), (2, 64), specs.GEMMA),
        ("cohere.CohereLayerNorm", (64,), (2, 64), specs.COHERE),
        ("cohere.CohereLayerNorm", ((4, 16),), (2, 5, 4, 16), specs.COHERE),
        ("nemotron.NemotronLayerNorm1P", (64,), (2, 64), specs.NEMOTRON),
        ("olmo.OlmoLayerNorm", (64,), (2, 64), specs.OLMO),
        ("olmo2.Olmo2RMSNorm", (64,), (2, 64), specs.OLMO2),
        ("t5.T5LayerNorm", (64,), (2, 64), specs.T5),
        ("deberta.DebertaLayerNorm", (64, 1e-7), (2, 64), specs.DEBERTA),
        ("imagegpt.ImageGPTLayerNorm", ((64,),), (2, 64), specs.IMAGEGPT),
        ("nanochat.NanoChatRMSNorm", (), (2, 64), specs.NANOCHAT),
        ("deepseek_v4.DeepseekV4UnweightedRMSNorm", (), (2, 64), specs.DEEPSEEK_V4_UNWEIGHTED),
        ("muse_spark.MuseSparkTextCenteredRMSNorm", (64,), (2, 64), specs.MUSE_SPARK),
        ("muse_spark.MuseSparkTextInputScaledRMSNorm", (64,), (2, 64), specs.MUSE_SPARK_INPUT_SCALED),
        ("mamba2.MambaRMSNormGated", (64, 16), (2, 64), specs.LLAMA.replace(groups=4)),
        ("poolformer.PoolFormerGroupNorm", (16,), (2, 16, 5, 5), specs.POOLFORMER),
    ],
)
def test_stock_classes_of_transformers(path, arguments, shape, spec):
    passport = identify(stock(path)(*arguments), shape)
    assert passport.spec == spec
    assert passport.confidence == 1.0


def test_channels_first():
    module = stock("convnext.ConvNextLayerNorm")(16, data_format="channels_first")
    assert identify(module, (2, 16, 5, 5)).spec == specs.CONVNEXT


def test_a_norm_that_centres_only_its_statistics():
    passport = identify(stock("pocket_tts.PocketTTSTimestepNorm")(64), 64)
    # It multiplies the gain and a rounded 1/std first.
    assert passport.spec == specs.POCKET_TTS
    assert passport.confidence == 1.0
    assert "x * (gain / s)" in passport.readings["casts"].evidence[0]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("norm", "shape", "spec"),
    [
        (nn.LayerNorm(64), 64, specs.TORCH_LAYER_NORM),
        (nn.LayerNorm(64, bias=False, eps=1e-12), 64, specs.MODERNBERT.replace(eps=1e-12)),
        (nn.LayerNorm((4, 16)), (2, 4, 16), specs.TORCH_LAYER_NORM.replace(axes=(-2, -1))),
        (nn.LayerNorm(64, elementwise_affine=False), 64, specs.OLMO),
        (nn.RMSNorm(64), 64, specs.TORCH_RMS_NORM),
        (nn.RMSNorm(64, eps=1e-6), (2, 3, 64), specs.OLMO2),
        (nn.GroupNorm(4, 16), (2, 16, 5, 5), NormSpec(axes="all_but_batch", groups=4)),
        (nn.GroupNorm(1, 16), (2, 16, 1, 1), NormSpec(axes="all_but_batch")),
        (nn.GroupNorm(4, 64), 64, NormSpec(groups=4)),
        (nn.Sequential(nn.LayerNorm(64), nn.Dropout(0.5)), 64, specs.TORCH_LAYER_NORM),
        (nn.LayerNorm(64, device="meta"), 64, specs.TORCH_LAYER_NORM),
        (nn.LayerNorm(64).to(torch.bfloat16), 64, specs.TORCH_LAYER_NORM),
        (nn.LayerNorm(2), 2, specs.TORCH_LAYER_NORM),
        (nn.LayerNorm(4096), 4096, specs.TORCH_LAYER_NORM),
    ],
)
def test_torchs_own(norm, shape, spec):
    assert identify(norm, shape).spec == spec


def test_f_normalize():
    # A function without parameters shows no other dtype that its output could be promoted to.
    found = identify(lambda x: F.normalize(x, dim=-1), 64).spec
    assert found.replace(output_dtype="input") == specs.L2_NORM


class Clamped(nn.Module):
    """A norm that bounds what a well-behaved parameter never reaches."""

    def __init__(self, bounded, weight):
        super().__init__()
        self.weight, self.bounded = nn.Parameter(torch.full((16,), weight)), bounded

    def forward(self, x):
        return self.bounded(F.rms_norm(x, (16,), eps=1e-6), self.weight)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("gain", "start"),
    [
        (lambda weight: weight.clamp_max(2.0), 1.0),
        # Held against the parameters it has, too.
        (lambda weight: weight.clamp_max(2.0), 3.0),
        (lambda weight: weight.clamp(-30, 30), 1.0),
        (lambda weight: 30 * torch.tanh(weight / 30), 1.0),
        # Nothing, or no number, for negative parameters.
        (torch.relu, 1.44),
        (torch.sqrt, 1.44),
    ],
)
def test_a_gain_that_is_computed_is_taken_as_it_acts(gain, start):
    module = Clamped(lambda normalized, weight: normalized * gain(weight), start)
    passport = identify(module, 16)
    assert passport.spec.eps == 1e-6
    assert {"gain", "casts", "output dtype"} <= passport.undecidable.keys()
    assert "made of weight" in passport.undecidable["gain"]
    assert not agrees(module, examine(nn.RMSNorm(16, eps=1e-6), 16))
    x = torch.randn(4, 16)
    torch.testing.assert_close(passport(x), module(x), rtol=1e-5, atol=1e-5)


def test_an_output_that_only_its_own_gain_clips():
    passport = identify(Clamped(lambda normalized, weight: (normalized * weight).clamp(-6, 6), 5.0), 16)
    assert (passport.verdict, passport.spec) == ("norm", None)
    assert "for those of about 64 this is off" in passport.evidence[0]


def test_a_computed_gain_of_zero_does_not_make_it_no_norm():
    passport = identify(Clamped(lambda normalized, weight: normalized * weight**3, 0.0), 16)
    assert (passport.verdict, passport.spec) == ("norm", None)
    assert "its output is zero" in passport.evidence[0]


def test_nothing_is_changed():
    module = nn.Sequential(nn.LayerNorm(16), nn.Dropout(0.5)).to(torch.bfloat16).train()
    module[0].weight.grad = torch.ones(16, dtype=torch.bfloat16)
    calls = []
    module[0].register_forward_hook(lambda *_: calls.append(1))
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    identify(module, 16)
    identify(lambda x: F.dropout(x, 0.5), 16)
    batch_norm = nn.BatchNorm1d(16)
    identify(batch_norm, 16)
    assert int(batch_norm.num_batches_tracked) == 0
    assert bool((batch_norm.running_mean == 0).all())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.training
    assert module[0].weight.dtype == torch.bfloat16
    assert bool((module[0].weight.grad == 1).all())
    assert calls == []


def test_a_gain_that_is_not_finite_does_not_hide_the_norm():
    module = nn.LayerNorm(16)
    with torch.no_grad():
        module.weight[3] = float("nan")
        module.bias[5] = float("inf")
    assert identify(module, 16).spec == specs.TORCH_LAYER_NORM


@pytest.mark.slow
def test_the_same_answer_every_time():
    assert identify(nn.LayerNorm(16), 16).to_json() == identify(nn.LayerNorm(16), 16).to_json()


@pytest.mark.parametrize("shape", [(16,), (2, 0), (2, 16.0), (2, 1), 1])
def test_shapes_that_cannot_be_used(shape):
    with pytest.raises(ShapeError):
        identify(nn.LayerNorm(16), shape)


def test_a_norm_of_another_size_is_refused():
    with pytest.raises(ShapeError, match=r"got a tensor; give tuple\(x\.shape\), \(2, 8\)"):
        identify(nn.LayerNorm(8), torch.ones(2, 8))
    with pytest.raises(ShapeError, match=r"refuses an input of shape \(2, 17\)"):
        identify(nn.LayerNorm(16), 17)


@pytest.mark.slow
def test_a_like_module_is_verified_with_a_few_calls():
    found = examine(nn.LayerNorm(16), (2, 3, 16))
    assert agrees(nn.LayerNorm(16), found)
    assert agrees(nn.LayerNorm(16).to(torch.bfloat16), found)
    for other in (
        nn.LayerNorm(16, eps=1e-6),
        nn.LayerNorm(16, eps=1.01e-5),
        nn.LayerNorm(16, bias=False),
        nk.Norm(specs.TORCH_LAYER_NORM.replace(weight_offset=1.0), 16),
        nk.Norm(specs.TORCH_LAYER_NORM.replace(correction=1), 16),
        nk.Norm(specs.TORCH_LAYER_NORM.replace(eps_placement="outside"), 16),
        nk.Norm(specs.TORCH_LAYER_NORM.replace(cast="early"), 16),
        nn.Linear(16, 16),
    ):
        assert not agrees(other, found)
    clamp = examine(nk.Norm(specs.L2_NORM, 64), 64)
    assert agrees(nk.Norm(specs.L2_NORM, 64), clamp)
    assert not agrees(nk.Norm(specs.L2_NORM.replace(eps=1.5e-12), 64), clamp)
    no_eps = examine(nk.Norm(specs.TORCH_LAYER_NORM.replace(eps=0.0), 16), 16)
    assert not agrees(nn.LayerNorm(16, eps=1e-12), no_eps)
    assert not agrees(nn.GELU(), examine(nn.GELU(), 16))


def test_a_norm_is_called_no_more_often_than_it_takes():
    class Counted(nn.LayerNorm):
        calls = 0

        def forward(self, x):
            Counted.calls += 1
            return super().forward(x)

    assert identify(Counted(64), 64).spec == nk.specs.TORCH_LAYER_NORM
    # One call for each experiment whose rows may go side by side; 40 where each mean and each constant has its own.
    # The last one is that of rows in an input of other sizes.
    assert Counted.calls <= 34
