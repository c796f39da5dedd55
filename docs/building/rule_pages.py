"""One page per rule of `inspect` and `watch`, and their index, from the rules' own data."""

from __future__ import annotations

import re
from itertools import groupby

from marking import marked, table
from normkit.rules import RULES, Rule
from rule_examples import EXAMPLES, program

FOLDER = "reference/rules"
GROUPS = {
    "A": "The formula: eps, variance, centring",
    "B": "Gain and bias",
    "C": "Axes, time, batch and padding",
    "D": "Where the norms sit, and what they do to each other",
    "E": "Number types, and outputs that do not follow the formula",
    "F": "Runs: logits, stream, gradients, updates, data",
}
_SEVERITY = {"error": "an error", "warning": "a warning", "note": "a note"}


def pages() -> dict[str, str]:
    """The content of each page, the index and the order of pages, by path."""
    order = ["append_unmatched: true", "nav:", "  - index.md"]
    for letter, rules in groupby(RULES, lambda rule: rule.id[0]):
        order += [f'  - "{letter}. {GROUPS[letter]}":', *(f"      - {rule.id}.md" for rule in rules)]
    return {
        f"{FOLDER}/.nav.yml": "\n".join(order) + "\n",
        f"{FOLDER}/index.md": index(),
        **{f"{FOLDER}/{rule.id}.md": page(rule) for rule in RULES},
    }


def index() -> str:
    """All rules in their groups."""
    parts = [
        "# Rules",
        f"Every fault that `normkit inspect` and `nk.watch` look for: {len(RULES)} rules in {len(GROUPS)} groups. "
        "Each page says what the rule sees, why it matters, what to do and how to confirm it, and shows a program that "
        "fails it; `normkit rule F1` explains a rule in a terminal.",
    ]
    for letter, rules in groupby(RULES, lambda rule: rule.id[0]):
        rows = [(rule.id, f"[{marked(rule.title)}]({rule.id}.md)", rule.severity) for rule in rules]
        parts += [f"## {letter}. {GROUPS[letter]}", table(("rule", "fault", "at worst"), rows)]
    return "\n\n".join(parts) + "\n"


def page(rule: Rule) -> str:
    """What a rule sees, why it matters, what to do."""
    steps = "\n".join(f"{number}. {_sentence(step)}" for number, step in enumerate(rule.remedy, 1))
    parts = [
        f'---\ntitle: "{rule.id} {rule.title}"\n---',
        f"# {rule.id}: {rule.title}",
        f"What this rule of `normkit inspect` and `nk.watch` sees, why it matters, what to do, and how to confirm it. "
        f"It reports {_SEVERITY[rule.severity]} at worst.",
        "## What it sees",
        _sentence(rule.threshold),
        f"Source: {_linked(rule.source)}.",
        "## Why it matters",
        marked(rule.why),
        "## The smallest failing model",
        _example(rule.id),
        "## What to do",
        steps if len(rule.remedy) > 1 else _sentence(rule.remedy[0]),
        "## How to confirm it",
        _sentence(rule.confirm),
    ]
    if rule.follows:
        titles = {rule.id: rule.title for rule in RULES}
        causes = "\n".join(f"- [{cause}: {titles[cause]}]({cause}.md)" for cause in rule.follows)
        parts += ["## Causes", f"Where one of these is found too, it comes first: {rule.id} follows from it.", causes]
    return "\n\n".join(parts) + "\n"


def _example(rule: str) -> str:
    text = program(rule)
    if not text:
        return str(EXAMPLES[rule]["words"])
    how = "a short training run" if "run" in EXAMPLES[rule] else "an inspection"
    return f"This program runs as it is, without any download: {how} that finds {rule}.\n\n```python\n{text}```"


def _sentence(words: str) -> str:
    start = words[0].upper() if re.match("[a-z]+[ ,:]", words) else words[0]
    return marked(start + words[1:]) + ("" if words.endswith(".") else ".")


def _linked(source: str) -> str:
    """A source with its issues and papers as links; "and #5" is of the repository before it."""
    repository, parts = "", []
    for index, part in enumerate(re.split(r"([\w.-]+/[\w.-]+#\d+|(?<!\S)#\d+|arXiv:\d{4}\.\d{4,5})", source)):
        name, _, number = part.partition("#")
        if not index % 2:
            parts.append(marked(part))
        elif part.startswith("arXiv:"):
            parts.append(f"[{part}](https://arxiv.org/abs/{part.removeprefix('arXiv:')})")
        else:
            repository = name or repository
            parts.append(f"[{part}](https://github.com/{repository}/issues/{number})")
    return "".join(parts)
