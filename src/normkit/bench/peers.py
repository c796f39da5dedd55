"""The peers on the CPU and on a GPU: those that a user would pick, called as a user would call them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F

from normkit import functional
from normkit.bench.cases import EPS, Arguments, Case
from normkit.spec import NormSpec

Outputs = tuple[Tensor, ...]
Call = Callable[[], Outputs]


class AbsentError(Exception):
    """A peer does not take part in a case; the message says why."""


def reason(error: Exception) -> str:
    """The exception, with the first line of its message."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__} {first}".rstrip()


@dataclass(frozen=True)
class Peer:
    """An implementation of norms."""

    name: str
    """As the table shows it."""
    prepare: Callable[[Case, Arguments], Call]
    """From a case and its tensors to the forward call, which returns y, and the new residual if one is added. Raises
    `AbsentError` if the peer does not take part."""
    has_out: bool = False
    """The call can write into an existing y, and does if the pass is "forward-out"."""
    has_own_threads: bool = False
    """It computes on threads that are not torch's. They keep spinning for a while after a call, on the cores of the
    next peer, so it is timed last."""


def _normkit(case: Case, given: Arguments) -> Call:
    if case.direction == "forward-out":
        return _normkit_out(case.spec, given)
    shape = given.weight.shape
    function: Any = getattr(functional, case.op)
    inputs = (given.x,) if given.residual is None else (given.x, given.residual)
    parameters = (given.weight,) if given.bias is None else (given.weight, given.bias)
    if given.residual is None:
        return lambda: (function(*inputs, shape, *parameters, eps=EPS),)
    return lambda: tuple(function(*inputs, shape, *parameters, eps=EPS))


def _normkit_out(spec: NormSpec, given: Arguments) -> Call:
    x, residual, weight, bias = given.x, given.residual, given.weight, given.bias
    y = torch.empty_like(x)
    if residual is None:
        return lambda: (functional.normalize(x, spec, weight, bias, out=y),)
    new_residual = torch.empty_like(residual)
    return lambda: functional.add_normalize(x, residual, spec, weight, bias, out=(y, new_residual))


def with_residual(given: Arguments, norm: Callable[[Tensor], Tensor]) -> Call:
    """The norm of x, or of the sum beside that sum."""
    x, residual = given.x, given.residual
    if residual is None:
        return lambda: (norm(x),)

    def call() -> Outputs:
        new_residual = x + residual
        return norm(new_residual), new_residual

    return call


def _torch(case: Case, given: Arguments) -> Call:
    weight, bias = given.weight, given.bias
    shape = weight.shape
    if case.centres:
        return with_residual(given, lambda x: F.layer_norm(x, shape, weight, bias, EPS))
    return with_residual(given, lambda x: F.rms_norm(x, shape, weight, EPS))


