"""BatchNorm's maps against torch's BatchNorm1d; each dependence against its closed form, and 0 where it must be 0."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers import assert_close, assert_differentiable, normal
from normkit.errors import DtypeError, InputError, KindError, ShapeError
from normkit.geometry import (
    batch_size_dependence,
    batches,
    centre,
    centre_over_batch,
    cross_sample_jacobian,
    future_leakage,
    padding_dependence,
    scale_over_batch,
    train_eval_difference,
)

HALF_AND_SINGLE = [torch.bfloat16, torch.float16, torch.float32]
MASK = torch.arange(6) < torch.tensor([[6], [4], [1]])


def batch_norm(n: int, **options: object) -> nn.BatchNorm1d:
    """A BatchNorm1d with a gain, a bias and running statistics that are not the neutral ones."""
    module = nn.BatchNorm1d(n, dtype=torch.float64, **options)
    for seed, tensor in enumerate([*module.parameters(), *module.buffers()]):
        if tensor.is_floating_point():
            tensor.data.copy_(1.0 + 0.3 * normal(n, seed=10 + seed))
    return module


def norms_of_rows(n: int) -> list[Callable[[Tensor], Tensor]]:
    return [nn.LayerNorm(n, dtype=torch.float64), nn.RMSNorm(n, dtype=torch.float64), centre, batch_norm(n).eval()]


def over_tokens(norm: nn.Module, shape: tuple[int, int]) -> nn.Module:
    """A norm of (rows, n) on (B, T, n): every token is a row."""
    return nn.Sequential(nn.Flatten(0, 1), norm, nn.Unflatten(0, shape))


def running_norm(x: Tensor) -> Tensor:
    """Each token less the mean, over the root mean square, of all tokens up to it."""
    count = torch.arange(1, x.shape[-2] + 1, dtype=x.dtype).unsqueeze(-1)
    mean = x.cumsum(-2) / count
    return (x - mean) / (x.square().cumsum(-2) / count + 1e-5).sqrt()


class Noisy(nn.Module):
    """Rewrites its buffer, an attribute, its mode and its input, draws random numbers, then may fail."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.child, self.calls, self.fails = nn.BatchNorm1d(4), 0, fails

    def forward(self, x: Tensor) -> Tensor:
        self.count, self.calls = self.count + 1, self.calls + 1
        self.train(not self.training)
        y = x.add_(torch.rand_like(x)) + self.child(x)
        if self.fails:
            raise RuntimeError("no more memory")
        return y


@pytest.mark.slow
@given(
    points=st.integers(2, 40), n=st.integers(1, 20), seed=st.integers(0, 1000), mean=st.sampled_from([0.0, 3.0, -50.0])
)
def test_centring_then_scaling_a_cloud_is_torchs_batch_norm(points: int, n: int, seed: int, mean: float):
    x = normal(points, n, seed=seed) + mean
    y = scale_over_batch(centre_over_batch(x), eps=1e-5)
    expected = nn.BatchNorm1d(n, affine=False, dtype=torch.float64)(x)
    # torch multiplies out, y = x / s - mean / s, so what cancels there is added up in its error.
    spread = (x.var(0, correction=0) + 1e-5).sqrt()
    assert_close(y, expected, length=points, terms=(x.abs() / spread).amax() + expected.abs().amax())


