"""A study's result as one JSON document: no times, no paths, so that the same numbers are the same bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from normkit.study.result import Decided, Judged, StudyResult

SCHEMA_VERSION = 1


def document(result: StudyResult) -> dict[str, Any]:
    """Everything that was measured and decided, as dictionaries and lists; NaN and infinity as strings."""
    study = result.study
    content = {
        "schema_version": SCHEMA_VERSION,
        "study": study.name,
        "title": study.title,
        "question": study.question,
        "data": study.data,
        "regime": study.regime,
        "settings": dict(result.settings),
        "where": dict(result.where),
        "claims": [_claim(decided, list(result.measured)) for decided in result.decided],
        "trouble": dict(result.trouble),
        "measurements": {str(seed): dict(paired) for seed, paired in result.measured.items()},
    }
    plain: dict[str, Any] = _plain(content)
    return plain


def _claim(decided: Decided, seeds: list[int]) -> dict[str, Any]:
    claim = decided.claim
    return {
        "says": claim.says,
        "source": claim.source,
        "ledger": claim.ledger,
        "verdict": decided.verdict,
        "only_if": decided.only_if,
        "conditions": [_condition(judged, seeds) for judged in decided.conditions],
    }


def _condition(judged: Judged, seeds: list[int]) -> dict[str, Any]:
    condition = judged.condition
    return {
        "says": condition.says,
        "published": condition.published,
        "source": condition.source,
        "regime": condition.regime,
        "judged": condition.judged,
        "bounds": (condition.low, condition.high),
        "values": dict(zip(map(str, seeds), judged.values, strict=True)),
        "median": judged.median,
        "interval": (judged.low, judged.high),
        "holds": judged.holds,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
