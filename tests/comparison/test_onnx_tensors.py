from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from normkit.comparison.onnx_file import OnnxModel
from normkit.errors import ModelError
from onnx_models import gain, graph_of, layer_norm, written


@pytest.fixture
def external(tmp_path):
    """A norm whose gain lies in a file beside it, from byte 8."""

    def make(**said: str) -> OnnxModel:
        (tmp_path / "model.onnx_data").write_bytes(b"before!!" + gain().tobytes())
        model = layer_norm()
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in {"location": "model.onnx_data", "offset": "8", "length": "64", **said}.items():
            tensor.external_data.add(key=key, value=value)
        return OnnxModel.open(written(tmp_path, model))

    return make


@pytest.mark.parametrize(
    "dtype",
    [*("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")],
)
@pytest.mark.parametrize("raw", [True, False])
def test_values_of_every_dtype(tmp_path, dtype, raw):
    expected = (torch.randn(5, 3) * 5).to(getattr(torch, dtype))
    code = getattr(TensorProto, {"float32": "FLOAT", "float64": "DOUBLE"}.get(dtype, dtype.upper()))
    if raw:
        content = expected.view(torch.uint8).numpy().tobytes()
        tensor = helper.make_tensor("w", code, (5, 3), content, raw=True)
    else:
        tensor = helper.make_tensor("w", code, (5, 3), expected.double().flatten().tolist())
    model = layer_norm()
    model.graph.initializer.append(tensor)
    source = OnnxModel.open(written(tmp_path, model)).weights.source
    assert source.tensors["w"].shape == (5, 3)
    assert torch.equal(source.rows("w", 1, 4), expected[1:4])


def test_values_beside_the_model(external):
    source = external().weights.source
    assert torch.equal(source.values("norm.weight"), torch.from_numpy(gain()))


@pytest.mark.parametrize("location", ["/etc/passwd", "../data", "a/../../data", "", "a\\..\\data", "a\0b"])
def test_data_outside_the_folder_are_not_opened(external, location):
    with pytest.raises(ModelError, match=r"in its own folder, 'norm.weight' is said to lie in .*; nothing was opened"):
        external(location=location)


def test_a_link_out_of_the_folder_is_not_followed(external, tmp_path, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "secret"
    outside.write_bytes(bytes(100))
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(ModelError, match="'link' is a link out of it; copy it there"):
        external(location="link")


def test_links_of_a_model_and_its_data_into_one_folder(external, tmp_path, tmp_path_factory):
    external()
    blobs = tmp_path_factory.mktemp("blobs")
    for name in ("model.onnx", "model.onnx_data"):
        (tmp_path / name).rename(blobs / name[::-1])
        (tmp_path / name).symlink_to(blobs / name[::-1])
    source = OnnxModel.open(tmp_path / "model.onnx").weights.source
    assert torch.equal(source.values("norm.weight"), torch.from_numpy(gain()))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"offset": "9"}, "'norm.weight' ends at byte 73 of 'model.onnx_data', which has 72"),
        ({"offset": "-1"}, "has the offset '-1' and length '64'"),
        ({"offset": "9" * 30}, "has the offset '9999"),
        ({"length": "60"}, "needs 64 bytes, 'model.onnx_data' is said to hold 60"),
        ({"location": "absent"}, "keeps its weights in 'absent', which is not there; put that file beside it"),
        ({"location": "."}, "expected a file with the data of .*, '.' is none; nothing was opened"),
    ],
)
def test_external_data_that_lie(external, said, reason):
    with pytest.raises(ModelError, match=reason):
        external(**said)


def damaged(change) -> onnx.ModelProto:
    model = layer_norm()
    change(model.graph.initializer[0])
    return model


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensor: setattr(tensor, "name", "norm.bias"), "it has two tensors named 'norm.bias'"),
        (lambda tensor: setattr(tensor, "name", "a\nb"), "is no name for a tensor"),
        (lambda tensor: setattr(tensor, "data_type", 99), "has the dtype 99, which this version of onnx"),
        (lambda tensor: setattr(tensor, "data_type", 10), r"FLOAT16 of shape \(16,\), 32 bytes, and has values of 64"),
        (lambda tensor: tensor.dims.__setitem__(0, -4), r"has the shape \(-4,\)"),
        (lambda tensor: tensor.dims.extend([2**40, 2**20]), "has the shape"),
        (lambda tensor: tensor.dims.extend([0, 2**60]), "has the shape"),
        (lambda tensor: tensor.dims.extend([2**30]), "and has values of 64"),
        (lambda tensor: tensor.dims.extend([1] * 70), "has the shape"),
        (lambda tensor: tensor.ClearField("raw_data"), "64 bytes, and has values of 0"),
    ],
)
def test_initializers_that_lie(tmp_path, change, reason):
    with pytest.raises(ModelError, match=reason):
        OnnxModel.open(written(tmp_path, damaged(change)))


