"""The modules stand in for torch's: same arguments, same state dict, same behaviour under torch's own tools."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.export import Dim

from helpers import PRESETS, arguments, assert_close
from normkit import functional, layers, specs
from normkit.errors import KindError, ShapeError

PAIRS = {"LayerNorm": (layers.LayerNorm, nn.LayerNorm), "RMSNorm": (layers.RMSNorm, nn.RMSNorm)}
CHOICES = [
    {},
    {"eps": 1e-3},
    {"elementwise_affine": False},
    {"dtype": torch.bfloat16},
    {"device": "meta"},
]


def random_parameters(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("name", PAIRS)
def test_the_signature_is_torchs(name):
    ours, theirs = PAIRS[name]
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert list(inspect.signature(ours.forward).parameters) == list(inspect.signature(theirs.forward).parameters)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("shape", [6, (6,), [2, 6], torch.Size([3, 2, 6])])
@pytest.mark.parametrize("choice", CHOICES)
def test_arguments_make_what_torch_makes(name, shape, choice):
    ours, theirs = (cls(shape, **choice) for cls in PAIRS[name])
    assert isinstance(ours, type(theirs))
    assert repr(ours) == repr(theirs)
    assert ours.normalized_shape == theirs.normalized_shape
    assert ours.eps == theirs.eps
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (mine.shape, mine.dtype, mine.device) == (other.shape, other.dtype, other.device)
        assert mine.is_meta or torch.equal(mine, other)


def test_a_layer_norm_may_have_no_bias():
    ours, theirs = layers.LayerNorm(6, bias=False), nn.LayerNorm(6, bias=False)
    assert repr(ours) == repr(theirs)
    assert ours.bias is None
    x = torch.randn(3, 6)
    assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_state_dicts_and_checkpoints_interchange(name, dtype):
    ours, theirs = (random_parameters(cls(8, eps=1e-4, dtype=dtype)) for cls in PAIRS[name])
    x = torch.randn(5, 8, dtype=dtype)
    assert not torch.allclose(ours(x), theirs(x))
    theirs.load_state_dict(ours.state_dict())
    assert_close(ours(x), theirs(x))
    buffer = io.BytesIO()
    torch.save(random_parameters(theirs).state_dict(), buffer)
    buffer.seek(0)
    ours.load_state_dict(torch.load(buffer, weights_only=True))
    assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("name", PAIRS)
def test_training_moves_the_parameters_as_torch_does(name):
    ours, theirs = (cls(8, dtype=torch.float64) for cls in PAIRS[name])
    x, target = torch.randn(32, 8, dtype=torch.float64), torch.randn(32, 8, dtype=torch.float64)
    for module in (ours, theirs):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        for _ in range(10):
            optimizer.zero_grad()
            (module(x) - target).square().mean().backward()
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(mine, other, units=64)
        assert not torch.equal(mine, torch.ones_like(mine))


MODULES = {
    "LayerNorm": lambda: layers.LayerNorm(8),
    "RMSNorm": lambda: layers.RMSNorm(8),
    "Norm of Llama": lambda: layers.Norm(specs.LLAMA, 8),
    "Norm of BERT": lambda: layers.Norm(specs.BERT, 8),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_are_copied_and_pickled(name):
    module = random_parameters(MODULES[name]())
    x = torch.randn(3, 8)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(twin) is type(module)
        assert repr(twin) == repr(module)
        assert torch.equal(twin(x), module(x))
        assert twin.weight is not module.weight


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_compile_takes_the_whole_graph(name):
    module = random_parameters(MODULES[name]())
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    x = torch.randn(5, 8, requires_grad=True)
    y, expected = compiled(x), module(x)
    assert torch.equal(y, expected)
    dy = torch.randn_like(y)
    for mine, other in zip(
        torch.autograd.grad(y, [x, *module.parameters()], dy),
        torch.autograd.grad(expected, [x, *module.parameters()], dy),
        strict=True,
    ):
        assert torch.equal(mine, other)


@pytest.mark.slow
def test_compile_takes_sizes_and_eps_that_change():
    def function(x, eps):
        return functional.layer_norm(x, x.shape[-1:], eps=eps)

    compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=True)
    for n, eps in [(4, 1e-5), (6, 1e-5), (6, 1e-3), (7, 1e-2)]:
        x = torch.randn(3, n)
        assert torch.equal(compiled(x, eps), function(x, eps))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_export_leaves_the_number_of_rows_open(name):
    module = random_parameters(MODULES[name]())
    program = torch.export.export(module, (torch.randn(3, 8),), dynamic_shapes=({0: Dim("rows")},))
    x = torch.randn(5, 8)
    # An export holds the reference's operations, which round once more or less than the kernels.
    assert_close(program.module()(x), module(x))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_export_leaves_the_number_of_features_open(strict):
    class Normalize(nn.Module):
        def forward(self, x):
            return functional.layer_norm(x, x.shape[-1:])

    sizes = {0: Dim("rows"), 1: Dim("features", min=2)}
    program = torch.export.export(Normalize(), (torch.randn(3, 8),), dynamic_shapes=(sizes,), strict=strict)
    x = torch.randn(5, 12)
    assert_close(program.module()(x), functional.layer_norm(x, (12,)))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
def test_autocast_keeps_what_torch_keeps(name, autocast, dtype):
    ours, theirs = (cls(8) for cls in PAIRS[name])
    x = torch.randn(16, 8).to(dtype)
    with torch.autocast("cpu", autocast):
        mine, other = ours(x), theirs(x)
    assert mine.dtype == other.dtype
    # 16-bit outputs may part at a near-tie: one ulp.
    assert_close(mine, other, units=4 if dtype == torch.float32 else 1)


def test_the_bias_gradient_counts_the_rows_under_autocast():
    model = nn.Sequential(nn.Linear(16, 16), layers.LayerNorm(16))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.randn(8192, 16))
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    # torch 2.13's own LayerNorm says 256 here, times the number of threads.
    assert torch.equal(model[1].bias.grad, torch.full((16,), 8192.0))


@pytest.mark.parametrize("name", PRESETS)
def test_a_norm_starts_as_the_identity_and_is_normalize_with_its_own_parameters(name):
    spec = PRESETS[name]
    x, weight, bias = arguments(spec)
    module = layers.Norm(spec, (1,) if weight is None else tuple(weight.shape), dtype=torch.float64)
    bare = spec.replace(has_weight=False, has_bias=False, weight_offset=0.0, weight_placement="after")
    assert_close(module(x), functional.normalize(x, bare))
    state = {key: value for key, value in (("weight", weight), ("bias", bias)) if value is not None}
    assert module.state_dict().keys() == state.keys()
    module = layers.Norm(spec, (12,) if weight is None else tuple(weight.shape), dtype=torch.float64)
    module.load_state_dict(state)
    assert torch.equal(module(x), functional.normalize(x, spec, weight, bias))


def test_a_norm_shows_its_formula_and_takes_a_device_and_a_dtype():
    assert repr(layers.Norm(specs.GEMMA, 8)) == "Norm(y = (1 + weight) * x / sqrt(mean(x^2) + 1e-06), (8,))"
    assert repr(layers.Norm(specs.COHERE, (2, 8))) == "Norm(y = weight * (x - mean(x)) / sqrt(var(x) + 1e-05), (2, 8))"
    module = layers.Norm(specs.BERT, 8, device="meta", dtype=torch.float16)
    assert module.weight.is_meta
    assert module.bias.dtype == torch.float16
    module.to_empty(device="cpu").reset_parameters()
    assert torch.equal(module.weight, torch.ones(8, dtype=torch.float16))


def test_a_norm_refuses_what_does_not_fit():
    with pytest.raises(KindError, match=r"Norm: spec must be a NormSpec such as normkit\.specs\.LLAMA, got 'llama'"):
        layers.Norm("llama", 8)
    with pytest.raises(ShapeError, match=r"weight of shape \(8,\) does not fit an input of shape \(3, 4\)"):
        layers.Norm(specs.LLAMA, 8)(torch.randn(3, 4))
    for cls in (layers.LayerNorm, layers.RMSNorm):
        with pytest.raises(ShapeError, match=r"must end in normalized_shape \(8,\), got shape \(3, 4\)"):
            cls(8)(torch.randn(3, 4))


@pytest.mark.parametrize("name", MODULES)
def test_an_empty_batch_gives_an_empty_batch(name):
    module = MODULES[name]()
    y = module(torch.empty(0, 8))
    assert y.shape == (0, 8)
    y.sum().backward()
    assert torch.equal(module.weight.grad, torch.zeros(8))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_normalized_as_torch_does(layout):
    ours, theirs = random_parameters(layers.LayerNorm(8)), nn.LayerNorm(8)
    theirs.load_state_dict(ours.state_dict())
    x = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(5, 8)], layout=layout)
    for mine, other in zip(ours(x).unbind(), theirs(x).unbind(), strict=True):
        assert torch.equal(mine, other)
