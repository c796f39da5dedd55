"""Convolutional networks of transformers: RegNet, MobileNet, and DETR with its frozen batch norms."""

from __future__ import annotations

import functools

import torch
from torch import nn

import broken
import words as w
from dress import calibrate, kept, season
from kit import batch_norms, case, clean, draw, norms, replace, subject
from material import pixels
from towers import seen

# RegNet


@subject("regnet")
def regnet(rng, seed):
    from transformers import RegNetConfig, RegNetForImageClassification

    config = RegNetConfig(embedding_size=16, hidden_sizes=[16, 32, 48], depths=[1, 2, 2], groups_width=8, num_labels=10)

    def ready(model: nn.Module) -> None:
        season(model, seed)
        calibrate(model, [pixels(64, 64 * k) for k in range(6)])

    config.num_stages = 3
    return seen(kept("regnet", seed, lambda: RegNetForImageClassification(config), ready), sites=0)


clean("regnet", "folder")


@case("regnet", "Keras' momentum", "code", "momentum is 0.99, as Keras means it, in every batch norm", w.MOMENTUM)
def _(rng, made):
    for path, norm in batch_norms(made.model).items():
        norm.momentum = 0.99
        made.where += (path,)


@case(
    "regnet", "sign of the mean", "folder", "a runtime stores -mean; one batch norm holds it so", w.STATISTICS, w.CENTRE
)
def _(rng, made):
    path = draw(rng, batch_norms(made.model), "stages", "layer.")
    made.model.get_submodule(path).running_mean.neg_()
    made.where = (path,)


@case(
    "regnet",
    "standard deviation",
    "folder",
    "running_var of one batch norm holds standard deviations",
    w.STATISTICS,
    w.ROOT,
)
def _(rng, made):
    found = {k: v.running_var.log().abs().median() for k, v in batch_norms(made.model).items() if "stages" in k}
    path = max(found, key=found.get)
    made.model.get_submodule(path).running_var.sqrt_()
    made.where = (path,)


@case(
    "regnet",
    "activation first",
    "code",
    "in one block the activation runs before the batch norm, not after",
    w.STATISTICS,
    w.PLACE,
)
def _(rng, made):
    path = draw(rng, batch_norms(made.model), "stages", ".layer.0.")
    layer = made.model.get_submodule(path.rpartition(".")[0])
    broken.method(layer, lambda self, x: self.normalization(self.activation(self.convolution(x))))
    made.where = (path,)


@case(
    "regnet",
    "one channel NaN",
    "folder",
    "running_var of one channel is negative, so it comes out NaN",
    w.FINITE,
    r"negative",
)
def _(rng, made):
    path = draw(rng, batch_norms(made.model), "stages", "layer.")
    norm = made.model.get_submodule(path)
    norm.running_var[rng.randrange(len(norm.running_var))] *= -1
    made.where = (path,)


# MobileNet V2. transformers builds it with momentum=0.997, TensorFlow's decay, which torch reads the other way round.


@subject("mobilenet")
def mobilenet(rng, seed):
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(depth_multiplier=0.25, image_size=32, num_labels=10, output_stride=8)

    def ready(model: nn.Module) -> None:
        season(model, seed)
        calibrate(model, [pixels(64, 64 * k) for k in range(6)])

    return seen(
        kept("mobilenet", seed, lambda: MobileNetV2ForImageClassification(config), ready), sites=0, batch_norms=52
    )


clean(
    "mobilenet",
    "folder",
    "healthy statistics; momentum is 0.997 in transformers' code, so a finding on momentum is right",
)


@case("mobilenet", "eps of torch", "folder", "layer_norm_eps is 1e-5 instead of TensorFlow's 1e-3", sort="unseeable")
def _(rng, made):
    from material import set_config

    made.edit = lambda folder: set_config(folder, layer_norm_eps=1e-5)


@case(
    "mobilenet",
    "0 to 255",
    "python",
    "pixels are fed in 0 to 255 instead of -1 to 1: the data's fault, seen at the first statistics",
    w.DATA,
    w.STATISTICS,
    sort="other",
)
def _(rng, made):
    made.batches = [{"pixel_values": (batch["pixel_values"] + 1) * 127.5} for batch in made.batches]
    made.where = ("mobilenet_v2.conv_stem", "pixel_values", "input")


@case(
    "mobilenet",
    "gamma decayed",
    "folder",
    "weight decay drove the gamma of one depthwise norm to 1e-4",
    w.GAIN,
    w.DEAD,
    w.DECAY,
)
def _(rng, made):
    path = draw(rng, batch_norms(made.model), "conv_3x3", "layer.")
    made.model.get_submodule(path).weight.data.mul_(1e-4)
    made.where = (path,)