def test_three_clusters_centred_each_way():
    means = torch.tensor([[4.0, 1.0, 0.0], [5.0, 4.0, 1.0], [1.0, 2.0, 6.0]], dtype=torch.float64)
    clusters = means.unsqueeze(1) + 0.3 * normal(3, 100, 3)
    cloud = clusters.reshape(300, 3)
    rows_centred = centre(cloud)
    assert_close(rows_centred.sum(-1), torch.zeros(300).double(), length=3, terms=cloud.abs().max())
    assert torch.linalg.matrix_rank(rows_centred, rtol=1e-12) == 2
    assert torch.linalg.vector_norm(rows_centred.mean(0)) > 0.5
    # Every cluster stays several of its own radii off the origin.
    off_origin = torch.linalg.vector_norm(centre(clusters).mean(1), dim=-1)
    radius = (centre(clusters) - centre(clusters).mean(1, keepdim=True)).square().sum(-1).mean(-1).sqrt()
    assert (off_origin > 4 * radius).all()
    cloud_centred = centre_over_batch(cloud)
    assert_close(cloud_centred.mean(0), torch.zeros(3).double(), length=300, terms=cloud.abs().max())
    assert torch.linalg.matrix_rank(cloud_centred, rtol=1e-12) == 3
    # By differences: by a matrix product, the distance of a point from itself is the root of what rounding leaves.
    by_differences = "donot_use_mm_for_euclid_dist"
    before, after = (torch.cdist(x, x[:5], compute_mode=by_differences) for x in (cloud, cloud_centred))
    assert_close(after, before, units=100)
    assert (torch.linalg.vector_norm(cloud_centred.reshape(3, 100, 3).mean(1), dim=-1) > 2.0).all()

    # Only where each cluster is a minibatch of its own does each lie about the origin.
    assert_close(centre_over_batch(clusters).mean(1), torch.zeros(3, 3).double(), length=100, terms=cloud.abs().max())


def test_a_mean_of_1e8_is_taken_out_whole():
    x = normal(64, 3)
    offset = (x + 1e8) - 1e8
    # What x + 1e8 keeps of x is known exactly, so only the centring's own rounding is left.
    assert_close(centre_over_batch(x + 1e8), centre_over_batch(offset), length=64, terms=torch.tensor(4.0))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "function", [centre_over_batch, lambda x: scale_over_batch(x, 0.0), lambda x: scale_over_batch(x, 0.1)]
)
def test_clouds_hold_under_vmap_and_differentiate(function):
    x = normal(3, 5, 4)
    assert_differentiable(function, x)
    assert [function(x.to(dtype)).dtype for dtype in HALF_AND_SINGLE] == HALF_AND_SINGLE


def test_the_derivatives_of_both_maps_are_the_closed_forms():
    points, n, eps = 6, 3, 0.05
    x = normal(points, n)
    same, feature = torch.eye(points).double(), torch.eye(n).double()
    centring = torch.einsum("ij,ab->iajb", same - 1 / points, feature)
    assert_close(torch.func.jacrev(centre_over_batch)(x), centring)
    s = (x.square().mean(0) + eps).sqrt()
    block = (same.unsqueeze(-1) - (x / s).unsqueeze(1) * (x / s).unsqueeze(0) / points) / s
    scaling = torch.einsum("ija,ab->iajb", block, feature)
    assert_close(torch.func.jacrev(lambda x: scale_over_batch(x, eps))(x), scaling)


def test_one_point_is_centred_to_nothing_and_scaled_to_nan_or_nothing():
    x = normal(1, 4)
    centred = centre_over_batch(x)
    assert torch.equal(centred, torch.zeros_like(x))
    assert scale_over_batch(centred).isnan().all()
    assert torch.equal(scale_over_batch(centred, 1e-5), torch.zeros_like(x))
    gradient = torch.func.jacrev(lambda x: scale_over_batch(centre_over_batch(x), 1e-5))(x)
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("points", [2, 3, 16])
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_batch_norm_couples_samples_by_the_closed_form(points: int, eps: float):
    n = 5
    x, module = normal(points, n) * 2 + 1, batch_norm(n, eps=eps)
    s = (x.var(0, correction=0) + eps).sqrt()
    z = (x - x.mean(0)) / s
    same = torch.eye(points).double().unsqueeze(-1)
    blocks = module.weight / s * (same - 1 / points - z.unsqueeze(1) * z.unsqueeze(0) / points)
    result = cross_sample_jacobian(module, x)
    assert_close(result, torch.linalg.vector_norm(blocks, dim=-1), length=points, terms=(module.weight / s).norm())
    assert (result > 0).all()


def test_two_samples_are_normalized_to_signs_and_their_derivative_is_gone():
    x, eps = normal(2, 4), 1e-8
    module, half = nn.BatchNorm1d(4, eps=eps, dtype=torch.float64), (x - x.flip(0)) / 2
    expected = half.sign() / (1 + eps / half.square()).sqrt()
    assert_close(module(x).detach(), expected, terms=(x / half).abs().max() + 1)
    assert (1 - expected.abs()).max() < 1e-5
    assert cross_sample_jacobian(module, x).max() < 1e-4 < 0.1 < cross_sample_jacobian(module, normal(4, 4)).max()


