"""The structure of a model as one forward pass shows it: its norms, its blocks, and where each norm sits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from normkit.identification.sites import NormSite, OtherNorm, find_sites
from normkit.identification.tracing import Trace, trace
from normkit.measurement import placement
from normkit.measurement.block_response import BlockSweep
from normkit.measurement.blocks import BlockCall, find_blocks
from normkit.measurement.facts import Role
from normkit.measurement.handwritten import HandwrittenNorm, Products
from normkit.measurement.idle import IdleParts
from normkit.measurement.layout import Layout, layout_of
from normkit.measurement.patches import InputHook, changed_inputs
from normkit.measurement.stages import find_stages

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False, kw_only=True)
class Structure:
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
    handwritten: tuple[HandwrittenNorm, ...] = ()
    """Places where rows are normalized by no norm that was found."""
    unread: tuple[str, ...] = ()
    """Norms whose output nothing reads."""
    constant: tuple[str, ...] = ()
    """Branches in blocks that add the same vector to every row."""
    input_hooks: tuple[InputHook, ...] = ()
    """Norms whose input is changed by a hook before it comes in."""

    def layout(self, *, is_pooled: bool) -> Layout:
        """The lines in the tables of what is measured of this model, as `layout_of` has them."""
        following = [block.path for block, swept in zip(self.blocks, self.sweeps, strict=True) if swept.follows]
        return layout_of(self.sites, self.blocks, self.called, following=following, is_pooled=is_pooled)


def survey(
    model: nn.Module, run: Callable[[], object], progress: Progress | None = None, *, stages: bool = True
) -> Structure:
    """Run a model some times on a small input and see what it is made of.

    Args:
        model: In evaluation mode.
        run: Calls the model on the input, without a cache of keys and values.
        progress: Called with a stage's name, the steps done and the steps in all.
        stages: If no module is a block, look for blocks that are no modules.
    """
    report = progress or (lambda _stage, _done, _total: None)
    with torch.no_grad():
        report("structure", 0, 3)
        called = trace(model, run)
        report("norms", 1, 3)
        sites, others = find_sites(model, called)
        paths = [*(site.path for site in sites), *(other.path for other in others)]
        blocks = find_blocks(model, called, paths)
        report("placement", 2, 3)
        staged = ((), (), {}) if blocks or not stages else find_stages(model, sites, run)
        sweeps, roles, final_norm = placement.sweep(model, sites, blocks or staged[0], run)
        if not blocks:
            blocks, sweeps, roles = staged[0], staged[1], {**roles, **staged[2]}
        norms = [site.path for site in sites if site.module is not None]
        hooked = changed_inputs(model, paths, run)
        products, idle = Products([*norms, *(other.path for other in others)]), IdleParts(norms)
        # What the outer mode computes, the inner one does not see.
        with products.watching(model), idle.watching(model):
            output = run()
        unread, handwritten = idle.unread(model, output, run), products.norms(model, run)
    calls = Counter(call.path for call in called.modules)
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
        constant=idle.constant(blocks),
        input_hooks=hooked,
    )
