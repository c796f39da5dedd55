"""Scale-invariant parameters are found by scaling: in real models, in small ones, and nowhere else."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from normkit.errors import DtypeError, InputError
from normkit.geometry import radial_cosine, scale_invariant_groups

WIDTH, LAYERS = 32, 2
SIZES = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Rows of unit variance in front of a norm, as 0.02 gives at a width of 2,304.
    "initializer_range": WIDTH**-0.5,
}
PER_LAYER = {
    "Gemma2": ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"),
    "Qwen3": ("self_attn.q_proj", "self_attn.k_proj"),
    "Llama": (),
    "GPT2": (),
}
D = {"dtype": torch.float64}


def tiny(family, dtype=torch.float64, **options):
    names = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 4} if family == "GPT2" else {}
    config = getattr(transformers, f"{family}Config")(**SIZES | names | options)
    return transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)


def text_groups(model, tokens):
    return scale_invariant_groups(model, lambda: model(input_ids=tokens).logits)


def found(model, x, **options):
    groups = scale_invariant_groups(model, lambda: model(x), **options)
    return [(group.kind, *group.paths) for group in groups]


def tokens_of(samples=2, length=8):
    return torch.randint(3, 50, (samples, length))


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float64) for family in PER_LAYER), ("Gemma2", torch.float32)], ids=str
)
def test_what_stands_between_two_norms_of_a_transformer_has_an_orthogonal_gradient(family, dtype):
    model, tokens = tiny(family, dtype), tokens_of()
    groups = text_groups(model, tokens)
    expected = [f"model.layers.{layer}.{name}.weight" for layer in range(LAYERS) for name in PER_LAYER[family]]
    assert [(group.kind, *group.paths) for group in groups] == [("matrix", path) for path in expected]
    # eps is 1e-6 of the variance, and half the weights make it 4e-6; a turned weight changes the logits.
    assert all(group.error < 1e-4 < 0.05 < group.control for group in groups)
    model(input_ids=tokens).logits.square().sum().backward()
    for path, parameter in model.named_parameters():
        # A zero parameter has no direction, and float32 leaves rounding in each.
        if dtype == torch.float64 and parameter.any():
            assert (abs(radial_cosine(parameter.detach(), parameter.grad)) < 1e-5) == (path in expected), path


@pytest.mark.slow
def test_a_weight_so_small_that_eps_rules_is_not_scale_invariant():
    """At 0.02 and a width of 32 the MLP's output has a variance of about eps; attention's has 100 times that."""
    model = tiny("Gemma2", initializer_range=0.02)
    paths = {path for group in text_groups(model, tokens_of()) for path in group.paths}
    assert "model.layers.0.self_attn.o_proj.weight" in paths
    assert not any("mlp" in path for path in paths)


def linear(inputs, outputs, bias=True):
    return nn.Linear(inputs, outputs, bias=bias, **D)


class Tied(nn.Module):
    """One matrix used twice, each time in front of a norm, and known by two names."""

    def __init__(self):
        super().__init__()
        self.first = linear(6, 6, bias=False)
        self.second = linear(6, 6, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        norm = nn.functional.rms_norm
        return norm(self.second(torch.tanh(norm(self.first(x), (6,)))), (6,))


class Addend(nn.Module):
    """A weight in front of a norm, and a constant beside it that is not scaled."""

    def __init__(self, size):
        super().__init__()
        self.linear = linear(6, 8, bias=False)
        self.constant = nn.Buffer(size * torch.randn(8, **D))
        self.head = linear(8, 3)

    def forward(self, x):
        return self.head(nn.functional.layer_norm(self.linear(x) + self.constant, (8,)))


class EpsOutside(nn.Module):
    """A weight in front of an RMSNorm with eps added to the root."""

    def __init__(self, eps):
        super().__init__()
        self.linear = linear(6, 8, bias=False)
        self.head = linear(8, 3)
        self.eps = eps

    def forward(self, x):
        x = self.linear(x)
        return self.head(x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps))


class Overflowing(nn.Module):
    """Scale-invariant until |weight| is 709, the logarithm of the largest float64."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8, 6), 0.4 / 48**0.5, **D) * torch.randn(8, 6, **D).sign())

    def forward(self, x):
        return nn.functional.rms_norm(x @ self.weight.T, (8,)) + 0.0 * self.weight.norm().exp()


def layer_norm_after(*modules, eps=1e-5):
    return nn.Sequential(*modules, nn.LayerNorm(8, eps=eps, **D), nn.Linear(8, 3, **D))


def batch_norm():
    return nn.Sequential(linear(6, 8), nn.BatchNorm1d(8, **D), nn.ReLU(), linear(8, 3))


def with_values(model, **values):
    """Parameters set: "_0_weight" is 0.weight; a tensor, or a number that multiplies."""
    with torch.no_grad():
        for name, value in values.items():
            parameter = model.get_parameter(name.strip("_").replace("_", ".", 1))
            parameter.copy_(value) if isinstance(value, torch.Tensor) else parameter.mul_(value)
    return model


