"""A run that is recorded: rows are those of torch's own module, inputs are made, and an overflow is placed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from normkit.comparison.onnx_file import OnnxModel
from normkit.errors import InputError
from onnx_models import gain, parsed, written

F32 = np.float32
IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]])


def decoder(*inputs: onnx.ValueInfoProto, width: int = 16) -> onnx.ModelProto:
    """Token ids -> embedding -> norm -> logits; further inputs are added up and go nowhere near the stream."""
    draw = np.random.default_rng(0)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["h"]),
        helper.make_node("LayerNormalization", ["h", "norm.weight", "norm.bias"], ["n"], epsilon=1e-3),
        helper.make_node("MatMul", ["n", "head"], ["logits"]),
    ]
    constants = {
        "table": draw.standard_normal((10, width)).astype(F32),
        "norm.weight": gain(width),
        "norm.bias": gain(width) - 1,
        "head": draw.standard_normal((width, 10)).astype(F32),
    }
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ("batch", "sequence"))
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)]
    for value in inputs:
        nodes.append(helper.make_node("Identity", [value.name], [f"{value.name} seen"]))
        outputs.append(helper.make_empty_tensor_value_info(f"{value.name} seen"))
    graph = helper.make_graph(nodes, "decoder", [ids, *inputs], outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def opened(tmp_path, model):
    return OnnxModel.open(written(tmp_path, model))


def test_rows_tokens_and_logits_are_those_of_the_run(tmp_path):
    model = opened(tmp_path, decoder())
    found = model.record({"input_ids": IDS})
    norm = found.norms["norm"]
    table, head = model.source.values("table"), model.source.values("head")
    assert torch.equal(norm.input, table[IDS.flatten()])
    expected = torch.nn.functional.layer_norm(norm.input, (16,), norm.weight, norm.bias, 1e-3)
    # Two implementations in float32, of outputs of about 1.
    assert torch.allclose(norm.output, expected, atol=1e-6)
    assert torch.allclose(found.outputs, expected @ head, atol=1e-5)
    assert found.tokens == ((1, 2, 3, 4, 5), (6, 7, 8, 9, 0))
    assert found.order == ("norm",)
    assert norm.calls == (10,)
    assert found.runtime.startswith("onnxruntime 1.")


def test_large_initializers_are_handed_over_from_the_file(tmp_path):
    """The table and the head are larger than what the skeleton holds."""
    model = opened(tmp_path, decoder(width=64))
    assert model.source.stored["table"].file is not None
    assert torch.equal(model.record(IDS).norms["norm"].input, model.source.values("table")[IDS.flatten()])


def test_padding_is_left_out_and_rows_are_bounded(tmp_path):
    model = opened(tmp_path, decoder())
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    found = model.record({"input_ids": IDS, "attention_mask": mask}, rows=5)
    assert found.tokens == ((1, 2, 3), (6, 7))
    assert len(found.norms["norm"].input) == 5


def test_inputs_are_made_as_the_graph_names_them(tmp_path):
    asked = [
        helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ("batch", "total")),
        helper.make_tensor_value_info("position_ids", TensorProto.INT32, ("batch", "sequence")),
        helper.make_tensor_value_info("token_type_ids", TensorProto.INT64, ("batch", "sequence")),
        helper.make_tensor_value_info("past_key_values.0.key", TensorProto.FLOAT, ("batch", 2, "past", 8)),
        helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, (1,)),
        helper.make_tensor_value_info("num_logits_to_keep", TensorProto.INT64, ()),
    ]
    assert len(opened(tmp_path, decoder(*asked)).record(IDS).norms["norm"].input) == 10


def test_an_input_that_cannot_be_told_is_asked_for(tmp_path):
    style = helper.make_tensor_value_info("style", TensorProto.FLOAT, (1, 256))
    model = opened(tmp_path, decoder(style))
    with pytest.raises(InputError, match=r"the graph asks for 'style' \(float32, 1x256\); give it by name"):
        model.record(IDS)
    assert model.record({"input_ids": IDS[:1], "style": torch.zeros(1, 256)}).tokens == ((1, 2, 3, 4, 5),)


def test_a_number_of_rows_below_one_is_refused(tmp_path):
    with pytest.raises(InputError, match="rows must be at least 1, got 0"):
        opened(tmp_path, decoder()).record(IDS, rows=0)


def test_a_fused_norm_has_its_residual(tmp_path):
    body = """
        r = Tanh(x)  y = com.microsoft.SkipLayerNormalization<epsilon=0.001>(x, r, norm.weight, norm.bias, before)
    """
    constants = {"norm.weight": gain(), "norm.bias": gain(), "before": gain() * 3}
    model = opened(tmp_path, parsed(body, constants, shape="batch,rows,16"))
    x = torch.randn(1, 5, 16)
    norm = model.record({"x": x}).norms["norm"]
    assert torch.allclose(norm.input, x[0] + torch.from_numpy(constants["before"]))
    assert torch.allclose(norm.residual, x[0].tanh(), atol=1e-6)
    expected = torch.nn.functional.layer_norm(norm.normalized, (16,), norm.weight, norm.bias, 1e-3)
    assert torch.allclose(norm.output, expected, atol=1e-6)


def test_calls_of_one_norm_follow_each_other(tmp_path):
    body = "a = LayerNormalization(x, norm.weight)  t = Tanh(a)  y = LayerNormalization(t, norm.weight)"
    found = opened(tmp_path, parsed(body, {"norm.weight": gain()})).record({"x": torch.randn(3, 16)})
    assert found.order == ("norm", "norm")
    assert found.norms["norm"].calls == (3, 3)


SQUARES = "q = Mul(x, x)  v = ReduceMean(q, axes)  e = Add(v, eps)  s = Sqrt(e)  n = Div(x, s)  y = Mul(n, norm.weight)"
SUM = "q = Mul(x, x)  v = ReduceSum(q, axes)  e = Add(v, eps)  s = Sqrt(e)  n = Div(x, s)  y = Mul(n, norm.weight)"
FLOAT16 = {
    "axes": np.array([-1]),
    "eps": np.float16(1e-3),
    "norm.weight": gain().astype(np.float16),
}


@pytest.mark.parametrize(
    ("body", "size", "expected"),
    [
        (SQUARES, 300.0, "Inf is born in the squares (Mul) of norm, in a row with elements up to 300"),
        (
            SUM,
            100.0,
            "Inf is born in the sum of squares (ReduceSum, if it adds up in the dtype of its input) of norm, in a",
        ),
        (SQUARES, 60.0, None),
    ],
)
def test_an_overflow_of_float16_is_placed(tmp_path, body, size, expected):
    """The Inf is absorbed by the division, and onnxruntime's CPU has none: it computes in float32."""
    model = opened(tmp_path, parsed(body, FLOAT16, dtype="float16"))
    found = model.overflow(model.record({"x": torch.full((2, 16), size, dtype=torch.float16)}))
    if expected is None:
        assert found is None
    else:
        assert found.startswith(expected)
        assert "it is absorbed, and zeros leave; the outputs recorded here are finite" in found


def test_an_overflow_before_the_norms_is_placed(tmp_path):
    model = opened(
        tmp_path,
        parsed(f"a = Mul(x, x)  {SQUARES.replace('(x', '(a').replace(', x)', ', a)')}", FLOAT16, dtype="float16"),
    )
    found = model.overflow(model.record({"x": torch.full((2, 16), 3e4, dtype=torch.float16)}))
    assert found == "Inf arrives at norm: it was born before the first norm"
