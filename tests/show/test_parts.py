import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normkit.show.parts import Fact, printable


@pytest.mark.slow
@given(st.text())
def test_printed_text_moves_no_cursor_and_can_be_written(text):
    shown = printable(text)
    assert all(unicodedata.category(character)[0] != "C" for character in shown)
    shown.encode()


def test_what_is_not_to_be_seen_becomes_an_escape():
    assert printable("a\x1b[31m\n\u202eß\ud800 é") == "a\\x1b[31m\\n\\u202eß\\ud800 é"


def test_every_string_of_a_part_is_made_printable():
    assert printable((Fact("\x07", "ok"), 3)) == (Fact("\\x07", "ok"), 3)
