"""Faults of training runs, under `nk.watch`: 30 to 60 steps of small models; many strike at a drawn step."""

import torch
from torch import nn

from . import formulas as f
from .cases import Draw, Run, fault, get, norm_paths, put
from .material import demo, tiny
from .training import Text, adamw, language_loss, run, set_rate

OPTIMIZER, START, GAINS = "run: optimizer and schedule", "run: start", "run: gains that do not train"
WATCH = {"verb": "watch"}


@fault(OPTIMIZER, "update", "learning rate", say="the learning rate is too high", **WATCH)
def rate_too_high(draw: Draw) -> Run:
    """AdamW at thirty to a hundred times the rate that the trained model had."""
    model = demo(draw.choice(["layernorm", "rmsnorm"]))
    return run(draw, model, adamw(model, draw.choice([0.2, 0.4, 0.6])))


@fault(
    OPTIMIZER, "update", "learning rate", "spike", say="at this step the update was a hundred times too large", **WATCH
)
def rate_spikes_at_a_step(draw: Draw) -> Run:
    """A schedule gives 300 times the rate at one step: a cycle that restarts wrongly."""
    model = demo("rmsnorm")
    optimizer = adamw(model, 1e-3)
    step = draw.randint(15, 28)

    def before(now: int) -> None:
        set_rate(optimizer, 0.3 if now == step else 1e-3)

    return run(draw, model, optimizer, before=before, steps=45)


@fault(OPTIMIZER, "decay", say="weight decay pulls the gains towards 0", **WATCH)
def decay_on_gains(draw: Draw) -> Run:
    """One parameter group with weight decay 0.3 for all, gains included (DeepSpeedExamples PR 755)."""
    model = demo("rmsnorm")
    return run(
        draw,
        model,
        torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=draw.choice([0.3, 0.5])),
        norm_paths(model),
    )


@fault(OPTIMIZER, "optimizer'?s? eps", "adam", "outweigh", say="Adam's eps outweighs the gradients", **WATCH)
def adam_eps_too_large(draw: Draw) -> Run:
    """Adam's eps is 1e-1 or 1 where gradients are near 1e-3: updates are shrunken SGD."""
    model = tiny(draw, "GPT2")
    return run(draw, model, adamw(model, 1e-3, eps=draw.choice([0.1, 1.0])))


@fault(OPTIMIZER, "update", "loss scale", "learning rate", say="gradients are applied with their loss scale", **WATCH)
def loss_scale_not_removed(draw: Draw) -> Run:
    """The loss is multiplied by 1024 and the gradients are never divided; SGD applies them as they are."""
    model = demo("layernorm")
    inner = language_loss(model, Text(draw))
    return run(draw, model, torch.optim.SGD(model.parameters(), lr=0.05), loss=lambda step: inner(step) * 1024)


@fault(OPTIMIZER, "accumul", "clear", "zero_grad", "pile", say="gradients pile up from step to step", **WATCH)
def gradients_never_cleared(draw: Draw) -> Run:
    """zero_grad is missing: each step's gradient is the sum of all so far, and plain SGD diverges."""
    model = demo("layernorm")
    return run(draw, model, torch.optim.SGD(model.parameters(), lr=0.3), clears=False, steps=60)


@fault(
    OPTIMIZER,
    "clip",
    "too small",
    "not train",
    "never move",
    "stands? still",
    "do(es)? not (move|learn)",
    say="after clipping nearly nothing is left of the update",
    **WATCH,
)
def clipped_to_nothing(draw: Draw) -> Run:
    """clip_grad_norm_ with 1e-6 for 1.0 and plain SGD: nothing moves."""
    model = tiny(draw, "Llama")

    def clip(_step: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-6)

    return run(draw, model, torch.optim.SGD(model.parameters(), lr=0.05), after_backward=clip)


@fault(
    OPTIMIZER,
    "maximi[sz]e",
    "ascent",
    "loss rises",
    "sign of",
    "diverge",
    say="the loss rises from step to step",
    **WATCH,
)
def gradient_ascent(draw: Draw) -> Run:
    """maximize=True: the sign of the update is wrong."""
    model = demo("rmsnorm")
    return run(draw, model, torch.optim.SGD(model.parameters(), lr=0.1, maximize=True))


