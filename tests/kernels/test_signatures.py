"""Conventions fit in one number and come back; the C++ names its signatures; which norms any kernel computes."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import PRESETS, SOURCE
from normkit import specs
from normkit.conventions.eps import PLACEMENTS
from normkit.kernels import signatures
from normkit.kernels.signatures import BITS, HADAMARD, SIGNATURES, TURNING, Conventions, unpacked


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


@pytest.mark.parametrize(("name", "fields"), [("Hadamard", HADAMARD), ("Turning", TURNING)])
def test_structures_have_the_fields_of_the_header_in_its_order(name, fields):
    source = (SOURCE / "kernels" / "csrc" / "kernels.h").read_text(encoding="utf-8")
    body = re.sub("//.*", "", re.findall(rf"struct {name} {{\n(.*?)\n}};", source, re.DOTALL)[0])
    found = []
    for declaration in body.split(";")[:-1]:
        kind, names = re.fullmatch(r"\s*(const void\*|const double\*|void\*|\w+) (.*)", declaration).groups()
        kind = {"Type": "int32", "int64_t": "int64", "double": "double", "Hadamard": "HADAMARD"}.get(kind, "pointer")
        found += [(each, kind) for each in names.split(", ")]
    assert tuple(found) == fields


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SIGNATURES", {**SIGNATURES, "normalize_rows": "(Tensor x) -> Tensor"}),
        ("BITS", BITS._replace(cast=3)),
        ("HADAMARD", HADAMARD[::-1]),
        ("TURNING", TURNING[::-1]),
    ],
)
def test_any_change_has_another_number(monkeypatch, name, value):
    before = signatures.version()
    monkeypatch.setattr(signatures, name, value)
    assert signatures.version() != before


TRAILING = "rows that are not the trailing axes"
LAYER = specs.TORCH_LAYER_NORM


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (LAYER, None),
        (LAYER.replace(axes=(-3, -2, -1)), None),
        (LAYER.replace(axes=tuple(range(-15, 0))), None),
        (LAYER.replace(axes=tuple(range(-16, 0))), "rows of more than 15 axes"),
        (specs.CONVNEXT, TRAILING),
        (specs.POOLFORMER, TRAILING),
        (LAYER.replace(centre_numerator=False), "centring of the numerator or of the statistics alone"),
        (LAYER.replace(centre_statistics=False), "centring of the numerator or of the statistics alone"),
        (specs.MUSE_SPARK_INPUT_SCALED, "a gain before the norm"),
        (specs.LLAMA.replace(output_dtype="float32"), "an output that is always float32"),
    ],
)
def test_which_conventions(spec, reason):
    assert signatures.supports_spec(spec) == reason


def test_a_place_of_eps_may_have_no_kernel(monkeypatch):
    monkeypatch.setattr(type(PLACEMENTS["clamp"]), "no_kernel", "eps as a lower bound")
    assert signatures.supports_spec(specs.SCALE_NORM) == "eps as a lower bound"


def test_most_presets_are_supported():
    assert sum(signatures.supports_spec(spec) is None for spec in PRESETS.values()) >= 20


def test_sizes():
    x, weight = torch.ones(2, 3, 4), torch.ones(4)
    assert signatures.supports_sizes(1, x, weight, weight) is None
    assert signatures.supports_sizes(1, x[:0], weight, None) is None
    assert signatures.supports_sizes(1, x[..., :0], None, None) == "empty rows"
    assert signatures.supports_sizes(2, x, torch.ones(3, 4), None) is None
    for wrong in (torch.ones(5), torch.ones(1), torch.ones(2, 3, 4)):
        assert signatures.supports_sizes(1, x, wrong, None) == "parameters that are not one number a feature"
        assert signatures.supports_sizes(1, x, None, wrong) == "parameters that are not one number a feature"
    assert signatures.supports_sizes(2, x, torch.ones(4, 3), None) == "parameters that are not one number a feature"
