"""Healthy models that look odd: nothing above a note may be said of them."""

from __future__ import annotations

import torch
from torch import nn

from dress import calibrate, season, train_on_digits
from kit import batch_norms, case, replace
from material import ids, pixels
from small import plain


def odd(name: str, how: str, truth: str):
    return case("oddities", name, how, truth, sort="oddity", ideal="no finding above a note")


@odd(
    "gammas at zero at the start", "python", "a fresh ResNet whose last gammas are all 0 (zero_init_residual), as meant"
)
def _(rng, made):
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], layer_type="basic", num_labels=10)
    made.model = ResNetForImageClassification(config)
    for path, norm in batch_norms(made.model).items():
        if path.endswith("layer.1.normalization"):
            nn.init.zeros_(norm.weight)
    made.batches = [{"pixel_values": pixels(16)}]


class Adaptive(nn.Module):
    """A small DiT in the style of its paper's code, with all modulations 0 at the start."""

    def __init__(self, width: int = 48, depth: int = 3) -> None:
        super().__init__()
        self.stem, self.time = (
            nn.Linear(48, width),
            nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width)),
        )
        self.norms = nn.ModuleList([nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(depth)])
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 96), nn.GELU(), nn.Linear(96, width)) for _ in range(depth)]
        )
        self.modulations = nn.ModuleList([nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width)) for _ in range(depth)])
        self.final, self.head = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6), nn.Linear(width, 48)
        for modulation in self.modulations:
            nn.init.zeros_(modulation[1].weight)
            nn.init.zeros_(modulation[1].bias)

    def forward(self, patches, time):
        x, given = self.stem(patches), self.time(time[:, None])
        for norm, mlp, modulation in zip(self.norms, self.mlps, self.modulations, strict=True):
            shift, scale, gate = modulation(given)[:, None].chunk(3, dim=-1)
            x = x + gate * mlp(norm(x) * (1 + scale) + shift)
        return self.head(self.final(x))


def patches(count: int) -> torch.Tensor:
    return pixels(count).unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(count, 64, 48)


@odd("adaLN-Zero at the start", "python", "a fresh DiT: all modulations and gates are 0, as meant")
def _(rng, made):
    made.model, made.batches = Adaptive(), [(patches(8), torch.rand(8))]


@odd("instance norms", "code", "a network of instance norms without stored statistics, as for style transfer")
def _(rng, made):
    made.model = plain()
    for path in batch_norms(made.model):
        replace(made.model, path, nn.InstanceNorm2d(made.model.get_submodule(path).num_features, affine=True))
    season(made.model, 3)
    made.batches = [pixels(16)]


@odd("one group", "python", "GroupNorm(1, C) everywhere, as in PoolFormer and ConvTasNet")
def _(rng, made):
    made.model = plain()
    for path in batch_norms(made.model):
        replace(made.model, path, nn.GroupNorm(1, made.model.get_submodule(path).num_features))
    train_on_digits(made.model, 3, 40)
    made.batches = [pixels(16)]


@odd("folded away", "python", "batch norms were folded into the convolutions and replaced by identities")
def _(rng, made):
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    model = plain()
    season(model, 4)
    calibrate(model, [pixels(64, 64 * k) for k in range(4)])
    for index in (0, 4, 8):
        model[index] = fuse_conv_bn_eval(model[index], model[index + 1])
        model[index + 1] = nn.Identity()
    made.model, made.batches = model, [pixels(16)]


@odd(
    "no affine, averages",
    "code",
    "batch norms with affine=False and momentum=None (a plain average), one image at a time",
)
def _(rng, made):
    made.model = plain()
    for path in batch_norms(made.model):
        norm = nn.BatchNorm2d(made.model.get_submodule(path).num_features, affine=False, momentum=None)
        replace(made.model, path, norm)
    calibrate(made.model, [pixels(64, 64 * k) for k in range(4)])
    made.batches = [pixels(1, 1500 + k) for k in range(6)]


@odd("SyncBatchNorm on one process", "python", "SyncBatchNorm in evaluation without a process group")
def _(rng, made):
    model = plain()
    season(model, 5)
    calibrate(model, [pixels(64, 64 * k) for k in range(4)])
    made.model, made.batches = nn.SyncBatchNorm.convert_sync_batchnorm(model), [pixels(16)]


@odd("ALBERT", "python", "all layers share one block, so its norms are seen many times")
def _(rng, made):
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        vocab_size=260,
        embedding_size=32,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
    )
    made.model, made.batches = AlbertModel(config), [{"input_ids": ids(4, 48)}]
    season(made.model, 6)


@odd(
    "dead filters",
    "code",
    "a few filters are dead after training: their channels have no variance and stored variance 0",
)
def _(rng, made):
    model = plain()
    season(model, 7)
    with torch.no_grad():
        for index in (0, 4, 8):
            model[index].weight[rng.sample(range(16), 2)] = 0
    calibrate(model, [pixels(64, 64 * k) for k in range(4)])
    made.model, made.batches = model, [pixels(16)]


@odd("LayerScale of CaiT", "python", "a trained ViT whose blocks are scaled by learned vectors between 1e-5 and 0.1")
def _(rng, made):
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, image_size=32, patch_size=8, mlp_ratio=2
    )
    made.model = Dinov2Model(config)
    season(made.model, 8)
    with torch.no_grad():
        for name, parameter in made.model.named_parameters():
            if "lambda1" in name:
                parameter.copy_(torch.rand(parameter.shape) * 0.1 + 1e-5)
    made.batches = [{"pixel_values": pixels(16)}]


@odd("blank images", "python", "a healthy ResNet is shown blank images: nothing of its norms is wrong")
def _(rng, made):
    model = plain()
    season(model, 9)
    calibrate(model, [pixels(64, 64 * k) for k in range(4)])
    made.model, made.batches = model, [torch.zeros(8, 3, 32, 32)]


@odd(
    "MiniLM in float16",
    "python",
    "all-MiniLM-L6-v2 in float16: eps 1e-12 is 0 in float16, and torch computes in float32, so nothing is wrong",
)
def _(rng, made):
    from language import encoder, minilm_folder

    made.model = minilm_folder()
    encoder(made).half()
