"""The arms of the study `batch-vs-layer`: four kinds of model, and the dependences of their outputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor, nn

from normkit import specs
from normkit.geometry import (
    batch_size_dependence,
    cross_sample_jacobian,
    future_leakage,
    padding_dependence,
    train_eval_difference,
)
from normkit.study.arm_context import ArmContext, Settings
from normkit.study.corpus import next_token_loss, text_of_the_library, windows
from normkit.study.digits import SIDE, Digits, digit_batches, digit_loss, digit_score, digits
from normkit.study.model_parts import BatchNorm, NormLayer
from normkit.study.result import Arm
from normkit.study.small_nets import (
    MLP,
    Convolutional,
    ConvolutionalConfig,
    MLPConfig,
    OverChannels,
    Recurrent,
    RecurrentConfig,
)
from normkit.study.statistics import Measurement, Paired, Statistic, over_rates, steps_to
from normkit.study.training_run import Batch, TrainingRun
from normkit.study.transformer import Transformer, TransformerConfig

NORMS: dict[str, NormLayer] = {
    "BatchNorm": BatchNorm,
    "LayerNorm": specs.TORCH_LAYER_NORM,
    "RMSNorm": specs.OLMO2,
    "no norm": None,
}

_IMAGE_NORMS: dict[str, NormLayer] = {
    "BatchNorm": lambda channels: OverChannels(BatchNorm(channels)),
    "LayerNorm": specs.POOLFORMER,
    "no norm": None,
}

VARIANCE_SIZES = (2, 4, 8, 32, 128)
"""Rows in the batches of which `variance` takes variances."""

REACHED_LOSS = 0.5
"""The training loss to which steps are counted."""

_BLANK_ROWS = 4
_WINDOWS = 8
_DRAWS = 16
_OTHER_SEED = 1_000_000


def arms(settings: Settings) -> tuple[Arm, ...]:
    """MLPs and CNNs over batch sizes, recurrent nets, Transformers over rates, dependences, and Gaussian rows."""
    perceptrons = [
        _arm("MLP", f"{norm}, batch {size}", norm=norm, batch=size)
        for norm in NORMS
        for size in settings["batch_sizes"]
    ]
    images = [
        _arm("CNN", f"{norm}, batch {size}", norm=norm, batch=size)
        for norm in ("BatchNorm", "LayerNorm", "no norm")
        for size in settings["image_batch_sizes"]
    ]
    sequences = [
        _arm("RNN", words, cost=4.0, norm=norm, own_statistics=own)
        for words, norm, own in (
            ("one BatchNorm", "BatchNorm", False),
            ("a BatchNorm for each time", "BatchNorm", True),
            ("LayerNorm", "LayerNorm", False),
            ("no norm", "no norm", False),
        )
    ]
    texts = [
        _arm("Transformer", f"{norm}, rate {rate:g}", cost=6.0, norm=norm, rate=rate)
        for norm in ("BatchNorm", "LayerNorm")
        for rate in settings["text_rates"]
    ]
    dependences = [
        _arm("dependence", f"{norm}, {mode}", cost=0.3, norm=norm, training=mode == "training")
        for norm in NORMS
        for mode in ("training", "evaluation")
    ]
    return (*perceptrons, *images, *sequences, *texts, *dependences, _arm("variance", "Gaussian rows", cost=0.1))


def _arm(kind: str, words: str, cost: float = 1.0, **choices: object) -> Arm:
    return Arm(name=f"{kind}: {words}", choices={"kind": kind, **choices}, cost=cost)


def measure(context: ArmContext, arm: Arm) -> Measurement:
    """The measurements of the arm's kind."""
    measures = {
        "MLP": perceptron,
        "CNN": convolutional,
        "RNN": recurrent,
        "Transformer": transformer,
        "dependence": dependence,
        "variance": variance,
    }
    return measures[arm.choices["kind"]](context, arm)


def perceptron(context: ArmContext, arm: Arm) -> Measurement:
    """An MLP on digits. With single rows BatchNorm cannot be trained, and the untrained net is measured."""
    batch, norm = arm.choices["batch"], arm.choices["norm"]
    width, layers = context["width"], context["layers"]
    config = MLPConfig(inputs=SIDE * SIDE, width=width, layers=layers, norm=NORMS[norm])
    model = nn.Sequential(nn.Flatten(), MLP(config, seed=context.seed))
    data = digits()
    if batch == 1 and norm == "BatchNorm":
        score = digit_score(model.to(context.device, context.dtype).eval(), data.held_out, data.held_out_labels)
        untrained = {"held_out": score.loss, "error": score.error, "gap": None, "trained": False}
        return {"losses": [], **untrained, "findings": []}
    recipe = context.recipe()
    run = context.train(model, recipe, digit_batches(data, batch=batch, seed=context.seed), digit_loss)
    return {**_read(run, model, data, batch), "trained": True}


