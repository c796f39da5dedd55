"""`scale`: what is written to sums times 2^-k, and eps of the norms that read them times 4^-k.

    norm(2^-k x; 4^-k eps) = norm(x; eps)

Writers, tables and gains that are added to such a sum lose k halvings; what reads one without a norm gains them. Every
factor is a power of two, so that nothing is rounded short of underflow. The one exception is a gain that is stored less
its offset in float32: 2^-k (weight + offset) - offset is rounded once, as there is no wider dtype.

A norm whose eps stands in code is accepted only where `fixed_eps` says so. It acts as with 4^k eps:

    norm(2^-k x; eps) = norm(x; 4^k eps) = r norm(x; eps), 1 >= r = 1 / sqrt(1 + (4^k - 1) eps / (v + eps))
                                                             >= 1 - (4^k - 1) eps / (2 v)

for a row of variance v. One that has the key of eps and reads something else acts as with 4^-k eps, longer by eps / 2 v
at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from normkit import specs
from normkit.checkpoint.plan_builder import FoldContext, PlanBuilder, fits
from normkit.conventions import gain as gains
from normkit.models.graph import Graph, Linear, Norm
from normkit.spec import NormSpec

# The smallest normal float32: runtimes add eps in float32.
_SMALLEST_EPS = 2.0**-126


def scaled_spaces(graph: Graph, *, fixed_eps: bool = False) -> tuple[str, ...]:
    """The sums that norms read whose eps stands in config.json; with `fixed_eps`, those that any norms read."""
    return tuple(
        space
        for space in graph.stream
        if graph.norms_of(space) and (fixed_eps or all(norm.eps_key for norm in graph.norms_of(space)))
    )


def norms_with_another_eps(graph: Graph, halvings: int) -> dict[str, float]:
    """Path in memory of each norm whose eps cannot follow its input -> the eps with which SRC computes the same."""
    spaces = scaled_spaces(graph, fixed_eps=True)
    keys = _eps_keys(graph, fixed_eps=True)
    found = {}
    for norm in graph.norms:
        if norm.eps is not None and norm.reads in spaces and not norm.eps_key:
            found[norm.module] = norm.eps * 4.0**halvings
        elif norm.eps is not None and norm.eps_key in keys and norm.reads not in spaces and not norm.of:
            found[norm.module] = norm.eps * 0.25**halvings
    return found


def spec_of(norm: Norm, eps: float | None) -> NormSpec:
    """A norm with another eps, as a spec."""
    plain = specs.TORCH_RMS_NORM if norm.kind == "rms" else specs.TORCH_LAYER_NORM
    gain = gains.Gain(norm.weight is not None, norm.offset, has_bias=norm.bias is not None)
    return plain.replace(eps=eps, **gain.conventions())


def _eps_keys(graph: Graph, *, fixed_eps: bool) -> set[str]:
    """The keys of config.json that hold the eps of norms that read these sums."""
    spaces = scaled_spaces(graph, fixed_eps=fixed_eps)
    return {norm.eps_key for norm in graph.norms if norm.reads in spaces and norm.eps_key}


def scale_stream(
    context: FoldContext, builder: PlanBuilder, halvings: int, *, fixed_eps: bool
) -> tuple[dict[str, Any], dict[str, NormSpec]]:
    """Halve all that is written to the sums of a checkpoint, or refuse it.

    Returns:
        The keys of config.json to set, and path in memory -> spec of the norms that act as with another eps.
    """
    graph, spaces = context.graph, scaled_spaces(context.graph, fixed_eps=fixed_eps)
    for place, reason in _obstacles(context, builder, halvings, fixed_eps=fixed_eps):
        builder.refuse("scale", place, reason)
        return {}, {}
    for space in spaces:
        for writer in graph.writers(space):
            for name in (writer.weight, writer.bias) if isinstance(writer, Linear) else (writer.name, *writer.aliases):
                if name is not None:
                    builder.shift(name, -halvings)
        for reader in graph.readers(space):
            builder.shift(reader.weight, halvings)
    for norm in _added(graph, spaces):
        _shift_norm(context, builder, norm, -halvings)
        for reader in graph.readers(norm.gives):
            builder.shift(reader.weight, halvings)
    changed = _eps_keys(graph, fixed_eps=fixed_eps)
    for name in {name for norm in graph.norms for name in norm.of if norm.eps_key in changed}:
        linear = _named(graph, name)
        for tensor in (linear.weight, linear.bias):
            if tensor is not None:
                builder.shift(tensor, -halvings)
    for norm in _before_shared_heads(context):
        _shift_norm(context, builder, norm, halvings)
    keys = {norm.eps_key: norm.eps for norm in graph.norms if norm.eps_key in changed and norm.eps is not None}
    others = norms_with_another_eps(graph, halvings) if fixed_eps else {}
    acting = {norm.module: spec_of(norm, others[norm.module]) for norm in graph.norms if norm.module in others}
    return {key: eps * 0.25**halvings for key, eps in keys.items()}, acting


def _obstacles(
    context: FoldContext, builder: PlanBuilder, halvings: int, *, fixed_eps: bool
) -> Iterator[tuple[str, str]]:
    """(place, reason) of all that stands against it."""
    graph, spaces = context.graph, scaled_spaces(context.graph, fixed_eps=fixed_eps)
    keys, accepted = _eps_keys(graph, fixed_eps=fixed_eps), "fixed_eps accepts that it acts as another"
    if not spaces:
        where = "stands in the code of its class, not in its config"
        yield graph.architecture, f"the eps of {graph.norms[0].name} {where}; {accepted}"
    for norm in graph.norms:
        if norm.eps_key in keys and norm.reads not in spaces and not norm.of and not fixed_eps:
            what = f"the {norm.reads}" if norm.reads else "no sum of linear maps"
            said = f"it has the eps of the norms that read the {spaces[0]}, and it normalizes {what}"
            yield norm.name, f"{said}; {accepted}"
        if norm.eps_key in keys and norm.eps is not None and 0 < norm.eps * 0.25**halvings < _SMALLEST_EPS:
            yield (
                norm.name,
                f"its eps of {norm.eps:g} times 4^-{halvings} is below what float32 holds; halve less often",
            )
    for space in spaces:
        if space in graph.returned:
            yield space, f"{graph.architecture} returns the {space}"
        for writer in graph.writers(space):
            if isinstance(writer, Linear) and writer.through:
                yield writer.name, f"{writer.through} stands between it and the {space}"
            elif not isinstance(writer, Linear) and not context.untie:
                for head in (linear for linear in graph.linears if linear.tied_to == writer.name):
                    norms = [norm for norm in _before_shared_heads(context) if norm.gives == head.reads]
                    if not norms or norms[0].weight is None:
                        yield writer.name, f"{head.name} shares it, and no gain before {head.name} can make up for it"
    changed = [(norm, -halvings) for norm in _added(graph, spaces)]
    changed += [(norm, halvings) for norm in _before_shared_heads(context)]
    for norm, exponent in changed:
        if norm.weight is None:
            yield norm.name, "it has no gain to take the factor"
            continue
        if exponent < 0 and (norm.opaque or {norm.name, norm.gives} & graph.returned):
            yield norm.name, f"its output also goes to {norm.opaque or f'the caller of {graph.architecture}'}"
        if any(space not in spaces and graph.is_read(space) for space in norm.writes):
            yield norm.name, "its output is also added to a sum that is not scaled"
        dtype = builder.written_dtype(norm.weight)
        if dtype in ("F16", "BF16") and not _is_held(context, norm, exponent, dtype):
            yield norm.name, f"{dtype} does not hold weight for 2^{exponent} (1 + weight) - 1; fold with dtype float32"


def _added(graph: Graph, spaces: tuple[str, ...]) -> list[Norm]:
    """The norms whose output is added to a sum that is scaled."""
    return [norm for norm in graph.norms if any(space in spaces for space in norm.writes)]


def _before_shared_heads(context: FoldContext) -> list[Norm]:
    """The norms that only a head reads that shares a table which is scaled."""
    graph = context.graph
    if context.untie:
        return []
    tied = {linear.reads for linear in graph.linears if linear.tied_to}
    return [norm for norm in graph.norms if norm.gives in tied and all(_.tied_to for _ in graph.readers(norm.gives))]


def _is_held(context: FoldContext, norm: Norm, exponent: int, dtype: str) -> bool:
    """Whether a dtype holds a stored gain once it is scaled."""
    gain = context.vector(str(norm.weight)) + norm.offset
    return not norm.offset or bool(fits(gain * 2.0**exponent - norm.offset, dtype).all())


def _shift_norm(context: FoldContext, builder: PlanBuilder, norm: Norm, exponent: int) -> None:
    weight = str(norm.weight)
    if _is_held(context, norm, exponent, builder.written_dtype(weight)):
        builder.shift(weight, exponent, norm.offset)
    else:
        # The same number, as a sum that is rounded.
        builder.add_offset(weight, norm.offset * (2.0**exponent - 1))
        builder.shift(weight, exponent)
    if norm.bias is not None:
        builder.shift(norm.bias, exponent)


def _named(graph: Graph, name: str) -> Linear:
    return next(linear for linear in graph.linears if linear.name == name)
