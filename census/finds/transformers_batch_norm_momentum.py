"""transformers: four families give PyTorch's batch norms the decay of TensorFlow as momentum.

    python census/finds/transformers_batch_norm_momentum.py

The effect is that on a small MobileNetV1 for scikit-learn's digits, trained and then fine-tuned for one epoch.
The report is docs/wild/reports/transformers_batch_norm_momentum.md.
"""

from __future__ import annotations

import copy
import importlib
from collections import Counter

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from transformers import CONFIG_MAPPING, MobileNetV1Config, MobileNetV1ForImageClassification

import normkit as nk
from patching import fixed, versions

NAME = "transformers_batch_norm_momentum"
SMALL = {"num_channels": 1, "image_size": 32}
EFFICIENT = {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320}
FAMILIES = {
    "mobilenet_v1": ("MobileNetV1", {"depth_multiplier": 0.25}),
    "mobilenet_v2": ("MobileNetV2", {"depth_multiplier": 0.35}),
    "efficientnet": ("EfficientNet", EFFICIENT),
    "align": ("AlignVision", EFFICIENT),
}
LARGE = 1e6
TRAINED = 1347
"""Images of 1,797 that train: three quarters, so that the last batch of an epoch has 3 images."""


def modules(family):
    """The module of a family as installed, and with the fix."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return module, fixed(NAME, module)


def batch_norms(model):
    return [part for part in model.modules() if isinstance(part, nn.BatchNorm2d)]


def shares(family, module):
    """How much of its running mean one batch replaces, by what is left of a large one; and what normkit says."""
    name, sizes = FAMILIES[family]
    torch.manual_seed(0)
    config = CONFIG_MAPPING["align_vision_model" if family == "align" else family](**SMALL, **sizes)
    model = vars(module)[f"{name}Model"](config)
    images = {"pixel_values": torch.randn(8, 1, 32, 32)}
    told = [each for each in nk.inspect(model, images).findings if each.rule == "C10"]
    for norm in batch_norms(model):
        norm.running_mean.fill_(LARGE)
    model.train()(**images)
    found = Counter(f"{1 - norm.running_mean.mean() / LARGE:.2%}" for norm in batch_norms(model))
    replaced = ", ".join(f"{share} in {count} batch norms" for share, count in found.most_common())
    print(f"  {name}: one batch replaces {replaced}; normkit, C10: {len(told[0].sites) if told else 'none'}")


def digits():
    pixels, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    return interpolate(images, scale_factor=4)[order], torch.tensor(classes)[order]


def train(model, images, classes, epochs, rate, *, last=True):
    """AdamW, batches of 32, a rate that falls to 0; without `last`, the batch of 3 is left out. Accuracy each epoch."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, 43 * epochs)
    right = []
    for _ in range(epochs):
        for each in torch.randperm(TRAINED).split(32)[: 43 if last else 42]:
            optimizer.zero_grad()
            cross_entropy(model.train()(images[each]).logits, classes[each]).backward()
            optimizer.step()
            falling.step()
        right.append(accuracy(model, images, classes))
    return right


@torch.no_grad()
def accuracy(model, images, classes):
    right = model.eval()(images[TRAINED:]).logits.argmax(1) == classes[TRAINED:]
    return right.double().mean().item()


def trained(images, classes):
    """A MobileNetV1 whose statistics follow with PyTorch's 0.1, and its accuracy on held-out images."""
    # The configuration's own 0.999 is the share that TensorFlow's dropout keeps (transformers #22767).
    config = MobileNetV1Config(**SMALL, depth_multiplier=0.25, num_labels=10, classifier_dropout_prob=0.001)
    torch.manual_seed(0)
    model = MobileNetV1ForImageClassification(config)
    for norm in batch_norms(model):
        norm.momentum = 0.1
    right = train(model, images, classes, epochs=15, rate=2e-3)
    print(f"MobileNetV1 trained with momentum 0.1: accuracy {right[-1]:.3f}")
    return model


def fine_tuned(model, module, images, classes):
    """The trained model in the class of a module, after each of five more epochs."""
    for last in (True, False):
        tuned = module.MobileNetV1ForImageClassification(copy.deepcopy(model.config))
        tuned.load_state_dict(model.state_dict())
        right = train(tuned, images, classes, epochs=5, rate=1e-4, last=last)
        print(
            f"  fine-tuned, the last batch of an epoch has {3 if last else 32} images:"
            f" mean accuracy of the five epochs {sum(right) / 5:.2f}"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(versions("torch", "transformers", "scikit-learn"))
    data = digits()
    start = trained(*data)
    for place, title in enumerate(("as installed", "with the fix")):
        print(title)
        for family in FAMILIES:
            shares(family, modules(family)[place])
        fine_tuned(start, modules("mobilenet_v1")[place], *data)
