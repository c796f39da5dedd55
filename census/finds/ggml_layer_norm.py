"""ggml: LayerNorm takes the variance as E[x^2] - E[x]^2 on CUDA, Vulkan and SYCL, and in two passes on the CPU.

    NORMKIT_REAL_MODELS=FOLDER python census/finds/ggml_layer_norm.py

The kernels need GPUs. They are written out here, in float32 and in the order of their sums, from
`src/ggml-cuda/norm.cu:4-38` (`norm.comp:18-48` of Vulkan and `norm.cpp` of SYCL have the same formula), beside
`ggml-cpu/ops.cpp:3725-3741`, at commit d99724f2b141fed9e1a9f402213506c081433465. Nothing of ggml is run. The report is
docs/wild/reports/ggml_layer_norm.md.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

import normkit as nk
from patching import versions
from real_models import folder, text

# This row entered a LayerNorm of somebody's model (ml-explore/mlx#2238, where the same formula gave NaN on the GPU).
REPORTED = [
    1449.570556640625,
    1448.8741455078125,
    1450.650390625,
    1449.2633056640625,
    1449.7763671875,
    1449.317138671875,
]
REPORTED += [1449.3297119140625, 1449.077880859375, 1449.2181396484375, 1449.4329833984375, 1449.1605224609375]
REPORTED += [1449.413330078125, 1449.7933349609375, 1450.066650390625, 1449.7762451171875, 1450.364990234375]


class Norm(nn.Module):
    """ggml_norm, with the gain and the bias that models multiply and add after it."""

    def __init__(self, n, variance, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))
        self.variance, self.eps = variance, eps

    def forward(self, x):
        y = x.float()
        mean, variance = self.variance(y)
        return ((y - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias).to(x.dtype)


def block_sum(x):
    """Sum of rows in the order of norm_f32: a thread adds every 32nd (or 1024th) number, then pairs of threads add."""
    threads = 32 if x.shape[-1] < 1024 else 1024
    columns = nn.functional.pad(x, (0, -x.shape[-1] % threads)).unflatten(-1, (-1, threads))
    sums = columns[..., 0, :]
    for column in range(1, columns.shape[-2]):
        sums = sums + columns[..., column, :]
    while sums.shape[-1] > 1:
        sums = sums[..., : sums.shape[-1] // 2] + sums[..., sums.shape[-1] // 2 :]
    return sums


def one_pass(x):
    """norm.cu:25-37."""
    mean = block_sum(x) / x.shape[-1]
    return mean, block_sum(x * x) / x.shape[-1] - mean * mean


def two_passes(x):
    """ops.cpp:3725-3741, and the fix."""
    mean = block_sum(x) / x.shape[-1]
    return mean, block_sum((x - mean).square()) / x.shape[-1]


def show(variance):
    norm, n = Norm(768, variance), 768
    torch.manual_seed(0)
    for mean, std in ((0, 1), (100, 1), (1000, 1), (1450, 0.4), (4000, 1)):
        x = mean + std * torch.randn(256, n)
        right = nn.functional.layer_norm(x.double(), (n,))
        y = norm(x).detach()
        lost, off = y.isnan().any(-1).double().mean(), (y - right).nan_to_num(0).abs().max()
        print(f"  mean {mean}, deviation {std}: rows of NaN {lost:.0%}, the others off by at most {off:.2e}")
    row = torch.tensor([REPORTED])
    y, right = Norm(16, variance)(row).detach(), nn.functional.layer_norm(row.double(), (16,))
    print(f"  the row of mlx #2238: {y[0, 0].item():.4f} for {right[0, 0].item():.4f}")
    for line in nk.identify(Norm(1024, variance), 1024).evidence:
        if "large mean" in line or "E[x^2]" in line:
            print("  normkit:", line)


def mpnet():
    """The embedding of a text by all-mpnet-base-v2, with either variance."""
    model = AutoModel.from_pretrained(folder("mpnet"), dtype=torch.float32).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder("mpnet"))(text("argparse"))["input_ids"][:128]])
    norms = [each for each in model.modules() if isinstance(each, nn.LayerNorm)]
    means, answers = [], {}
    for norm in norms:
        norm.register_forward_pre_hook(lambda _, x: means.append((x[0].mean(-1) / x[0].std(-1)).abs().max().item()))
    for name, variance in (("torch", None), ("one pass", one_pass), ("two passes", two_passes)):
        for norm in norms:
            if variance is not None:
                own = Norm(norm.weight.shape[0], variance, norm.eps)
                own.weight, own.bias = norm.weight, norm.bias
                norm.forward = own.forward
        with torch.no_grad():
            answers[name] = model(ids).last_hidden_state.mean(1)
    print(f"all-mpnet-base-v2: means of at most {max(means):.2f} deviations enter its norms")
    for name in ("one pass", "two passes"):
        off = (answers[name] - answers["torch"]).norm() / answers["torch"].norm()
        print(f"  embedding with {name}: {'less' if off < 1e-5 else 'more'} than 1e-5 of its length away from torch's")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(versions("torch", "transformers"))
    print("as on CUDA, written out")
    show(one_pass)
    print("as on the CPU, and with the fix")
    show(two_passes)
    mpnet()
