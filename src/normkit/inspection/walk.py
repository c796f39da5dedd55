"""One real token's vector, taken through the three maps of a norm: centre, scale, gain and bias."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from normkit import reference
from normkit.identification.sites import NormSite
from normkit.inspection.observing import Listener, observed
from normkit.inspection.result import Walk, WalkStep
from normkit.spec import NormSpec

_VALUES = 8
# A shortfall of the norm below this is float64 arithmetic, not eps.
_NOTHING = 1e-12


def walk(site: NormSite, x: Tensor, y: Tensor, *, token: str, position: int) -> Walk:
    """Take one vector through a norm step by step, in float64.

    raw x -> centred x - mean(x) (where the norm centres) -> scaled by multiplier / s -> times the gain, plus the
    bias (where it has any). A gain that the spec puts before normalizing is applied first.

    Args:
        site: The norm; its spec and its effective gain and bias are used, not the module.
        x: What entered for one token, of shape (n,).
        y: What the norm returned for it, of shape (n,).
        token: The token as text.
        position: Its position in the text.
    """
    spec, n = site.spec, x.numel()
    row = x.detach().to("cpu", torch.float64)
    gain, bias = _of_one_row(site.gain, n), _of_one_row(site.bias, n)
    steps = [_step("raw", "the vector as it enters", row, _raw_holds(row))]
    if spec.weight_placement == "before" and gain is not None:
        row, gain = row * gain, None
        steps.append(_step("gain and bias", "times the gain, before normalizing", row, "stretched along each axis"))
    scale = float(reference.statistics(row, spec, reference.machine_eps(x, spec)).scale)
    if spec.centre_numerator:
        row = row - row.mean()
        steps.append(_step("centred", "minus its mean", row, "mean 0: in the hyperplane orthogonal to 1"))
    scaled = row = row * (_multiplier(spec, n) / scale)
    radius, name = _sphere(spec, n)
    inside = 1.0 - float(row.norm()) / radius
    steps.append(_step("scaled", _scaling(spec), row, _scaled_holds(spec, name, inside)))
    if gain is not None or bias is not None:
        row = row if gain is None else row * gain
        row = row if bias is None else row + bias
        steps.append(_step("gain and bias", _affine_does(gain, bias), row, _affine_holds(spec, gain, bias, inside)))
    pulled_back = _pulled_back(row, scaled, gain, bias)
    return Walk(
        path=site.path,
        spec=spec,
        token=token,
        position=position,
        features=n,
        steps=tuple(steps),
        ellipsoid_depth=1.0 - float(pulled_back.norm()) / radius,
        plane_defect=abs(float(pulled_back.sum())) / n if spec.centre_numerator else None,
        module_error=float((y.detach().to("cpu", torch.float64) - row).abs().max()),
    )


def capture(
    model: nn.Module, site: NormSite, run: Callable[[], object], position: int = -1
) -> tuple[Tensor, Tensor] | None:
    """What enters and leaves a norm for one token of the first row, in one forward pass.

    Args:
        model: The model; it is left as it was.
        site: The norm.
        run: Calls the model on one row of tokens.
        position: Of the token; the last one by default.

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
    """Where one token's row lies in an input of this shape: at the axis that is as long as the text."""
    if site.spec.axes != (-1,) or site.spec.groups > 1:
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


def _multiplier(spec: NormSpec, n: int) -> float:
    return math.sqrt(n) if spec.multiplier == "sqrt_n" else 1.0


def _sphere(spec: NormSpec, n: int) -> tuple[float, str]:
    """Radius of the sphere that scaled rows lie on where eps does nothing, as a number and in words."""
    if spec.reduction == "sum":
        return (math.sqrt(n), "sqrt(n)") if spec.multiplier == "sqrt_n" else (1.0, "1")
    radius, name = (math.sqrt(n - 1), "sqrt(n - 1)") if spec.correction else (math.sqrt(n), "sqrt(n)")
    return (radius * math.sqrt(n), f"{name} * sqrt(n)") if spec.multiplier == "sqrt_n" else (radius, name)


def _scaling(spec: NormSpec) -> str:
    if spec.reduction == "sum":
        return "divided by its norm" + (", times sqrt(n)" if spec.multiplier == "sqrt_n" else "")
    return "divided by its standard deviation" if spec.centre_statistics else "divided by its root mean square"


def _raw_holds(row: Tensor) -> str:
    energy = float(row.square().sum())
    share = float(row.sum()) ** 2 / row.numel() / energy if energy > 0 else 0.0
    return f"{100 * share:.3g} % of its energy lies along the all-ones direction"


def _scaled_holds(spec: NormSpec, name: str, inside: float) -> str:
    if spec.centre_numerator != spec.centre_statistics:
        return "on no sphere, as the mean counts above the fraction bar or below it, not both"
    return f"on the sphere of radius {name}{_kept_inside(inside)}"


def _kept_inside(inside: float) -> str:
    return f", eps keeps it {100 * inside:.2g} % inside" if inside > _NOTHING else ""


def _affine_does(gain: Tensor | None, bias: Tensor | None) -> str:
    parts = ["times the gain"] * (gain is not None) + ["plus the bias"] * (bias is not None)
    return ", ".join(parts)


def _affine_holds(spec: NormSpec, gain: Tensor | None, bias: Tensor | None, inside: float) -> str:
    if spec.centre_numerator != spec.centre_statistics:
        return "on no ellipsoid, as it was on no sphere"
    shape = "sphere" if gain is None else "ellipsoid"
    centre = "centre 0" if bias is None else "centre b"
    normal = "" if not spec.centre_numerator else " and normal 1" if gain is None else " and normal 1/g"
    return f"on the {shape} with {centre}{normal}{_kept_inside(inside)}"


def _pulled_back(row: Tensor, scaled: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """(y - b) / g; where g is 0 that is lost, and the scaled vector's own entry stands in."""
    moved = row if bias is None else row - bias
    if gain is None:
        return moved
    return torch.where(gain == 0, scaled, moved / torch.where(gain == 0, 1.0, gain))


def _step(name: str, does: str, row: Tensor, holds: str) -> WalkStep:
    norm, root = float(row.norm()), math.sqrt(row.numel())
    # atan2 keeps its digits near 0 and 180 degrees, where acos loses half of them; 0 has no direction.
    along = float(row.sum()) / root
    across = float((row - row.mean()).norm())
    return WalkStep(
        name=name,
        does=does,
        mean=float(row.mean()),
        norm=norm,
        norm_over_sqrt_n=norm / root,
        angle_to_ones=math.degrees(math.atan2(across, along)) if norm > 0 else math.nan,
        holds=holds,
        values=tuple(row[:_VALUES].tolist()),
    )
