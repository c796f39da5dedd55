import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normkit import specs
from normkit.study.convolutional import Convolutional, ConvolutionalConfig, OverChannels
from normkit.study.norms import BatchNorm


def over_channels(channels):
    return OverChannels(BatchNorm(channels))


def test_batch_norm_over_channels_is_that_of_images():
    x = torch.randn(4, 3, 5, 6)
    ours, torchs = OverChannels(BatchNorm(3)), nn.BatchNorm2d(3)
    torch.testing.assert_close(ours(x), torchs(x))
    torch.testing.assert_close(ours.norm.running_var, torchs.running_var)
    torch.testing.assert_close(ours.eval()(x), torchs.eval()(x))


@pytest.mark.parametrize(
    ("norm", "apply"),
    [
        (specs.POOLFORMER, lambda x: F.group_norm(x, 1)),
        (None, lambda x: x),
        (over_channels, lambda x: F.batch_norm(x, None, None, training=True)),
    ],
)
def test_it_is_convolution_norm_relu(norm, apply):
    model = Convolutional(ConvolutionalConfig(channels=4, layers=2, norm=norm), seed=1)
    images = torch.randn(3, 8, 8)
    first, second = model.convolutions
    x = F.relu(apply(F.conv2d(images.unsqueeze(1), first.weight, first.bias, padding=1)))
    x = F.relu(apply(F.conv2d(x, second.weight, second.bias, stride=2, padding=1)))
    assert x.shape == (3, 8, 4, 4)
    torch.testing.assert_close(model(images), model.output(x.mean((-2, -1))))


def test_kernels_have_the_variance_of_their_docstring():
    model = Convolutional(ConvolutionalConfig(channels=32, layers=2, norm=None))
    # 18,432 draws: the variance is off by 1 %, one standard deviation.
    assert model.convolutions[1].weight.var().item() == pytest.approx(4 / (9 * 96), rel=0.05)


def test_nets_of_one_seed_share_their_weights_whatever_their_norms():
    first, second = (Convolutional(ConvolutionalConfig(norm=norm), seed=2) for norm in (None, over_channels))
    assert all(torch.equal(weight, dict(second.named_parameters())[path]) for path, weight in first.named_parameters())
