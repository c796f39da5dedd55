"""Models that look trained: trained for seconds, or drawn with the spread that trained ones have."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from kit import batch_norms, is_batch_norm, norms
from material import FOLDER, digits, text


def kept(name: str, seed: int, make: Callable[[], nn.Module], ready: Callable[[nn.Module], None]) -> nn.Module:
    """A model whose weights are made once per seed and kept."""
    torch.manual_seed(seed)
    model = make()
    path = FOLDER / f"bases-{seed}" / f"{name}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path))
    else:
        ready(model)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), path)
    return model.eval()


def season(model: nn.Module, seed: int, offset: float = 0.0, skip: tuple[str, ...] = ()) -> None:
    """Give every matrix unit gain, and every norm gains and biases spread as in trained models.

    `offset` is what the norms add to their weight themselves (1 in Gemma).
    """
    draw = torch.Generator().manual_seed(seed)

    def normal(tensor: torch.Tensor, std: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=draw) * std)

    with torch.no_grad():
        seen = set()
        rows = norms(model) | batch_norms(model)
        for path, module in model.named_modules():
            if any(part in path for part in skip):
                continue
            if path in rows and getattr(module, "weight", None) is not None:
                middle = math.exp(0.25 * torch.randn((), generator=draw).item())
                shift = offset if "RMSNorm" in type(module).__name__ else 0.0
                spread = torch.exp(0.2 * torch.randn(module.weight.shape, generator=draw))
                module.weight.copy_(middle * spread - shift)
                if getattr(module, "bias", None) is not None:
                    normal(module.bias, 0.1)
                seen |= {id(p) for p in module.parameters(recurse=False)}
            elif isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and "parametri" not in path:
                weight = dict(module.named_parameters(recurse=False)).get("weight")
                if weight is not None:
                    normal(weight, 1 / math.sqrt(weight[0].numel()))
                if module.bias is not None:
                    normal(module.bias, 0.03)
                seen |= {id(p) for p in module.parameters(recurse=False)}
            elif isinstance(module, nn.Embedding):
                normal(module.weight, 0.5)
                seen |= {id(module.weight)}
        for name, parameter in model.named_parameters():
            if id(parameter) not in seen and any(part in name for part in ("position_emb", "cls_token", "probe")):
                normal(parameter, 0.3)


def calibrate(model: nn.Module, batches: list[torch.Tensor], call: Callable | None = None) -> None:
    """Fill the running statistics of every batch norm with those of the batches."""
    found = [module for module in batch_norms(model).values() if hasattr(module, "momentum")]
    kept_momentum = [module.momentum for module in found]
    for module in found:
        module.reset_running_stats()
        module.momentum = None
    model.train()
    with torch.no_grad():
        for batch in batches:
            (call or model)(batch)
    model.eval()
    for module, momentum in zip(found, kept_momentum, strict=True):
        module.momentum = momentum


def groups(model: nn.Module, rate: float, gains: float) -> list[dict]:
    """Two groups of parameters: norms with a higher rate, so that a short training moves them."""
    of_norms = {
        id(parameter)
        for module in model.modules()
        if is_batch_norm(module) or "Norm" in type(module).__name__
        for parameter in module.parameters(recurse=False)
    }
    first = [p for p in model.parameters() if id(p) not in of_norms and p.requires_grad]
    second = [p for p in model.parameters() if id(p) in of_norms and p.requires_grad]
    return [{"params": first, "lr": rate}, {"params": second, "lr": gains}]


def train_on_digits(model: nn.Module, seed: int, steps: int = 120, rate: float = 2e-3, size: int = 32) -> float:
    """Train a classifier of digits and give the share that it gets right of those it never saw."""
    images, labels = digits(size)
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(groups(model, rate, 4 * rate))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [rate, 4 * rate], total_steps=steps)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(1500, (48,), generator=draw)
        loss = nn.functional.cross_entropy(logits(model, images[chosen]), labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        return (logits(model, images[1500:]).argmax(-1) == labels[1500:]).float().mean().item()


def logits(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """What a classifier of transformers or of torch says."""
    given = model(images)
    return given if isinstance(given, torch.Tensor) else given.logits


def train_on_text(model: nn.Module, seed: int, steps: int = 80, length: int = 48, rate: float = 3e-3) -> float:
    """Train a language model on bytes, and give its last loss in nats."""
    data = torch.tensor(list(text()[:-20000].encode())) + 3
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(groups(model, rate, 4 * rate))
    model.train()
    for step in range(steps):
        for group, at in zip(optimizer.param_groups, (rate, 4 * rate), strict=True):
            group["lr"] = at * min(1, (step + 1) / 10) * (1 - step / (steps + 10))
        start = torch.randint(len(data) - length - 1, (16, 1), generator=draw)
        window = data[start + torch.arange(length + 1)]
        given = model(window[:, :-1])
        given = given if isinstance(given, torch.Tensor) else given.logits
        loss = nn.functional.cross_entropy(given.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    return loss.item()
