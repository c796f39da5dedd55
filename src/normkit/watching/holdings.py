"""Parameters of norms that are split over processes: their values travel with a report, so that one reads all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from normkit.identification.sharding import is_distributed, local, whole
from normkit.identification.sites import NormSite
from normkit.watching.tables import Table


class Holdings:
    """What this process holds of the split parameters of norms, as entries of the table "norm values".

    Args:
        sites: The norms.
        shares: Of each parameter by its id, 1 over the number of processes that hold the same part.
    """

    def __init__(self, sites: Sequence[NormSite], shares: Mapping[int, float]) -> None:
        self._sites = [site for site in sites if site.module is not None]
        self._starts: dict[int, int] = {}
        self._parts: list[tuple[Any, Tensor, float]] = []
        self.size = 0
        for site in self._sites:
            assert site.module is not None
            for parameter in site.module.parameters():
                if is_distributed(parameter) and id(parameter) not in self._starts:
                    self._starts[id(parameter)] = self.size
                    places = self.size + _places(parameter)
                    self._parts.append((parameter, places, shares.get(id(parameter), 1.0)))
                    self.size += parameter.numel()

    @property
    def table(self) -> Table:
        """The table; it has no entries where nothing is split."""
        return Table(name="norm values", shape=(self.size,))

    def write(self, table: Tensor) -> None:
        """Put in what this process holds."""
        for parameter, places, share in self._parts:
            held = local(parameter).detach().flatten().to(table.dtype)
            table[places] = held * share

    @contextmanager
    def read(self, table: Tensor) -> Iterator[None]:
        """While this lasts, the norms have the values of a pooled table as plain parameters."""

        def value(parameter: Any) -> Tensor:
            start = self._starts[id(parameter)]
            part = table[start : start + parameter.numel()]
            return part.view(parameter.shape).to(parameter.dtype)

        with ExitStack() as stack:
            for site in self._sites if self.size else ():
                assert site.module is not None
                stack.enter_context(whole(site.module, value))
            yield


def _places(parameter: Any) -> Tensor:
    """Of each element that this process holds, its position in the whole parameter."""
    from torch.distributed.tensor import distribute_tensor

    positions = torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)
    # Without a source, each process takes its part of what it has itself.
    split: Any = distribute_tensor(positions, parameter.device_mesh, parameter.placements, src_data_rank=None)
    held: Tensor = split.to_local().flatten()
    return held
