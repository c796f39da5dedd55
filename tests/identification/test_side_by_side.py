"""Runs beside one another: each part is read once, and each run has its own calls, random numbers and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate")

from normkit.identification.side_by_side import side_by_side  # noqa: E402
from normkit.identification.tracing import trace  # noqa: E402
from normkit.inspection.inspecting import inspect  # noqa: E402
from normkit.measurement.hooks import every_module  # noqa: E402
from normkit.measurement.layout import find_blocks  # noqa: E402
from small_training import Transformer  # noqa: E402


def offloaded() -> tuple[nn.Module, list[nn.Module], Counter[str]]:
    """A model whose weights are read for each call, its blocks, and how often each weight is read."""
    torch.manual_seed(0)
    model = Transformer().eval()
    blocks = [block.module for block in find_blocks(model, trace(model, lambda: model(ids(0))))]
    accelerate.cpu_offload(model, torch.device("cpu"))
    reads: Counter[str] = Counter()

    class Counted(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            reads[name] += 1
            return super().__getitem__(name)

    seen: dict[int, Counted] = {}
    for module in model.modules():
        hook: Any = vars(module).get("_hf_hook")
        for each in getattr(hook, "hooks", (hook,)):
            weights = getattr(each, "weights_map", None)
            if weights is not None:
                weights.dataset = seen.setdefault(id(weights.dataset), Counted(weights.dataset))
    return model, blocks, reads


def ids(seed: int) -> torch.Tensor:
    return torch.randint(16, (2, 9), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_each_weight_is_read_once_for_all_runs():
    model, blocks, reads = offloaded()
    bodies = [lambda seed=seed: model(ids(seed)) for seed in range(3)]
    alone = [body() for body in bodies]
    once = {name: count // 3 for name, count in reads.items()}
    reads.clear()
    results = side_by_side(model, blocks, bodies)
    assert reads == once
    assert all(torch.equal(result(), one) for result, one in zip(results, alone, strict=True))
    assert all(parameter.is_meta for block in blocks for parameter in block.parameters())


@torch.no_grad()
def test_a_run_draws_its_own_random_numbers():
    model, blocks, _ = offloaded()
    for block in blocks:
        block.register_forward_hook(lambda _module, _args, y: y * torch.rand(()))

    def seeded(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return model(ids(seed))

    bodies = [lambda seed=seed: seeded(seed) for seed in range(3)]
    alone, state = [body() for body in bodies], torch.get_rng_state()
    results = side_by_side(model, blocks, bodies)
    assert torch.get_rng_state().equal(state)
    assert all(torch.equal(result(), one) for result, one in zip(results, alone, strict=True))


@torch.no_grad()
def test_a_run_is_told_of_its_own_calls_and_follows_the_one_before_it():
    model, blocks, _ = offloaded()
    calls: list[tuple[int, str]] = []
    paths = {module: path for path, module in model.named_modules()}

    def body(number: int) -> Callable[[], None]:
        def run() -> None:
            def before(path: str, _args: object, _kwargs: object) -> None:
                calls.append((number, path))

            with every_module(model, before, lambda *_: None):
                model(ids(number))

        return run

    side_by_side(model, blocks, [body(0), body(1)])
    zero, one = ([path for number, path in calls if number == each] for each in (0, 1))
    assert zero == one
    assert len(zero) == len(set(zero)) > 10
    order = [(number, path) for number, path in calls if path in {paths[block] for block in blocks}]
    assert [number for number, _ in order] == [0, 1] * len(blocks)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@torch.no_grad()
def test_an_error_is_that_of_its_run():
    model, blocks, _ = offloaded()
    good = model(ids(1))

    def before(path: str, *_: object) -> None:
        if path == "blocks.1":
            raise ValueError("here")

    def failing() -> torch.Tensor:
        with every_module(model, before, lambda *_: None):
            return model(ids(0))

    first, second = side_by_side(model, blocks, [failing, lambda: model(ids(1))])
    with pytest.raises(ValueError, match="here"):
        first()
    assert torch.equal(second(), good)
    assert all(parameter.is_meta for block in blocks for parameter in block.parameters())


def test_runs_of_a_model_in_memory_are_called_by_who_asks():
    called: list[int] = []
    (run, other) = side_by_side(nn.Linear(2, 2), [], [lambda: called.append(1), lambda: called.append(2)])
    assert called == []
    other()
    run()
    assert called == [2, 1]


@pytest.mark.slow
def test_an_inspection_reads_a_weight_seven_times_at_most():
    """Each question had a pass of its own: a model of 14 GB was read 13 times."""
    model, _, reads = offloaded()
    reads.clear()
    assert inspect(model, {0: ids(0)}).sites
    # Norms are read when they are identified, too.
    assert max(count for name, count in reads.items() if "norm" not in name) <= 7
