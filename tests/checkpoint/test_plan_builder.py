"""Decisions taken in any order, and the edits that they come to."""

from __future__ import annotations

import pytest
import torch

from normkit.checkpoint.plan import Constant, Gain, Product, Reference, Rows, Sum, TensorEdit, VectorEdit
from normkit.checkpoint.plan_builder import PlanBuilder
from normkit.checkpoint.reader import TensorInfo
from normkit.errors import InputError, ModelError
from planned_models import context_on, model_of

TENSORS = {
    "w": TensorInfo("BF16", (3, 4)),
    "b": TensorInfo("BF16", (4,)),
    "ids": TensorInfo("I64", (5,)),
    "table": TensorInfo("F32", (7, 4)),
}


def test_tensors_are_copied_and_decisions_on_one_matrix_or_bias_come_together():
    assert [edit.relation for edit in PlanBuilder(TENSORS, "same").edits()] == ["identical"] * 4
    builder = PlanBuilder(TENSORS, "same")
    builder.centre("w", 0)
    builder.multiply("w", 1, Gain(weight="g"))
    edit = TensorEdit(name="w", source="w", dtype="BF16", gain=Gain(weight="g"), gain_axis=1, centred_axis=0)
    assert builder.edits()[0] == edit
    assert edit.relation == "sum"
    builder = PlanBuilder(TENSORS, "same")
    assert not builder.is_changed("b")
    product = Product(matrix="w", in_axis=0, vector=Reference(name="g"))
    builder.zero("b", None)
    builder.add("b", product)
    builder.centre_bias("b")
    assert builder.is_changed("b")
    value = Sum(terms=(product,), is_centred=True, zeroed=Rows(blocks=1, tail=4))
    assert builder.edits()[1] == VectorEdit(name="b", source="b", size=4, dtype="BF16", value=value)


def test_created_tensors_come_last_and_can_be_edited():
    builder = PlanBuilder(TENSORS, "float32")
    builder.copy_table("head", "table")
    builder.multiply("head", 1, Gain(weight="g"))
    builder.create_constant("ones", 4, 1.0, "BF16")
    head, ones = builder.edits()[-2:]
    assert head == TensorEdit(name="head", source="table", dtype="F32", gain=Gain(weight="g"), gain_axis=1)
    assert ones == VectorEdit(name="ones", source=None, size=4, dtype="F32", value=Constant(value=1.0))
    assert [edit.dtype for edit in builder.edits()] == ["F32", "F32", "I64", "F32", "F32", "F32"]


def test_two_gains_on_one_matrix_are_a_fault_of_the_family():
    builder = PlanBuilder(TENSORS, "same")
    builder.multiply("w", 1, Gain(weight="g"))
    with pytest.raises(ModelError, match="w would be multiplied by two gains"):
        builder.multiply("w", 1, Gain(weight="h"))


def test_whole_numbers_and_matrices_for_biases_are_refused_by_name():
    builder = PlanBuilder(TENSORS, "same")
    with pytest.raises(ModelError, match="in ids, got I64"):
        builder.centre("ids", 0)
    with pytest.raises(ModelError, match=r"one axis in the bias w, got the shape \(3, 4\)"):
        builder.centre_bias("w")
    with pytest.raises(InputError, match="would round x, which is float64"):
        PlanBuilder({"x": TensorInfo("F64", (1,))}, "float32")


def test_a_vector_is_read_once_and_a_nan_is_refused_by_name():
    model = model_of("gpt2")
    context, _ = context_on(model, "gain")
    name = "transformer.h.0.ln_1.weight"
    first = context.vector(name)
    assert context.vector(name) is first
    with torch.no_grad():
        model.transformer.h[1].ln_1.bias[0] = float("nan")
    with pytest.raises(ModelError, match=r"transformer\.h\.1\.ln_1\.bias"):
        context.vector("transformer.h.1.ln_1.bias")
