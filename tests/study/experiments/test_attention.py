import math

import pytest
import torch

from normkit.study.arm_context import ArmContext
from normkit.study.experiments.attention import STUDY, _scores
from normkit.study.transformer import Transformer, TransformerConfig
from tiny_study import decided_claim

SMALL = {**STUDY.quick, "width": 16, "heads": 2, "batch": 2}


@pytest.fixture(scope="module")
def measured():
    lab = ArmContext(settings=SMALL, seed=0)
    return {0: {arm.name: STUDY.measure(lab, arm) for arm in STUDY.arms(SMALL)}}


def test_scores_are_those_of_the_model():
    model = Transformer(TransformerConfig(width=8, heads=2, layers=1, context=5), seed=1).double()
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    attention = model.blocks[0].attention.branch
    rows = model.blocks[0].attention.norm(x)
    query, key = (layer(rows).view(1, 4, 2, 4).transpose(1, 2) for layer in (attention.query, attention.key))
    logits = (query @ key.mT / 2).masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -math.inf)
    weights = logits.softmax(-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1).mean()
    with torch.no_grad():
        largest, mean = _scores(model, x)
    assert largest == pytest.approx(logits[logits > -math.inf].abs().max().item(), rel=1e-12)
    assert mean == pytest.approx(entropy.item(), rel=1e-12)


@pytest.mark.slow
def test_scores_grow_with_the_square_of_the_input_or_of_the_weights(measured):
    largest = measured[0]["no norm"]["input"]["largest"]
    scales = SMALL["input_scales"]
    assert largest[-1] / largest[0] == pytest.approx((scales[-1] / scales[0]) ** 2, rel=1e-9)
    largest = measured[0]["LayerNorm"]["weights"]["largest"]
    assert largest[-1] / largest[0] == pytest.approx(SMALL["weight_scales"][-1] ** 2, rel=1e-9)
    verdicts = [decided_claim(claim, measured).verdict for claim in STUDY.claims]
    assert verdicts == ["reproduced", "reproduced", "reproduced only if", "reproduced"]


def test_a_norm_that_did_nothing_is_not_reproduced_and_every_arm_is_charted(measured):
    broken = {0: {**measured[0], "LayerNorm": measured[0]["no norm"]}}
    assert decided_claim(STUDY.claims[0], broken).verdict == "not reproduced"
    assert decided_claim(STUDY.claims[2], broken).verdict == "not reproduced"
    scores, entropy = STUDY.charts(SMALL, list(measured.values()))
    assert [line.label for line in scores.panels[0][1]] == [arm.name for arm in STUDY.arms(SMALL)]
    assert entropy.reference == (pytest.approx(sum(math.log(t) for t in range(1, 65)) / 64), "all keys alike")
