import math
from itertools import islice

import pytest
import torch
from torch import nn

from normkit.study.arm_context import ArmContext
from normkit.study.digits import digits
from normkit.study.experiments import batch_models
from normkit.study.experiments.batch_models import (
    NORMS,
    VARIANCE_SIZES,
    batch_variance_scatter,
    delayed,
    with_statistics_of,
)
from normkit.study.model_parts import BatchNorm
from normkit.study.result import Arm

pytestmark = pytest.mark.slow

SETTINGS = {
    "width": 16,
    "layers": 2,
    "steps": 3,
    "learning_rate": 1e-3,
    "channels": 2,
    "image_steps": 2,
    "image_rate": 1e-3,
    "sequence_steps": 2,
    "sequence_rate": 1e-3,
    "sequence_batch": 8,
    "extra_rows": (0, 2),
    "text_layers": 1,
    "text_steps": 2,
    "text_batch": 2,
    "window": 16,
}


def measured(measure, **choices):
    return measure(ArmContext(settings=SETTINGS, seed=0), Arm(name="an arm", choices=choices))


def test_a_trained_mlp_is_read_in_both_modes():
    batch, layer = (measured(batch_models.perceptron, norm=norm, batch=4) for norm in ("BatchNorm", "LayerNorm"))
    assert len(batch["losses"]) == len(layer["losses"]) == 3
    assert abs(batch["gap"]) > 1e-3
    assert abs(layer["gap"]) < 1e-5
    assert 0 < layer["error"] <= 100


def test_a_batch_norm_of_single_rows_stays_as_it_began():
    single = measured(batch_models.perceptron, norm="BatchNorm", batch=1)
    assert not single["trained"]
    assert single["losses"] == []
    assert single["gap"] is None
    assert 70 < single["error"] <= 100
    assert measured(batch_models.perceptron, norm="LayerNorm", batch=1)["trained"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("norm", ["BatchNorm", "LayerNorm", "no norm"])
def test_a_cnn_is_read_and_only_batch_norms_have_batch_variances(norm):
    result = measured(batch_models.convolutional, norm=norm, batch=2)
    assert len(result["losses"]) == 2
    assert (result["scatter"] is not None) is (norm == "BatchNorm")


@pytest.mark.parametrize(("norm", "own"), [("BatchNorm", True), ("BatchNorm", False), ("LayerNorm", False)])
def test_a_recurrent_net_is_read_on_longer_sequences_too(norm, own):
    result = measured(batch_models.recurrent, norm=norm, own_statistics=own)
    assert len(result["errors"]) == 2
    assert result["errors"][0] == result["error"]


def test_statistics_of_single_times_are_other_statistics():
    own, shared = (measured(batch_models.recurrent, norm="BatchNorm", own_statistics=own) for own in (True, False))
    # In training both use the batch's; the running ones tell them apart.
    assert own["losses"][0] == shared["losses"][0]
    assert own["held_out"] != shared["held_out"]


@pytest.mark.parametrize("norm", ["BatchNorm", "LayerNorm"])
def test_the_modes_of_a_transformer_differ_with_batch_norm_alone(norm):
    result = measured(batch_models.transformer, norm=norm, rate=1e-3)
    same = result["held_out"] == pytest.approx(result["held_out_training_mode"], abs=1e-5)
    assert same is (norm == "LayerNorm")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("training", [True, False])
def test_only_batch_norm_in_training_depends_on_more_than_the_past(norm, training):
    result = measured(batch_models.dependence, norm=norm, training=training)
    depends = {name for name, value in result.items() if value > 1e-8}
    couplings = {"samples", "batch size", "future", "padding"}
    expected = (couplings if training else set()) | {"mode"} if norm == "BatchNorm" else set()
    assert depends == expected


def test_the_variance_of_gaussian_rows_scatters_as_theory_says():
    scatter = measured(batch_models.variance)["scatter"]
    assert scatter == pytest.approx([math.sqrt(2 / (size - 1)) for size in VARIANCE_SIZES], rel=0.05)


class Rows(nn.Module):
    """A BatchNorm behind a factor, over images flattened to rows."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))
        self.norm = BatchNorm(64)

    def forward(self, images):
        return self.norm(self.factor * images.flatten(1))


def batches_of_noise(rows, count):
    return [(torch.randn(rows, 8, 8) + 3, torch.zeros(rows)) for _ in range(count)]


def test_scatter_and_new_statistics_are_those_of_what_the_norms_read():
    model = Rows()
    # 40 batches: the deviation of each feature is off by a tenth, the median of 64 features by less.
    assert batch_variance_scatter(model, batches_of_noise(9, 40)) == pytest.approx(math.sqrt(2 / 8), rel=0.1)
    assert int(model.norm.num_batches_tracked) == 0
    assert batch_variance_scatter(nn.Linear(2, 2), []) is None
    model, batches = Rows(2.0), batches_of_noise(16, 5)
    twin = with_statistics_of(model, batches)
    rows = [2 * images.flatten(1) for images, _ in batches]
    torch.testing.assert_close(twin.norm.running_mean, torch.stack([each.mean(0) for each in rows]).mean(0))
    torch.testing.assert_close(twin.norm.running_var, torch.stack([each.var(0) for each in rows]).mean(0))
    assert torch.equal(model.norm.running_mean, torch.zeros(64))


def test_images_stand_after_delays_that_follow_from_the_seed():
    images = torch.arange(2 * 64, dtype=torch.float32).reshape(2, 8, 8)
    sequences = delayed(images, torch.tensor([0, 3]), -1.0)
    assert sequences.shape == (2, 12, 8)
    assert torch.equal(sequences[0, :8], images[0])
    assert torch.equal(sequences[1, 3:11], images[1])
    assert (sequences[0, 8:] == -1).all()
    assert (sequences[1, :3] == -1).all()
    assert (sequences[1, 11:] == -1).all()
    data = digits()
    first, again = (list(islice(batch_models.delayed_batches(data, 16, seed), 2)) for seed in (1, 1))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    blank = data.training.min()
    leading = [int((sequence == blank).all(-1).int().cumprod(0).sum()) for sequence in first[0][0]]
    assert len(set(leading)) > 2
