"""The measured places: norms, repeated blocks and attention calls, their lines in the tables, and their facts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from normkit.identification.sites import NormSite
from normkit.identification.tracing import ModuleCall, Trace
from normkit.measurement.attention import attention_at, head_tables
from normkit.measurement.facts import Attention, Block, Peak, Site
from normkit.measurement.row_counters import RowCounter, Table, TableReader, gradient_table, row_tables
from normkit.measurement.weights import GradientErrors, spectrum
from normkit.reference import HALF
from normkit.spec import NormSpec
from normkit.text import dtype_name

if TYPE_CHECKING:
    from normkit.measurement.sampling import RowSample
    from normkit.measurement.structure import Structure


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockCall:
    """One block."""

    path: str
    """The module's path."""
    index: int
    """Position among the blocks, from 0, in the order of their first calls."""
    module: nn.Module
    """The module; of a block that is none, the first of its parts, which the stream enters."""
    leaves: nn.Module | None = None
    """None of a block that is a module: its output is the stream. Else the module that the stream enters next."""
    axis: Literal[-1, 1] = -1
    """Axis of the stream along which a row lies: 1 of maps (B, C, H, W), else the last."""

    def rows(self, stream: Tensor) -> Tensor:
        """The stream with its rows along the last axis."""
        return stream.movedim(self.axis, -1)


def find_blocks(model: nn.Module, trace: Trace, norms: Collection[str] = ()) -> tuple[BlockCall, ...]:
    """The blocks of a model, in forward order.

    A block is a member of a `torch.nn.ModuleList`, of a Sequential inside one or of a Sequential of one class,
    whose called members all have modules of their own and map (B, T, D) to (B, T, D), or maps (B, C, H, W) or
    (B, H, W, C) to the same sizes, or rows (N, D) to (N, D) where one of a class adds to its input. The first member of
    a list of maps may change the sizes, as the first of a stage does: it is no block, the others are. Of maps, a list
    of one class of which only some members keep the sizes has blocks where these add to their input, as inverted
    residuals do; so has a module that numbers such members. Lists inside a block do not count. All other lists are kept
    and the index runs on; a list of one member counts only where there is no longer one. Norms, by path, do not count.
    """
    first_calls: dict[str, ModuleCall] = {}
    for call in trace.modules:
        first_calls.setdefault(call.path, call)
    lists: dict[str, list[str]] = {}
    for path in first_calls:
        if path and _in_list(model, path):
            lists.setdefault(_parent(path), []).append(path)
    changing = {path for path, call in first_calls.items() if call.input_shape != call.output_shape}
    members = [
        path
        for paths in lists.values()
        for path in _members(model, [first_calls[path] for path in paths], changing)
        if path not in norms and _axis(trace, first_calls[path]) is not None
    ]
    outermost = [path for path in members if not any(path.startswith(f"{other}.") for other in members)]
    # A stage of one block is no list of its own; the layers in that block are no blocks either.
    classes = {type(first_calls[path].module) for path in outermost if len(first_calls[path].input_shape) == 4}
    alike = [path for path, call in first_calls.items() if path and type(call.module) in classes - {nn.Sequential}]
    outermost = [path for path in outermost if not any(path.startswith(f"{other}.") for other in alike)]
    lengths = Counter(_parent(path) for path in outermost)
    kept = [path for path in outermost if path not in changing]
    shortest = min(2, max((lengths[_parent(path)] for path in kept), default=1))
    kept = [path for path in first_calls if path in kept and lengths[_parent(path)] >= shortest]
    return tuple(
        BlockCall(path=path, index=index, module=first_calls[path].module, axis=_axis(trace, first_calls[path]) or -1)
        for index, path in enumerate(kept)
    )


def _members(model: nn.Module, calls: Sequence[ModuleCall], changing: Set[str]) -> list[str]:
    """Paths of the members of a list that may be blocks, or begin a stage of blocks; none where the list has others."""
    paths = [call.path for call in calls]
    sizes = {len(shape) for call in calls for shape in (call.input_shape, call.output_shape)}
    if any(not any(call.module.children()) for call in calls) or not (sizes <= {3, 4} or sizes == {2}):
        return []
    # Stages change the sizes too, and add nothing to what they are given; nor do the layers of a head to rows (N, D).
    adding = [call.path for call in calls if call.adds and call.path not in changing]
    is_plain = len({type(call.module) for call in calls}) == 1 and bool(adding)
    is_list = isinstance(model.get_submodule(_parent(paths[0])), nn.ModuleList | nn.Sequential)
    is_list &= is_plain or sizes != {2}
    if is_list and changing.isdisjoint(paths if sizes != {4} else paths[1:]):
        return paths
    return [path for path in paths if path in changing or path in adding] if is_plain and sizes == {4} else []


