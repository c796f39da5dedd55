from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from helpers import assert_close, normal
from normkit import NormSpec, reference, specs
from normkit.errors import DtypeError, ShapeError
from normkit.geometry import attention_entropy, entropy_over_scale, logit_bound

LAYER_NORM = specs.TORCH_LAYER_NORM.replace(eps=0.0)


@given(seed=st.integers(0, 2**16), scale=st.sampled_from([None, 1.0, -3.0, 0.1]))
def test_no_score_is_above_the_bound(seed, scale):
    query, key = normal(2, 5, 7, seed=seed), normal(2, 6, 7, seed=seed + 1)
    scores = (query @ key.mT) * (7**-0.5 if scale is None else scale)
    bound = logit_bound(query, key, scale)
    assert bound.shape == (2,)
    assert (scores.abs().amax((-2, -1)) <= bound * (1 + 1e-14)).all()


def test_parallel_rows_attain_the_bound_and_that_of_nothing_is_zero():
    direction = normal(9)
    query, key = torch.stack([direction, 0.3 * direction]), torch.stack([-4 * direction, direction])
    assert_close((query @ key.T / 3).abs().max(), logit_bound(query, key))
    assert logit_bound(torch.ones(2, 0, 3), torch.ones(2, 5, 3)).tolist() == [0, 0]
    assert torch.func.grad(logit_bound)(torch.zeros(2, 9).double(), key).isfinite().all()


def test_after_a_norm_the_bound_stands_in_the_weights_alone():
    query_weight, key_weight = normal(4, 16, seed=1), normal(4, 16, seed=2)
    norms = [float(torch.linalg.matrix_norm(weight, 2)) for weight in (query_weight, key_weight)]
    for size in (1e-6, 1.0, 1e6):
        rows = reference.forward(size * normal(30, 16, seed=3), LAYER_NORM)
        assert float(logit_bound(rows @ query_weight.T, rows @ key_weight.T)) <= 16 * norms[0] * norms[1] / 2


def test_what_makes_no_head_is_refused():
    with pytest.raises(ShapeError, match="got 3 and 4 features"):
        logit_bound(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(DtypeError, match="floating"):
        logit_bound(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3))
    with pytest.raises(DtypeError, match="floating"):
        attention_entropy(torch.ones(3, dtype=torch.long))
    x, query_weight, key_weight = head()
    for wrong in ((x[0], query_weight, key_weight), (x, query_weight[:2], key_weight), (x[:, 1:], *head()[1:])):
        with pytest.raises(ShapeError, match="give one text and one head"):
            entropy_over_scale(*wrong, [1.0])


@pytest.mark.slow
@example([0.0] * 9)
@example([0.0, 1e4, -1e4])
@example([-7.0])
@given(st.lists(st.floats(-50, 50) | st.just(-math.inf), min_size=1, max_size=9).filter(lambda x: max(x) > -math.inf))
def test_entropy_by_its_definition(logits):
    with mpmath.workdps(40):
        weights = [mpmath.exp(value) for value in logits if value != -math.inf]
        shares = [weight / mpmath.fsum(weights) for weight in weights]
        exact = float(-mpmath.fsum(share * mpmath.log(share) for share in shares if share))
    assert float(attention_entropy(torch.tensor(logits, dtype=torch.float64))) == pytest.approx(exact, abs=1e-13)


@given(seed=st.integers(0, 2**16), shift=st.floats(-1e6, 1e6))
def test_entropy_lies_between_one_key_and_all_alike_and_ignores_a_shift(seed, shift):
    logits = 3 * normal(4, 6, seed=seed)
    entropy = attention_entropy(logits)
    assert ((entropy >= 0) & (entropy <= math.log(6) + 1e-12)).all()
    # A shift of 1e6 leaves the logits 1e-10.
    assert torch.allclose(attention_entropy(logits + shift), entropy, atol=1e-8)


def test_a_hidden_key_counts_for_nothing():
    logits, mask = normal(3, 4, 6), torch.ones(4, 6, dtype=torch.bool).tril()
    entropy = attention_entropy(logits, mask)
    for row in range(4):
        assert_close(entropy[:, row], attention_entropy(logits[:, row, : row + 1]))
    additive = logits.masked_fill(~mask, -math.inf)
    assert torch.equal(attention_entropy(additive), entropy)
    assert torch.equal(attention_entropy(additive, torch.ones(6, dtype=torch.bool)), entropy)
    # What stands at a hidden place is not looked at.
    assert torch.equal(attention_entropy(logits.masked_fill(~mask, math.nan), mask), entropy)


