"""Norms that do not run here, written down from their lines in PyTorch: Rust, C++, CUDA, and Python that needs a GPU.

Each function has the operations of the cited lines in their order and dtypes, so that formula, eps and roundings are
theirs. The effects of a compiler or a GPU are not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from wild_libraries.arrays import BIAS, WEIGHT
from wild_libraries.rows import (
    GROUP,
    GROUP_PAPER,
    LAYER,
    LAYER_PAPER,
    OWN_SOURCE,
    PLAIN,
    RMS,
    RMS_PAPER,
    UNDECIDED,
    Row,
)

PACKAGES: dict[str, str] = {}
CANDLE = "huggingface/candle@2a13b0f3ff62f7e67013597f2996f764c5735e21"
BURN = "tracel-ai/burn@2c06be351006851d42fdb6df16b976f4a82d9747"
GGML = "ggml-org/ggml@d99724f2b141fed9e1a9f402213506c081433465"
MISTRAL_RS = "EricLBuehler/mistral.rs@9e922623f24b32d41f3892b74f0eed18707f4e6c"
NEOX = "EleutherAI/gpt-neox@ea7aefd8f8e183256992d9fede4d7c71a46d67a5"
BRIDGE = "NVIDIA-NeMo/Megatron-Bridge@067f987df03b8355b03192d88d70f1709fedf51a"
MEGATRON = "NVIDIA/Megatron-LM@00caa53af30912914981c86f39db123961678bbd"
VLLM = "vllm-project/vllm@00cba797bda48c0413ff05ab3c699335a745d734"
SGLANG = "sgl-project/sglang@000fc1a8d6aeaecbeeebbfec90d88af7262afbc0"
GEMMA = "google-deepmind/gemma@1ca4fc7d68b8691a7c2334097890a94f490fe03e"
T5X = "google-research/t5x@03dfc44be7f9a93d34c1d7fd6f896d1c364a7d4d"
MAMBA = "state-spaces/mamba@60dadf2e0ee730ac337035d5533de10bc26e4847"
APEX = "NVIDIA/apex@014f30f72902aeca1437b56ef66f97801a7c35d9"
IMAGE = (2, 64, 5, 5)


def wide(x: Tensor) -> Tensor:
    """16-bit numbers as float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def rms(x: Tensor, eps: float) -> Tensor:
    """sqrt(mean(x^2) + eps)."""
    return (x.square().mean(-1, keepdim=True) + eps).sqrt()


def normalized(x: Tensor, eps: float = 1e-6) -> Tensor:
    """An RMSNorm without a gain in float32."""
    return wide(x) * torch.rsqrt(wide(x).square().mean(-1, keepdim=True) + eps)


def candle_rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """The row is divided by the root mean square rounded to its dtype; each step is rounded."""
    return x / rms(wide(x), eps).to(x.dtype) * weight


def candle_offset(x: Tensor, weight: Tensor) -> Tensor:
    """Rounded before the gain; 1 is added in the gain's dtype."""
    return (wide(x) / rms(wide(x), 1e-6)).to(x.dtype) * (weight + 1.0)


def candle_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The variance from sums of x and of its squares."""
    y = wide(x)
    mean = y.sum(-1, keepdim=True) / y.shape[-1]
    variance = y.square().sum(-1, keepdim=True) / y.shape[-1] - mean * mean
    return ((y - mean) * (variance + 1e-5).sqrt().reciprocal() * weight + bias).to(x.dtype)


def groups_of_four(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """4 groups of channels: statistics in float32, affine in the input's dtype."""
    y = wide(x).reshape(x.shape[0], 4, -1)
    y = y - y.mean(-1, keepdim=True)
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()).to(x.dtype).reshape(x.shape)
    return y * weight.reshape(-1, 1, 1) + bias.reshape(-1, 1, 1)


def burn_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """In float32 throughout where the input has 16 bits."""
    return F.layer_norm(wide(x), x.shape[-1:], wide(weight), wide(bias), 1e-5).to(x.dtype)


def ggml_norm(x: Tensor) -> Tensor:
    """Two passes: the mean, then the squares about it."""
    y = x.float() - x.float().mean(-1, keepdim=True)
    return y * (1 / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt())


def ggml_cuda_norm(x: Tensor) -> Tensor:
    """One pass: the sum and the sum of squares."""
    y = x.float()
    mean = y.sum(-1, keepdim=True) / y.shape[-1]
    return (y - mean) * torch.rsqrt(y.square().sum(-1, keepdim=True) / y.shape[-1] - mean * mean + 1e-5)


def ggml_rms(x: Tensor, weight: Tensor) -> Tensor:
    """Squares in float32, added in float64."""
    squares = x.float().square().double().sum(-1, keepdim=True) / x.shape[-1]
    return x.float() * (1 / (squares.float() + 1e-6).sqrt()) * weight.float()


