import json

import pytest
import torch

from normkit.study.arm_context import ArmContext
from normkit.study.experiments.invariances import NO_EPS, PUBLISHED, STUDY, build, errors
from tiny_study import decided_claim

TINY = {**STUDY.quick, "layers": 1, "width": 16, "batch": 2, "window": 8, "steps": 2}
LAB = ArmContext(settings=TINY, seed=3)
IDS = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(0))
ARMS = {arm.name: arm for arm in STUDY.arms(TINY)}


@pytest.mark.parametrize("norm", PUBLISHED)
def test_a_model_ignores_what_the_tables_say(norm):
    model = build(norm, LAB, eps=NO_EPS)
    before = {path: value.clone() for path, value in model.double().named_parameters()}
    found = errors(model, IDS, seed=1)
    assert {name for name, error in found.items() if error < 1e-12} == set(PUBLISHED[norm])
    assert min(error for name, error in found.items() if name not in PUBLISHED[norm]) > 1e-3
    assert all(torch.equal(value, before[path]) for path, value in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_eps_hides_what_a_layer_norm_ignores_of_scale_but_not_of_the_mean():
    found = errors(build("layer", LAB, eps=0.1), IDS, seed=1)
    assert found["weight matrix re-scaling"] > 1e-3
    assert found["weight matrix re-centring"] < 1e-12


@pytest.mark.parametrize("norm", ["batch", "none"])
def test_an_arm_measures_matrices_and_its_trained_model(norm):
    measured = STUDY.measure(LAB, ARMS[norm])
    json.dumps(measured)
    assert len(measured["model"]) == len(measured["model_eps"]) == 6
    assert len(measured["matrices"]) == (6 if norm == "batch" else 0)
    assert len(measured["losses"]) == 2


def test_the_tables_are_the_published_ones_and_charted_whole():
    assert {norm: len(ignored) for norm, ignored in PUBLISHED.items()} == {
        "batch": 4,
        "weight": 2,
        "layer": 4,
        "rms": 3,
        "none": 0,
    }
    assert [norm for norm in PUBLISHED if "weight matrix re-centring" in PUBLISHED[norm]] == ["layer"]
    assert [norm for norm in PUBLISHED if "dataset re-centring" in PUBLISHED[norm]] == ["batch"]
    matrices, model = STUDY.charts(TINY, list(invented().values()))
    assert matrices.columns == ("BatchNorm", "weight norm", "LayerNorm", "RMSNorm")
    assert model.columns == (*matrices.columns, "no norm")
    assert len(model.rows) == len(model.cells) == 6
    centred = dict(zip(model.columns, model.cells[1], strict=True))
    assert [name for name, (holds, _) in centred.items() if holds] == ["LayerNorm"]


def invented(norm="", row="", error=0.0):
    """What the tables say, but for one cell in the model."""
    arms = {}
    for name, ignored in PUBLISHED.items():
        cells = {each: 1e-15 if each in ignored else 0.3 for each in PUBLISHED["layer"] + PUBLISHED["batch"]}
        other = {**cells, row: error} if name == norm else cells
        arms[name] = {"matrices": cells if name != "none" else {}, "model": other, "model_eps": other}
    return dict.fromkeys(range(3), arms)


def verdicts(measured):
    return [decided_claim(claim, measured).verdict for claim in STUDY.claims]


def test_verdicts():
    held, failed = "reproduced", "not reproduced"
    assert verdicts(invented()) == [held, held, held]
    assert verdicts(invented("layer", "single case re-scaling", 1e-6)) == [failed, held, held]
    assert verdicts(invented("batch", "single case re-scaling", 1e-6)) == [failed, held, held]
    assert verdicts(invented("rms", "weight matrix re-centring", 1e-15)) == [held, failed, held]
    assert verdicts(invented("none", "dataset re-scaling", 0.0)) == [held, held, failed]
