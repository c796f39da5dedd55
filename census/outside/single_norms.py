"""Single norms: what `nk.identify` must read off them, and what `nk.testing.violations` must hold against them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit as nk

from . import formulas as f
from .cases import Draw, Single, fault

READ, HELD = "one norm: identify", "one norm: violations"
WIDTHS = [24, 48, 100, 257, 512]


def written(draw: Draw, formula: f.Formula, bias: bool = False, eps: float = 1e-6, width: int = 0) -> f.Written:
    """A written norm of drawn width with drawn gain and bias."""
    width = width or draw.choice(WIDTHS)
    return f.Written(formula, torch.rand(width) + 0.5, torch.randn(width) if bias else None, eps)


def width_of(norm: f.Written) -> int:
    return int(norm.weight.shape[0])


def identify(norm: f.Written, **fields: object) -> Single:
    return Single(norm, width_of(norm), fields)


@fault(READ, say="divisor n - 1, eps outside the root", verb="identify")
def reads_annotated_transformer(draw: Draw) -> Single:
    """a_2 * (x - mean) / (std + eps) + b_2: Tensor.std divides by n - 1, and eps is outside the root."""
    eps = draw.choice([1e-3, 1e-5, 1e-6])
    return identify(
        written(draw, f.layer_norm_std, True, eps), correction=1, eps_placement="outside", eps=eps, has_bias=True
    )


@fault(READ, say="divisor n - 1, eps inside the root", verb="identify")
def reads_tensor_var(draw: Draw) -> Single:
    """sqrt(x.var() + eps): one of the seed notes has this formula."""
    eps = draw.choice([1e-4, 1e-5, 1e-8])
    return identify(written(draw, f.layer_norm_var, True, eps), correction=1, eps_placement="inside", eps=eps)


@fault(READ, say="eps is a lower bound", verb="identify")
def reads_clamp(draw: Draw) -> Single:
    """max(rms, eps) divides."""
    eps = draw.choice([1e-3, 1e-5])
    return identify(written(draw, f.rms_eps_clamped, eps=eps), eps_placement="clamp", eps=eps, centre_numerator=False)


@fault(READ, say="the standard deviation divides, the mean stays", verb="identify")
def reads_std_without_centring(draw: Draw) -> Single:
    """Pocket TTS' kind: statistics about the mean, numerator raw."""
    return identify(written(draw, f.std_without_centring), centre_numerator=False, centre_statistics=True)


@fault(READ, say="the mean is subtracted, the root mean square divides", verb="identify")
def reads_centring_over_rms(draw: Draw) -> Single:
    """The statistics are about 0, the numerator about the mean."""
    return identify(written(draw, f.centring_over_rms), centre_numerator=True, centre_statistics=False)


@fault(READ, say="two groups with statistics of their own", verb="identify")
def reads_groups(draw: Draw) -> Single:
    """A row in halves, each with its own mean square."""
    return identify(written(draw, f.in_halves, width=draw.choice([24, 48, 512])), groups=2, centre_numerator=False)


@fault(READ, say="the gain multiplies before", verb="identify")
def reads_gain_before(draw: Draw) -> Single:
    """norm(weight * x)."""
    return identify(written(draw, f.gain_first), weight_placement="before", centre_numerator=False)


@fault(READ, say="2 + weight", verb="identify")
def reads_offset_of_two(draw: Draw) -> Single:
    """The 1 is added twice in the code."""
    return identify(written(draw, f.plus_two), weight_offset=2.0)


@fault(READ, say="the 1 is added in the weight's dtype", verb="identify")
def reads_offset_dtype(draw: Draw) -> Single:
    """(1 + weight) is computed in the parameter's dtype and widened afterwards."""
    return identify(written(draw, f.plus_one_in_weights_dtype), weight_offset=1.0, offset_dtype="parameter")


@fault(READ, say="no norm of one vector: positions are mixed", verb="identify")
def reads_mixing_of_positions(draw: Draw) -> Single:
    """A causal running mean of squares: it is not any norm of one row, and a spec of one row would be wrong."""
    norm = written(draw, f.past_positions)
    return Single(
        norm,
        (2, 7, width_of(norm)),
        verdicts=["causal", "position"],
    )