def test_large_values_of_another_length_than_the_shape(tmp_path):
    model = graph_of(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], {"w": np.zeros((64, 64), np.float32)}, shape=("rows", 64)
    )
    model.graph.initializer[0].dims[0] = 63
    with pytest.raises(ModelError, match=r"FLOAT of shape \(63, 64\), 16128 bytes, and has values of 16384"):
        OnnxModel.open(written(tmp_path, model))


def quantized(values: np.ndarray, scale: np.ndarray, zero_point: np.ndarray, **how: int) -> onnx.ModelProto:
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["h"], **how),
        helper.make_node("MatMul", ["x", "h"], ["y"]),
    ]
    constants = {"w": values, "scale": scale.astype(np.float32), "zero": zero_point.astype(values.dtype)}
    return graph_of(nodes, constants, opsets={"": 21})


@pytest.mark.parametrize(
    ("scale", "zero_point", "how"),
    [
        (np.array(0.1), np.array(3), {}),
        (np.linspace(0.1, 1, 6), np.arange(6), {"axis": 1}),
        (np.linspace(0.1, 1, 16), np.arange(16), {"axis": 0}),
        (np.linspace(0.1, 1, 24).reshape(4, 6), np.arange(24).reshape(4, 6), {"axis": 0, "block_size": 4}),
        (np.linspace(0.1, 1, 32).reshape(16, 2), np.zeros((16, 2)), {"axis": 1, "block_size": 3}),
    ],
)
def test_quantized_values_are_what_onnx_makes_of_them(tmp_path, scale, zero_point, how):
    values = np.arange(96, dtype=np.uint8).reshape(16, 6)
    model = quantized(values, scale, zero_point, **how)
    node = onnx.helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["y"], **how)
    names = [helper.make_tensor_value_info("y", 1, None)]
    alone = helper.make_model(
        helper.make_graph([node], "g", [], names, model.graph.initializer), opset_imports=[helper.make_opsetid("", 21)]
    )
    expected = torch.from_numpy(ReferenceEvaluator(alone).run(None, {})[0])
    source = OnnxModel.open(written(tmp_path, model)).weights.source
    assert source.tensors["w"].dtype == "F32"
    assert source.tensors["w"].encoding == "UINT8"
    assert torch.equal(source.values("w"), expected)
    assert torch.equal(source.rows("w", 3, 9), expected[3:9])


def test_a_quantized_gain(tmp_path):
    """A vector of int8 with one scale, as static quantization writes gains."""
    nodes = [
        helper.make_node("DequantizeLinear", ["norm.weight", "scale", "zero"], ["gain"]),
        helper.make_node("LayerNormalization", ["x", "gain"], ["y"]),
    ]
    constants = {
        "norm.weight": np.arange(16, dtype=np.int8),
        "scale": np.float32(0.25),
        "zero": np.int8(-2),
    }
    source = OnnxModel.open(written(tmp_path, graph_of(nodes, constants))).weights.source
    assert torch.equal(source.values("norm.weight"), (torch.arange(16.0) + 2) / 4)


def test_weights_of_a_product_of_integers(tmp_path):
    """As dynamic quantization writes it: the scale follows the product."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "x_scale", "x_zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "x_zero", "w_zero"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=1),
        helper.make_node("Mul", ["x_scale", "w_scale"], ["scale"]),
        helper.make_node("Mul", ["f", "scale"], ["y"]),
    ]
    values = np.arange(96, dtype=np.int8).reshape(16, 6)
    scales, zeros = np.linspace(0.1, 1, 6, dtype=np.float32), np.arange(6, dtype=np.int8)
    model = graph_of(nodes, {"w": values, "w_scale": scales, "w_zero": zeros})
    source = OnnxModel.open(written(tmp_path, model)).weights.source
    expected = (torch.from_numpy(values).float() - torch.from_numpy(zeros).float()) * torch.from_numpy(scales)
    assert torch.equal(source.values("w"), expected)


def test_four_bit_values(tmp_path):
    values = np.array([-8, -1, 0, 7, 3, -3], dtype=np.int8)
    tensor = helper.make_tensor("w", TensorProto.INT4, (2, 3), values)
    assert numpy_helper.to_array(tensor).astype(np.int8).flatten().tolist() == values.tolist()
    nodes = [helper.make_node("DequantizeLinear", ["w", "scale"], ["h"]), helper.make_node("Add", ["x", "h"], ["y"])]
    model = graph_of(nodes, {"scale": np.float32(0.5)}, opsets={"": 21})
    model.graph.initializer.append(tensor)
    source = OnnxModel.open(written(tmp_path, model)).weights.source
    assert source.rows("w", 1, 2).flatten().tolist() == [3.5, 1.5, -1.5]
