"""What a survey finds on a part of a batch, which weights a norm makes insensitive, and what is left as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from normkit.watching.startup import _without_sites, insensitive, scale_invariant, shortened, surveyed, unwrapped
from normkit.watching.watcher import watch
from small_training import Transformer, fingerprint


@pytest.fixture(scope="module", autouse=True)
def _norms_are_examined_once() -> None:
    """Here they are examined whenever a survey does."""


def test_a_batch_of_tokens_is_cut_to_two_rows_of_sixteen():
    tokens, mask = torch.arange(120).view(4, 30), torch.zeros(4, 30, dtype=torch.long)
    small = shortened({0: tokens, 1: 3, "attention_mask": mask, "labels": torch.zeros(4), "scale": torch.ones(2)})
    assert small[0].equal(tokens[:2, :16])
    assert small[1] == 3
    # What the mask lets through in the first tokens may be nothing.
    assert small["attention_mask"].equal(torch.ones(2, 16, dtype=torch.long))
    assert small["labels"].shape == (2,)
    assert small["scale"].shape == (2,)


def test_images_and_calls_without_tensors_are_cut_to_rows_or_not_at_all():
    images = torch.randn(5, 3, 20, 20)
    assert shortened({0: images})[0].shape == (2, 3, 20, 20)
    assert shortened({0: 1, 1: "a"}) == {0: 1, 1: "a"}


@pytest.mark.parametrize(
    "wrap", [DataParallel, lambda model: torch.compile(model, backend="eager"), lambda model: model]
)
def test_wrappers_are_taken_off(wrap: Any):
    model = nn.Linear(2, 2)
    assert unwrapped(wrap(model)) is model


@pytest.mark.slow
def test_a_survey_leaves_model_and_random_numbers_as_they_were():
    model = Transformer().train()
    model.blocks[0].eval()
    before, state, numbers = fingerprint(model), torch.get_rng_state(), random.getstate()
    arguments = {0: torch.zeros(2, 9, dtype=torch.long)}
    structure = surveyed(model, arguments)
    assert fingerprint(model) == before
    assert torch.get_rng_state().equal(state)
    assert random.getstate() == numbers
    layout = structure.layout(is_pooled=True)
    assert [site.path for site in layout.sites][:4] == [
        "blocks.0.norm_1",
        "blocks.0.attention:rms_norm",
        "blocks.0.attention:rms_norm#2",
        "blocks.0.norm_2",
    ]
    assert [(each.parent, each.heads, each.head_dim) for each in layout.attentions] == [
        ("blocks.0.attention", 2, 8),
        ("blocks.1.attention", 2, 8),
    ]
    assert layout.hooked == 5 + 2
    order = [layout.sentinels[place] for place in layout.forward_order]
    assert order.index("blocks.0") == order.index("blocks.0.norm_2") + 1
    assert order[-1] == "norm"


@pytest.mark.slow
def test_calls_inside_a_norm_are_not_those_of_the_module_around_it():
    """A module that normalizes queries calls the same function as the attention does for its keys."""
    model = Transformer(in_modules=True)
    structure = surveyed(model, {0: torch.zeros(2, 9, dtype=torch.long)})
    layout = structure.layout(is_pooled=True)
    assert "blocks.0.attention:rms_norm" in [site.path for site in layout.sites]
    assert {"blocks.0.attention", "blocks.0.attention.q_norm"} <= set(layout.callers)


@pytest.mark.slow
@pytest.mark.parametrize("given", [lambda x: {"input": x}, lambda x: {"input": x, "args": [x]}])
def test_the_graph_that_an_input_comes_with_is_left_to_the_training(given: Callable[[torch.Tensor], dict[str, Any]]):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # The loop calls it, and gives the model what comes of it.
            self.embedding = nn.Linear(6, 6)
            self.body = nn.Sequential(nn.Linear(6, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 6))

        def forward(self, input: torch.Tensor, args: Any = None) -> torch.Tensor:
            y: torch.Tensor = self.body(input if args is None else args[0])
            return y

    model = Model()
    with watch(model, say=lambda _: None) as run:
        model(**given(model.embedding(torch.randn(4, 6)).tanh())).square().sum().backward()
        run.step()
    assert model.embedding.weight.grad is not None


def test_autocast_does_not_hide_that_a_weight_is_doubled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh())
    call = {0: torch.randn(2, 5, 16)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # The casts that a first call leaves are those of the weights as they are.
        model(call[0])
        assert insensitive(model, call) == {"0.weight"}
        assert torch.is_autocast_cache_enabled()


class Stack(nn.Module):
    """A weight before a norm, one behind it, and one that nothing uses."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(16, 16, bias=False)
        self.norm = norm
        self.behind = nn.Linear(16, 4)
        self.idle = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(self.norm(self.before(x)))


