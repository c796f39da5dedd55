import json
import math

import pytest
import torch
from torch import nn

import normkit as nk
from normkit import specs
from normkit.study import Transformer, TransformerConfig
from normkit.study.experiments.centring import STUDY
from normkit.study.experiments.centring_arms import (
    Centring,
    arms,
    measure,
    removed_directions,
    share,
    stream_share,
    writers,
    writing_gradients,
)
from normkit.study.hyperplane_norm import random_hyperplanes
from normkit.study.laboratory import Laboratory

N = 24
TINY = {**STUDY.quick, "layers": 1, "deep_layers": 2, "width": N, "batch": 2, "window": 8, "steps": 3, "deep_steps": 2}
ONES = torch.full((N, 1), 1 / math.sqrt(N))


def model(norm=specs.TORCH_LAYER_NORM):
    return Transformer(TransformerConfig(vocabulary=11, context=6, width=N, layers=2, norm=norm))


def test_centring_is_layer_norm_without_its_division():
    x = torch.randn(5, N)
    torch.testing.assert_close(Centring(N)(x), nk.layer_norm(x, (N,), eps=0.0) * x.std(-1, correction=0, keepdim=True))


def test_the_share_of_a_matrix_lies_between_none_and_all():
    along = ONES @ torch.randn(1, 5)
    across = nk.geometry.centre(torch.randn(5, N)).mT
    assert share([along], ONES) == pytest.approx(1)
    assert share([across], ONES) == pytest.approx(0, abs=1e-12)
    assert share([along, across], ONES) == pytest.approx(0.5)
    assert share([along, torch.zeros(N, 5)], ONES) == pytest.approx(1)
    assert math.isnan(share([torch.zeros(N, 5)], ONES))


@pytest.mark.parametrize("count", [1, 4])
def test_a_random_matrix_has_one_nth_a_direction(count):
    directions = torch.linalg.qr(torch.randn(N, count)).Q
    # 40,000 squares for one direction: a relative deviation of sqrt(2 / 40000) = 0.7 %.
    assert share([torch.randn(N, 40_000)], directions) == pytest.approx(1 / N, rel=0.05)


def test_the_direction_is_all_ones_unless_the_norms_have_another():
    torch.testing.assert_close(removed_directions(model()), ONES)
    hyper = model(random_hyperplanes(2, seed=3))
    assert torch.equal(removed_directions(hyper), hyper.final_norm.directions)


def test_writers_are_the_embeddings_and_the_ends_of_branches():
    found = dict(writers(model()))
    assert {path.rsplit(".", 1)[-1] for path in found} == {"embedding", "position", "out", "down"}
    assert len(found) == 2 + 2 * 2
    assert {len(matrix) for matrix in found.values()} == {N}


def test_the_stream_of_a_constant_embedding_lies_along_all_ones():
    flat = model()
    for module in flat.modules():
        if isinstance(module, nn.Embedding):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
    assert stream_share(flat, torch.zeros(2, 4, dtype=torch.long), ONES) == pytest.approx(1)
    assert not any(module._forward_pre_hooks for module in flat.modules())


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


def test_deep_arms_are_deep():
    named = {arm.name: arm for arm in arms(TINY)}
    assert named["LayerNorm"].choices["layers"] == 1
    assert named["LayerNorm, deep"].choices["layers"] == 2
    assert len(named) == 9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LayerNorm", "16 directions", "centring only, deep"])
def test_an_arm_is_measured_alike_each_time(name):
    arm = next(arm for arm in arms(TINY) if arm.name == name)
    first, second = (measure(Laboratory(settings=TINY, seed=1), arm) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)
    assert len(first["losses"]) == (2 if name.endswith("deep") else 3)
    assert len(first["at"]) == len(first["changes"]) == len(first["gradients"])
    assert first["chance"] == 1 / N
