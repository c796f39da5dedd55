"""Every norm of a model, in forward order: the only finder of norms.

A module is found by what it does, never by its class: each small module that maps one tensor to a
tensor of the same shape is a candidate and is identified. Calls of `torch.nn.functional` norms outside
such modules are sites of their own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from normkit import specs
from normkit.errors import InputError
from normkit.identification.finder import Finder, is_called_like_a_norm
from normkit.identification.offloading import in_memory
from normkit.identification.passport import Passport, Reading, without_spec
from normkit.identification.sharding import is_elsewhere, whole
from normkit.identification.state import undisturbed
from normkit.identification.tracing import FunctionCall, ModuleCall, Trace
from normkit.reference import HALF
from normkit.spec import NormSpec
from normkit.text import offer

_NORM_LIKE = {"degree", "scale"}
"""Readings of what would be a norm but for a fault."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NormSite:
    """One norm of a model."""

    path: str
    """Path of the module; "parent:function" for a function call, with "#2" for the second one of the parent's run."""
    parent: str
    """Path of the module, or of the innermost module that makes the call."""
    function: str | None
    """For a function call: "layer_norm", "rms_norm" or "group_norm"."""
    ordinal: int
    """Number of earlier calls of this function by the parent; 0 for a module."""
    module: nn.Module | None
    """None for a function call."""
    class_name: str
    """Name of the class or of the function."""
    order: int
    """Position of its first call among all calls of the trace."""
    shape: tuple[int, ...]
    """(n,): the number of features that a weight spans, which are all trailing axes of a row or the channels."""
    spec: NormSpec
    passport: Passport
    gain: Tensor | None
    """Effective gain, offset included, in float64 on the CPU, of shape (n,) or (heads, n)."""
    bias: Tensor | None
    """In float64 on the CPU, of shape (n,) or (heads, n)."""
    parameters: Callable[[], tuple[Tensor | None, Tensor | None]]
    """Returns gain and bias as they are when it is called."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OtherNorm:
    """A module that normalizes in a way that no spec describes: as a batch, gated or adaptive norm, or with a fault."""

    path: str
    reason: str
    """The class, and why no spec describes it, on one line."""
    passport: Passport


def find_sites(model: nn.Module, trace: Trace) -> tuple[tuple[NormSite, ...], tuple[OtherNorm, ...]]:
    """The norms that one forward pass of a model called.

    If a norm has modules inside it, the outermost is the site. A module that was called more than
    once is one site, at its first call.

    Args:
        model: The model; it is left as it is.
        trace: Of one forward pass of it.

    Returns:
        The sites in forward order; and the modules that normalize in a way that no spec describes.
    """
    finder, seen = Finder(), set[str]()
    sites: list[NormSite] = []
    others: list[OtherNorm] = []
    for call in trace.modules:
        if call.path in seen or any(is_within(call.path, site.path) for site in sites):
            continue
        seen.add(call.path)
        module = model.get_submodule(call.path)
        if is_called_like_a_norm(call, module):
            with whole(module), in_memory(module):
                found = _module_site(finder, call, module)
            if isinstance(found, NormSite):
                sites.append(found)
            elif found is not None:
                others.append(found)
    # A function that a norm calls is a part of that norm; what is rounded around it is seen from outside alone.
    holders = [site.path for site in sites] + [each.path for each in others if "rounding" in each.passport.readings]
    outside = (call for call in trace.functions if not any(is_within(call.parent, path) for path in holders))
    sites += [site for call in outside if (site := _function_site(call)) is not None]
    first = {site.path: site for site in sorted(sites, key=lambda site: -site.order)}
    ordered = tuple(sorted(first.values(), key=lambda site: site.order))
    bare = [each for each in others if not any(is_within(site.parent, each.path) for site in ordered)]
    outermost = tuple(
        each for each in bare if not any(is_within(each.path, other.path) for other in bare if other is not each)
    )
    return ordered, outermost


def is_within(path: str, outer: str) -> bool:
    """Whether a path is another, or inside it."""
    return outer in ("", path) or path.startswith(f"{outer}.")


def _module_site(finder: Finder, call: ModuleCall, module: nn.Module) -> NormSite | OtherNorm | None:
    """The site of a module's call, or why no spec describes the norm that it is; None if it is no norm."""
    found = finder.examined(module, call.path, call.input_shape)
    if found is None:
        return None
    held = {parameter.dtype for parameter in module.parameters()}
    if found.passport.spec is None and call.input_dtype == torch.float32 and len(held) == 1 and held <= {*HALF}:
        # It may round its input to the dtype of its parameters, and be a norm of the rounded input.
        rounding = finder.examined(module, call.path, call.input_shape, held.pop())
        found = rounding if rounding is not None and rounding.passport.spec is not None else found
    class_name, behind = type(module).__name__, ""
    is_told = found.passport.spec is not None or found.passport.verdict in ("batch", "gated", "adaptive")
    if not is_told and (bare := _without_parts(module)) is not None:
        # An activation that a norm holds, as timm's have it.
        inner = finder.examined(bare, call.path, call.input_shape)
        if inner is not None and _is_norm(inner.passport):
            names = [type(part).__name__ for part in module.children()]
            found, behind = inner, f"; {' and '.join(names)} follow{'s' if len(names) == 1 else ''}"
    passport, spec, affine = found.passport, found.passport.spec, found.affine
    if not _is_norm(passport):
        return _batch_norm_that_stands_still(call, module)
    if behind and spec is not None:
        return OtherNorm(path=call.path, reason=f"{class_name}: {spec}{behind}", passport=passport)
    # A hook sees one of two inputs, and the norm is that of their sum.
    if spec is None or "residual" in passport.readings:
        kind = {"batch": "batch norm: ", "gated": "gated norm: "}.get(passport.verdict, "")
        return OtherNorm(path=call.path, reason=f"{class_name}: {kind}{passport.cause}{behind}", passport=passport)
    if call.tensors > 1:
        reason = f"gated or adaptive norm: called with {call.tensors} tensors; on the first alone it is {spec}"
        return OtherNorm(path=call.path, reason=f"{class_name}: {reason}", passport=passport)
    shape = spec.rows.parameter_sizes(call.input_shape)

    def parameters() -> tuple[Tensor | None, Tensor | None]:
        # How parameters act was measured, or verified, on this very module.
        with in_memory(module):
            weight, bias = affine.of(module)
        if weight is not None:
            weight = spec.gain.effective(weight, torch.promote_types(torch.float32, weight.dtype))
        return _acting(weight, shape), _acting(bias, shape)

    gain, bias = parameters()
    return NormSite(
        path=call.path,
        parent=call.path,
        function=None,
        ordinal=0,
        module=module,
        class_name=class_name,
        order=call.order,
        shape=(math.prod(shape),),
        spec=spec,
        passport=passport,
        gain=gain,
        bias=bias,
        parameters=parameters,
    )