def found(model: nn.Module, *shape: int) -> frozenset[str]:
    x = torch.randn(*(shape or (3, 5, 16)), generator=torch.Generator().manual_seed(1)).to(next(model.parameters()))
    return scale_invariant(model, lambda: model(x))


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.RMSNorm(16)], ids=["layernorm", "rmsnorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_before_a_norm(norm, dtype):
    assert found(Stack(norm).to(dtype)) == {"before.weight"}


def test_only_what_may_be_is_tried():
    model, calls = Stack(nn.LayerNorm(16)), []
    model.register_forward_hook(lambda *_: calls.append(1))
    found(model)
    # For gradients, as it is, and with the one candidate doubled.
    assert len(calls) == 3


class Deep(nn.Module):
    """Wide blocks; `norm` is put behind each first map."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleList(nn.Linear(384, 384, bias=False) for _ in range(16))
        self.norms = nn.ModuleList(norm(384) for _ in range(16))
        self.second = nn.ModuleList(nn.Linear(384, 384, bias=False) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, norm, second in zip(self.first, self.norms, self.second, strict=True):
            x = x + second(norm(first(x)).relu())
        return x


@pytest.mark.parametrize(("norm", "expected"), [(nn.Identity, 0), (nn.RMSNorm, 16)], ids=["no norm", "rmsnorm"])
def test_a_deep_model_is_called_a_few_times(norm, expected):
    """In wide models random directions are nearly orthogonal: a call or two for each of these took 60 s of SmolLM2."""
    model, calls = Deep(norm), []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert found(model, 2, 5, 384) == {f"first.{block}.weight" for block in range(expected)}
    assert len(calls) <= 5


def test_a_weight_that_hardly_matters_is_not_one_whose_length_does_not():
    class Faint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.faint = nn.Linear(16, 16, bias=False)
            self.behind = nn.Linear(16, 16, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.behind(x + 0.01 * self.faint(x))

    # Of many directions some are orthogonal by chance; in 16 bits the change is lost in the limit for rounding.
    model = Faint().bfloat16()
    assert all(found(model, rows, 16) == frozenset() for rows in range(1, 30))


def test_a_gradient_that_happens_to_be_orthogonal_is_not_enough():
    class Odd(nn.Module):
        """The output's mean over the batch of x w and -x w: its gradient vanishes along w for symmetric input only."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight @ x - torch.ones(2)).square().sum()[None]

    model = Odd()
    # d/dc (c x - 1)^2 = 0 at c = 1 where x.x = sum(x).
    x = torch.tensor([1.0, 1.0])
    assert scale_invariant(model, lambda: model(x)) == frozenset()


def test_queries_and_keys_before_their_norms():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            # Far from eps.
            if path.endswith("_proj.weight"):
                weight *= 20
    ids = torch.randint(32, (2, 8))
    expected = {f"model.layers.{block}.self_attn.{name}_proj.weight" for block in range(2) for name in "qk"}
    assert scale_invariant(model, lambda: model(input_ids=ids, use_cache=False)) == expected


def test_everything_is_left_as_it_was():
    model = Stack(nn.LayerNorm(16))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    assert found(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_run_that_raises_leaves_the_weights():
    model = Stack(nn.LayerNorm(16))
    kept, calls = model.before.weight.detach().clone(), []

    def run() -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("as in a device that is lost")
        return model(torch.ones(3, 16).cumsum(0).cumsum(1).cos())

    with pytest.raises(RuntimeError, match="lost"):
        scale_invariant(model, run)
    assert torch.equal(model.before.weight, kept)


def with_a_bias() -> nn.Module:
    model = Stack(nn.LayerNorm(16))
    model.before = nn.Linear(16, 16)
    return model


def with_nan() -> nn.Module:
    model = Stack(nn.LayerNorm(16))
    model.behind.bias.data[0] = torch.nan
    return model


def frozen_before() -> nn.Module:
    model = Stack(nn.LayerNorm(16))
    model.before.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: Stack(nn.Tanh()), id="no norm"),
        pytest.param(lambda: Stack(nn.LayerNorm(16, eps=1.0)), id="an eps that counts"),
        pytest.param(lambda: Stack(nn.LayerNorm(16)).requires_grad_(False), id="an output without a gradient"),
        *(with_a_bias, with_nan, frozen_before),
    ],
)
def test_models_without_an_insensitive_weight(build: Callable[[], nn.Module]):
    assert found(build()) == frozenset()


def test_a_model_whose_norms_have_no_spec_is_not_told_that_it_has_none():
    """It said "the model has no norm that a spec describes", and then "A5 ... at 9 norms"."""
    assert _without_sites(["a.norm", "b.norm", "c.norm"]).startswith(
        "no spec describes the model's 3 norms (a.norm and 2 more): they were tried with random rows"
    )
    assert _without_sites([]) == "the model has no norm; loss, gradients and updates are watched"
