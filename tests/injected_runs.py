"""Short training runs of the architectures that ship, healthy or with a fault, and what a watch says of each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import altered_norms
import normkit as nk
from altered_norms import Altered
from injection import Trial, summary
from normkit import demo
from normkit.demo.architecture import build
from normkit.inspection.result import Inspection, infer
from normkit.measurement.baseline import Baseline
from normkit.study.model_parts import BatchNorm
from planting import Plant, blocks, final, missing, norms, residual_after_norm
from subjects import WIDTH, Studied

TWINS = ("layernorm", "rmsnorm")
ALL = (*TWINS, "study")
"""The architectures that ship, and that of the studies."""


def fresh(twin: str) -> nn.Module:
    """A model that has not been trained."""
    return Studied(layers=4, vocabulary=256, context=128) if twin == "study" else build(twin)


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    answer = model(input_ids=ids)
    return getattr(answer, "logits", answer).float()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a run is made of; the values are those of a healthy one.

    Attributes:
        steps: Optimizer steps.
        batch: Windows in a step.
        window: Bytes in each.
        rate: Learning rate after the warm-up.
        warmup: Steps of linear increase.
        clip: Largest norm of all gradients together; None does not clip.
        eps: The optimizer's.
        decayed: Every parameter has weight decay, those of norms too.
        dtype: Of the model.
        every: Steps between two measurements.
    """

    steps: int = 36
    batch: int = 2
    window: int = 128
    rate: float = 2e-3
    warmup: int = 20
    clip: float | None = 1.0
    eps: float = 1e-8
    decayed: bool = False
    dtype: torch.dtype = torch.float32
    every: int = 6


def nowhere(_model: nn.Module, _chance: random.Random) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True, kw_only=True)
class RunFault:
    """One way in which a run goes wrong.

    Attributes:
        name: In a few words.
        rules: The rule that is to come first, or any of these.
        plant: Changes the model before the run; returns the paths that the finding is to name, or none where it is of
            the whole model.
        recipe: What differs in the recipe.
        strike: Called before each step with the model and the step; changes the weights or the bytes of that step.
        began: Step in which it strikes; the watch must say that it began there, and at what was planted.
        twins: The architectures that it can befall.
        is_declared: The studies' model, which has no config, is held to what it was seen to do before the fault.
    """

    name: str
    rules: tuple[str, ...]
    plant: Plant = nowhere
    recipe: dict[str, Any] = field(default_factory=dict)
    strike: Callable[[nn.Module, int, Tensor], float] | None = None
    began: int | None = None
    twins: tuple[str, ...] = TWINS
    is_declared: bool = True


def attempt(fault: RunFault, twin: str, seed: int, **changes: Any) -> Trial:
    """Run with a fault under a watch."""
    return judged(fault, twin, seed, **changes)[0]


def judged(fault: RunFault, twin: str, seed: int, **changes: Any) -> tuple[Trial, Inspection]:
    """The same, and all that the watch says; of the recipe, other values than the fault's may be given."""
    torch.manual_seed(seed)
    model, chance = fresh(twin), random.Random(f"{fault.name} {twin} {seed}")
    intent = None
    if twin == "study" and fault.is_declared:
        intent = infer(nk.inspect(model.eval(), {"input_ids": _text()[None, :64]}), source="the intent file")
    planted = fault.plant(model, chance)
    found = watched(model, Recipe(**{**fault.recipe, **changes}), seed, fault.strike, intent)
    assert found.training is not None
    origin = found.training.origin
    trial = Trial(
        fault=fault.name,
        family=twin,
        planted=planted if fault.began is None else (),
        expected=fault.rules,
        reported=summary(found.findings),
        spreads=True,
        is_timed=fault.began is None
        or (origin is not None and origin.step == fault.began and origin.path in (planted or (origin.path,))),
    )
    return trial, found


def healthy(twin: str, seed: int, **changes: Any) -> Inspection:
    """Run without a fault under a watch."""
    torch.manual_seed(seed)
    return watched(fresh(twin), Recipe(**changes), seed)


