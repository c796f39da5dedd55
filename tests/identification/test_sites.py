"""Every norm of a model is found by what it does, once, in forward order, with gain and bias as they act."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import normkit as nk
from normkit import NormSpec, specs
from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace

pytestmark = pytest.mark.slow

WIDTH, HEADS, LAYERS = 32, 4, 2
SIZES = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tiny(family, suffix="ForCausalLM", **options):
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    return getattr(transformers, f"{family}{suffix}")(config).eval()


def sites_of(model, *inputs, **named):
    return find_sites(model, trace(model, lambda: model(*inputs, **named)))


def text_sites(model):
    return sites_of(model, input_ids=torch.randint(3, 50, (2, 8)))


def layers(pattern, *names, last):
    return [*(f"{pattern.format(index)}.{name}" for index in range(LAYERS) for name in names), last]


def test_gpt2():
    names = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
    config = transformers.GPT2Config(vocab_size=50, bos_token_id=1, eos_token_id=2, **names)
    sites, unrecognised = text_sites(transformers.GPT2LMHeadModel(config).eval())
    assert [site.path for site in sites] == layers("transformer.h.{}", "ln_1", "ln_2", last="transformer.ln_f")
    assert {site.spec for site in sites} == {specs.TORCH_LAYER_NORM}
    assert {site.shape for site in sites} == {(WIDTH,)}
    assert {site.class_name for site in sites} == {"LayerNorm"}
    assert unrecognised == ()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "options", "names", "last", "spec"),
    [
        ("Llama", {}, ("input_layernorm", "post_attention_layernorm"), "model.norm", specs.LLAMA),
        (
            "Gemma",
            {"head_dim": 8, "num_key_value_heads": 2},
            ("input_layernorm", "post_attention_layernorm"),
            "model.norm",
            specs.GEMMA,
        ),
        ("Olmo", {}, ("input_layernorm", "post_attention_layernorm"), "model.norm", specs.OLMO),
        (
            "Qwen3",
            {"head_dim": 8, "num_key_value_heads": 2},
            ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm"),
            "model.norm",
            specs.LLAMA,
        ),
        (
            "Cohere",
            {"use_qk_norm": True},
            ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
            "model.norm",
            specs.COHERE,
        ),
    ],
)
def test_causal_models(family, options, names, last, spec):
    sites, unrecognised = text_sites(tiny(family, **options))
    assert [site.path for site in sites] == layers("model.layers.{}", *names, last=last)
    assert {site.spec for site in sites} == {spec}
    assert unrecognised == ()
    for site in sites:
        features = 8 if "self_attn" in site.path else WIDTH
        assert site.shape == (features,)
        if not spec.has_weight:
            assert site.gain is None
        elif family == "Cohere" and features == 8:
            assert site.gain.shape == (HEADS, 8)  # each head has its own
        else:
            assert site.gain.shape == (features,)
        assert site.bias is None


def test_bert():
    sites, unrecognised = text_sites(tiny("Bert", "Model"))
    inside = layers("encoder.layer.{}", "attention.output.LayerNorm", "output.LayerNorm", last="")[:-1]
    assert [site.path for site in sites] == ["embeddings.LayerNorm", *inside]
    assert {site.spec for site in sites} == {specs.BERT}
    assert unrecognised == ()


def test_t5_encoder():
    config = transformers.T5Config(vocab_size=50, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=LAYERS, num_heads=HEADS)
    sites, _ = text_sites(transformers.T5EncoderModel(config).eval())
    inside = ("layer.0.layer_norm", "layer.1.layer_norm")
    assert [site.path for site in sites] == layers("encoder.block.{}", *inside, last="encoder.final_layer_norm")
    assert {site.spec for site in sites} == {specs.T5}


def test_gated_norms_are_named_but_not_passed_off_as_norms():
    config = transformers.Mamba2Config(
        vocab_size=50, hidden_size=WIDTH, num_hidden_layers=1, num_heads=8, head_dim=8, state_size=8, n_groups=1
    )
    sites, unrecognised = text_sites(transformers.Mamba2ForCausalLM(config).eval())
    assert [site.path for site in sites] == ["backbone.layers.0.norm", "backbone.norm_f"]
    (other,) = unrecognised
    path, reason = other.path, other.reason
    assert path == "backbone.layers.0.mixer.norm"
    assert reason.startswith("MambaRMSNormGated: gated or adaptive norm: called with 2 tensors")


class Model(nn.Module):
    """Blocks that call norms as functions."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 8))
        self.project = nn.Linear(8, 8)
        self.act = nn.GELU()
        self.norm = nn.RMSNorm(8, eps=1e-6)

    def forward(self, x):
        x = x + self.act(self.project(F.rms_norm(x, (8,), eps=1e-3)))
        x = F.rms_norm(x, (8,), self.weight)
        x = F.layer_norm(x, (8,), self.weight, self.project.bias)
        x = F.group_norm(x.mT, 2, self.weight).mT
        return self.norm(x)


