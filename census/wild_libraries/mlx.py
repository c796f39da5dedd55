"""MLX and mlx-lm, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from wild_libraries.arrays import BIAS, WEIGHT, of_mlx
from wild_libraries.rows import (
    CHOICE,
    GROUP_PAPER,
    INSTANCE_PAPER,
    LAYER,
    LAYER_PAPER,
    OWN_SOURCE,
    RMS,
    RMS_PAPER,
    UNDECIDED,
    Row,
)

PACKAGES = {"mlx": "mlx", "mlx_lm": "mlx-lm"}
BOTH = {"weight": WEIGHT, "bias": BIAS}
IMAGE = (2, 5, 5, 64)
LAST = {"axes": "all_but_batch_channels_last"}
MODELS = "mlx_lm.models"


def given(*arguments: Any, names: tuple[str, ...] = ("weight",), **settings: Any) -> Callable[[Any], Any]:
    """A module of MLX as a function of x and its parameters."""

    def make(kind: Any) -> Callable[..., Tensor]:
        norm = kind(*arguments, **settings)

        def call(x: Any, *parameters: Any) -> Any:
            for name, value in zip(names, parameters, strict=True):
                setattr(norm, name, value)
            return norm(x)

        return of_mlx(call)

    return make


def latent(inner: str, **sizes: Any) -> Callable[[Any], Any]:
    """A norm inside an attention of mlx-lm, built from its arguments."""

    def make(kind: Any) -> Callable[..., Tensor]:
        arguments = sys.modules[kind.__module__].ModelArgs
        names = arguments.__dataclass_fields__
        fields = dict.fromkeys(names, 64) | {name: size for name, size in (SIZES | sizes).items() if name in names}
        norm = getattr(kind(arguments(**fields)), inner)

        def call(x: Any, weight: Any) -> Any:
            norm.weight = weight
            return norm(x)

        return of_mlx(call)

    return make


def plain(function: Any) -> Callable[..., Tensor]:
    """A function of one array."""
    return of_mlx(function)


OFFSET = RMS | {"weight_offset": 1.0, "offset_dtype": "float32"}
WITHOUT_GAIN = {
    name: value for name, value in (RMS | {"eps": 1e-5}).items() if name not in ("has_weight", "weight_offset")
}
IN_DTYPE = (OWN_SOURCE, "1 is added in the weight's dtype: in bfloat16, 1 + 2^-8 is 1.")
TWO_REFERENCES = (
    UNDECIDED,
    "1 is added in the weight's dtype: in bfloat16, 1 + 2^-8 is 1. google-deepmind/gemma in JAX does so too.",
)
SIZES = {
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "rope_theta": 1e4,
    "mla_scale_q_lora": False,
    "mla_scale_kv_lora": False,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "num_attention_heads": 4,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_traditional": False,
    "max_position_embeddings": 64,
}

DISPUTED = (
    UNDECIDED,
    "transformers has 1e-6 here and 1e-5 in the configuration; MLX's default, which acts, is 1e-5.",
)

ROWS = [
    Row(
        path="mlx.nn:LayerNorm",
        make=given(64, names=("weight", "bias")),
        **BOTH,
        expected=LAYER,
        source=f"{LAYER_PAPER}; its docstring",
    ),
    Row(
        path="mlx.nn:RMSNorm",
        make=given(64),
        weight=WEIGHT,
        expected=RMS | {"eps": 1e-5},
        source="its docstring: x / sqrt(E[x^2] + eps), and accumulation in float32",
    ),
    *(
        Row(
            path="mlx.nn:GroupNorm",
            variant=f"pytorch_compatible={compatible}",
            make=given(4, 64, names=("weight", "bias"), pytorch_compatible=compatible),
            **BOTH,
            shape=IMAGE,
            expected=LAYER | LAST | {"groups": 4},
            source=f"{GROUP_PAPER}; its docstring",
            differs=differs,
        )
        for compatible, differs in (
            (True, None),
            (
                False,
                (
                    CHOICE,
                    "Its docstring: by default features are grouped as MLX does, and not as PyTorch and the paper.",
                ),
            ),
        )
    ),
    Row(
        path="mlx.nn:InstanceNorm",
        make=given(64, affine=True, names=("weight", "bias")),
        **BOTH,
        shape=IMAGE,
        expected=LAYER | LAST | {"groups": 64},
        source=f"{INSTANCE_PAPER}; its docstring",
    ),
    *(
        Row(
            path=f"{MODELS}.{name}",
            make=given(64, eps=1e-6),
            weight=WEIGHT,
            expected=OFFSET,
            source=source,
            differs=IN_DTYPE if "MiniMax" in source else TWO_REFERENCES,
        )
        for name, source in (
            ("gemma:RMSNorm", "google/gemma_pytorch gemma/model.py: 1 + weight in float32"),
            ("gemma2:RMSNorm", "google/gemma_pytorch gemma/model.py: 1 + weight in float32"),
            ("gemma3_text:RMSNorm", "google/gemma_pytorch gemma/model.py: 1 + weight in float32"),
            ("recurrent_gemma:RMSNorm", "transformers RecurrentGemmaRMSNorm: 1 + weight in float32"),
            ("minimax_m3_vl:GemmaRMSNorm", "transformers MiniMaxM3VLRMSNorm: 1 + weight in float32"),
        )
    ),
    Row(
        path=f"{MODELS}.muse_glimmer:CenteredRMSNorm",
        make=given(64, eps=1e-6),
        weight=WEIGHT,
        expected=OFFSET,
        source="transformers MuseGlimmerTextCenteredRMSNorm: 1 + weight in float32",
        differs=(UNDECIDED, "1 is added in the weight's dtype, as torchtitan models/muse_glimmer does."),
    ),
    Row(
        path=f"{MODELS}.nemotron:NemotronLayerNorm1P",
        make=given(64, names=("weight", "bias")),
        **BOTH,
        expected=LAYER | {"weight_offset": 1.0, "offset_dtype": "parameter"},
        source="transformers NemotronLayerNorm1P: 1 is added in the weight's dtype",
    ),
    Row(
        path=f"{MODELS}.muse_spark:InputScaleRMSNorm",
        make=given(64, eps=1e-6),
        weight=WEIGHT,
        expected=RMS | {"weight_placement": "before", "weight_offset": 1.0},
        source="transformers MuseSparkTextInputScaledRMSNorm",
        differs=(CHOICE, "norm_gain adds the 1 when a checkpoint is loaded."),
    ),
    *(
        Row(path=path, make=make, weight=WEIGHT, expected=RMS, source=source, differs=differs)
        for path, make, source, differs in (
            (
                f"{MODELS}.step3p5:ZeroCenteredRMSNorm",
                given(64, eps=1e-6),
                f"{RMS_PAPER}; its loader adds the 1 of a zero-centred gain",
                None,
            ),
            (f"{MODELS}.minimax:ShardedRMSNorm", given(64, eps=1e-6), RMS_PAPER, None),
            (
                f"{MODELS}.qwen3_next:Qwen3NextRMSNormGated",
                given(64),
                "transformers Qwen3NextRMSNormGated, without a gate",
                None,
            ),
        )
    ),
    *(
        Row(
            path=f"{MODELS}.{name}",
            make=given(64, eps=1e-6),
            weight=WEIGHT,
            expected=RMS | {"weight_offset": 1.0},
            source=f"{RMS_PAPER}; its signature's offset of 1",
        )
        for name in ("plamo2:RMSNorm", "plamo3:RMSNorm")
    ),
    *(
        Row(
            path=f"{MODELS}.{name}:GroupRMSNorm",
            variant="4 groups",
            make=given(64, groups=4),
            weight=WEIGHT,
            expected=RMS | {"eps": 1e-5, "groups": 4},
            source="its arguments: groups of features with a mean square of their own",
        )
        for name in ("bailing_hybrid", "bailing_moe_linear")
    ),
    Row(
        path=f"{MODELS}.nemotron_h:MambaRMSNormGated",
        variant="4 groups, without a gate",
        make=given(64, 1e-6, 16),
        weight=WEIGHT,
        expected=RMS | {"groups": 4},
        source="transformers NemotronHRMSNormGated: groups of group_size features",
    ),
    Row(
        path=f"{MODELS}.mamba2:MambaRMSNormGated",
        variant="without a gate",
        make=given(64),
        weight=WEIGHT,
        expected=RMS | {"groups": 8},
        source="state-spaces/mamba mamba_ssm/modules/mamba2.py: d_ssm // ngroups features a group; "
        "transformers Mamba2Config: 8 groups",
        differs=(OWN_SOURCE, "One mean square of all features, whatever n_groups says."),
    ),
    Row(
        path=f"{MODELS}.falcon_h1:FalconH1RMSNormGated",
        variant="4 groups, without a gate",
        make=given(64, n_groups=4),
        weight=WEIGHT,
        expected=RMS | {"groups": 4},
        source="transformers FalconH1RMSNormGated: n_groups groups",
        differs=(OWN_SOURCE, "n_groups is kept and not used. FalconH1Config's default is 1 group."),
    ),
    Row(
        path=f"{MODELS}.granitemoehybrid:GraniteMoeHybridRMSNormGated",
        variant="without a gate",
        make=given(64),
        weight=WEIGHT,
        expected=RMS,
        source="transformers GraniteMoeHybridRMSNormGated with the 1 group of its config",
    ),
    *(
        Row(path=f"{MODELS}.{path}", make=make, expected=WITHOUT_GAIN | {"eps": eps}, source=source)
        for path, make, eps, source in (
            ("gemma3n:RMSNoScale", given(eps=1e-6, names=()), 1e-6, "transformers Gemma3nRMSNorm(with_scale=False)"),
            ("gemma4_text:RMSNormNoScale", given(64, names=()), 1e-6, "transformers Gemma4RMSNorm(with_scale=False)"),
            ("muse_spark:WeightlessRMSNorm", given(names=()), 1e-5, RMS_PAPER),
            ("talkie:rms_norm", lambda function: of_mlx(lambda x: function(x, 1e-5)), 1e-5, RMS_PAPER),
        )
    ),
    Row(
        path=f"{MODELS}.nanochat:rms_norm",
        make=plain,
        expected=WITHOUT_GAIN | {"eps": None},
        source="karpathy/nanochat nanochat/gpt.py: F.rms_norm without eps, whose default is the machine epsilon",
        differs=(OWN_SOURCE, "eps is a number in the code; transformers' NanoChatConfig has 1e-6."),
    ),
    Row(
        path=f"{MODELS}.rwkv7:l2_norm",
        make=plain,
        expected={"reduction": "sum", "centre_statistics": False, "eps": 1e-12, "eps_placement": "clamp"},
        source="BlinkDL/RWKV-LM RWKV-v7: F.normalize, whose eps is 1e-12",
        differs=(UNDECIDED, "The clamp is at 1e-7, and no source says which is meant; no row is so short."),
    ),
    Row(
        path=f"{MODELS}.cohere:LayerNorm2D",
        make=given(1, 64, 1e-5),
        weight=WEIGHT.reshape(1, 64),
        shape=(2, 3, 1, 64),
        expected=LAYER | {"has_bias": False},
        source="transformers CohereLayerNorm of heads and features",
    ),
    *(
        Row(
            path=f"{MODELS}.{model}:{kind}",
            variant=inner,
            make=latent(inner, **sizes),
            weight=WEIGHT,
            expected=RMS,
            source=source,
            differs=DISPUTED if is_other else None,
        )
        for model, kind, is_other, source, sizes in (
            (
                "longcat_flash",
                "LongcatFlashMLA",
                True,
                "transformers LongcatFlashMLA: LongcatFlashRMSNorm's default 1e-6",
                {},
            ),
            (
                "minicpm3",
                "Attention",
                True,
                "openbmb/MiniCPM3-4B modeling_minicpm.py and transformers: MiniCPMRMSNorm's default 1e-6",
                {
                    "rope_scaling": {
                        "type": "longrope",
                        "long_factor": [1.0] * 4,
                        "original_max_position_embeddings": 64,
                    }
                },
            ),
            ("deepseek_v32", "DeepseekV32Attention", False, "deepseek-ai/DeepSeek-V3.2 inference/model.py: 1e-6", {}),
            ("deepseek_v3", "DeepseekV3Attention", False, "deepseek-ai/DeepSeek-V3 inference/model.py: 1e-6", {}),
        )
        for inner in ("q_a_layernorm", "kv_a_layernorm")
    ),
]