def watched(
    model: nn.Module,
    recipe: Recipe,
    seed: int,
    strike: Callable[[nn.Module, int, Tensor], float] | None = None,
    intent: Baseline | None = None,
) -> Inspection:
    """Train on bytes of the text that ships, as the models that ship were trained."""
    model = model.to(recipe.dtype).train()
    optimizer = torch.optim.AdamW(_groups(model, decayed=recipe.decayed), betas=(0.9, 0.95), eps=recipe.eps)
    text = _text()
    generator = torch.Generator().manual_seed(seed)
    with nk.watch(model, optimizer, every=recipe.every, intent=intent, say=lambda _line: None) as watch:
        for step in range(recipe.steps):
            starts = torch.randint(len(text) - recipe.window, (recipe.batch,), generator=generator)
            windows = text[starts[:, None] + torch.arange(recipe.window + 1)]
            factor = 1.0 if strike is None else strike(model, step, windows)
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate * min(1.0, (step + 1) / recipe.warmup)
            logits = logits_of(model, windows[:, :-1])
            loss = factor * F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            watch.step(loss)
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
        return watch.inspection()


def _text() -> Tensor:
    return torch.tensor(list(demo.text().encode()))


def _groups(model: nn.Module, *, decayed: bool) -> list[dict[str, Any]]:
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.dim() > 1 and id(p) not in embeddings]
    rest = [p for p in model.parameters() if p.dim() == 1 or id(p) in embeddings]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.1 * decayed}]


