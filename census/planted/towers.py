"""Vision transformers: ViT, DeiT, Swin, and the towers of CLIP and SigLIP."""

from __future__ import annotations

import functools

import torch
from torch import nn

import broken
import words as w
from dress import kept, season, train_on_digits
from kit import Subject, case, clean, draw, fresh, norms, subject
from material import image_folder, lost, pixels, set_config

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 160, "image_size": 32, "patch_size": 8}


def processor(size: int = 32):
    from transformers import ViTImageProcessor

    return ViTImageProcessor(size={"height": size, "width": size})


def seen(model: nn.Module, **more) -> Subject:
    """A subject that is run on digits."""
    batches = [{"pixel_values": pixels(16, 1500 + 16 * k)} for k in range(2)]
    arguments = ("--images", str(image_folder()))
    return Subject(model, batches, [processor()], arguments=arguments, row="patch", **more)


# ViT, trained on the digits


@subject("vit")
def vit(rng, seed):
    from transformers import ViTConfig, ViTForImageClassification

    make = functools.partial(ViTForImageClassification, ViTConfig(num_hidden_layers=4, num_labels=10, **SMALL))
    model = kept("vit", seed, make, lambda m: train_on_digits(m, seed, 200))
    return seen(model, sites=9, batch_norms=0, placement="pre-norm")


clean("vit", "folder")


@case("vit", "renamed", "folder", "one norm is stored under timm's name (norm1), so it is made anew", w.LOST, w.MISSING)
def _(rng, made):
    path = draw(rng, norms(made.model), rng.choice(["layernorm_before", "layernorm_after"]))
    stored = path.replace("layers", "encoder.layer")
    lost(made, path, stored.replace("layernorm_before", "norm1").replace("layernorm_after", "norm2"), stored)


@case(
    "vit", "one block after", "code", "one block takes its second norm after the addition; the others before", w.PLACE
)
def _(rng, made):
    index = rng.randrange(1, 4)
    layer = made.model.vit.layers[index]

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        given, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        hidden_states = hidden_states + given
        return self.layernorm_after(hidden_states + self.mlp(hidden_states))

    broken.method(layer, forward)
    made.where = (f"vit.layers.{index}",)


@case(
    "vit",
    "final twice",
    "python",
    "the port applies the final norm in the backbone and again before the head",
    w.DOUBLE,
)
def _(rng, made):
    head, norm = made.model.classifier, made.model.vit.layernorm

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.classifier = norm, head

        def forward(self, x):
            return self.classifier(self.norm(x))

    made.model.classifier = Head()
    made.where = ("vit.layernorm", "classifier.norm", "classifier")


@case(
    "vit",
    "eps typed",
    "folder",
    "layer_norm_eps is 1e-1 in config.json instead of 1e-12; shown at the small rows",
    w.EPS,
)
def _(rng, made):
    made.edit = lambda folder: set_config(folder, layer_norm_eps=0.1)
    made.where = ("vit.layers",)


@case("vit", "norm left out", "code", "one block feeds its MLP without a norm; the others have one", w.MISSING)
def _(rng, made):
    index = rng.randrange(1, 4)
    made.model.vit.layers[index].layernorm_after = nn.Identity()
    made.where = (f"vit.layers.{index}",)


# DeiT


@subject("deit")
def deit(rng, seed):
    from transformers import DeiTConfig, DeiTForImageClassification

    make = functools.partial(DeiTForImageClassification, DeiTConfig(num_hidden_layers=4, num_labels=10, **SMALL))
    model = kept("deit", seed, make, lambda m: season(m, seed))
    return seen(model, sites=9, batch_norms=0, placement="pre-norm")


clean("deit", "python")


@case(
    "deit",
    "gain erased",
    "folder",
    "the gain and bias of one norm are 0 in the file, so its branch is constant",
    w.DEAD,
)
def _(rng, made):
    path = draw(rng, norms(made.model), "layers.")
    norm = made.model.get_submodule(path)
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.zero_()
    made.where = (path,)


@case("deit", "biases lost", "folder", "a converter wrote the gains of one block and dropped both biases", w.BIAS)
def _(rng, made):
    index = rng.randrange(4)
    for name in ("layernorm_before", "layernorm_after"):
        made.model.get_submodule(f"deit.layers.{index}.{name}").bias.data.zero_()
    made.where = (f"deit.layers.{index}",)


@case(
    "deit",
    "not centred",
    "code",
    "one of the norms does not subtract the mean (RMSNorm instead of LayerNorm)",
    w.CENTRE,
    "RMSNorm",
)
def _(rng, made):
    path = draw(rng, norms(made.model), "layers.")
    broken.write(made.model, path, broken.uncentred, 1e-6)
    made.where = (path,)


@case(
    "deit", "over patches", "python", "one norm takes its statistics over the patches instead of the features", w.AXIS
)
def _(rng, made):
    path = draw(rng, norms(made.model), "layers.")
    broken.write(made.model, path, broken.over_tokens, 1e-6)
    made.where = (path,)


@case(
    "deit",
    "swapped layers",
    "folder",
    "the norms of two blocks are exchanged: shapes and formula hold",
    sort="unseeable",
)
def _(rng, made):
    one, two = rng.sample(range(4), 2)
    first, second = (made.model.get_submodule(f"deit.layers.{k}.layernorm_before") for k in (one, two))
    states = first.state_dict(), second.state_dict()
    kept_first = {k: v.clone() for k, v in states[0].items()}
    first.load_state_dict(states[1])
    second.load_state_dict(kept_first)


# Swin


