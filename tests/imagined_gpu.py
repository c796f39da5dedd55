"""What torch.compile and Triton make of tensors on a GPU that is not there: run in a process without the interpreter.

Tensors on "cuda" are torch's fake ones, and Triton is told that its GPU is a Hopper. `traces` are graphs of the
operators; `tiles` are the layouts in registers that Triton's compiler gives to what is summed, whose order of addition,
and so whose bits, follow from them.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
import triton
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from normkit import specs
from normkit.kernels.triton import operators
from normkit.ops import schemas
from normkit.ops.plans import plan

SPECS = {"layer_norm": specs.TORCH_LAYER_NORM, "llama": specs.LLAMA, "scale_norm": specs.SCALE_NORM}


class Hopper:
    """As much of a driver as Triton asks for while it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def arguments_of(operator: str, name: str, rows: Any, device: str, dtype: torch.dtype) -> list[Any]:
    """Arguments of an operator, every tensor of it its own."""
    spec = SPECS[name]
    found = plan(spec)

    def tensor(*sizes: Any, of: torch.dtype = dtype) -> Tensor:
        return torch.empty(*sizes, dtype=of, device=device)

    weight = tensor(() if name == "scale_norm" else (24,)).expand(24) if spec.has_weight else None
    rest = [weight, tensor(24) if spec.has_bias else None, found.conventions, found.eps, found.offset]
    x, residual = tensor(rows, 24), tensor(rows, 24, of=torch.float32)
    if operator == "normalize_backward":
        statistics = schemas.normalize_forward(x, *rest)[1]
        return [tensor(rows, 24), x, statistics, *rest, tensor(rows, 24), True, weight is not None, spec.has_bias]
    given = [x, residual, *rest] if "add" in operator else [x, *rest]
    outputs = [tensor(rows, 24), tensor(rows, 24, of=torch.float32)]
    return given + (outputs[: 1 + ("add" in operator)] if "out" in operator else [])


def symbol(environment: ShapeEnv) -> Any:
    """A number of rows that a graph is to hold for any."""
    source = ConstantSource("rows")
    number = environment.create_symbol(40, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return environment.create_symintnode(number, hint=40, source=source)


def described(results: Any) -> list[str]:
    """Shapes, dtypes and devices."""
    if isinstance(results, Tensor):
        results = [results]
    return [f"{[str(size) for size in x.shape]} {x.dtype} {x.device}" for x in results or []]


def trace(operator: str, name: str, device: str, *, dynamic: bool, dtype: torch.dtype) -> dict[str, Any]:
    """The graph of one call: its nodes, what its launches write, and what the operator's fake says it gives."""
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        given = arguments_of(operator, name, symbol(environment) if dynamic else 40, device, dtype)
        places = [place for place, value in enumerate(given) if isinstance(value, Tensor)]

        def call(*tensors: Tensor) -> Any:
            filled = list(given)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            results = getattr(schemas, operator)(*filled)
            # Of an operator that gives nothing what it has written is looked at.
            return tuple(filled[-1 - ("add" in operator) :]) if results is None else results

        tensors = [given[place] for place in places]
        promised = described(call(*tensors))
        graph = make_fx(dispatch_functionalize(call))(*tensors)
        found = described(graph(*tensors)) if device == "cpu" else described(results_of(graph))
    launches = [node for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target)]
    return {
        "nodes": [str(node.target) for node in graph.graph.nodes if node.op == "call_function"],
        "written": [list(node.kwargs["tensors_to_clone"]) for node in launches],
        "grids": [str(node.kwargs["grid"]) for node in launches],
        "promised": promised,
        "found": found,
        "guards": [str(guard.expr) for guard in environment.guards],
    }


def results_of(graph: Any) -> list[Tensor]:
    """What a graph returns, as far as tracing knows."""
    returned = next(node for node in graph.graph.nodes if node.op == "output").args[0]
    returned = returned if isinstance(returned, (list, tuple)) else [returned]
    return [node.meta["val"] for node in returned if node is not None]


DTYPES = {"layer_norm": torch.float32, "llama": torch.bfloat16, "scale_norm": torch.float16}


