import itertools

import pytest

from normkit.errors import InputError
from normkit.show import theme
from normkit.show.axes import block_axis, figure_of, log_axis, new_axes, step_axis


def boxes(ax):
    """Left and right edge of every label under the axis, as drawn."""
    figure_of(ax).draw_without_rendering()
    labels = [label for label in ax.get_xticklabels() if label.get_text()]
    return sorted((label.get_window_extent().x0, label.get_window_extent().x1, label.get_text()) for label in labels)


def pre_norm(blocks):
    """The blocks of a model with two norms a block and one before and after."""
    inner = [block for block in range(blocks) for _ in range(2)]
    return [None, *inner, None], ["emb", *("" for _ in inner), "final"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("blocks", [1, 2, 6, 12, 14, 15, 28, 29, 48, 61, 100, 130])
def test_labels_never_touch(blocks):
    inner, outside = pre_norm(blocks)
    with theme.style():
        ax = new_axes()
        block_axis(ax, inner, "norms", outside)
        edges = boxes(ax)
    names = [name for _, _, name in edges]
    assert {"emb", "0", "final"} - set(names) == ({"0"} if blocks > 14 else set())
    gaps = [right[0] - left[1] for left, right in itertools.pairwise(edges)]
    assert min(gaps, default=9) > 2, names


def test_places_without_blocks_are_counted():
    with theme.style():
        ax = new_axes()
        block_axis(ax, [None] * 40, "norms")
    assert [label.get_text() for label in ax.get_xticklabels()] == [str(place) for place in range(0, 40, 5)]
    assert ax.get_xlabel() == "norms in forward order"


def test_a_log_axis_writes_plain_numbers_and_survives_zeros():
    with theme.style():
        ax = new_axes()
        log_axis(ax, [0.0, 0.02, 300.0, float("nan"), float("inf")])
        figure_of(ax).draw_without_rendering()
    low, high = ax.get_ylim()
    shown = [
        label.get_text()
        for label, tick in zip(ax.get_yticklabels(), ax.get_yticks(), strict=True)
        if low <= tick <= high
    ]
    assert shown == ["0.1", "1", "10", "100"]


def test_axes_of_no_figure_are_refused():
    with theme.style():
        ax = new_axes()
        ax.remove()
    with pytest.raises(InputError, match="belong to no figure"):
        figure_of(ax)


@pytest.mark.parametrize(("last", "expected"), [(0, ["0"]), (2, ["0", "1", "2"]), (40_000, ["0", "8,000"])])
def test_steps_are_whole_numbers(last, expected):
    with theme.style():
        ax = new_axes()
        step_axis(ax, 0, last)
        figure_of(ax).draw_without_rendering()
    low, high = ax.get_xlim()
    shown = [t.get_text() for t in ax.get_xticklabels() if low <= t.get_position()[0] <= high]
    assert shown[: len(expected)] == expected
    assert all(text.replace(",", "").isdigit() for text in shown)
    assert ax.get_xlabel() == "optimizer step"
