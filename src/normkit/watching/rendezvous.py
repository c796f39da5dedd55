"""How the processes that train one model find each other when a watch begins, and prove that they count right.

They survey the model on the same input. A sharded model can only be surveyed by running it in all processes at once.
Given the same numbers they find the same norms and make the same calls, and so does a process whose own first batch is
empty. Known shards then go through their counters and their pooling, against float64.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Hashable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from normkit import specs
from normkit.identification.sharding import is_distributed
from normkit.measurement.attention import HEAD_PEAKS, HEAD_SUMS
from normkit.measurement.instruments import add_gradient
from normkit.measurement.row_counters import (
    GRADIENT_SUMS,
    RowCounter,
    Table,
    TableReader,
    Tables,
    gradient_table,
    named,
    row_tables,
)
from normkit.measurement.running import Batch, changed, tensors
from normkit.measurement.structure import Structure
from normkit.watching.parameters import PARAMETER_SUMS, norm_parameters
from normkit.watching.ranks import ManyRanks, Ranks

_PATIENCE = timedelta(seconds=60)


class Rendezvous:
    """The rendezvous of a process that is alone."""

    def __init__(self, *, is_first: bool = True, remarks: tuple[str, ...] = ()) -> None:
        self.is_first = is_first
        """This process reports."""
        self.folder = ""
        """The folder of its reports, within the folder for reports."""
        self.remarks = remarks
        """The steps that could not be done, one line each."""

    def common_batch(self, model: nn.Module, batch: Batch) -> Batch:
        """The batch with which all processes of the same model survey it: that of the first that has rows."""
        del model
        return batch

    def ranks(self, given: nn.Module, model: nn.Module, structure: Structure | None) -> Ranks:
        """The processes that found the same norms in the model (`given` has its wrappers), and pool their numbers."""
        del given, model, structure
        return Ranks()


def is_distributed_run() -> bool:
    """Whether this is one of several processes that torch.distributed knows."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def meet() -> Rendezvous:
    """Wait a minute for all processes to begin a watch too; if some of them do not, each process is alone."""
    if not is_distributed_run():
        return Rendezvous()
    rank, size = dist.get_rank(), dist.get_world_size()
    if not dist.is_gloo_available():
        return Rendezvous(is_first=rank == 0, remarks=("this PyTorch has no Gloo: each process is watched by itself",))
    store = dist.distributed_c10d._get_default_store()
    # A name without a verdict: neither of an earlier watch, nor of a rendezvous that ended without this process.
    names = (f"normkit/watch/{number}" for number in itertools.count())
    name = next(name for name in names if not store.check([f"{name}/verdict"]))
    store.set(f"{name}/{rank}", "here")
    try:
        store.wait([f"{name}/{other}" for other in range(size)], _PATIENCE)
        verdict = store.compare_set(f"{name}/verdict", "", "all")
    except (dist.DistError, RuntimeError):
        # The first process to time out decides for all that have arrived; later ones form a new group.
        verdict = store.compare_set(f"{name}/verdict", "", "some")
    if bytes(verdict) == b"all":
        return _ManyMeet()
    came = [other for other in range(size) if store.check([f"{name}/{other}"])]
    began = f"{len(came)} of {size} processes began a watch within {_PATIENCE.seconds} s"
    return Rendezvous(is_first=rank == came[0], remarks=(f"{began}: this is of process {rank} alone",))


class _ManyMeet(Rendezvous):
    """The rendezvous of all processes."""

    def __init__(self) -> None:
        super().__init__(is_first=dist.get_rank() == 0)
        # A group of its own: in the training's group its messages would come between the training's.
        self._group = dist.new_group(backend="gloo")

    def common_batch(self, model: nn.Module, batch: Batch) -> Batch:
        given = [value for _, value in tensors(batch)]
        named = [(name, tuple(value.shape), str(value.dtype)) for name, value in model.named_parameters()]
        key = _digest(named, [(value.dim(), str(value.dtype)) for value in given])
        is_offered = not any(map(is_distributed, given)) and all(value.numel() for value in given)
        offers = self._all((key, [value.detach().cpu() for value in given] if is_offered else None))
        taken = next((values for other, values in offers if other == key and values is not None), None)
        if taken is None:
            return batch
        others = iter(taken)
        return changed(batch, lambda _name, value: next(others).to(value.device))

    def ranks(self, given: nn.Module, model: nn.Module, structure: Structure | None) -> Ranks:
        seen = None if structure is None else (_layout(model, structure), [_part(each) for each in model.parameters()])
        everyone = self._all(seen)
        layouts = dict.fromkeys(each[0] for each in everyone if each is not None)
        mine = Ranks()
        for layout in layouts:
            members = [rank for rank, each in enumerate(everyone) if each is not None and each[0] == layout]
            # Every process must take part in making every group.
            group = self._group if len(members) == len(everyone) else dist.new_group(members, backend="gloo")
            if structure is not None and seen is not None and seen[0] == layout:
                self.is_first = dist.get_rank() == members[0]
                self.folder = f"process-{members[0]}" if members[0] else ""
                held = [everyone[rank][1] for rank in members]
                if len(members) > 1:
                    place = members.index(dist.get_rank())
                    mine = ManyRanks(group, place, held, list(_compared(given, model, structure)))
                if len(layouts) > 1:
                    numbers = ", ".join(map(str, members))
                    remark = f"{len(layouts)} groups of processes hold different norms: this is of process {numbers}"
                    self.remarks = (*self.remarks, remark)
        if structure is not None and any(map(is_distributed, model.parameters())):
            unknown = sum(block.placement == "unknown" for block in structure.sweeps)
            if unknown:
                what = f"the placement of {unknown} of {len(structure.blocks)} blocks"
                remark = f"{what} could not be measured: their parameters are split over processes"
                self.remarks = (*self.remarks, remark)
        return mine

    def _all(self, value: object) -> list[Any]:
        received: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(received, value, group=self._group)
        return received


