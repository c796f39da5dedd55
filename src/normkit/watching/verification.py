"""The watch proves itself when it begins: known shards go through its counters and its pooling, against float64."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from normkit import specs
from normkit.measurement.attention import HEAD_PEAKS, HEAD_SUMS
from normkit.measurement.row_counters import (
    GRADIENT_SUMS,
    RowCounter,
    TableReader,
    add_gradient,
    gradient_table,
    named,
    row_tables,
)
from normkit.measurement.tables import Table, Tables
from normkit.watching.parameters import PARAMETER_SUMS
from normkit.watching.ranks import Ranks

FEATURES = 16
_SPEC = specs.TORCH_LAYER_NORM
_SHIFTS = (0.0, 3.0, -40.0, 0.02, 7.0)
_PATIENCE = 30.0
# For sums of a few hundred numbers, in float64 or on a device without float64.
_LIMITS = {torch.float64: 1e-10, torch.float32: 1e-4}
SPLIT, SHARED = 0, 1
"""Lines of the tables: rows that are split over the processes, and rows that all processes have."""


def shards(count: int) -> tuple[Tensor, ...]:
    """Rows of uneven number, mean and scale, in float64: the second shard is empty, in the third a row holds NaN."""
    generator = torch.Generator().manual_seed(20)
    found = []
    for index in range(count):
        rows = 0 if index == 1 else 3 + 5 * index % 17
        noise = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
        found.append(noise * 10.0 ** -(index % 4) + _SHIFTS[index % len(_SHIFTS)])
    found[2][0, 3] = math.nan
    found[0][1] = 0.0
    return tuple(found)


def verify(ranks: Ranks, device: torch.device) -> str:
    """Prove the statistics and their pooling on known numbers, and say so in one line.

    Args:
        ranks: The processes; all of them must call this.
        device: Where the tables are.

    Returns:
        A line that begins with "observer verified" if all agree with float64; else it names the worst.
    """
    known = shards(max(5, ranks.size + 3))
    layout = [
        *row_tables(2),
        gradient_table(1),
        Table(name="parameters", shape=(0, len(PARAMETER_SUMS))),
        Table(name="heads", shape=(0, 1, len(HEAD_SUMS))),
        Table(name="head peaks", shape=(0, 1, len(HEAD_PEAKS)), keeps_largest=True),
        Table(name="steps", shape=(1, 2)),
    ]
    tables = Tables(layout, device)
    kind = tables["rows"].dtype
    # Both count as one step whose loss differs between processes.
    tables["steps"][0] = torch.tensor([1.0, ranks.place], dtype=kind)
    split, shared = (RowCounter(place=index, spec=_SPEC, enters_norm=True) for index in (SPLIT, SHARED))
    for index, shard in enumerate(known):
        rows = shard.to(device, kind)
        shared.add(tables, rows, None)
        if index % ranks.size == ranks.place:
            split.add(tables, rows, None)
            add_gradient(tables["activation gradients"][0], rows)
    gathered = ranks.gather(0, tables.packed())
    vectors = gathered.read() if gathered.is_ready(_PATIENCE) else None
    if vectors is None:
        return f"not verified: the {ranks.size} processes did not answer each other within {_PATIENCE:g} s"
    reader = TableReader(step=0, tables=tables.unpacked(ranks.pooled(vectors, tables, 0)))
    expected = _truth(torch.cat(known))
    errors = {
        f"{name} of {whose}": _error(value, expected[name])
        for whose, index in (("rows of which each process has its own", SPLIT), ("rows that all have alike", SHARED))
        for name, value in _measured(reader, index).items()
    }
    # The mean of the processes' losses is minimized, so each row weighs less.
    gradient = named(reader.tables["activation gradients"][0], GRADIENT_SUMS)
    rms = math.sqrt(gradient["squares"] / gradient["rows"])
    errors["gradient rms"] = _error(rms, expected["rms of all"] / ranks.size)
    limit, worst = _LIMITS[kind], max(errors, key=lambda key: errors[key])
    right = sum(error <= limit for error in errors.values())
    where = f"on {len(known)} uneven shards" + (f" in {ranks.size} processes" if ranks.size > 1 else "")
    if right == len(errors):
        return f"observer verified: {right} of {right} statistics within {errors[worst]:.1e} of float64 {where}"
    return f"{len(errors) - right} of {len(errors)} statistics are wrong {where}: {worst} by {errors[worst]:.2g}"


def _measured(reader: TableReader, place: int) -> Mapping[str, float]:
    rows, line = reader.rows(place, FEATURES), reader.line(place)
    return {
        "finite rows": rows.rows,
        "rows with NaN": rows.nonfinite,
        "zero rows": rows.zero_rows,
        "smallest rms": rows.rms_min,
        "largest rms": rows.rms_max,
        "largest element": rows.absmax,
        "share of the mean": rows.mean_energy,
        "angle to (1, ..., 1)": rows.angle_to_ones,
        "kurtosis": rows.kurtosis,
        "rows in the histogram": float(sum(count for _, count in rows.histogram)),
        "rows that eps shortens by 1 %": line["below_99"],
        "rows that eps shortens by 10 %": line["below_90"],
        "shortest row by eps": -line["peak -attenuation"],
    }


def _truth(rows: Tensor) -> Mapping[str, float]:
    """The statistics of all shards together, by their definitions."""
    finite = rows[rows.isfinite().all(-1)]
    present = finite[(finite != 0).any(-1)]
    mean, rms = present.mean(-1), present.square().mean(-1).sqrt()
    centred = present - mean[:, None]
    variance = centred.square().mean(-1)
    attenuation = (variance / (variance + _SPEC.eps)).sqrt() if _SPEC.eps else torch.ones_like(variance)
    ones = torch.ones(FEATURES, dtype=rows.dtype)
    cosine = torch.cosine_similarity(present, ones.expand_as(present), dim=-1)
    return {
        "finite rows": len(finite),
        "rows with NaN": len(rows) - len(finite),
        "zero rows": len(finite) - len(present),
        "smallest rms": float(finite.square().mean(-1).sqrt().min()),
        "largest rms": float(rms.max()),
        "largest element": float(finite.abs().max()),
        "share of the mean": float((mean.square() / rms.square()).mean()),
        "angle to (1, ..., 1)": float(cosine.clamp(-1, 1).acos().rad2deg().mean()),
        "kurtosis": float((centred.pow(4).mean(-1) / variance.square()).mean()),
        "rows in the histogram": len(present),
        "rows that eps shortens by 1 %": int((attenuation < 0.99).sum()),
        "rows that eps shortens by 10 %": int((attenuation < 0.9).sum()),
        "shortest row by eps": float(attenuation.min()),
        "rms of all": float(finite.square().mean().sqrt()),
    }


def _error(measured: float, expected: float) -> float:
    """The relative error; the absolute one where 0 is expected."""
    difference = abs(measured - expected) / (abs(expected) or 1.0)
    return math.inf if math.isnan(difference) else difference
