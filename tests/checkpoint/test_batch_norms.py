"""Batch norms of models in memory: folded exactly where that is legal, and left with the reason where it is not."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import normkit as nk
from checkpoint.test_channel_maps import planted
from normkit.errors import InputError, KindError

# Roundings of float64 through ten layers of sums of at most a hundred products; outputs are of the size of `largest`.
CLOSE = 1e-11


def prepared(model, seed=0):
    """The model in float64 and evaluation mode, with planted running statistics."""
    for number, module in enumerate(model.double().eval().modules()):
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            planted(module, seed + number)
    return model


def random_graph(seed):
    """A chain of random convolutions, batch norms and activations, with residual connections."""
    choose = random.Random(seed)
    torch.manual_seed(seed)

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            layers, channels, self.skips = [], 4, set()
            for place in range(choose.randint(4, 9)):
                kind = choose.choice(["conv", "conv", "transposed", "norm", "norm", "relu", "skip"])
                if kind == "norm":
                    layers.append(
                        nn.BatchNorm2d(channels, affine=choose.random() < 0.8, eps=choose.choice([1e-3, 1e-5]))
                    )
                elif kind == "relu":
                    layers.append(nn.ReLU(inplace=choose.random() < 0.5))
                elif kind == "skip":
                    self.skips.add(place)
                    layers.append(nn.Identity())
                else:
                    made = nn.Conv2d if kind == "conv" else nn.ConvTranspose2d
                    wide = choose.choice([4, 8])
                    groups = choose.choice([1, 2, 4])
                    layers.append(
                        made(
                            channels,
                            wide,
                            choose.choice([1, 3]),
                            padding=choose.choice([0, 1]),
                            dilation=choose.choice([1, 1, 2]),
                            groups=groups,
                            bias=choose.random() < 0.5,
                        )
                    )
                    channels = wide
            self.layers = nn.ModuleList([nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), *layers])

        def forward(self, x):
            for place, layer in enumerate(self.layers):
                x = layer(x) + x.mean() if place - 2 in self.skips else layer(x)
            return x

    return prepared(Graph(), seed)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(60))
def test_random_graphs_compute_the_same(seed):
    model, x = random_graph(seed), torch.randn(2, 3, 20, 20, dtype=torch.float64)
    expected, state = model(x.clone()), copy.deepcopy(model.state_dict())
    folding = nk.fold(model, batch=x)
    assert folding.proof.holds
    assert (model(x.clone()) - expected).abs().max() <= CLOSE * expected.abs().max()
    left = [norm.name for norm in folding.plan.norms if norm.gain == "left"]
    found = [path for path, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    assert left == found == [refusal.place for refusal in folding.plan.refusals]
    nk.fold(model, inverse=folding)
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


class Wired(nn.Module):
    """A convolution, a norm and a second convolution, wired by a function."""

    def __init__(self, wiring, padding=0):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=padding)
        self.wiring = wiring

    def forward(self, x):
        return self.wiring(self, x)


def kept(self, x):
    self.seen = self.first(x)
    return self.second(torch.relu(self.norm(self.seen))) + self.seen[:, :, 1:-1, 1:-1]


def changed_between(self, x):
    x = torch.relu(x)
    y = self.norm(x)
    x.mul_(2)
    return self.second(y)


def with_weight_of(self, x):
    return torch.relu(self.norm(self.first(x))) + self.first.weight.sum()


# Wiring -> a part of the reason.
ILLEGAL = {
    "residual": (lambda m, x: torch.relu(m.norm(y := m.first(x))) + y, "what first gives is also read by add"),
    "view read later": (kept, "what first gives is also read by add"),
    "a second output": (lambda m, x: (torch.relu(m.norm(y := m.first(x))), y.flatten(1)), "by the model's output"),
    "activation": (lambda m, x: torch.relu(m.norm(torch.relu(m.first(x)))), "it reads the output of relu, no map"),
    "called twice": (lambda m, x: torch.relu(m.norm(m.first(x))) + m.first(x * 2), "first is called 2 times in a run"),
    "norm twice": (lambda m, x: torch.relu(m.norm(m.first(x))) + m.norm(x), "norm is called 2 times in a run"),
    "not called": (lambda m, x: m.first(x), "norm was not called with the batch"),
    "weight read": (with_weight_of, "the weight of first is also read outside of it"),
    "after, two readers": (lambda m, x: m.second(y := m.norm(x)) + y.sum(), "read by second and by sum"),
    "after, output": (lambda m, x: (m.second(y := m.norm(x)), y), "by second and by the model's output"),
    "after, input changed": (changed_between, "its input is changed in place before second reads"),
    "nothing reads it": (lambda m, x: m.norm(x), "what it gives is read by the model's output, no map"),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_a_norm_whose_neighbours_are_seen_by_others_is_left(name):
    wiring, reason = ILLEGAL[name]
    model = prepared(Wired(wiring))
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match="nothing of what was asked can be done: norm: ") as raised:
        nk.fold(model, batch=torch.randn(2, 3, 8, 8))
    assert reason in str(raised.value)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def shared(model):
    model.other = model.first


def tied(model):
    model.other = nn.Conv2d(3, 3, 1)
    model.other.weight = model.first.weight


class Standardized(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean(), bias)


class WithRelu(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class SquareRows(nn.Module):
    """A linear map of the last axis and a norm of the one before, of one size."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, x):
        return self.norm(self.first(x))


