"""What a row is: rows come back in their layout, and means are taken out where they should be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from helpers import assert_close
from normkit import NormSpec, reference
from normkit.conventions.rows import CENTRINGS, CHANNELS_LAST, Rows


@pytest.mark.parametrize(
    ("rows", "shape"),
    [
        (Rows(), (2, 3, 1, 4)),
        (Rows(groups=2), (2, 3, 2, 2)),
        (Rows((-2, -1)), (2, 1, 12)),
        (Rows((1,)), (2, 4, 1, 3)),
        (Rows("all_but_batch", 3), (2, 3, 4)),
        (Rows(CHANNELS_LAST), (2, 1, 12)),
        (Rows(CHANNELS_LAST, 2), (2, 2, 6)),
        (Rows(CHANNELS_LAST, 4), (2, 4, 3)),
    ],
)
def test_rows_come_back_in_their_layout(rows, shape):
    x = torch.arange(24.0).reshape(2, 3, 4)
    assert rows.split(x).shape == shape
    assert rows.joined(rows.split(x), x).equal(x)


def test_a_parameter_lies_along_the_channels_of_some():
    parameter, x = torch.ones(3), torch.ones(2, 3, 4, 5)
    assert Rows((1,)).parameter_dim == Rows("all_but_batch").parameter_dim == 1
    assert Rows((-2, -1)).parameter_dim == 2
    assert Rows((1,)).aligned(parameter, x).shape == Rows("all_but_batch").aligned(parameter, x).shape == (3, 1, 1)
    assert Rows().aligned(parameter, x) is parameter
    assert Rows(CHANNELS_LAST).parameter_dim == 1
    assert Rows(CHANNELS_LAST).aligned(torch.ones(1, 1, 5), x).shape == (5,)


@pytest.mark.parametrize(
    ("rows", "sizes"), [(Rows(), (6,)), (Rows((-2, -1)), (5, 6)), (Rows((1,)), (4,)), (Rows(CHANNELS_LAST, 2), (6,))]
)
def test_gain_and_bias_have_the_sizes_of_their_axes(rows, sizes):
    assert rows.parameter_sizes((3, 4, 5, 6)) == sizes


def test_channels_last_is_told_in_words_and_by_the_kernels():
    rows = Rows(CHANNELS_LAST, 4)
    assert rows.words == "a whole sample, channels last, in 4 groups"
    assert rows.labels == ("channels last", "4 groups")
    assert rows.are_samples
    assert (rows.channel_axis, Rows("all_but_batch").channel_axis, Rows().channel_axis) == (-1, 1, None)
    assert rows.no_kernel == "rows that are not the trailing axes"


@given(
    sizes=st.lists(st.integers(1, 4), max_size=3),
    groups=st.integers(1, 3),
    width=st.integers(1, 3),
    samples=st.integers(1, 3),
)
def test_channels_last_is_channels_first_moved(sizes, groups, width, samples):
    x = torch.arange(float(samples * math.prod(sizes) * groups * width)).reshape(samples, *sizes, groups * width)
    first, last = Rows("all_but_batch", groups), Rows(CHANNELS_LAST, groups)
    assert last.joined(last.split(x), x).equal(x)
    assert last.numbers(x).equal(first.numbers(x.movedim(-1, 1)).movedim(1, -1))


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    groups=st.sampled_from([1, 2, 3, 12]),
    seed=st.integers(0, 99),
)
def test_groups_of_channels_last_are_group_norm_of_moved_channels(sizes, groups, seed):
    # 12 groups of 12 channels are InstanceNorm, which needs more than one place.
    sizes = [*sizes, 4]
    spec = NormSpec(axes=CHANNELS_LAST, groups=groups)
    generator = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, 2, *sizes, 12, generator=generator, dtype=torch.float64)
    weight, bias = torch.randn(2, 12, generator=generator, dtype=torch.float64)
    inputs = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    expected = F.group_norm(inputs[0].movedim(-1, 1), groups, *inputs[1:]).movedim(1, -1)
    assert_close(reference.forward(x, spec, weight, bias), expected)
    theirs = torch.autograd.grad(expected, inputs, dy)
    ours = reference.backward(dy, x, spec, weight, bias)
    # In a short row the parts of dx, of the size of dy * weight / s, nearly cancel.
    scale = reference.statistics(reference.to_rows(x, spec), spec, spec.eps).scale
    assert_close(ours.x, theirs[0], units=64, terms=(dy * weight).abs().max() / scale.min())
    assert_close(ours.weight, theirs[1], units=64)
    assert_close(ours.bias, theirs[2], units=64)


@pytest.mark.parametrize("centring", CENTRINGS.values())
def test_the_mean_is_taken_out_where_it_should_be(centring):
    x = torch.tensor([1.0, 2.0, 6.0]) + 1e4
    numerator, deviation = centring.split(x)
    assert (float(numerator.mean()) == 0, float(deviation.mean()) == 0) == (centring.numerator, centring.statistics)
    assert centring.is_half == (centring.numerator != centring.statistics)
    assert centring.is_full == (centring.numerator and centring.statistics)
    assert len({each.words for each in CENTRINGS.values()}) == 4
