"""How faults get into a model: where its norms are, and what puts which fault there."""

from __future__ import annotations

import copy
import random
import re
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import altered_norms
from altered_norms import Altered, eps_name, eps_of
from normkit import specs
from normkit.study.transformer import Block as StudyBlock

Plant = Callable[[nn.Module, random.Random], tuple[str, ...]]
"""Plants a fault in a model, in place, at random; returns the paths that a finding is to name, and no other."""


def norms(model: nn.Module) -> dict[str, nn.Module]:
    """The norms of a model by path, told by the names of their classes alone."""
    return {
        path: module
        for path, module in model.named_modules()
        if re.search(r"(RMSNorm|LayerNorm|LayerNorm1P)$", type(module).__name__)
        and not any(module.children())
        and any(isinstance(getattr(module, name, None), float) for name in ("eps", "variance_epsilon"))
    }


def with_gain(model: nn.Module) -> list[str]:
    return [path for path, norm in norms(model).items() if getattr(norm, "weight", None) is not None]


def on_stream(model: nn.Module) -> list[str]:
    """Norms of the stream: not those of queries and keys."""
    return [path for path in norms(model) if not re.search(r"[qk]_(layer)?norm", path)]


def heads(model: nn.Module) -> list[str]:
    """Norms of queries and keys."""
    return [path for path in norms(model) if path not in on_stream(model)]


def final(model: nn.Module) -> str:
    """The norm that no block holds: the last of them."""
    return [path for path in norms(model) if not re.search(r"\.\d+\.", path)][-1]


