from normkit.show.parts import Column, Fact, Section, Table, Verdict
from normkit.show.terminal import lines
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


def test_the_end_of_a_long_label_is_kept():
    assert shown(lines([Fact("a" * 40 + ".norm", "x")])) == "…" + "a" * 38 + ".norm  x\n"
