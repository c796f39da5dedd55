"""A hook never ends a training, and leaves no trace in a copy."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode

from normkit.identification.sites import find_sites
from normkit.identification.tracing import trace
from normkit.measurement.hooks import Failures, Forward, Hook, Listener, observed
from normkit.measurement.layout import find_blocks


def broken(*_: object) -> None:
    raise ValueError("first\nsecond")


def test_a_failure_is_noted_once_a_place_and_tried_again():
    failures, calls = Failures(), []

    def body(value: int) -> int:
        calls.append(value)
        return broken() or value

    assert Hook(failures, "a", body)(1) is None
    assert failures.run("a", body, 2) is None
    assert (failures.by_place, calls) == ({"a": "first"}, [1, 2])
    assert failures.run("b", lambda value: value, 3) == 3


def test_a_place_that_fails_in_the_rehearsal_is_given_up():
    failures = Failures()
    failures.is_rehearsal = True
    failures.run("a", broken)
    failures.is_rehearsal = False
    assert failures.run("a", lambda: 1) is None


def test_an_interruption_is_no_failure():
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Failures().run("a", interrupted)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda hook: pickle.loads(pickle.dumps(hook))])
def test_a_copy_of_a_hook_does_nothing(copied: object):
    assert copied(Hook(Failures(), "a", broken))(1, 2) is None


def test_a_forward_stands_before_a_method_and_leaves():
    module, seen = nn.Linear(2, 2), []

    def around(forward: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        seen.append(args)
        return forward(*args, **kwargs)

    forward = Forward(module.forward, around)
    forward.put_before(module)
    x = torch.ones(1, 2)
    assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
    assert len(seen) == 1
    twin = copy.deepcopy(module)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    assert not twin(x).any()
    assert len(seen) == 1
    forward.take_from(module)
    assert "forward" not in module.__dict__


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

    def after_site(self, site, y, _given, /):
        self.lines.append(f"< {site.path}")
        return torch.zeros_like(y) if site.path == self.replaced else None

    def before_block(self, block, _args, _kwargs, /):
        self.lines.append(f"> {block.path}")

    def after_block(self, block, _y, _given, /):
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
    path, args, kwargs = diary.lines[1]
    assert (path, args, list(kwargs)) == ("layers.1", (), ["x"])
    assert kwargs["x"] is x
    assert diary.lines[0] == "> layers.1"


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
        assert "forward" in vars(model.layers[0])
    assert hooks(model) == 0
    assert "forward" not in vars(model.layers[0])


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
