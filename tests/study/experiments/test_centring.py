import json
import math

import pytest
import torch
from torch import nn

import normkit as nk
from normkit import specs
from normkit.study import Transformer, TransformerConfig
from normkit.study.arm_context import ArmContext
from normkit.study.experiments.centring import (
    STUDY,
    removed_directions,
    share,
    stream_share,
    writers,
    writing_gradients,
)
from normkit.study.model_parts import Centring, random_hyperplanes
from tiny_study import decided_claim

NAMES = [arm.name for arm in STUDY.arms(STUDY.quick)]


def one_seed(losses=(), update=1.0, gradients=1e-15, stream=1.0):
    """Every arm alike, but for the held-out losses that are named; shares are in units of chance."""
    return {
        name: {
            "held_out": {"no norm, deep": 3.0, **dict(losses)}.get(name, 2.0),
            "chance": 0.25,
            "at": [0, 5],
            "changes": [0.25, 0.2],
            "gradients": [0.0, gradients],
            "update": 0.25 * update,
            "stream_end": 0.25 * stream,
        }
        for name in NAMES
    }


def verdict(words, **measured):
    (claim,) = (claim for claim in STUDY.claims if words in claim.says)
    decided = decided_claim(claim, {seed: one_seed(**measured) for seed in range(3)})
    return decided.verdict, decided.only_if


@pytest.mark.parametrize(
    ("words", "measured", "expected"),
    [
        ("dispensable", {}, "reproduced"),
        ("dispensable", {"losses": {"RMSNorm, deep": 2.3}}, "not reproduced"),
        ("dispensable", {"losses": {"RMSNorm, deep": 1.7}}, "not reproduced"),
        ("dispensable", {"losses": {"no norm, deep": 2.1}}, "not testable here"),
        ("no special direction", {"losses": {"16 directions, deep": 2.2}}, "reproduced"),
        ("no special direction", {"losses": {"own hyperplanes, deep": 2.3}}, "not reproduced"),
        ("scale matters", {}, "not reproduced"),
        ("scale matters", {"losses": {"centring only": 2.3, "centring only, deep": 9.0}}, "reproduced"),
        ("drift", {"update": 1.1}, "not reproduced"),
        ("drift", {"update": 2.5}, "reproduced"),
        ("takes all gradient", {"update": 0.1}, "reproduced"),
        ("takes all gradient", {"update": 0.1, "gradients": 1e-3}, "not reproduced"),
        ("takes all gradient", {"update": 0.9}, "not reproduced"),
        ("orthogonal", {}, "reproduced"),
        ("orthogonal", {"stream": 6.0}, "not reproduced"),
    ],
)
def test_verdicts(words, measured, expected):
    assert verdict(words, **measured) == (expected, "")


def test_scale_may_matter_in_deep_models_only():
    assert verdict("scale matters", losses={"centring only, deep": 9.0}) == (
        "reproduced only if",
        "the model is deep",
    )


def test_charts_show_every_arm_the_drift_and_runs_that_diverged():
    shallow, deep, changes, gradients = STUDY.charts(STUDY.quick, [one_seed(), one_seed()])
    assert [name for name, _ in shallow.values + deep.values] == NAMES
    for chart in (changes, gradients):
        ((_, lines),) = chart.panels
        assert [line.label for line in lines] == ["LayerNorm", "RMSNorm", "hyperplane"]
        assert chart.reference == (1 / 64, "chance, 1/n")
    assert changes.panels[0][1][0].y == (0.25, 0.2)
    seed = one_seed(losses={"centring only, deep": None})
    seed["hyperplane"]["gradients"] = [0.1, None]
    _, deep, _, gradients = STUDY.charts(STUDY.quick, [seed])
    assert deep.values[-2] == ("centring only, deep", (math.inf,))
    assert gradients.panels[0][1][-1].y == (0.1, math.inf)


N = 24
TINY = {**STUDY.quick, "layers": 1, "deep_layers": 2, "width": N, "batch": 2, "window": 8, "steps": 3, "deep_steps": 2}
ONES = torch.full((N, 1), 1 / math.sqrt(N))


def model(norm=specs.TORCH_LAYER_NORM):
    return Transformer(TransformerConfig(vocabulary=11, context=6, width=N, layers=2, norm=norm))


def test_centring_is_layer_norm_without_its_division_and_deep_arms_are_deep():
    x = torch.randn(5, N)
    torch.testing.assert_close(Centring(N)(x), nk.layer_norm(x, (N,), eps=0.0) * x.std(-1, correction=0, keepdim=True))
    named = {arm.name: arm for arm in STUDY.arms(TINY)}
    assert named["LayerNorm"].choices["layers"] == 1
    assert named["LayerNorm, deep"].choices["layers"] == 2
    assert len(named) == 13


def test_a_share_lies_between_none_and_all_of_a_matrix_and_of_a_stream():
    along = ONES @ torch.randn(1, 5)
    across = nk.geometry.centre(torch.randn(5, N)).mT
    assert share([along], ONES) == pytest.approx(1)
    assert share([across], ONES) == pytest.approx(0, abs=1e-12)
    assert share([along, across], ONES) == pytest.approx(0.5)
    assert share([along, torch.zeros(N, 5)], ONES) == pytest.approx(1)
    assert math.isnan(share([torch.zeros(N, 5)], ONES))
    flat = model()
    for module in flat.modules():
        if isinstance(module, nn.Embedding):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
    assert stream_share(flat, torch.zeros(2, 4, dtype=torch.long), ONES) == pytest.approx(1)
    assert not any(module._forward_pre_hooks for module in flat.modules())


@pytest.mark.parametrize("count", [1, 4])
def test_a_random_matrix_has_one_nth_a_direction(count):
    directions = torch.linalg.qr(torch.randn(N, count)).Q
    # 40,000 squares for one direction: a relative deviation of sqrt(2 / 40000) = 0.7 %.
    assert share([torch.randn(N, 40_000)], directions) == pytest.approx(1 / N, rel=0.05)


def test_directions_are_those_that_norms_remove_and_writers_those_of_the_stream():
    torch.testing.assert_close(removed_directions(model()), ONES)
    hyper = model(random_hyperplanes(2, seed=3))
    assert torch.equal(removed_directions(hyper), hyper.final_norm.directions)
    found = dict(writers(model()))
    assert {path.rsplit(".", 1)[-1] for path in found} == {"embedding", "position", "out", "down"}
    assert len(found) == 2 + 2 * 2
    assert {len(matrix) for matrix in found.values()} == {N}


@pytest.mark.parametrize(
    ("norm", "is_felt"),
    [
        (specs.TORCH_LAYER_NORM, False),
        (random_hyperplanes(seed=0), False),
        (Centring, False),
        (specs.TORCH_RMS_NORM, True),
        (random_hyperplanes(seed=0, is_shared=False), True),
    ],
)
def test_writers_get_no_gradient_along_what_every_norm_removes(norm, is_felt):
    trained = model(norm)
    trained(torch.randint(11, (2, 6))).square().sum().backward()
    found = share(writing_gradients(trained), removed_directions(trained))
    assert (found > 1e-4) if is_felt else (found < 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LayerNorm", "16 directions", "centring only, deep"])
def test_an_arm_is_measured_alike_each_time(name):
    arm = next(arm for arm in STUDY.arms(TINY) if arm.name == name)
    first, second = (STUDY.measure(ArmContext(settings=TINY, seed=1), arm) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert len(first["losses"]) == (2 if name.endswith("deep") else 3)
    assert len(first["at"]) == len(first["changes"]) == len(first["gradients"])
    assert first["chance"] == 1 / N
