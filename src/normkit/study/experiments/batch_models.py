"""What the study `batch-vs-layer` measures its arms with: four kinds of model, and what their outputs depend on."""

from __future__ import annotations

import copy
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
from normkit.study.convolutional import Convolutional, ConvolutionalConfig, OverChannels
from normkit.study.digits import SIDE, Digits, digit_batches, digit_loss, digit_score, digits
from normkit.study.laboratory import Laboratory, Run
from normkit.study.loop import Batch, Recipe
from normkit.study.norms import BatchNorm, NormLayer
from normkit.study.perceptron import MLP, MLPConfig
from normkit.study.recurrent import Recurrent, RecurrentConfig
from normkit.study.result import Arm, Measurement
from normkit.study.transformer import Transformer, TransformerConfig
from normkit.study.windows import next_token_loss, text_of_the_library, windows

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
"""Rows over which `dependence` estimates variances."""

_BLANK_ROWS = 4
_WINDOWS = 8
_DRAWS = 16
_OTHER_SEED = 1_000_000


def perceptron(lab: Laboratory, arm: Arm) -> Measurement:
    """An MLP on digits; at batch size 1 BatchNorm has one value a feature, cannot train, and is read as it began."""
    batch = arm.choices["batch"]
    config = MLPConfig(
        inputs=SIDE * SIDE, width=lab.integer("width"), layers=lab.integer("layers"), norm=NORMS[arm.choices["norm"]]
    )
    model = nn.Sequential(nn.Flatten(), MLP(config, seed=lab.seed))
    data = digits()
    if batch == 1 and arm.choices["norm"] == "BatchNorm":
        score = digit_score(model.to(lab.device, lab.dtype).eval(), data.held_out, data.held_out_labels)
        return {
            "losses": [],
            "held_out": score.loss,
            "error": score.error,
            "gap": None,
            "trained": False,
            "findings": [],
        }
    run = lab.train(
        model,
        _recipe(lab, "steps", lab.number("learning_rate")),
        digit_batches(data, batch=batch, seed=lab.seed),
        digit_loss,
    )
    return {**_read(run, model, data, batch), "trained": True}


def convolutional(lab: Laboratory, arm: Arm) -> Measurement:
    """A small CNN on digits."""
    batch = arm.choices["batch"]
    config = ConvolutionalConfig(channels=lab.integer("channels"), norm=_IMAGE_NORMS[arm.choices["norm"]])
    model = Convolutional(config, seed=lab.seed)
    data = digits()
    batches = digit_batches(data, batch=batch, seed=lab.seed)
    run = lab.train(model, _recipe(lab, "image_steps", lab.number("image_rate")), batches, digit_loss)
    more = islice(digit_batches(data, batch=batch, seed=lab.seed + _OTHER_SEED), _DRAWS)
    return {**_read(run, model, data, batch), "scatter": batch_variance_scatter(model, more)}


def recurrent(lab: Laboratory, arm: Arm) -> Measurement:
    """A recurrent net that reads a digit row by row, with blank rows around it, and longer sequences after that."""
    times = SIDE + _BLANK_ROWS
    config = RecurrentConfig(
        inputs=SIDE,
        width=lab.integer("width"),
        norm=NORMS[arm.choices["norm"]],
        norms=times if arm.choices["own_statistics"] else 1,
    )
    model = Recurrent(config, seed=lab.seed)
    data = digits()
    batch = lab.integer("sequence_batch")
    run = lab.train(
        model,
        _recipe(lab, "sequence_steps", lab.number("sequence_rate")),
        delayed_batches(data, batch, lab.seed),
        digit_loss,
    )
    blank = float(data.training.min())
    held_out = delayed(data.held_out, torch.arange(len(data.held_out)) % (_BLANK_ROWS + 1), blank)
    extra = lab.settings["extra_rows"]
    assert isinstance(extra, tuple)
    model.eval()
    errors = []
    for rows in extra:
        before = torch.full((len(held_out), int(rows), SIDE), blank)
        errors.append(digit_score(model, torch.cat([before, held_out], 1), data.held_out_labels).error)
    read = _read(run, model, replace(data, held_out=held_out), batch)
    return {**read, "errors": errors}


def transformer(lab: Laboratory, arm: Arm) -> Measurement:
    """The study's Transformer on text, its held-out loss in both modes and with statistics taken anew."""
    window, batch = lab.integer("window"), lab.integer("text_batch")
    config = TransformerConfig(
        context=window,
        width=lab.integer("width"),
        layers=lab.integer("text_layers"),
        norm=NORMS[arm.choices["norm"]],
    )
    model = Transformer(config, seed=lab.seed)
    training, held_out = text_of_the_library()
    batches = windows(training, batch=batch, window=window, seed=lab.seed)
    run = lab.train(model, _recipe(lab, "text_steps", arm.choices["rate"]), batches, next_token_loss)
    unseen = list(islice(windows(held_out, batch=batch, window=window, seed=0), _WINDOWS))
    more = list(islice(windows(training, batch=batch, window=window, seed=lab.seed + _OTHER_SEED), _DRAWS))
    again = with_statistics_of(model, more)
    return {
        "losses": run.losses,
        "held_out": run.capped(_mean_loss(copy.deepcopy(model).eval(), unseen)),
        "held_out_training_mode": run.capped(_mean_loss(copy.deepcopy(model).train(), unseen)),
        "held_out_new_statistics": run.capped(_mean_loss(again.eval(), unseen)),
        "scatter": batch_variance_scatter(model, more),
        "diverged": run.diverged,
        "findings": list(run.findings),
    }


