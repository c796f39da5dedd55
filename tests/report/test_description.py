import dataclasses

import pytest

from normkit.report.description import describe, describe_walk


def test_a_healthy_model_is_said_to_be_so_and_what_was_not_checked_is_counted(healthy):
    verdict = describe(healthy).verdict
    assert (verdict.tone, verdict.headline) == ("good", "Healthy")
    assert verdict.detail == "Nothing wrong was found in 13 norms: 8 checks clean, 1 not checked."


def test_findings_are_counted_by_severity_worst_first(faulty):
    verdict = describe(faulty).verdict
    assert (verdict.tone, verdict.headline) == ("error", "1 error, 1 warning")
    notes = tuple(dataclasses.replace(finding, severity="note") for finding in faulty.findings)
    assert describe(dataclasses.replace(faulty, findings=notes)).verdict.headline == "2 notes"


def test_a_model_without_norms_is_not_called_healthy(empty):
    report = describe(empty)
    assert report.verdict.tone == "neutral"
    assert report.verdict.headline == "No norms"
    assert (report.glance, report.formulas, report.passage) == ((), (), None)
    assert report.sites.empty == "This model has no normalization layer that a spec describes."


def test_a_glance_tells_the_extremes(healthy):
    facts = {fact.label: fact.value for fact in describe(healthy).glance}
    assert facts == {
        "norms": "13 LayerNorm, eps 1e-5",
        "blocks": "6 pre-norm; final norm transformer.ln_f",
        "input rows": "median rms 0.120 to 0.579; 0.30 to 2.0 % of their energy along all-ones",
        "eps": "shortens median rows by up to 0.035 %, no row by over 1 %",
        "attention": "logits reach 6.05, bound 11.5",
        "geometry": "median rows turn 8.0 to 20.0°; lengths differ 1.80 to 3.00-fold in, 1.15 out",
        "images": "2.40 to 3.00 times as long as thick",
        "keys": "62.5 to 100 % of 16 sampled in each of 24 heads can be selected",
        "gain outliers": "feature 11 at 4 norms",
    }


def test_rows_that_eps_shortens_are_told(faulty):
    facts = {fact.label: fact.value for fact in describe(faulty).glance}
    assert facts["eps"] == "shortens median rows by up to 3.3 %, up to 40.0 % of rows by over 1 %"


def test_a_missing_final_norm_and_mixed_placements_are_told(healthy):
    blocks = (dataclasses.replace(healthy.blocks[0], placement="residual-after-norm"), *healthy.blocks[1:])
    changed = dataclasses.replace(healthy, final_norm=None, blocks=blocks)
    facts = {fact.label: fact.value for fact in describe(changed).glance}
    assert facts["blocks"] == "5 pre-norm; 1 residual taken after the norm; no final norm"


@pytest.mark.parametrize(
    ("changes", "subtitle", "source"),
    [
        ({}, "GPT2LMHeadModel (gpt2), 331,776 parameters in float32, width 64", "the demo's own text: 2,048 tokens"),
        ({"architecture": "", "width": 0}, "GPT2LMHeadModel, 331,776 parameters in float32", None),
        ({"source": "", "padding": 12}, None, "the given batches: 2,048 tokens, 12 padding tokens left out"),
    ],
)
def test_the_heading_leaves_out_what_is_not_known(healthy, changes, subtitle, source):
    report = describe(dataclasses.replace(healthy, model=dataclasses.replace(healthy.model, **changes)))
    assert subtitle is None or report.subtitle == subtitle
    assert source is None or report.source == source


def test_post_norm_blocks_need_no_final_norm(healthy):
    blocks = tuple(dataclasses.replace(block, placement="post") for block in healthy.blocks)
    facts = {
        fact.label: fact.value for fact in describe(dataclasses.replace(healthy, final_norm=None, blocks=blocks)).glance
    }
    assert facts["blocks"] == "6 post-norm"


def test_what_rounding_leaves_of_a_mean_is_0(healthy):
    steps = [
        dataclasses.replace(step, mean=mean)
        for step, mean in zip(healthy.walk.steps, (1e-9, 7e-18, 0.0, 0.1), strict=True)
    ]
    stages = describe(
        dataclasses.replace(healthy, walk=dataclasses.replace(healthy.walk, steps=tuple(steps)))
    ).passage.stages
    assert [stage.facts[0].value for stage in stages] == ["1e-9", "0", "0", "0.100"]


def test_the_walk_tells_its_defects(healthy):
    passage = describe(healthy).passage
    assert [stage.name for stage in passage.stages] == ["raw", "centred", "scaled", "gain and bias"]
    assert [fact.value for fact in passage.facts] == [
        "1.2e-5 of its size",
        "3.1e-9",
        "1.3e-7 of the largest entry; one rounding is 5.96e-8",
    ]
    # The largest and the smallest raw entry, centred and scaled: (1.21 - 0.0212) * 1.523, (-1.02 - 0.0212) * 1.523.
    assert (passage.lowest, passage.highest) == pytest.approx((-1.5857, 1.8105), abs=1e-4)
    uncentred = dataclasses.replace(healthy.walk, plane_defect=None)
    assert len(describe(dataclasses.replace(healthy, walk=uncentred)).passage.facts) == 2
    one_sided = dataclasses.replace(uncentred, ellipsoid_depth=None)
    assert [fact.value for fact in describe_walk(one_sided).facts] == [passage.facts[-1].value]


def test_a_walk_without_finite_entries_is_told(healthy):
    steps = tuple(dataclasses.replace(step, values=(float("nan"),)) for step in healthy.walk.steps)
    passage = describe(dataclasses.replace(healthy, walk=dataclasses.replace(healthy.walk, steps=steps))).passage
    assert (passage.lowest, passage.highest) == (-1.0, 1.0)
