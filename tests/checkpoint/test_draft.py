"""Decisions taken in any order, and the edits that they come to."""

from __future__ import annotations

import pytest

from normkit.checkpoint.draft import Draft
from normkit.checkpoint.header import TensorInfo
from normkit.checkpoint.plan import Constant, Gain, Product, Reference, Rows, Sum, TensorEdit, VectorEdit
from normkit.errors import InputError, ModelError

TENSORS = {
    "w": TensorInfo("BF16", (3, 4)),
    "b": TensorInfo("BF16", (4,)),
    "ids": TensorInfo("I64", (5,)),
    "table": TensorInfo("F32", (7, 4)),
}


def test_what_nobody_touches_is_copied():
    assert [edit.relation for edit in Draft(TENSORS, "same").edits()] == ["identical"] * 4


def test_decisions_on_one_matrix_come_together():
    draft = Draft(TENSORS, "same")
    draft.centre("w", 0)
    draft.multiply("w", 1, Gain(weight="g"))
    edit = TensorEdit(name="w", source="w", dtype="BF16", gain=Gain(weight="g"), gain_axis=1, centred_axis=0)
    assert draft.edits()[0] == edit
    assert edit.relation == "sum"


def test_decisions_on_one_bias_come_together():
    draft = Draft(TENSORS, "same")
    assert not draft.is_touched("b")
    product = Product(matrix="w", in_axis=0, vector=Reference(name="g"))
    draft.zero("b", None)
    draft.add("b", product)
    draft.centre_bias("b")
    assert draft.is_touched("b")
    value = Sum(terms=(product,), is_centred=True, zeroed=Rows(blocks=1, tail=4))
    assert draft.edits()[1] == VectorEdit(name="b", source="b", size=4, dtype="BF16", value=value)


def test_created_tensors_come_last_and_can_be_edited():
    draft = Draft(TENSORS, "float32")
    draft.copy_table("head", "table")
    draft.multiply("head", 1, Gain(weight="g"))
    draft.create_constant("ones", 4, 1.0, "BF16")
    head, ones = draft.edits()[-2:]
    assert head == TensorEdit(name="head", source="table", dtype="F32", gain=Gain(weight="g"), gain_axis=1)
    assert ones == VectorEdit(name="ones", source=None, size=4, dtype="F32", value=Constant(value=1.0))
    assert [edit.dtype for edit in draft.edits()] == ["F32", "F32", "I64", "F32", "F32", "F32"]


def test_two_gains_on_one_matrix_are_a_fault_of_the_family():
    draft = Draft(TENSORS, "same")
    draft.multiply("w", 1, Gain(weight="g"))
    with pytest.raises(ModelError, match="w would be multiplied by two gains"):
        draft.multiply("w", 1, Gain(weight="h"))


def test_whole_numbers_and_matrices_for_biases_are_refused_by_name():
    draft = Draft(TENSORS, "same")
    with pytest.raises(ModelError, match="in ids, got I64"):
        draft.centre("ids", 0)
    with pytest.raises(ModelError, match=r"one axis in the bias w, got the shape \(3, 4\)"):
        draft.centre_bias("w")
    with pytest.raises(InputError, match="would round x, which is float64"):
        Draft({"x": TensorInfo("F64", (1,))}, "float32")