@subject("swin")
def swin(rng, seed):
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=2, embed_dim=24, depths=[2, 2, 2], num_heads=[2, 4, 8], window_size=4, num_labels=10
    )
    model = kept("swin", seed, lambda: SwinForImageClassification(config), lambda m: season(m, seed))
    return seen(model, sites=16, batch_norms=0, placement="pre-norm")


clean("swin", "folder")


@case(
    "swin",
    "merging bare",
    "code",
    "one patch merging has lost the norm before its reduction; the other has it",
    w.MISSING,
)
def _(rng, made):
    index = rng.randrange(2)
    made.model.swin.encoder.layers[index].downsample.norm = nn.Identity()
    made.where = (f"swin.encoder.layers.{index}.downsample",)


@case("swin", "divisor", "python", "one norm divides by n - 1", w.DIVISOR)
def _(rng, made):
    path = draw(rng, norms(made.model), "blocks.")
    broken.write(made.model, path, broken.unbiased)
    made.where = (path,)


@case(
    "swin", "annotated", "code", "one norm is the std + eps of The Annotated Transformer, with n - 1", w.DIVISOR, w.ROOT
)
def _(rng, made):
    path = draw(rng, norms(made.model), "blocks.")
    broken.write(made.model, path, broken.annotated, 1e-6)
    made.where = (path,)


@case(
    "swin",
    "final lost",
    "folder",
    "the final norm is stored as norm.* (the original's name) and is made anew",
    w.LOST,
    w.MISSING,
)
def _(rng, made):
    lost(made, "swin.layernorm", "norm")


@case("swin", "stage over windows", "python", "one norm normalizes all patches of an image together", w.AXIS)
def _(rng, made):
    path = draw(rng, norms(made.model), "blocks.")
    broken.write(made.model, path, broken.over_all)
    made.where = (path,)


# The tower of CLIP


@subject("clip")
def clip(rng, seed):
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    config = CLIPVisionConfig(num_hidden_layers=3, projection_dim=32, **SMALL)
    model = kept("clip", seed, lambda: CLIPVisionModelWithProjection(config), lambda m: season(m, seed))
    return seen(model, sites=8, batch_norms=0, placement="pre-norm")


clean("clip", "folder")


@case(
    "clip",
    "typo mended",
    "folder",
    "pre_layrnorm is stored as pre_layernorm, the name that looks right",
    w.LOST,
    w.MISSING,
)
def _(rng, made):
    lost(made, "vision_model.pre_layrnorm", "vision_model.pre_layernorm")


@case(
    "clip",
    "no last norm",
    "code",
    "the pooled patch reaches the projection without post_layernorm",
    w.MISSING,
    "final norm",
)
def _(rng, made):
    made.model.vision_model.post_layernorm = nn.Identity()
    made.where = ("vision_model.post_layernorm", "visual_projection", "vision_model")


@case("clip", "16 bits", "python", "in a float32 model one norm computes statistics in bfloat16", w.CAST)
def _(rng, made):
    path = draw(rng, norms(made.model), "layers.")

    def rounded(x, gain, bias, eps):
        small = x.to(torch.bfloat16)
        centred = small - small.mean(-1, keepdim=True)
        y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
        return gain * y.to(x.dtype) + bias

    broken.write(made.model, path, rounded)
    made.where = (path,)


@case("clip", "eps of another", "folder", "layer_norm_eps is 1e-6 instead of 1e-5 in config.json", sort="unseeable")
def _(rng, made):
    made.edit = lambda folder: set_config(folder, layer_norm_eps=1e-6)


@case("clip", "gain copied", "folder", "one block's second norm holds the gain and bias of its first", w.COPY)
def _(rng, made):
    index = rng.randrange(3)
    layer = made.model.get_submodule(f"vision_model.encoder.layers.{index}")
    layer.layer_norm2.load_state_dict(layer.layer_norm1.state_dict())
    made.where = (f"vision_model.encoder.layers.{index}",)


# The tower of SigLIP


@subject("siglip")
def siglip(rng, seed):
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(num_hidden_layers=3, **SMALL)
    model = kept("siglip", seed, lambda: SiglipVisionModel(config), lambda m: season(m, seed))
    return seen(model, sites=8, batch_norms=0, placement="pre-norm")


clean("siglip", "python")


@case(
    "siglip",
    "one less",
    "folder",
    "a converter for Gemma's norms took 1 from every gain of the tower",
    w.OFFSET,
    w.GAIN,
)
def _(rng, made):
    for path, norm in norms(made.model).items():
        norm.weight.data.sub_(1)
        made.where += (path,)


@case("siglip", "gain and bias", "folder", "gain and bias of one norm are exchanged", w.GAIN, w.BIAS)
def _(rng, made):
    path = draw(rng, norms(made.model), "layers.")
    norm = made.model.get_submodule(path)
    norm.weight.data, norm.bias.data = norm.bias.data.clone(), norm.weight.data.clone()
    made.where = (path,)


@case("siglip", "head bare", "code", "the pooling head feeds its MLP without a norm", sort="unseeable")
def _(rng, made):
    made.model.head.layernorm = nn.Identity()
    made.where = ("head",)


@case("siglip", "head double", "python", "the norm of the pooling head is applied twice", w.DOUBLE)
def _(rng, made):
    broken.write(made.model, "head.layernorm", broken.twice)
    made.where = ("head.layernorm",)


@case("siglip", "one fresh", "python", "one norm of a trained tower was re-initialised to 1 and 0", w.LOST)
def _(rng, made):
    path = draw(rng, norms(made.model), "layers.")
    fresh(made.model.get_submodule(path))
    made.where = (path,)
