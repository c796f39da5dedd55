"""Training runs in which something strikes at a drawn step, whose data are at fault, or whose precision is."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Branches, language
from .cases import Draw, Run, fault, get, norm_paths
from .material import demo, tiny
from .training import Text, adamw, at, run

STRIKE, DATA, PRECISION = "run: strikes at a step", "run: not a norm's", "run: precision"
WATCH = {"verb": "watch"}


@fault(
    STRIKE,
    "norm[^.;]*missing",
    "missing norm",
    "lacks",
    "no norm",
    "absent",
    "has no",
    "chang",
    "formula",
    "bypass",
    "no longer",
    "identity",
    say="from this step on this norm does nothing",
    **WATCH,
)
def norm_bypassed_from_a_step(draw: Draw) -> Run:
    """At a step a callback replaces one norm's forward by the identity."""
    model = demo("rmsnorm")
    path = draw.choice(norm_paths(model)[:-1])

    def strike() -> None:
        get(model, path).forward = lambda hidden_states: hidden_states

    return run(draw, model, places=[path], before=at(draw.randint(12, 25), strike))


@fault(STRIKE, r"\beps\b", say="from this step on this norm's eps is another", **WATCH)
def eps_changes_at_a_step(draw: Draw) -> Run:
    """A resume from another config sets one norm's eps to 1."""
    model = demo("rmsnorm")
    path = draw.choice(norm_paths(model)[:-1])
    return run(
        draw,
        model,
        places=[path],
        before=at(draw.randint(12, 25), lambda: setattr(get(model, path), "variance_epsilon", 1.0)),
    )


@fault(STRIKE, "gain", "collapsed", "zero", "nothing", say="at this step this norm's gain became 0", **WATCH)
def gain_zeroed_at_a_step(draw: Draw) -> Run:
    """A partial restore zeroes one gain; the learning rate is too low to bring it back."""
    model = demo("layernorm")
    path = draw.choice(norm_paths(model, "ln_1"))
    return run(
        draw,
        model,
        adamw(model, 1e-5),
        [path],
        before=at(draw.randint(12, 25), lambda: get(model, path).weight.data.zero_()),
    )


@fault(
    STRIKE,
    "stream",
    "scale",
    "matri",
    r"\bweights?\b",
    say="at this step the stream leaves this block's MLP a thousand times as long",
    **WATCH,
)
def matrix_blows_up_at_a_step(draw: Draw) -> Run:
    """A flipped bit: one MLP's output matrix is 1000 times as large from a step on. The norm behind it is innocent."""
    model = demo("rmsnorm")
    number = draw.randrange(1, 5)
    matrix = model.model.layers[number].mlp.down_proj.weight
    return run(
        draw, model, places=[f"model.layers.{number}"], before=at(draw.randint(12, 25), lambda: matrix.data.mul_(1000))
    )


@fault(STRIKE, "nan", "non-?finite", "finite", say="at this step NaN began in this MLP", **WATCH)
def nan_at_a_step(draw: Draw) -> Run:
    """One weight of an MLP becomes NaN."""
    model = demo("layernorm")
    number = draw.randrange(1, 5)
    matrix = model.transformer.h[number].mlp.c_fc.weight
    return run(
        draw,
        model,
        places=[f"transformer.h.{number}"],
        before=at(draw.randint(12, 25), lambda: matrix.data[3].fill_(float("nan"))),
    )


@fault(STRIKE, "logit", "attention", say="at this step the attention logits of this layer exploded", **WATCH)
def attention_logits_explode_at_a_step(draw: Draw) -> Run:
    """Queries and keys of one layer become 12 times as large each."""
    model = demo("rmsnorm")
    number = draw.randrange(1, 5)
    attention = model.model.layers[number].self_attn

    def strike() -> None:
        attention.q_proj.weight.data.mul_(12)
        attention.k_proj.weight.data.mul_(12)

    return run(draw, model, places=[f"model.layers.{number}"], before=at(draw.randint(12, 25), strike))


