"""PyTorch on the CPU: GroupNorm of a channels_last input takes the variance as E[x^2] - E[x]^2.

    python census/finds/torch_group_norm.py

The effect is that on a small network for scikit-learn's digits, as a camera counts them: above a pedestal.
The report is docs/wild/reports/torch_group_norm.md.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, group_norm

import normkit as nk
from patching import versions


class Format(nn.Module):
    """A module that is given its input in one memory format."""

    def __init__(self, module, memory_format):
        super().__init__()
        self.module, self.memory_format = module, memory_format

    def forward(self, x):
        return self.module(x.contiguous(memory_format=self.memory_format))


def error(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


def by_hand(x, groups, passes):
    """GroupNorm in float32: the variance from the sums of x and x^2, as in the kernel, or from a second pass."""
    rows = x.permute(0, 2, 3, 1).unflatten(-1, (groups, -1))
    mean = rows.mean((1, 2, 4), keepdim=True)
    if passes == 1:
        variance = (rows.square().mean((1, 2, 4), keepdim=True) - mean.square()).clamp_min(0)
    else:
        variance = (rows - mean).square().mean((1, 2, 4), keepdim=True)
    return ((rows - mean) * (variance + 1e-5).rsqrt()).flatten(-2).permute(0, 3, 1, 2)


def errors():
    for mean in (0, 10, 100, 1000, 10000):
        x = torch.randn(2, 32, 64, 64) + mean
        expected = group_norm(x.double(), 8)
        last = x.contiguous(memory_format=torch.channels_last)
        given = [error(group_norm(each, 8), expected) for each in (x, last)]
        hand = [error(by_hand(x, 8, passes), expected) for passes in (1, 2)]
        print(
            f"  mean {mean}, deviation 1: error {given[0]:.0e} contiguous, {given[1]:.0e} channels_last;"
            f" by hand {hand[0]:.0e} in one pass, {hand[1]:.0e} in two"
        )


def readings():
    for memory_format in (torch.contiguous_format, torch.channels_last):
        reading = nk.identify(Format(nn.GroupNorm(4, 16), memory_format), (2, 16, 32, 32)).readings["conditioning"]
        print(f"  normkit, {memory_format}: cancels {reading.value['cancels']}, error {reading.value['error']:.0e}")


def digits(pedestal):
    """A network whose first layer is a GroupNorm, trained with contiguous inputs; images and classes held out."""
    pixels, classes = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8).repeat(1, 3, 4, 4) + pedestal
    classes = torch.tensor(classes)
    torch.manual_seed(0)
    held = torch.rand(len(x)) < 0.5
    model = nn.Sequential(
        *(nn.GroupNorm(1, 3), nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(784, 10)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        cross_entropy(model(x[~held]), classes[~held]).backward()
        optimizer.step()
    return model.requires_grad_(False), x[held], classes[held]


def effect(pedestal):
    model, x, classes = digits(pedestal)
    y, other = (Format(model, form)(x) for form in (torch.contiguous_format, torch.channels_last))
    right = [(each.argmax(1) == classes).double().mean().item() for each in (y, other)]
    print(
        f"  digits above {pedestal}: accuracy {right[0]:.3f} contiguous, {right[1]:.3f} channels_last;"
        f" largest logit {y.abs().max():.1f}, moved by {(y - other).abs().max():.2g}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(versions("torch", "scikit-learn"))
    errors()
    readings()
    for pedestal in (0, 1000, 4096):
        effect(pedestal)