def convolutional(context: ArmContext, arm: Arm) -> Measurement:
    """A small CNN on digits."""
    batch = arm.choices["batch"]
    config = ConvolutionalConfig(channels=context["channels"], norm=_IMAGE_NORMS[arm.choices["norm"]])
    model = Convolutional(config, seed=context.seed)
    data = digits()
    recipe = context.recipe(steps=context["image_steps"], learning_rate=context["image_rate"])
    run = context.train(model, recipe, digit_batches(data, batch=batch, seed=context.seed), digit_loss)
    more = islice(digit_batches(data, batch=batch, seed=context.seed + _OTHER_SEED), _DRAWS)
    return {**_read(run, model, data, batch), "scatter": batch_variance_scatter(model, more)}


def recurrent(context: ArmContext, arm: Arm) -> Measurement:
    """A recurrent net that reads a digit row by row between blank rows, and later longer sequences too."""
    times = SIDE + _BLANK_ROWS
    config = RecurrentConfig(
        inputs=SIDE,
        width=context["width"],
        norm=NORMS[arm.choices["norm"]],
        norms=times if arm.choices["own_statistics"] else 1,
    )
    model = Recurrent(config, seed=context.seed)
    data = digits()
    batch = context["sequence_batch"]
    recipe = context.recipe(steps=context["sequence_steps"], learning_rate=context["sequence_rate"])
    run = context.train(model, recipe, delayed_batches(data, batch, context.seed), digit_loss)
    blank = float(data.training.min())
    held_out = delayed(data.held_out, torch.arange(len(data.held_out)) % (_BLANK_ROWS + 1), blank)
    model.eval()
    errors = []
    for rows in context["extra_rows"]:
        before = torch.full((len(held_out), rows, SIDE), blank)
        errors.append(digit_score(model, torch.cat([before, held_out], 1), data.held_out_labels).error)
    return {**_read(run, model, replace(data, held_out=held_out), batch), "errors": errors}


def transformer(context: ArmContext, arm: Arm) -> Measurement:
    """A Transformer on text, its held-out loss in both modes and with new statistics."""
    layers, batch = context["text_layers"], context["text_batch"]
    model = context.transformer(layers=layers, norm=NORMS[arm.choices["norm"]])
    recipe = context.recipe(steps=context["text_steps"], learning_rate=arm.choices["rate"])
    run = context.train_on_text(model, recipe, batch=batch)
    training, held_out = text_of_the_library()
    window = model.config.context
    unseen = list(islice(windows(held_out, batch=batch, window=window, seed=0), _WINDOWS))
    more = list(islice(windows(training, batch=batch, window=window, seed=context.seed + _OTHER_SEED), _DRAWS))
    again = with_statistics_of(model, more)
    return run.measurement(
        held_out=run.capped(_mean_loss(copy.deepcopy(model).eval(), unseen)),
        held_out_training_mode=run.capped(_mean_loss(copy.deepcopy(model).train(), unseen)),
        held_out_new_statistics=run.capped(_mean_loss(again.eval(), unseen)),
        scatter=batch_variance_scatter(model, more),
    )


