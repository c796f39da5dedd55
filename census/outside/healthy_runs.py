"""Training runs and single norms in which nothing is wrong."""

import math

import torch
from torch import Tensor, nn

import normkit as nk

from . import formulas as f
from .blocks import Branches, language
from .cases import Draw, Run, Single, clean
from .material import demo, timm_norms, tiny
from .single_norms import OLMO, WIDTHS, held, written
from .training import Text, adamw, language_loss, run, set_rate


@clean("watch")
def fresh_run_with_warm_up(draw: Draw) -> Run:
    """A fresh model, AdamW without decay on gains, warm-up, clipping at 1."""
    model = tiny(draw, draw.choice(["GPT2", "Llama", "Qwen3"]))
    optimizer = adamw(model, 1e-3, betas=(0.9, 0.95))
    return run(
        draw,
        model,
        optimizer,
        before=lambda step: set_rate(optimizer, 1e-3 * min(1.0, (step + 1) / 15)),
        after_backward=lambda _step: float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
    )


@clean("watch")
def trained_model_goes_on(draw: Draw) -> Run:
    """Fine-tuning of a trained model at a tenth of its rate, cosine to zero."""
    model = demo(draw.choice(["layernorm", "rmsnorm"]))
    optimizer = adamw(model, 6e-4)
    return run(
        draw,
        model,
        optimizer,
        steps=50,
        before=lambda step: set_rate(optimizer, 3e-4 * (1 + math.cos(math.pi * step / 50))),
    )