def _frozen(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
    path = chance.choice(list(norms(model)))
    model.get_submodule(path).requires_grad_(False)
    return (path,)


def _silent_gain(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
    """A gain that starts at 0."""
    path = chance.choice(list(norms(model)))
    nn.init.zeros_(model.get_submodule(path).weight)
    return (path,)


def _detached(model: nn.Module, _chance: random.Random) -> tuple[str, ...]:
    """No gradient comes back through the final norm."""
    path = final(model)
    model.set_submodule(path, Altered(model.get_submodule(path), lambda norm, x: altered_norms.right(norm, x.detach())))
    return (path,)


def _drawn_large(model: nn.Module, _chance: random.Random) -> tuple[str, ...]:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)
    return ()


def _wrong_eps(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
    path, norm = chance.choice(list(norms(model).items()))
    norm.eps = 0.1
    return (path,)


def _in_16_bits(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
    """PyTorch's own LayerNorm, which in bfloat16 on a CPU sums the gain's gradient in bfloat16."""
    path = chance.choice(list(norms(model)))
    norm = model.get_submodule(path)
    model.set_submodule(path, nn.LayerNorm(norm.weight.shape, eps=norm.eps))
    return (path,)


def _large_loss(_model: nn.Module, step: int, _windows: Tensor) -> float:
    """One batch whose loss is summed where it should be a mean."""
    return 500.0 if step == 30 else 1.0


def _nan(model: nn.Module, step: int, _windows: Tensor) -> float:
    if step == 20:
        with torch.no_grad():
            next(iter(blocks(model).values())).mlp.get_submodule(_first_linear(model)).weight.view(-1)[7] = torch.nan
    return 1.0


def _first_linear(model: nn.Module) -> str:
    return "c_fc" if hasattr(next(iter(blocks(model).values())), "ln_1") else "up_proj"


def _first_block(model: nn.Module, _chance: random.Random) -> tuple[str, ...]:
    return (next(iter(blocks(model))),)


def _first_weights(model: nn.Module, chance: random.Random) -> tuple[str, ...]:
    (path,) = _first_block(model, chance)
    second = "c_proj" if _first_linear(model) == "c_fc" else "down_proj"
    return tuple(f"{path}.mlp.{name}.weight" for name in (_first_linear(model), second))


def _growing_queries(model: nn.Module, step: int, _windows: Tensor) -> float:
    """Queries and keys of one block that grow step by step."""
    if step >= 10:
        attention = next(part for part in list(blocks(model).values())[2].modules() if _is_attention(part))
        with torch.no_grad():
            if hasattr(attention, "query"):
                attention.query.weight.mul_(1.12)
                attention.key.weight.mul_(1.12)
            elif hasattr(attention, "c_attn"):
                attention.c_attn.weight[:, : 2 * attention.c_attn.weight.shape[0]].mul_(1.12)
            else:
                attention.q_proj.weight.mul_(1.12)
                attention.k_proj.weight.mul_(1.12)
    return 1.0


def _third_attention(model: nn.Module, _chance: random.Random) -> tuple[str, ...]:
    path, block = list(blocks(model).items())[2]
    return tuple(f"{path}.{name}" for name, part in block.named_modules() if _is_attention(part))


def _is_attention(part: nn.Module) -> bool:
    return "Attention" in type(part).__name__


def _batch_norms(model: nn.Module, _chance: random.Random) -> tuple[str, ...]:
    """BatchNorm at every place."""
    paths = tuple(norms(model))
    for path in paths:
        model.set_submodule(path, BatchNorm(WIDTH))
    return paths


def _evaluating(model: nn.Module, _step: int, _windows: Tensor) -> float:
    """Something calls eval() on the batch norms before each step."""
    for part in model.modules():
        if isinstance(part, BatchNorm):
            part.eval()
    return 1.0


def _overflowing(model: nn.Module, step: int, _windows: Tensor) -> float:
    """An MLP of the first block that writes past the end of float16 from one step on."""
    if step == 12:
        block = next(iter(blocks(model).values()))
        with torch.no_grad():
            block.mlp.get_submodule(_first_linear(model)).weight.mul_(100.0)
            (block.mlp.c_proj if hasattr(block.mlp, "c_proj") else block.mlp.down_proj).weight.mul_(6e4)
    return 1.0


BFLOAT16 = {"dtype": torch.bfloat16}

RUN_FAULTS = (
    RunFault(name="wrong eps of one norm", rules=("A1", "F9"), plant=_wrong_eps, twins=ALL),
    RunFault(name="a gain that starts at 0", rules=("B5",), plant=_silent_gain),
    RunFault(
        name="weight decay on gains and biases",
        rules=("B7",),
        plant=lambda model, _: (next(iter(norms(model))),),
        recipe={"decayed": True},
    ),
    RunFault(name="a frozen norm", rules=("B8",), plant=_frozen),
    RunFault(
        name="gain gradient summed in bfloat16", rules=("B9",), plant=_in_16_bits, recipe=BFLOAT16, twins=("layernorm",)
    ),
    RunFault(
        name="batch norms in evaluation mode",
        rules=("C8",),
        plant=_batch_norms,
        strike=_evaluating,
        twins=("study",),
        is_declared=False,
    ),
    RunFault(name="residual taken after the norm", rules=("D1",), plant=residual_after_norm, twins=ALL),
    RunFault(name="no final norm", rules=("D3",), plant=missing(lambda model: [final(model)]), twins=ALL),
    RunFault(name="NaN in one weight at step 20", rules=("E3",), plant=_first_block, strike=_nan, began=20),
    RunFault(
        name="overflow of float16 at step 12",
        # No optimizer makes weights so large.
        rules=("F20",),
        plant=_first_weights,
        strike=_overflowing,
        recipe={"dtype": torch.float16, "rate": 1e-3, "eps": 1e-4},
        began=12,
    ),
    RunFault(
        name="queries and keys that grow from step 10 on",
        # They grow by steps that are too large themselves.
        rules=("F1", "F11", "F20"),
        plant=_third_attention,
        strike=_growing_queries,
        twins=ALL,
    ),
    RunFault(name="no gradient through the final norm", rules=("A13",), plant=_detached),
    RunFault(
        name="a summed loss in step 30, nothing clipped",
        rules=("F5",),
        strike=_large_loss,
        recipe={"clip": None},
        began=30,
    ),
    RunFault(name="an optimizer's eps of 1e-2", rules=("F8",), recipe={"eps": 1e-2}),
    RunFault(name="learning rate times 30", rules=("F11",), recipe={"rate": 0.06}, twins=ALL),
    RunFault(
        name="learning rate times 30, no clipping, no warm-up",
        rules=("F11",),
        recipe={"rate": 0.06, "clip": None, "warmup": 1},
    ),
    RunFault(name="initialisation times 10", rules=("F12",), plant=_drawn_large, twins=ALL),
)
"""All faults of a run, in the order of the catalogue."""
