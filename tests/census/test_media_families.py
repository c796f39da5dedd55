"""The page of models of images, of sound and of several inputs holds what is found now."""

from __future__ import annotations

import pytest

import media_families
import normkit as nk

# Whole models of transformers.
pytestmark = pytest.mark.slow

PAGE = media_families.PAGE.read_text(encoding="utf-8")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["ResNet", "Whisper", *media_families.families()])
def test_a_row_is_what_is_found_now(name: str) -> None:
    assert media_families.row(name, nk.inspect(*media_families.families()[name]())) in PAGE.splitlines()


def test_every_family_has_a_row_and_none_an_error_or_a_warning() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in rows] == [*media_families.families()]
    assert "**" not in "".join(rows)
