import dataclasses

import pytest

from normkit.inspection.report.description import describe, describe_walk


def test_a_healthy_model_is_said_to_be_so_and_what_was_not_checked_is_counted(healthy):
    verdict = describe(healthy).verdict
    assert (verdict.tone, verdict.headline) == ("good", "No fault found")
    assert verdict.detail == "13 norms looked at: 8 checks clean, 1 not checked."


def test_what_needs_a_training_run_and_what_does_not_apply_is_told_apart(healthy):
    needs = {"needs_run": True, "status": "not checked", "reason": "it takes a run"}
    changes = {"F1": needs, "D1": needs, "D3": {"status": "not applicable", "reason": "no blocks"}}
    checks = tuple(dataclasses.replace(check, **changes.get(check.rule, {})) for check in healthy.checks)
    report = describe(dataclasses.replace(healthy, checks=checks))
    tally = "5 checks clean, 2 need a training run, 1 not checked."
    assert report.verdict.detail == f"13 norms looked at: {tally}"
    outcomes = report.part("checks").sections[1:]
    assert [(each.gist, [fact.label for part in each.sections for fact in part.facts]) for each in outcomes] == [
        ("need a training run", ["D1", "F1"]), ("not checked", ["E2"]), ("not applicable", ["D3"]),
    ]  # fmt: skip


def test_the_first_line_is_the_fault(faulty):
    verdict = describe(faulty).verdict
    assert (verdict.tone, verdict.headline) == ("error", "eps is not the config's, and 1 more fault")
    assert verdict.detail == "1 error, 1 warning; 6 checks clean, 1 not checked."
    alone = describe(dataclasses.replace(faulty, findings=faulty.findings[1:])).verdict
    assert (alone.tone, alone.headline) == ("warning", "attention logits above 100")


def test_notes_are_no_faults(faulty):
    notes = tuple(dataclasses.replace(finding, severity="note") for finding in faulty.findings)
    verdict = describe(dataclasses.replace(faulty, findings=notes)).verdict
    assert (verdict.tone, verdict.headline) == ("good", "No fault found; 2 things to know")


def test_places_of_a_finding_are_grouped_by_block(faulty):
    assert describe(faulty).findings[0].sites == ("transformer.h.{0-1}.ln_1", "transformer.h.0.ln_2")


def test_a_model_without_norms_is_not_called_healthy(empty):
    report = describe(empty)
    assert report.verdict.tone == "neutral"
    assert report.verdict.headline == "No norms"
    assert (report.facts, report.part("norms").sections, report.part("walk")) == ((), (), None)
    assert report.part("norms").tables[0].empty == "This model has no normalization layer that a spec describes."


def test_a_glance_is_five_facts_with_the_loss_first(healthy):
    model = dataclasses.replace(healthy.model, loss=3.2055)
    facts = [(fact.label, fact.value) for fact in describe(dataclasses.replace(healthy, model=model)).facts]
    assert facts == [
        ("loss", "3.205 nats per token on this text, perplexity 24.7"),
        ("norms", "13 LayerNorm, eps 1e-5"),
        ("blocks", "6 pre-norm; final norm transformer.ln_f"),
        ("input rows", "median rms 0.120 to 0.579; eps shortens median rows by up to 0.035 %"),
        ("attention", "logits reach 6.05, bound 11.5"),
    ]
    assert [fact.label for fact in describe(healthy).facts] == ["norms", "blocks", "input rows", "attention"]


def test_a_loss_far_above_any_perplexity_is_told(healthy):
    model = dataclasses.replace(healthy.model, loss=5000.0)
    said = describe(dataclasses.replace(healthy, model=model)).fact("loss")
    assert said == "5000.000 nats per token on this text"


def test_what_is_centred_oddly_is_told_at_a_glance(gauged):
    assert describe(gauged).facts[0].label == "centred oddly"


