"""Rows of neighbouring blocks as one, told from those that only look alike."""

import pytest

from normkit.show.grouping import grouped, grouped_paths, merged, pattern
from normkit.show.parts import Cell, Column, Table
from normkit.text import spread

COLUMNS = (
    Column("path", "norm"),
    Column("role", "role"),
    Column("rms", "rms", spread),
)


def table(*rows):
    cells = tuple((Cell(text=path), Cell(text=role), COLUMNS[2].cell(numbers)) for path, role, numbers in rows)
    return Table(title="t", columns=COLUMNS, rows=cells, empty="e")


def told(part):
    return [tuple(cell.text for cell in row) for row in part.groups]


def test_without_blocks_paths_that_differ_in_numbers_alone_share_a_row():
    part = table(("a.0.b.1.n", "x", [1.0]), ("a.1.b.0.n", "x", [3.0]), ("a.0.n", "x", [2.0]), ("a.2.b.0.n", "y", [2.0]))
    assert told(grouped(part)) == [
        ("a.{0-1}.b.{0-1}.n", "x", "1.00 to 3.00"),
        ("a.0.n", "x", "2.00"),
        ("a.2.b.0.n", "y", "2.00"),
    ]


def test_alike_rows_share_one_and_all_their_numbers_count():
    part = table(
        ("h.0.a", "pre", [1.0, 9.0]), ("h.0.b", "post", [2.0]), ("h.1.a", "pre", [0.5]), ("h.1.b", "post", [2.0])
    )
    assert told(grouped(part, ["h.0", "h.1"])) == [("h.{0-1}.a", "pre", "0.500 to 9.00"), ("h.{0-1}.b", "post", "2.00")]


def test_rows_whose_words_differ_do_not():
    part = table(("h.0.a", "pre", [1.0]), ("h.1.a", "post", [1.0]), ("h.2.a", "pre", [3.0]))
    assert [row[0] for row in told(grouped(part, ["h.0", "h.1", "h.2"]))] == ["h.{0,2}.a", "h.1.a"]


def test_a_row_without_numbers_adds_none():
    part = table(("h.0.a", "pre", []), ("h.1.a", "pre", [3.0]), ("h.2.b", "pre", []), ("h.3.b", "pre", []))
    assert told(grouped(part, [f"h.{block}" for block in range(4)])) == [
        ("h.{0-1}.a", "pre", "3.00"), ("h.{2-3}.b", "pre", "none"),
    ]  # fmt: skip


def test_nothing_is_grouped_without_blocks_or_where_no_row_is_spared():
    part = table(("h.0.a", "pre", [1.0]), ("h.1.a", "pre", [2.0]))
    assert grouped(part, []).groups == ()
    assert grouped(table(("h.0.a", "pre", [1.0])), ["h.0"]).groups == ()


@pytest.mark.parametrize(
    ("paths", "blocks", "said"),
    [
        (["e.h.0.n", "d.h.1.n"], ["e.h.0", "d.h.1"], ("e.h.0.n", "d.h.1.n")),
        (["s.0.b.0.n", "s.0.b.1.n", "s.1.b.0.n"], ["s.0.b.0", "s.0.b.1", "s.1.b.0"], ("s.0.b.{0-1}.n", "s.1.b.0.n")),
        (["h.10.n", "h.1.n"], ["h.1", "h.10"], ("h.{1,10}.n",)),
        (["h.0:rms_norm", "h.1:rms_norm"], ["h.0", "h.1"], ("h.{0-1}:rms_norm",)),
        (["h.0", "h.1", "h.2"], ["h.0", "h.1", "h.2"], ("h.{0-2}",)),
        (["h.01.n"], ["h.0"], ("h.01.n",)),
    ],
)
def test_the_number_is_that_of_the_block(paths, blocks, said):
    assert grouped_paths(paths, blocks) == said


def test_alike_reasons_are_told_once_and_the_others_as_they_are():
    said = [("left", f"h.{i}.ln", f"h.{i}.q reads sum.{i}, and more") for i in range(12)]
    said += [("kept", f"h.{i}.ln", "eps is 0.5 there") for i in range(2)]
    assert merged([*said, ("left", "h.7.q", "tied")]) == [
        ("left", "h.*.ln (12)", "h.*.q reads sum.*, and more"),
        ("kept", "h.*.ln (2)", "eps is 0.5 there"),
        ("left", "h.7.q", "tied"),
    ]


def test_patterns() -> None:
    assert pattern("h.0.attn.1.norm2") == "h.*.attn.*.norm2"
