import math

import pytest

from normkit.study.experiments.batch_claims import CLAIMS
from normkit.study.experiments.batch_models import VARIANCE_SIZES
from normkit.study.result import decide

COUPLINGS = ("samples", "batch size", "future", "padding", "mode")


def scores(kind, errors, **more):
    return {f"{kind}: {arm}": {"error": error, **more} for arm, error in errors.items()}


def dependence(value, mode):
    return {**dict.fromkeys(COUPLINGS, value), "mode": mode}


def as_claimed():
    """Measurements under which every statement holds."""
    mlp = scores(
        "MLP",
        {
            **{f"BatchNorm, batch {size}": error for size, error in ((2, 60.0), (4, 20.0), (64, 6.0))},
            **{f"LayerNorm, batch {size}": 10.0 for size in (1, 2, 4, 16, 64)},
        },
    )
    for arm, measured in mlp.items():
        measured["gap"] = -0.5 if arm in ("MLP: BatchNorm, batch 2", "MLP: BatchNorm, batch 4") else 0.0
    cnn = scores(
        "CNN",
        {
            "BatchNorm, batch 2": 40.0,
            "LayerNorm, batch 2": 20.0,
            "BatchNorm, batch 32": 5.0,
            "LayerNorm, batch 32": 5.0,
            "no norm, batch 32": 9.0,
        },
        scatter=0.1,
        losses=[2.0] * 10 + [0.1] * 30,
    )
    cnn["CNN: no norm, batch 32"]["losses"] = [2.0] * 30 + [0.1] * 10
    rnn = {
        "RNN: one BatchNorm": {"error": 40.0, "errors": [40.0, 60.0]},
        "RNN: a BatchNorm for each time": {"error": 30.0, "errors": [30.0, 60.0]},
        "RNN: LayerNorm": {"error": 10.0, "errors": [10.0, 20.0]},
    }
    texts = {
        f"Transformer: {norm}, rate {rate}": {
            "held_out": loss,
            "held_out_training_mode": loss - 0.5,
            "held_out_new_statistics": loss - 0.1,
            "scatter": 0.3,
        }
        for norm, losses in (("BatchNorm", (2.9, 2.8)), ("LayerNorm", (2.5, 2.4)))
        for rate, loss in zip(("0.001", "0.003"), losses, strict=True)
    }
    dependences = {
        f"dependence: {norm}, {mode}": dependence(0.0, 0.0)
        for norm in ("LayerNorm", "RMSNorm")
        for mode in ("training", "evaluation")
    }
    return {
        **mlp,
        **cnn,
        **rnn,
        **texts,
        **dependences,
        "dependence: BatchNorm, training": dependence(0.5, 0.5),
        "dependence: BatchNorm, evaluation": dependence(0.0, 0.5),
        "variance: Gaussian rows": {"scatter": [math.sqrt(2 / (size - 1)) for size in VARIANCE_SIZES]},
    }


def verdicts(measured):
    decided = [decide(claim, dict.fromkeys(range(3), measured)) for claim in CLAIMS]
    return [(each.verdict, each.only_if) for each in decided]


def test_every_claim_is_reproduced_where_all_is_as_claimed():
    assert verdicts(as_claimed()) == [("reproduced", "")] * len(CLAIMS)


@pytest.mark.parametrize(
    ("place", "arm", "change", "verdict"),
    [
        (0, "CNN: BatchNorm, batch 2", {"error": 21.0}, "reproduced only if"),
        (0, "MLP: BatchNorm, batch 64", {"error": 30.0}, "reproduced only if"),
        (1, "MLP: LayerNorm, batch 16", {"gap": 0.01}, "not reproduced"),
        (1, "MLP: BatchNorm, batch 64", {"gap": 0.2}, "not reproduced"),
        (2, "RNN: a BatchNorm for each time", {"error": 11.0}, "reproduced only if"),
        (2, "RNN: a BatchNorm for each time", {"errors": [30.0, 21.0]}, "reproduced only if"),
        (4, "CNN: BatchNorm, batch 32", {"losses": [2.0] * 40}, "not reproduced"),
        (3, "CNN: BatchNorm, batch 32", {"error": 9.5}, "not reproduced"),
        (5, "dependence: LayerNorm, training", {"future": 0.1}, "not reproduced"),
        (5, "dependence: BatchNorm, evaluation", {"padding": 0.1}, "not reproduced"),
        (5, "dependence: BatchNorm, training", {"future": 0.0}, "not reproduced"),
        (6, "Transformer: BatchNorm, rate 0.003", {"held_out": 2.45}, "reproduced only if"),
        (7, "Transformer: BatchNorm, rate 0.003", {"held_out_training_mode": 2.8}, "not reproduced"),
        (7, "CNN: BatchNorm, batch 32", {"scatter": 0.4}, "not reproduced"),
        (8, "variance: Gaussian rows", {"scatter": [1.0] * len(VARIANCE_SIZES)}, "not reproduced"),
    ],
)
def test_a_claim_falls_with_its_conditions(place, arm, change, verdict):
    measured = as_claimed()
    measured[arm] = {**measured[arm], **change}
    assert verdicts(measured)[place][0] == verdict


def test_a_norm_that_alone_comes_down_is_faster_without_bound():
    measured = as_claimed()
    measured["CNN: no norm, batch 32"]["losses"] = [2.0] * 40
    assert verdicts(measured)[4][0] == "reproduced"


def test_what_was_not_run_is_not_judged():
    assert {verdict for verdict, _ in verdicts({})} == {"not run"}
