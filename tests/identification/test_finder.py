"""The finder: which modules may be norms, which are alike, and what a like one is taken for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normkit import specs
from normkit.identification import finder
from normkit.identification.finder import Finder, is_called_like_a_norm, likeness, may_be_norm
from normkit.identification.tracing import trace


def call_of(module, *inputs):
    (call,) = trace(module, lambda: module(*inputs)).modules
    return call


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.LayerNorm(24), (2, 5, 24), True),
        (nn.LayerNorm((3, 5, 24)), (2, 3, 5, 24), True),
        (nn.Dropout(), (2, 5, 24), True),
        (nn.Conv2d(24, 24, 3, padding=1), (2, 24, 8, 8), False),
        (nn.Linear(64, 64), (2, 5, 64), False),
        (nn.Linear(24, 12), (2, 5, 24), False),
    ],
)
def test_what_is_called_like_a_norm(module, shape, expected):
    assert is_called_like_a_norm(call_of(module, torch.randn(shape)), module) is expected


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.LayerNorm(24), True),
        (nn.GELU(), True),
        (nn.Linear(24, 24), False),
        (nn.Embedding(1000, 240), False),
        (nn.ModuleList(), False),
    ],
)
def test_what_may_be_a_norm_without_a_call(module, expected):
    assert may_be_norm(module) is expected


def test_what_like_modules_have_in_common():
    assert likeness(nn.LayerNorm(24)) == likeness(nn.LayerNorm(24).eval())
    assert likeness(nn.LayerNorm(24)) != likeness(nn.LayerNorm(24, eps=1e-6))
    assert likeness(nn.LayerNorm(24)) != likeness(nn.LayerNorm(12))
    assert likeness(nn.Sequential(nn.GELU())) != likeness(nn.Sequential(nn.ReLU()))


@pytest.mark.slow
def test_a_like_module_is_checked_and_not_examined(monkeypatch):
    seen, examine = [], finder.examine
    monkeypatch.setattr(finder, "examine", lambda *given, **named: (seen.append(given), examine(*given, **named))[1])
    first, second, other = nn.LayerNorm(24), nn.LayerNorm(24), nn.LayerNorm(24, eps=1e-3)
    nn.init.uniform_(second.weight)
    one = Finder()
    found = [
        one.examined(module, path, (2, 24)).passport for path, module in zip("012", (first, second, other), strict=True)
    ]
    assert [passport.spec.eps for passport in found] == [1e-5, 1e-5, 1e-3]
    assert torch.equal(found[1].weight, second.weight)
    assert found[1].readings["kind"].evidence[-1].startswith("found on 0, a like module")
    assert len(seen) == 2


def test_a_batch_norm_like_one_that_is_known_is_examined_only_where_it_differs(monkeypatch):
    seen, examine = [], finder.examine
    monkeypatch.setattr(finder, "examine", lambda *given, **named: (seen.append(given[0]), examine(*given, **named))[1])

    def layer(eps=1e-5):
        made = nn.BatchNorm1d(24, eps=eps).eval()
        nn.init.uniform_(made.running_var, 0.5, 2.0)
        nn.init.uniform_(made.weight)
        return made

    first, other, patched, broken, last = layer(), layer(1e-3), layer(), layer(), layer()
    patched.forward = lambda x: F.layer_norm(x, (24,))
    broken.running_var[3] = -1.0
    one = Finder()
    found = [one.examined(module, "", (2, 24)).passport for module in (first, other, patched, broken, last)]
    assert seen == [first, other, patched, broken]
    assert [passport.verdict for passport in found] == ["batch", "batch", "norm", "not a norm", "batch"]
    assert [each.readings["batch"].value["eps"] for each in (found[0], found[1], found[4])] == [1e-5, 1e-3, 1e-5]
    alone = examine(last, (2, 24)).passport
    assert found[4].to_json() == alone.to_json()


def test_a_map_like_one_that_is_known_may_be_a_norm_with_other_numbers():
    class Mixed(nn.Module):
        """A norm, or the identity: its buffer decides."""

        def __init__(self, share):
            super().__init__()
            self.register_buffer("share", torch.tensor(share))

        def forward(self, x):
            return self.share * F.layer_norm(x, (24,)) + (1 - self.share) * x

    one = Finder()
    found = [one.examined(Mixed(share), "", (2, 24)).passport for share in (0.0, 0.5, 1.0)]
    assert [passport.spec is not None for passport in found] == [False, False, True]


def test_each_layout_that_a_module_takes_is_examined_once():
    class ByDimensions(nn.Module):
        """Over the channels of an image, over the features of a sequence."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(24))

        def forward(self, x):
            if x.dim() == 3:
                return F.layer_norm(x, x.shape[-1:], self.weight)
            return F.layer_norm(x.permute(0, 2, 3, 1), (24,), self.weight).permute(0, 3, 1, 2)

    found = Finder().uncalled(ByDimensions(), "a")
    assert [each.passport.spec for each in found] == [specs.MODERNBERT, specs.MODERNBERT.replace(axes=(1,))]


def test_a_module_that_refuses_its_input_is_nothing():
    assert Finder().examined(nn.LayerNorm(24), "a", (2, 12)) is None


def test_modules_without_numbers_that_are_alike_are_examined_once(monkeypatch):
    class Applied(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return self.function(x)

    def unit(x):
        return x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt()

    tried, examine = [], finder.examine
    monkeypatch.setattr(
        finder, "examine", lambda module, *args, **kwargs: tried.append(module) or examine(module, *args, **kwargs)
    )
    hooked = nn.SiLU()
    hooked.register_forward_hook(lambda _module, _args, y: unit(y))
    modules = [nn.SiLU(), nn.SiLU(), Applied(F.silu), Applied(unit), Applied(F.silu), hooked]
    find = Finder()
    specs = [find.examined(module, str(place), (2, 5, 24)).passport.spec for place, module in enumerate(modules)]
    assert tried == [modules[0], modules[2], modules[3], modules[5]]
    assert [spec is not None for spec in specs] == [False, False, False, True, False, False]
