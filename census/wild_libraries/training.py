"""litgpt, torchtune, torchtitan, OLMo-core, DeepSpeed's fallbacks and TransformerLens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from wild_libraries.rows import (
    GROUP,
    LAYER,
    LAYER_PAPER,
    OWN_SOURCE,
    PLAIN,
    RMS,
    RMS_PAPER,
    UNDECIDED,
    Row,
    drawn,
    loose,
    made,
)

PACKAGES = {
    "litgpt": "litgpt",
    "torchtune": "torchtune",
    "torchtitan": "torchtitan",
    "olmo_core": "ai2-olmo-core",
    "deepspeed": "deepspeed",
    "transformer_lens": "transformer-lens",
}
OLMO = "olmo_core.nn.layer_norm"
TITAN = "torchtitan.models.common.nn_modules"
GEMMA = RMS | {"weight_offset": 1.0, "offset_dtype": "float32", "cast": "late"}
GEMMA_SOURCE = "google/gemma_pytorch gemma/model.py RMSNorm: (1 + weight) in float32, rounded once"
LLAMA = RMS | {"cast": "early"}
LLAMA_SOURCE = "meta-llama/llama llama/model.py RMSNorm: rounded before the gain"
# Its package imports torchao as it was; its norms need none of it.
loose("torchtune.modules")
loose("torchtune.models.gemma")


def configured(**settings: Any):
    """How torchtitan builds a module from its Config."""
    return lambda kind: drawn(kind(kind.Config(**settings)))


def bridged(name: str, **settings: Any):
    """A bridge of TransformerLens around a module of its original."""

    def make(kind: Any) -> nn.Module:
        inner = nn.LayerNorm(64) if name == "layer" else nn.RMSNorm(64, eps=1e-6)
        eps = 1e-5 if name == "layer" else 1e-6
        config = SimpleNamespace(eps=eps, layer_norm_folding=False, uses_rms_norm=name != "layer", **settings)
        bridge = kind("norm", config)
        bridge.set_original_component(drawn(inner))
        return bridge

    return make


ROWS = [
    Row(
        path="litgpt.model:RMSNorm",
        make=made(),
        expected=RMS,
        source=f"{RMS_PAPER}, which it derives from",
    ),
    Row(
        path="litgpt.model:RMSNorm",
        variant="add_unit_offset=True",
        make=made(add_unit_offset=True),
        expected=GEMMA,
        source=GEMMA_SOURCE,
        differs=(
            UNDECIDED,
            "1 is added in the weight's dtype, as google-deepmind/gemma in JAX does. "
            "Gains start at 1 here, so that the norm starts at twice its length.",
        ),
    ),
    Row(path="torchtune.modules.rms_norm:RMSNorm", make=made(), expected=RMS, source="its docstring: torch.nn.RMSNorm"),
    Row(
        path="torchtune.modules.layer_norm:Fp32LayerNorm",
        make=made(),
        expected=LAYER,
        source="its docstring: torch.nn.LayerNorm",
    ),
    Row(
        path="torchtune.models.gemma.rms_norm:GemmaRMSNorm",
        make=made(),
        expected=GEMMA,
        source=GEMMA_SOURCE,
    ),
    Row(
        path=f"{TITAN}:LayerNorm",
        make=configured(normalized_shape=64),
        expected=LAYER,
        source="torch.nn.LayerNorm, named in its docstring",
    ),
    Row(
        path=f"{TITAN}:RMSNorm",
        make=configured(normalized_shape=64),
        expected=RMS | {"eps": 1e-5},
        source=f"{RMS_PAPER}; eps 1e-5 as in Llama 3, meta-llama/llama3 llama/model.py",
    ),
    Row(
        path=f"{TITAN}:GroupNorm",
        make=configured(num_groups=4, num_channels=64),
        shape=(2, 64, 5, 5),
        expected=GROUP | {"groups": 4},
        source="torch.nn.GroupNorm, named in its docstring",
    ),
    Row(
        path="torchtitan.models.qwen3_5.model:OffsetRMSNorm",
        make=configured(dim=64),
        expected=RMS | {"weight_offset": 1.0},
        source="its docstring: (1 + weight) * norm(x); transformers Qwen3_5RMSNorm",
    ),
    Row(
        path="torchtitan.models.muse_glimmer.model:RMSGainCenterNorm",
        make=configured(normalized_shape=64, gain_center=1.0),
        expected=RMS | {"weight_offset": 1.0, "eps": 1e-5},
        source="its docstring: the scale is weight + gain_center",
    ),
    Row(path=f"{OLMO}:LayerNorm", make=lambda kind: drawn(kind(size=64)), expected=LAYER, source=LAYER_PAPER),
    Row(
        path=f"{OLMO}:RMSNorm",
        make=lambda kind: drawn(kind(size=64, bias=False)),
        expected=RMS | {"eps": 1e-5},
        source=f"{RMS_PAPER}; eps as its docstring",
    ),
    Row(
        path=f"{OLMO}:RMSNorm",
        variant="bias=True",
        make=lambda kind: drawn(kind(size=64)),
        expected=RMS | {"eps": 1e-5, "has_bias": True},
        source=f"{RMS_PAPER}; bias as its docstring",
    ),
    Row(
        path=f"{OLMO}:QwenRMSNorm",
        make=lambda kind: drawn(kind(size=64, bias=False, eps=1e-6)),
        expected=RMS | {"cast": "input"},
        source="its docstring: cast back before the gain, which multiplies in the input's dtype",
    ),
    Row(
        path=f"{OLMO}:NemotronRMSNorm",
        make=lambda kind: drawn(kind(size=64, bias=False)),
        expected=RMS | {"eps": 1e-5, "cast": "late"},
        source="transformers NemotronHRMSNorm, which its docstring says it matches: the gain in float32, rounded once",
        differs=(OWN_SOURCE, "It rounds before the gain."),
    ),
    Row(
        path=f"{OLMO}:L2Norm",
        make=lambda kind: kind(size=64),
        expected=RMS | PLAIN | {"reduction": "sum", "eps": 0.0},
        source="its docstring: L2 normalization",
    ),
    Row(
        path="deepspeed.ops.transformer.inference.op_binding.rms_norm:RMSNormOp.rms_norm_fallback",
        make=lambda function: lambda x, weight: function(x, weight, 1e-6),
        weight=torch.ones(64),
        expected=RMS,
        source=RMS_PAPER,
    ),
    Row(
        path="deepspeed.ops.transformer.inference.op_binding.layer_norm:LayerNormOp.layer_norm_fallback",
        make=lambda function: lambda x, weight, bias: function(x, weight, bias, 1e-5),
        weight=torch.ones(64),
        bias=torch.zeros(64),
        expected=LAYER,
        source=LAYER_PAPER,
    ),
    Row(
        path="deepspeed.ops.transformer.inference.op_binding.pre_rms_norm:PreRMSNormOp.pre_rms_norm_fallback",
        variant="without a residual",
        make=lambda function: lambda x, weight: function(x, torch.zeros_like(x), weight, 1e-6)[0],
        weight=torch.ones(64),
        expected=RMS,
        source=RMS_PAPER,
    ),
    Row(
        path="deepspeed.module_inject.layers:Normalize",
        make=lambda kind: drawn(kind(64)),
        expected=LAYER,
        source="torch.nn.LayerNorm, which it replaces",
    ),
    Row(
        path="deepspeed.module_inject.layers:RMSNormalize",
        make=lambda kind: drawn(kind(64)),
        expected=RMS | {"eps": 1e-5},
        source=f"{RMS_PAPER}; eps 1e-5 as in Llama 2, meta-llama/llama config params.json norm_eps",
    ),
    *(
        Row(
            path="transformer_lens.model_bridge.generalized_components.normalization:NormalizationBridge",
            variant=variant,
            make=make,
            expected=expected,
            source=source,
        )
        for variant, make, expected, source in (
            ("around torch.nn.LayerNorm", bridged("layer"), LAYER, "torch.nn.LayerNorm, which it computes anew"),
            ("around torch.nn.RMSNorm", bridged("rms"), RMS, "torch.nn.RMSNorm, which it computes anew"),
            (
                "rmsnorm_uses_offset",
                bridged("rms", rmsnorm_uses_offset=True),
                RMS | {"weight_offset": 1.0},
                "its comment: Gemma stores its gain as the difference from 1",
            ),
        )
    ),
]
