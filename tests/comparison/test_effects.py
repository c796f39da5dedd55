"""How far two formulas are apart on the rows that arrive, held against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from normkit import specs
from normkit.comparison.effects import Formula, distances, observed
from normkit.identification.passport import Passport
from normkit.spec import NormSpec


def formula(spec: NormSpec, weight: Tensor | None = None, bias: Tensor | None = None) -> Formula:
    return Formula.of(spec, Passport(verdict="norm", spec=spec, readings={}, weight=weight, bias=bias))


LAYER = specs.TORCH_LAYER_NORM


def test_the_distances_are_those_of_plain_torch() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.rand(16) + 0.5, torch.randn(16), torch.randn(2, 20, 16)
    seen = observed(formula(LAYER.replace(eps=1e-2), weight, bias), formula(LAYER, weight, bias), x.flatten(0, -2))
    assert seen is not None
    y = nn.functional.layer_norm(x.double(), (16,), weight.double(), bias.double(), 1e-2)
    expected = nn.functional.layer_norm(x.double(), (16,), weight.double(), bias.double(), 1e-5)
    apart = ((y - expected).norm(dim=-1) / expected.norm(dim=-1)).flatten()
    assert (seen.rows, [effect.dtype for effect in seen.effects]) == (40, ["float32"])
    # Outputs are rounded to float32: 1e-7 of a distance of about 1e-2.
    assert seen.effects[0].worst == pytest.approx(float(apart.max()), rel=1e-4)
    assert seen.effects[0].median == pytest.approx(float(apart.sort().values[19]), rel=1e-4)
    assert seen.rms[1] == pytest.approx(float(x.square().mean(-1).sqrt().median()), rel=0.05)
    assert seen.rms[0] < seen.rms[1] < seen.rms[2]


def test_casts_count_in_16_bits_only() -> None:
    torch.manual_seed(0)
    weight, x = torch.rand(64, dtype=torch.bfloat16) + 0.5, torch.randn(8, 64, dtype=torch.bfloat16)
    late = specs.LLAMA.replace(cast="late")
    seen = observed(formula(specs.LLAMA, weight), formula(late, weight), x.flatten(0, -2))
    assert seen is not None
    effects = {effect.dtype: effect for effect in seen.effects}
    # The last bit of 24, where the reference rounds before the gain or not.
    assert effects["float32"].worst < 2**-23
    # One more rounding to 8 bits.
    assert 1e-4 < effects["bfloat16"].median < effects["bfloat16"].worst < 2**-7
    assert seen.worst == effects["bfloat16"].worst


def test_nothing_seen_is_no_result() -> None:
    assert observed(formula(specs.LLAMA), formula(specs.LLAMA), torch.empty(0, 8)) is None


def test_a_formula_takes_what_its_spec_takes() -> None:
    weight, bias = torch.full((4,), 2.0), torch.ones(4)
    both = formula(LAYER, weight, bias)
    x = torch.randn(3, 4)
    expected = nn.functional.layer_norm(x.double(), (4,), weight.double(), bias.double(), 1e-5)
    torch.testing.assert_close(both(x, torch.float64), expected)
    only_weight = formula(specs.LLAMA.replace(eps=0.0), weight, bias)
    torch.testing.assert_close(only_weight(x, torch.float64), 2 * nn.functional.rms_norm(x.double(), (4,), eps=0.0))
    bare = Formula.bare(specs.GEMMA)
    torch.testing.assert_close(bare(x, torch.float64), nn.functional.rms_norm(x.double(), (4,), eps=1e-6))


def test_a_gain_with_an_entry_for_each_head_keeps_the_heads() -> None:
    heads, x = torch.rand(2, 4) + 0.5, torch.randn(3, 5, 2, 4)
    spec = specs.LLAMA.replace(eps=0.0)
    one, other = formula(spec, heads), formula(spec, 2 * heads)
    assert one.span == other.span == 2
    seen = observed(other, one, x.flatten(0, 1))
    assert seen is not None
    assert seen.rows == 15
    assert seen.effects[0].worst == pytest.approx(1.0, abs=1e-6)


def test_channels_and_whole_samples_are_compared_whole() -> None:
    x = torch.randn(6, 8, 5, 5)
    groups = LAYER.replace(axes="all_but_batch", groups=2)
    one, other = formula(groups, torch.ones(8), torch.zeros(8)), formula(groups.replace(groups=4))
    assert one.span is other.span is formula(LAYER.replace(axes=(1,))).span is None
    seen = observed(one, other, x)
    assert seen is not None
    assert seen.rows == 6
    # 4 groups have other means and deviations than 2.
    assert seen.effects[0].worst > 0.01


def test_distances_of_rows_that_are_zero_or_not_finite() -> None:
    nan, inf = torch.nan, torch.inf
    y = torch.tensor([[0.0, 0.0], [nan, 1.0], [nan, 1.0], [inf, 1.0], [1.0, 0.0], [3.0, 4.0]])
    expected = torch.tensor([[0.0, 0.0], [nan, 1.0], [1.0, 1.0], [inf, 1.0], [0.0, 0.0], [3.0, 5.0]])
    assert distances(y, expected).tolist() == pytest.approx([0.0, 0.0, inf, 0.0, inf, 1 / 34**0.5])
