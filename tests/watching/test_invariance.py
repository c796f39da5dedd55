"""Which weights have a length that makes no difference."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from normkit.watching.invariance import scale_invariant


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
    # For gradients, as it is, and with the one candidate doubled and then in another order.
    assert len(calls) == 4


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


def test_without_a_norm_no_weight_is():
    assert found(Stack(nn.Tanh())) == frozenset()


def test_where_eps_counts_the_length_does():
    assert found(Stack(nn.LayerNorm(16, eps=1.0))) == frozenset()


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


def test_a_bias_takes_part_in_the_length():
    model = Stack(nn.LayerNorm(16))
    model.before = nn.Linear(16, 16)
    assert found(model) == frozenset()


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


def test_frozen_weights_and_outputs_without_gradient():
    model = Stack(nn.LayerNorm(16))
    model.before.requires_grad_(False)
    assert found(model) == frozenset()
    model.requires_grad_(False)
    assert found(model) == frozenset()


def test_an_output_that_is_not_finite():
    model = Stack(nn.LayerNorm(16))
    model.behind.bias.data[0] = torch.nan
    assert found(model) == frozenset()