def test_the_blocks_are_those_of_jacrev_whatever_the_gradient_mode():
    x, mix = normal(4, 2, 3), normal(4, 2, 3, 4, 2, 3, seed=5)

    def mixing(x: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("iabjcd,jcd->iab", mix, x))

    expected = torch.func.jacrev(mixing)(x).square().sum((1, 2, 4, 5)).sqrt()
    assert_close(cross_sample_jacobian(mixing, x), expected, length=36)
    with torch.no_grad():
        assert_close(cross_sample_jacobian(mixing, x), expected, length=36)


def test_norms_of_rows_couple_nothing():
    x, image = normal(7, 5), normal(3, 4, 5, 5)
    cases = [*((norm, x) for norm in norms_of_rows(5)), (nn.GroupNorm(2, 4, dtype=torch.float64), image)]
    for norm, samples in cases:
        result = cross_sample_jacobian(norm, samples)
        assert torch.equal(result, result.diag().diag())
        assert (result.diag() > 0).all()
    assert (cross_sample_jacobian(nn.BatchNorm2d(4, dtype=torch.float64), image) > 0).all()


def test_the_result_does_not_depend_on_how_much_is_held_at_once(monkeypatch: pytest.MonkeyPatch):
    x, module = normal(2, 4, 3), over_tokens(batch_norm(3), (2, 4))
    whole = cross_sample_jacobian(module, x), future_leakage(module, x)
    for held in (1, 5 * x.numel()):
        monkeypatch.setattr(batches, "_HELD_ELEMENTS", held)
        assert_close(cross_sample_jacobian(module, x), whole[0])
        assert_close(future_leakage(module, x), whole[1])


def test_batch_norms_output_moves_with_the_batch_and_layer_norms_does_not():
    x, sizes = normal(64, 6), [2, 3, 16, 64]
    module = batch_norm(6)
    first = torch.stack(
        [(x[0] - part.mean(0)) / (part.var(0, correction=0) + module.eps).sqrt() for part in (x[:k] for k in sizes)]
    )
    by_hand = ((first - first[-1]) * module.weight).abs().amax(1).detach()
    changes = batch_size_dependence(module, x, sizes)
    assert_close(changes, by_hand, length=64)
    assert changes[0] > 2 * changes[2] > 0.1 > changes[3] == 0
    for norm in norms_of_rows(6):
        assert torch.equal(batch_size_dependence(norm, x, [1, *sizes]), torch.zeros(5).double())
    assert batch_size_dependence(module, x, []).shape == (0,)


def test_a_batch_of_one_by_torch_by_the_formula_and_in_evaluation():
    x, module = normal(8, 4), batch_norm(4)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        batch_size_dependence(module, x, [1])

    def formula(x: Tensor, eps: float = module.eps) -> Tensor:
        return scale_over_batch(centre_over_batch(x), eps) * module.weight + module.bias

    assert torch.equal(formula(x[:1])[0], module.bias)
    assert formula(x[:1], 0.0).isnan().all()
    change = batch_size_dependence(formula, x, [1])
    assert_close(change, (formula(x)[0] - module.bias).abs().max().reshape(1).detach())
    # Below its check torch multiplies out, so that its bias comes with x / sqrt(eps) rounded.
    below = torch.native_batch_norm(x[:1], module.weight, module.bias, None, None, True, 0.0, module.eps)[0]
    cancelling = x[0].abs().max() * module.weight.max() / module.eps**0.5
    assert_close(below[0].detach(), module.bias.detach(), terms=cancelling)
    assert torch.equal(batch_size_dependence(module.eval(), x, [1]), torch.zeros(1).double())


def test_one_image_is_a_batch_for_batch_norm_namely_instance_norm():
    x, module = normal(16, 3, 8, 8), nn.BatchNorm2d(3, affine=False, dtype=torch.float64)
    changes = batch_size_dependence(module, x, [1, 4, 16])
    assert changes[0] > changes[1] > changes[2] == 0
    assert_close(changes[0], (F.instance_norm(x[:1]) - module(x)[:1]).abs().max(), length=64)