class Body(nn.Module):
    """A Transformer from its embedded tokens (batch, tokens, width) to what its unembedding reads."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.blocks, self.final_norm = model.blocks, model.final_norm

    def forward(self, x: Tensor) -> Tensor:
        """All blocks and the final norm."""
        for block in self.blocks:
            x = block(x)
        normalized: Tensor = self.final_norm(x)
        return normalized


def dependence(lab: Laboratory, arm: Arm) -> Measurement:
    """What the outputs of an untrained causal Transformer depend on beside their own past, in float64.

    "samples": largest block of the Jacobian between two samples over the largest within one; "batch size": how far
    sample 0 moves when it is alone with one other; "future": largest derivative of a token by a later one; "padding":
    how far valid tokens move when later ones hold something else; "mode": training against evaluation mode after ten
    batches of other rows.
    """
    generator = torch.Generator().manual_seed(lab.seed)

    def draw(count: int) -> Tensor:
        return torch.randn(count, 6, 16, dtype=torch.float64, generator=generator)

    config = TransformerConfig(context=6, width=16, heads=2, layers=2, norm=NORMS[arm.choices["norm"]])
    body = Body(Transformer(config, seed=lab.seed)).double()
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


def variance(lab: Laboratory, arm: Arm) -> Measurement:
    """Relative standard deviation of the variance that BatchNorm sees in batches of independent Gaussian rows."""
    del arm
    generator = torch.Generator().manual_seed(lab.seed)
    scatter = []
    for size in VARIANCE_SIZES:
        variances = torch.randn(20_000, size, dtype=torch.float64, generator=generator).var(-1, correction=0)
        scatter.append(float(variances.std() / variances.mean()))
    return {"scatter": scatter}


@torch.no_grad()
def batch_variance_scatter(model: nn.Module, batches: Iterable[Batch]) -> float | None:
    """Relative standard deviation over batches of what a BatchNorm takes for the variance; None where there is none.

    The median over features of each BatchNorm in training mode, and the mean over these norms.
    """
    twin = copy.deepcopy(model).train()
    variances: dict[str, list[Tensor]] = {}

    def note(path: str, x: Tensor) -> None:
        variances.setdefault(path, []).append(x.double().flatten(0, -2).var(0, correction=0))

    for path, module in twin.named_modules():
        if isinstance(module, BatchNorm):
            module.register_forward_pre_hook(lambda _, inputs, path=path: note(path, inputs[0]))
    if not any(isinstance(module, BatchNorm) for module in twin.modules()):
        return None
    for batch in batches:
        twin(_inputs(twin, batch))
    spread = [torch.stack(seen) for seen in variances.values()]
    return float(torch.stack([(each.std(0) / each.mean(0)).median() for each in spread]).mean())


@torch.no_grad()
def with_statistics_of(model: nn.Module, batches: Iterable[Batch]) -> nn.Module:
    """A copy whose BatchNorms hold the mean statistics of a few batches under the weights as they now are.

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


def _recipe(lab: Laboratory, steps: str, rate: float) -> Recipe:
    return Recipe(steps=lab.integer(steps), learning_rate=rate)


def _read(run: Run, model: nn.Module, data: Digits, batch: int) -> dict[str, object]:
    """Held-out loss and error in evaluation mode, and how far its loss lies above that of training mode."""
    whole = digit_score(copy.deepcopy(model).eval(), data.held_out, data.held_out_labels)
    modes = [
        digit_score(copy.deepcopy(model).train(mode), data.held_out, data.held_out_labels, batch=batch)
        for mode in (False, True)
    ]
    return {
        "losses": run.losses,
        "held_out": run.capped(whole.loss),
        "error": whole.error,
        "gap": run.capped(modes[0].loss) - run.capped(modes[1].loss),
        "training_mode_error": modes[1].error,
        "diverged": run.diverged,
        "findings": list(run.findings),
    }


def _mean_loss(model: nn.Module, batches: list[Batch]) -> float:
    device = next(model.parameters()).device
    with torch.no_grad():
        losses = [next_token_loss(model, tuple(part.to(device) for part in batch)).item() for batch in batches]
    return sum(losses) / len(losses)


def _inputs(model: nn.Module, batch: Batch) -> Tensor:
    """What the model reads of a batch: images as they are, of windows all tokens but the last."""
    parameter = next(model.parameters())
    first = batch[0].to(parameter.device)
    return first.to(parameter.dtype) if first.is_floating_point() else first[:, :-1]