class Body(nn.Module):
    """A Transformer from its embedded tokens (batch, tokens, width) to the input of its unembedding."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.blocks, self.final_norm = model.blocks, model.final_norm

    def forward(self, x: Tensor) -> Tensor:
        """All blocks and the final norm."""
        for block in self.blocks:
            x = block(x)
        normalized: Tensor = self.final_norm(x)
        return normalized


def dependence(context: ArmContext, arm: Arm) -> Measurement:
    """The dependence of an untrained causal Transformer's outputs on more than their own past, in float64.

    "samples": largest block of the Jacobian between two samples over the largest within one; "batch size": how far
    sample 0 moves in a batch of two; "future": largest derivative of a token by a later one; "padding": how far valid
    tokens move when the padding changes; "mode": training against evaluation mode after ten batches of other rows.
    """
    generator = torch.Generator().manual_seed(context.seed)

    def draw(count: int) -> Tensor:
        return torch.randn(count, 6, 16, dtype=torch.float64, generator=generator)

    config = TransformerConfig(context=6, width=16, heads=2, layers=2, norm=NORMS[arm.choices["norm"]])
    body = Body(Transformer(config, seed=context.seed)).double()
    x, seen = draw(4), [draw(16) + 0.5 for _ in range(10)]
    mode = float(train_eval_difference(body, x, seen))
    for batch in seen:
        body(batch)
    body.train(arm.choices["training"])
    blocks = cross_sample_jacobian(body, x)
    own = blocks.diagonal()
    valid = torch.arange(6) < torch.tensor([[6], [4], [3], [5]])
    return {
        "samples": float((blocks - own.diag()).max() / own.max()),
        "batch size": float(batch_size_dependence(body, x, [2])),
        "future": float(future_leakage(body, x[:2])),
        "padding": float(padding_dependence(body, x, valid, 5.0)),
        "mode": mode,
    }


def variance(context: ArmContext, _arm: Arm) -> Measurement:
    """Relative standard deviation of the variance that BatchNorm sees in batches of independent Gaussian rows."""
    generator = torch.Generator().manual_seed(context.seed)
    scatter = []
    for size in VARIANCE_SIZES:
        variances = torch.randn(20_000, size, dtype=torch.float64, generator=generator).var(-1, correction=0)
        scatter.append(float(variances.std() / variances.mean()))
    return {"scatter": scatter}


@torch.no_grad()
def batch_variance_scatter(model: nn.Module, batches: Iterable[Batch]) -> float | None:
    """Relative standard deviation over batches of the variance that a BatchNorm computes; None without a BatchNorm.

    The median over features of each BatchNorm in training mode, and the mean over these norms.
    """
    twin = copy.deepcopy(model).train()
    variances: dict[str, list[Tensor]] = {}

    def record(path: str, x: Tensor) -> None:
        variances.setdefault(path, []).append(x.double().flatten(0, -2).var(0, correction=0))

    for path, module in twin.named_modules():
        if isinstance(module, BatchNorm):
            module.register_forward_pre_hook(lambda _, inputs, path=path: record(path, inputs[0]))
    if not any(isinstance(module, BatchNorm) for module in twin.modules()):
        return None
    for batch in batches:
        twin(_inputs(twin, batch))
    spread = [torch.stack(seen) for seen in variances.values()]
    return float(torch.stack([(each.std(0) / each.mean(0)).median() for each in spread]).mean())


@torch.no_grad()
def with_statistics_of(model: nn.Module, batches: Iterable[Batch]) -> nn.Module:
    """A copy whose BatchNorms hold the mean statistics of a few batches under the present weights.

    Source:
        Wu & Johnson 2021, arXiv:2105.07576, section 3 ("precise BatchNorm").
    """
    twin = copy.deepcopy(model).train()
    for module in twin.modules():
        if isinstance(module, BatchNorm):
            module.reset_running_stats()
            module.momentum = None
    for batch in batches:
        twin(_inputs(twin, batch))
    return twin


def delayed(images: Tensor, delays: Tensor, blank: float) -> Tensor:
    """Sequences (N, 12, 8) of rows: each image after its delay of 0 to 4, blank rows before and after."""
    sequences = torch.full((len(images), SIDE + _BLANK_ROWS, SIDE), blank)
    sequences[torch.arange(len(images))[:, None], delays[:, None] + torch.arange(SIDE)] = images
    return sequences


def delayed_batches(data: Digits, batch: int, seed: int) -> Iterator[Batch]:
    """Endless batches of training images as sequences, each image after a delay of its own."""
    generator, blank = torch.Generator().manual_seed(seed), float(data.training.min())
    for images, labels in digit_batches(data, batch=batch, seed=seed):
        yield delayed(images, torch.randint(_BLANK_ROWS + 1, (batch,), generator=generator), blank), labels


def _read(run: TrainingRun, model: nn.Module, data: Digits, batch: int) -> dict[str, object]:
    """Held-out loss and error in evaluation mode, and that loss minus the loss in training mode."""
    whole = digit_score(copy.deepcopy(model).eval(), data.held_out, data.held_out_labels)
    modes = [
        digit_score(copy.deepcopy(model).train(mode), data.held_out, data.held_out_labels, batch=batch)
        for mode in (False, True)
    ]
    return run.measurement(
        held_out=run.capped(whole.loss),
        error=whole.error,
        gap=run.capped(modes[0].loss) - run.capped(modes[1].loss),
        training_mode_error=modes[1].error,
    )


def _mean_loss(model: nn.Module, batches: list[Batch]) -> float:
    device = next(model.parameters()).device
    with torch.no_grad():
        losses = [next_token_loss(model, tuple(part.to(device) for part in batch)).item() for batch in batches]
    return sum(losses) / len(losses)


def _inputs(model: nn.Module, batch: Batch) -> Tensor:
    """The model's input: images as they are, or all tokens of a window but the last."""
    parameter = next(model.parameters())
    first = batch[0].to(parameter.device)
    return first.to(parameter.dtype) if first.is_floating_point() else first[:, :-1]


def mode_gap(norm: str, sizes: Iterable[int]) -> Statistic:
    """The largest difference between the losses of the two modes over some batch sizes."""
    return lambda paired: max(abs(paired[f"MLP: {norm}, batch {size}"]["gap"]) for size in sizes)


def speed_up(paired: Paired) -> float:
    """Steps to the loss without a norm over those with BatchNorm; infinite if only BatchNorm reaches it."""
    without, batch = (
        steps_to(paired[f"CNN: {norm}, batch 32"]["losses"], REACHED_LOSS) for norm in ("no norm", "BatchNorm")
    )
    return (math.inf if without is None else without) / (math.inf if batch is None else batch)


def greatest_dependence(rows: tuple[str, ...], names: tuple[str, ...]) -> Statistic:
    """The largest of the named dependences of several arms."""
    return lambda paired: max(float(paired[f"dependence: {row}"][name]) for row in rows for name in names)


def best_loss(paired: Paired, norm: str) -> float:
    """The least held-out loss of a Transformer over the learning rates; NaN if none was run."""
    losses = [measured["held_out"] for measured in over_rates(paired, f"Transformer: {norm}")]
    return float(min(losses, default=math.nan))
