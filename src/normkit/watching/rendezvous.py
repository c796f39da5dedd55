"""How the processes that train one model find each other when a watch begins, and survey it on the same input.

A sharded model can only be surveyed by running it in all processes at once. Given the same numbers they find the same
norms and make the same calls, and so does a process whose own first batch is empty.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Hashable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from normkit.identification.sharding import is_distributed
from normkit.measurement.structure import Structure
from normkit.watching.parameters import norm_parameters
from normkit.watching.ranks import ManyRanks, Ranks
from normkit.watching.surveying import Arguments

_PATIENCE = timedelta(seconds=60)


class Rendezvous:
    """The rendezvous of a process that is alone."""

    def __init__(self, *, is_first: bool = True, remarks: tuple[str, ...] = ()) -> None:
        self.is_first = is_first
        """This process reports."""
        self.folder = ""
        """Where it reports, within the folder for reports."""
        self.remarks = remarks
        """What could not be done, in one line each."""

    def common_arguments(self, model: nn.Module, arguments: Arguments) -> Arguments:
        """The arguments with which all processes of the same model survey it: those of the first that has rows."""
        del model
        return arguments

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

    def common_arguments(self, model: nn.Module, arguments: Arguments) -> Arguments:
        given = arguments.tensors()
        named = [(name, tuple(value.shape), str(value.dtype)) for name, value in model.named_parameters()]
        key = _digest(named, [(value.dim(), str(value.dtype)) for value in given])
        is_offered = not any(map(is_distributed, given)) and all(value.numel() for value in given)
        offers = self._all((key, [value.detach().cpu() for value in given] if is_offered else None))
        taken = next((values for other, values in offers if other == key and values is not None), None)
        return arguments if taken is None else arguments.with_tensors(taken)

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