@case(
    "mobilenet",
    "depthwise for expand",
    "folder",
    "one block's depthwise norm holds the statistics of its expansion's",
    w.STATISTICS,
    w.COPY,
)
def _(rng, made):
    index = rng.randrange(16)
    block = made.model.mobilenet_v2.layer[index]
    one, two = block.expand_1x1.normalization, block.conv_3x3.normalization
    two.running_mean.copy_(one.running_mean)
    two.running_var.copy_(one.running_var)
    made.where = (f"mobilenet_v2.layer.{index}.conv_3x3.normalization",)


@case(
    "mobilenet",
    "instance statistics",
    "code",
    "one batch norm became an instance norm with the same gains",
    w.LIVE,
    w.STATISTICS,
    "instance",
    w.AXIS,
)
def _(rng, made):
    path = draw(rng, batch_norms(made.model), "layer.", "expand")
    old = made.model.get_submodule(path)
    new = nn.InstanceNorm2d(old.num_features, eps=old.eps, affine=True)
    new.weight.data.copy_(old.weight.data)
    new.bias.data.copy_(old.bias.data)
    replace(made.model, path, new)
    made.where = (path,)


# DETR with a small ResNet of frozen batch norms


@subject("detr")
def detr(rng, seed):
    from transformers import (
        DetrConfig,
        DetrForObjectDetection,
        DetrImageProcessor,
        ResNetConfig,
    )

    backbone = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    heads = {
        f"{part}_{what}": n
        for part in ("encoder", "decoder")
        for what, n in (("layers", 3), ("attention_heads", 4), ("ffn_dim", 128))
    }
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=64,
        num_queries=12,
        num_labels=10,
        **heads,
    )

    def ready(model: nn.Module) -> None:
        season(model, seed)
        with torch.no_grad():
            for norm in batch_norms(model).values():
                hook = norm.register_forward_pre_hook(freeze)
                model(pixel_values=pixels(48))
                hook.remove()

    made = seen(
        kept("detr", seed, functools.partial(DetrForObjectDetection, config), ready),
        sites=16,
        batch_norms=6,
        placement="post-norm",
    )
    half = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_pad": False}
    made.processors = [DetrImageProcessor(**half)]
    return made


def freeze(norm: nn.Module, given: tuple) -> None:
    """Give a frozen batch norm the statistics of what enters."""
    norm.running_mean.copy_(given[0].mean((0, 2, 3)))
    norm.running_var.copy_(given[0].var((0, 2, 3)))


clean("detr", "folder")


@case(
    "detr",
    "frozen statistics lost",
    "code",
    "a frozen batch norm of the backbone was made anew: mean 0, variance 1",
    w.STATISTICS,
)
def _(rng, made):
    path = draw(rng, batch_norms(made.model), "stages")
    norm = made.model.get_submodule(path)
    for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
        getattr(norm, name).fill_(value)
    made.where = (path,)


@case(
    "detr",
    "one layer before",
    "code",
    "one layer of the encoder is pre-norm (normalize_before), the others post-norm",
    w.PLACE,
)
def _(rng, made):
    index = rng.randrange(3)

    def forward(self, hidden_states, attention_mask=None, spatial_position_embeddings=None, **kwargs):
        given, _ = self.self_attn(
            hidden_states=self.self_attn_layer_norm(hidden_states),
            attention_mask=attention_mask,
            position_embeddings=spatial_position_embeddings,
            **kwargs,
        )
        hidden_states = hidden_states + given
        return hidden_states + self.mlp(self.final_layer_norm(hidden_states))

    broken.method(made.model.model.encoder.layers[index], forward)
    made.where = (f"model.encoder.layers.{index}",)


@case(
    "detr",
    "decoder bare",
    "python",
    "the decoder's own last norm is left out; its layers end in norms, so nothing shows",
    sort="unseeable",
)
def _(rng, made):
    made.model.model.decoder.layernorm = nn.Identity()


@case(
    "detr",
    "gains doubled",
    "folder",
    "the gain of one norm of a decoder layer is 16 times what it was",
    w.GAIN,
    w.SPREAD,
)
def _(rng, made):
    path = draw(rng, norms(made.model), "decoder.layers")
    made.model.get_submodule(path).weight.data.mul_(16)
    made.where = (path,)


@case(
    "detr",
    "copy",
    "python",
    "a loop over the decoder wrote encoder_attn_layer_norm's tensors into final_layer_norm, too",
    w.COPY,
)
def _(rng, made):
    index = rng.randrange(3)
    layer = made.model.model.decoder.layers[index]
    layer.final_layer_norm.load_state_dict(layer.encoder_attn_layer_norm.state_dict())
    made.where = (
        f"model.decoder.layers.{index}.final_layer_norm",
        f"model.decoder.layers.{index}.encoder_attn_layer_norm",
        f"model.decoder.layers.{index}",
    )