def traces(*names: str) -> dict[str, Any]:
    """Graphs by name, "operator norm": on a GPU, of a symbolic number of rows but for one norm; all on the CPU."""
    found = {}
    for name in names:
        operator, norm = name.split()
        found[name] = trace(operator, norm, "cuda", dynamic=norm != "llama", dtype=DTYPES[norm])
    for operator in operators_of_norms():
        found[f"{operator} cpu"] = trace(operator, "layer_norm", "cpu", dynamic=True, dtype=torch.float32)
    return {**found, "export": export()}


def operators_of_norms() -> list[str]:
    return [name for name in operators.__dict__ if name.startswith(("normalize_", "add_normalize_"))]


class Exported(torch.nn.Module):
    """A call of an operator in an exported program."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        found = plan(SPECS["layer_norm"])
        return schemas.normalize_rows(x, weight, bias, found.conventions, found.eps, found.offset)


def export() -> list[str]:
    """The nodes of an exported program whose tensors are on a GPU."""
    with torch.no_grad(), FakeTensorMode():
        given = tuple(torch.empty(*sizes, device="cuda") for sizes in ((4, 24), (24,), (24,)))
    program = torch.export.export(Exported(), given)
    program = program.run_decompositions()
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def sums(launch: Any, tensors: Any) -> list[str]:
    """The tiles that a launch's kernel reduces, each with its layout in registers, as Triton's compiler has it."""
    kernel = launch.kernel
    _, _, target, backend, binder = kernel.device_caches[0]
    given = {**launch.constants, "num_warps": launch.warps, "debug": False}
    bound, specialization, options = binder(*tensors, *launch.numbers, **given)
    options, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, options)
    source = ASTSource(kernel, signature, constants, attributes)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    for name in ("ttir", "ttgir"):
        module = stages[name](module, {"target": target, **options.__dict__})
    text = str(module)
    names = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", text, flags=re.M))
    reduced = re.findall(r'"tt\.reduce"\(.*?\}\) : \((tensor<[^)]*>)\)', text, flags=re.S)
    return [re.sub(r"#\w+", lambda match: names.get(match[0], match[0]), tile) for tile in reduced]


def rows_of(rows: int, n: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same rows as they may lie in memory."""
    more = 16 - n % 16
    return {
        "contiguous": torch.randn(rows, n).to(dtype),
        "alone": torch.randn(1, n).to(dtype),
        "apart by 16": torch.randn(rows, n + more).to(dtype)[:, :n],
        "not aligned": torch.randn(rows * n + 1).to(dtype)[1:].view(rows, n),
        "nested": torch.randn(2, rows, n).to(dtype).transpose(0, 1),
    }


def tiles() -> dict[str, Any]:
    """What is reduced, by width and dtype, where rows lie in one way or another, and by what is wanted."""
    started: list[Any] = []
    operators.compile_launch = lambda launch, _: lambda given: started.append((launch, given))
    found: dict[str, Any] = {}
    for n, dtype, rows in ((1000, torch.bfloat16, 6), (24, torch.float32, 70)):
        weight = torch.randn(n).to(dtype)
        _, conventions, eps, offset, *_ = plan(specs.TORCH_LAYER_NORM)
        rest = weight, weight, conventions, eps, offset
        forward, backward = {}, {}
        for layout, x in rows_of(rows, n, dtype).items():
            if n < 100 and layout in ("not aligned", "nested"):
                continue
            started.clear()
            _, statistics = operators.normalize_forward(x, *rest)
            operators.normalize_backward(x, x, statistics, *rest, None, True, False, False)
            if layout == "contiguous":
                operators.normalize_rows(x, *rest)
                operators.normalize_rows_out(x, *rest, torch.empty_like(x))
                operators.normalize_rows_out(x, *rest, torch.empty(rows * n + 1, dtype=dtype)[1:].view(rows, n))
            for place, (launch, given) in enumerate(started):
                (backward if place == 1 else forward)[f"{layout}, {place}"] = sums(launch, given)
        found[f"{n} {dtype}"] = {"forward": forward, "backward": backward}
    return found


if __name__ == "__main__":
    triton.runtime.driver.set_active(Hopper())
    sys.stdout.write(json.dumps({"traces": traces, "tiles": tiles}[sys.argv[1]](*sys.argv[2:])))