def _axis(trace: Trace, block: ModuleCall) -> Literal[-1, 1] | None:
    """The axis of the channels, which a block may move last; None where no layer reads a map of that shape at all."""
    if len(block.input_shape) != 4:
        return -1
    inside = f"{block.path}."
    layers = [call for call in trace.modules if call.path.startswith(inside) and not any(call.module.children())]
    first, channels, *sides = block.input_shape
    if reading := [call.module for call in layers if call.input_shape == block.input_shape]:
        return 1 if any(isinstance(module, (_ConvNd, nn.GroupNorm)) for module in reading) else -1
    return 1 if any(call.input_shape == (first, *sides, channels) for call in layers) else None


def block_of(path: str, blocks: Iterable[BlockCall]) -> int | None:
    """The index of the block that a module's path lies in, or None outside the blocks."""
    return next((block.index for block in blocks if f"{path}.".startswith(f"{block.path}.")), None)


def _in_list(model: nn.Module, path: str) -> bool:
    """The module's parent is a ModuleList, a Sequential inside one or of one class, or numbers members of one class."""
    parent = model.get_submodule(_parent(path))
    members = dict(parent.named_children())
    is_alike = len(members) > 1 and len({type(member) for member in members.values()}) == 1
    if isinstance(parent, nn.Sequential):
        return is_alike or isinstance(model.get_submodule(_parent(_parent(path))), nn.ModuleList)
    # As in timm's RegNet, whose stages have members b1, b2 and so on.
    is_numbered = is_alike and len({name.rstrip("0123456789") for name in members}) == 1
    return is_numbered or isinstance(parent, nn.ModuleList)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionPlace:
    """One attention call of the model."""

    parent: str
    """Path of the module that makes the call."""
    function: str
    """Either "sdpa" or "softmax"."""
    heads: int
    """Query heads, of all processes together where these pool what they count."""
    head_dim: int
    """Features of one head; 0 where only the logits are seen."""
    first_head: int = 0
    """The first head that this process has."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
    """The measured norms, blocks and attention calls, in the order of their lines in the tables."""

    sites: tuple[NormSite, ...]
    """The norms, in forward order; norm i has row counters 2 i (its input) and 2 i + 1 (its output)."""
    blocks: tuple[BlockCall, ...]
    """The blocks; the row counters of their outputs follow, then those of the inputs of `entered`."""
    attentions: tuple[AttentionPlace, ...] = ()
    callers: tuple[str, ...] = ()
    """Paths of the modules whose own function calls are told apart."""
    entered: tuple[int, ...] = ()
    """The blocks whose input is counted; each of the others is given the very tensor that the one before returned."""
    dtypes: Mapping[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)
    """Dtypes of each norm's input and output, by path."""
    features: Sequence[int] = ()
    """Features of a row of each row counter."""

    def norm_counters(self, index: int) -> tuple[RowCounter, RowCounter]:
        """The row counters of one norm's input and output."""
        spec = self.sites[index].spec
        entering = RowCounter(place=2 * index, spec=spec, enters_norm=True)
        return entering, RowCounter(place=2 * index + 1, spec=spec, enters_norm=False)

    def block_counters(self, index: int) -> tuple[RowCounter | None, RowCounter]:
        """The row counters of one block's input, or None where it is not counted, and of its output."""
        spec = NormSpec(axes=(self.blocks[index].axis,))
        entering, leaving = (RowCounter(place=place, spec=spec, enters_norm=False) for place in self.places(index))
        return entering if index in self.entered else None, leaving

    def places(self, index: int) -> tuple[int, int]:
        """Lines of the input and of the output of one block."""
        first = 2 * len(self.sites)
        if index in self.entered:
            return first + len(self.blocks) + self.entered.index(index), first + index
        return first + index - 1, first + index

    @property
    def sentinels(self) -> tuple[str, ...]:
        """Paths of the sentinel's lines: norms in forward order, then blocks. It does not look at function calls."""
        return (*(site.path for site in self.sites), *(block.path for block in self.blocks))

    @property
    def hooked(self) -> int:
        """Number of the sentinel's lines that have a hook, and so are seen in a step."""
        return sum(site.module is not None for site in self.sites) + len(self.blocks)

    @property
    def forward_order(self) -> tuple[int, ...]:
        """The sentinel's lines in forward order: a block comes after everything inside it."""
        starts = {site.path: float(site.order) for site in self.sites}
        for block in self.blocks:
            inside = [site.order for site in self.sites if site.path.startswith(f"{block.path}.")]
            before = max((starts[other.path] for other in self.blocks[: block.index]), default=-1.0)
            starts[block.path] = max(inside, default=before) + 0.5
        return tuple(sorted(range(len(self.sentinels)), key=lambda line: starts[self.sentinels[line]]))

    def path_of(self, place: int) -> str:
        """The path of the sentinel's line at a place in forward order."""
        return self.sentinels[self.forward_order[place]]

    def tables(self) -> tuple[Table, ...]:
        """The tables that the hooks write to."""
        heads = max((attention.heads for attention in self.attentions), default=1)
        return (
            *row_tables(2 * len(self.sites) + len(self.blocks) + len(self.entered)),
            gradient_table(len(self.blocks) or len(self.sites)),
            *head_tables(len(self.attentions), heads),
        )


