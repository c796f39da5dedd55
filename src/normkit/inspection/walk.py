"""One real token's vector, taken through the three maps of a norm: centre, scale, gain and bias."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from normkit import reference
from normkit.geometry.decomposition import Step, decompose, pulled_back
from normkit.geometry.rows import sphere_radius
from normkit.identification.sites import NormSite
from normkit.measurement.hooks import Listener, observed
from normkit.measurement.quantities import Walk, WalkStep
from normkit.spec import NormSpec
from normkit.text import percent

_VALUES = 8
# A shortfall of the norm below this no float32 tensor can hold: not worth a word.
_NOTHING = 2.0**-24


def walk(site: NormSite, x: Tensor, y: Tensor, *, token: str, position: int) -> Walk:
    """Take one vector through a norm step by step, in float64.

    raw x -> centred x - mean(x) (where the norm centres) -> scaled by 1 / s, or sqrt(n) / s -> times the gain, plus the
    bias (where it has any). A gain that the spec puts before normalizing is applied first.

    Args:
        site: The norm; its spec and its effective gain and bias are used, not the module.
        x: Input for one token, of shape (n,).
        y: Output of the norm for that token, of shape (n,).
        token: The token as text.
        position: Its position in the text.
    """
    spec, n = site.spec, x.numel()
    row = x.detach().to("cpu", torch.float64)
    gain, bias = _of_one_row(site.gain, n), _of_one_row(site.bias, n)
    # The gain has its offset already, and eps=None means the machine epsilon of x, not that of the row in float64.
    acting = reference.unrounded(spec, x)
    taken = decompose(row, acting, gain, bias)
    if spec.gain.is_before:
        gain = None
    has_sphere = not spec.centring.is_half
    radius = sphere_radius(spec, n) if has_sphere else math.nan
    scaled = next(step for step in taken.steps if step.name == "scaled")
    inside = 1.0 - float(scaled.norm) / radius
    error = float((y.detach().to("cpu", torch.float64) - taken.output).abs().max())
    largest = float(taken.output.abs().max())
    pulled = pulled_back(taken.output, scaled.value, gain, bias)
    return Walk(
        path=site.path,
        spec=spec,
        token=token,
        position=position,
        features=n,
        steps=tuple(_in_words(step, order, spec, gain, bias, inside) for order, step in enumerate(taken.steps)),
        ellipsoid_depth=1.0 - float(pulled.norm()) / radius if has_sphere else None,
        plane_defect=abs(float(pulled.sum())) / n if spec.centring.numerator else None,
        module_error=error,
        relative_error=error / largest if largest else math.nan,
        rounding=max(torch.finfo(x.dtype).eps, torch.finfo(y.dtype).eps) / 2,
    )


class TokenRow(Listener):
    """Keeps what enters and leaves a norm for one token of the first text, at its first call.

    Args:
        site: The norm.
        batch: Texts and tokens of the forward pass, (B, T).
        position: Position of the token in the first text.
    """

    def __init__(self, site: NormSite, batch: tuple[int, int], position: int) -> None:
        self.site, self.position, self._batch = site, position, batch
        self._entered: tuple[torch.Size, Tensor | None] | None = None
        self._left: tuple[torch.Size, Tensor | None] | None = None

    @contextmanager
    def listening(self, model: nn.Module) -> Iterator[None]:
        """Listen to the norm while the model runs inside; the model is left as it was, also after an exception."""
        around = f"{self.site.parent}." if self.site.parent else ""
        inside = [path for path, _ in model.named_modules() if f"{path}.".startswith(around)]
        with observed(model, [self.site], [], inside if self.site.function is not None else [], self):
            yield

    def before_site(self, _site: NormSite, x: Tensor) -> None:
        """Keep the token's row of the input."""
        # A norm may overwrite its input.
        if self._entered is None:
            self._entered = x.shape, self._row(x)

    def after_site(self, _site: NormSite, y: Tensor, _given: object) -> None:
        """Keep the token's row of the output."""
        if self._left is None:
            self._left = y.shape, self._row(y)

    def rows(self) -> tuple[Tensor, Tensor] | None:
        """x and y of shape (n,), those of the first head where a token has several rows.

        None where the norm was not called, or its rows are not those of single tokens.
        """
        if self._entered is None or self._left is None or self._entered[0] != self._left[0]:
            return None
        x, y = self._entered[1], self._left[1]
        return None if x is None or y is None else (x, y)

    def _row(self, x: Tensor) -> Tensor | None:
        """The row of the token: the token axis is the one that is as long as the text, behind that of the texts."""
        texts, tokens = self._batch
        leading = x.shape[:-1]
        if not self.site.spec.rows.are_last:
            return None
        if leading == (texts * tokens,):
            return x.detach()[self.position].clone()
        axes = [axis for axis, length in enumerate(leading) if length == tokens]
        # With as many texts as tokens, the first axis is that of the texts.
        if len(axes) > 1 and axes[0] == 0 and leading[0] == texts:
            axes = axes[1:]
        if not axes:
            return None
        return x.detach()[tuple(self.position if axis == axes[0] else 0 for axis in range(len(leading)))].clone()


def _of_one_row(parameter: Tensor | None, n: int) -> Tensor | None:
    """The entries that act on the captured row: those of the first head where each head has its own."""
    if parameter is None:
        return None
    entries = parameter.detach().to("cpu", torch.float64)
    return entries[0] if entries.dim() == 2 else entries.reshape(-1).expand(n)


def _in_words(
    step: Step, order: int, spec: NormSpec, gain: Tensor | None, bias: Tensor | None, inside: float
) -> WalkStep:
    """One step with what it does and what then holds; `gain` is the one after normalizing."""
    kept_inside = f", eps keeps it {100 * inside:.2g} % inside" if inside > _NOTHING else ""
    match step.name:
        case "raw":
            share = float(step.energy_along_ones) if step.norm > 0 else 0.0
            does = "the vector as it enters"
            holds = f"{percent(share)} of its energy lies along the all-ones direction"
        case "centred":
            does, holds = "minus its mean", "mean 0: in the hyperplane orthogonal to 1"
        case "scaled":
            does = f"divided by its {spec.divisor.root_in_words(is_centred=spec.centring.statistics)}"
            does += ", times sqrt(n)" if spec.divisor.is_multiplied else ""
            holds = f"on the sphere of radius {spec.divisor.radius_in_words}{kept_inside}"
            if spec.centring.is_half:
                holds = "on no sphere, as the mean counts above the fraction bar or below it, not both"
        case "gain and bias" if order == 1:
            does, holds = "times the gain, before normalizing", "stretched along each axis"
        case "gain and bias":
            does = ", ".join(["times the gain"] * (gain is not None) + ["plus the bias"] * (bias is not None))
            shape = "sphere" if gain is None else "ellipsoid"
            centre = "centre 0" if bias is None else "centre b"
            normal = "" if not spec.centring.numerator else " and normal 1" if gain is None else " and normal 1/g"
            holds = f"on the {shape} with {centre}{normal}{kept_inside}"
            if spec.centring.is_half:
                holds = "on no ellipsoid, as it was on no sphere"
    return WalkStep(
        name=step.name,
        does=does,
        mean=float(step.mean),
        norm=float(step.norm),
        norm_over_sqrt_n=float(step.norm) / math.sqrt(step.value.numel()),
        angle_to_ones=math.degrees(step.angle_to_ones),
        holds=holds,
        values=tuple(step.value[:_VALUES].tolist()),
    )
