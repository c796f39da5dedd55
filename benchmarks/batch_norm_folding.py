"""`nk.fold` of batch norms beside torch's own fusion: error in float64, and what each does with graphs that are harder.

    python benchmarks/batch_norm_folding.py          # models in memory
    python benchmarks/batch_norm_folding.py --disk   # checkpoints of transformers

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


def main():
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if "--disk" in sys.argv:
        on_disk()
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
