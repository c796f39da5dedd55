import pytest

from normkit.study.experiments.batch_against_layer import STUDY
from normkit.study.laboratory import Laboratory

TINY = {
    **STUDY.quick,
    "width": 8,
    "layers": 1,
    "steps": 1,
    "batch_sizes": (1, 2, 64),
    "channels": 1,
    "image_steps": 1,
    "sequence_steps": 1,
    "text_steps": 1,
    "text_layers": 1,
    "text_batch": 2,
    "window": 8,
}


def test_names_of_arms_are_unique_and_follow_the_settings():
    names = [arm.name for arm in STUDY.arms(TINY)]
    assert len(names) == len(set(names))
    assert {name for name in names if name.startswith("MLP: BatchNorm")} == {
        f"MLP: BatchNorm, batch {size}" for size in (1, 2, 64)
    }
    assert "Transformer: LayerNorm, rate 0.003" in names
    assert len(STUDY.arms(STUDY.quick)) == 24 + 6 + 4 + 4 + 8 + 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_condition_but_those_of_sizes_left_out_finds_its_arms():
    lab = Laboratory(settings=TINY, seed=0)
    measured = {arm.name: STUDY.measure(lab, arm) for arm in STUDY.arms(TINY)}
    for claim in STUDY.claims:
        for condition in claim.conditions:
            if "2 or 4" not in condition.says and "every batch size" not in condition.says:
                assert isinstance(condition.statistic(measured), float), condition.says
    charts = STUDY.charts(TINY, {0: measured})
    assert len({chart.name for chart in charts}) == len(charts) == 7
