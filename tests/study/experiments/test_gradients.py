import pytest

from normkit.study.experiments.gradient_measures import FACTORS
from normkit.study.experiments.gradients import STUDY
from normkit.study.result import decide


def invented(losses=(), rough=(1.0, 1.0), start=(1.0, 1.0), spread=(0.1, 100.0), **changed):
    """All that theory says, with LayerNorm and no norm alike in the rest; pairs are LayerNorm's and no norm's."""
    arms = {
        norm: {
            "held_out": dict(losses).get(norm, 2.0),
            "projected_without_eps": 1e-15,
            "exact_with_eps": 1e-15,
            "projected_with_eps": 0.2,
            "removed": 0.03,
            "at": [0, 5],
            "roughness": [rough[norm == "no norm"]] * 2,
            "surprise": [rough[norm == "no norm"]] * 2,
        }
        for norm in ("LayerNorm", "RMSNorm", "detached", "no norm")
    }
    deep = {
        f"{norm}, deep": {
            "roughness": start[norm == "no norm"],
            "surprise": start[norm == "no norm"],
            "scale_spread": spread[norm == "no norm"],
        }
        for norm in arms
    }
    turning = {
        "groups": [["a"], ["b"]],
        "expected_groups": 2,
        "cosines": [1e-16, 1e-17],
        "products": [1e-9, 1e-8],
        "by_gradient": [[factor**-2.0 for factor in FACTORS]] * 2,
        "by_sign": [[factor**-1.0 for factor in FACTORS]] * 2,
        "growth_errors": [1e-4, 1e-3],
    }
    arms["RMSNorm"] |= {name: value for name, value in changed.items() if name in arms["RMSNorm"]}
    turning |= {name: value for name, value in changed.items() if name in turning}
    return {seed: {**arms, **deep, "gradient descent": turning} for seed in range(3)}


def verdict(words, measured):
    (claim,) = (claim for claim in STUDY.claims if words in claim.says)
    decided = decide(claim, measured)
    return decided.verdict, decided.only_if


HELD, FAILED = ("reproduced", ""), ("not reproduced", "")


@pytest.mark.parametrize(
    ("words", "measured", "expected"),
    [
        ("tangent space", invented(), HELD),
        ("tangent space", invented(exact_with_eps=1e-6), FAILED),
        ("tangent space", invented(projected_without_eps=1e-6), FAILED),
        ("derivatives of mean", invented(losses={"detached": 2.3}), HELD),
        ("derivatives of mean", invented(losses={"detached": 2.3, "no norm": 2.25}), FAILED),
        ("only turns", invented(), HELD),
        ("only turns", invented(groups=[["a"]]), FAILED),
        ("only turns", invented(cosines=[0.1, 0.0]), FAILED),
        ("only turns", invented(products=[0.1, 0.0]), FAILED),
        ("only turns", invented(growth_errors=[0.5, 0.0]), FAILED),
        ("only turns", invented(by_gradient=[[factor**-1.0 for factor in FACTORS]]), FAILED),
        ("only turns", invented(by_sign=[[factor**-2.0 for factor in FACTORS]]), FAILED),
        ("smooths", invented(rough=(1.0, 2.0), start=(1.0, 2.0)), HELD),
        ("smooths", invented(), FAILED),
        ("smooths", invented(start=(1.0, 2.0)), ("reproduced only if", "the model is deep and at its start")),
        ("smooths", invented(rough=(1.0, 2.0)), ("reproduced only if", "the model is shallow, through training")),
        ("less sensitive", invented(), HELD),
        ("less sensitive", invented(spread=(2.0, 100.0)), FAILED),
        ("less sensitive", invented(spread=(0.1, 0.5)), FAILED),
    ],
)
def test_verdicts(words, measured, expected):
    assert verdict(words, measured) == expected


def test_a_path_that_is_not_finite_leaves_the_smoothness_open():
    measured = invented(rough=(1.0, None), start=(1.0, None))
    assert verdict("smooths", measured) == ("not run", "")


def test_charts_show_losses_landscapes_and_turning():
    bars, landscape, turning = STUDY.charts(STUDY.quick, invented(rough=(1.0, None)))
    assert [name for name, _ in bars.values] == ["LayerNorm", "RMSNorm", "detached", "no norm"]
    assert len(landscape.panels) == 2
    assert [line.label for line in turning.panels[0][1]] == ["gradient", "signs"]


def test_charts_leave_out_what_was_not_run():
    whole = invented()
    partial = {seed: {name: paired[name] for name in ("LayerNorm", "detached")} for seed, paired in whole.items()}
    bars, landscape = STUDY.charts(STUDY.quick, partial)
    assert [name for name, _ in bars.values] == ["LayerNorm", "detached"]
    assert [line.label for line in landscape.panels[0][1]] == ["LayerNorm", "detached"]