@pytest.mark.parametrize(
    "logits",
    [[1.0, 2.0, 0.5], [0.0, 1e4, -1e4], [0.0, -math.inf, 3.0], [5.0, 5.0, 5.0], [-math.inf] * 3],
    ids=["plain", "one-hot", "hidden", "uniform", "no key"],
)
def test_gradients_are_finite(logits):
    x = torch.tensor([logits, [0.1, 0.2, 0.3]], dtype=torch.float64, requires_grad=True)
    entropy = attention_entropy(x)
    (gradient,) = torch.autograd.grad(entropy.sum(), x, create_graph=True)
    assert gradient.isfinite().all()
    assert (gradient[x == -math.inf] == 0).all()
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    assert second.isfinite().all()
    assert entropy[0].isnan() == (max(logits) == -math.inf)


def test_the_gradient_is_minus_p_times_log_p_plus_entropy():
    logits = normal(5, 7)
    p = logits.softmax(-1)
    expected = torch.diag_embed(-p * (p.log() + attention_entropy(logits)[:, None]))
    found = torch.func.jacrev(attention_entropy)(logits)
    assert_close(found.diagonal(dim1=0, dim2=1).permute(1, 0), expected.diagonal(dim1=-2, dim2=-1), units=32)


def test_vmap_and_single_precision():
    logits, mask = normal(3, 4, 6), torch.ones(4, 6, dtype=torch.bool).tril()
    mapped = torch.vmap(attention_entropy, (0, None))(logits, mask)
    assert_close(mapped, attention_entropy(logits, mask))
    assert torch.vmap(logit_bound)(logits, logits).shape == (3,)
    assert_close(attention_entropy(logits.float()), attention_entropy(logits).float(), length=6)
    single = [tensor.float() for tensor in head()]
    assert entropy_over_scale(*single, [1.0, 2.0], LAYER_NORM).dtype == torch.float32


def head(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return normal(12, 16, seed=seed) + 0.5, 0.5 * normal(4, 16, seed=seed + 1), 0.5 * normal(4, 16, seed=seed + 2)


def test_each_scale_is_one_head_of_attention():
    x, query_weight, key_weight = head()
    gain, bias = 1 + 0.1 * normal(16, seed=5), normal(16, seed=6)
    spec = NormSpec(eps=0.3)
    found = entropy_over_scale(x, query_weight, key_weight, [0.5, 2.0], spec, gain, bias)
    rows = torch.nn.functional.layer_norm(2.0 * x, (16,), gain, bias, eps=0.3)
    shares = (rows @ query_weight.T @ (rows @ key_weight.T).T / 2).softmax(-1)
    assert found.shape == (2, 12)
    assert_close(found[1], torch.special.entr(shares).sum(-1), units=64)


def test_a_norm_without_eps_makes_attention_free_of_scale():
    scales = torch.logspace(-6, 6, 7, dtype=torch.float64)
    for spec in (LAYER_NORM, specs.LLAMA.replace(eps=0.0)):
        normed = entropy_over_scale(*head(), scales, spec)
        assert_close(normed, normed[3].expand(7, 12), units=512)
    bare = entropy_over_scale(*head(), scales).mean(-1)
    assert float(bare[0]) == pytest.approx(math.log(12), abs=1e-9)
    assert float(bare[-1]) < 1e-3
    assert (bare.diff() <= 0).all()


def test_eps_makes_small_inputs_uniform_again():
    entropy = entropy_over_scale(*head(), [1e-8, 1.0], NormSpec(eps=1e-5)).mean(-1)
    assert float(entropy[0]) == pytest.approx(math.log(12), abs=1e-6)
    assert float(entropy[1]) < 2


def test_a_norm_does_not_hold_back_the_weights():
    entropy = entropy_over_scale(*head(), [0.01, 1.0, 100.0], LAYER_NORM, scaled="weights").mean(-1)
    assert float(entropy[0]) == pytest.approx(math.log(12), abs=1e-6)
    assert 0.1 < float(entropy[1]) < 2
    assert float(entropy[2]) < 1e-3
    x, query_weight, key_weight = head()
    bare = entropy_over_scale(x, query_weight, key_weight, [3.0], scaled="weights")
    assert_close(bare, entropy_over_scale(x, query_weight, key_weight, [3.0]), units=512)
    by_hand = entropy_over_scale(x, 100 * query_weight, 100 * key_weight, [1.0], LAYER_NORM)
    found = entropy_over_scale(x, query_weight, key_weight, [100.0], LAYER_NORM, scaled="weights")
    assert torch.allclose(found, by_hand, atol=1e-9)