CASES = {
    "batch norm: each row": (batch_norm, [("rows", "0.weight")]),
    "batch norm in eval mode is affine": (lambda: batch_norm().eval(), []),
    "layer norm: the whole matrix": (lambda: layer_norm_after(linear(6, 8, bias=False)), [("matrix", "0.weight")]),
    "layer norm: with a bias both": (lambda: layer_norm_after(linear(6, 8)), [("matrix", "0.weight", "0.bias")]),
    "a bias of zero counts": (
        lambda: with_values(layer_norm_after(linear(6, 8)), _0_bias=torch.zeros(8)),
        [("matrix", "0.weight", "0.bias")],
    ),
    "a weight of zero has no direction": (
        lambda: with_values(layer_norm_after(linear(6, 8, bias=False)), _0_weight=torch.zeros(8, 6)),
        [],
    ),
    "relu keeps scales": (
        lambda: layer_norm_after(linear(6, 9, bias=False), nn.ReLU(), linear(9, 8, bias=False)),
        [("matrix", "0.weight"), ("matrix", "2.weight")],
    ),
    "gelu does not": (
        lambda: layer_norm_after(linear(6, 9, bias=False), nn.GELU(), linear(9, 8, bias=False)),
        [("matrix", "2.weight")],
    ),
    "dropout draws the same each time": (
        lambda: layer_norm_after(linear(6, 8, bias=False), nn.Dropout(0.3)),
        [("matrix", "0.weight")],
    ),
    "a gain in front of a norm": (
        lambda: layer_norm_after(nn.LayerNorm(6, bias=False, **D), linear(6, 8, bias=False)),
        [("matrix", "0.weight"), ("matrix", "1.weight")],
    ),
    "gain and bias in front of a norm": (
        lambda: layer_norm_after(nn.LayerNorm(6, **D), linear(6, 8, bias=False)),
        [("matrix", "0.weight", "0.bias"), ("matrix", "1.weight")],
    ),
    "weight norm: its rows": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(linear(6, 8)), nn.Tanh(), linear(8, 3)),
        [("rows", "0.parametrizations.weight.original1")],
    ),
    "one matrix under two names": (Tied, [("matrix", "first.weight")]),
    "a layer that nothing uses": (lambda: layer_norm_after(Unused()), []),
    "softmax": (lambda: nn.Sequential(linear(6, 9, bias=False), nn.Softmax(-1), linear(9, 3)), []),
    "a sharp softmax": (
        lambda: with_values(nn.Sequential(linear(6, 9, bias=False), nn.Softmax(-1), linear(9, 3)), _0_weight=30.0),
        [],
    ),
    "no number far from zero": (Overflowing, []),
    "tanh": (lambda: nn.Sequential(linear(6, 9, bias=False), nn.Tanh(), linear(9, 3)), []),
    "eps inside the root, small": (
        lambda: layer_norm_after(linear(6, 8, bias=False), eps=1e-3),
        [("matrix", "0.weight")],
    ),
    "eps inside the root, as large as the variance": (lambda: layer_norm_after(linear(6, 8, bias=False), eps=0.3), []),
    "eps outside the root, small": (lambda: EpsOutside(1e-5), [("matrix", "linear.weight")]),
    "eps outside the root, large": (lambda: EpsOutside(1e-2), []),
    "an unscaled addend": (lambda: Addend(1.0), []),
    "an unscaled addend of a hundredth": (lambda: Addend(1e-2), []),
    "an unscaled addend of a hundred-thousandth passes": (lambda: Addend(1e-5), [("matrix", "linear.weight")]),
}