def test_functions_are_sites_of_their_own():
    model = nn.Sequential(Model(), nn.Identity())
    sites, unrecognised = sites_of(model, torch.randn(2, 5, 8))
    assert [site.path for site in sites] == ["0:rms_norm", "0:rms_norm#2", "0:layer_norm", "0:group_norm", "0.norm"]
    rms, second, layer, group, module = sites
    assert rms.spec == specs.NANOCHAT.replace(eps=1e-3)
    assert second.spec == specs.TORCH_RMS_NORM
    assert layer.spec == specs.TORCH_LAYER_NORM
    assert group.spec == NormSpec(axes="all_but_batch", groups=2, has_bias=False)
    assert (rms.parent, rms.function, rms.ordinal, rms.module) == ("0", "rms_norm", 0, None)
    assert (second.ordinal, second.class_name) == (1, "rms_norm")
    assert (module.parent, module.function, module.module) == ("0.norm", None, model[0].norm)
    assert [site.order for site in sites] == sorted(site.order for site in sites)
    assert rms.gain is None
    assert torch.equal(second.gain, model[0].weight.detach().double())
    assert torch.equal(layer.bias, model[0].project.bias.detach().double())
    assert {site.shape for site in sites} == {(8,)}
    assert all(site.passport.verdict == "norm" for site in sites)
    assert unrecognised == ()


def test_a_model_without_norms():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Softmax(-1), nn.Tanh(), nn.Linear(8, 8))
    assert sites_of(model, torch.randn(2, 8)) == ((), ())


def test_gain_and_bias_as_they_act():
    torch.manual_seed(1)
    shapes = {(-1,): 8, (1,): 4, "all_but_batch": 4, (-2, -1): (4, 8)}
    for axes, size in shapes.items():
        module = nk.Norm(NormSpec(axes=axes, weight_offset=1.0), size)
        nn.init.normal_(module.weight)
        nn.init.normal_(module.bias)
        ((site,), _) = sites_of(nn.Sequential(module, nn.Identity()), torch.randn(2, 4, 8))
        assert site.spec.axes == axes
        assert site.shape == (module.weight.numel(),)
        assert site.gain.dtype == torch.float64
        assert torch.equal(site.gain, (module.weight.detach() + 1.0).double().flatten())
        assert torch.equal(site.bias, module.bias.detach().double().flatten())


def test_a_gain_that_is_no_parameter_is_measured():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("gain", torch.linspace(0.5, 2, 8))

        def forward(self, x):
            return self.gain * F.layer_norm(x, (8,)) + 0.25

    sites, _ = sites_of(nn.Sequential(Fixed(), nn.Linear(8, 8)), torch.randn(2, 5, 8))
    assert sites[0].spec.has_weight
    assert sites[0].passport.confidence < 1
    # Least squares over 16 samples in float32.
    torch.testing.assert_close(sites[0].gain, torch.linspace(0.5, 2, 8).double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sites[0].bias, torch.full((8,), 0.25).double(), rtol=1e-5, atol=1e-5)


def test_an_offset_added_in_the_parameters_dtype_is_rounded_there():
    module = nk.Norm(specs.MUSE_SPARK.replace(eps=1e-6), 8).to(torch.bfloat16)
    nn.init.constant_(module.weight, 0.001)  # 1.001 is 1 in bfloat16
    ((site,), _) = sites_of(nn.Sequential(module), torch.randn(2, 8).bfloat16())
    assert site.spec == specs.MUSE_SPARK
    assert bool((site.gain == 1.0).all())


def test_a_float64_gain_keeps_its_digits():
    module = nk.Norm(specs.GEMMA, 8).double()
    nn.init.constant_(module.weight, 1e-12)
    ((site,), _) = sites_of(nn.Sequential(module), torch.randn(2, 8).double())
    assert bool((site.gain == 1 + 1e-12).all())


def test_a_gain_that_is_not_finite_is_carried_along():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8))
    with torch.no_grad():
        model[2].weight[3] = float("nan")
    sites, _ = sites_of(model, torch.randn(2, 5, 8))
    assert [site.path for site in sites] == ["0", "2"]
    assert sites[1].spec == specs.TORCH_LAYER_NORM
    assert sites[1].gain.isnan().tolist() == [index == 3 for index in range(8)]


def test_like_modules_are_verified_one_by_one():
    model = nn.Sequential(*(nn.LayerNorm(8) for _ in range(6)))
    model[3].eps = 1e-6
    model[4] = nk.Norm(NormSpec(weight_offset=1.0), 8)
    sites, _ = sites_of(model, torch.randn(2, 5, 8))
    assert [site.spec.eps for site in sites] == [1e-5, 1e-5, 1e-5, 1e-6, 1e-5, 1e-5]
    assert [site.spec.weight_offset for site in sites] == [0, 0, 0, 0, 1, 0]
    assert sites[1].passport.readings["kind"].evidence[-1].startswith("found on 0, a like module")
    assert not any("like module" in line for index in (0, 3, 4) for line in sites[index].passport.evidence)


