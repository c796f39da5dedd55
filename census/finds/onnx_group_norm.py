"""ONNX: the function that defines GroupNormalization takes the variance as E[x^2] - E[x]^2.

    python census/finds/onnx_group_norm.py

onnxruntime and onnx's own evaluator have no other GroupNormalization and run this function. The report is
docs/wild/reports/onnx_group_norm.md.
"""

from __future__ import annotations

import re

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch.nn.functional import group_norm

from patching import diff, patched, versions
from torch_group_norm import digits

SHAPES = {"X": ["n", "c", "h", "w"], "scale": ["c"], "bias": ["c"], "Y": ["n", "c", "h", "w"]}


def function(operator, version, **attributes):
    """The text of the function that defines an operator."""
    types = [helper.make_tensor_type_proto(TensorProto.FLOAT, SHAPES[name]) for name in ("X", "scale", "bias")]
    node = helper.make_node(operator, ["X", "scale", "bias"], ["Y"], **attributes)
    given = node.SerializeToString(), [each.SerializeToString() for each in types]
    schema = onnx.defs.get_schema(operator, version)
    return onnx.printer.to_text(onnx.FunctionProto.FromString(schema.get_context_dependent_function(*given)))


def as_printed(hunks):
    """The hunks of defs.cc as hunks of the text that `function` prints."""
    lines = re.findall(r"^(?:@@.*|([ +-]) *\.Add\(\"(.+)\"\))$", hunks, re.M)
    return "".join(f"{sign}   {line}\n" if sign else "@@\n" for sign, line in lines)


def graph(groups, text=None):
    """A model of one GroupNormalization: the standard's, or a function given as text."""
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in SHAPES.items()}
    y = values.pop("Y")
    functions, opsets, domain = [], [helper.make_opsetid("", 21)], ""
    if text is not None:
        body, domain = onnx.parser.parse_function(text), "mended"
        body.domain = domain
        functions.append(body)
        opsets.append(helper.make_opsetid(domain, 1))
    node = helper.make_node("GroupNormalization", list(values), ["Y"], domain=domain, num_groups=groups)
    whole = helper.make_graph([node], "norm", list(values.values()), [y])
    return helper.make_model(whole, functions=functions, opset_imports=opsets, ir_version=10)


def evaluators(groups):
    mended = graph(groups, patched(function("GroupNormalization", 21, num_groups=groups), hunks))
    standard = graph(groups)
    session, other = (
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        for model in (standard, mended)
    )
    return {
        "onnxruntime": session.run,
        "onnx ReferenceEvaluator": ReferenceEvaluator(standard).run,
        "onnxruntime, function with the fix": other.run,
    }


def exported(pedestal):
    """The whole network as torch exports it, in onnxruntime."""
    model, x, classes = digits(pedestal)
    right = model(x)
    for opset in (20, 21):
        program = torch.onnx.export(model, (x[:2],), dynamo=True, opset_version=opset, verbose=False)
        norms = {node.op_type for node in program.model_proto.graph.node if "Normalization" in node.op_type}
        proto = program.model_proto.SerializeToString()
        session = onnxruntime.InferenceSession(proto, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        pairs = x[: len(x) // 2 * 2].split(2)
        logits = torch.cat([torch.tensor(session.run(None, {name: pair.numpy()})[0]) for pair in pairs])
        accuracy = (logits.argmax(1) == classes[: len(logits)]).double().mean()
        nans = logits.isnan().any(1).double().mean()
        print(
            f"  opset {opset}, {', '.join(sorted(norms))}: accuracy {accuracy:.3f}, {nans:.0%} of the images give NaN"
        )
    print(f"  in torch: accuracy {(right.argmax(1) == classes).double().mean():.3f}")


def run(evaluate, x, weight, bias):
    with np.errstate(invalid="ignore"):
        return torch.tensor(evaluate(None, {"X": x.numpy(), "scale": weight.numpy(), "bias": bias.numpy()})[0])


def error(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hunks = as_printed(*diff("onnx_group_norm").values())
    print(versions("onnx", "onnxruntime", "onnxscript", "torch"))
    for operator, version, attributes in (
        ("GroupNormalization", 21, {"num_groups": 4}),
        ("LayerNormalization", 17, {}),
    ):
        lines = [line.strip() for line in function(operator, version, **attributes).splitlines()]
        print(f"{operator}-{version} is defined with: {next(line for line in lines if line.startswith('Var = '))}")
    for mean in (0, 100, 1000, 10000):
        x, weight, bias = torch.randn(2, 16, 16, 16) + mean, torch.ones(16), torch.zeros(16)
        expected = group_norm(x.double(), 4)
        print(f"mean {mean}, deviation 1: torch's error {error(group_norm(x, 4), expected):.0e}")
        for title, evaluate in evaluators(4).items():
            y = run(evaluate, x, weight, bias)
            print(f"  {title}: error {error(y, expected):.0e}, {y.isnan().double().mean():.0%} of the outputs are NaN")
    for pedestal in (0, 1000, 16384):
        model, x, classes = digits(pedestal)
        right = model(x)
        accuracy = (right.argmax(1) == classes).double().mean()
        largest = right.abs().max()
        print(f"network for digits above {pedestal}: accuracy {accuracy:.3f} in torch, largest logit {largest:.1f}")
        for title, evaluate in evaluators(1).items():
            logits = model[1:](run(evaluate, x, model[0].weight, model[0].bias))
            accuracy = (logits.argmax(1) == classes).double().mean()
            moved, nans = (logits - right).abs().nan_to_num(0).max(), logits.isnan().any(1).double().mean()
            print(f"  its GroupNorm in {title}: accuracy {accuracy:.3f}, logits moved by {moved:.2g}, {nans:.0%} NaN")
    print("the whole network for digits above 16384, by torch.onnx.export")
    exported(16384)