def ggml_l2(x: Tensor) -> Tensor:
    """x / max(norm, eps)."""
    root = x.float().square().double().sum(-1, keepdim=True).sqrt().float()
    return x.float() * (1 / root.clamp(min=1e-6))


def ggml_group(x: Tensor) -> Tensor:
    """4 groups of channels, two passes."""
    y = x.float().reshape(x.shape[0], 4, -1)
    y = y - y.mean(-1, keepdim=True)
    return (y * (1 / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt())).reshape(x.shape)


def mistral_rs_gemma(x: Tensor, weight: Tensor) -> Tensor:
    """1 is added when the checkpoint is loaded, in its dtype; then candle's rms_norm."""
    return candle_rms(x, weight + 1.0)


def mistral_rs_float32(x: Tensor, weight: Tensor) -> Tensor:
    """F32RmsNorm: rounded before the gain."""
    y = x.float()
    return (y * (1 / (y.square().mean(-1, keepdim=True) + 1e-6)).sqrt()).to(x.dtype) * weight


def neox_rms(x: Tensor, weight: Tensor) -> Tensor:
    """In float32, rounded once."""
    return (weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-8))).to(x.dtype)


def neox_rms_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """With a bias nothing is rounded back."""
    return weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-8)) + bias


def neox_scale(x: Tensor, weight: Tensor) -> Tensor:
    """g x / max(norm, eps)."""
    return x / torch.norm(x, dim=-1, keepdim=True).clamp(min=1e-8) * weight


def llama(x: Tensor, weight: Tensor) -> Tensor:
    """Rounded before the gain."""
    return normalized(x).to(x.dtype) * weight


def late(x: Tensor, weight: Tensor) -> Tensor:
    """The gain in float32, rounded once."""
    return (normalized(x) * weight).to(x.dtype)


def offset(x: Tensor, weight: Tensor) -> Tensor:
    """1 + weight in float32, rounded once."""
    return (normalized(x) * (1.0 + weight.float())).to(x.dtype)


def float32_layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """In float32 with parameters of float32."""
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), 1e-6).type_as(x)


def gemma_jax(x: Tensor, weight: Tensor) -> Tensor:
    """Everything in the dtypes of x and of the stored scale."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)


def t5x(x: Tensor, weight: Tensor) -> Tensor:
    """With dtype the input's: rounded, then times the scale in that dtype."""
    return normalized(x).to(x.dtype) * weight.to(x.dtype)


def mamba_groups(x: Tensor, weight: Tensor) -> Tensor:
    """rms_norm_ref with groups of 16 features, no gate."""
    y = x.float().unflatten(-1, (-1, 16))
    y = y * (1 / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-6))
    return (y.flatten(-2) * weight.float()).to(x.dtype)


def apex_rms(x: Tensor, weight: Tensor) -> Tensor:
    """manual_rms_norm: rounded to the weight's dtype, if that has 16 bits."""
    y = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    return weight * (y.to(weight.dtype) if weight.dtype in (torch.float16, torch.bfloat16) else y)


def of(
    library: str,
    repository: str,
    where: str,
    function: Callable[..., Tensor],
    expected: Any,
    source: str,
    **more: Any,
) -> Row:
    """The row of a transcription; its function is given a gain and a bias where it takes them."""
    given = dict(zip(("weight", "bias"), (WEIGHT, BIAS), strict=True))
    taken = function.__code__.co_varnames[1 : function.__code__.co_argcount]
    return Row(
        path=where,
        library=library,
        repository=repository,
        make=lambda _: function,
        expected=expected,
        source=source,
        **{name: given[name] for name in taken if name in given},
        **more,
    )


NO_GAIN = {"has_weight", "weight_offset"}
BARE_LAYER = {name: value for name, value in (LAYER | PLAIN).items() if name not in NO_GAIN}
BARE_L2 = {"reduction": "sum", "centre_statistics": False, "eps": 1e-6, "eps_placement": "clamp"}
OFFSET = RMS | {"weight_offset": 1.0, "offset_dtype": "float32", "cast": "late"}
TORCH_GEMMA = "google/gemma_pytorch gemma/model.py: 1 + weight in float32, rounded once"
TWO_REFERENCES = (UNDECIDED, "google-deepmind/gemma in JAX adds it in the dtype of the stored scale, as here.")
GEMMA_4 = "google-deepmind/gemma gm/nn/gemma4/_layers.py and transformers Gemma4RMSNorm: nothing is added to the weight"