def _is_norm(passport: Passport) -> bool:
    return passport.verdict in ("norm", "batch", "gated", "adaptive") or bool(passport.readings.keys() & _NORM_LIKE)


def _batch_norm_that_stands_still(call: ModuleCall, module: nn.Module) -> OtherNorm | None:
    """A batch norm whose statistics nothing updates, as a detector's backbone has it, or are no numbers; else None."""
    mean, variance = (getattr(module, name, None) for name in ("running_mean", "running_var"))
    if not (isinstance(mean, Tensor) and isinstance(variance, Tensor) and mean.shape == variance.shape):
        return None
    shape, eps = call.input_shape, math.nan
    if mean.is_meta or len(shape) < 2 or mean.shape != (shape[1],):
        return None
    mean, variance = mean.double().cpu(), variance.double().cpu()
    if not bool((mean.isfinite() & variance.isfinite() & (variance >= 0)).all()):
        seen = "its running statistics hold NaN, infinity or a negative variance"
    else:
        seen = "it normalizes by running statistics that nothing updates"
        wide = copy.deepcopy(module).double().cpu().eval()
        with undisturbed(), torch.no_grad():
            none, one, three = (wide(torch.full(shape, float(x), dtype=torch.float64)) for x in (0, 1, 3))
        slope, gain = (one - none).movedim(1, 0).flatten(1)[:, 0], getattr(module, "weight", None)
        gain = gain.detach().double().cpu() if isinstance(gain, Tensor) else torch.ones_like(mean)
        added = ((gain / slope).square() - variance)[slope != 0]
        is_straight = torch.allclose(three - none, 3 * (one - none), rtol=1e-9, atol=0.0)
        # The same number is added to the variance of each channel.
        if not is_straight or bool(
            (added - added.median() > 1e-6 * (variance.max() + 1)).any() if len(added) else False
        ):
            return None
        eps = float(f"{added.median():.3g}") if len(added) else math.nan
    axes = [axis for axis in range(len(shape)) if axis != 1]
    evidence = (seen, "its statistics are of the channels")
    reading = Reading(value={"axes": axes, "mode": "never", "eps": eps}, evidence=evidence)
    passport = replace(without_spec("batch", seen, batch=reading), shape=shape)
    return OtherNorm(path=call.path, reason=f"{type(module).__name__}: batch norm: {seen}", passport=passport)


