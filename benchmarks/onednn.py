"""oneDNN's layer-normalization primitive as one more peer of `normkit bench`: forward passes, driven through ctypes.

    pip download --no-deps onednn-cpu-gomp && unzip onednn_cpu_gomp-*.whl
    python benchmarks/onednn.py onednn_cpu_gomp-*.data/data/lib/libdnnl.so.3

That wheel is oneDNN 3.2 on the OpenMP threads that torch uses; newer wheels (onednn) have RMSNorm too, and want SYCL.
The primitive is made once and runs into a y that is there already. Its gain and bias are float32.
"""

from __future__ import annotations

import ctypes
import sys

import torch
from rich.console import Console

from normkit.bench import allocation, cases
from normkit.bench.peers import NORMKIT, PEERS, AbsentError, Peer
from normkit.bench.running import measure
from normkit.bench.table import notes, tables

TYPES = {torch.bfloat16: 2, torch.float32: 3}
CPU, IN_ORDER, INFERENCE, SCALE, SHIFT, RMS = 1, 1, 96, 2, 4, 32
POSITIONS = {"x": 1, "y": 17, "weight": 51, "bias": 52}


class Argument(ctypes.Structure):
    _fields_ = (("position", ctypes.c_int), ("memory", ctypes.c_void_p))


class Library:
    """The C interface: its functions return a status, and what they make through their first argument."""

    def __init__(self, path: str):
        self.functions = ctypes.CDLL(path)
        self.engine = self.make("engine_create", CPU, ctypes.c_size_t(0))
        self.stream = self.make("stream_create", self.engine, IN_ORDER)

    def call(self, name: str, *values) -> None:
        if status := getattr(self.functions, f"dnnl_{name}")(*values):
            raise AbsentError(f"dnnl_{name} returned {status}")

    def make(self, name: str, *values) -> ctypes.c_void_p:
        self.call(name, ctypes.byref(made := ctypes.c_void_p()), *values)
        return made

    def layout(self, shape: tuple[int, ...], dtype: torch.dtype) -> ctypes.c_void_p:
        sizes = (ctypes.c_int64 * len(shape))(*shape)
        # Contiguous: its tags are 2 for one axis, 3 for two.
        return self.make("memory_desc_create_with_tag", len(shape), sizes, TYPES[dtype], len(shape) + 1)

    def argument(self, name: str, tensor: torch.Tensor) -> Argument:
        pointer = ctypes.c_void_p(tensor.data_ptr())
        memory = self.make("memory_create", self.layout(tensor.shape, tensor.dtype), self.engine, pointer)
        return Argument(POSITIONS[name], memory)

    def prepare(self, case: cases.Case, given: cases.Arguments):
        tensors = {"x": given.x, "y": torch.empty_like(given.x), "weight": given.weight.float()}
        tensors |= {"bias": given.bias.float()} if case.centres else {}
        arguments = (Argument * len(tensors))(*(self.argument(*item) for item in tensors.items()))
        data, statistics = self.layout(case.shape, given.x.dtype), self.layout(case.shape[:1], torch.float32)
        conventions = (ctypes.c_float(cases.EPS), SCALE | (SHIFT if case.centres else RMS), None)
        kind = "layer_normalization_forward_primitive_desc_create"
        described = self.make(kind, self.engine, INFERENCE, data, data, statistics, *conventions)
        primitive = self.make("primitive_create", described)

        def call():
            self.call("primitive_execute", primitive, self.stream, len(arguments), arguments)
            self.call("stream_wait", self.stream)
            return (tensors["y"],)

        return call


def main() -> None:
    allocation.settle()
    peers = (NORMKIT, PEERS[1], Peer("oneDNN", Library(sys.argv[1]).prepare, has_out=True))
    found = measure(cases.grid(cases.SHAPES, cases.DTYPES, cases.OPS[:2], ["forward-out"]), peers=peers)
    Console(width=80).print(*tables(found), *notes(found), sep="\n")


if __name__ == "__main__":
    main()
