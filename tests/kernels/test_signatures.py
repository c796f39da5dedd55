"""Conventions fit in one number and come back; the C++ names the signatures that it was written for."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import SOURCE
from normkit.kernels import signatures
from normkit.kernels.signatures import BITS, SIGNATURES, Conventions, unpacked


@pytest.mark.slow
@given(st.tuples(*(st.integers(0, 2**bits - 1) for bits in BITS)))
def test_conventions_come_back(values):
    conventions = Conventions(*values)
    assert unpacked(conventions.packed()) == conventions


def test_the_first_is_in_the_lowest_bits():
    # As csrc/conventions.h reads them.
    assert Conventions(1, 2, 0, 1, 0, 0, 0, 0, 0, 3).packed() == 1 + (2 << 1) + (1 << 5) + (3 << 13)


def test_the_library_is_written_for_these_signatures():
    folder = SOURCE / "kernels" / "csrc"
    source = "".join((folder / name).read_text(encoding="utf-8") for name in ("operators.cpp", "counting.cpp"))
    (number,) = re.findall(r"signatures_version = (0x[0-9a-f]+);", source)
    assert int(number, 16) == signatures.version()
    for name in SIGNATURES:
        assert f'm.impl("{name}", ' in source


@pytest.mark.parametrize(
    ("name", "value"),
    [("SIGNATURES", {**SIGNATURES, "normalize_rows": "(Tensor x) -> Tensor"}), ("BITS", BITS._replace(cast=3))],
)
def test_any_change_has_another_number(monkeypatch, name, value):
    before = signatures.version()
    monkeypatch.setattr(signatures, name, value)
    assert signatures.version() != before
