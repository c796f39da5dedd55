from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from normkit.comparison.onnx_file import OnnxModel
from normkit.comparison.values import compare_values
from normkit.comparison.weights import weights_of
from onnx_models import gain, parsed, written

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
