"""One real token's vector, taken through the three maps of a norm: centre, scale, gain and bias."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from normkit import reference
from normkit.geometry.decomposition import Step, decompose, pulled_back
from normkit.geometry.rows import sphere_radius
from normkit.identification.sites import NormSite
from normkit.measurement.observing import Listener, observed
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


def capture(
    model: nn.Module, site: NormSite, run: Callable[[], object], position: int = -1
) -> tuple[Tensor, Tensor] | None:
    """Input and output of a norm for one token of the first row, in one forward pass.

    Args:
        model: The model; it is left as it was.
        site: The norm.
        run: Calls the model on one row of tokens.
        position: Position of the token; the last one by default.

    Returns:
        x and y of shape (n,), those of the first head where a token has several rows; None where
        the rows of this norm are not those of single tokens.
    """
    catcher = _Catcher()
    lengths: list[int] = []
    inside = [path for path, _ in model.named_modules() if f"{path}.".startswith(f"{site.parent}.") or not site.parent]

    def note_length(_model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.dim() > 1]
        lengths.extend(value.shape[1] for value in given)

    handle = model.register_forward_pre_hook(note_length, with_kwargs=True)
    try:
        with torch.no_grad(), observed(model, [site], [], inside if site.function is not None else [], catcher):
            run()
    finally:
        handle.remove()
    x, y = catcher.entered.get(site.path), catcher.left.get(site.path)
    if x is None or y is None or not lengths or x.shape != y.shape:
        return None
    index = _index(site, x.shape, lengths[0], position)
    return None if index is None else (x[index].clone(), y[index].clone())


class _Catcher(Listener):
    """Keeps what the first call of a site saw."""

    def __init__(self) -> None:
        self.entered: dict[str, Tensor] = {}
        self.left: dict[str, Tensor] = {}

    def before_site(self, site: NormSite, x: Tensor) -> None:
        # A norm may overwrite its input.
        if site.path not in self.entered:
            self.entered[site.path] = x.detach().clone()

    def after_site(self, site: NormSite, y: Tensor) -> None:
        if site.path not in self.left:
            self.left[site.path] = y.detach().clone()


def _index(site: NormSite, shape: torch.Size, tokens: int, position: int) -> tuple[int, ...] | None:
    """Index of one token's row in an input of this shape: the token axis is the one that is as long as the text."""
    if not site.spec.rows.are_last:
        return None
    axes = [axis for axis in range(len(shape) - 1) if shape[axis] == tokens]
    if not axes:
        return None
    return tuple(position if axis == axes[0] else 0 for axis in range(len(shape) - 1))


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
    match step.name:
        case "raw":
            does, holds = "the vector as it enters", _raw_holds(step)
        case "centred":
            does, holds = "minus its mean", "mean 0: in the hyperplane orthogonal to 1"
        case "scaled":
            does, holds = _scaling(spec), _scaled_holds(spec, inside)
        case "gain and bias" if order == 1:
            does, holds = "times the gain, before normalizing", "stretched along each axis"
        case "gain and bias":
            does, holds = _affine_does(gain, bias), _affine_holds(spec, gain, bias, inside)
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


def _raw_holds(step: Step) -> str:
    share = float(step.energy_along_ones) if step.norm > 0 else 0.0
    return f"{percent(share)} of its energy lies along the all-ones direction"


def _scaling(spec: NormSpec) -> str:
    words = f"divided by its {spec.divisor.root_in_words(is_centred=spec.centring.statistics)}"
    return f"{words}, times sqrt(n)" if spec.divisor.is_multiplied else words


def _scaled_holds(spec: NormSpec, inside: float) -> str:
    if spec.centring.is_half:
        return "on no sphere, as the mean counts above the fraction bar or below it, not both"
    return f"on the sphere of radius {spec.divisor.radius_in_words}{_kept_inside(inside)}"


def _kept_inside(inside: float) -> str:
    return f", eps keeps it {100 * inside:.2g} % inside" if inside > _NOTHING else ""


def _affine_does(gain: Tensor | None, bias: Tensor | None) -> str:
    parts = ["times the gain"] * (gain is not None) + ["plus the bias"] * (bias is not None)
    return ", ".join(parts)


def _affine_holds(spec: NormSpec, gain: Tensor | None, bias: Tensor | None, inside: float) -> str:
    if spec.centring.is_half:
        return "on no ellipsoid, as it was on no sphere"
    shape = "sphere" if gain is None else "ellipsoid"
    centre = "centre 0" if bias is None else "centre b"
    normal = "" if not spec.centring.numerator else " and normal 1" if gain is None else " and normal 1/g"
    return f"on the {shape} with {centre}{normal}{_kept_inside(inside)}"
