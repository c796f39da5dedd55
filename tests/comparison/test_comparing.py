"""A comparison leaves models as they were, runs them as often as it must, and is plain JSON."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import planted_faults as faults
from normkit.comparison.comparing import compare
from normkit.files import json_text

pytestmark = pytest.mark.slow

MIDDLE = "transformer.h.1.ln_2"


def test_json_is_plain_and_finite(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]) -> None:
    with torch.no_grad():
        port.get_submodule(MIDDLE).weight.fill_(torch.nan)
    document = json.loads(json_text(compare(port, stock, batch).to_json()))
    assert (document["schema_version"], document["source"], document["differs"]) == (2, "a batch that was given", True)
    assert document["rows"]["birth"]["path"] == MIDDLE
    assert document["rows"]["birth"]["differs"] == "inf"


def test_both_models_are_left_as_they_were(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]) -> None:
    other = copy.deepcopy(stock).train()
    state = {key: value.clone() for key, value in other.state_dict().items()}
    generator = torch.get_rng_state()
    compare(port.train(), other, batch)
    assert port.training
    assert other.training
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
    for model in (port, other):
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_each_model_runs_once_and_to_find_its_norms(
    port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]
) -> None:
    calls = {"port": 0, "stock": 0}
    hooks = [
        model.register_forward_pre_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
        for name, model in (("port", port), ("stock", stock))
    ]
    stages: list[str] = []
    found = compare(faults.wrong_eps(port), stock, [batch, batch], progress=lambda stage, *_: stages.append(stage))
    # The first row of the reference also runs alone, and in a copy in another precision, which has the same hooks.
    assert calls == {"port": 2, "stock": 4}
    # Where no bit differs, nobody asks what rounding explains.
    assert compare(copy.deepcopy(stock), stock, batch).rows.verdict == "the same to the bit"
    assert calls == {"port": 2, "stock": 4 + 2 + 2}
    for hook in hooks:
        hook.remove()
    assert found.conventions.changed[0].observed is not None
    assert found.conventions.changed[0].observed.rows == 512
    assert [*dict.fromkeys(stages)][-3:] == ["running port", "running reference", "running reference against itself"]


def test_padding_counts_nowhere(port: nn.Module, stock: nn.Module, batch: dict[str, Tensor]) -> None:
    def padded() -> Iterator[Tensor]:
        mask = torch.ones_like(batch["input_ids"])
        mask[:, 8:] = 0
        yield from (batch["input_ids"], mask)

    ids, mask = padded()
    found = compare(faults.wrong_eps(port), stock, {"input_ids": ids, "attention_mask": mask})
    assert found.conventions.changed[0].observed is not None
    assert found.conventions.changed[0].observed.rows == 32
