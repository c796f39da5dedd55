"""The census of norm classes as a page in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import transformers

from answers import Answer, Outcome
from definitions import Definition

_NO_SPEC = "a norm that no spec describes"


@dataclass(frozen=True, kw_only=True)
class Census:
    """All answers; the classes that were set apart, by what they are; and the class that was read, of each body."""

    answers: tuple[Answer, ...]
    apart: Mapping[str, tuple[Definition, ...]]
    examples: Mapping[str, str]

    def outcomes(self) -> dict[Definition, Outcome]:
        """The outcome of each class: of its variants the least favourable, where a plain one counts before others."""
        order: tuple[Outcome, ...] = ("failed", "wrong", "undecidable", "right", "not plain")
        outcomes: dict[Definition, Outcome] = {}
        for answer in self.answers:
            known = outcomes.get(answer.definition, "not plain")
            outcomes[answer.definition] = min(known, answer.outcome, key=order.index)
        return outcomes


def table(census: Census) -> str:
    """The census as a page in Markdown."""
    return "\n".join([*_heading(census), *_rows(census), *_members(census)]) + "\n"


def _heading(census: Census) -> list[str]:
    outcomes = list(census.outcomes().values())
    counts = Counter(outcomes)
    plain, apart = len(outcomes) - counts["not plain"], sum(map(len, census.apart.values()))
    named = ", ".join(f"{count} {name}" for name, count in _verdicts(census).items())
    right, undecidable = (f"{counts[name]} | {100 * counts[name] / plain:.1f} %" for name in ("right", "undecidable"))
    return [
        "# What `identify` says of every norm class of transformers",
        "",
        "Written by `python census/norm_classes.py`. Found are the classes of `models/*/modeling_*.py` in transformers",
        f'{transformers.__version__} with "norm" in their name, and a few that normalize under another name. Each is '
        "built with random",
        "parameters, in all its variants, and identified from forward calls alone. Every field of the answer is",
        "compared with what its source says (`census/expected.toml`, written from the source), and the passport,",
        "called, with the class: in bfloat16 bit for bit.",
        "",
        "| | classes | |",
        "|---|---:|---|",
        f"| found | {len(outcomes) + apart} | |",
        f"| no layer of its own, not built | {apart} | listed at the end |",
        f"| not a plain norm, and named as what it is | {counts['not plain']} | {named} |",
        f"| plain norms | {plain} | in {len(_plain_bodies(census))} different bodies |",
        f"| of these right in every field | {right} |",
        f"| undecidable in a field, right in the others | {undecidable} |",
        f"| wrong | {counts['wrong']} | |",
        f"| without an answer | {counts['failed']} | |",
        "",
    ]


def _verdicts(census: Census) -> dict[str, int]:
    """How many classes that are no plain norms are what."""
    outcomes = census.outcomes()
    kinds = {
        answer.definition: _NO_SPEC if answer.verdict == "norm" else answer.verdict
        for answer in census.answers
        if outcomes[answer.definition] == "not plain"
    }
    return dict(Counter(kinds.values()).most_common())


def _plain_bodies(census: Census) -> set[str]:
    return {definition.body for definition, outcome in census.outcomes().items() if outcome != "not plain"}


def _bodies(census: Census) -> dict[str, list[Answer]]:
    """Answers by body, that of most classes first."""
    bodies: dict[str, list[Answer]] = {}
    for answer in census.answers:
        bodies.setdefault(answer.definition.body, []).append(answer)
    return dict(sorted(bodies.items(), key=lambda item: (-len(_classes(item[1])), census.examples[item[0]])))


def _classes(answers: Iterable[Answer]) -> list[Definition]:
    return sorted({answer.definition for answer in answers})


def _rows(census: Census) -> list[str]:
    rows = [
        "## One row for each body",
        "",
        "| for example | classes | families | found | result |",
        "|---|---:|---:|---|---|",
    ]
    for body, answers in _bodies(census).items():
        classes = _classes(answers)
        families = {definition.family for definition in classes}
        # Classes that share a body share their answers; where one does not, it gets its own line.
        lines = dict.fromkeys((_found(answer), _result(answer)) for answer in answers)
        found, results = ("<br>".join(part) for part in zip(*lines, strict=True))
        rows.append(f"| `{census.examples[body]}` | {len(classes)} | {len(families)} | {found} | {results} |")
    return [*rows, ""]


def _found(answer: Answer) -> str:
    variant = answer.case.get("as")
    return f"{variant}: {answer.found}" if variant else answer.found


def _result(answer: Answer) -> str:
    because = answer.case.get("because")
    if answer.outcome == "not plain":
        kind = _NO_SPEC if answer.verdict == "norm" else f"rightly {answer.verdict}"
        return f"{kind}: {because}" if because else kind
    return f"{answer.outcome}: {answer.remark}" if answer.remark else answer.outcome


def _members(census: Census) -> list[str]:
    """Which classes share a body, and which were set apart."""
    lines = ["## Classes that share a body", ""]
    for answers in _bodies(census).values():
        if len(_classes(answers)) > 1:
            lines += [f"- {_listed(_classes(answers))}"]
    lines += ["", "## No layer of its own", ""]
    return [*lines, *(f"- {what}: {_listed(sorted(found))}" for what, found in census.apart.items())]


def _listed(definitions: Iterable[Definition]) -> str:
    return ", ".join(f"`{definition}`" for definition in definitions)
