"""ONNX: operators as onnxruntime and the reference evaluator compute them, graphs of torch's exporters; coremltools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wild_libraries.arrays import BIAS, WEIGHT
from wild_libraries.rows import (
    GROUP,
    LAYER,
    OWN_SOURCE,
    RMS,
    Row,
)

PACKAGES = {"onnxruntime": "onnxruntime", "onnx": "onnx", "torch": "torch"}
IMAGE = (2, 64, 5, 5)
BOTH = {"weight": WEIGHT, "bias": BIAS}
NO_GAIN = ("has_weight", "weight_offset")


def operator(name: str, opset: int = 0, domain: str = "", parts: int = 0, **attributes: Any) -> Callable[[Any], Any]:
    """A model of one node, in onnxruntime or in the reference evaluator of ONNX; `parts` are gain and bias."""

    def make(kind: Any) -> Callable[..., Tensor]:
        from onnx import TensorProto, helper

        names = ["x", "weight", "bias"][: 1 + parts]
        node = helper.make_node(name, names, ["y"], domain=domain, **attributes)
        inputs = [helper.make_tensor_value_info(each, TensorProto.FLOAT, None) for each in names]
        output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        opsets = [helper.make_opsetid("", opset or 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
        graph = helper.make_graph([node], "norm", inputs, [output])
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        runner = kind(model.SerializeToString()) if kind.__name__ == "InferenceSession" else kind(model)
        return of_float32(lambda *arrays: runner.run(None, dict(zip(names, arrays, strict=True)))[0])

    return make


def of_float32(function: Callable[..., np.ndarray]) -> Callable[..., Tensor]:
    """A function of float32 arrays as one of tensors of that dtype alone."""

    def of_tensors(*tensors: Tensor) -> Tensor:
        if any(each.dtype != torch.float32 for each in tensors):
            raise TypeError("the graph takes float32")
        return torch.from_numpy(np.array(function(*(each.detach().contiguous().numpy() for each in tensors))))

    return of_tensors


class Function(nn.Module):
    """A function of a row and its parameters as a module that can be exported."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Tensor:
        """The result of the function."""
        return self.function(*given)


def exported(function: Callable[..., Tensor], example: tuple[int, ...], parts: int, *, dynamo: bool) -> Any:
    """The graph of an exporter of torch, run by onnxruntime."""

    def make(export: Any) -> Callable[..., Tensor]:
        import tempfile
        from pathlib import Path

        import onnxruntime

        given = (torch.randn(example), *(torch.ones(64) for _ in range(parts)))
        names = ["x", "weight", "bias"][: 1 + parts]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "norm.onnx"
            options: dict[str, Any] = {"dynamo": dynamo, "input_names": names, "output_names": ["y"]}
            if dynamo:
                options["dynamic_shapes"] = (
                    ({0: "batch", 1: "tokens"} if len(example) == 3 else {0: "batch"}, *[{}] * parts),
                )
            else:
                options["dynamic_axes"] = {"x": [0, 1] if len(example) == 3 else [0]}
            export(Function(function).eval(), given, str(path), **options)
            session = onnxruntime.InferenceSession(path.read_bytes())
        return of_float32(lambda *arrays: session.run(None, dict(zip(names, arrays, strict=True)))[0])

    return make


def llama(x: Tensor, weight: Tensor) -> Tensor:
    """LlamaRMSNorm of transformers, written out."""
    y = x.float()
    return weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def coremltools_rms(x: Tensor, weight: Tensor) -> Tensor:
    """The row is divided by its largest magnitude before the mean square is taken, and eps added to that."""
    largest = x.abs().amax(-1, keepdim=True)
    return x / (((x / largest).square().mean(-1, keepdim=True) + 1e-6).sqrt() * largest) * weight


