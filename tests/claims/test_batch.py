"""Claims C52 to C62: BatchNorm against LayerNorm."""

from __future__ import annotations

import pytest
import torch

from helpers import below
from normkit import NormSpec, geometry, reference

N = 6


def layer_norm(x):
    return reference.forward(x, NormSpec(has_weight=False, has_bias=False))


def batch_norm():
    return torch.nn.BatchNorm1d(N, affine=False, track_running_stats=False, dtype=torch.float64)


@pytest.fixture
def x():
    return torch.randn(16, N, dtype=torch.float64) + 0.5


def test_c52_statistics_run_over_the_batch_or_over_the_features(x, measured):
    over_batch, over_features = batch_norm()(x), layer_norm(x)
    below(over_batch.mean(0), 1e-14)
    below(over_features.mean(-1), 1e-14)
    assert over_batch.mean(-1).abs().max() > 0.1
    assert over_features.mean(0).abs().max() > 0.1
    measured("BatchNorm: each feature has mean 0 over the batch; LayerNorm: each row over its features; not both")


def test_c53_batch_norm_depends_on_the_batch_size_in_training(x, measured):
    sizes = (2, 4, 8, 16)
    batch = geometry.batch_size_dependence(batch_norm(), x, sizes)
    layer = geometry.batch_size_dependence(layer_norm, x, sizes)
    assert batch[0] > 0.1
    assert (layer == 0).all()
    inference = torch.nn.BatchNorm1d(N, dtype=torch.float64).eval()
    assert (geometry.batch_size_dependence(inference, x, sizes) == 0).all()
    measured(
        f"in training sample 0 moves by {batch[0]:.2f} between batches of 2 and 16; in inference and in LayerNorm 0"
    )


def test_c54_batch_norm_fails_at_batch_1_with_one_value_a_channel(measured):
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        torch.nn.BatchNorm1d(N)(torch.randn(1, N))
    image = torch.nn.BatchNorm2d(3)(torch.randn(1, 3, 8, 8))
    assert image.isfinite().all()
    assert torch.nn.BatchNorm1d(N).eval()(torch.randn(1, N)).isfinite().all()
    measured("(1, n) in training is refused by torch; (1, C, 8, 8) in training and (1, n) in inference work")


def test_c55_layer_norm_works_at_batch_1(x, measured):
    assert torch.equal(layer_norm(x[:1]), layer_norm(x)[:1])
    measured("bit for bit what the row gets in a batch of 16")


def test_c56_batch_norm_over_time_leaks_the_future(measured):
    x = torch.randn(10, N, dtype=torch.float64)
    training, layer = geometry.future_leakage(batch_norm(), x), geometry.future_leakage(layer_norm, x)
    inference = geometry.future_leakage(torch.nn.BatchNorm1d(N, dtype=torch.float64).eval(), x)
    assert float(training) > 0.01
    assert float(layer) == float(inference) == 0
    measured(
        f"largest derivative of a token by a later one: {float(training):.2f} in training; 0 in inference; LayerNorm 0"
    )


def test_c57_batch_norm_couples_sequences(x, measured):
    blocks = geometry.cross_sample_jacobian(batch_norm(), x)
    off = blocks - blocks.diagonal().diag()
    assert (off + torch.eye(16) > 0).all()
    layer = geometry.cross_sample_jacobian(layer_norm, x)
    assert (layer - layer.diagonal().diag() == 0).all()
    measured(
        f"all 240 pairs of 16 samples depend on each other in BatchNorm, at most {off.max():.2f}; none in LayerNorm"
    )


def test_c58_padding_changes_batch_norm(measured):
    x = torch.randn(4, 8, N, dtype=torch.float64)
    mask = torch.arange(8) < torch.tensor([8, 6, 5, 3])[:, None]

    def over_tokens(rows):
        return batch_norm()(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])

    batch = float(geometry.padding_dependence(over_tokens, x, mask, 5.0))
    layer = float(geometry.padding_dependence(layer_norm, x, mask, 5.0))
    assert layer == 0
    measured(f"valid tokens move by {batch:.1f} when the padding is filled with 5; LayerNorm 0")


def scatter(layer, sample, others):
    """How far the output for one sample moves with what else is in its batch."""
    outputs = []
    for batch in others:
        batch[0] = sample
        outputs.append(layer(batch)[0])
    return torch.stack(outputs).std(0).mean().item()


def test_c59_small_batches_make_batch_norm_noisy(x, measured):
    noise = [scatter(batch_norm(), x[0], torch.randn(400, size, N, dtype=torch.float64)) for size in (2, 8, 64)]
    assert noise[0] > 3 * noise[2]
    measured(
        "one row among random others scatters by "
        + ", ".join(f"{value:.2f}" for value in noise)
        + " at batch 2, 8, 64; features of variance 1"
    )


def test_c60_batch_norm_of_images_has_many_values_a_channel(measured):
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    layer = torch.nn.BatchNorm2d(3, affine=False, track_running_stats=False, dtype=torch.float64)
    pooled = images.movedim(1, -1).flatten(0, 2)
    rows = geometry.scale_over_batch(geometry.centre_over_batch(pooled), 1e-5)
    below(layer(images).movedim(1, -1).flatten(0, 2) - rows, 1e-13)
    noise = scatter(layer, images[0], torch.randn(200, 2, 3, 16, 16, dtype=torch.float64))
    assert noise < 0.1
    measured(
        f"2 images of 16 x 16 are 512 rows to it: at batch 2 one image among random others scatters by {noise:.2f} "
        "(independent pixels)"
    )


def test_c61_batch_norm_is_centring_and_scaling_each_feature(x, measured):
    ours = geometry.scale_over_batch(geometry.centre_over_batch(x), 1e-5)
    measured("error " + below(ours - batch_norm()(x), 1e-13))


def test_c62_each_sample_of_a_layer_norm_stands_alone(x, measured):
    other = x.clone()
    other[1:] = 1e6
    assert torch.equal(layer_norm(other)[0], layer_norm(x)[0])
    measured("replacing every other sample leaves a row bit for bit")
