"""The structure of a model as one forward pass shows it: its norms, its blocks, and where each norm sits.

Blocks may be no modules: a list holds the parts of each, and the forward of what is around them adds the residual, as
in x-transformers, where `layers[i]` is a ModuleList of norms, a branch and a residual, which is never called itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normkit.identification.sharding import local
from normkit.identification.side_by_side import side_by_side
from normkit.identification.sites import NormSite, OtherNorm, find_sites
from normkit.identification.tracing import Trace, first_output, first_tensor, trace
from normkit.measurement import placement
from normkit.measurement.block_response import UNKNOWN, BlockSweep, median_cosine
from normkit.measurement.effects import Effects, HandwrittenNorm
from normkit.measurement.facts import Placement, Role
from normkit.measurement.hooks import every_module
from normkit.measurement.layout import BlockCall, Layout, find_blocks, layout_of
from normkit.measurement.patches import (
    InputHook,
    OddRows,
    Omission,
    applied_to_own_output,
    changed_inputs,
    idle_parameters,
    unlike_the_others,
)

# Cosine above which an added branch is the output of one part, up to rounding.
_ADDED = 0.999


@dataclass(eq=False, kw_only=True)
class _Call:
    """One module call with tensors of the stream's shape, kept on the CPU."""

    path: str
    entered: Tensor | None
    left: Tensor | None = None