CHAIN = Wired(lambda m, x: torch.relu(m.norm(m.first(x))))
CHANGES = {
    "training": (lambda m: m.norm.train(), "it is in training mode"),
    "no statistics": (
        lambda m: setattr(m, "norm", nn.BatchNorm2d(3, track_running_stats=False).eval()),
        "no running st",
    ),
    "shared module": (shared, "first is the same module as other"),
    "shared parameter": (tied, "first shares a parameter with another module"),
    "parametrized": (lambda m: weight_norm(m.first), "the parameters of first are computed"),
    "hook": (lambda m: m.first.register_forward_hook(lambda *_: None), "first has hooks"),
    "hook of the norm": (lambda m: m.norm.register_forward_hook(lambda *_: None), "norm has hooks"),
    "own convolution": (lambda m: setattr(m, "first", Standardized(3, 3, 1)), "(Standardized) has a _conv_forward"),
    "own norm": (lambda m: setattr(m, "norm", WithRelu(3).eval()), "its class WithRelu computes a forward of its own"),
    "not finite": (lambda m: m.norm.running_mean.fill_(float("nan")), "hold NaN or infinity"),
    "no variance": (lambda m: (m.norm.running_var.zero_(), setattr(m.norm, "eps", 0.0)), "is not positive"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_norm_or_a_map_that_is_not_a_plain_one_is_left(name):
    change, reason = CHANGES[name]
    model = prepared(copy.deepcopy(CHAIN))
    change(model)
    with pytest.raises(InputError) as raised:
        nk.fold(model.double(), batch=torch.randn(2, 3, 8, 8))
    assert reason in str(raised.value)


def test_channels_on_another_axis_are_not_the_norms():
    model = prepared(SquareRows())
    x = torch.randn(4, 5, 5, dtype=torch.float64)
    with pytest.raises(InputError, match="the channels of first are on another axis than the norm's: it gives 3 axes"):
        nk.fold(model, batch=x)
    expected = model(x[:, 0])
    nk.fold(model, batch=x[:, 0])
    assert (model(x[:, 0]) - expected).abs().max() <= CLOSE * expected.abs().max()


@pytest.mark.parametrize("is_turned", [False, True])
@pytest.mark.parametrize("is_after", [False, True])
def test_rows_that_a_view_flattens_between_a_linear_map_and_a_norm_are_the_same_rows(is_after, is_turned):
    class Flat(nn.Module):
        """As LeViT has it; turned, the view mixes tokens and channels."""

        def __init__(self):
            super().__init__()
            self.first, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

        def forward(self, x):
            order = [self.norm, self.first] if is_after else [self.first, self.norm]
            for layer in order:
                x = x.transpose(1, 2) if is_turned and layer is order[1] else x
                flat = x.flatten(0, 1) if layer is self.norm else x
                x = layer(flat).view(x.shape)
            return x

    model, x = prepared(Flat()), torch.randn(4, 5, 5, dtype=torch.float64)
    expected = model(x)
    if is_turned:
        with pytest.raises(InputError, match="no map"):
            nk.fold(model, batch=x)
        return
    nk.fold(model, batch=x)
    assert (model(x) - expected).abs().max() <= CLOSE * expected.abs().max()


@pytest.mark.parametrize(("padding", "mode"), [(0, "zeros"), (1, "zeros"), (1, "reflect")])
def test_into_the_convolution_after_it_a_norm_goes_unless_its_shift_would_leak_at_the_border(padding, mode):
    model = prepared(Wired(lambda m, x: m.second(m.norm(torch.relu(m.first(x)))), padding))
    model.second.padding_mode, model.second._reversed_padding_repeated_twice = mode, (padding,) * 4
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    if padding and mode == "zeros":
        with pytest.raises(InputError, match="its shift cannot go into a convolution that pads zeros"):
            nk.fold(model, batch=x)
        with torch.no_grad():
            model.norm.bias.copy_(model.norm.running_mean * model.norm.weight)
            model.norm.running_var.fill_(1 - model.norm.eps)
        model.norm.running_var.sub_((model.norm.running_var + model.norm.eps) - 1)
    expected = model(x)
    folding = nk.fold(model, batch=x)
    assert folding.plan.norms[0].readers == ("second",)
    assert (model(x) - expected).abs().max() <= CLOSE * expected.abs().max()


def test_without_a_batch_one_is_made_up_or_asked_for():
    model = prepared(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    assert nk.fold(model).plan.norms[0].readers == ("0",)
    model = prepared(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(77, 2)))
    with pytest.raises(InputError, match=r"Sequential does not run on any input .*; give nk.fold a batch="):
        nk.fold(model)
    with pytest.raises(InputError, match="does not run on the batch"):
        nk.fold(model, batch={"x": torch.randn(2, 3, 9, 9)})
    with pytest.raises(InputError, match="found none"):
        nk.fold(nn.Sequential(nn.Linear(2, 2)), operations=["batchnorm"])
    with pytest.raises(KindError, match="expected a module with batch norms, got int"):
        nk.fold(3, operations=["batchnorm"])
    with pytest.raises(InputError, match="on the batch hold NaN or infinity; give another batch"):
        nk.fold(prepared(copy.deepcopy(CHAIN)), batch=torch.full((2, 3, 8, 8), float("nan")))
    with pytest.raises(InputError, match=r"first\.weight is a meta tensor without values; load it again"):
        nk.fold(copy.deepcopy(CHAIN).to("meta"), batch=torch.randn(2, 3, 8, 8))
    with pytest.raises(InputError, match="not initialized; run the model once"):
        nk.fold(nn.Sequential(nn.LazyConv2d(4, 3), nn.BatchNorm2d(4)).eval())
    with torch.inference_mode():
        made = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    with pytest.raises(InputError, match=r"0\.weight is made in inference mode and cannot be changed"):
        nk.fold(made, batch=torch.randn(2, 3, 8, 8))
    with pytest.raises(InputError, match="batchnorm is folded alone"):
        nk.fold(model, operations=["gain", "batchnorm"])
    with pytest.raises(InputError, match="a folded one no longer normalizes"):
        nk.fold(model, for_training=True)


def test_what_a_run_does_not_show_is_caught_by_the_proof():
    def secret(self, x):
        # Another way through the model in float64 copies than in the run that was seen.
        y = self.first(x)
        return torch.relu(self.norm(y)) + (y.numpy() * 0 + 1e-3 * y.numpy()).mean()

    model = prepared(Wired(secret))
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad(), pytest.raises(InputError, match="a run does not show all that it computes; it is left"):
        nk.fold(model, batch=torch.randn(2, 3, 8, 8))
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_a_model_whose_code_reads_its_norm_is_left_with_one_line():
    model = prepared(Wired(lambda m, x: torch.relu(m.norm(m.first(x))) * m.norm.eps))
    with pytest.raises(InputError, match="the folded Wired does not run: 'Identity' object has no attribute 'eps'"):
        nk.fold(model, batch=torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_weights_are_rounded_once_and_the_text_says_what_that_costs(dtype):
    torch.manual_seed(0)
    model = prepared(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 3))).to(dtype)
    norm, layer = model[1], copy.deepcopy(model[0]).double()
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    folding = nk.fold(model, batch=torch.randn(2, 3, 9, 9))
    assert folding.proof.holds
    exact = layer.weight * scale.view(-1, 1, 1, 1)
    assert (model[0].weight.double() - exact).abs().le(torch.finfo(dtype).eps / 2 * exact.abs()).all()
    assert str(folding).startswith("1 of 1 norms folded; outputs differ by ")
    assert "with rounded weights" in str(folding)


class NormAct(nn.BatchNorm2d):
    """As timm has it: a norm, a dropout and an activation in one class."""

    def __init__(self, channels, sign=1):
        super().__init__(channels)
        self.drop, self.act, self.sign = nn.Identity(), nn.SiLU(), sign

    def forward(self, x):
        return self.act(self.drop(super().forward(x) * self.sign))


def test_a_norm_with_an_activation_inside_leaves_the_activation():
    model, x = prepared(nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4), nn.Conv2d(4, 2, 3))), torch.randn(2, 3, 9, 9)
    expected = model(x.double())
    folding = nk.fold(model, batch=x)
    assert [type(part).__name__ for part in model[1]] == ["Identity", "SiLU"]
    assert (model(x.double()) - expected).abs().max() <= CLOSE * expected.abs().max()
    nk.fold(model, inverse=folding)
    assert isinstance(model[1], NormAct)
    with pytest.raises(InputError, match="computes a forward of its own, which does more than normalize"):
        nk.fold(prepared(nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4, sign=-1))), batch=x)
    with pytest.raises(InputError, match="it reads an input of the model"):
        nk.fold(prepared(nn.Sequential(NormAct(3), nn.Conv2d(3, 4, 3))), batch=x)


def test_training_flags_buffers_and_random_numbers_stay():
    model = prepared(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(), nn.BatchNorm2d(4)))
    model[3].train()
    before = model[3].running_mean.clone()
    state = torch.get_rng_state()
    folding = nk.fold(model, batch=torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model[3].running_mean, before)
    assert model[3].training
    assert [refusal.place for refusal in folding.plan.refusals] == ["3"]


TINY_NETS = {
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 1], "layer_type": "bottleneck"},
    "RegNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "groups_width": 4},
    "MobileNetV1": {"depth_multiplier": 0.25, "min_depth": 4},
    "MobileNetV2": {"depth_multiplier": 0.25, "min_depth": 4},
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", TINY_NETS)
def test_every_batch_norm_of_the_convolutional_families_goes(name):
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**TINY_NETS[name])
    model = getattr(transformers, f"{name}ForImageClassification")(config).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    pixels = torch.randn(2, 3, 48, 48, dtype=torch.float64)
    expected = model(pixels).logits
    folding = nk.fold(model, batch={"pixel_values": pixels})
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert folding.plan.num_folded == len(folding.plan.norms) > 9
    assert (model(pixels).logits - expected).abs().max() <= CLOSE * expected.abs().max()
