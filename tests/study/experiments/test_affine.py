import json

import pytest
import torch

from normkit.study import Transformer, TransformerConfig
from normkit.study.arm_context import ArmContext
from normkit.study.experiments.affine import STUDY, frozen_gains
from tiny_study import decided_claim

TINY = {**STUDY.quick, "layers": 1, "width": 16, "batch": 2, "window": 8, "steps": 3, "warmup": 0, "little_bytes": 200}
ARMS = {arm.name: arm for arm in STUDY.arms(TINY)}


def test_frozen_gains_differ_by_norm_and_are_not_trained():
    make = frozen_gains(seed=2)
    one, two = make(400), make(400)
    assert not torch.equal(one.weight, two.weight)
    assert torch.equal(one.weight, frozen_gains(seed=2)(400).weight)
    assert not one.weight.requires_grad
    assert one.bias.requires_grad
    # Of 400 normal draws the deviation is known to 1 / sqrt(800) = 4 %.
    assert one.weight.detach().log().std().item() == pytest.approx(0.5, rel=0.2)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "learned"),
    [
        ("gain and bias", {"weight", "bias"}),
        ("neither", set()),
        ("gain only", {"weight"}),
        ("bias only", {"bias"}),
        ("random frozen gain", {"bias"}),
    ],
)
def test_each_arm_trains_its_part_of_the_affine_map(name, learned, monkeypatch):
    built = []

    def keep(config, seed):
        built.append(Transformer(config, seed))
        return built[-1]

    monkeypatch.setattr("normkit.study.arm_context.Transformer", keep)
    STUDY.measure(ArmContext(settings=TINY, seed=0), ARMS[name])
    norm = built[0].final_norm
    start = Transformer(TransformerConfig(width=16, layers=1, context=8)).final_norm
    moved = {path for path, value in norm.named_parameters() if value.requires_grad and value.grad is not None}
    assert moved == learned
    assert all(not torch.equal(getattr(norm, path), getattr(start, path)) for path in learned)


@pytest.mark.slow
def test_little_text_is_seen_often_and_both_losses_are_measured():
    measured = STUDY.measure(ArmContext(settings=TINY, seed=0), ARMS["neither, little text"])
    json.dumps(measured)
    assert len(measured["losses"]) == 3
    assert measured["gap"] != 0


def invented(**changed):
    arms = {name: {"held_out": 2.0, "gap": 1.0} for name in ARMS}
    for name, values in changed.items():
        arms[name.replace("_", " ")] = {**arms[name.replace("_", " ")], **values}
    return dict.fromkeys(range(3), arms)


def both(much, little):
    """Held-out losses without gain and bias, of the two amounts of text."""
    return {"neither": {"held_out": much}, "neither, little text": {"held_out": little}}


@pytest.mark.parametrize(
    ("words", "measured", "expected"),
    [
        ("outperforms", invented(**both(1.9, 1.9)), "reproduced"),
        ("outperforms", invented(**both(2.1, 2.1)), "not reproduced"),
        ("outperforms", invented(**both(2.1, 1.9)), "reproduced only if"),
        ("linear layers", invented(neither={"held_out": 1.9}), "not reproduced"),
        ("over-fitting", invented(), "not reproduced"),
        ("over-fitting", invented(**{"gain and bias, little text": {"gap": 1.1}}), "reproduced"),
        ("linear layers", invented(), "reproduced"),
        ("linear layers", invented(random_frozen_gain={"held_out": 2.1}), "not reproduced"),
        ("linear layers", invented(gain_only={"held_out": 1.9}), "not reproduced"),
    ],
)
def test_verdicts(words, measured, expected):
    (claim,) = (claim for claim in STUDY.claims if words in claim.says)
    assert decided_claim(claim, measured).verdict == expected


def test_charts_show_losses_and_gaps_apart():
    loss, gap = STUDY.charts(TINY, list(invented().values()))
    assert len(loss.values) == 5
    assert [name for name, _ in gap.values] == ["gain and bias, little text", "neither, little text"]
