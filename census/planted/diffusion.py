"""A UNet with GroupNorm and a DiT with adaptive norms, both of diffusers, trained a little on noisy digits."""

from __future__ import annotations

import torch
from torch import nn

import broken
import words as w
from dress import groups, kept
from kit import Subject, case, clean, norms, replace, subject
from material import digits


def noisy(count: int, start: int, size: int, draw_: torch.Generator) -> tuple:
    """Noisy digits of one channel, their time, their label, and the noise."""
    images, labels = digits(size)
    images, labels = images[start : start + count, :1], labels[start : start + count]
    time = torch.randint(1000, (count,), generator=draw_)
    noise = torch.randn(images.shape, generator=draw_)
    kept_ = torch.cos(time / 1000 * 1.5707963)[:, None, None, None]
    return kept_ * images + (1 - kept_**2).sqrt() * noise, time, labels, noise


def train(model: nn.Module, seed: int, steps: int, size: int, with_labels: bool) -> None:
    """Train to predict the noise."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(groups(model, 2e-3, 8e-3))
    model.train()
    for step in range(steps):
        images, time, labels, noise = noisy(16, 16 * (step % 90), size, generator)
        given = model(images, time, class_labels=labels) if with_labels else model(images, time)
        loss = (given.sample - noise).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def diffusing(model: nn.Module, size: int, with_labels: bool, **more) -> Subject:
    generator, batches = torch.Generator().manual_seed(3), []
    for start in (1500, 1516):
        images, time, labels, _ = noisy(16, start, size, generator)
        batch = {"sample" if not with_labels else "hidden_states": images, "timestep": time}
        batches.append(batch | ({"class_labels": labels} if with_labels else {}))
    return Subject(model, batches, **more)


@subject("unet")
def unet(rng, seed):
    from diffusers import UNet2DModel

    def make():
        return UNet2DModel(
            sample_size=16,
            in_channels=1,
            out_channels=1,
            block_out_channels=(16, 32),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
            attention_head_dim=8,
        )

    model = kept("unet", seed, make, lambda m: train(m, seed, 60, 16, False))
    return diffusing(model, 16, False, sites=21, batch_norms=0, row="channel group")


clean("unet", "code")


def resnets(model: nn.Module, *parts: str) -> list[str]:
    return sorted(path for path in norms(model) if "resnets" in path and all(part in path for part in parts))


@case("unet", "groups", "code", "one GroupNorm has 2 groups; the others have 8", w.GROUPS)
def _(rng, made):
    path = rng.choice(resnets(made.model))
    made.model.get_submodule(path).num_groups = 2
    made.where = (path,)


@case(
    "unet",
    "groups are strided",
    "python",
    "one GroupNorm gathers every 8th channel into a group: a reshape in the wrong order",
    w.GROUPS,
    w.AXIS,
)
def _(rng, made):
    path = rng.choice(resnets(made.model, "norm1"))

    def strided(x, gain, bias, eps):
        batch, channels = x.shape[:2]
        parts = x.view(batch, channels // 8, 8, -1).transpose(1, 2).reshape(batch, 8, -1)
        y = nn.functional.layer_norm(parts, parts.shape[-1:], eps=eps).view(batch, 8, channels // 8, -1).transpose(1, 2)
        return y.reshape(x.shape) * gain[:, None, None] + bias[:, None, None]

    broken.write(made.model, path, strided)
    made.where = (path,)


@case("unet", "norm2 left out", "code", "one ResNet block has lost its second norm", w.MISSING)
def _(rng, made):
    path = rng.choice(resnets(made.model, "norm2"))
    replace(made.model, path, nn.Identity())
    made.where = (path.rpartition(".")[0],)


@case(
    "unet",
    "time dropped",
    "python",
    "one ResNet block adds nothing of the time: time_emb_proj is 0 (not a norm's)",
    w.MODULATION,
    "time",
    w.DEAD,
    sort="other",
)
def _(rng, made):
    path = rng.choice(resnets(made.model, "norm1")).rpartition(".")[0]
    for parameter in made.model.get_submodule(path).time_emb_proj.parameters():
        parameter.data.zero_()
    made.where = (path,)


@case(
    "unet",
    "channels last",
    "python",
    "one norm normalizes the channels at each pixel, as a LayerNorm after a port would",
    w.AXIS,
    w.GROUPS,
    "LayerNorm",
)
def _(rng, made):
    path = rng.choice(resnets(made.model))

    def channels(x, gain, bias, eps):
        y = nn.functional.layer_norm(x.movedim(1, -1), (x.shape[1],), gain, bias, eps)
        return y.movedim(-1, 1)

    broken.write(made.model, path, channels)
    made.where = (path,)


@subject("dit")
def dit(rng, seed):
    from diffusers import DiTTransformer2DModel

    def make():
        return DiTTransformer2DModel(
            num_attention_heads=4,
            attention_head_dim=16,
            in_channels=1,
            out_channels=1,
            num_layers=4,
            sample_size=16,
            patch_size=2,
            num_embeds_ada_norm=10,
            norm_num_groups=1,
            dropout=0.0,
        )

    model = kept("dit", seed, make, lambda m: train(m, seed, 60, 16, True))
    return diffusing(model, 16, True, sites=9, batch_norms=0, placement="pre-norm", row="patch")


clean("dit", "python")


def ada(self, x, timestep=None, class_labels=None, hidden_dtype=None, emb=None, order=(0, 1), one=1.0):
    """AdaLayerNormZero.forward with a choice of where shift and scale are, and whether 1 is added."""
    emb = self.emb(timestep, class_labels, hidden_dtype=hidden_dtype) if self.emb is not None else emb
    parts = self.linear(self.silu(emb)).chunk(6, dim=1)
    shift, scale = parts[order[0]], parts[order[1]]
    return self.norm(x) * (one + scale[:, None]) + shift[:, None], parts[2], parts[3], parts[4], parts[5]


@case("dit", "one lost", "code", "one block multiplies by scale instead of 1 + scale", w.MODULATION, w.OFFSET)
def _(rng, made):
    path = f"transformer_blocks.{rng.randrange(4)}.norm1"
    broken.method(made.model.get_submodule(path), lambda self, x, *a, **k: ada(self, x, *a, one=0.0, **k))
    made.where = (path, path.removesuffix(".norm1"))


@case(
    "dit",
    "modulation collapsed",
    "python",
    "the layer that makes shift and scale of one trained block is 0, so the block is closed",
    w.MODULATION,
    w.DEAD,
)
def _(rng, made):
    path = f"transformer_blocks.{rng.randrange(4)}.norm1.linear"
    for parameter in made.model.get_submodule(path).parameters():
        parameter.data.zero_()
    made.where = (path, path.removesuffix(".linear"), path.removesuffix(".norm1.linear"))


@case(
    "dit",
    "shift for scale",
    "code",
    "one block takes scale first and shift second from the six parts",
    sort="unseeable",
)
def _(rng, made):
    path = f"transformer_blocks.{rng.randrange(4)}.norm1"
    broken.method(made.model.get_submodule(path), lambda self, x, *a, **k: ada(self, x, *a, order=(1, 0), **k))
    made.where = (path, path.removesuffix(".norm1"))


@case(
    "dit",
    "same for all times",
    "python",
    "one block's modulation is a constant: its matrix is 0 and its bias trained",
    w.MODULATION,
)
def _(rng, made):
    path = f"transformer_blocks.{rng.randrange(4)}.norm1.linear"
    linear = made.model.get_submodule(path)
    with torch.no_grad():
        example = made.model.transformer_blocks[0].norm1.emb(
            torch.tensor([500]), torch.tensor([3]), hidden_dtype=torch.float32
        )
        linear.bias.copy_(linear(nn.functional.silu(example))[0])
        linear.weight.zero_()
    made.where = (path, path.removesuffix(".linear"), path.removesuffix(".norm1.linear"))


@case("dit", "norm left out", "code", "one block modulates the stream itself: its norm3 is an identity", w.MISSING)
def _(rng, made):
    index = rng.randrange(4)
    made.model.transformer_blocks[index].norm3 = nn.Identity()
    made.where = (f"transformer_blocks.{index}",)
