"""`nk.fold` of batch norms beside torch's own fusion: error in float64, and what each does with graphs that are harder.

    python benchmarks/batch_norm_folding.py          # models in memory
    python benchmarks/batch_norm_folding.py --disk   # checkpoints of transformers
    python benchmarks/batch_norm_folding.py --trained   # two networks, trained on scikit-learn's digits for a minute

torch has `torch.fx.experimental.optimization.fuse` for models that torch.fx can trace, and `torch.nn.utils.fusion` for
a pair of modules, which is used for transposed convolutions. Error: the largest difference of an output of the float64
source from the folded model with its weights as they are, run in float64, relative to the largest output. Weights and
running statistics are random. A fold is wrong, and bold, where that is above a twentieth; behind the error stands how
many of the batch norms are folded.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
import warnings
from itertools import pairwise

import torch
from torch import nn
from torch.fx.experimental.optimization import fuse
from torch.nn.utils.fusion import fuse_conv_bn_eval

import normkit as nk
from normkit.checkpoint.folding import fold
from normkit.checkpoint.verification import verify
from normkit.errors import NormkitError
from normkit.text import clipped, first_line, significant

WRONG = 0.05


class Wired(nn.Module):
    """Modules by name, and a function of them and the input."""

    def __init__(self, wiring, **modules):
        super().__init__()
        self.wiring = wiring
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x):
        return self.wiring(self, x)


def pair(layer, norm, wiring=lambda m, x: m.norm(m.layer(x))):
    return Wired(wiring, layer=layer, norm=norm)


def family(name, **settings):
    import transformers

    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}ForImageClassification")(config)


def plain():
    blocks = []
    for wide in (3, 16, 32, 64):
        blocks += [nn.Conv2d(wide, max(16, 2 * wide), 3, padding=1), nn.BatchNorm2d(max(16, 2 * wide)), nn.ReLU()]
    # 3 -> 16 -> 32 -> 64 -> 128
    return nn.Sequential(*blocks)


IMAGE, SMALL = (2, 3, 64, 64), (2, 4, 12, 12)
CASES = {
    "4 convolutions, float32": (plain, IMAGE, torch.float32),
    "4 convolutions, float16": (plain, IMAGE, torch.float16),
    "4 convolutions, bfloat16": (plain, IMAGE, torch.bfloat16),
    "ResNet-50": (lambda: family("ResNet"), IMAGE, torch.float32),
    "RegNet-Y 4GF": (lambda: family("RegNet"), IMAGE, torch.float32),
    "MobileNetV1": (lambda: family("MobileNetV1"), IMAGE, torch.float32),
    "MobileNetV2": (lambda: family("MobileNetV2"), IMAGE, torch.float32),
    "transposed": (lambda: pair(nn.ConvTranspose2d(4, 6, 3), nn.BatchNorm2d(6)), SMALL, torch.float32),
    "transposed, depthwise": (
        lambda: pair(nn.ConvTranspose2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)),
        SMALL,
        torch.float32,
    ),
    "no gamma and beta": (lambda: pair(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)), SMALL, torch.float32),
    "linear, no gamma and beta": (
        lambda: pair(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False)),
        (8, 4),
        torch.float32,
    ),
    "norm before a convolution": (
        lambda: pair(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(4), lambda m, x: m.layer(m.norm(x))),
        SMALL,
        torch.float32,
    ),
    "one convolution, two norms": (
        lambda: Wired(
            lambda m, x: m.norm(m.layer(x)) + m.other(m.layer(x * 2)),
            layer=nn.Conv2d(4, 6, 3),
            norm=nn.BatchNorm2d(6),
            other=nn.BatchNorm2d(6),
        ),
        SMALL,
        torch.float32,
    ),
    "weight tied to another convolution": (
        lambda: tied(
            Wired(lambda m, x: m.norm(m.layer(x)) + m.second(x), layer=nn.Conv2d(4, 6, 3), norm=nn.BatchNorm2d(6))
        ),
        SMALL,
        torch.float32,
    ),
    "hook that doubles": (lambda: hooked(pair(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))), SMALL, torch.float32),
    "linear over (n, t, c), t = c": (lambda: pair(nn.Linear(5, 5), nn.BatchNorm1d(5)), (4, 5, 5), torch.float32),
    "float16, tiny variances": (lambda: tiny(pair(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))), SMALL, torch.float16),
    "float16, large scales": (lambda: large(pair(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))), SMALL, torch.float16),
    "norm in training mode": (lambda: training(pair(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))), SMALL, torch.float32),
}


def tied(model):
    model.second = nn.Conv2d(4, 6, 3)
    model.second.weight = model.layer.weight
    return model


def hooked(model):
    model.layer.register_forward_hook(lambda _module, _given, output: 2 * output)
    return model


def tiny(model):
    model.norm.planted = 1e-6
    return model


def large(model):
    model.norm.planted = 1e-9
    model.norm.eps = 1e-9
    return model


def training(model):
    model.is_training = True
    return model


def prepared(case):
    """The model in float64, with planted running statistics, and its input."""
    make, shape, dtype = case
    torch.manual_seed(0)
    model = make().eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2).mul_(getattr(module, "planted", 1.0))
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias)
    if getattr(model, "is_training", False):
        model.norm.train()
    return model.to(dtype), None if shape is None else torch.randn(shape, dtype=torch.float64)


def output(model, x):
    with torch.no_grad():
        found = copy.deepcopy(model).double()(x)
    return getattr(found, "logits", found)


def by_torch(model):
    if isinstance(getattr(model, "layer", None), nn.modules.conv._ConvTransposeNd):
        model.layer, model.norm = fuse_conv_bn_eval(model.layer, model.norm, transpose=True), nn.Identity()
        return model
    return fuse(model)


def by_normkit(model, x):
    nk.fold(model, batch=x)
    return model


def outcome(tool, model, x, expected):
    count = sum(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    try:
        folded = tool(copy.deepcopy(model))
        apart = float((output(folded, x) - expected).abs().max() / expected.abs().max())
    except Exception as error:
        said = first_line(error).removeprefix("nothing of what was asked can be done: norm: ").partition(";")[0]
        return f"refused: {clipped(said, 100)}" if isinstance(error, NormkitError) else f"fails: {clipped(said, 60)}"
    # Traced graphs keep what is not used.
    used = {node.target for node in folded.graph.nodes} if isinstance(folded, torch.fx.GraphModule) else None
    left = sum(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and (used is None or path in used)
        for path, module in folded.named_modules()
    )
    words = f"{significant(apart)}" if apart <= WRONG else f"**{significant(apart)}**"
    return f"{words}, {count - left} of {count}"


FAMILIES = ("ResNet", "RegNet", "MobileNetV1", "MobileNetV2", "HGNetV2", "EfficientNet", "MobileViT", "MobileViTV2")
FAMILIES += ("Cvt", "SwiftFormer", "TextNet", "Levit")


def on_disk():
    """Checkpoints of the default configurations, folded on disk and in memory; errors as above."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    print("| | folded | file, in its class | `nk.fold` | fold, s | verify, s |\n|---|---|---|---|---|---|")
    for name in FAMILIES:
        model, _ = prepared((lambda name=name: family(name), None, torch.float32))
        # Images are small where the class takes any.
        x = torch.randn(2, 3, *[224 if name == "Levit" else 64] * 2, dtype=torch.float64)
        expected = output(model, x)
        with tempfile.TemporaryDirectory() as folder:
            source, result = f"{folder}/source", f"{folder}/result"
            model.save_pretrained(source)
            begin = time.perf_counter()
            certificate = fold(source, result, operations=["batchnorm"])
            middle = time.perf_counter()
            assert verify(source, result).passed
            end = time.perf_counter()
            found = output(type(model).from_pretrained(result), x)
        norms = certificate.plan["norms"]
        count = sum(bool(norm["readers"]) for norm in norms)
        apart = [
            significant(float((each - expected).abs().max() / expected.abs().max()))
            for each in (found, output(by_normkit(model, x), x))
        ]
        print(f"| {name} | {count} of {len(norms)} | {' | '.join(apart)} | {middle - begin:.1f} | {end - middle:.1f} |")


