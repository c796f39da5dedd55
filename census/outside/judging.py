"""What an answer is worth: each outcome follows from the truth that the case stated before it ran."""

import json
import re
from collections.abc import Sequence
from typing import Any

from .cases import Case, Single

SERIOUS = ("error", "warning")
# Outcomes of faults, best first; then those of healthy cases.
FAULT_OUTCOMES = ("first", "right", "found", "misplaced", "misnamed", "blamed", "missed", "silence", "crash", "setup")
CLEAN_OUTCOMES = ("quiet", "note", "false alarm", "crash", "setup")


def words_of(finding: Any) -> str:
    """What a finding says of the case at hand: title, measured value, evidence; not its general explanations."""
    return " ".join([finding.title, finding.measured, *finding.evidence])


def names(case: Case, text: str) -> bool:
    """Whether a text names the fault."""
    return any(re.search(word, text, re.IGNORECASE) for word in case.words)


def is_at(finding: Any, places: Sequence[str]) -> bool:
    """Whether the first site of a finding is a planted place or lies in one; without sites, whether it mentions one.

    The first, as a NaN spreads from its place to others, and a tool that lists those behind the right one is right.
    """
    if not places:
        return True
    if finding.sites:
        return any(finding.sites[0] == place or finding.sites[0].startswith(f"{place}.") for place in places)
    return any(place in words_of(finding) for place in places)


def touches(finding: Any, places: Sequence[str]) -> bool:
    """Whether a planted place is among the sites of a finding, wherever it stands."""
    at = (place for place in places for site in finding.sites if site == place or site.startswith(f"{place}."))
    return is_at(finding, places) or next(at, None) is not None


def told(finding: Any) -> dict[str, Any]:
    """A finding for the record."""
    return {
        "severity": finding.severity,
        "title": finding.title,
        "measured": finding.measured,
        "sites": list(finding.sites)[:6],
        "evidence": list(finding.evidence)[:3],
    }


def unchecked_lines(inspection: Any) -> str:
    """What the inspection says that it did not check."""
    document = inspection.to_json()
    skipped = [check for check in document.get("checks", ()) if check.get("status") == "not checked"]
    measured = (
        "sites",
        "blocks",
        "attentions",
        "findings",
        "walk",
        "checks",
        "training",
        "foldedness",
        "selections",
        "model",
    )
    rest = {name: value for name, value in document.items() if name not in measured}
    return "\n".join(f"{check['title']}: {check['reason']}" for check in skipped) + "\n" + json.dumps(rest, default=str)


def judge_inspection(case: Case, inspection: Any, places: Sequence[str]) -> dict[str, Any]:
    """The outcome of a case of `nk.inspect` or `nk.watch`."""
    findings = list(inspection.findings)
    record: dict[str, Any] = {"findings": [told(finding) for finding in findings[:3]], "count": len(findings)}
    serious = [finding for finding in findings if finding.severity in SERIOUS]
    if case.clean:
        record["outcome"] = "false alarm" if serious else "note" if findings else "quiet"
        return record
    record["outcome"] = _fault_outcome(case, inspection, places, findings, serious)
    named = [finding for finding in findings if names(case, words_of(finding))]
    record["said at"] = named[0].severity if named else ""
    return record


def _fault_outcome(case: Case, inspection: Any, places: Sequence[str], findings: list[Any], serious: list[Any]) -> str:
    if findings and names(case, words_of(findings[0])) and is_at(findings[0], places):
        return "first"
    if any(names(case, words_of(finding)) and touches(finding, places) for finding in findings):
        return "found"
    if case.innocent:
        norms = {site.path for site in inspection.sites}
        if serious and serious[0].sites and set(serious[0].sites) <= norms:
            return "blamed"
        return "missed" if case.seeable else "right"
    lines = unchecked_lines(inspection)
    if not case.seeable and case.unchecked and re.search(case.unchecked, lines, re.IGNORECASE):
        return "right"
    if any(names(case, words_of(finding)) for finding in serious):
        return "misplaced"
    if places and any(is_at(finding, places) for finding in serious):
        return "misnamed"
    return "missed" if findings or names(case, lines) else "silence"


def judge_passport(case: Case, single: Single, passport: Any) -> dict[str, Any]:
    """The outcome of `nk.identify`: every field that is true must be read, or be called undecidable."""
    record: dict[str, Any] = {
        "findings": [
            {
                "title": f"{passport.verdict}: {passport.spec}",
                "undecidable": dict(passport.undecidable),
                "evidence": list(passport.evidence)[:3],
            }
        ],
        "count": 1,
    }
    if single.verdicts:
        text = " ".join([str(passport.verdict), *passport.evidence]).lower()
        right = passport.spec is None and any(word in text for word in single.verdicts)
        record["outcome"] = "first" if right else "misnamed" if passport.spec is None else "missed"
        return record
    wrong = [name for name, value in single.fields.items() if not _same(getattr(passport.spec, name, None), value)]
    record["wrong"] = wrong
    undecided = bool(passport.undecidable) and passport.spec is not None and _admitted(wrong, passport.undecidable)
    if case.clean:
        record["outcome"] = "quiet" if not wrong else "note" if undecided else "false alarm"
    else:
        record["outcome"] = "first" if not wrong else "found" if undecided else "missed"
    return record


def _same(read: Any, true: Any) -> bool:
    if isinstance(true, float) and isinstance(read, float):
        return abs(read - true) <= 0.02 * abs(true)
    return bool(read == true)


def _admitted(wrong: Sequence[str], undecidable: Any) -> bool:
    admitted = " ".join(f"{name} {reason}" for name, reason in dict(undecidable).items())
    return all(re.search(name.split("_")[0].removesuffix("s"), admitted, re.IGNORECASE) for name in wrong)


def judge_violations(case: Case, seen: Sequence[Any]) -> dict[str, Any]:
    """The outcome of `nk.testing.violations`."""
    texts = [f"{violation.check}: found {violation.found}, expected {violation.expected}" for violation in seen]
    record: dict[str, Any] = {"findings": [{"title": text} for text in texts[:3]], "count": len(texts)}
    if case.clean:
        record["outcome"] = "false alarm" if texts else "quiet"
        return record
    named = [names(case, text) for text in texts]
    record["outcome"] = (
        "first" if named[:1] == [True] else "found" if any(named) else "misnamed" if texts else "silence"
    )
    return record
