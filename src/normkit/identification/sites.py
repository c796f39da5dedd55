"""Every norm of a model, in forward order: the only finder of norms.

A module is found by what it does, never by its class: each small module that maps one tensor to a
tensor of the same shape is a candidate and is identified. Calls of `torch.nn.functional` norms outside
such modules are sites of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from normkit import reference, specs
from normkit.errors import InputError
from normkit.identification.behaviour import Examination
from normkit.identification.finder import Finder, is_called_like_a_norm
from normkit.identification.passport import Passport, Reading
from normkit.identification.sharding import is_elsewhere, whole
from normkit.identification.tracing import FunctionCall, ModuleCall, Trace
from normkit.spec import NormSpec
from normkit.text import offer

_NORM_LIKE = {"degree", "scale"}
"""Readings of what would be a norm but for a fault."""

_TELLING = ("degree", "rescaled eps", "partial statistics")
"""Readings that say more than that no spec describes a norm."""


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
    search = _Search(model)
    for call in trace.modules:
        search.consider(call)
    sites = [*search.sites]
    for called in trace.functions:
        # A function that a norm calls is a part of that norm.
        if any(is_within(called.parent, found.path) for found in search.sites):
            continue
        site = _function_site(called)
        if site is not None:
            sites.append(site)
    first = {site.path: site for site in sorted(sites, key=lambda site: -site.order)}
    ordered = tuple(sorted(first.values(), key=lambda site: site.order))
    bare = [each for each in search.unrecognised if not any(is_within(site.parent, each.path) for site in ordered)]
    outermost = tuple(
        each for each in bare if not any(is_within(each.path, other.path) for other in bare if other is not each)
    )
    return ordered, outermost


class _Search:
    """Candidates in forward order; like modules are identified once and then only verified."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.sites: list[NormSite] = []
        self.unrecognised: list[OtherNorm] = []
        self._seen: set[str] = set()
        self._finder = Finder()

    def consider(self, call: ModuleCall) -> None:
        """Add the call's module if it is a norm."""
        if call.path in self._seen or any(is_within(call.path, site.path) for site in self.sites):
            return
        self._seen.add(call.path)
        module = self.model.get_submodule(call.path)
        if not is_called_like_a_norm(call, module):
            return
        with whole(module):
            self._consider_whole(call, module)

    def _consider_whole(self, call: ModuleCall, module: nn.Module) -> None:
        found = self._examined(call, module)
        if found is None:
            return
        passport = found.passport
        if passport.verdict not in ("norm", "batch", "gated", "adaptive") and not passport.readings.keys() & _NORM_LIKE:
            return
        # A hook sees one of two inputs, and the norm is that of their sum.
        if passport.spec is None or "residual" in passport.readings:
            kind = {"batch": "batch norm: ", "gated": "gated norm: "}.get(passport.verdict, "")
            named = (passport.readings[name] for name in (*_TELLING, "kind") if name in passport.readings)
            seen = next(reading.evidence[0] for reading in named if reading.evidence)
            self._add_other(call.path, module, passport, kind + seen)
        elif call.tensors > 1:
            reason = (
                f"gated or adaptive norm: called with {call.tensors} tensors; on the first alone it is {passport.spec}"
            )
            self._add_other(call.path, module, passport, reason)
        else:
            self.sites.append(_module_site(call, module, found))

    def _add_other(self, path: str, module: nn.Module, passport: Passport, reason: str) -> None:
        self.unrecognised.append(OtherNorm(path=path, reason=f"{type(module).__name__}: {reason}", passport=passport))

    def _examined(self, call: ModuleCall, module: nn.Module) -> Examination | None:
        found = self._finder.examined(module, call.path, call.input_shape)
        if found is None or found.passport.spec is not None or call.input_dtype != torch.float32:
            return found
        held = {parameter.dtype for parameter in module.parameters()}
        if len(held) == 1 and held <= {*reference.HALF}:
            # It may round its input to the dtype of its parameters, and be a norm of the rounded input.
            rounding = self._finder.examined(module, call.path, call.input_shape, held.pop())
            return rounding if rounding is not None and rounding.passport.spec is not None else found
        return found


def is_within(path: str, outer: str) -> bool:
    """Whether a path is another, or inside it."""
    return outer in ("", path) or path.startswith(f"{outer}.")


def _module_site(call: ModuleCall, module: nn.Module, found: Examination) -> NormSite:
    spec = found.passport.spec
    assert spec is not None
    shape = _feature_shape(call.input_shape, spec)

    def parameters() -> tuple[Tensor | None, Tensor | None]:
        # How parameters act was measured, or verified, on this very module.
        weight, bias = found.affine.of(module)
        return (
            None if weight is None else _acting(_effective(weight, spec), shape),
            None if bias is None else _acting(bias, shape),
        )

    gain, bias = parameters()
    return NormSite(
        path=call.path,
        parent=call.path,
        function=None,
        ordinal=0,
        module=module,
        class_name=type(module).__name__,
        order=call.order,
        shape=(math.prod(shape),),
        spec=spec,
        passport=found.passport,
        gain=gain,
        bias=bias,
        parameters=parameters,
    )


def _function_site(call: FunctionCall) -> NormSite | None:
    """The site of a call of a norm function, whose conventions are its arguments; None for other functions."""
    arguments = call.arguments
    weight, bias, eps = arguments.get("weight"), arguments.get("bias"), arguments.get("eps", 1e-5)
    match call.function:
        case "layer_norm":
            spec = specs.TORCH_LAYER_NORM.replace(eps=eps, axes=_trailing(arguments["normalized_shape"]))
        case "rms_norm":
            spec = specs.TORCH_RMS_NORM.replace(eps=arguments.get("eps"), axes=_trailing(arguments["normalized_shape"]))
        case "group_norm":
            spec = specs.TORCH_LAYER_NORM.replace(eps=eps, axes="all_but_batch", groups=arguments["num_groups"])
        case _:
            return None
    spec = spec.replace(has_weight=weight is not None, has_bias=bias is not None)
    shape = _feature_shape(call.input_shape, spec)
    given = ", ".join(f"{name}={value}" for name, value in arguments.items() if not isinstance(value, Tensor))
    evidence = (f"torch.nn.functional.{call.function} was called with {given}",)

    def parameters() -> tuple[Tensor | None, Tensor | None]:
        return (
            None if weight is None or is_elsewhere(weight) else _acting(weight, shape),
            None if bias is None or is_elsewhere(bias) else _acting(bias, shape),
        )

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


def _trailing(normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(-len(normalized_shape), 0))


def _feature_shape(input_shape: Sequence[int], spec: NormSpec) -> tuple[int, ...]:
    """Sizes of the axes that a weight spans: the channels, or the trailing axes of a row."""
    return spec.rows.parameter_sizes(input_shape)


def _effective(weight: Tensor, spec: NormSpec) -> Tensor:
    return reference.effective_weight(weight, spec, torch.promote_types(torch.float32, weight.dtype))


def _acting(parameter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A gain or bias in float64 on the CPU, flattened to (n,), or to (heads, n) where the heads differ."""
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
