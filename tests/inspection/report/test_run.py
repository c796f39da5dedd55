import dataclasses
import json
import math

import pytest

import imagined_runs
from normkit.inspection.report.description import describe
from normkit.inspection.report.run import describe_run, describe_steps
from normkit.measurement.training import Series


def watched(inspection, kind, **options):
    return dataclasses.replace(inspection, training=kind(inspection, **options))


def said(facts):
    return {fact.label: fact.value for fact in facts}


def test_an_inspection_without_a_run_says_nothing_of_one(healthy):
    report = describe(healthy)
    assert report.part("run") is None
    assert not any("run" in line.split() for line in report.part("method").notes[-1:])
    plain = healthy.to_json()
    assert plain.pop("training") is None
    assert "run" not in plain


@pytest.mark.parametrize(
    ("changes", "tone", "headline", "detail"),
    [
        ({}, "good", "Ran to its end, step 436",
         "437 steps seen, the norms measured 18 times, every 25 steps. Nothing left its usual range."),
        ({"reason": "asked", "ranks": 4, "reports": 1}, "good", "Watched to step 436",
         "437 steps seen, the norms measured once, 4 processes pooled. Nothing left its usual range."),
        ({"reason": "the run was left by KeyError", "reports": 0}, "neutral",
         "The run was left by KeyError at step 436", "437 steps seen."),
        ({"reports": 0, "series": ()}, "neutral", "The run was not measured",
         "437 steps passed; why nothing was measured is told under “not watched”."),
        ({"reason": "asked", "steps": 1, "reports": 1}, "good", "One step watched",
         "Forward and backward, the norms measured once. Nothing left its usual range."),
        ({"steps": 0}, "neutral", "No step was seen", "The watch ended before the first one did."),
    ],
)  # fmt: skip
def test_what_happened_in_one_line(healthy, changes, tone, headline, detail):
    training = dataclasses.replace(imagined_runs.calm(healthy), **changes)
    verdict = describe_run(training).verdict
    assert (verdict.tone, verdict.headline, verdict.detail) == (tone, headline, detail)


def test_a_run_in_which_nothing_moved_is_not_called_good_beside_an_error(faulty):
    run = describe(watched(faulty, imagined_runs.calm)).part("run")
    assert (run.verdict.tone, run.verdict.detail.endswith("every 25 steps.")) == ("neutral", True)
    notes = tuple(dataclasses.replace(finding, severity="note") for finding in faulty.findings)
    noted = dataclasses.replace(faulty, findings=notes)
    assert describe(watched(noted, imagined_runs.calm)).part("run").verdict.tone == "good"


def test_a_spike_began_somewhere_before_it_was_noticed(healthy):
    run = describe_run(imagined_runs.spike(healthy))
    assert (run.verdict.tone, run.verdict.headline) == ("warning", "Loss spike at step 412")
    assert run.verdict.detail.endswith("It began 3 steps earlier.")
    began = said(run.facts)
    assert began["began at"] == "step 409, the update of a parameter"
    assert began["where"] == "transformer.h.5.mlp.c_fc.weight"
    assert began["measured"].startswith("update ratio 0.132")


@pytest.mark.parametrize("kind", ["non-finite loss", "non-finite in the backward pass"])
def test_numbers_that_are_none_are_an_error(healthy, kind):
    training = imagined_runs.spike(healthy)
    training = dataclasses.replace(training, origin=dataclasses.replace(training.origin, kind=kind))
    assert describe_run(training).verdict.tone == "error"


def test_a_no_is_good_news_only_where_nothing_moved(healthy):
    calm, spike = (
        describe_run(kind(healthy)).part("answers").sections for kind in (imagined_runs.calm, imagined_runs.spike)
    )
    assert [(reply.verdict.headline, reply.verdict.tone) for reply in calm] == [("no", "good")] * 4
    assert [(reply.verdict.headline, reply.verdict.tone) for reply in spike] == [
        ("no", "neutral"), ("yes", "warning"), ("yes", "warning"), ("unknown", "note"),
    ]  # fmt: skip
    assert [reply.title for reply in spike] == list(imagined_runs.QUESTIONS)
    assert spike[1].notes == ("transformer.h.5.mlp.c_fc.weight",)


def test_the_verdict_of_all_is_not_healthy_where_the_run_is_not(healthy, faulty, empty):
    report = describe(watched(healthy, imagined_runs.spike))
    assert (report.verdict.tone, report.verdict.headline) == ("warning", "Loss spike at step 412")
    assert report.verdict.detail == "No finding: 8 checks clean, 1 not checked."
    assert describe(watched(healthy, imagined_runs.calm)).verdict.headline == "No fault found"
    assert (
        describe(watched(faulty, imagined_runs.spike)).verdict.headline == "eps is not the config's, and 1 more fault"
    )
    assert describe(watched(healthy, imagined_runs.bare)).verdict.headline == "No step was seen"
    assert describe(watched(empty, imagined_runs.calm)).verdict.headline == "No norms"


def test_a_glance_at_the_run(healthy):
    assert said(describe_steps(imagined_runs.spike(healthy)).facts) == {
        "loss": "5.50 at step 0, 9.08 at step 436; 5.55 is chance among 256 entries",
        "gradient norm": "2.50 at step 0, 9.62 at step 436",
        "update ratio": "0.132 at transformer.h.5.mlp.c_fc.weight, then 0.0100 at transformer.h.4.mlp.c_fc.weight",
        "logit bound": "233 at step 425",
    }
    assert describe_steps(imagined_runs.bare(healthy)).facts == ()
    assert said(describe_steps(imagined_runs.broken(healthy)).facts)["gradient norm"] == "NaN at step 0"
    assert said(describe_steps(imagined_runs.short(healthy)).facts)["gradient norm"] == (
        "2.50 at step 0, inf at step 2"
    )


