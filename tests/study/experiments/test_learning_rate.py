import math

import pytest
import torch

from normkit.study.arm_context import ArmContext
from normkit.study.corpus import next_token_loss
from normkit.study.experiments.learning_rate import STUDY, _largest_score, _step_rates
from normkit.study.transformer import Transformer, TransformerConfig
from tiny_study import decided_claim, judged_condition

TINY = {
    **STUDY.quick,
    "width": 16,
    "layers": 1,
    "deep_layers": 2,
    "batch": 2,
    "window": 8,
    "steps": 2,
    "rates": (1e-3, 0.1),
}


@pytest.fixture(scope="module")
def measured():
    lab = ArmContext(settings=TINY, seed=0)
    return {0: {arm.name: STUDY.measure(lab, arm) for arm in STUDY.arms(TINY)}}


def runs(model, losses, scores):
    rates = (3e-4, 1e-3, 1e-1)
    return {
        f"{model}, rate {rate:g}": {"last": loss, "score": score}
        for rate, loss, score in zip(rates, losses, scores, strict=True)
    }


def invented(plain=(2.0, 2.0, 3.0), cured=(2.0, 2.0, 2.2), bare=(2.0, 3.0, 5.5), scores=(5.0, 9.0, 5000.0)):
    return {
        0: {
            **runs("LayerNorm", plain, scores),
            **runs("LayerNorm and QK-norm", cured, (5.0, 6.0, 20.0)),
            **runs("no norm", bare, (5.0, 6.0, None)),
            "one block at a time, LayerNorm": {"lowest": [0.1, 0.5], "highest": [10.0, 50.0]},
            "one block at a time, no norm": {"lowest": [1e-6, 1e-3], "highest": [1e-5, 1e-2]},
        }
    }


def test_claims_follow_from_sensitivity_scores_and_windows():
    assert [decided_claim(claim, invented()).verdict for claim in STUDY.claims] == ["reproduced"] * 4
    above, condition = STUDY.claims[1].conditions
    assert judged_condition(condition, invented()).middle == pytest.approx((7.0 / 3 - 2.0) - (6.2 / 3 - 2.0))
    # LayerNorm's best rate is the second: what comes before counts for nothing.
    assert judged_condition(above, invented(plain=(2.1, 2.0, 3.0))).middle == pytest.approx(0.5 - 0.1)
    growth = STUDY.claims[0].conditions[0]
    assert judged_condition(growth, invented(scores=(5.0, 9.0, None))).holds
    apart, shared = STUDY.claims[3].conditions
    assert judged_condition(apart, invented()).middle == pytest.approx(-2.0)
    assert judged_condition(shared, invented()).middle == pytest.approx(math.log10(10.0 / 0.5))


@pytest.mark.parametrize(
    ("place", "changed"),
    [
        (0, {"scores": (5.0, 9.0, 50.0)}),
        (1, {"cured": (2.0, 2.0, 3.1)}),
        (2, {"bare": (2.0, 2.0, 3.0)}),
    ],
)
def test_what_they_do_not_is_not(place, changed):
    assert decided_claim(STUDY.claims[place], invented(**changed)).verdict == "not reproduced"


@pytest.mark.slow
def test_rates_that_work_bracket_the_best_one_and_leave_the_model_as_it_was():
    config = TransformerConfig(width=16, layers=2, context=8)
    model = Transformer(config, seed=0).double()
    batch = (torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0)),)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = _step_rates(model, batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    loss = next_token_loss(model, batch).item()
    block = model.blocks[1]
    middle = math.sqrt(found["lowest"][1] * found["highest"][1])
    with torch.no_grad():
        for weight in block.parameters():
            weight.sub_(middle * weight.grad)
        assert next_token_loss(model, batch).item() < loss


def test_the_largest_score_is_that_of_the_attention():
    model = Transformer(TransformerConfig(width=8, heads=2, layers=2, context=5), seed=1)
    ids = torch.tensor([[1, 2, 3, 4]])
    largest = 0.0
    x = model.embed(ids)
    for block in model.blocks:
        attention = block.attention.branch
        rows = block.attention.norm(x)
        query, key = (layer(rows).view(1, 4, 2, 4).transpose(1, 2) for layer in (attention.query, attention.key))
        largest = max(largest, (query @ key.mT / 2).tril().abs().max().item())
        x = block(x)
    assert _largest_score(model, ids) == pytest.approx(largest, rel=1e-6)
    with torch.no_grad():
        model.blocks[0].attention.branch.query.weight[0, 0] = math.inf
    assert _largest_score(model, ids) is None


@pytest.mark.slow
def test_each_arm_gives_what_the_charts_need(measured):
    loss, scores, blocks = STUDY.charts(TINY, list(measured.values()))
    assert [len(line.y) for line in loss.panels[0][1]] == [2, 2, 2]
    assert scores.panels[0][1][0].y[0] == measured[0]["LayerNorm, rate 0.001"]["score"]
    assert [line.label for line in blocks.panels[0][1]] == ["LayerNorm", "no norm"]
