"""One run in several processes under `torchrun`: each takes its part of every batch, and only the first writes.

    torchrun --nproc-per-node 2 -m normkit study warmup --out results
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr HOST --master-port 29500 -m normkit study ...

Every process draws the same batches and starts from the same weights; `DistributedDataParallel` averages their
gradients, over Gloo on the CPU and NCCL on CUDA. Only the order of float sums differs from one process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from normkit.errors import InputError, LostRankError


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The number of this process, from 0, and the number of all processes of a run."""

    rank: int = 0
    size: int = 1

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.rank == 0

    def replica(self, model: nn.Module) -> nn.Module:
        """The model for the loss to call, wrapped so that gradients are averaged over several processes.

        The first process's weights and buffers replace those of the others.
        """
        return DistributedDataParallel(model) if self.size > 1 else model

    def part(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """This process's rows of a batch: equally many in every process, in the order of ranks.

        Raises:
            InputError: If the number of processes does not divide the rows.
        """
        if self.size == 1:
            return batch
        rows = len(batch[0])
        if rows % self.size:
            raise InputError(f"{self.size} processes do not divide a batch of {rows}; choose a batch that they divide")
        return tuple(tensor.tensor_split(self.size)[self.rank] for tensor in batch)

    def mean(self, loss: Tensor) -> float:
        """The mean over the processes."""
        if self.size == 1:
            return loss.item()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.size

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, torch's error about another process that has ended becomes a `LostRankError`."""
        try:
            yield
        except RuntimeError as error:
            # Gloo's errors have no type of their own.
            is_lost = isinstance(error, dist.DistError) or "gloo" in str(error) or "by peer" in str(error)
            if self.size == 1 or not is_lost:
                raise
            # torchrun is about to end this process, which prints its line first.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise LostRankError(_LOST.format(size=self.size)) from None

    def shared(self, content: bytes | None) -> bytes | None:
        """The content that the first process passes, in all of them."""
        if self.size == 1:
            return content
        held = [content]
        dist.broadcast_object_list(held)
        return held[0]


ALONE = Ranks()
"""A run in this process only."""


@contextmanager
def joined(device: str = "cpu") -> Iterator[Ranks]:
    """Join the other processes of `torchrun`, if there are any, and leave them at the end.

    On CUDA, "cuda" means in each process the device of its own number on its machine.

    Args:
        device: Where models will be: it decides between NCCL and Gloo.

    Raises:
        LostRankError: Inside, if another process ends before this one is done, or `torchrun` ends this one.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    on_cuda = torch.device(device).type == "cuda"
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    before = signal.signal(signal.SIGTERM, _ended)
    ranks = Ranks(rank=int(os.environ["RANK"]), size=size)
    with ranks.together():
        dist.init_process_group("nccl" if on_cuda else "gloo")
        yield ranks
        dist.destroy_process_group()
    signal.signal(signal.SIGTERM, before)


_LOST = (
    "expected {size} processes to the end of the run, and another one has ended; what was finished is kept: "
    "start the same command with --resume"
)


def _ended(_signal: int, _frame: FrameType | None) -> NoReturn:
    """`torchrun` ends all processes when one has failed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise LostRankError(_LOST.format(size=os.environ["WORLD_SIZE"]))
