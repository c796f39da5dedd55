"""Code in memory that is not the library's own, and pre-hooks that change an input: both are named with their place."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import normkit as nk
from normkit import inspect, specs
from normkit.measurement.intent import stock_intent
from normkit.measurement.patches import Sharing, changed_inputs, find_shared, is_as_written, patches
from normkit.measurement.running import runner
from normkit.measurement.structure import survey

PATHS = ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm")


def llama():
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, intermediate_size=64, rms_norm_eps=3e-5, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for path in PATHS:
            model.get_submodule(path).weight += 0.1 * torch.randn(32)
    return model


def inspected(model):
    return nk.inspect(model, {"input_ids": torch.randint(3, 99, (2, 32), generator=torch.Generator().manual_seed(0))})


def other_forward(self, x):
    return F.layer_norm(x, x.shape[-1:], self.weight, eps=3e-5)


def test_nothing_is_said_of_libraries_as_they_are():
    model = llama()
    assert patches(model, PATHS) == ()
    assert all(is_as_written(type(module)) for module in model.modules())
    assert is_as_written(nn.LayerNorm)


def test_a_module_that_imports_a_norm_has_replaced_none():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    assert patches(layer, ("norm1", "norm2")) == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "rule"), [(other_forward, "A11"), (lambda _self, x: x, "D3"), (lambda _self, x: 2 * x, "D3")]
)
def test_a_stock_class_that_was_patched_is_named_and_judged(monkeypatch, forward, rule):
    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)
    model = llama()
    assert set(stock_intent(model).specs.values()) == {specs.LLAMA.replace(eps=3e-5)}
    inspection = inspected(model)
    found = inspection.findings[0]
    assert (found.rule, found.severity, found.sites) == (rule, "error", PATHS)
    (note,) = [found for found in inspection.findings if found.rule == "E9"]
    assert (note.severity, note.sites) == ("note", PATHS)
    assert note.evidence[0].startswith(f"LlamaRMSNorm.forward is {forward.__qualname__} of ")
    assert "compared with the spec that is declared for the class" in note.evidence[0]


@pytest.mark.slow
def test_a_class_in_the_place_of_the_familys_own(monkeypatch):
    class FastRMSNorm(nn.Module):
        def __init__(self, hidden_size, eps=1e-6):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps + 1e-3

        def forward(self, x):
            return self.weight * F.rms_norm(x, x.shape[-1:], eps=self.eps)

    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", FastRMSNorm)
    model = llama()
    # Its eps is what the config says, and not what the class that stands there makes of it.
    assert {spec.eps for spec in stock_intent(model).specs.values()} == {3e-5}
    inspection = inspected(model)
    assert (inspection.findings[0].rule, inspection.findings[0].sites) == ("A1", PATHS)
    (note,) = [found for found in inspection.findings if found.rule == "E9"]
    assert "LlamaRMSNorm of transformers.models.llama.modeling_llama is" in note.evidence[0]


@pytest.mark.slow
def test_kernels_that_compute_what_is_meant_are_a_note(monkeypatch):
    def kernel(self, x):
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * y.to(x.dtype)

    monkeypatch.setattr(LlamaRMSNorm, "forward", kernel)
    inspection = inspected(llama())
    assert [(found.rule, found.severity) for found in inspection.findings] == [("E9", "note")]


def test_functions_of_torch(monkeypatch):
    monkeypatch.setattr(F, "rms_norm", lambda x, *_args, **_kwargs: x)
    found = patches(llama(), PATHS)
    assert [(patch.name, patch.sites) for patch in found] == [("torch.nn.functional.rms_norm", ())]
    assert "test_patches.py" in found[0].now
    monkeypatch.undo()
    monkeypatch.setattr(torch, "layer_norm", other_forward)
    assert [patch.name for patch in patches(llama(), PATHS)] == ["torch.layer_norm"]


def test_a_forward_of_one_module():
    model = llama()
    model.model.norm.forward = lambda x: x
    (patch,) = patches(model, PATHS)
    assert (patch.name, patch.sites) == ("forward of this LlamaRMSNorm", ("model.norm",))
    # accelerate keeps the old one beside it.
    model.model.norm._old_forward = None
    assert patches(model, PATHS) == ()


def test_classes_of_no_library_are_not_judged():
    class Mine(nn.LayerNorm):
        forward = other_forward

    assert Mine.__module__ in sys.modules
    assert is_as_written(Mine)


def clamp(_module, args):
    return (args[0].clamp(-1, 1),)


def widen(_module, args):
    return (args[0].double().float(),)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16), nn.LayerNorm(16))


def test_a_hook_that_changes_what_enters_is_named_and_one_that_looks_is_not():
    net, x = model(), 3 * torch.randn(2, 6, 16)
    net[1].register_forward_pre_hook(widen)
    net[3].register_forward_pre_hook(clamp)
    seen = []
    net[3].register_forward_pre_hook(lambda _module, args: seen.append(args[0].amax()))
    (found,) = changed_inputs(net, ["1", "3"], lambda: net(x))
    assert found.path == "3"
    assert "clamp of" in found.hooks[0]
    assert 0 < found.change < 1
    assert len(net[3]._forward_pre_hooks) == 2


@pytest.mark.slow
def test_an_inspection_warns_of_it():
    net = model()
    x = 3 * torch.randn(2, 6, 16)
    assert "E5" not in [found.rule for found in inspect(net, {"input": x}).findings]
    net[3].register_forward_pre_hook(clamp)
    found = next(found for found in inspect(net, {"input": x}).findings if found.rule == "E5")
    assert (found.severity, found.sites) == ("warning", ("3",))
    assert "a hook changes the input" in found.evidence[0]


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module], final: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.blocks, self.final = nn.ModuleList(blocks), final

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.final(x)


def shared(model: nn.Module) -> dict[str, Sharing]:
    run = runner(model.eval(), {"input_ids": torch.arange(6)[None]})
    with torch.no_grad():
        return find_shared(model, survey(model, run))


def norm() -> nn.Module:
    return nn.LayerNorm(8)


def test_a_norm_for_each_place() -> None:
    assert shared(Stack([Block(norm()), Block(norm())], norm())) == {}


def test_one_module_at_two_places() -> None:
    one = norm()
    assert shared(Stack([Block(norm()), Block(one)], one)) == {
        "blocks.1.norm": Sharing(calls=2, around=1, twins=("final",))
    }


def test_both_norms_of_a_block_are_one_module() -> None:
    class Two(Block):
        def __init__(self) -> None:
            super().__init__(norm())
            self.second = self.norm

        def forward(self, x: Tensor) -> Tensor:
            return self.second(super().forward(x))

    assert shared(Stack([Two(), Block(norm())], norm())) == {
        "blocks.0.norm": Sharing(calls=2, around=1, twins=("blocks.0.second",))
    }


def test_a_block_that_runs_twice_brings_its_norm_along() -> None:
    block = Block(norm())
    assert shared(Stack([block, block, Block(norm())], norm())) == {}


def test_a_model_within_a_model_that_runs_twice() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Stack([Block(norm()), Block(norm())], norm())

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.tower(input_ids) + self.tower(input_ids + 1)

    assert shared(Pair()) == {}


def test_one_parameter_in_two_modules() -> None:
    model = Stack([Block(norm()), Block(norm())], norm())
    model.final.bias = model.blocks[0].norm.bias
    assert {path: sharing.twins for path, sharing in shared(model).items()} == {
        "blocks.0.norm": ("final",),
        "final": ("blocks.0.norm",),
    }


def test_one_parameter_in_two_calls_of_a_function() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.weight = nn.Embedding(9, 8), nn.Parameter(torch.ones(8))

        def forward(self, input_ids: Tensor) -> Tensor:
            x = F.layer_norm(self.embedding(input_ids), (8,), self.weight)
            return F.layer_norm(x.tanh(), (8,), self.weight)

    assert {path: sharing.twins for path, sharing in shared(Functional()).items()} == {
        ":layer_norm": (":layer_norm#2",),
        ":layer_norm#2": (":layer_norm",),
    }


class Recurrence(nn.Module):
    """A state that each input enters, normalized at every time, by one norm or by one of a list."""

    def __init__(self, *, listed: bool) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(9, 8), nn.Linear(8, 8)
        self.norms = nn.ModuleList([norm()]) if listed else norm()
        self.listed = listed

    def forward(self, input_ids: Tensor) -> Tensor:
        one = self.norms[0] if self.listed else self.norms
        arriving = self.embedding(input_ids)
        state = torch.zeros_like(arriving[:, 0])
        for x in arriving.unbind(1):
            state = torch.tanh(one(x + self.recurrent(state)))
        return state


@pytest.mark.slow
def test_a_norm_inside_a_recurrence_serves_one_place() -> None:
    assert shared(Recurrence(listed=False)) == {}
    assert shared(Recurrence(listed=True)) == {}


def test_a_norm_called_more_often_than_the_matrix_beside_it() -> None:
    class Two(Block):
        def __init__(self) -> None:
            super().__init__(norm())
            self.second = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.second(self.norm(x))

    found = shared(Stack([Two(), Block(norm())], norm()))
    assert found == {"blocks.0.norm": Sharing(calls=2, around=1, twins=())}