ROWS = [
    of("candle", CANDLE, "candle-nn/src/ops.rs:499-510 RmsNorm, on the CPU", candle_rms, RMS, RMS_PAPER),
    of(
        "candle",
        CANDLE,
        "candle-nn/src/ops.rs:661-672 rms_norm_slow",
        llama,
        RMS | {"cast": "early"},
        "meta-llama/llama llama/model.py: rounded before the gain",
    ),
    of("candle", CANDLE, "candle-nn/src/ops.rs:740-762 LayerNorm, on the CPU", candle_layer, LAYER, LAYER_PAPER),
    of(
        "candle",
        CANDLE,
        "candle-nn/src/group_norm.rs:41-74 GroupNorm",
        groups_of_four,
        GROUP | {"groups": 4},
        GROUP_PAPER,
        shape=IMAGE,
    ),
    *(
        of(
            "candle",
            CANDLE,
            f"candle-transformers/src/models/{name} RmsNorm",
            candle_offset,
            OFFSET,
            TORCH_GEMMA,
            differs=TWO_REFERENCES,
        )
        for name in ("gemma.rs:59-74", "gemma2.rs:52-67", "gemma3.rs:47-62")
    ),
    *(
        of(
            "candle",
            CANDLE,
            f"candle-transformers/src/models/gemma4/{name} RmsNorm",
            candle_offset,
            RMS | {"weight_offset": 0.0},
            GEMMA_4,
            differs=(OWN_SOURCE, "Gains are stored about 1: 1 is added a second time."),
        )
        for name in ("text.rs:27-42", "vision.rs:26-41")
    ),
    of(
        "candle",
        CANDLE,
        "candle-transformers/src/models/t5.rs:263-275 T5LayerNorm",
        t5x,
        RMS,
        "Raffel et al. 2020, 2.1, and google-research/t5x layers.py: scaled, nothing subtracted or added",
    ),
    of(
        "burn",
        BURN,
        "crates/burn-nn/src/modules/norm/rms.rs:71-76 RmsNorm",
        lambda x, weight: candle_rms(x, weight, 1e-5),
        RMS | {"eps": 1e-5},
        f"{RMS_PAPER}, and its documentation",
    ),
    of("burn", BURN, "crates/burn-nn/src/modules/norm/layer.rs:79-98 LayerNorm", burn_layer, LAYER, LAYER_PAPER),
    of(
        "burn",
        BURN,
        "crates/burn-nn/src/modules/norm/group.rs:150-205 GroupNorm",
        groups_of_four,
        GROUP | {"groups": 4},
        GROUP_PAPER,
        shape=IMAGE,
    ),
    of("ggml", GGML, "src/ggml-cpu/ops.cpp:3698-3765 norm", ggml_norm, BARE_LAYER, LAYER_PAPER),
    of("ggml", GGML, "src/ggml-cuda/norm.cu:5-43 norm_f32", ggml_cuda_norm, BARE_LAYER, LAYER_PAPER),
    of("ggml", GGML, "src/ggml-cpu/ops.cpp:3795-3858 rms_norm", ggml_rms, RMS, RMS_PAPER),
    of(
        "ggml",
        GGML,
        "src/ggml-cpu/ops.cpp:4174-4220 l2_norm",
        ggml_l2,
        BARE_L2,
        "torch.nn.functional.normalize, which ggml-cuda/norm.cu names: x / max(norm, eps)",
    ),
    of(
        "ggml",
        GGML,
        "src/ggml-cpu/ops.cpp:4079-4152 group_norm",
        ggml_group,
        {name: value for name, value in (GROUP | PLAIN).items() if name not in NO_GAIN} | {"groups": 4, "eps": 1e-6},
        GROUP_PAPER,
        shape=IMAGE,
    ),
    of(
        "mistral.rs",
        MISTRAL_RS,
        "mistralrs-core/src/layers.rs:403-412 RmsNorm",
        candle_rms,
        RMS,
        RMS_PAPER,
    ),
    of(
        "mistral.rs",
        MISTRAL_RS,
        "mistralrs-core/src/layers.rs:512-592 GemmaRmsNorm",
        mistral_rs_gemma,
        OFFSET,
        TORCH_GEMMA,
        differs=TWO_REFERENCES,
    ),
    of(
        "mistral.rs",
        MISTRAL_RS,
        "mistralrs-core/src/layers.rs:613-622 F32RmsNorm",
        mistral_rs_float32,
        RMS | {"cast": "early"},
        "meta-llama/llama llama/model.py: rounded before the gain",
    ),
    of(
        "gpt-neox",
        NEOX,
        "megatron/model/norms.py:61-102 RMSNorm",
        neox_rms,
        RMS | {"eps": 1e-8},
        f"{RMS_PAPER}; eps 1e-8 in its code, bzhangGo/rmsnorm rmsnorm_torch.py",
    ),
    of(
        "gpt-neox",
        NEOX,
        "megatron/model/norms.py:99 RMSNorm(bias=True)",
        neox_rms_bias,
        RMS | {"eps": 1e-8, "has_bias": True, "output_dtype": "input"},
        "the branch without a bias, line 102: back in the input's dtype",
        differs=(UNDECIDED, "With a bias the output stays in float32; no source says whether that is meant."),
    ),
    of(
        "gpt-neox",
        NEOX,
        "megatron/model/norms.py:105-113 ScaleNorm",
        neox_scale,
        RMS | {"reduction": "sum", "eps_placement": "clamp", "eps": 1e-8},
        "Nguyen and Salazar 2019, eq. 5; eps of its arguments, neox_args.py:202",
    ),
    of(
        "Megatron-Bridge",
        BRIDGE,
        "src/megatron/bridge/models/common/te_layers.py:47 post_layernorm",
        lambda x, weight: (normalized(x, 1e-5) * (1.0 + weight.float())).to(x.dtype),
        OFFSET,
        "transformers Gemma2Config and gemma2_provider.py:489: 1e-6",
        differs=(OWN_SOURCE, "TENorm is called without eps: its default 1e-5 acts."),
    ),
    of(
        "Megatron-Bridge",
        BRIDGE,
        "src/megatron/bridge/models/gemma/modeling_gemma4.py:103-140 Gemma4RMSNorm",
        late,
        RMS | {"cast": "late"},
        "transformers Gemma4RMSNorm, named in its docstring",
    ),
    of(
        "Megatron-LM",
        MEGATRON,
        "megatron/core/transformer/torch_norm.py:66-114 L2Norm",
        lambda x: normalized(x).type_as(x),
        {name: value for name, value in (RMS | PLAIN).items() if name not in NO_GAIN},
        "its docstring: the mean of the squares is 1; its name says L2",
    ),
    of(
        "Megatron-LM",
        MEGATRON,
        "megatron/core/transformer/torch_norm.py:25-63 WrappedTorchNorm",
        lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5),
        LAYER,
        LAYER_PAPER,
    ),
    of(
        "vLLM",
        VLLM,
        "vllm/model_executor/layers/layernorm.py RMSNorm.forward_native",
        llama,
        RMS | {"cast": "early"},
        "meta-llama/llama llama/model.py: rounded before the gain",
    ),
    of(
        "vLLM",
        VLLM,
        "vllm/model_executor/layers/layernorm.py GemmaRMSNorm.forward_static",
        offset,
        OFFSET,
        TORCH_GEMMA,
    ),
    of(
        "vLLM",
        VLLM,
        "vllm/model_executor/layers/layernorm.py LayerNorm",
        float32_layer,
        LAYER | {"eps": 1e-6},
        f"{LAYER_PAPER}; eps of its signature",
    ),
    of(
        "SGLang",
        SGLANG,
        "python/sglang/srt/layers/layernorm.py RMSNorm.forward_native",
        late,
        RMS | {"cast": "early"},
        "meta-llama/llama llama/model.py: rounded before the gain",
        differs=(UNDECIDED, "The gain multiplies in float32. One class serves models that round either way."),
    ),
    of(
        "SGLang",
        SGLANG,
        "python/sglang/srt/layers/layernorm.py GemmaRMSNorm.forward_native",
        offset,
        OFFSET,
        TORCH_GEMMA,
    ),
    of(
        "SGLang",
        SGLANG,
        "python/sglang/srt/layers/layernorm.py Gemma3RMSNorm",
        offset,
        OFFSET,
        TORCH_GEMMA,
    ),
    of(
        "JAX Gemma",
        GEMMA,
        "gemma/gm/nn/_layers.py:43-61 RMSNorm",
        gemma_jax,
        OFFSET,
        TORCH_GEMMA,
        differs=(
            UNDECIDED,
            "Google's references in JAX and in PyTorch differ: here all is in the dtypes of x and of the scale.",
        ),
    ),
    of(
        "T5X",
        T5X,
        "t5x/examples/t5/layers.py LayerNorm(dtype=the input's)",
        t5x,
        RMS | {"cast": "input"},
        "Raffel et al. 2020, 2.1; transformers T5LayerNorm: eps 1e-6",
    ),
    of(
        "mamba_ssm",
        MAMBA,
        "mamba_ssm/ops/triton/layernorm_gated.py:18-38 rms_norm_ref, groups of 16",
        mamba_groups,
        RMS | {"groups": 4},
        "Dao and Gu 2024, section 8.1: a group norm for each group of heads",
    ),
    of(
        "apex",
        APEX,
        "apex/normalization/fused_layer_norm.py:24-39 manual_rms_norm",
        apex_rms,
        RMS | {"eps": 1e-5, "cast": "weight"},
        "its comment: from Hugging Face, which is transformers T5LayerNorm; eps of its modules",
    ),
]
