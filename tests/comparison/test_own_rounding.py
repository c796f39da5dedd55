"""How far a model is from itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from normkit.comparison import own_rounding as module
from normkit.comparison.comparing import compare
from normkit.comparison.own_rounding import Limit, OwnRounding, own_rounding
from tiny_models import tiny


def test_a_row_alone_and_in_a_batch_and_in_another_precision() -> None:
    class Coupled(nn.Module):
        """Whatever is in the batch moves a row a little."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x * (1 + 1e-3 * (len(x) - 1)))

    own = own_rounding(Coupled(), torch.randn(1, 5, 8))
    assert own.dtype == "float32"
    assert own.batch["before norm"] == pytest.approx((1e-3, 1e-3), rel=0.01)
    # Half of a bfloat16's spacing, uniform: 2**-8 / sqrt(3) at most.
    assert 5e-4 < own.precision["at norm"][0] < 4e-3
    assert own.in_a_batch("before", "norm").median == pytest.approx(3e-3, rel=0.01)
    assert own.in_a_batch("at", "norm").holds(torch.zeros(3))


def test_the_parameters_of_a_model_in_bfloat16_are_made_wider() -> None:
    model, batch = tiny("llama", dtype=torch.bfloat16)
    before = {name: each.dtype for name, each in model.state_dict().items()}
    own = own_rounding(model, batch)
    assert own.not_measured == ""
    assert 1e-3 < own.precision["after"][0] < 0.1
    assert own.precision["before model.layers.0.input_layernorm"] == (0.0, 0.0)
    assert {name: each.dtype for name, each in model.state_dict().items()} == before


@pytest.mark.slow
def test_the_last_bit_of_rotary_frequencies_is_the_reference_s_own_rounding() -> None:
    """Another way to compute a frequency moves its last bit, and position 200 makes 200 times as much of that."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, initializer_range=0.3, **sizes)).eval()
    port = copy.deepcopy(model)
    frequencies = port.model.rotary_emb.inv_freq
    # The first one is 1 in every program.
    frequencies[1:] = torch.nextafter(frequencies[1:], torch.tensor(0.0))
    rows = compare(port, model, torch.randint(0, 300, (2, 200))).rows
    assert rows.first_bits is not None
    assert rows.birth is None
    port.model.rotary_emb.inv_freq *= 1 + 1e-4
    assert compare(port, model, torch.randint(0, 300, (2, 200))).rows.birth is not None


def test_rounding_in_32_bits_is_scaled_from_that_in_16() -> None:
    own = OwnRounding(dtype="float32", precision={"at a": (0.01, 0.1)})
    assert own.median("at", "a", torch.bfloat16) == 0.01
    assert own.median("at", "a", torch.float16) == pytest.approx(0.01 / 8)
    assert own.median("at", "a", torch.float32) == pytest.approx(0.01 / 2**16, rel=0.3)
    assert own.limit("at", "a", torch.bfloat16) == Limit(median=pytest.approx(0.03), worst=pytest.approx(0.8))
    # No less than one rounding.
    assert own.median("at", "b", torch.bfloat16) == 2**-9


def test_what_was_not_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.weight = nn.LayerNorm(8), nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            if self.weight.dtype != torch.float32:
                raise ValueError("float32 only")
            return self.norm(x)

    own = own_rounding(Fixed(), torch.randn(4, 8))
    assert own.not_measured == "Fixed could not be run in bfloat16: float32 only"
    assert own.precision == {}
    monkeypatch.setattr(module, "_MEMORY", 0.0)
    own = own_rounding(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), torch.randn(4, 8))
    assert own.not_measured == "Sequential could not be run in bfloat16: a copy takes 0.0 GiB"