def layout_of(
    sites: tuple[NormSite, ...],
    blocks: tuple[BlockCall, ...],
    called: Trace,
    *,
    following: Collection[str] = (),
    is_pooled: bool = False,
) -> Layout:
    """The layout of a model.

    `following` are the blocks that are given the very tensor that the block before them returned. Where processes have
    heads of their own, they pool what they count.
    """
    attentions = _attention_places(called, is_pooled=is_pooled)
    parents = {site.parent for site in sites if site.module is None} | {each.parent for each in attentions}
    # A module inside such a parent makes calls of its own, which must not be taken for the parent's.
    inner = {call.parent for call in called.functions}
    callers = {
        path for path in inner if any(parent in ("", path) or path.startswith(f"{parent}.") for parent in parents)
    }
    entered = tuple(block.index for block in blocks if block.path not in following)
    modules = {call.path: call for call in reversed(called.modules)}
    functions = {(call.parent, call.function, call.ordinal): call for call in called.functions}
    dtypes, features = {}, []
    for site in sites:
        if site.module is not None:
            shape = modules[site.path].input_shape
            dtypes[site.path] = modules[site.path].input_dtype, modules[site.path].output_dtype
        else:
            made = functions[site.parent, site.function or "", site.ordinal]
            shape, dtypes[site.path] = made.input_shape, (made.input_dtype, made.input_dtype)
        features += [site.spec.rows.split(torch.empty(shape, device="meta")).shape[-1]] * 2
    shapes = {id(call.module): call.input_shape for call in reversed(called.modules)}
    widths = [shapes[id(block.module)][block.axis] if id(block.module) in shapes else 0 for block in blocks]
    return Layout(
        sites=sites,
        blocks=blocks,
        attentions=attentions,
        callers=tuple(sorted(parents | callers)),
        entered=entered,
        dtypes=dtypes,
        features=(*features, *widths, *(widths[index] for index in entered)),
    )


def _attention_places(called: Trace, *, is_pooled: bool) -> tuple[AttentionPlace, ...]:
    """Calls of scaled_dot_product_attention; the softmax of (B, H, T, S) in modules that make no such call."""
    streams = {call.input_shape[:2] for call in called.modules if len(call.input_shape) == 3}
    calls = [call for call in called.functions if len(call.input_shape) == 4]
    fused = [call for call in calls if call.function == "sdpa"]
    known = {call.parent for call in fused}
    plain = [
        call
        for call in calls
        if call.function == "softmax"
        and (call.input_shape[0], call.input_shape[2]) in streams
        and call.parent not in known
    ]
    places = []
    chosen = {(call.parent, call.function): call for call in (*fused, *plain)}
    for call in sorted(chosen.values(), key=lambda call: call.order):
        inside = [each.part for each in called.modules if f"{each.path}.".startswith(f"{call.parent}.")]
        # Where the projections are split over processes, each process has its own heads.
        place, parts = max(inside, key=lambda part: part[1], default=(0, 1)) if is_pooled else (0, 1)
        heads = call.input_shape[1]
        places.append(
            AttentionPlace(
                parent=call.parent,
                function=call.function,
                heads=heads * parts,
                head_dim=call.input_shape[3] if call.function == "sdpa" else 0,
                first_head=heads * place,
            )
        )
    return tuple(places)