def test_a_subclass_of_a_norm_with_one_instance_that_does_nothing():
    class Optional(nn.LayerNorm):
        enabled = True

        def forward(self, x):
            return super().forward(x) if self.enabled else x

    model = nn.Sequential(Optional(8), Optional(8), Optional(8))
    model[1].enabled = False
    assert [site.path for site in sites_of(model, torch.randn(2, 8))[0]] == ["0", "2"]


def test_the_outermost_norm_is_the_site():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.LayerNorm(8)

        def forward(self, x):
            return self.inner(x.float()).to(x.dtype)

    sites, unrecognised = sites_of(nn.Sequential(Wrapped(), nn.Linear(8, 8)), torch.randn(2, 8))
    assert [(site.path, site.class_name) for site in sites] == [("0", "Wrapped")]
    assert unrecognised == ()


def test_where_the_outer_one_is_no_spec_the_inner_one_is_found():
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(8), nn.GELU()), nn.Linear(8, 8))
    sites, unrecognised = sites_of(model, torch.randn(2, 8))
    assert [site.path for site in sites] == ["0.0"]
    assert unrecognised == ()


def test_one_norm_called_twice_is_one_site():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(8)
            self.project = nn.Linear(8, 8)

        def forward(self, x):
            return self.norm(self.project(self.norm(x)))

    assert [site.path for site in sites_of(Twice(), torch.randn(2, 8))[0]] == ["norm"]


def test_what_normalizes_otherwise_is_named():
    class ByMagnitude(nn.Module):
        def forward(self, x):
            return x / x.abs().amax(-1, keepdim=True)

    class Gated(nn.Module):
        def forward(self, x, gate):
            return F.normalize(x, dim=-1) * gate.sigmoid()

    class Summed(nn.Module):
        def forward(self, x, residual):
            total = x + residual
            return total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.batch, self.magnitude, self.gated, self.summed = nn.BatchNorm1d(8), ByMagnitude(), Gated(), Summed()

        def forward(self, x):
            x = self.magnitude(self.magnitude(self.batch(x)))
            return self.summed(self.gated(x, x), x)

    sites, unrecognised = sites_of(Mixed().eval(), torch.randn(4, 8))
    assert sites == ()
    assert [other.path for other in unrecognised] == ["batch", "magnitude", "gated", "summed"]
    reasons = [other.reason for other in unrecognised]
    assert reasons[0].startswith("BatchNorm1d: batch norm: in training mode")
    assert reasons[1].startswith("ByMagnitude: it does not grow with its input")
    assert reasons[2].startswith("Gated: gated norm: ")
    assert reasons[3].startswith("Summed: residual is added to x before it is normalized")
    assert not any("\n" in reason for reason in reasons)


class ActivatedBatchNorm(nn.BatchNorm2d):
    """With its activation inside, as timm has it."""

    def __init__(self, channels):
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(super().forward(x))


class ActivatedRMSNorm(nn.Module):
    """By hand, so that no function of a norm is seen."""

    def __init__(self, features):
        super().__init__()
        self.weight, self.act = nn.Parameter(torch.ones(features)), nn.ReLU()

    def forward(self, x):
        return self.act(self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def test_norms_with_an_activation_inside_are_named():
    model = nn.Sequential(ActivatedBatchNorm(8), ActivatedRMSNorm(4), nn.Conv2d(8, 8, 1)).eval()
    sites, others = sites_of(model, torch.randn(2, 8, 4, 4))
    assert sites == ()
    assert [(each.path, each.passport.verdict) for each in others] == [("0", "batch"), ("1", "norm")]
    assert others[0].reason.startswith("ActivatedBatchNorm: batch norm: in training mode, ")
    assert others[0].reason.endswith("; SiLU follows")
    assert others[1].reason.startswith("ActivatedRMSNorm: y = weight * x / sqrt(mean(x^2) + 1e-06)")
    assert others[1].reason.endswith("; ReLU follows")
    assert others[0].passport.readings["batch"].value["eps"] == 1e-5
    # The parts are where they were.
    assert [type(part) for part in model.modules()].count(nn.SiLU) == 1


def test_shapes_that_carry_no_rows_and_rows_without_a_batch():
    model = nn.Sequential(nn.LayerNorm(8))
    for shape in ((0, 8), (8,), (1, 1, 8), (2, 0, 8)):
        sites, _ = sites_of(model, torch.randn(shape))
        assert [(site.path, site.class_name, site.spec) for site in sites] == [
            ("", "Sequential", specs.TORCH_LAYER_NORM)
        ]
    assert sites_of(nn.Sequential(nn.Identity()), torch.tensor(1.0)) == ((), ())


def test_the_model_and_the_random_state_are_left_as_they_were():
    model = tiny("Llama").train()
    ids = torch.randint(3, 50, (2, 8))
    seen = trace(model, lambda: model(input_ids=ids))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    find_sites(model, seen)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