def _formula(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Outputs:
    """The norm as a user writes it for a compiler: in float32, rounded once."""
    new_residual = x if residual is None else x + residual
    wide = new_residual.float()
    if bias is not None:
        wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.float()
    y = (y if bias is None else y + bias.float()).to(x.dtype)
    return (y,) if residual is None else (y, new_residual)


def _formula_out(given: Outputs, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None) -> Outputs:
    """The formula, written by the compiled code into tensors that are there already."""
    for target, output in zip(given, _formula(x, residual, weight, bias), strict=True):
        target.copy_(output)
    return given


def _compiled(case: Case, given: Arguments) -> Call:
    torch._dynamo.reset()
    tensors = (given.x, given.residual, given.weight, given.bias)
    if case.direction == "forward-out":
        targets = tuple(torch.empty_like(given.x) for _ in given.gradients)
        compiled_out = torch.compile(_formula_out, fullgraph=True, dynamic=False)

        def call() -> Outputs:
            return compiled_out(targets, *tensors)
    else:
        compiled = torch.compile(_formula, fullgraph=True, dynamic=False)

        def call() -> Outputs:
            return compiled(*tensors)

    try:
        with torch.set_grad_enabled(given.x.requires_grad):
            outputs = call()
            if given.x.requires_grad:
                # The backward pass is compiled when it first runs.
                torch.autograd.grad(outputs, given.leaves, given.gradients)
    except Exception as error:  # whatever a compiler that is missing or broken raises
        raise AbsentError(f"did not compile: {reason(error)}") from None
    return call


def _llama(case: Case, given: Arguments) -> Call:
    if case.centres:
        raise AbsentError("has no LayerNorm")
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(case.shape[1], EPS)
    # The leaf itself takes the place of the parameter, so that its gradient can be asked for.
    del module.weight
    module.weight = given.weight
    return with_residual(given, module)


def _onnxruntime(case: Case, given: Arguments) -> Call:
    if case.is_differentiated or case.adds:
        raise AbsentError("forward only, without an addition")
    if case.dtype != "float32":
        raise AbsentError(f"has no {case.dtype} on the CPU")
    try:
        # By name, as it has no types.
        onnxruntime = import_module("onnxruntime")
        from onnx import TensorProto, helper
    except ImportError as error:
        raise AbsentError(f"{error.name} is not installed: pip install onnx onnxruntime") from None
    y = torch.empty_like(given.x)
    tensors = {"x": given.x, "weight": given.weight} | ({} if given.bias is None else {"bias": given.bias})
    infos = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, list(value.shape))
        for name, value in (tensors | {"y": y}).items()
    }
    name = "LayerNormalization" if case.centres else "SimplifiedLayerNormalization"
    node = helper.make_node(name, list(tensors), ["y"], axis=-1, epsilon=EPS)
    graph = helper.make_graph([node], "norm", [infos[name] for name in tensors], [infos["y"]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, value in tensors.items():
        binding.bind_input(name, "cpu", 0, numpy.float32, tuple(value.shape), value.data_ptr())
    binding.bind_output("y", "cpu", 0, numpy.float32, tuple(y.shape), y.data_ptr())

    def call() -> Outputs:
        session.run_with_iobinding(binding)
        return (y,)

    return call


NORMKIT = Peer("normkit", _normkit, has_out=True)
TORCH = Peer("torch", _torch)
COMPILED = Peer("torch.compile", _compiled, has_out=True)
PEERS = (
    NORMKIT,
    TORCH,
    COMPILED,
    Peer("LlamaRMSNorm", _llama),
    Peer("onnxruntime", _onnxruntime, has_out=True, has_own_threads=True),
)


# Once: a package that fails to load takes as long to fail again.
@cache
def _loaded(name: str) -> Any:
    """The module, or why there is none."""
    try:
        return import_module(name)
    except Exception as error:  # whatever a package raises that finds no driver, or not the version it wants
        return reason(error)


def _module(name: str, package: str) -> Any:
    """A module of a package.

    Raises:
        AbsentError: If it cannot be imported.
    """
    found = _loaded(name)
    if not isinstance(found, str):
        return found
    if found.startswith("ModuleNotFoundError"):
        raise AbsentError(f"is not installed: pip install {package} ({found.partition(' ')[2]})")
    raise AbsentError(f"cannot be imported: {found}")


def _liger(case: Case, given: Arguments) -> Call:
    # "gemma" names the arithmetic of torch's own norms. In place, dx would be written over the dy of all the others.
    arithmetic = (EPS, 0.0, "gemma", False)
    x, residual, weight, bias = given.x, given.residual, given.weight, given.bias
    if case.centres:
        layer_norm = _module("liger_kernel.ops.layer_norm", "liger-kernel").LigerLayerNormFunction
        return with_residual(given, lambda x: layer_norm.apply(x, weight, bias, EPS))
    if residual is None:
        rms_norm = _module("liger_kernel.ops.rms_norm", "liger-kernel").LigerRMSNormFunction
        return lambda: (rms_norm.apply(x, weight, *arithmetic),)
    added = _module("liger_kernel.ops.fused_add_rms_norm", "liger-kernel").LigerFusedAddRMSNormFunction
    return lambda: tuple(added.apply(x, residual, weight, *arithmetic))


def _quack(case: Case, given: Arguments) -> Call:
    if case.centres and case.is_differentiated:
        raise AbsentError("its LayerNorm has no gradient that autograd knows")
    quack = _module("quack.rmsnorm", "quack-kernels")
    x, residual, weight, bias = given.x, given.residual, given.weight, given.bias
    if bias is not None:
        # It takes no others.
        wide = weight.float(), bias.float()
        return with_residual(given, lambda x: quack.layernorm_fwd(x, *wide, eps=EPS))
    if residual is None:
        return lambda: (quack.rmsnorm(x, weight, eps=EPS),)
    return lambda: tuple(quack.rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True))


def _flash_attention(case: Case, given: Arguments) -> Call:
    flash = _module("flash_attn.ops.triton.layer_norm", "flash-attn")
    function: Callable[..., Any] = flash.layer_norm_fn if case.centres else flash.rms_norm_fn
    x, residual, weight, bias = given.x, given.residual, given.weight, given.bias
    if residual is None:
        return lambda: (function(x, weight, bias, eps=EPS),)
    return lambda: tuple(function(x, weight, bias, residual=residual, eps=EPS, prenorm=True))


GPU_PEERS = (
    NORMKIT,
    TORCH,
    COMPILED,
    Peer("Liger", _liger),
    Peer("quack", _quack),
    Peer("flash-attn", _flash_attention),
)
PACKAGES = ("triton", "nvidia-cutlass-dsl", "liger-kernel", "quack-kernels", "flash-attn")
"""The packages whose versions belong to a result; with the second, torch has a kernel of its own for RMSNorm."""