@pytest.mark.parametrize("passes", [0, 1, 7])
def test_running_statistics_lag_behind_by_the_closed_form(passes: int):
    points, momentum = 12, 0.1
    x, module = normal(points, 5) * 2 + 1, batch_norm(5, momentum=momentum)
    kept = (1 - momentum) ** passes
    mean = kept * module.running_mean + (1 - kept) * x.mean(0)
    variance = kept * module.running_var + (1 - kept) * x.var(0, correction=1)
    trained = (x - x.mean(0)) / (x.var(0, correction=0) + module.eps).sqrt()
    evaluated = (x - mean) / (variance + module.eps).sqrt()
    expected = ((trained - evaluated) * module.weight).abs().max().detach()
    assert_close(train_eval_difference(module, x, [x] * passes), expected, length=points)


def test_settled_statistics_still_differ_by_bessels_correction():
    x, module = normal(8, 5), nn.BatchNorm1d(5, eps=1e-12, dtype=torch.float64)
    largest = module(x).abs().max().detach()
    difference = train_eval_difference(module, x, [x] * 500)
    assert difference.item() == pytest.approx(largest.item() * (1 - math.sqrt(7 / 8)), rel=1e-9)


def test_layer_norm_and_a_batch_norm_without_running_statistics_have_one_mode():
    x = normal(8, 5)
    for module in (nn.LayerNorm(5, dtype=torch.float64), batch_norm(5, track_running_stats=False)):
        assert train_eval_difference(module, x, [x, 2 * x]) == 0
    assert train_eval_difference(nn.Dropout(0.5), x) > 0


@pytest.mark.parametrize("fill", [0.0, 100.0, math.nan])
def test_padding_reaches_valid_tokens_through_batch_norm_only(fill: float):
    x = normal(3, 6, 4)
    for norm in (*norms_of_rows(4)[:3], over_tokens(batch_norm(4).eval(), (3, 6))):
        assert padding_dependence(norm, x, MASK, fill) == 0
    change = padding_dependence(over_tokens(batch_norm(4), (3, 6)), x, MASK, fill)
    assert change.isnan() if math.isnan(fill) else change > 0.5


def test_the_change_is_that_of_valid_tokens_only_and_by_hand():
    x, fill = normal(3, 6, 4), normal(4, seed=1)
    module = over_tokens(batch_norm(4), (3, 6))
    other = x.clone()
    other[~MASK] = fill
    changes = (copy.deepcopy(module)(x) - copy.deepcopy(module)(other)).abs()
    assert torch.equal(padding_dependence(module, x, MASK, fill), changes[MASK].max())
    assert changes[~MASK].max() > changes[MASK].max()
    assert padding_dependence(module, x, torch.zeros_like(MASK), fill) == 0
    assert padding_dependence(module, x, torch.ones_like(MASK), fill) == 0


def test_batch_norm_over_time_sees_the_future_and_a_running_norm_does_not():
    for shape in ((6, 4), (2, 6, 4)):
        x = normal(*shape)
        for norm in (*norms_of_rows(4)[:3], running_norm):
            assert future_leakage(norm, x) == 0
        assert future_leakage(lambda x: running_norm(x.flip(-2)).flip(-2), x) > 0.1
    x = normal(2, 6, 4)
    assert future_leakage(over_tokens(batch_norm(4), (2, 6)), x) > 0.05
    assert future_leakage(over_tokens(batch_norm(4).eval(), (2, 6)), x) == 0
    # Statistics of each position apart: no later token, but the other sequences.
    by_position = nn.Sequential(nn.Flatten(1), nn.BatchNorm1d(24, dtype=torch.float64), nn.Unflatten(1, (6, 4)))
    assert future_leakage(by_position, x) == 0
    assert (cross_sample_jacobian(by_position, normal(3, 6, 4)) > 0).all()


