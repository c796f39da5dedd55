"""A hook never ends a training, and leaves no trace in a copy."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from normkit.measurement.hooks import Failures, Forward, Hook


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