def test_a_glance_at_headroom_and_z_scores(healthy):
    ends = {"ln_1": (9.0, 3.0), "ln_2": (2.0, 4.0), "nowhere": (1.0, math.nan)}
    found = [Series(quantity="headroom", path=path, steps=(0, 25), values=values) for path, values in ends.items()]
    found.append(Series(quantity="loss z", path="", steps=(16, 17, 18), values=(0.5, 8.25, -0.5)))
    training = dataclasses.replace(imagined_runs.calm(healthy), parameters=(), series=tuple(found))
    shown = said(describe_steps(training).facts)
    assert shown["headroom"] == "3.00 bits at step 25, the least of a norm: ln_1"
    loss = Series(quantity="loss", path="", steps=(18,), values=(2.0,))
    training = dataclasses.replace(training, series=(loss, *found))
    assert said(describe_steps(training).facts)["loss, z-score"] == (
        "at most 8.25 at step 17, -0.500 at step 18; above 6 is a jump"
    )


def test_how_it_was_watched_and_what_could_not_be(healthy):
    assert said(describe_steps(imagined_runs.short(healthy)).sections[0].facts) == {
        "optimizer": "AdamW, learning rate 1e-3, betas 0.9 and 0.95, 38 parameters in 2 groups",
        "processes": "2, their numbers pooled",
        "watch": "observer verified: 3 known shards in, largest error 2.1e-7 of the float64 truth",
    }
    (remark,) = describe_steps(imagined_runs.bare(healthy)).sections[0].facts
    assert (remark.label, remark.value[:30]) == ("not watched", "Registered after torch.compile")


def test_parameters_stand_worst_first_biases_and_frozen_ones_last(healthy):
    training = imagined_runs.calm(healthy)
    odd = (
        imagined_runs.parameter("frozen", trained=False, gradient_steps=0, gradient_rms=math.nan,
                               update_ratio=math.nan, learning_rate=math.nan),
        imagined_runs.parameter("broken", gradient_rms=math.nan, update_ratio=1e-9),
        imagined_runs.parameter("endless", update_ratio=math.inf),
    )  # fmt: skip
    table = describe_steps(dataclasses.replace(training, parameters=(*training.parameters, *odd))).tables[0]
    names = [row[0].text for row in table.rows]
    assert names[:3] == ["broken", "endless", "transformer.h.5.mlp.c_fc.weight"]
    assert names[-1] == "frozen"
    assert names[-14:-1] == [f"{site.path}.bias" for site in healthy.sites]
    cells = {row[0].text: dict(zip((c.key for c in table.columns), row, strict=True)) for row in table.rows}
    assert cells["frozen"]["kind"].text == "weight, not trained"
    assert [cells["frozen"][key].text for key in ("gradient", "update", "rate", "decay", "block")] == [
        "none", "none", "none", "0.100", "none",
    ]  # fmt: skip
    assert cells["broken"]["gradient"].text == "NaN"
    assert cells["endless"]["update"].text == "inf"


def test_the_rows_that_stand_out_are_the_first_of_them(healthy):
    (table,) = describe_steps(imagined_runs.calm(healthy)).tables
    assert table.groups == table.rows[:12]
    assert len(table.rows) == 33


def test_columns_of_updates_are_left_out_where_none_was_measured(healthy):
    keys = [column.key for column in describe_steps(imagined_runs.broken(healthy)).tables[0].columns]
    assert keys == ["path", "kind", "block", "rms", "gradient", "rate", "decay"]


def test_without_an_optimizer_nothing_is_said_to_be_left_untrained(healthy):
    training = imagined_runs.calm(healthy)
    none = tuple(dataclasses.replace(each, trained=False, learning_rate=math.nan) for each in training.parameters)
    steps = describe_steps(dataclasses.replace(training, parameters=none, optimizers=()))
    assert "update ratio" not in said(steps.facts)
    (table,) = steps.tables
    assert [column.key for column in table.columns] == ["path", "kind", "block", "rms", "gradient"]
    assert {row[1].text for row in table.rows} == {"embedding", "gain", "bias of a norm", "weight"}


@pytest.mark.slow
def test_a_run_on_a_real_model_goes_through_json_with_every_odd_number(tiny):
    for kind in (imagined_runs.spike, imagined_runs.broken, imagined_runs.short, imagined_runs.bare):
        plain = json.loads(json.dumps(watched(tiny, kind).to_json(), allow_nan=False))
        assert [answer["verdict"] for answer in plain["training"]["answers"]] == [
            answer.verdict for answer in kind(tiny).answers
        ]
        for told, measured in zip(plain["training"]["series"], kind(tiny).series, strict=True):
            assert tuple(told["steps"]) == measured.steps
            assert [float(value) for value in told["values"]] == pytest.approx(measured.values, nan_ok=True)
    assert plain["training"]["origin"] is None
    assert watched(tiny, imagined_runs.broken).to_json()["training"]["series"][0]["values"] == ["nan"]


def test_the_method_tells_how_the_run_was_measured(healthy):
    assert describe(watched(healthy, imagined_runs.calm)).part("method").notes[-1].startswith("What began it")
    assert len(describe(healthy).part("method").notes) + 4 == len(
        describe(watched(healthy, imagined_runs.calm)).part("method").notes
    )
