"""Error of a gain's gradient in 16 bits: a copy of each kind of norm, forward and backward on random rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit import units
from normkit.errors import NormkitError
from normkit.identification.sites import NormSite
from normkit.identification.specimen import Specimen, UnrecognisedError
from normkit.reference import HALF

# Sums in 16 bits stop growing after some hundred rows; real batches have many thousand.
_ROWS = 4096
_ELEMENTS = 1 << 20
# With output gradients of this size, a sum over the rows stays far below the largest float16.
_SMALL = 2.0**-6
_SEED = 0


def gain_gradient_errors(sites: Sequence[NormSite], dtypes: Mapping[str, str]) -> dict[str, float]:
    """Relative error of the gradient of each norm's gain: |g - g64| / |g64|, g64 in float64 from the same rows.

    Norms of one class, shape and formula are tried once. Up to 4096 rows enter, about a million elements: x is normal,
    its output gradient is 0.5 + x + noise, so that the sum grows with every row as that of a loss does.

    Args:
        sites: The norms; they are left as they are.
        dtypes: Dtype of each norm's input, as in "bfloat16", by path.

    Returns:
        The error by path; NaN where neither input nor gain has 16 bits, or no gradient can be had.
    """
    known: dict[object, float] = {}
    errors = {}
    for site in sites:
        weight, dtype = site.passport.weight, getattr(torch, dtypes[site.path] or "float32")
        if weight is None or not {weight.dtype, dtype} & {*HALF}:
            errors[site.path] = math.nan
            continue
        # Two classes may share a name.
        kind = (type(site.module), site.function, site.spec, site.passport.shape[1:], weight.shape, weight.dtype, dtype)
        if kind not in known:
            known[kind] = _error(site, weight, dtype)
        errors[site.path] = known[kind]
    return errors


def _error(site: NormSite, weight: Tensor, dtype: torch.dtype) -> float:
    generator = torch.Generator().manual_seed(_SEED)
    sample = site.passport.shape[1:]
    rows = max(2, min(_ROWS * site.shape[0], _ELEMENTS) // math.prod(sample))
    x = torch.randn(rows, *sample, generator=generator).to(dtype)
    dy = _SMALL * (0.5 + x.float() + torch.randn(x.shape, generator=generator))
    try:
        gradient, dy = _gradient(site, weight, x.to(weight.device), dy.to(weight.device))
    # A foreign module runs here: it may refuse the rows, or have no gradient.
    except (NormkitError, UnrecognisedError, RuntimeError):
        return math.nan
    _, exact, _ = units.gradients(x, dy.cpu(), site.spec, weight.cpu())
    assert exact is not None
    return exact.relative(gradient)


def _gradient(site: NormSite, weight: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the gain, and the output's gradient as it was given: in the output's dtype."""
    with torch.enable_grad():
        if site.module is not None:
            specimen = Specimen(site.module, dtype=weight.dtype)
            assert specimen.module is not None
            parameters: dict[str, Tensor] = dict(specimen.module.named_parameters())
            if site.passport.weight_name not in parameters:
                raise UnrecognisedError("undecidable", "its gain is no single parameter")
            gain = parameters[site.passport.weight_name].requires_grad_()
            y = specimen.overwriting(x)
        else:
            gain = weight.detach().clone().requires_grad_()
            y = _called(site, x, gain)
        dy = dy.to(y.dtype)
        (gradient,) = torch.autograd.grad(y, gain, dy)
    return gradient, dy


def _called(site: NormSite, x: Tensor, gain: Tensor) -> Tensor:
    eps, bias, sizes = site.spec.eps, site.passport.bias, gain.shape
    match site.function:
        case "rms_norm":
            return F.rms_norm(x, sizes, gain, eps)
        case "group_norm":
            return F.group_norm(x, site.spec.rows.groups, gain, bias, eps or 0.0)
        case _:
            return F.layer_norm(x, sizes, gain, bias, eps or 0.0)
