"""The structure of a model as one forward pass shows it: its norms, its blocks, and where each norm sits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.identification.sites import NormSite, OtherNorm, find_sites
from normkit.identification.tracing import Trace, trace
from normkit.measurement import placement
from normkit.measurement.block_response import BlockSweep
from normkit.measurement.blocks import BlockCall, block_of, find_blocks
from normkit.measurement.facts import Block, Role, Site
from normkit.measurement.handwritten import HandwrittenNorm, Products
from normkit.measurement.idle import IdleParts
from normkit.measurement.patches import InputHook, changed_inputs
from normkit.measurement.quantities import Peak, RowStatistics, SiteGeometry
from normkit.measurement.site_accumulator import SiteMeasurement
from normkit.measurement.stages import find_stages
from normkit.measurement.weights import spectrum

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

    def dtypes(self, site: NormSite) -> tuple[torch.dtype, torch.dtype]:
        """Dtypes of a norm's input and output in that pass."""
        if site.module is not None:
            call = next(call for call in self.called.modules if call.path == site.path)
            return call.input_dtype, call.output_dtype
        key = (site.parent, site.function, site.ordinal)
        made = next(each for each in self.called.functions if (each.parent, each.function, each.ordinal) == key)
        return made.input_dtype, made.input_dtype


def measured_site(
    structure: Structure,
    order: int,
    measured: SiteMeasurement,
    parameters: tuple[Tensor | None, Tensor | None],
    *,
    geometry: SiteGeometry | None = None,
    error: float = math.nan,
    gain_gradient_error: float = math.nan,
) -> Site:
    """A norm with what was measured of it.

    Args:
        structure: The structure of the model.
        order: Position of the norm among its sites.
        measured: The measurement of the norm.
        parameters: Gain and bias as they act now, or None.
        geometry: As in `Site`.
        error: As in `Site`.
        gain_gradient_error: As in `Site`.
    """
    norm, (gain, bias) = structure.sites[order], parameters
    factor = norm.passport.readings.get("factor")
    return Site(
        path=norm.path,
        class_name=norm.class_name,
        order=order,
        calls=measured.calls,
        block=block_of(norm.parent, structure.blocks),
        role=structure.roles.get(norm.path, "unknown"),
        spec=norm.spec,
        confidence=norm.passport.confidence,
        evidence=norm.passport.evidence,
        input=measured.input,
        output=measured.output,
        attenuation=measured.attenuation,
        gain=None if gain is None else spectrum(gain, 1.0),
        bias=None if bias is None else spectrum(bias, 0.0),
        dtype=measured.dtype,
        headroom_bits=measured.headroom_bits,
        statistics_headroom_bits=measured.statistics_headroom_bits,
        geometry=geometry,
        output_dtype=measured.output_dtype,
        forward_calls=structure.forward_calls[norm.path],
        error=error,
        gain_gradient_error=gain_gradient_error,
        factor=1.0 if factor is None else float(factor.value),
    )


def measured_block(
    block: BlockCall, swept: BlockSweep, entering: RowStatistics, leaving: RowStatistics, peak: Peak | None = None
) -> Block:
    """A block with what replaying it said and what was measured of its stream."""
    return Block(
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
        peak=peak,
    )


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