def test_leakage_is_the_largest_entry_of_jacrev_above_the_diagonal():
    x, module = normal(5, 3), batch_norm(3)

    def norm(x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, module.weight, module.bias, training=True, eps=module.eps)

    later = torch.func.jacrev(norm)(x).permute(0, 2, 1, 3)[torch.ones(5, 5).triu(1).bool()]
    assert_close(future_leakage(module, x), later.abs().max().detach(), length=5)
    # The same in two sequences, where an entry is also one sequence's past and the other's future.
    x = normal(2, 5, 3)
    jacobian = torch.func.jacrev(lambda x: norm(x.flatten(0, 1)).reshape(2, 5, 3))(x).permute(1, 4, 0, 2, 3, 5)
    later = jacobian[torch.ones(5, 5).triu(1).bool()]
    assert_close(future_leakage(over_tokens(module, (2, 5)), x), later.abs().max().detach(), length=10)


MEASUREMENTS = [
    cross_sample_jacobian,
    lambda norm, x: batch_size_dependence(norm, x, [2]),
    lambda norm, x: train_eval_difference(norm, x, [x, x]),
    lambda norm, x: padding_dependence(norm, x, torch.ones(3, 4, dtype=torch.bool), 0.0),
    future_leakage,
]


@pytest.mark.parametrize("measure", MEASUREMENTS, ids=["cross", "batch size", "train eval", "padding", "future"])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_the_module_its_mode_its_input_and_the_random_state_stay(measure: Callable, fails: bool, training: bool):
    module = Noisy(fails).train(training)
    module.child.train(not training)
    x = normal(3, 4, 2).float().requires_grad_()
    tensors = [x, *module.state_dict(keep_vars=True).values()]
    before = [(tensor.detach().clone(), tensor._version) for tensor in tensors]
    random = torch.get_rng_state()
    if fails:
        with pytest.raises(RuntimeError, match="no more memory"):
            measure(module, x)
    else:
        first = measure(module, x)
        assert torch.equal(first, measure(module, x))
        assert not first.requires_grad
    assert (module.calls, module.training, module.child.training) == (0, training, not training)
    after = [x, *module.state_dict(keep_vars=True).values()]
    for now, same, (value, version) in zip(after, tensors, before, strict=True):
        assert now is same
        assert torch.equal(now, value)
        assert (now._version, now.grad) == (version, None)
    assert torch.equal(torch.get_rng_state(), random)


def test_arguments_that_do_not_fit_are_refused():
    x, mask = normal(3, 4, 2), torch.ones(3, 4, dtype=torch.bool)
    for size in (0, 4):
        with pytest.raises(InputError, match=rf"batch sizes from 1 to 3 are needed.*got {size}"):
            batch_size_dependence(centre, x, [1, size])
    with pytest.raises(DtypeError, match=r"bool mask.*int64; use mask\.bool\(\)"):
        padding_dependence(centre, x, mask.long(), 0.0)
    with pytest.raises(ShapeError, match=r"mask of shape \(3, 4\)"):
        padding_dependence(centre, x, mask.T, 0.0)
    with pytest.raises(ShapeError, match=r"a shape \(B, T, n\)"):
        padding_dependence(centre, x[0], mask[0], 0.0)
    with pytest.raises(ShapeError, match=r"\(T, n\) or \(B, T, n\)"):
        future_leakage(centre, normal(1, 2, 3, 4))
    with pytest.raises(KindError, match=r"torch\.nn\.Module is needed.*got function"):
        train_eval_difference(running_norm, x)
    for function in (
        centre_over_batch,
        scale_over_batch,
        *(partial(f, centre) for f in (cross_sample_jacobian, future_leakage)),
    ):
        for shape in ((4,), (0, 4), (3, 0)):
            with pytest.raises(ShapeError, match=r"a shape \(N, n\) with at least one element is needed, got|n >= 1"):
                function(torch.ones(shape))
        with pytest.raises(DtypeError, match="floating dtype"):
            function(torch.ones(2, 4, dtype=torch.int64))
    for measure in (cross_sample_jacobian, future_leakage, partial(batch_size_dependence, sizes=[1])):
        with pytest.raises(ShapeError, match="must keep the leading shape"):
            measure(lambda x: x.mean(0, keepdim=True), normal(3, 2))