@dataclass(frozen=True, eq=False, kw_only=True)
class MeasuredStep:
    """One measured step of a model: what its hooks counted, and what they looked at besides."""

    layout: Layout
    reader: TableReader
    features: Sequence[int]
    """Features of a row of each row counter."""
    samples: Mapping[str, RowSample] = field(default_factory=dict)
    """Sampled rows of norms, by path; only inspections take them."""
    peaks: Mapping[str, Peak | None] = field(default_factory=dict)
    """The largest element that left each block, by path; only inspections look it up."""

    def sites(self, structure: Structure, errors: Mapping[str, GradientErrors]) -> tuple[Site, ...]:
        """The norms, with gain and bias as they are now."""
        return tuple(self._site(structure, order, errors) for order in range(len(self.layout.sites)))

    def _site(self, structure: Structure, order: int, errors: Mapping[str, GradientErrors]) -> Site:
        norm, reader, place = self.layout.sites[order], self.reader, 2 * order
        entering, leaving = (reader.rows(each, self.features[each]) for each in (place, place + 1))
        line = reader.line(place)
        dtype, output_dtype = self.layout.dtypes[norm.path] if line["calls"] else (None, None)
        in_half = dtype in HALF and norm.spec.casts.has_narrow_statistics
        gain, bias = norm.parameters()
        sample, factor = self.samples.get(norm.path), norm.passport.readings.get("factor")
        gradients = errors.get(norm.path, GradientErrors())
        return Site(
            path=norm.path,
            class_name=norm.class_name,
            order=order,
            calls=round(line["calls"]),
            block=block_of(norm.parent, self.layout.blocks),
            role=structure.roles.get(norm.path, "unknown"),
            spec=norm.spec,
            confidence=norm.passport.confidence,
            evidence=norm.passport.evidence,
            input=entering,
            output=leaving,
            attenuation=reader.attenuation(place, norm.spec),
            gain=None if gain is None else spectrum(gain, 1.0),
            bias=None if bias is None else spectrum(bias, 0.0),
            dtype="" if dtype is None else dtype_name(dtype),
            headroom_bits=math.inf if dtype is None else headroom_bits(dtype, max(entering.absmax, leaving.absmax)),
            statistics_headroom_bits=headroom_bits(dtype, max(line["peak sum"], 0.0)) if dtype and in_half else None,
            geometry=None if sample is None else sample.result(gain),
            output_dtype="" if output_dtype is None else dtype_name(output_dtype),
            forward_calls=structure.forward_calls[norm.path],
            error=math.nan if sample is None else sample.error,
            gain_gradient_error=gradients.of_gain,
            input_gradient_error=gradients.of_input,
            factor=1.0 if factor is None else float(factor.value),
        )

    def blocks(self, structure: Structure) -> tuple[Block, ...]:
        """The blocks, with what replaying them said."""
        found = []
        for block, swept in zip(self.layout.blocks, structure.sweeps, strict=True):
            entering, leaving = (
                self.reader.rows(place, self.features[place]) for place in self.layout.places(block.index)
            )
            found.append(
                Block(
                    path=block.path,
                    index=block.index,
                    placement=swept.placement,
                    output_slope=swept.output_slope,
                    branch_slope=swept.branch_slope,
                    rows_normalized=swept.rows_normalized,
                    stream_in=entering,
                    stream_out=leaving,
                    branch_share=swept.branch_share,
                    cosine=swept.cosine,
                    peak=self.peaks.get(block.path),
                )
            )
        return tuple(found)

    def attentions(self) -> tuple[Attention, ...]:
        """The attention calls that were seen, in forward order."""
        peaks = self.reader.tables["head peaks"]
        return tuple(
            attention_at(
                self.reader.tables,
                index,
                path=place.parent,
                block=block_of(place.parent, self.layout.blocks),
                source="sdpa" if place.function == "sdpa" else "softmax",
                heads=place.heads,
                head_dim=place.head_dim,
            )
            for index, place in enumerate(self.layout.attentions)
            if bool((peaks[index] > -math.inf).any())
        )


def headroom_bits(dtype: torch.dtype, largest: float) -> float:
    """log2 of a dtype's largest number over the largest magnitude seen; infinite for zeros, NaN for NaN."""
    return math.inf if largest == 0 else math.log2(torch.finfo(dtype).max) - math.log2(largest)