def find_stages(
    model: nn.Module, sites: Sequence[NormSite], run: Callable[[], object]
) -> tuple[tuple[BlockCall, ...], tuple[BlockSweep, ...], dict[str, Role]]:
    """The blocks of a model that has none as modules, what their norms do to the stream, and the norms' roles.

    A block is a member of a ModuleList that is never called, though modules in it are; one that nothing follows on the
    stream is left out, as what leaves it is seen nowhere.
    """
    calls: list[_Call] = []
    running: list[_Call] = []

    def before(path: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        calls.append(_Call(path=path, entered=_kept(first_tensor(args, kwargs))))
        running.append(calls[-1])

    def after(_path: str, output: object) -> None:
        running.pop().left = _kept(first_output(output))

    with torch.no_grad(), every_module(model, before, after):
        run()
    called = {call.path for call in calls}
    groups: dict[str, list[_Call]] = {}
    for call in calls:
        # The outermost member of a ModuleList that the module lies in and that is not called itself.
        names = call.path.split(".")
        for depth in range(1, len(names)):
            group, parent = ".".join(names[:depth]), model.get_submodule(".".join(names[: depth - 1]))
            if isinstance(parent, nn.ModuleList) and len(parent) > 1 and group not in called:
                groups.setdefault(group, []).append(call)
                break
    norms = {site.path: site for site in sites if site.module is not None}
    blocks: list[BlockCall] = []
    sweeps: list[BlockSweep] = []
    roles: dict[str, Role] = {}
    for path, members in groups.items():
        first = next((call for call in members if call.entered is not None), None)
        if first is None or first.entered is None or not any(call.path in norms for call in members):
            continue
        entered, following = first.entered, calls[calls.index(members[-1]) + 1 :]
        next_calls = [call for call in following if _has_shape(call.entered, entered) and call not in members]
        if not next_calls or (left := next_calls[0].entered) is None:
            continue
        placement, found = _placed(members, norms, entered, left)
        module, leaves = model.get_submodule(first.path), model.get_submodule(next_calls[0].path)
        blocks.append(BlockCall(path=path, index=len(blocks), module=module, leaves=leaves))
        share = torch.linalg.vector_norm(left - entered, dim=-1) / torch.linalg.vector_norm(entered, dim=-1)
        seen = {"branch_share": float(share.nanmedian()), "cosine": median_cosine(entered, left)}
        sweeps.append(replace(UNKNOWN, placement=placement, **seen))  # type: ignore[arg-type]
        roles |= found
    return tuple(blocks), tuple(sweeps), roles


def _placed(
    members: Sequence[_Call], norms: Collection[str], entered: Tensor, left: Tensor
) -> tuple[Placement, dict[str, Role]]:
    """The placement of the norms in a block whose incoming and outgoing stream are known."""

    def is_same(value: Tensor | None, stream: Tensor) -> bool:
        return value is not None and _has_shape(value, stream) and torch.equal(value, stream)

    def is_sum(total: Tensor, branch: Tensor | None) -> bool:
        """The total is the stream that entered plus a multiple of the branch."""
        return branch is not None and median_cosine(total - entered, branch) > _ADDED

    reading = [call.path for call in members if call.path in norms and is_same(call.entered, entered)]
    roles: dict[str, Role] = dict.fromkeys(reading, "pre")
    outputs = [call for call in members if _has_shape(call.left, entered)]
    closing = [call for call in outputs if call.path in norms and is_same(call.left, left)]
    if closing:
        # The last norm returns the stream: what it read is the stream that entered and the branch.
        inside = closing[-1].entered
        if inside is not None and any(is_sum(inside, call.left) for call in outputs if call not in closing):
            return "post", roles | {closing[-1].path: "post"}
        return "unknown", roles
    added = [call for call in outputs if is_sum(left, call.left)]
    if not added:
        return "unknown", roles
    output = [call.path for call in added if call.path in norms]
    if output:
        return ("peri" if reading else "output-only"), roles | dict.fromkeys(output, "output")
    return ("pre" if reading else "none"), roles


def _has_shape(value: Tensor | None, stream: Tensor) -> bool:
    return value is not None and value.shape == stream.shape


def _kept(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.dim() != 3:
        return None
    return local(tensor).detach().to("cpu", torch.float64, copy=True)


Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False, kw_only=True)
class Usage:
    """How norms are used beside their usual places, as some forward passes show it."""

    handwritten: tuple[HandwrittenNorm, ...] = ()
    """Places where rows are normalized by no norm that was found."""
    unread: tuple[str, ...] = ()
    """Norms whose output nothing reads."""
    constant: tuple[str, ...] = ()
    """Branches in blocks that add the same vector to every row."""
    input_hooks: tuple[InputHook, ...] = ()
    """Norms whose input is changed by a hook before it comes in."""
    in_a_row: frozenset[str] = frozenset()
    """Norms that are called on their own output."""
    omissions: tuple[Omission, ...] = ()
    """Norms that run in all like modules but one."""
    odd_rows: tuple[OddRows, ...] = ()
    """Norms over other rows than the same norm in all like modules."""
    idle: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the parameters of norms that change no output, by path of the norm."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Structure(Usage):
    """The norms and blocks of a model, as some forward passes show them."""

    called: Trace
    """The forward pass that showed it."""
    sites: tuple[NormSite, ...]
    """The norms, in forward order."""
    others: tuple[OtherNorm, ...]
    """Norms that no spec describes."""
    blocks: tuple[BlockCall, ...]
    """The repeated blocks, in forward order."""
    sweeps: tuple[BlockSweep, ...]
    """The replays of the blocks on scaled inputs, one entry a block."""
    roles: Mapping[str, Role]
    """Role of each norm, by path."""
    final_norm: str | None
    """Path of the norm after the last block, or None."""
    forward_calls: Mapping[str, int]
    """Calls of each norm in that pass, by path."""

    @property
    def block_modules(self) -> list[nn.Module]:
        """The blocks that are modules, in forward order."""
        return [block.module for block in self.blocks if block.leaves is None]

    def layout(self, *, is_pooled: bool) -> Layout:
        """The lines in the tables of what is measured of this model, as `layout_of` has them."""
        following = [block.path for block, swept in zip(self.blocks, self.sweeps, strict=True) if swept.follows]
        return layout_of(self.sites, self.blocks, self.called, following=following, is_pooled=is_pooled)


def survey(
    model: nn.Module, run: Callable[[], object], progress: Progress | None = None, *, stages: bool = True
) -> Structure:
    """Run a model some times on a small input and see what it is made of.

    `progress` is called with a stage's name, the steps done and the steps in all. With `stages`, blocks that are no
    modules are looked for if no module is a block.
    """
    report = progress or (lambda _stage, _done, _total: None)
    with torch.no_grad():
        report("structure", 0, 3)
        called = trace(model, run)
        report("norms", 1, 3)
        sites, others = find_sites(model, called)
        norms, unspecified = [site.path for site in sites if site.module is not None], [other.path for other in others]
        paths = [*(site.path for site in sites), *unspecified]
        blocks = find_blocks(model, called, paths)
        report("placement", 2, 3)
        staged = ((), (), {}) if blocks or not stages else find_stages(model, sites, run)
        effects = Effects(norms, unspecified)

        def compared() -> object:
            with effects.watching(model):
                return run()

        runs: tuple[Callable[[], Any], ...] = (
            partial(placement.sweep, model, sites, blocks or staged[0], run),
            compared,
        )
        swept, ran = side_by_side(model, [block.module for block in blocks], runs)
        sweeps, roles, final_norm = swept()
        if not blocks:
            blocks, sweeps, roles = staged[0], staged[1], {**roles, **staged[2]}
        hooked = changed_inputs(model, paths, run)
        output = ran()
        calls = Counter(call.path for call in called.modules)
        in_a_row = applied_to_own_output(model, [path for path in norms if calls[path] > 1], run)
        omissions, odd_rows = unlike_the_others(model, called, sites, others)
        unread, handwritten = effects.unread(model, output, run), effects.handwritten(model, run)
    return Structure(
        called=called,
        sites=sites,
        others=others,
        blocks=blocks,
        sweeps=sweeps,
        roles=roles,
        final_norm=final_norm,
        # Each call of a function is a site of its own.
        forward_calls={site.path: 1 if site.module is None else calls[site.path] for site in sites},
        handwritten=handwritten,
        unread=unread,
        constant=effects.constant(blocks),
        input_hooks=hooked,
        in_a_row=in_a_row,
        omissions=omissions,
        odd_rows=odd_rows,
        idle=idle_parameters(sites),
    )
