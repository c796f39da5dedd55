import pytest

from normkit.geometry.invariance import invariances
from normkit.plots import theme
from normkit.plots.invariance import invariance_marks
from normkit.text import significant


@pytest.fixture(scope="module")
def table():
    return invariances()


def test_each_cell_is_marked_and_numbered_where_it_stands(table):
    (ax,) = invariance_marks(table).figure.axes
    marks = {
        (round(float(line.get_xdata()[0]) + 0.22), int(line.get_ydata()[0])): line.get_markerfacecolor()
        for line in ax.get_lines()
        if line.get_marker() == "o" and line.get_ydata()[0] == int(line.get_ydata()[0])
    }
    words = {(text.get_position()[0], text.get_position()[1]): text.get_text() for text in ax.texts}
    assert len(marks) == len(table.rows) * len(table.norms) == 24
    for place, row in enumerate(table.rows):
        for column, cell in enumerate(row.cells):
            assert (marks[column, place] != "none") is cell.is_invariant
            assert words[column - 0.05, place] == significant(cell.error)


def test_formulas_are_set_as_a_reader_writes_them(table):
    words = [text.get_text() for text in invariance_marks(table).figure.axes[0].texts]
    assert "W′ = W + 1 vᵀ" in words
    assert not [word for word in words if "^" in word or "_" in word]


def test_the_description_lists_what_each_norm_ignores(table):
    words = invariance_marks(table).description
    assert "RMSNorm ignores weight matrix re-scaling, dataset re-scaling, single case re-scaling." in words


def test_given_axes(table):
    with theme.style("dark"):
        ax = theme.new_axes()
        drawing = invariance_marks(table, ax)
    assert drawing.figure is ax.figure
    assert drawing.scheme == "dark"