@fault(READ, say="not a norm: mean absolute value", verb="identify")
def reads_mean_absolute(draw: Draw) -> Single:
    """x / mean|x| scales to a fixed L1 length: no spec of the space of NormSpec, so the verdict must not be a plain
    norm."""
    norm = written(draw, f.mean_absolute)
    return Single(norm, width_of(norm), verdicts=["l1", "absolute", "no root", "no division"])


@fault(READ, say="a batch norm, whatever its name says", verb="identify")
def reads_batch_norm_called_layer_norm(draw: Draw) -> Single:
    """A class called LayerNorm that is a BatchNorm1d."""

    class LayerNorm(nn.BatchNorm1d):
        pass

    width = draw.choice(WIDTHS)
    norm = LayerNorm(width)
    norm.running_mean.normal_()
    return Single(norm.eval(), (5, width), verdicts=["batch"])


OLMO = nk.specs.OLMO2


def held(norm: f.Written, spec: nk.NormSpec = OLMO) -> Single:
    return Single(norm, (2, 3, width_of(norm)), spec=spec)


@fault(HELD, "input gradient", say="the derivative by the input is wrong", verb="violations")
def holds_detached_scale(draw: Draw) -> Single:
    """The scale is detached."""
    return held(written(draw, f.detached))


@fault(HELD, "input kept", "written", say="the input is overwritten", verb="violations")
def holds_overwritten_input(draw: Draw) -> Single:
    """x.mul_(...)."""
    return held(written(draw, f.overwriting))


@fault(HELD, "row isolation", "NaN", say="a NaN of one row reaches others", verb="violations")
def holds_spreading_nan(draw: Draw) -> Single:
    """A guard looks at the whole batch: where any value is NaN, the mean square of all rows is taken."""

    def guarded(norm: f.Written, x: Tensor) -> Tensor:
        row = x.float()
        scale = f.mean_square(row)
        scale = torch.where(row.isnan().any(), scale.mean(), scale)
        return f.affine(norm, row * torch.rsqrt(scale + norm.eps), x)

    return held(written(draw, guarded))


@fault(HELD, "batch position", "repeat", "rows", "formula", say="a row's place in the batch decides", verb="violations")
def holds_first_row_special(draw: Draw) -> Single:
    """A kernel's tail: with more than 64 rows, the last row keeps the scale of the row before."""

    def tail(norm: f.Written, x: Tensor) -> Tensor:
        row = x.float().reshape(-1, x.shape[-1])
        scale = torch.rsqrt(f.mean_square(row) + norm.eps)
        if len(row) > 64:
            scale = torch.cat([scale[:-1], scale[-2:-1]])
        return f.affine(norm, (row * scale).view(x.shape), x)

    return held(written(draw, tail))


@fault(HELD, "layout", "call", "contiguous", "stride", say="strided input gives other values", verb="violations")
def holds_strides_ignored(draw: Draw) -> Single:
    """The kernel reads memory as if it were contiguous: as_strided over the storage."""

    def flat(norm: f.Written, x: Tensor) -> Tensor:
        strides = [1]
        for size in reversed(x.shape[1:]):
            strides.insert(0, strides[0] * size)
        return f.rms_norm(norm, x.as_strided(x.shape, strides))

    return held(written(draw, flat))


class _MeanOfBiasGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, y: Tensor, bias: Tensor) -> Tensor:
        ctx.rows = y.numel() // bias.numel()
        return y + bias.to(y.dtype)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.flatten(0, -2).float().sum(0) / ctx.rows


@fault(HELD, "bias gradient", "derivative by the bias", say="the bias gradient is a mean, not a sum", verb="violations")
def holds_bias_gradient_averaged(draw: Draw) -> Single:
    """A backward kernel divides the bias gradient by the number of rows."""

    def averaged(norm: f.Written, x: Tensor) -> Tensor:
        row = f.centred(x.float())
        row = row * torch.rsqrt(f.mean_square(row) + norm.eps) * norm.weight.float()
        return _MeanOfBiasGradient.apply(row, norm.bias.float()).to(x.dtype)

    return held(written(draw, averaged, True, 1e-5), nk.specs.TORCH_LAYER_NORM)