@fault(
    DATA,
    "input",
    "spike",
    "data",
    "loss",
    "batch",
    say="one batch is 10,000 times too large; no norm is wrong",
    innocent=True,
    **WATCH,
)
def inputs_huge_at_a_step(draw: Draw) -> Run:
    """Regression on vectors; one batch comes unscaled. A data fault."""
    model = Branches(32, nn.LayerNorm(32))
    target = torch.randn(32, 32)
    step = draw.randint(15, 30)

    def loss(now: int) -> Tensor:
        x = torch.randn(16, 32) * (1e4 if now == step else 1.0)
        return (model(x) - x @ target / 6).square().mean()

    return run(draw, model, adamw(model), loss=loss)


@fault(
    DATA, "nan", "non-?finite", "input", "finite", say="the input holds NaN; no norm is wrong", innocent=True, **WATCH
)
def inputs_nan_at_a_step(draw: Draw) -> Run:
    """A batch of embeddings holds a NaN."""
    model = language(draw)
    step = draw.randint(15, 30)
    width = model.embedding.weight.shape[1]
    batches = Text(draw)

    def loss(now: int) -> Tensor:
        ids = batches(now)
        x = torch.randn(4, 48, width) * 0.1 + model.embedding(ids[:, :-1])
        if now == step:
            x = x.clone()
            x[1, 5, 7] = float("nan")
        return F.cross_entropy(model(inputs_embeds=x).flatten(0, 1), ids[:, 1:].flatten())

    return run(draw, model, loss=loss)


@fault(
    DATA,
    "loss",
    "label",
    "fall",
    say="nothing of a norm; at best: the loss does not fall",
    seeable=False,
    innocent=True,
    **WATCH,
)
def labels_random(draw: Draw) -> Run:
    """Labels belong to another batch (an index shifted by one): nothing can be learnt but their frequencies."""
    model = tiny(draw, "GPT2")
    batches = Text(draw)

    def loss(step: int) -> Tensor:
        ids = batches(step)
        return F.cross_entropy(model(input_ids=ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].roll(1, 0).flatten())

    return run(draw, model, loss=loss)


@fault(PRECISION, "batch statistics", "too little", "few", "samples", say="batch statistics of 2 samples", **WATCH)
def batch_norm_of_two(draw: Draw) -> Run:
    """BatchNorm in training with 2 samples a batch: statistics of two numbers."""
    model = Branches(32, nn.BatchNorm1d(32))
    target = torch.randn(32, 32)

    def loss(_step: int) -> Tensor:
        x = torch.randn(2, 32)
        return (model(x) - x @ target / 6).square().mean()

    return run(draw, model, adamw(model), ["norm"], loss=loss)


@fault(PRECISION, "16 bits", "bfloat16", "sum", "gradient", say="gain gradients are summed in bfloat16", **WATCH)
def gain_gradients_summed_in_bfloat16(draw: Draw) -> Run:
    """torch's CPU LayerNorm adds up gain and bias gradients in bfloat16: README and torch 2.13; 16 x 128 rows."""
    model = language(draw, norm=nn.LayerNorm, depth=2).to(torch.bfloat16)
    return run(draw, model, adamw(model, 1e-2), norm_paths(model), batches=Text(draw, 16, 128), steps=30)


@fault(PRECISION, r"\beps\b", "small", say="what enters the first norm is small beside its eps", **WATCH)
def input_small_beside_eps(draw: Draw) -> Run:
    """The embedding starts with a standard deviation of 1e-4, eps is 1e-5: the first norm's rows leave at 3 % of
    their length."""
    model = language(draw, norm=lambda n: nn.RMSNorm(n, eps=1e-5))
    nn.init.normal_(model.embedding.weight, std=1e-4)
    return run(draw, model, places=["blocks.0.norm1"])