def test_a_missing_final_norm_and_mixed_placements_are_told(healthy):
    blocks = (dataclasses.replace(healthy.blocks[0], placement="residual-after-norm"), *healthy.blocks[1:])
    changed = dataclasses.replace(healthy, final_norm=None, blocks=blocks)
    facts = {fact.label: fact.value for fact in describe(changed).facts}
    assert facts["blocks"] == "5 pre-norm; 1 with the residual taken after the norm; no final norm"


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
    assert subtitle is None or report.gist == subtitle
    assert source is None or report.source == source


@pytest.mark.parametrize("name", ["", "GPT2LMHeadModel"])
def test_a_model_in_memory_has_its_class_once(healthy, name):
    report = describe(dataclasses.replace(healthy, model=dataclasses.replace(healthy.model, name=name)))
    assert report.title == "GPT2LMHeadModel"
    assert report.gist == "(gpt2), 331,776 parameters in float32, width 64"


def test_post_norm_blocks_need_no_final_norm(healthy):
    blocks = tuple(dataclasses.replace(block, placement="post") for block in healthy.blocks)
    facts = {
        fact.label: fact.value for fact in describe(dataclasses.replace(healthy, final_norm=None, blocks=blocks)).facts
    }
    assert facts["blocks"] == "6 post-norm"


def test_what_rounding_leaves_of_a_mean_is_0(healthy):
    steps = [
        dataclasses.replace(step, mean=mean)
        for step, mean in zip(healthy.walk.steps, (1e-9, 7e-18, 0.0, 0.1), strict=True)
    ]
    stages = (
        describe(dataclasses.replace(healthy, walk=dataclasses.replace(healthy.walk, steps=tuple(steps))))
        .part("walk")
        .sections
    )
    assert [stage.facts[0].value for stage in stages] == ["1e-9", "0", "0", "0.100"]


def test_the_walk_tells_its_defects(healthy):
    passage = describe(healthy).part("walk")
    assert [stage.title for stage in passage.sections] == ["raw", "centred", "scaled", "gain and bias"]
    assert [fact.value for fact in passage.facts] == [
        "1.2e-5 of its size",
        "3.1e-9",
        "1.3e-7 of the largest entry; one rounding is 5.96e-8",
    ]
    assert [stage.gist for stage in passage.sections[:2]] == ["-1.02 to 1.21", "-1.04 to 1.19"]
    uncentred = dataclasses.replace(healthy.walk, plane_defect=None)
    assert len(describe(dataclasses.replace(healthy, walk=uncentred)).part("walk").facts) == 2
    one_sided = dataclasses.replace(uncentred, ellipsoid_depth=None)
    assert [fact.value for fact in describe_walk(one_sided).facts] == [passage.facts[-1].value]


def test_a_walk_without_finite_entries_is_told(healthy):
    steps = tuple(dataclasses.replace(step, values=(float("nan"),)) for step in healthy.walk.steps)
    passage = describe(dataclasses.replace(healthy, walk=dataclasses.replace(healthy.walk, steps=steps))).part("walk")
    assert [stage.gist for stage in passage.sections] == ["none"] * 4


def test_a_slope_of_minus_nothing_is_0(healthy):
    blocks = tuple(dataclasses.replace(block, branch_slope=-0.001) for block in healthy.blocks)
    table = (
        describe(dataclasses.replace(healthy, blocks=blocks))
        .part("blocks")
        .tables[0]
        .only("path", "output", "branch", "in")
    )
    assert [tuple(cell.text for cell in row) for row in table.groups] == [
        ("transformer.h.{0-5}", "1.00", "0.00", "0.120 to 0.503"),
    ]  # fmt: skip


def test_a_model_of_gated_norms_alone_has_norms(empty):
    gated = dataclasses.replace(empty, unrecognised=(("mixer.norm", "Gated: gated norm: gate multiplies elementwise"),))
    report = describe(gated)
    assert (report.verdict.tone, report.verdict.headline) == ("good", "No fault found")
    assert report.verdict.detail.startswith("1 other norm looked at: ")
    assert [(fact.label, fact.value) for fact in report.facts] == [("other norms", "1 Gated, which no spec describes")]