@fault(HELD, "repeated calls", "earlier output", say="an earlier output is overwritten", verb="violations")
def holds_output_buffer_reused(draw: Draw) -> Single:
    """Without gradients the result is written into a buffer that the next call uses again."""
    buffers: dict[tuple[object, ...], Tensor] = {}

    def buffered(norm: f.Written, x: Tensor) -> Tensor:
        y = f.rms_norm(norm, x)
        if torch.is_grad_enabled() and (x.requires_grad or norm.weight.requires_grad):
            return y
        buffer = buffers.setdefault((x.shape, x.dtype), torch.empty_like(y))
        return buffer.copy_(y)

    norm = written(draw, buffered)
    norm.weight.requires_grad_(False)
    return held(norm)


@fault(HELD, r"\beps", "constant rows", say="there is no eps", verb="violations")
def holds_missing_eps(draw: Draw) -> Single:
    """No eps: 0/0 on a row of zeros."""
    return held(written(draw, f.rms_without_eps))


@fault(HELD, "statistics dtype", say="statistics are in 16 bits", verb="violations")
def holds_statistics_in_16_bits(draw: Draw) -> Single:
    """No upcast."""
    return held(written(draw, f.all_in_input_dtype))


@fault(HELD, "cancel", say="the variance cancels", verb="violations")
def holds_one_pass_variance(draw: Draw) -> Single:
    """E[x^2] - E[x]^2 in float32."""
    return held(written(draw, f.layer_norm_one_pass, True, 1e-5), nk.specs.TORCH_LAYER_NORM)


@fault(
    HELD, "formula", "rows", "features", "last", say="the last feature is left out of the statistics", verb="violations"
)
def holds_last_feature_left_out(draw: Draw) -> Single:
    """An off-by-one: the mean square is over the first n - 1 features."""

    def short(norm: f.Written, x: Tensor) -> Tensor:
        row = x.float()
        return f.affine(norm, row * torch.rsqrt(f.mean_square(row[..., :-1]) + norm.eps), x)

    return held(written(draw, short))


@fault(HELD, "casts", "round", say="rounded before the gain", verb="violations")
def holds_cast_order(draw: Draw) -> Single:
    """Llama's order of casts held against OLMo 2's."""

    def early(norm: f.Written, x: Tensor) -> Tensor:
        row = x.float()
        return norm.weight.to(x.dtype) * (row * torch.rsqrt(f.mean_square(row) + norm.eps)).to(x.dtype)

    return held(written(draw, early))


class _GainGradientIn16Bits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, row: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(row, weight)
        return row * weight.float()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
        row, weight = ctx.saved_tensors
        total = torch.zeros_like(weight)
        for part in (gradient * row).flatten(0, -2).split(16):
            total += part.sum(0).to(weight.dtype)
        return gradient * weight.float(), total


@fault(HELD, "gain gradient", "derivative by the gain", say="the gain gradient is summed in 16 bits", verb="violations")
def holds_gain_gradient_in_16_bits(draw: Draw) -> Single:
    """dW is added up in the weight's dtype, as by atomics (Liger group_norm.py:176)."""

    def summed(norm: f.Written, x: Tensor) -> Tensor:
        row = x.float()
        row = row * torch.rsqrt(f.mean_square(row) + norm.eps)
        return _GainGradientIn16Bits.apply(row, norm.weight).to(x.dtype)

    return held(written(draw, summed, width=draw.choice([16, 24])))


@fault(HELD, r"\beps", say="eps is F.rms_norm's default, not 1e-6", verb="violations")
def holds_default_eps(draw: Draw) -> Single:
    """A function that leaves eps out of F.rms_norm: machine epsilon."""
    width = draw.choice(WIDTHS)
    return Single(lambda x, weight: F.rms_norm(x, (width,), weight), (2, 3, width), spec=OLMO, weight=torch.ones(width))