class Unused(nn.Module):
    """Hands on its input's first features, and owns a matrix."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 6, **D))

    def forward(self, x):
        return torch.cat([x, x[:, :2].square()], dim=1) + 0.0 * self.weight.sum()


@pytest.mark.parametrize("case", CASES)
def test_small_models(case):
    make, expected = CASES[case]
    assert found(make(), torch.randn(16, 6, **D)) == expected


@pytest.mark.parametrize("act", [nn.Tanh(), nn.Sigmoid(), nn.Softmax(-1)], ids=repr)
def test_a_function_that_saturates_is_not_taken_for_a_norm(act):
    """At 200 times the usual weights scaling changes a hundredth of it; far away, where it is a step, nothing."""
    for _ in range(5):
        model = nn.Sequential(linear(6, 64, bias=False), act, linear(64, 3))
        assert found(with_values(model, _0_weight=200.0), torch.randn(256, 6, **D)) == []


def test_filters_in_front_of_a_batch_norm():
    model = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 2, 3)).double()
    assert found(model, torch.randn(4, 3, 8, 8, **D)) == [("rows", "0.weight")]


def test_each_embedding_in_front_of_a_norm():
    model = nn.Sequential(nn.Embedding(10, 8), nn.RMSNorm(8), nn.Linear(8, 3)).double()
    assert found(model, torch.arange(10)) == [("rows", "0.weight")]


@pytest.mark.slow
def test_other_factors_need_room_for_rounding_in_float32_norms():
    model = tiny("Qwen3")
    tokens = tokens_of()
    options = {"factors": (0.3, 5.0), "tolerance": 1e-5}
    groups = scale_invariant_groups(model, lambda: model(input_ids=tokens).logits, **options)
    assert len(groups) == LAYERS * len(PER_LAYER["Qwen3"])


def test_every_tensor_of_the_output_counts():
    model = layer_norm_after(linear(6, 8, bias=False))
    x = torch.randn(16, 6, **D)
    masked = torch.tensor([float("-inf"), float("nan")], **D)
    outputs = {"logits": model(x), "mask": masked, "kept": None, "length": torch.tensor(3)}
    assert len(scale_invariant_groups(model, lambda: outputs | {"logits": model(x)})) == 1
    assert len(scale_invariant_groups(model, lambda: (model(x), [x]))) == 1
    assert scale_invariant_groups(model, lambda: (model(x), [model[0](x)])) == ()


def busy():
    """A model in training mode with dropout, running statistics, a NaN, hooks, and a frozen child in eval mode."""
    model = nn.Sequential(linear(6, 8), nn.BatchNorm1d(8, **D), nn.Dropout(0.5), linear(8, 8), nn.LayerNorm(8, **D))
    model[4].eval()
    model.unused = nn.Parameter(torch.tensor([float("nan"), -0.0], **D))
    nn.init.zeros_(model[3].bias)
    model[0].register_forward_hook(lambda *_: None)
    return model


def bits(model):
    tensors = [*model.parameters(), *model.buffers()]
    return [(id(each), each.data_ptr(), each.detach().clone().numpy().tobytes(), each.grad) for each in tensors]


def state(model):
    versions = [parameter._version for parameter in model.parameters()]
    modes = [module.training for module in model.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    names = [[*vars(module), *module._buffers, *module._parameters] for module in model.modules()]
    return bits(model), versions, modes, hooks, names, model[1].eps, torch.random.get_rng_state().tolist()


def test_model_and_random_state_are_left_bit_for_bit():
    model, x = busy(), torch.randn(16, 6, **D)
    before = state(model)
    assert scale_invariant_groups(model, lambda: model(x))
    assert state(model) == before


@pytest.mark.parametrize("last", [1, 2, 3, 4, 7, 12])
def test_also_when_the_run_raises(last):
    model, x = busy(), torch.randn(16, 6, **D)
    calls = []

    def run():
        calls.append(1)
        y = model(x)
        # Runs may leave other modes, buffers and numbers behind.
        model[4].train()
        model[1].running_mean = torch.ones(8, **D)
        model[1].register_buffer("cache", torch.ones(8))
        model[1].eps = 1.0
        if len(calls) == last:
            raise KeyError("stop")
        return y

    before = state(model)
    with pytest.raises(KeyError, match="stop"):
        scale_invariant_groups(model, run)
    assert len(calls) == last
    assert state(model) == before


@pytest.mark.slow
def test_a_rotary_embedding_that_grows_during_the_run():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny("Qwen3", max_position_embeddings=8, rope_parameters=rope)
    tokens = tokens_of(1, 24)
    with torch.no_grad():
        groups = text_groups(model, tokens)
        after = model(input_ids=tokens).logits
        fresh = tiny("Qwen3", max_position_embeddings=8, rope_parameters=rope)
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(after, fresh(input_ids=tokens).logits)
    assert len(groups) == LAYERS * len(PER_LAYER["Qwen3"])


def test_a_graph_from_before_still_runs_backward():
    model, x = layer_norm_after(linear(6, 8)), torch.randn(16, 6, **D)
    loss = model(x).square().sum()
    scale_invariant_groups(model, lambda: model(x))
    loss.backward()
    assert model[0].weight.grad is not None


def test_errors():
    model, x = layer_norm_after(linear(6, 8)), torch.randn(16, 6, **D)
    for factors in ((), (1.0,), (0.5, -2.0), (float("inf"),)):
        with pytest.raises(InputError, match="positive numbers other than 1"):
            found(model, x, factors=factors)
    with pytest.raises(InputError, match="it returned none"):
        scale_invariant_groups(model, lambda: None)
    with pytest.raises(InputError, match="zeros"):
        scale_invariant_groups(model, lambda: 0.0 * model(x))
    drawn = torch.Generator()
    with pytest.raises(InputError, match="same output each time"):
        scale_invariant_groups(model, lambda: model(x) + torch.randn(1, generator=drawn))
    sizes = iter(range(4, 100))
    with pytest.raises(InputError, match="one shape"):
        scale_invariant_groups(model, lambda: model(x[: next(sizes)]))
    with pytest.raises(DtypeError, match=r"0\.weight is in torch\.bfloat16"):
        scale_invariant_groups(model.bfloat16(), lambda: model(x.bfloat16()))