def _without_parts(module: nn.Module) -> nn.Module | None:
    """A module with numbers of its own, with its parts without numbers taken out; None for any other."""
    parts = list(module.children())
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if not own or not parts or any(True for part in parts for _ in (*part.parameters(), *part.buffers())):
        return None
    bare = copy.copy(module)
    bare.__dict__["_modules"] = {name: nn.Identity() for name in module._modules}
    return bare


def _function_site(call: FunctionCall) -> NormSite | None:
    """The site of a call of a norm function, whose conventions are its arguments; None for other functions."""
    arguments = call.arguments
    weight, bias, eps = arguments.get("weight"), arguments.get("bias"), arguments.get("eps", 1e-5)
    axes = tuple(range(-len(arguments.get("normalized_shape", ())), 0))
    match call.function:
        case "layer_norm":
            spec = specs.TORCH_LAYER_NORM.replace(eps=eps, axes=axes)
        case "rms_norm":
            spec = specs.TORCH_RMS_NORM.replace(eps=arguments.get("eps"), axes=axes)
        case "group_norm":
            spec = specs.TORCH_LAYER_NORM.replace(eps=eps, axes="all_but_batch", groups=arguments["num_groups"])
        case _:
            return None
    spec = spec.replace(has_weight=weight is not None, has_bias=bias is not None)
    shape = spec.rows.parameter_sizes(call.input_shape)
    given = ", ".join(f"{name}={value}" for name, value in arguments.items() if not isinstance(value, Tensor))
    evidence = (f"torch.nn.functional.{call.function} was called with {given}",)

    def parameters() -> tuple[Tensor | None, Tensor | None]:
        gain, shift = (None if part is None or is_elsewhere(part) else part for part in (weight, bias))
        return _acting(gain, shape), _acting(shift, shape)

    gain, acting_bias = parameters()
    return NormSite(
        path=f"{call.parent}:{call.function}" + (f"#{call.ordinal + 1}" if call.ordinal else ""),
        parent=call.parent,
        function=call.function,
        ordinal=call.ordinal,
        module=None,
        class_name=call.function,
        order=call.order,
        shape=(math.prod(shape),),
        spec=spec,
        passport=Passport(
            verdict="norm",
            spec=spec,
            readings={"kind": Reading(value="norm", evidence=evidence)},
            shape=call.input_shape,
            weight=weight,
            bias=bias,
        ),
        gain=gain,
        bias=acting_bias,
        parameters=parameters,
    )


def _acting(parameter: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """A gain or bias in float64 on the CPU, flattened to (n,), or to (heads, n) where the heads differ."""
    if parameter is None:
        return None
    values = parameter.detach().cpu().double()
    if math.prod(values.shape) == math.prod(shape):
        return values.flatten()
    leading = values.shape[: max(values.dim() - len(shape), 0)]
    spread = values.expand(*leading, *shape).reshape(-1, math.prod(shape))
    return spread[0] if len(spread) == 1 else spread


def matches(path: str, pattern: str | None) -> bool:
    """The path is the pattern or matches it, as in a shell, though "*" matches dots too; None matches all."""
    return pattern is None or path == pattern or fnmatchcase(path, pattern)


def chosen(paths: Sequence[str], pattern: str | None, model: str) -> list[str]:
    """The paths that match a pattern such as "model.layers.*.input_layernorm".

    Args:
        paths: Of the norms of the model.
        pattern: None chooses all.
        model: What to call the model in the message.

    Raises:
        InputError: If there is a pattern and no path matches it.
    """
    found = [path for path in paths if matches(path, pattern)]
    if pattern is not None and not found:
        listing = "normkit identify MODEL"
        raise InputError(f"{model} has no norm at {pattern!r}; {offer(pattern, paths, listing)}")
    return found
