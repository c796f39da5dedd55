"""From the tables of a measured step, of a text or of a run, to the facts of its norms, blocks and attention calls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from normkit.measurement.attention import attention_at
from normkit.measurement.blocks import block_of
from normkit.measurement.facts import Attention, Block, Site
from normkit.measurement.layout import Layout
from normkit.measurement.quantities import Peak
from normkit.measurement.row_counters import TableReader
from normkit.measurement.sampling import RowSample
from normkit.measurement.structure import Structure
from normkit.measurement.weights import spectrum
from normkit.reference import HALF
from normkit.text import dtype_name


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

    def sites(self, structure: Structure, gain_gradient_errors: Mapping[str, float]) -> tuple[Site, ...]:
        """The norms, with gain and bias as they are now."""
        return tuple(self._site(structure, order, gain_gradient_errors) for order in range(len(self.layout.sites)))

    def _site(self, structure: Structure, order: int, gain_gradient_errors: Mapping[str, float]) -> Site:
        norm, reader, place = self.layout.sites[order], self.reader, 2 * order
        entering, leaving = (reader.rows(each, self.features[each]) for each in (place, place + 1))
        line = reader.line(place)
        dtypes = self.layout.dtypes[norm.path] if line["calls"] else None
        in_half = dtypes is not None and dtypes[0] in HALF and norm.spec.casts.has_narrow_statistics
        largest = max(entering.absmax, leaving.absmax)
        gain, bias = norm.parameters()
        sample, factor = self.samples.get(norm.path), norm.passport.readings.get("factor")
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
            dtype="" if dtypes is None else dtype_name(dtypes[0]),
            headroom_bits=math.inf if dtypes is None else headroom_bits(dtypes[0], largest),
            statistics_headroom_bits=None
            if dtypes is None or not in_half
            else headroom_bits(dtypes[0], max(line["peak sum"], 0.0)),
            geometry=None if sample is None else sample.result(gain),
            output_dtype="" if dtypes is None else dtype_name(dtypes[1]),
            forward_calls=structure.forward_calls[norm.path],
            error=math.nan if sample is None else sample.error,
            gain_gradient_error=gain_gradient_errors.get(norm.path, math.nan),
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