def _layout(model: nn.Module, structure: Structure) -> str:
    """A digest of everything that decides which entry of a packed vector means what."""
    return _digest(
        [(site.path, site.shape) for site in structure.sites],
        # A block that is given what the block before returned has no line of its own for its input.
        [(block.path, swept.follows) for block, swept in zip(structure.blocks, structure.sweeps, strict=True)],
        [(call.parent, call.function, len(call.input_shape)) for call in structure.called.functions],
        [(name, tuple(value.shape)) for name, value in model.named_parameters()],
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _part(parameter: Any) -> Hashable:
    """Which part of a parameter this process holds: its places along the axes of a mesh over which it is split."""
    placements = getattr(parameter, "placements", ())
    if not placements:
        return ()
    places = parameter.device_mesh.get_coordinate() or ()
    return tuple(place for place, placement in zip(places, placements, strict=False) if not placement.is_replicate())


def _compared(given: nn.Module, model: nn.Module, structure: Structure) -> Iterator[bool]:
    """For each parameter, whether processes that hold the same part of it should hold the same numbers.

    A plain parameter of a norm should be the same everywhere, and under DistributedDataParallel every one; without it
    another may be a part that a library has cut itself, such as an expert or the columns of a matrix.
    """
    of_norms = norm_parameters(structure)
    ignored: set[str] | None = None
    inner: Any = given
    while inner is not None and ignored is None:
        if isinstance(inner, DistributedDataParallel):
            ignored = inner.parameters_to_ignore
        inner = getattr(inner, "_orig_mod", None)
    for name, parameter in model.named_parameters():
        is_replicated = ignored is not None and name not in ignored
        yield is_distributed(parameter) or id(parameter) in of_norms or is_replicated


FEATURES = 16
_SPEC = specs.TORCH_LAYER_NORM
_SHIFTS = (0.0, 3.0, -40.0, 0.02, 7.0)
_ANSWER = 30.0
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

    All processes must call this; the device is that of the tables.

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
    vectors = gathered.read() if gathered.is_ready(_ANSWER) else None
    if vectors is None:
        return f"not verified: the {ranks.size} processes did not answer each other within {_ANSWER:g} s"
    reader = TableReader(step=0, tables=tables.unpacked(ranks.pooled(vectors, tables, 0)))
    expected, rms_of_all = _truth(torch.cat(known))
    pairs = {}
    for whose, place in (("rows of which each process has its own", SPLIT), ("rows that all have alike", SHARED)):
        counted, line = reader.rows(place, FEATURES), reader.line(place)
        measured = (
            *(counted.rows, counted.nonfinite, counted.zero_rows, counted.rms_min, counted.rms_max, counted.absmax),
            *(counted.mean_energy, counted.angle_to_ones, counted.kurtosis),
            *(sum(count for _, count in counted.histogram), line["below_99"], line["below_90"]),
            -line["peak -attenuation"],
        )
        for (name, value), seen in zip(expected.items(), measured, strict=True):
            pairs[f"{name} of {whose}"] = seen, value
    # The mean of the processes' losses is minimized, so each row weighs less.
    gradient = named(reader.tables["activation gradients"][0], GRADIENT_SUMS)
    pairs["gradient rms"] = math.sqrt(gradient["squares"] / gradient["rows"]), rms_of_all / ranks.size
    # Relative errors; the absolute one where 0 is expected.
    errors = {name: abs(seen - value) / (abs(value) or 1.0) for name, (seen, value) in pairs.items()}
    errors = {name: math.inf if math.isnan(error) else error for name, error in errors.items()}
    limit, worst = _LIMITS[kind], max(errors, key=lambda key: errors[key])
    right = sum(error <= limit for error in errors.values())
    where = f"on {len(known)} uneven shards" + (f" in {ranks.size} processes" if ranks.size > 1 else "")
    if right == len(errors):
        return f"observer verified: {right} of {right} statistics within {errors[worst]:.1e} of float64 {where}"
    return f"{len(errors) - right} of {len(errors)} statistics are wrong {where}: {worst} by {errors[worst]:.2g}"


def _truth(rows: Tensor) -> tuple[Mapping[str, float], float]:
    """The statistics of all shards together, by their definitions; and the rms of all."""
    finite = rows[rows.isfinite().all(-1)]
    present = finite[(finite != 0).any(-1)]
    mean, rms = present.mean(-1), present.square().mean(-1).sqrt()
    centred = present - mean[:, None]
    variance = centred.square().mean(-1)
    attenuation = (variance / (variance + _SPEC.eps)).sqrt() if _SPEC.eps else torch.ones_like(variance)
    cosine = torch.cosine_similarity(present, torch.ones_like(present), dim=-1)
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
    }, float(finite.square().mean().sqrt())
