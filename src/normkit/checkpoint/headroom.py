"""How large the numbers of a model become on a text, and how often a residual stream is halved to fit float16."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from normkit.checkpoint.scaling import norms_with_another_eps, scaled_spaces
from normkit.errors import InputError
from normkit.identification.state import hooked
from normkit.models.graph import Graph, Norm
from normkit.text import counted, percent, significant

LARGEST = 65504.0
"""The largest float16."""


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """The largest |elements| of one run."""

    stream: float
    """Largest of the sums that `scale` halves, of their writers' outputs, and of the inputs of query and key norms."""
    stream_place: str
    """The module that reads or writes it."""
    other: float
    """Largest of the outputs of all other modules."""
    other_place: str
    """The module that gives it."""
    eps_share: float = 0.0
    """Largest eps / variance of a row, of the norms whose eps cannot follow the sums."""

    @property
    def halvings(self) -> int:
        """How often the sums are halved so that twice their largest element fits float16."""
        return max(0, math.ceil(math.log2(2 * self.stream / LARGEST))) if self.stream else 0

    @property
    def _change(self) -> float:
        """(4^k - 1) eps / 2 v, as scaling.py derives it."""
        return (4.0**self.halvings - 1) * self.eps_share / 2

    def __str__(self) -> str:
        """The headroom before and after, and the rest that `scale` does not change."""
        said = f"the residual stream reaches {significant(self.stream)} ({self.stream_place})"
        said += f"; float16 holds {significant(LARGEST / self.stream)} times that"
        if self.halvings:
            said += f", and {significant(LARGEST / self.stream * 2.0**self.halvings)} times what is left after "
            said += counted(self.halvings, "halving")
        if self.eps_share:
            said += f"; eps that stays changes the length of a row by {percent(self._change)} at most, on this text"
        said += f"; elsewhere {significant(self.other)} at most ({self.other_place})"
        return said + (", too large for float16, and scale does not change it" if self.other > LARGEST else "")


def headroom(
    model: nn.Module, graph: Graph, batches: Iterable[Mapping[str, Any]], *, fixed_eps: bool = False
) -> Headroom:
    """Run a model in its own dtype on batches and take the largest |element| of each module.

    Raises:
        InputError: If one is infinite or NaN; the model should be in float32.
    """
    modules, spaces = dict(model.named_modules()), scaled_spaces(graph, fixed_eps=fixed_eps)
    prefix = graph.family.prefix
    writers = {writer.name for space in spaces for writer in graph.writers(space)}
    writers |= {name for norm in graph.norms for name in norm.of}
    writers |= {norm.name for norm in graph.norms if set(norm.writes) & set(spaces)}
    scaled = {name.removesuffix(".weight") for name in writers}
    readers = {norm.module for norm in graph.norms if norm.reads in spaces or norm.of}
    found: dict[bool, tuple[float, str]] = {True: (0.0, ""), False: (0.0, "")}

    def see(values: Any, path: str, *, is_scaled: bool) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
                largest = float(leaf.detach().abs().max())
                if not math.isfinite(largest):
                    raise InputError(f"{path} gives {largest} in {leaf.dtype}; measure the model in float32")
                found[is_scaled] = max(found[is_scaled], (largest, path))

    def before(path: str) -> Callable[..., None]:
        return lambda _module, given: see(given, path, is_scaled=True)

    def after(path: str) -> Callable[..., None]:
        is_scaled = path in scaled or f"{prefix}{path}" in scaled
        return lambda _module, _given, output: see(output, path, is_scaled=is_scaled)

    shares = [0.0]

    def of_eps(norm: Norm) -> Callable[..., None]:
        def see_rows(_module: nn.Module, given: tuple[Tensor, ...]) -> None:
            rows = given[0].detach().to(torch.float64)
            squares = rows.square().mean(-1) if norm.kind == "rms" else rows.var(-1, unbiased=False)
            shares.append((norm.eps or 0.0) / float(squares.min()))

        return see_rows

    others = norms_with_another_eps(graph, 1) if fixed_eps else {}
    fixed = [norm for norm in graph.norms if norm.module in others]
    handles = [modules[path].register_forward_pre_hook(before(path)) for path in readers]
    handles += [modules[norm.module].register_forward_pre_hook(of_eps(norm)) for norm in fixed]
    leaves = [path for path, module in modules.items() if not list(module.children())]
    handles += [modules[path].register_forward_hook(after(path)) for path in leaves]
    with hooked(handles), torch.no_grad():
        for batch in batches:
            model(**batch)
    return Headroom(
        stream=found[True][0],
        stream_place=found[True][1],
        other=found[False][0],
        other_place=found[False][1],
        eps_share=max(shares),
    )