@fault(
    OPTIMIZER,
    "not train",
    "never move",
    "stands? still",
    "do(es)? not (move|learn)",
    "no update",
    "rate is 0",
    "rate of 0",
    say="no parameter moves: the rate is 0",
    **WATCH,
)
def rate_is_zero(draw: Draw) -> Run:
    """A warm-up that never leaves 0: the scheduler is stepped once an epoch."""
    model = tiny(draw, "GPT2")
    return run(draw, model, adamw(model, 0.0))


@fault(GAINS, "not train", "frozen", "no gradient", "requires_grad", say="this norm's gain gets no gradient", **WATCH)
def gain_frozen(draw: Draw) -> Run:
    """requires_grad is False on one norm's gain by a name filter that matched too much."""
    model = tiny(draw, "Llama")
    path = draw.choice(norm_paths(model))
    get(model, path).weight.requires_grad_(False)
    return run(draw, model, places=[path])


@fault(GAINS, "optimizer", "not train", "not updated", "never move", say="the gains are in no parameter group", **WATCH)
def gains_not_in_optimizer(draw: Draw) -> Run:
    """The group for parameters without decay was built and not handed over."""
    model = tiny(draw, "GPT2")
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    return run(draw, model, torch.optim.AdamW(matrices, lr=1e-3), norm_paths(model))


@fault(
    GAINS,
    "optimizer",
    "not train",
    "replaced",
    "not updated",
    "never move",
    say="this norm was replaced after the optimizer was built",
    **WATCH,
)
def norm_replaced_after_optimizer(draw: Draw) -> Run:
    """A kernel swap after the optimizer was built: the new module's gain is not the parameter that the optimizer
    holds."""
    model = tiny(draw, "Llama")
    optimizer = adamw(model)
    path = draw.choice(norm_paths(model))
    put(model, path, f.instead(get(model, path), f.llama_norm))
    return run(draw, model, optimizer, places=[path])


@fault(
    GAINS,
    "never move",
    "half",
    "rounded",
    "bfloat16",
    "16 bits",
    "lost",
    "not train",
    say="bfloat16 gains of 1 take no update below 2^-9",
    **WATCH,
)
def bfloat16_gains_stay(draw: Draw) -> Run:
    """The model is in bfloat16 with no float32 copy: updates of 1e-4 on gains of 1 round to nothing (flame #47,
    axolotl PR 3670)."""
    model = tiny(draw, "Llama").to(torch.bfloat16)
    return run(draw, model, adamw(model, 2e-4), norm_paths(model))


@fault(
    GAINS,
    "gradient",
    "detach",
    "formula",
    "derivative",
    say="the gradient of this norm is not that of its formula",
    **WATCH,
)
def scale_detached(draw: Draw) -> Run:
    """The scale is detached in one norm: values right, the gradient not tangential any more."""
    model = tiny(draw, "Llama")
    path = draw.choice(norm_paths(model)[:-1])
    put(model, path, f.instead(get(model, path), f.detached))
    return run(draw, model, places=[path])


@fault(START, "initial", "start", "begin", say="the matrices start thirty times too large", **WATCH)
def matrices_start_too_large(draw: Draw) -> Run:
    """All matrices start with a standard deviation of 1 and not 0.02."""
    model = tiny(draw, draw.choice(["GPT2", "Llama"]))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=1.0)
    return run(draw, model)


@fault(START, "gain", say="gains start at 2 where the class begins at 1", **WATCH)
def gains_start_at_two(draw: Draw) -> Run:
    """An offset norm was initialised with ones: its effective gain starts at 2 (transformers PR 40796, litgpt
    model.py:1310)."""
    model = tiny(draw, "Gemma2")
    paths = norm_paths(model)
    for path in paths:
        get(model, path).weight.data.fill_(1.0)
    return run(draw, model, places=paths)


@fault(START, "gain", "zero", say="this gain starts at 0", **WATCH)
def gain_starts_at_zero(draw: Draw) -> Run:
    """A norm with a plain gain was initialised for 1 + weight, so it gives zeros (torchtitan PR 4489)."""
    model = tiny(draw, "Llama")
    path = draw.choice(norm_paths(model)[:-1])
    get(model, path).weight.data.zero_()
    return run(draw, model, places=[path])
