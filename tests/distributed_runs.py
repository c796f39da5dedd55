"""Short runs of a tiny model in two processes, each watched; and the same run in one."""

from __future__ import annotations

import math
import os
import pickle
import signal
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from normkit.inspection.report import description as page
from normkit.inspection.result import Inspection
from normkit.watching import rendezvous, watcher
from normkit.watching.watcher import watch

WIDTH, TOKENS, ROWS = 12, 6, 8
EVERY, STEPS = 2, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The gradient of a key's bias is zero but for rounding.
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = (each(x).unflatten(-1, (-1, 3)).transpose(1, 2) for each in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.between, self.up, self.down = nn.RMSNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Model(nn.Module):
    """Two blocks and a final norm, in float64. A width of 12 is uneven over the 5 outputs of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        for parameter in self.parameters():
            # No gain is 1 and no bias 0: what is not gathered shows.
            torch.nn.init.normal_(parameter, 0.3, 0.3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rows(step: int) -> Tensor:
    """All rows of a step: each sequence has a mean of its own, so that shards are shifted against each other."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    return x + torch.arange(ROWS, dtype=torch.float64)[:, None, None]


def train(
    model: nn.Module,
    part: Callable[[Tensor], Tensor] = lambda x: x,
    *,
    replicas: int = 1,
    after_backward: Callable[[nn.Module], None] = lambda _model: None,
    steps: int = STEPS,
    out: Path | None = None,
) -> Inspection:
    """Train for some steps, and the inspection at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    lines: list[str] = []
    with watch(model, optimizer, every=EVERY, say=lines.append, out=out) as watched:
        for step in range(steps):
            y = model(part(rows(step)))
            # The mean of these over the replicas is the mean over all rows, however uneven the parts.
            loss = replicas * y.square().sum() / (ROWS * TOKENS * 5)
            optimizer.zero_grad()
            loss.backward()
            after_backward(model)
            watched.step(loss)
            # What is read at the end is as the last report has it.
            if step < steps - 1:
                optimizer.step()
    return watched.inspection()


def _alone() -> Inspection:
    return train(Model())


def _uneven(rank: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x[:5] if rank == 0 else x[5:]


def _empty(rank: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x if rank == 0 else x[:0]


def _ddp(rank: int) -> Inspection:
    return train(DistributedDataParallel(Model()), _uneven(rank), replicas=2)


def _ddp_empty(rank: int) -> Inspection:
    return train(DistributedDataParallel(Model()), _empty(rank), replicas=2)


def _sharded() -> nn.Module:
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard([model.norm, model.head])
    return fully_shard(model)


def _fsdp(rank: int) -> Inspection:
    return train(_sharded(), _uneven(rank), replicas=2)


def _columns(*, sequence: bool) -> nn.Module:
    """Tensor parallel: columns, then rows, and between the blocks either the whole sequence or a part of it."""
    mesh = init_device_mesh("cpu", (2,))
    model = Model()
    inputs = {"input_layouts": Shard(1)} if sequence else {}
    outputs = {"output_layouts": Shard(1)} if sequence else {}
    for block in model.blocks:
        plan = {
            **{f"attention.{name}": ColwiseParallel(**inputs) for name in ("query", "key", "value")},
            "attention.out": RowwiseParallel(**outputs),
            "up": ColwiseParallel(**inputs),
            "down": RowwiseParallel(**outputs),
        }
        if sequence:
            plan |= {"before": SequenceParallel(), "between": SequenceParallel()}
        parallelize_module(block, mesh, plan)
    if sequence:
        enter = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
        leave = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        parallelize_module(model, mesh, {"blocks.0": enter, "norm": SequenceParallel(), "head": leave})
    return model


def _tp(_rank: int) -> Inspection:
    return train(_columns(sequence=False))


def _sp(_rank: int) -> Inspection:
    return train(_columns(sequence=True))


def _unreduced(model: nn.Module) -> None:
    """All gradients averaged by hand, but those of the norms."""
    for name, parameter in model.named_parameters():
        if not any(part in name for part in ("before", "between", "norm")):
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2


def _reduced(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2


def _forgotten(rank: int) -> Inspection:
    return train(Model(), _uneven(rank), replicas=2, after_backward=_unreduced)


def _by_hand(rank: int) -> Inspection:
    return train(Model(), _uneven(rank), replicas=2, after_backward=_reduced)


def _drifted(rank: int) -> Inspection:
    model = Model()
    with torch.no_grad():
        model.norm.weight[3] += 1e-4 * rank
    return train(model, _uneven(rank), replicas=2, after_backward=_reduced)


def _stages(rank: int) -> Inspection:
    """Each process has a block of its own, as the stages of a pipeline do."""
    model = nn.ModuleDict({str(rank): Block()}).double()

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = model

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[str(rank)](x)

    return train(Stage())


class _Hole(nn.Module):
    """NaN in one element of what it is given, from a step on, in training."""

    def __init__(self, inner: nn.Module, first: int) -> None:
        super().__init__()
        self.inner, self.first, self.seen = inner, first, 0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        self.seen += self.training
        return y.index_fill(-1, torch.tensor([0]), math.nan) if self.seen > self.first else y


def _hole(rank: int) -> Inspection:
    """What leaves a norm of the second process holds NaN at step 1, which is not a measured one."""
    model = Model()
    model.blocks[1].between = _Hole(model.blocks[1].between, 1 if rank else 100)
    return train(DistributedDataParallel(model), _uneven(rank), replicas=2)


SCENARIOS = {
    "ddp": _ddp,
    "ddp_empty": _ddp_empty,
    "fsdp": _fsdp,
    "tp": _tp,
    "sp": _sp,
    "by_hand": _by_hand,
    "forgotten": _forgotten,
    "drifted": _drifted,
    "stages": _stages,
    "hole": _hole,
}


def work(rank: int, ports: tuple[int, ...], folder: str) -> None:
    """One process of two, which do all there is to do: PyTorch starts but twice.

    Args:
        rank: Its number.
        ports: Where they meet: for the scenarios, and for each run of which the second does not reach the end.
        folder: Where each writes what it saw, and the first what became of those runs, as text.
    """
    torch.set_num_threads(1)
    # What is on a page is tested elsewhere.
    page.render = lambda *_, **__: "<html></html>"
    results = {"alone": _alone()} if rank == 0 else {}
    _join(rank, ports[0])
    for name, scenario in SCENARIOS.items():
        results[name] = scenario(rank)
    dist.destroy_process_group()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(results))
    for port, (name, unfinished) in zip(ports[1:], UNFINISHED.items(), strict=True):
        _join(rank, port)
        Path(folder, name).mkdir(exist_ok=True)
        unfinished(rank, Path(folder, name))
        dist.destroy_process_group()


def _raised(rank: int, folder: Path) -> None:
    """The second leaves its watch by an exception, and the processes."""
    seen = Counter[str]()

    def fail(_model: nn.Module) -> None:
        seen["steps"] += 1
        if rank == 1 and seen["steps"] == 2:
            raise ValueError("one process has had enough")

    # Its answers do not come.
    watcher._PATIENCE = 0.2
    try:
        inspection = train(Model(), after_backward=fail, steps=6, out=folder / "report")
        (folder / "end").write_text(f"{inspection.training.reports} reports")
    except ValueError:
        (folder / "other").write_text("raised ValueError")


def _absent(rank: int, folder: Path) -> None:
    """The second does not begin the first two watches, but the third."""
    alone = []
    if rank == 0:
        patience, rendezvous._PATIENCE = rendezvous._PATIENCE, timedelta(seconds=0.2)
        alone = [train(Model()) for _ in range(2)]
        rendezvous._PATIENCE = patience
    dist.barrier()
    both = train(Model())
    if rank == 0:
        said = [f"{each.training.ranks} ranks; {each.training.remarks[0]}" for each in alone]
        (folder / "end").write_text("\n".join([*said, f"{both.training.ranks} ranks"]))


def _killed(rank: int, folder: Path) -> None:
    """The second is killed in a step."""
    model, seen = DistributedDataParallel(Model()), Counter[str]()

    def after_backward(_model: nn.Module) -> None:
        seen["steps"] += 1
        if rank == 1 and seen["steps"] == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        train(model, _uneven(rank), replicas=2, after_backward=after_backward, steps=8, out=folder / "report")
    except RuntimeError as error:
        (folder / "end").write_text(f"raised {type(error).__name__}")
        # As an uncaught error would, without its lines among the test's.
        os._exit(0)


# The last of them ends both processes.
UNFINISHED = {"raised": _raised, "absent": _absent, "killed": _killed}


def _join(rank: int, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
