"""B15: 16-bit parameters of norms that their updates do not move, and what looks like it and is not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import normkit as nk
from normkit import demo
from normkit.rules import Facts
from normkit.rules.lost_updates import lost_updates
from normkit.rules.parameters import untrained_norms
from normkit.rules.rule import NO_OPTIMIZER, NO_RUN, NotChecked
from watched_runs import calm, facts, parameter, series, training

GAIN = {"kind": "gain", "site": "norm", "dtype": "bfloat16", "gradient_steps": 40, "moved_steps": 0}
WEIGHT = parameter("linear.weight", moved_steps=40, dtype="bfloat16")


def checked(*parameters, rates=None):
    measured = calm("learning rate") if rates is None else series("learning rate", rates)
    return lost_updates.check(facts(training(measured, parameters=(WEIGHT, *parameters))))


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_a_gain_most_of_which_has_not_moved(share):
    hit = checked(parameter("norm.weight", unmoved_share=share, **GAIN), rates=[1e-3] * 40)
    assert (hit.severity, hit.sites) == ("warning", ("norm",))
    assert hit.measured == "1 of 1 16-bit parameter of norms keep most of their elements"
    assert "have gradients and have not moved in 40 steps at a learning rate of 0.001" in hit.evidence[0]
    assert hit.evidence[0].endswith("bfloat16 loses any change below 0.195 % of an element")


@pytest.mark.parametrize(
    "changes",
    [
        {"unmoved_share": 0.49},
        # Wide enough; not trained; no gradient; too early; a rate of 0 is B8's.
        {"dtype": "float32", "unmoved_share": math.nan},
        {"unmoved_share": 1.0, "trained": False},
        {"unmoved_share": math.nan, "gradient_steps": 0},
        {"unmoved_share": 1.0, "gradient_steps": 7},
        {"unmoved_share": 1.0, "learning_rate": 0.0},
        # No norm's.
        {"unmoved_share": 1.0, "site": ""},
    ],
)
def test_what_is_another_thing(changes):
    assert checked(parameter("norm.weight", **(GAIN | changes)), rates=[1e-3] * 40) is None


def test_a_warm_up_a_stopped_run_and_a_run_without_optimizer_are_not_checked():
    gain = parameter("norm.weight", unmoved_share=1.0, **GAIN)
    assert checked(gain, rates=[1e-6, 1e-5, 1e-4]) == NotChecked(
        "the learning rate still rises: larger updates may not be lost"
    )
    assert checked(gain, rates=[1e-6, 1e-4, 1e-5]) is not None
    still = facts(training(parameters=(replace(WEIGHT, moved_steps=0), gain)))
    assert lost_updates.check(still) == NotChecked("no weight moved either")
    assert lost_updates.check(facts(training(parameters=(replace(gain, trained=False),)))) is NO_OPTIMIZER
    assert lost_updates.check(replace(still, training=None)) is NO_RUN


def test_one_cause_is_named_by_one_rule():
    gain = parameter("norm.weight", unmoved_share=1.0, **GAIN)
    assert untrained_norms.check(facts(training(parameters=(WEIGHT, gain)))) is None
    stopped = replace(gain, learning_rate=0.0)
    assert untrained_norms.check(facts(training(parameters=(WEIGHT, stopped)))).severity == "note"


def watched(dtype, rate, steps=15):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(demo.directory("layernorm")).to(dtype)
    ids = torch.tensor(list(demo.text().encode())[:64]).view(1, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    with nk.watch(model, optimizer, every=5, say=lambda _: None) as watch:
        for _ in range(steps):
            logits = model(input_ids=ids[:, :-1]).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            watch.step(loss)
            optimizer.step()
        return watch.inspection()


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "rate", "is_found"),
    [(torch.bfloat16, 1e-3, True), (torch.bfloat16, 1e-2, False), (torch.float32, 1e-3, False)],
)
def test_a_short_run(dtype, rate, is_found):
    found = watched(dtype, rate)
    assert any(finding.rule == "B15" for finding in found.findings) == is_found
    shares = {each.path: each.unmoved_share for each in found.training.parameters if each.site}
    if dtype is torch.float32:
        assert all(map(math.isnan, shares.values()))
    else:
        # Biases are near 0 and move at any rate.
        assert all(share < 0.5 for path, share in shares.items() if path.endswith("bias"))


def test_facts_are_what_rules_take():
    assert isinstance(facts(training()), Facts)
