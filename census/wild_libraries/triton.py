"""Triton kernels in Triton's interpreter, on the CPU: Liger and flash-linear-attention; quack's reference.

The interpreter is mended first: it takes a float for a scalar of Triton, converts to and from bfloat16 and multiplies
in it as a GPU does, and a kernel that is tuned runs with its first configuration. The libraries are left as they are.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wild_libraries.rows import (
    CHOICE,
    GROUP,
    GROUP_PAPER,
    L2,
    LAYER,
    LAYER_PAPER,
    OWN_SOURCE,
    RMS,
    RMS_PAPER,
    Row,
    drawn,
    made,
)

MENDED = ExitStack()
TESTS = Path(__file__).parents[2] / "tests"


def mend_interpreter() -> None:
    """Once, before the libraries define their kernels."""
    from triton import language
    from triton.language.extra import libdevice
    from triton.runtime import autotuner, interpreter

    sys.path.append(str(TESTS))
    from triton_kernels import rounding_interpreter, to_bfloat16, to_float32

    # In the interpreter the functions of CUDA's library return nothing.
    libdevice.rsqrt = lambda x: language.rsqrt(x)
    MENDED.enter_context(rounding_interpreter())
    plain_argument, plain_operation = interpreter._implicit_cvt, interpreter.InterpreterBuilder.binary_op

    def argument(given: Any) -> Any:
        if not isinstance(given, float):
            return plain_argument(given)
        handle = interpreter.TensorHandle(np.array([given], dtype=np.float32), language.float32)
        return language.tensor(handle, language.float32)

    def operation(self: Any, left: Any, right: Any, of: Any) -> Any:
        if left.dtype.scalar != language.bfloat16 or right.dtype.scalar != language.bfloat16:
            return plain_operation(self, left, right, of)
        exact = of(to_float32(left.data), to_float32(right.data))
        if exact.dtype == np.bool_:
            return interpreter.TensorHandle(exact, language.int1)
        return interpreter.TensorHandle(to_bfloat16(exact), language.bfloat16)

    interpreter._implicit_cvt, interpreter.InterpreterBuilder.binary_op = argument, operation
    autotuner.Autotuner.prune_configs = lambda self, _given: self.configs[:1]


try:
    mend_interpreter()
except ImportError as error:
    # The rows say what is missing.
    print(error, file=sys.stderr)

PACKAGES = {"liger_kernel": "liger_kernel", "fla": "flash-linear-attention", "quack": "quack-kernels"}
LIGER = "liger_kernel.transformers"
FLA = "fla.modules"
ONES = torch.ones(64)
GEMMA = RMS | {"weight_offset": 1.0, "cast": "late"}
LLAMA = RMS | {"cast": "early"}
OLMO2 = RMS | {"cast": "late"}
OF_TRANSFORMERS = {
    "LigerRMSNorm": (LLAMA, "transformers LlamaRMSNorm: rounded before the gain", None),
    "LigerRMSNormForGemma": (GEMMA, "transformers GemmaRMSNorm: 1 + weight in float32, rounded once", None),
    "LigerRMSNormForGemma2": (GEMMA, "transformers Gemma2RMSNorm: 1 + weight in float32, rounded once", None),
    "LigerRMSNormForGemma3": (GEMMA, "transformers Gemma3RMSNorm: 1 + weight in float32, rounded once", None),
    "LigerRMSNormForGemma4": (OLMO2, "transformers Gemma4RMSNorm: the gain in float32, nothing added", None),
    "LigerRMSNormForOlmo2": (
        OLMO2,
        "transformers Olmo2RMSNorm and OLMo-core RMSNorm: the gain in float32, rounded once",
        (OWN_SOURCE, 'It is made with casting_mode="llama".'),
    ),
    "LigerRMSNormForGlm4": (LLAMA, "transformers Glm4RMSNorm: rounded before the gain", None),
    "LigerRMSNormForQwen3Next": (GEMMA, "transformers Qwen3NextRMSNorm: 1 + weight in float32, rounded once", None),
}


def out_of_place(kind: Any) -> torch.nn.Module:
    """A norm of Liger that leaves its input alone in the backward pass."""
    return drawn(kind(64))


ROWS = [
    *(
        Row(path=f"{LIGER}.rms_norm:{name}", make=out_of_place, expected=expected, source=source, differs=differs)
        for name, (expected, source, differs) in OF_TRANSFORMERS.items()
    ),
    Row(
        path=f"{LIGER}.layer_norm:LigerLayerNorm",
        make=made(),
        expected=LAYER | {"eps": 1e-6},
        source=f"{LAYER_PAPER}; eps of its signature",
    ),
    Row(
        path=f"{LIGER}.group_norm:LigerGroupNorm",
        make=made(4),
        shape=(2, 64, 5, 5),
        expected=GROUP | {"groups": 4, "eps": 1e-6},
        source=f"{GROUP_PAPER}; eps of its docstring",
    ),
    Row(
        path=f"{LIGER}.fused_add_rms_norm:LigerFusedAddRMSNorm",
        variant="without a residual",
        make=made(),
        call=lambda norm, x: norm(x, torch.zeros_like(x))[0],
        expected=LLAMA,
        source="transformers LlamaRMSNorm: rounded before the gain",
    ),
    Row(path=f"{FLA}.norm.layernorm:LayerNorm", make=made(bias=True), expected=LAYER, source=LAYER_PAPER),
    Row(
        path=f"{FLA}.norm.layernorm:RMSNorm",
        make=made(),
        expected=RMS | {"eps": 1e-5},
        source=f"{RMS_PAPER}; eps of its signature",
    ),
    Row(
        path=f"{FLA}.norm.layernorm:GroupNorm",
        make=lambda kind: made(bias=True)(lambda width, **named: kind(4, width, **named)),
        expected=LAYER | {"groups": 4},
        source=f"{GROUP_PAPER}, of the features of a token",
    ),
    Row(
        path=f"{FLA}.norm.layernorm:GroupNormRef",
        make=lambda kind: made(bias=True)(lambda width, **named: kind(4, width, **named)),
        expected=LAYER | {"groups": 4},
        source=f"{GROUP_PAPER}, of the features of a token",
    ),
    *(
        Row(
            path=f"{FLA}.norm.layernorm:{name}",
            make=lambda function: lambda x, weight, bias: function(x, weight, bias),
            weight=ONES,
            bias=torch.zeros(64),
            expected=expected,
            source=source,
        )
        for name, expected, source in (
            ("layer_norm_ref", LAYER, LAYER_PAPER),
            ("rms_norm_ref", RMS | {"eps": 1e-5, "has_bias": True}, f"{RMS_PAPER}, and a bias"),
        )
    ),
    Row(
        path=f"{FLA}.norm.l2norm:L2Norm",
        make=lambda kind: kind(),
        expected=L2,
        source="torch.nn.functional.normalize: x / max(norm, 1e-12)",
        differs=(
            CHOICE,
            "eps is inside the root; transformers' l2norm and mlx-lm's normalize_qk say that they follow it.",
        ),
    ),
    Row(
        path=f"{FLA}.norm.fused_norm_gate:FusedRMSNormGated",
        make=made(),
        expected={"verdict": "gated"},
        source="its name; Yang et al. 2024, gated linear attention: the norm's output times swish of a gate",
    ),
    Row(
        path=f"{FLA}.norm.layernorm_gated:rms_norm_ref",
        variant="groups of 16, without a gate",
        make=lambda function: lambda x, weight: function(x, weight, None, group_size=16),
        weight=ONES,
        expected=RMS | {"groups": 4},
        source="Dao and Gu 2024, section 8.1: a group norm for each group of heads",
    ),
    Row(
        path="quack.rmsnorm:rmsnorm_ref",
        variant="its reference; the kernel needs an NVIDIA GPU",
        make=lambda function: lambda x, weight: function(x, weight),
        weight=ONES,
        expected=RMS,
        source=RMS_PAPER,
    ),
    Row(
        path="quack.rmsnorm:rmsnorm",
        make=lambda function: lambda x, weight: function(x, weight),
        weight=ONES,
        expected=RMS,
        source=RMS_PAPER,
    ),
]
