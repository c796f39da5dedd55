"""Faults of casts and dtypes, and norms that overwrite their input or are not repeatable."""

import torch
from torch import nn

from . import formulas as f
from .blocks import language
from .cases import Draw, Scene, fault, get, norm_paths, put
from .inspect_formula import block_norm, planted, random_model
from .material import as_if_trained, byte_batch, real, tiny

CAST = "casts and dtypes"


@fault(CAST, "casts?", "round", say="rounded after the gain, Llama rounds before", needs=["smollm2"])
def cast_after_gain(draw: Draw) -> Scene:
    """OLMo 2's order of casts in a Llama, in bfloat16 (sglang PR 22435: MMLU 0.64 against 0.72)."""
    model, batch = real(draw, "smollm2", torch.bfloat16)
    paths = norm_paths(model)
    for path in paths:
        norm = f.instead(get(model, path), f.rms_norm)
        norm.early = False
        put(model, path, norm)
    return Scene(model, batch, paths)


@fault(CAST, "casts?", "round", say="rounded before the gain, OLMo 2 rounds after")
def cast_before_gain(draw: Draw) -> Scene:
    """Llama's order of casts in an OLMo 2 in bfloat16 (transformers PR 38131)."""
    model = random_model(draw, "Olmo2").to(torch.bfloat16)
    path = block_norm(draw, model)
    return planted(model, path, f.llama_norm, byte_batch(draw))


@fault(CAST, "16 bits", "bfloat16", "statistics", say="mean squares are computed in bfloat16", needs=["qwen05"])
def statistics_in_bfloat16(draw: Draw) -> Scene:
    """The upcast to float32 is missing in one norm of Qwen 2.5."""
    model, batch = real(draw, "qwen05", torch.bfloat16)
    return planted(model, block_norm(draw, model), f.all_in_input_dtype, batch)


@fault(CAST, "float16", "overflow", "16 bits", r"\binf", "past the end", say="squares overflow in float16")
def statistics_overflow_float16(draw: Draw) -> Scene:
    """x.pow(2) in float16 with values near 400: the squares are infinite and the rows zero (T5, transformers #9295)."""
    model = language(draw, norm=lambda n: nn.RMSNorm(n, eps=1e-6))
    with torch.no_grad():
        model.embedding.weight.mul_(800)
    model.half()
    return planted(model, draw.choice(norm_paths(model, "norm1")), f.all_in_input_dtype, byte_batch(draw))


@fault(
    CAST,
    "float16",
    "overflow",
    r"\binf",
    "nan",
    "non-?finite",
    "past the end",
    say="the residual stream leaves float16's range",
    needs=["gemma3"],
)
def stream_overflows_float16(draw: Draw) -> Scene:
    """Gemma 3 in float16: its embedding and stream reach the range's end (vllm PR 17364); here what the MLPs add is
    80 times as large and overflows."""
    model, batch = real(draw, "gemma3", torch.float16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_feedforward_layernorm.weight.copy_((1 + layer.post_feedforward_layernorm.weight) * 80 - 1)
    return Scene(model, batch)


@fault(CAST, "dtype", "float32", say="one norm gives float32 in a bfloat16 model")
def output_in_float32(draw: Draw) -> Scene:
    """The cast back to the input's dtype is missing, so what follows runs in float32 or fails; here its reader
    casts."""
    model = language(draw, norm=lambda n: nn.RMSNorm(n, eps=1e-6)).to(torch.bfloat16)
    number = draw.randrange(len(model.blocks))

    def widened(norm: f.Written, x: torch.Tensor) -> torch.Tensor:
        return f.rms_norm(norm, x.float())

    class Casting(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.to(torch.bfloat16))

    scene = planted(model, f"blocks.{number}.norm1", widened, byte_batch(draw))
    model.blocks[number].attention = Casting(model.blocks[number].attention)
    return scene


@fault(CAST, "dtype", "float32", "mixed", "cast", say="one norm is in float16, all others in float32")
def one_gain_in_another_dtype(draw: Draw) -> Scene:
    """One norm of a float32 GPT-2 was left in float16 and rounds its output to it."""
    model = random_model(draw, "GPT2")
    path = block_norm(draw, model)

    def rounded(norm: f.Written, x: torch.Tensor) -> torch.Tensor:
        return f.layer_norm(norm, x.half()).to(x.dtype)

    put(model, path, f.instead(get(model, path), rounded).half())
    return Scene(model, byte_batch(draw), [path])


@fault(CAST, "overwrit", "in.place", say="the norm overwrites its input, which is the residual stream")
def norm_overwrites_stream(draw: Draw) -> Scene:
    """x.mul_(...) in a norm: the residual stream itself is normalized, a post-norm by accident."""
    model = language(draw, norm=lambda n: nn.RMSNorm(n, eps=1e-6))
    return planted(model, draw.choice(norm_paths(model, "norm2")), f.overwriting, byte_batch(draw))


@fault(
    CAST, "repeat", "random", "differ", "dropout", "not the same", say="the norm gives other values on the same input"
)
def norm_is_random(draw: Draw) -> Scene:
    """F.dropout in the norm with training=True, so it is active in evaluation."""
    model = tiny(draw, "Llama")
    as_if_trained(model)
    return planted(model, block_norm(draw, model), f.noisy, byte_batch(draw))
