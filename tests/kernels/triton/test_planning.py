"""Rows counted by one or two strides are torch's own rows, in torch's order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normkit.kernels.triton.planning import has_whole_rows, is_aligned, layout


@st.composite
def views(draw):
    """A tensor of 1 to 4 axes, permuted, sliced, expanded, and how many of its axes are a row."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    x = torch.arange(torch.Size([size * 2 for size in sizes]).numel()).view([size * 2 for size in sizes])
    for axis in range(x.dim()):
        step = draw(st.integers(1, 2))
        start = draw(st.integers(0, 1))
        x = x.narrow(axis, start, sizes[axis] * step if start + sizes[axis] * step <= x.shape[axis] else sizes[axis])
        x = x[(slice(None),) * axis + (slice(None, None, step),)] if step > 1 else x
    x = x.permute(draw(st.permutations(range(x.dim()))))
    if draw(st.booleans()):
        x = x[:1].expand(draw(st.integers(1, 3)), *x.shape[1:])
    return x, draw(st.integers(1, x.dim()))


def starts(x, axes):
    """Where rows begin, in torch's order, in elements."""
    leading = x[(..., *[0] * axes)]
    return leading.flatten().tolist()


@pytest.mark.slow
@given(views())
def test_rows_lie_where_torch_has_them(view):
    x, axes = view
    found = layout([x], axes)
    distinct = [size for size in x.shape[: x.dim() - axes] if size != 1]
    if found is None:
        assert len(distinct) > 2
        return
    assert found.rows == x[(..., *[0] * axes)].numel()
    ((outer, own),) = found.strides
    first = int(x[(0,) * x.dim()])
    if not found.is_nested:
        outer = own
    offsets = [first + (row // found.inner) * outer + (row % found.inner) * own for row in range(found.rows)]
    assert offsets == starts(x, axes)
    assert found.is_nested == (found.inner != 1)


@given(views())
def test_a_row_in_one_piece_is_torchs_row(view):
    x, axes = view
    row = x[(0,) * (x.dim() - axes)]
    assert has_whole_rows(x, axes) == row.is_contiguous()


@pytest.mark.slow
@given(views(), st.sampled_from([1, 2, 4, 8, 16]))
def test_rows_are_aligned_where_each_begins_at_a_multiple(view, aligned):
    x, axes = view
    first = int(x[(0,) * x.dim()])
    if is_aligned(x, axes, aligned):
        assert all((start - first) % aligned == 0 for start in starts(x, axes))
    elif x.dim() - axes == 1:
        assert any((start - first) % aligned for start in starts(x, axes))


def test_two_tensors_share_what_both_can_be_counted_by():
    x, y = torch.zeros(3, 4, 8), torch.zeros(4, 3, 8).transpose(0, 1)
    assert layout([x], 1).strides == ((0, 8),)
    assert layout([x, x.clone()], 1).inner == 1
    found = layout([x, y], 1)
    assert (found.rows, found.inner, found.strides) == (12, 4, ((32, 8), (8, 24)))


def test_three_strides_are_too_many():
    x = torch.zeros(2, 3, 4, 8)
    assert layout([x.permute(2, 1, 0, 3)], 1) is None
    assert layout([x, x.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)], 1) is None
    assert layout([x[:, ::2]], 1) is None
    assert layout([x[:, :2]], 1).is_nested


def test_no_rows_and_one_row():
    assert layout([torch.zeros(0, 8)], 1).rows == 0
    assert layout([torch.zeros(8)], 1).rows == 1
    assert layout([torch.zeros(1, 1, 8)], 1) == layout([torch.zeros(8)], 1)
