"""Convolutional networks of transformers: ConvNeXt and ResNet."""

from __future__ import annotations

import torch
from torch import nn

import broken
import words as w
from dress import kept, train_on_digits
from kit import batch_norms, case, clean, draw, subject
from towers import seen


def blocks_of(paths, *parts: str) -> list[str]:
    return sorted(path for path in paths if all(part in path for part in parts))


# ConvNeXt, trained on the digits


@subject("convnext")
def convnext(rng, seed):
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[16, 32, 32],
        depths=[2, 2, 2],
        num_stages=3,
        patch_size=2,
        num_labels=10,
        layer_scale_init_value=0.3,
    )
    model = kept(
        "convnext", seed, lambda: ConvNextForImageClassification(config), lambda m: train_on_digits(m, seed, 120)
    )
    made = seen(model, sites=10, batch_norms=0, placement="pre-norm")
    made.row = "pixel"
    return made


clean("convnext", "folder")


@case(
    "convnext",
    "channels last",
    "code",
    "a block's norm runs before the permutation: over the width of the image, gains over channels",
    w.AXIS,
)
def _(rng, made):
    stage, index = rng.randrange(3), rng.randrange(2)
    path = f"convnext.encoder.stages.{stage}.layers.{index}.layernorm"

    def over_rows(x, gain, bias, eps):  # (N, H, W, C)
        mean, var = x.mean(2, keepdim=True), x.var(2, keepdim=True, correction=0)
        return gain * (x - mean) / torch.sqrt(var + eps) + bias

    broken.write(made.model, path, over_rows)
    made.where = (path,)


@case(
    "convnext",
    "scale at 0",
    "folder",
    "layer_scale_parameter of one block is 0 after a conversion: the block adds nothing",
    w.DEAD,
)
def _(rng, made):
    path = f"convnext.encoder.stages.{rng.randrange(3)}.layers.{rng.randrange(2)}"
    made.model.get_submodule(path).layer_scale_parameter.data.zero_()
    made.where = (path,)


@case(
    "convnext", "divisor", "python", "a channels-first norm written with Tensor.var, which divides by n - 1", w.DIVISOR
)
def _(rng, made):
    path = rng.choice(["convnext.embeddings.layernorm", "convnext.encoder.stages.1.downsampling_layer.0"])

    def channels_first(x, gain, bias, eps):
        mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True)
        return gain[:, None, None] * (x - mean) / torch.sqrt(var + eps) + bias[:, None, None]

    broken.write(made.model, path, channels_first)
    made.where = (path,)


@case(
    "convnext",
    "norm behind stride",
    "python",
    "one stage reduces first and normalizes after; the other stage the other way",
    w.PLACE,
    w.MISSING,
    sort="unseeable",
)
def _(rng, made):
    from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm

    stage = made.model.convnext.encoder.stages[1]
    norm = ConvNextLayerNorm(32, eps=1e-6, data_format="channels_first")
    norm.weight.data.copy_(stage.downsampling_layer[0].weight.data.repeat(2))
    norm.bias.data.copy_(stage.downsampling_layer[0].bias.data.repeat(2))
    stage.downsampling_layer = nn.ModuleList([stage.downsampling_layer[1], norm])


@case("convnext", "n, not root", "code", "one norm divides by the variance: the root was forgotten", w.ROOT)
def _(rng, made):
    path = f"convnext.encoder.stages.{rng.randrange(3)}.layers.{rng.randrange(2)}.layernorm"
    broken.write(made.model, path, broken.variance_only)
    made.where = (path,)


# ResNet, trained on the digits


@subject("resnet")
def resnet(rng, seed):
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 48], depths=[2, 2, 2], layer_type="basic", num_labels=10
    )
    model = kept("resnet", seed, lambda: ResNetForImageClassification(config), lambda m: train_on_digits(m, seed, 120))
    return seen(model, sites=0, batch_norms=15)


clean("resnet", "folder")


@case(
    "resnet",
    "batch in eval",
    "code",
    "one batch norm takes the statistics of the batch in evaluation, too",
    w.LIVE,
    w.STATISTICS,
)
def _(rng, made):
    path = draw(rng, batch_norms(made.model), "stages")
    norm = made.model.get_submodule(path)

    def forward(self, x):
        return nn.functional.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)

    broken.method(norm, forward)
    made.where = (path,)


@case(
    "resnet",
    "statistics lost",
    "folder",
    "running mean and variance of one batch norm are 0 and 1 after a conversion",
    w.STATISTICS,
)
def _(rng, made):
    path = draw(rng, batch_norms(made.model), "stages")
    made.model.get_submodule(path).reset_running_stats()
    made.where = (path,)


@case(
    "resnet",
    "folded and kept",
    "folder",
    "one batch norm was folded into its convolution and is still applied",
    w.STATISTICS,
    w.DOUBLE,
)
def _(rng, made):
    path = draw(rng, batch_norms(made.model), "stages")
    norm = made.model.get_submodule(path)
    convolution = made.model.get_submodule(path.replace("normalization", "convolution"))
    with torch.no_grad():
        factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        convolution.weight.mul_(factor[:, None, None, None])
    made.where = (path, path.replace("normalization", "convolution"))


@case(
    "resnet",
    "another's statistics",
    "folder",
    "running mean and variance of two batch norms of one size are exchanged",
    w.STATISTICS,
)
def _(rng, made):
    one, two = rng.sample(blocks_of(batch_norms(made.model), f"stages.{rng.randrange(3)}.layers.", "layer."), 2)
    first, second = made.model.get_submodule(one), made.model.get_submodule(two)
    for name in ("running_mean", "running_var"):
        a, b = getattr(first, name), getattr(second, name)
        held = a.clone()
        a.copy_(b)
        b.copy_(held)
    made.where = (one, two)


@case(
    "resnet",
    "last gamma at 0",
    "folder",
    "the last gamma of one trained block is 0 and its branch dead; the others are trained",
    w.DEAD,
    w.GAIN,
)
def _(rng, made):
    index = rng.randrange(3)
    path = f"resnet.encoder.stages.{index}.layers.1.layer.1.normalization"
    norm = made.model.get_submodule(path)
    norm.weight.data.zero_()
    norm.bias.data.zero_()
    made.where = (path, path.rpartition(".layer.")[0])
