"""Each preset equals the code it was read from: the real class with random parameters."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers import PRESETS, assert_close
from normkit import reference, specs

N = 96


def of_transformers(family: str, name: str):
    return getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)


# A preset and how its class is made. transformers' classes are imported when first used.
CLASSES = {
    "TORCH_LAYER_NORM": lambda: nn.LayerNorm(N),
    "BERT": lambda: nn.LayerNorm(N, eps=1e-12),
    "MODERNBERT": lambda: nn.LayerNorm(N, bias=False),
    "TORCH_RMS_NORM": lambda: nn.RMSNorm(N),
    "OLMO": lambda: of_transformers("olmo", "OlmoLayerNorm")(N),
    "COHERE": lambda: of_transformers("cohere", "CohereLayerNorm")(N),
    "NEMOTRON": lambda: of_transformers("nemotron", "NemotronLayerNorm1P")(N),
    "DEBERTA": lambda: of_transformers("deberta", "DebertaLayerNorm")(N, eps=1e-7),
    "CONVNEXT": lambda: of_transformers("convnext", "ConvNextLayerNorm")(N, data_format="channels_first"),
    "POOLFORMER": lambda: of_transformers("poolformer", "PoolFormerGroupNorm")(N),
    "OLMO2": lambda: of_transformers("olmo2", "Olmo2RMSNorm")(N),
    "LLAMA": lambda: of_transformers("llama", "LlamaRMSNorm")(N),
    "GEMMA": lambda: of_transformers("gemma", "GemmaRMSNorm")(N),
    "MUSE_SPARK": lambda: of_transformers("muse_spark", "MuseSparkTextCenteredRMSNorm")(N),
    "MUSE_SPARK_INPUT_SCALED": lambda: of_transformers("muse_spark", "MuseSparkTextInputScaledRMSNorm")(N),
    "T5": lambda: of_transformers("t5", "T5LayerNorm")(N),
    "NANOCHAT": lambda: of_transformers("nanochat", "NanoChatRMSNorm")(),
    "DEEPSEEK_V4_UNWEIGHTED": lambda: of_transformers("deepseek_v4", "DeepseekV4UnweightedRMSNorm")(),
    "IMAGEGPT": lambda: of_transformers("imagegpt", "ImageGPTLayerNorm")((N,)),
    "POCKET_TTS": lambda: of_transformers("pocket_tts", "PocketTTSTimestepNorm")(N),
}

# These multiply gain and divisor in another order, which 16-bit rounding shows and float32 does not.
OTHER_ORDER = ["POCKET_TTS"]
SAME_ORDER = [name for name in CLASSES if name not in OTHER_ORDER]


def annotated_transformer(x, weight, bias):
    return weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + bias


# Presets whose source is a paper or a library that is not installed here.
FUNCTIONS = {
    "ANNOTATED_TRANSFORMER": annotated_transformer,
    "SCALE_NORM": lambda x, weight, _: weight * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5),
    "L2_NORM": lambda x, _, __: F.normalize(x, dim=-1),
    "X_TRANSFORMERS_RMS": lambda x, weight, _: F.normalize(x, dim=-1) * N**0.5 * weight,
}


def make(name: str, parameter_dtype: torch.dtype, input_dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    module, spec = CLASSES[name](), PRESETS[name]
    for parameter in module.parameters():
        nn.init.normal_(parameter, mean=1.0 - spec.weight_offset, std=0.3)
    channels = spec.axes in ((1,), "all_but_batch")
    x = torch.randn(64, N, 4, 2) if channels else torch.randn(512, N)
    return module.to(parameter_dtype), (x + 0.3).to(input_dtype)


def both(name: str, parameter_dtype: torch.dtype, input_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, float]:
    """What the class computes, what the reference computes, and the largest bias."""
    module, x = make(name, parameter_dtype, input_dtype)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    with torch.no_grad():
        return (
            module(x),
            reference.forward(x, PRESETS[name], weight, bias),
            0.0 if bias is None else float(bias.abs().max()),
        )


def assert_one_ulp(theirs: torch.Tensor, ours: torch.Tensor, largest_bias: float) -> None:
    """One ulp of the terms: where gain * row and bias cancel, that is many ulps of what is left."""
    limits = torch.finfo(ours.dtype)
    # float16 shows more near-ties: a subnormal keeps its spacing, and a gain makes two ulps of one that fell before it.
    units = 2 if ours.dtype == torch.float16 else 1
    assert_close(theirs, ours, units=units, terms=ours.abs().clamp_min(limits.tiny) + largest_bias)


def test_every_preset_has_a_source_here():
    assert CLASSES.keys() | FUNCTIONS.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", CLASSES)
def test_float32_equals_the_class(name):
    theirs, ours, _ = both(name, torch.float32, torch.float32)
    # Theirs sums 96 terms in float32; measured: within 4 ulp.
    assert_close(theirs, ours, units=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SAME_ORDER)
def test_16_bits_equal_the_class_bit_for_bit(name, dtype):
    theirs, ours, largest_bias = both(name, dtype, dtype)
    assert ours.dtype == theirs.dtype
    # Not all: their statistics are rounded to float32, and where a value lies within that error of the middle between
    # two 16-bit numbers, it falls to the other one. Measured: 99.97 % or more.
    assert (theirs == ours).double().mean() >= 0.999
    assert_one_ulp(theirs, ours, largest_bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SAME_ORDER)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
def test_float32_parameters_on_16_bit_input_equal_the_class(name, dtype):
    theirs, ours, largest_bias = both(name, torch.float32, dtype)
    assert ours.dtype == theirs.dtype
    if theirs.dtype == dtype:
        assert (theirs == ours).double().mean() >= 0.999
        assert_one_ulp(theirs, ours, largest_bias)
    else:
        # A float32 result of a row that was rounded to 16 bits on the way (or not at all: T5).
        terms = ours.abs() + largest_bias
        off = (theirs.double() - ours.double()).abs()
        assert (off <= 4 * torch.finfo(torch.float32).eps * terms).double().mean() >= 0.999
        assert (off <= torch.finfo(dtype).eps * terms).all()


@pytest.mark.parametrize("name", OTHER_ORDER)
def test_16_bits_are_near_where_the_order_differs(name):
    theirs, ours, _ = both(name, torch.bfloat16, torch.bfloat16)
    assert_close(theirs, ours, units=3, terms=ours.abs())


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_formulas_of_papers_and_libraries(name, dtype):
    spec = PRESETS[name]
    x = (torch.randn(64, N) + 0.3).to(dtype)
    x[0] = 0.0
    x[1] *= 1e-7
    weight = torch.randn(() if name == "SCALE_NORM" else N, dtype=dtype) if spec.has_weight else None
    bias = torch.randn(N, dtype=dtype) if spec.has_bias else None
    assert_close(FUNCTIONS[name](x, weight, bias), reference.forward(x, spec, weight, bias), units=4)


@pytest.mark.parametrize("shape", [(N,), (2, N), (2, 3, N)])
def test_cohere_normalizes_each_head(shape):
    module = of_transformers("cohere", "CohereLayerNorm")(shape)
    nn.init.normal_(module.weight)
    x = torch.randn(5, 2, 3, N)
    if len(shape) == 2:
        x = x.movedim(1, 2).contiguous()
    assert_close(module(x), reference.forward(x, specs.COHERE, module.weight), units=4)


def test_eps_none_is_the_machine_epsilon_of_the_arithmetic():
    # Rows so small that eps decides. 16-bit rows are normalized in float32, so their eps is that of float32.
    for dtype, eps in [(torch.float64, 2.0**-52), (torch.float32, 2.0**-23), (torch.bfloat16, 2.0**-23)]:
        x = (torch.randn(4, N) * eps**0.5).to(dtype)
        ours = reference.forward(x, specs.TORCH_RMS_NORM.replace(has_weight=False))
        explicit = reference.forward(x, specs.TORCH_RMS_NORM.replace(has_weight=False, eps=eps))
        assert torch.equal(ours, explicit)
        assert_close(F.rms_norm(x, (N,)), ours, units=4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_l2_norm_equals_torchs_normalize_bit_for_bit_in_16_bits(dtype):
    x = torch.randn(512, N).to(dtype)
    assert torch.equal(reference.forward(x, PRESETS["L2_NORM"]), F.normalize(x, dim=-1))
