"""A scale and a shift moved into every kind of map, against the two run one after the other in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from normkit.checkpoint.channel_maps import affine, against_shift, lost, multiplied, values_of

CONVOLUTIONS = {1: (nn.Conv1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.BatchNorm2d), 3: (nn.Conv3d, nn.BatchNorm3d)}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
# (kernel, stride, padding, dilation, groups); the last is depthwise.
SHAPES = [(3, 1, 0, 1, 1), (3, 2, 1, 1, 2), (2, 3, 0, 2, 1), (1, 1, 0, 1, 3), (3, 1, 2, 2, 6)]
# A few roundings of sums of at most 6 * 27 products near 1, magnified by a scale of at most 30.
CLOSE = 1e-12


def planted(norm, seed=0):
    """The norm in float64 and evaluation mode, with random running statistics, a tiny variance and a negative gain."""
    generator = torch.Generator().manual_seed(seed)
    norm = norm.double().eval()
    size = norm.num_features
    norm.running_mean.copy_(torch.randn(size, generator=generator))
    norm.running_var.copy_(torch.rand(size, generator=generator) * 4)
    norm.running_var[0] = 1e-3
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.randn(size, generator=generator))
            norm.bias.copy_(torch.randn(size, generator=generator))
    return norm


def folded(layer, norm, *, is_after):
    """A copy of the layer that stands for both."""
    new = multiplied(layer, values_of(layer), affine(norm), is_after=is_after)
    layer.weight = nn.Parameter(new.weight)
    layer.bias = nn.Parameter(new.bias)
    return layer


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_affine", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("axes", "is_transposed"), list(itertools.product((1, 2, 3), (False, True))))
def test_a_folded_map_is_the_map_and_the_norm(axes, is_transposed, shape, is_affine, bias, is_after):
    torch.manual_seed(1)
    kernel, stride, padding, dilation, groups = shape
    convolution, batch_norm = CONVOLUTIONS[axes]
    made = TRANSPOSED[axes] if is_transposed else convolution
    layer = made(6, 12, kernel, stride, padding, dilation=dilation, groups=groups, bias=bias).double()
    norm = planted(batch_norm(6 if is_after else 12, eps=1e-3, affine=is_affine))
    if is_after and against_shift(layer):
        # Its scale alone may still go.
        with torch.no_grad():
            norm.running_mean.zero_()
            if is_affine:
                norm.bias.zero_()
    x = torch.randn(2, 6, *[7] * axes, dtype=torch.float64)
    expected = layer(norm(x)) if is_after else norm(layer(x))
    assert (folded(layer, norm, is_after=is_after)(x) - expected).abs().max() <= CLOSE


@pytest.mark.parametrize("is_after", [False, True])
def test_a_linear_map(is_after):
    layer, x = nn.Linear(5, 7).double(), torch.randn(4, 5, dtype=torch.float64)
    norm = planted(nn.BatchNorm1d(5 if is_after else 7))
    expected = layer(norm(x)) if is_after else norm(layer(x))
    assert (folded(layer, norm, is_after=is_after)(x) - expected).abs().max() <= CLOSE


LAYERS = [
    nn.Conv2d(4, 4, 3),
    nn.Conv2d(4, 4, 3, padding=1),
    nn.Conv2d(4, 4, 1, padding=1),
    nn.Conv2d(4, 4, (1, 3), padding=(0, 1)),
    nn.Conv2d(4, 4, (1, 3), padding=(1, 0)),
    nn.Conv2d(4, 4, 3, padding="same"),
    nn.Conv2d(4, 4, 1, padding="same"),
    nn.Conv2d(4, 4, 3, padding="valid"),
    nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    nn.Conv2d(4, 4, 3, padding=2, padding_mode="circular", groups=2),
    nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate", stride=2),
    nn.ConvTranspose2d(4, 4, 1),
    nn.ConvTranspose2d(4, 4, 1, padding=1),
    nn.ConvTranspose2d(4, 4, 1, stride=2),
    nn.ConvTranspose2d(4, 4, 2, stride=2),
    nn.ConvTranspose2d(4, 4, 3),
    nn.ConvTranspose2d(4, 4, 1, dilation=2, output_padding=1),
    nn.ConvTranspose2d(4, 4, 1, groups=2),
]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_shift_is_refused_exactly_where_it_is_not_one_number_for_each_channel(layer):
    layer, norm = layer.double(), planted(nn.BatchNorm2d(4))
    by, x = affine(norm), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    # What the shift adds to each output, with the layer linear.
    added = layer(x + by.shift.view(1, -1, 1, 1)) - layer(x)
    is_constant = bool((added - added[:1, :, :1, :1]).abs().max() <= CLOSE)
    assert (against_shift(layer) is None) == is_constant


def test_values_that_a_narrow_dtype_loses_are_told():
    layer, norm = nn.Conv1d(2, 2, 1).half(), planted(nn.BatchNorm1d(2))
    layer.weight.data.fill_(1000.0)
    norm.weight.data.fill_(1.0)
    new = multiplied(layer, values_of(layer), affine(norm), is_after=False)
    assert lost(layer, new) is None
    norm.running_var.fill_(1e-5)
    assert "do not fit into float16" in lost(layer, multiplied(layer, values_of(layer), affine(norm), is_after=False))
    norm.weight.data.fill_(1e-12)
    assert "below the range of float16" in lost(
        layer, multiplied(layer, values_of(layer), affine(norm), is_after=False)
    )
    assert lost(layer.float(), multiplied(layer, values_of(layer), affine(norm), is_after=False)) is None
