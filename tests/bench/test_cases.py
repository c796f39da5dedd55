"""Cases, their tensors, and shapes as text."""

from __future__ import annotations

import pytest
import torch

from normkit.bench.cases import DTYPES, OPS, PASSES, SHAPES, Case, arguments, grid, parse_shape
from normkit.errors import InputError


def test_the_grid_is_every_combination_once():
    cases = grid(SHAPES, DTYPES, OPS, PASSES)
    assert len(set(cases)) == len(cases) == 7 * 2 * 4 * 4


@pytest.mark.parametrize("text", ["", "64", "64x", "x64", "0x4", "4x0", "-1x4", "4x4x4", "4 x 4", "axb", "²x4"])
def test_a_bad_shape(text):
    with pytest.raises(InputError, match="a shape is rows x features, such as 64x4096, got"):
        parse_shape(text)


@pytest.mark.parametrize(
    "values",
    [
        ("softmax", (2, 3), "float32", "forward"),
        ("rms_norm", (2, 3), "float16", "forward"),
        ("rms_norm", (2, 3), "float32", "sideways"),
        ("rms_norm", (0, 3), "float32", "forward"),
    ],
)
def test_what_is_not_measured_is_refused(values):
    with pytest.raises(InputError):
        Case(*values)


def test_the_tensors_of_a_case():
    plain = arguments(Case("rms_norm", (2, 3), "bfloat16", "forward"))
    assert (plain.bias, plain.residual, len(plain.leaves), len(plain.gradients)) == (None, None, 2, 1)
    assert not plain.x.requires_grad
    adding = arguments(Case("add_layer_norm", (2, 3), "float32", "backward"))
    assert len(adding.leaves) == 4
    assert len(adding.gradients) == 2
    assert all(leaf.is_leaf and leaf.requires_grad for leaf in adding.leaves)
    assert not torch.equal(adding.x, adding.residual)


def test_copies_bytes_and_names_of_what_is_checked():
    assert Case("rms_norm", (2, 3), "float32", "forward+backward").copies == 2.5
    assert Case("add_rms_norm", (2, 3), "float32", "forward-out").copies == 2.0
    assert Case("rms_norm", (2, 3), "float32", "forward-out").answers == ("y",)
    case = Case("add_layer_norm", (2, 3), "float32", "backward")
    assert case.answers == ("y", "new residual", "dx", "dresidual", "dweight", "dbias")
    # A forward pass moves the bytes of one copy.
    case = Case("rms_norm", (2, 3), "bfloat16", "forward")
    assert (case.bytes, case.moved_bytes) == (12, 24)
    assert Case("rms_norm", (2, 3), "bfloat16", "backward").moved_bytes == 36


@pytest.mark.parametrize(("op", "direction"), [(op, direction) for op in OPS for direction in PASSES])
def test_the_answers_that_have_the_shape_of_x_come_first(op, direction):
    case = Case(op, (2, 3), "float32", direction)
    gains = ("dweight", "dbias")
    assert [name in gains for name in case.answers] == [place >= case.sheets for place in range(len(case.answers))]
