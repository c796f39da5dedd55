import math

import pytest
from rich.console import Console

from normkit.study.chart import Bars
from normkit.study.report import describe_study, summary, write, write_index
from normkit.study.result import Arm, Claim, Condition, Study, StudyResult, decide


def invented(*values, low=1.0, regime="", trouble=None, findings=(), **settings):
    """A study of one claim, with what one arm gave for each seed."""
    condition = Condition(
        says="the <b>loss</b> is at least 1",
        statistic=lambda paired: paired["only"]["loss"],
        low=low,
        published="2.0",
        source="theory",
        regime=regime,
    )
    study = Study(
        name="invented",
        title="Invented",
        question="Is it so?",
        claims=(Claim(says="it is so", source="Nobody 2020", conditions=(condition,)),),
        quick={"seeds": 3, "learning_rate": 0.1},
        full={},
        arms=lambda _settings: (Arm(name="only"),),
        measure=lambda _lab, _arm: {},
        charts=lambda _settings, seeds: (
            Bars(
                name="loss",
                title="Loss",
                caption="Lower is better.",
                description="One arm.",
                label="nats",
                values=(("only", tuple(paired["only"]["loss"] for paired in seeds)),),
            ),
        ),
        data="nothing",
        regime="On paper.",
    )
    measured = {seed: {"only": {"loss": value, "findings": list(findings)}} for seed, value in enumerate(values)}
    return StudyResult(
        study=study,
        settings={**study.quick, **settings},
        measured=measured,
        decided=decide(study.claims, measured),
        seconds=12.34,
        where={"torch": "2.13.0"},
        trouble=trouble or {},
    )


def text_of(*results):
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(summary(results))
    return capture.get()


def test_the_terminal_shows_published_beside_measured_and_counts_verdicts():
    text = text_of(invented(1.5, 1.6, 1.7), invented(0.5, 0.4, 0.6))
    lines = text.splitlines()
    assert "+ reproduced" in lines
    assert "! not reproduced" in lines
    row = next(line for line in lines if line.split()[-1:] == ["yes"])
    assert [part.strip() for part in row.split("  ") if part.strip()][1:] == [
        "2.0; our bound",
        "1.60",
        "1.35 to 1.85",
        "3/3",
        "yes",
    ]
    assert lines[-1] == "indicative, 3 seeds: 2 claims: 1 reproduced, 1 not reproduced"
    more = text_of(invented(1.5, 1.6, 1.7), invented(0.5, 0.4, 0.6, 0.5, 0.4)).splitlines()
    assert more[-1] == "indicative, 3 to 5 seeds: 2 claims: 1 reproduced, 1 not reproduced"
    assert max(map(len, lines)) <= 100


def test_a_number_that_is_missing_is_none_and_open():
    (claim,) = describe_study(invented(1.5, math.nan)).part("claims").sections
    assert (claim.verdict.headline, claim.verdict.tone) == ("not run", "neutral")
    assert [cell.text for cell in claim.tables[0].rows[0][2:6]] == ["none", "", "1/2", "open"]


def test_what_was_not_run_is_told_with_its_reason():
    text = text_of(invented(1.5, trouble={"digits": "needs scikit-learn"}))
    assert "not run: digits: needs scikit-learn" in text


def test_the_command_says_what_was_changed():
    assert describe_study(invented(1.5, 1.5)).part("again").notes[0] == "normkit study invented --seeds 2"
    changed = describe_study(invented(1.5, learning_rate=0.01, layers=(2, 4)))
    assert (
        changed.part("again").notes[0] == "normkit study invented --seeds 1 --set learning_rate=0.01 --set layers=2,4"
    )


def test_findings_of_the_probe_are_counted_by_arm():
    (fact,) = (
        describe_study(invented(1.5, 2.0, findings=[{"rule": "D1", "severity": "note", "sites": []}]))
        .part("probe")
        .facts
    )
    assert (fact.label, fact.value) == ("D1 (note) with 2 seeds", "all arms")
    (fact,) = describe_study(invented(1.5)).part("probe").facts
    assert fact.label == "no finding"


@pytest.mark.slow
def test_the_page_is_whole_escaped_and_repeats_its_bytes(tmp_path):
    result = invented(1.5, 2.0, 1.25)
    page = write(result, tmp_path)
    text = page.read_text()
    assert page == tmp_path / "index.html"
    assert "the &lt;b&gt;loss&lt;/b&gt; is at least 1" in text
    assert "0.635 to 2.53" in text
    assert "<svg" in text
    assert (tmp_path / "loss.svg").read_text().startswith("<?xml")
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert write(result, tmp_path).read_text() == text


def test_the_index_links_each_study(tmp_path):
    text = write_index([invented(1.5, 1.5), invented(0.5, 0.5)], tmp_path).read_text()
    assert text.count('href="invented/index.html"') == 2
    assert "2 claims: 1 reproduced, 1 not reproduced" in text


@pytest.mark.parametrize(("values", "words"), [((1.5,) * 10, "reproduced"), ((0.5,) * 10, "not reproduced")])
def test_the_headline_counts(values, words):
    assert describe_study(invented(*values)).part("claims").title == f"1 claim: 1 {words}"
