"""coremltools: `torch.nn.RMSNorm` becomes x / sqrt(mean(x^2) + eps * max(|x|)^2).

    NORMKIT_REAL_MODELS=FOLDER python census/finds/coremltools_rms_norm.py

The program that the converter emits is computed here with numpy, operation by operation, in float64: Core ML itself
runs on macOS only. The report is docs/wild/reports/coremltools_rms_norm.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil.frontend.torch import ops
from coremltools.converters.mil.frontend.torch.torch_op_registry import register_torch_op
from torch import nn

import normkit as nk
from patching import diff, patched, versions
from real_models import RealModel

NAME = "coremltools_rms_norm"
# The operations of the emitted program, in NumPy.
MEANINGS = {
    "abs": lambda x: np.abs(x),
    "square": lambda x: x * x,
    "sqrt": lambda x: np.sqrt(x),
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "real_div": lambda x, y: x / y,
    "maximum": lambda x, y: np.maximum(x, y),
    "reduce_max": lambda x, axes, keep_dims: x.max(tuple(axes), keepdims=keep_dims),
    "reduce_mean": lambda x, axes, keep_dims: x.mean(tuple(axes), keepdims=keep_dims),
}


class Emitted:
    """A norm of torch as the converter writes it down."""

    def __init__(self, norm, features):
        exported = torch.export.export(norm.eval(), (torch.ones(2, features),)).run_decompositions({})
        self.program = ct.convert(exported, convert_to="milinternal", compute_precision=ct.precision.FLOAT32).functions[
            "main"
        ]

    def __call__(self, x):
        values = {next(iter(self.program.inputs.values())): np.asarray(x, dtype=np.float64)}
        for op in self.program.operations:
            if op.op_type in ("const", "cast"):
                values[op.outputs[0]] = op.outputs[0].val if op.op_type == "const" else values[op.x]
                continue
            given = {name: values.get(each, each.val) for name, each in op.inputs.items()}
            values[op.outputs[0]] = MEANINGS[op.op_type](**given)
        return values[self.program.outputs[0]]


def show(features=64):
    emitted = Emitted(nn.RMSNorm(features, eps=1e-5), features)
    print(
        "  operations:",
        " ".join(op.op_type for op in emitted.program.operations if op.op_type not in ("const", "cast")),
    )
    torch.manual_seed(0)
    rows = torch.randn(64, features, dtype=torch.float64)
    spiky = rows.clone()
    spiky[:, 0] = 100.0
    right = nn.RMSNorm(features, eps=1e-5).double()
    for name, x in (("normal rows", rows), ("one feature of 100", spiky), ("times 1e-3", 1e-3 * rows)):
        off = np.abs(emitted(x.numpy()) / right(x).detach().numpy() - 1).max()
        print(f"  {name}: off by at most {off:.2e} of an element")
    with np.errstate(invalid="ignore"):
        print("  a row of zeros:", emitted(np.zeros((2, features)))[0, 0])
    for name, x in (("one feature of 100", spiky), ("times 1e-3", 1e-3 * rows)):
        passport = nk.identify_rows(x.numpy(), emitted(x.numpy()), np.ones(features))
        print(f"  normkit, from the rows with {name}: {passport.spec or 'no norm of the space of conventions'}")


def as_emitted(norm, x):
    largest = x.abs().amax(-1, keepdim=True)
    return norm.weight * x / (((x / largest).square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * largest)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(versions("coremltools", "torch", "transformers"))
    print("as installed")
    show()
    model = RealModel("smollm2")
    right = model.logits()
    print("SmolLM2-135M, its norms as torch.nn.RMSNorm")
    print(f"  in torch: perplexity {model.perplexity(right):.4f}")
    model.compare("as converted", as_emitted, against=right)
    print("with the fix")
    # The file registers its handlers where it is loaded, so this one alone is taken from the patched text.
    source = Path(ops.__file__).read_text(encoding="utf-8")
    handler = re.search(r"^def rms_norm\(.*?(?=^@|^def )", patched(source, *diff(NAME).values()), re.M | re.S)[0]
    exec(handler, vars(ops))
    register_torch_op(ops.rms_norm, override=True)
    show()