@clean("watch")
def bfloat16_autocast(draw: Draw) -> Run:
    """Autocast to bfloat16 with float32 parameters."""
    model = language(draw)
    inner = language_loss(model, Text(draw))

    def loss(step: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return inner(step)

    return run(draw, model, adamw(model), loss=loss)


@clean("watch")
def only_the_head_trains(draw: Draw) -> Run:
    """A frozen trained body with a new head: norms are frozen on purpose, and the optimizer has the head alone."""
    model = demo("rmsnorm")
    model.requires_grad_(False)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return run(draw, model, torch.optim.AdamW([model.lm_head.weight], lr=1e-3))


@clean("watch")
def accumulated_gradients(draw: Draw) -> Run:
    """Four micro-batches a step; the watch is told once a step."""
    model = tiny(draw, "Llama")
    return run(draw, model, parts=4, steps=30)


@clean("watch")
def momentum_on_a_trained_model(draw: Draw) -> Run:
    """SGD with momentum at a modest rate."""
    model = demo("layernorm")
    return run(draw, model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


@clean("watch")
def batch_norm_of_many(draw: Draw) -> Run:
    """BatchNorm with 64 samples a batch, on vectors."""
    model = Branches(32, nn.BatchNorm1d(32))
    target = torch.randn(32, 32)

    def loss(_step: int) -> Tensor:
        x = torch.randn(64, 32)
        return (model(x) - x @ target / 6).square().mean()

    return run(draw, model, adamw(model), loss=loss)


@clean("watch")
def one_batch_over_and_over(draw: Draw) -> Run:
    """Overfitting one batch on purpose, as a test of the code."""
    model = tiny(draw, "GPT2")
    ids = Text(draw)(0)
    return run(draw, model, adamw(model, 1e-3), batches=lambda _step: ids)


@clean("watch")
def sandwich_norms_from_scratch(draw: Draw) -> Run:
    """A hand-written model with norms on both sides and query and key norms, from scratch."""
    model = language(draw, order="sandwich", qk=True)
    return run(draw, model, adamw(model, 1e-3))


@clean("identify")
def reads_x_transformers(_draw: Draw) -> Single:
    """x-transformers' RMSNorm: F.normalize(x) * sqrt(n) * g, so an L2 norm with a clamp of 1e-12 and a multiplier."""
    from x_transformers.x_transformers import RMSNorm

    return Single(RMSNorm(96), 96, {"multiplier": "sqrt_n", "reduction": "sum", "eps_placement": "clamp", "eps": 1e-12})


@clean("identify")
def reads_timm_float32(draw: Draw) -> Single:
    """timm's LayerNormFp32: torch's LayerNorm with eps 1e-6."""
    width = draw.choice(WIDTHS)
    return Single(
        timm_norms().LayerNormFp32(width),
        width,
        {"eps": 1e-6, "correction": 0, "centre_numerator": True, "has_bias": True},
    )


@clean("identify")
def reads_a_script(draw: Draw) -> Single:
    """A scripted torch LayerNorm with a drawn eps."""
    width, eps = draw.choice(WIDTHS), draw.choice([1e-3, 1e-7, 3e-5])
    return Single(
        torch.jit.script(nn.LayerNorm(width, eps=eps)), width, {"eps": eps, "eps_placement": "inside", "correction": 0}
    )


@clean("identify")
def reads_group_norm(draw: Draw) -> Single:
    """torch's GroupNorm with drawn groups, on pictures."""
    groups = draw.choice([2, 4, 8])
    return Single(
        nn.GroupNorm(groups, 16, eps=1e-4), (2, 16, 5, 5), {"groups": groups, "eps": 1e-4, "axes": "all_but_batch"}
    )


@clean("identify")
def reads_channels_first(_draw: Draw) -> Single:
    """timm's LayerNorm2d normalizes the channels of (batch, channels, height, width)."""
    return Single(timm_norms().LayerNorm2d(24), (2, 24, 5, 6), {"axes": (1,), "eps": 1e-6, "centre_numerator": True})


@clean("identify")
def reads_other_parameter_names(draw: Draw) -> Single:
    """scale and shift for weight and bias; einsum for the mean."""
    width, eps = draw.choice(WIDTHS), draw.choice([1e-5, 1e-8])

    class Normalization(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.rand(width)), nn.Parameter(torch.randn(width))

        def forward(self, x: Tensor) -> Tensor:
            row = x - torch.einsum("...i->...", x)[..., None] / width
            square = torch.einsum("...i,...i->...", row, row)[..., None] / width
            return torch.addcmul(self.shift, row / (square + eps).sqrt(), self.scale)

    fields = {
        "eps": eps,
        "eps_placement": "inside",
        "correction": 0,
        "centre_numerator": True,
        "has_weight": True,
        "has_bias": True,
    }
    return Single(Normalization(), width, fields)


@clean("violations")
def holds_timm_rms(draw: Draw) -> Single:
    """timm's RmsNorm is F.rms_norm with eps 1e-6."""
    width = draw.choice(WIDTHS)
    return Single(timm_norms().RmsNorm(width), (2, 3, width), spec=nk.specs.TORCH_RMS_NORM.replace(eps=1e-6))


@clean("violations")
def holds_float64_statistics(draw: Draw) -> Single:
    """OLMo 2's norm with float64 statistics: wider than the spec's float32, which it says is allowed."""

    def wide(norm: f.Written, x: Tensor) -> Tensor:
        row = x.double()
        return (row * torch.rsqrt(f.mean_square(row) + norm.eps) * norm.weight.double()).to(x.dtype)

    return held(written(draw, wide))


@clean("violations")
def holds_rows_in_chunks(draw: Draw) -> Single:
    """OLMo 2's norm, computed seven rows at a time."""

    def chunked(norm: f.Written, x: Tensor) -> Tensor:
        weight = norm.weight.float()
        rows = x.reshape(-1, x.shape[-1]).float().split(7)
        parts = [row * torch.rsqrt(f.mean_square(row) + norm.eps) * weight for row in rows]
        return torch.cat(parts).view(x.shape).to(x.dtype)

    return held(written(draw, chunked))


@clean("violations")
def holds_nemotron(draw: Draw) -> Single:
    """transformers' NemotronLayerNorm1P: LayerNorm with 1 + weight, added in the weight's dtype."""
    from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

    width = draw.choice(WIDTHS)
    # torch's own LayerNorm gradients in 16 bits are wrong on the CPU, as docs/explanation/bugs-found.md says.
    return Single(
        NemotronLayerNorm1P(width), (2, 3, width), spec=nk.specs.NEMOTRON, skip=("gain gradient", "bias gradient")
    )


@clean("violations")
def holds_frozen_gain(draw: Draw) -> Single:
    """OLMo 2's norm with its gain frozen."""
    norm = written(draw, f.rms_norm)
    norm.weight.requires_grad_(False)
    return held(norm, OLMO)