class Residual(nn.Module):
    """Two convolutions beside a shortcut, each with its batch norm."""

    def __init__(self, wide, out):
        super().__init__()
        stride = 1 if wide == out else 2
        self.conv1, self.bn1 = nn.Conv2d(wide, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.conv3, self.bn3 = nn.Conv2d(wide, out, 1, stride, bias=False), nn.BatchNorm2d(out)

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.bn3(self.conv3(x)))


def residual_network():
    """In plain torch, as torch.fx can trace it: 10 batch norms."""
    first = [nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [Residual(16, 16), Residual(16, 32), Residual(32, 64)]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def resnet_of_transformers():
    settings = {"num_channels": 1, "embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [1, 1, 1]}
    return family("ResNet", **settings, layer_type="basic", num_labels=10)


def by_pairs(model):
    """torch.ao.quantization.fuse_modules, given the names of all pairs: each norm and what stands before it."""
    leaves = [path for path, module in model.named_modules() if not list(module.children())]
    pairs = [
        [before, path] for before, path in pairwise(leaves) if isinstance(model.get_submodule(path), nn.BatchNorm2d)
    ]
    return torch.ao.quantization.fuse_modules(model, pairs)


def on_file(model):
    with tempfile.TemporaryDirectory() as folder:
        model.float().save_pretrained(f"{folder}/source")
        fold(f"{folder}/source", f"{folder}/result", operations=["batchnorm"])
        assert verify(f"{folder}/source", f"{folder}/result").passed
        return type(model).from_pretrained(f"{folder}/result").eval()


def trained():
    """Accuracy on 360 digits that no training saw, and the largest change of a logit, before and after a fold."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(digits.images)[order, None].float() / 16, torch.tensor(digits.target)[order]
    # In 16 x 16 pixels: ResNet of transformers halves them four times.
    images = nn.functional.interpolate(images, scale_factor=2)
    held = images[-360:].double()
    print("| | folded | error in float64 | right of 360 | other answers |\n|---|---|---|---|---|")
    tools = {
        "torch.fx": by_torch,
        "torch.ao": by_pairs,
        "nk.fold": lambda model: by_normkit(model, images[:2].double()),
    }
    for name, make in (("plain torch", residual_network), ("ResNet of transformers", resnet_of_transformers)):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(12):
            for part in torch.randperm(len(images) - 360).split(64):
                found = model(images[part])
                nn.functional.cross_entropy(getattr(found, "logits", found), labels[part]).backward()
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        expected = output(model, held)
        answers = expected.argmax(1)
        print(f"| {name}, as trained | | | {int((answers == labels[-360:]).sum())} | |")
        count = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
        own = {"normkit fold": on_file} if hasattr(model, "config") else {}
        for tool, folder in {**tools, **own}.items():
            try:
                folded = folder(copy.deepcopy(model))
            except Exception as error:
                print(f"| {name}, {tool} | fails: {clipped(first_line(error), 60)} | | | |")
                continue
            # In a class of transformers a folded norm stays, as y = x + bias.
            norms = (module for module in folded.modules() if isinstance(module, nn.BatchNorm2d))
            left = sum(bool(module.running_mean.any()) for module in norms)
            after = output(folded, held)
            apart = significant(float((after - expected).abs().max() / expected.abs().max()))
            right, other = int((after.argmax(1) == labels[-360:]).sum()), int((after.argmax(1) != answers).sum())
            print(f"| {name}, {tool} | {count - left} of {count} | {apart} | {right} | {other} |", flush=True)


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "--disk" in sys.argv or "--trained" in sys.argv:
        (on_disk if "--disk" in sys.argv else trained)()
        return
    print("| | torch's fusion | `nk.fold` |\n|---|---|---|")
    for name, case in CASES.items():
        model, x = prepared(case)
        expected = output(model, x)
        torchs = outcome(by_torch, model, x, expected)
        ours = outcome(lambda given, x=x: by_normkit(given, x), model, x, expected)
        print(f"| {name} | {torchs} | {ours} |", flush=True)


if __name__ == "__main__":
    main()
