import re

import pytest

from normkit.show.parts import Column, Fact, Section, Table, Verdict
from screens import shown


def test_a_section_is_told_in_the_order_of_its_fields_and_its_parts_are_indented():
    table = Table.of("t", (Column("path", "norm"),), [["a"], ["b"]], note="Only two.")
    part = Section(title="part", notes=("x",), tables=(table,), facts=(Fact("eps", "1e-5"),))
    whole = Section(
        title="model",
        gist="2 norms",
        source="a text",
        verdict=Verdict("error", "different", "in eps."),
        notes=("It begins at a.",),
        sections=(part, Section(verdict=Verdict("note", "kept"), sections=(Section(title="b", notes=("why",)),))),
        facts=(Fact("plan", "as recorded", tone="good"),),
        remarks=("load it so",),
    )
    assert shown(whole).split("\n") == [
        *("model  2 norms", "a text", "", "x different  in eps.", "It begins at a."),
        *("", "part", "  x", "", "  norm", "  ────", "  a", "  b", "  Only two.", "", "  eps  1e-5"),
        *("", "i kept", "b", "    why", "", "+ plan  as recorded", "i load it so", ""),
    ]


NAME = "model.layers.*.post_feedforward_layernorm"
READERS = ("gate_proj, up_proj", "q_proj, k_proj, v_proj")
COLUMNS = (Column("path", "norm"), Column("count", "count", numeric=True), Column("gain", "gain"), Column("to", "into"))
TABLE = Table.of("t", COLUMNS, [[NAME, "1,800", "folded", READERS[0]], ["model.norm", "1", "-", READERS[1]]])
WIDE = Section(
    tables=(TABLE,),
    facts=(
        Fact(f"{NAME}.weight", f"differs by up to 0.873 at {NAME}, by 1.41e6 times", tone="error"),
        Fact("eps", "1e-5"),
    ),
    notes=(f"After it the median row differs by up to 0.873 at {NAME}, by 0.222 in the output.",),
)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120])
def test_names_are_broken_after_dots_and_numbers_never(width):
    """At 80 columns "model.layers.*.post_f" stood above "eedforward_layernorm", and at 40 values were left out."""
    text = shown(WIDE, width)
    rows = text.splitlines()
    assert max(map(len, rows)) <= width
    assert "…" not in text
    # Each part of a name between dots is whole, as often as it was given.
    parts = re.split(r"[^\w.*]+|(?<=\.)", text)
    assert [parts.count(part) for part in ("model.", "layers.", "*.")] == [5, 4, 4]
    assert text.count("post_feedforward_layernorm") == 4
    assert {"1,800", "0.873", "1.41e6", "0.222", "1e-5"} <= {word.rstrip(",") for word in text.split()}
    assert all(reader in text for reader in ("gate_proj", "up_proj", "q_proj", "k_proj", "v_proj"))


def test_a_table_that_is_too_wide_says_its_headings_beside_the_cells():
    assert shown(Section(tables=(TABLE,)), 40).splitlines() == [
        *("", "model.layers.*.", "post_feedforward_layernorm"),
        *("  count 1,800, gain folded, into", "  gate_proj, up_proj"),
        *("model.norm", "  count 1, into q_proj, k_proj, v_proj"),
    ]


def test_a_word_that_nothing_breaks_is_broken_where_the_line_ends():
    assert shown(Section(notes=("see /a/long_folder/of/some-name and " + "x" * 45,)), 20).splitlines() == [
        *("see /a/long_folder/", "of/some-name and", "x" * 20, "x" * 20, "x" * 5),
    ]
