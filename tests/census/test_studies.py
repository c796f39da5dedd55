"""The pages of the studies: an index and one page per study, with what the studies ask."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

import studies
from normkit.study.catalogue import NAMES, load

CONDITION = {
    "says": "the ratio |a| / |b| is at most 1",
    "published": "",
    "judged": True,
    "holds": None,
    "mean": 0.5,
    "interval": [0.25, "inf"],
    "bound": "ours",
    "values": {"0": 0.5, "1": 2.0},
    "within": 1,
    "effect_size": 0.5,
    "p_value": 0.25,
}
CLAIM = {
    "says": "Norms help",
    "source": "a paper, table 1",
    "ledger": ["C70"],
    "verdict": "reproduced only if",
    "only_if": "the model is deep",
    "control": None,
    "conditions": [CONDITION, {**CONDITION, "published": "2", "judged": False, "bound": "none"}],
}
STUDY = {
    "study": "depth",
    "title": "Depth",
    "question": "Do norms help?",
    "data": "bytes",
    "regime": "2 layers.",
    "settings": {"seeds": 3},
    "indicative": "indicative, 1 seed",
    "conditions_sha256": "0" * 64,
    "tests": 1,
    "where": {"torch": "2.13.0", "cpu": "x86_64"},
    "trouble": {},
    "claims": [CLAIM],
    "measurements": {"0": {"left": {"findings": [{"rule": "F2", "severity": "warning"}]}, "right": {"findings": []}}},
}


def test_the_index_has_a_row_for_each_claim() -> None:
    index = studies.pages([studies.shown(STUDY)], [])["index"]
    assert "| [depth](depth.md) | Norms help | reproduced only if the model is deep | 1 |  |" in index
    assert " reproduced in a regime only" in index


def test_a_run_with_other_seeds_is_kept_beside_the_first_and_compared(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(studies, "RESULTS", tmp_path / "kept")
    fixed = hashlib.sha256((studies.CONDITIONS / "depth.json").read_bytes()).hexdigest()
    later = {"100": {"left": {}}, "101": {"left": {}}}
    again = {**STUDY, "conditions_sha256": fixed, "measurements": later}
    (tmp_path / "depth").mkdir()
    (tmp_path / "depth" / "results.json").write_text(json.dumps(again))
    studies.keep(tmp_path)
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["depth-from-100.json"]
    first = studies.shown(STUDY)
    page = studies.pages([first], [studies.shown(again)])["depth"]
    assert "**Again with seeds 100 to 101**: the same verdict on 1 claim. [The value of each" in page
    other = studies.shown({**again, "claims": [{**CLAIM, "verdict": "undecided", "only_if": ""}]})
    written = studies.pages([first], [other])
    assert "1 of the studies were run a second time, with ten other seeds: 0 of their 1 claims" in written["index"]
    page = written["depth"]
    assert 'seeds 100 to 101**: other verdicts on 1 of 1 claim: "Norms help" is undecided there. [' in page


def test_results_under_other_conditions_are_refused_and_nothing_is_kept(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(studies, "RESULTS", tmp_path / "kept")
    (tmp_path / "depth").mkdir()
    (tmp_path / "depth" / "results.json").write_text(json.dumps(STUDY))
    with pytest.raises(SystemExit, match="depth: the conditions of the results are not those of its file"):
        studies.keep(tmp_path)
    assert not (tmp_path / "kept").exists()


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected the folder `study`"):
        studies.keep(tmp_path)


def test_a_page_has_the_claim_its_conditions_and_what_inspect_says() -> None:
    page = studies.pages([studies.shown(STUDY)], [])["depth"]
    assert page.startswith("# Depth\n\nDo norms help?")
    assert "## Norms help\n\n**reproduced only if the model is deep**. Source: a paper, table 1. Decides C70" in page
    assert r"| the ratio \|a\| / \|b\| is at most 1 | no number; our bound | 0.500 [0.250 to inf] | 1/2 |" in page
    assert "| 1/2 | 0.500 | open, p = 0.25 |" in page
    assert r"| the ratio \|a\| / \|b\| is at most 1 | 2 | 0.500 [0.250 to inf] |  |  | shown |" in page
    assert "F2 (warning) in left." in page
    assert "1 on this page, corrected together; 1 seed, 0 to 0, which are few: indicative, 1 seed." in page
    assert "- **Machine**: torch 2.13.0 on x86_64." in page
    assert "`normkit study depth --set seeds=3`" in page


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_a_study_is_that_of_its_claims(name: str) -> None:
    study = load(name)
    page = (studies.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {study.title}\n\n{study.question}")
    assert [says for says in re.findall(r"^## (.*)$", page, flags=re.MULTILINE) if "`normkit inspect`" not in says] == [
        claim.says for claim in study.claims
    ]
    for claim in study.claims:
        assert f"Source: {claim.source}." in page
        for condition in claim.conditions:
            assert f"| {condition.says.replace('|', chr(92) + '|')} |" in page
    assert (studies.CONDITIONS / f"{name}.json").read_text(encoding="utf-8") == study.conditions()