def in_blocks(model: nn.Module) -> list[str]:
    return [path for path in on_stream(model) if re.search(r"\.\d+\.", path)]


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks by path."""
    stack = next(part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) > 1)
    return {path: module for path, module in model.named_modules() if any(module is block for block in stack)}


def formula(
    compute: Callable[[Altered, Tensor], Tensor], where: Callable[[nn.Module], Any] = norms, *, every: bool = False
) -> Plant:
    """Another formula at one norm, or at all of those that `where` gives."""

    def plant(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
        paths = list(where(model))
        chosen = paths if every else [chance.choice(paths)]
        for path in chosen:
            model.set_submodule(path, Altered(model.get_submodule(path), compute).train(model.training))
        return tuple(chosen)

    return plant


def other_eps(*, every: bool) -> Plant:
    """An eps 10 to 10,000 times the one that is meant."""

    def plant(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
        found, factor = norms(model), 10.0 ** chance.randint(1, 4)
        chosen = list(found) if every else [chance.choice(list(found))]
        for path in chosen:
            setattr(found[path], eps_name(found[path]), eps_of(found[path]) * factor)
        return tuple(chosen)

    return plant


def halved(parameter: Tensor, chance: random.Random) -> None:
    """Half of the features switched off."""
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    parameter[torch.randperm(len(parameter), generator=generator)[: len(parameter) // 2]] = 0.0


def gains(change: Callable[[Tensor, random.Random], None], share: float | None = None) -> Plant:
    """Change the parameters of one norm, or of a share of them."""

    def plant(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
        paths = with_gain(model)
        number = 1 if share is None else max(1, int(share * len(paths)))
        chosen = sorted(chance.sample(paths, number), key=paths.index)
        with torch.no_grad():
            for path in chosen:
                for parameter in model.get_submodule(path).parameters(recurse=False):
                    change(parameter, chance)
        return tuple(chosen)

    return plant


def redrawn(parameter: Tensor, chance: random.Random) -> None:
    """As a function that initialises matrices does: N(0, 0.02)."""
    parameter.copy_(
        0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(chance.getrandbits(32)))
    )


def dropped(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
    """A few norms as they were made, in a model that is trained."""
    paths = with_gain(model)
    chosen = sorted(chance.sample(paths, max(1, len(paths) // 4)), key=paths.index)
    with torch.no_grad():
        for path in chosen:
            norm = model.get_submodule(path)
            norm.weight.fill_(0.0 if type(norm).__name__ in altered_norms.OFFSET else 1.0)
            if getattr(norm, "bias", None) is not None:
                norm.bias.zero_()
    return tuple(chosen)


def converted_twice(model: nn.Module, _chance: random.Random) -> tuple[str, ...]:
    """The 1 of every gain lies in the weights as well."""
    with torch.no_grad():
        for path in with_gain(model):
            model.get_submodule(path).weight.add_(1.0)
    return tuple(with_gain(model))


def never_converted(model: nn.Module, _chance: random.Random) -> tuple[str, ...]:
    """Weights that want a 1 added, under a class that adds none."""
    with torch.no_grad():
        for path in with_gain(model):
            model.get_submodule(path).weight.sub_(1.0)
    return tuple(with_gain(model))


def missing(where: Callable[[nn.Module], list[str]]) -> Plant:
    """No norm where one should be."""

    def plant(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
        path = chance.choice(where(model))
        model.set_submodule(path, nn.Identity())
        return (path,)

    return plant


def without_offset(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
    """The 1 of 1 + weight missed at one norm of a spec."""
    found = {path: module for path, module in model.named_modules() if getattr(module, "spec", None) == specs.GEMMA}
    path = chance.choice(list(found))
    found[path].spec = specs.GEMMA.replace(weight_offset=0.0)
    return (path,)


def applied_twice(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
    """A fresh norm of what a fresh norm has just normalized."""
    path, block = chance.choice(list(blocks(model).items()))
    _, _, second, widen = _parts(block)
    name = next(name for name, part in block.named_modules() if part is widen)
    block.set_submodule(name, nn.Sequential(copy.deepcopy(second), widen))
    return (f"{path}.{name}.0",)


def unnormalized(model: nn.Module, _chance: random.Random) -> tuple[str, ...]:
    """No block has a norm, and what the branches add is half as large again."""
    for path in in_blocks(model):
        model.set_submodule(path, nn.Identity())
    _scale_branches(blocks(model).values(), 1.5)
    return tuple(blocks(model))


def idle(model: nn.Module, _chance: random.Random) -> tuple[str, ...]:
    """The later half of the blocks add next to nothing."""
    late = list(blocks(model).items())[len(blocks(model)) // 2 :]
    _scale_branches([block for _, block in late], 1e-4)
    return tuple(path for path, _ in late)


def _scale_branches(found: Iterable[nn.Module], factor: float) -> None:
    """Scale the linear maps that write to the stream."""
    with torch.no_grad():
        for block in found:
            for path, part in block.named_modules():
                if re.search(r"(o_proj|down_proj|c_proj|out|down|mlp\.2)$", path):
                    for parameter in part.parameters():
                        parameter.mul_(factor)


def near_overflow(model: nn.Module, _chance: random.Random) -> tuple[str, ...]:
    """Embeddings whose largest entry is 1.2 times below the end of float16."""
    weight = model.get_input_embeddings().weight
    with torch.no_grad():
        weight.copy_(weight.float() * (torch.finfo(torch.float16).max / 1.2 / weight.float().abs().max()))
    return (next(iter(norms(model))),)


def shared(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
    """Both norms of a block, or the same one of two blocks, are one module."""
    paths = in_blocks(model)
    per_block = len(paths) // len(blocks(model))
    first = chance.randrange(len(paths) - per_block) // per_block * per_block
    offset = chance.randrange(per_block)
    source = paths[first + offset]
    target = paths[first + per_block + offset]
    if per_block == 2 and chance.random() < 0.5:
        source, target = paths[first], paths[first + 1]
    model.set_submodule(target, model.get_submodule(source))
    return (source,)


def residual_after_norm(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
    """norm(x) + f(norm(x)) in one block, in its first half, its second or both."""
    path, block = chance.choice(list(blocks(model).items()))
    first, attend, second, widen = _parts(block)
    wrong = chance.choice([(True, False), (False, True), (True, True)])

    def forward(_self: nn.Module, x: Tensor, *args: Any, **options: Any) -> Tensor:
        normed = first(x)
        x = (normed if wrong[0] else x) + attend(normed, *args, **options)
        normed = second(x)
        return (normed if wrong[1] else x) + widen(normed)

    block.forward = types.MethodType(forward, block)
    return (path,)


def post_for_pre(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
    """norm(x + f(x)) in one block of a pre-norm model."""
    path, block = chance.choice(list(blocks(model).items()))
    first, attend, second, widen = _parts(block)

    def forward(_self: nn.Module, x: Tensor, *args: Any, **options: Any) -> Tensor:
        x = first(x + attend(x, *args, **options))
        return second(x + widen(x))

    block.forward = types.MethodType(forward, block)
    return (path,)


def on_the_branch(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
    """x + norm(f(x)) in one block of a pre-norm model."""
    path, block = chance.choice(list(blocks(model).items()))
    first, attend, second, widen = _parts(block)

    def forward(_self: nn.Module, x: Tensor, *args: Any, **options: Any) -> Tensor:
        x = x + first(attend(x, *args, **options))
        return x + second(widen(x))

    block.forward = types.MethodType(forward, block)
    return (path,)


def _parts(block: Any) -> tuple[nn.Module, Callable[..., Tensor], nn.Module, nn.Module]:
    """First norm, attention, second norm and MLP of a pre-norm block."""
    if isinstance(block, StudyBlock):
        return block.attention.norm, block.attention.branch, block.mlp.norm, block.mlp.branch
    if hasattr(block, "norm_1"):
        return block.norm_1, block.attention, block.norm_2, block.mlp
    if hasattr(block, "ln_1"):
        return block.ln_1, lambda x, *args, **options: block.attn(x, *args, **options)[0], block.ln_2, block.mlp
    return (
        block.input_layernorm,
        lambda x, *args, **options: block.self_attn(x, *args, **options)[0],
        block.post_attention_layernorm,
        block.mlp,
    )


def broken_weight(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
    """One NaN in the weight of a linear map: the first norm that reads a NaN is where to look."""
    path, norm = chance.choice([(path, norm) for path, norm in norms(model).items() if path in with_gain(model)])
    with torch.no_grad():
        norm.weight.view(-1)[chance.randrange(norm.weight.numel())] = torch.nan
    return (path,)


def large_logits(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
    """Query and key weights of one block that have grown by far."""
    path, block = chance.choice(list(blocks(model).items()))
    if isinstance(block, StudyBlock):
        with torch.no_grad():
            block.attention.branch.query.weight.mul_(60.0)
            block.attention.branch.key.weight.mul_(60.0)
        return (f"{path}.attention.branch",)
    if hasattr(block, "query_key_value"):
        width = block.query_key_value.weight.shape[1]
        with torch.no_grad():
            block.query_key_value.weight[: 2 * width].mul_(60.0)
        return (path,)
    with torch.no_grad():
        if hasattr(block, "attn"):
            width = block.attn.c_attn.weight.shape[0]
            block.attn.c_attn.weight[:, : 2 * width].mul_(60.0)
            return (f"{path}.attn",)
        block.self_attn.q_proj.weight.mul_(60.0)
        block.self_attn.k_proj.weight.mul_(60.0)
    return (f"{path}.self_attn",)