def coremltools_group(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """4 groups of channels."""
    y = x.reshape(x.shape[0], 4, -1)
    variance = y.var(-1, keepdim=True, unbiased=False)
    y = ((y - y.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt()).reshape(x.shape)
    return y * weight.reshape(-1, 1, 1) + bias.reshape(-1, 1, 1)


SPECIFICATION = "the specification of ONNX"
OPERATORS: tuple[tuple[str, dict[str, Any], dict[str, Any], tuple[int, ...]], ...] = (
    ("LayerNormalization", {"parts": 2}, LAYER, (2, 3, 64)),
    ("RMSNormalization", {"opset": 23, "parts": 1, "axis": -1}, RMS | {"eps": 1e-5}, (2, 3, 64)),
    ("GroupNormalization", {"opset": 21, "parts": 2, "num_groups": 4}, GROUP | {"groups": 4}, IMAGE),
    ("InstanceNormalization", {"parts": 2}, GROUP | {"groups": 64}, IMAGE),
    (
        "LpNormalization",
        {"axis": -1, "p": 2},
        {"reduction": "sum", "centre_numerator": False, "centre_statistics": False},
        (2, 3, 64),
    ),
)
EXPORTED: tuple[tuple[str, Callable[..., Tensor], tuple[int, ...], int, dict[str, Any]], ...] = (
    ("layer_norm", lambda x, w, b: F.layer_norm(x, (64,), w, b), (2, 3, 64), 2, LAYER),
    ("rms_norm", lambda x, w: F.rms_norm(x, (64,), w, 1e-6), (2, 3, 64), 1, RMS),
    ("rms_norm, eps=None", lambda x, w: F.rms_norm(x, (64,), w), (2, 3, 64), 1, RMS | {"eps": None}),
    ("group_norm", lambda x, w, b: F.group_norm(x, 4, w, b), IMAGE, 2, GROUP | {"groups": 4}),
    ("instance_norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), IMAGE, 2, GROUP | {"groups": 64}),
    (
        "normalize",
        lambda x: F.normalize(x, dim=-1),
        (2, 3, 64),
        0,
        {"reduction": "sum", "centre_statistics": False, "eps": 1e-12, "eps_placement": "clamp"},
    ),
    ("LlamaRMSNorm", llama, (2, 3, 64), 1, RMS),
)
COREML = {"library": "coremltools", "repository": "apple/coremltools@9.0"}
MIL = "coremltools/converters/mil/frontend/torch/ops.py"

ROWS = [
    *(
        Row(
            path=path,
            variant=name,
            make=operator(name, **settings),
            shape=shape,
            **dict(list(BOTH.items())[: settings.get("parts", 0)]),
            expected=expected,
            source=f"{SPECIFICATION}: {name}",
        )
        for path in ("onnxruntime:InferenceSession", "onnx.reference:ReferenceEvaluator")
        for name, settings, expected, shape in OPERATORS
    ),
    *(
        Row(
            path="onnxruntime:InferenceSession",
            variant=f"{name} of com.microsoft",
            make=operator(name, domain="com.microsoft" if "Skip" in name else "", parts=1, axis=-1),
            weight=WEIGHT,
            expected=RMS | {"eps": 1e-5},
            source="onnxruntime docs/ContribOperators.md: epsilon 1e-5 by default",
        )
        for name in ("SimplifiedLayerNormalization",)
    ),
    *(
        Row(
            path="torch.onnx:export",
            variant=f"{name}, dynamo={dynamo}, in onnxruntime",
            make=exported(function, example, parts, dynamo=dynamo),
            shape=example,
            **dict(list(BOTH.items())[:parts]),
            expected=expected if parts else {key: value for key, value in expected.items() if key not in NO_GAIN},
            source=f"torch.nn.functional.{name.partition(',')[0]}"
            if name != "LlamaRMSNorm"
            else "transformers LlamaRMSNorm",
        )
        for dynamo in (True, False)
        for name, function, example, parts, expected in EXPORTED
    ),
    Row(
        path=f"{MIL}:3105-3170 rms_norm",
        make=lambda _: coremltools_rms,
        weight=WEIGHT,
        expected=RMS,
        source="torch.nn.functional.rms_norm, which it converts",
        differs=(
            OWN_SOURCE,
            "eps is added after the row was divided by its largest magnitude: it acts as eps times max(x^2). "
            "Its comment says that the error is typically below 0.1 %.",
        ),
        **COREML,
    ),
    Row(
        path=f"{MIL}:2809-2846 _group_norm_impl",
        make=lambda _: coremltools_group,
        shape=IMAGE,
        **BOTH,
        expected=GROUP | {"groups": 4},
        source="torch.nn.functional.group_norm, which it converts",
        **COREML,
    ),
]
