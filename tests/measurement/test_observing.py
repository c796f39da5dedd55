from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode

from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace
from normkit.measurement.blocks import find_blocks
from normkit.measurement.observing import Listener, observed


class Block(nn.Module):
    """A module norm, two norms called as functions, and attention."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        read = self.norm(x).unflatten(-1, (2, 4)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(read, read, read).transpose(1, 2).flatten(2)
        x = x + self.inner(F.rms_norm(x, (8,), eps=1e-6))
        return F.rms_norm(x, (8,), eps=1e-6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Diary(Listener):
    def __init__(self, replaced=None):
        self.lines, self.replaced = [], replaced

    def before_site(self, site, _x, /):
        self.lines.append(f"> {site.path}")

    def after_site(self, site, y, /):
        self.lines.append(f"< {site.path}")
        return torch.zeros_like(y) if site.path == self.replaced else None

    def before_block(self, block, _args, _kwargs, /):
        self.lines.append(f"> {block.path}")

    def after_block(self, block, _y, /):
        self.lines.append(f"< {block.path}")

    def at_attention(self, parent, function, _args, _kwargs, /):
        self.lines.append(f"{function} in {parent}")


def watched(diary, model, x):
    called = trace(model, lambda: model(x))
    sites, _ = find_sites(model, called)
    parents = [call.parent for call in called.functions]
    return observed(model, sites, find_blocks(model, called), parents, diary)


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.slow
def test_every_call_is_told_in_order():
    model, x, diary = Model(), torch.randn(2, 5, 8), Diary()
    with watched(diary, model, x):
        y = model(x)
    assert torch.equal(y, model(x))
    assert diary.lines == [
        line.replace("layer", f"layers.{index}")
        for index in range(2)
        for line in (
            "> layer",
            "> layer.norm",
            "< layer.norm",
            "sdpa in layer",
            "> layer:rms_norm",
            "< layer:rms_norm",
            "> layer:rms_norm#2",
            "< layer:rms_norm#2",
            "< layer",
        )
    ]


def test_what_a_module_is_given_that_calls_functions_is_told():
    class Given(Diary):
        def before_parent(self, path, args, kwargs, /):
            self.lines.append((path, args, kwargs))

    model, x, diary = Model(), torch.randn(2, 5, 8), Given()
    with watched(diary, model, x):
        model.layers[1](x=x)
    path, args, kwargs = diary.lines[0]
    assert (path, args, list(kwargs)) == ("layers.1", (), ["x"])
    assert kwargs["x"] is x
    assert diary.lines[1] == "> layers.1"


@pytest.mark.parametrize("replaced", ["layers.1:rms_norm#2", "layers.1.norm"])
def test_an_output_is_replaced(replaced):
    model, x = Model(), torch.randn(2, 5, 8)
    with watched(Diary(replaced), model, x):
        y = model(x)
    first = model.layers[0](x)
    if replaced.endswith("#2"):
        assert torch.equal(y, torch.zeros_like(y))
    else:
        last = model.layers[1]
        assert torch.equal(y, F.rms_norm(first + last.inner(F.rms_norm(first, (8,), eps=1e-6)), (8,), eps=1e-6))


def test_nothing_is_left_behind():
    model, x = Model(), torch.randn(2, 5, 8)
    with watched(Diary(), model, x):
        assert hooks(model) > 0
        assert _get_current_function_mode() is not None
    assert hooks(model) == 0
    assert _get_current_function_mode() is None


@pytest.mark.slow
def test_nothing_is_left_behind_after_an_exception():
    model, x = Model(), torch.randn(2, 5, 8)
    with pytest.raises(RuntimeError, match="shape"), watched(Diary(), model, x):
        model(torch.randn(2, 5, 7))
    assert hooks(model) == 0
    assert _get_current_function_mode() is None


def test_a_forward_after_one_that_raised():
    model, x, diary = Model(), torch.randn(2, 5, 8), Diary()
    with watched(diary, model, x):
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5, 8, dtype=torch.complex64))
        diary.lines.clear()
        model(x)
    assert [line for line in diary.lines if line.startswith("> ") and ":" in line] == [
        "> layers.0:rms_norm",
        "> layers.0:rms_norm#2",
        "> layers.1:rms_norm",
        "> layers.1:rms_norm#2",
    ]


def test_a_listener_need_not_listen():
    model, x = Model(), torch.randn(2, 5, 8)
    with watched(Listener(), model, x):
        y = model(x)
    assert torch.equal(y, model(x))
