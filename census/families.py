"""The norms that the model families of transformers use: docs/reference/census.md.

python census/families.py              write the page
python census/families.py --check      say whether the page is up to date
python census/families.py llama bert   print the rows of single families
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import get_args

import transformers

from configurations import families, refused
from family_facts import Facts, Kind, NormKind, measure
from pages import settle

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "census.md"
RECENT = 2024
"""Families whose modelling file has a copyright notice of this year or a later one are counted once more."""
TITLES: dict[Kind, str] = {
    "decoder": "Decoders",
    "encoder": "Encoders",
    "encoder-decoder": "Encoder-decoders",
    "vision": "Vision",
    "sound": "Sound",
}
PLACEMENTS = (
    "pre",
    "parallel",
    "post",
    "peri",
    "output-only",
    "in-branch",
    "residual-after-norm",
    "none",
    "mixed",
    "unknown",
    "no blocks",
)

INTRODUCTION = """\
# What model families use

The norms of {count} families of transformers {version}, found by `normkit` from what they compute and from where
scaled inputs get through, not from names. Each was built from its stock configuration class with its sizes cut down
and random weights. A checkpoint may set another eps than its class.

    python census/families.py           # writes this page
    python census/families.py --check   # says whether it is up to date

**Kind.** A decoder's tokens do not see those after them, an encoder's do; text models that are part of a multimodal
family count too. **Recent**: the copyright notice of the modelling file is of {recent} or later, which is no release
date; a few old files (ESM, SegFormer) have had theirs renewed, and {undated} families have none.

**Norms.** RMSNorm and LayerNorm with the eps that acts. For 16-bit inputs the normalized row is rounded *early*,
before the gain; *late*, once, at the end; to the *weight*'s dtype (T5); or *none* of it is ever wider than the input.
"(1 + w)": the gain is stored as its difference from 1. What is no plain norm of one row is named after the plus; a
norm that returns more than one tensor, as ZAYA's of queries and keys, is not seen.

**Placement.** *pre*: norms read the residual stream and feed the branches. *parallel*: pre, and attention and MLP both
read the block's own input. *post*: the stream itself goes through norms. *peri*: norms before and at the end of each
branch. *output-only*: at the end of each branch alone. *in-branch*: behind a layer of the branch, as in ConvNeXt.
*residual-after-norm*: the residual is taken behind the norm. *none*: the branches see the stream as it is, or the
repeated member is a stage of several blocks. *unknown*: scaled inputs did not tell; *mixed*: not the same in every
block; *no blocks*: no repeated member maps a stream of tokens or a feature map to the same sizes, as where several
streams run beside each other, and final norm and norms a block stay empty. Batch norms do not count among these.

**QK-norm.** Queries and keys are normalized *per head* or over *all heads* at once; *latent*: not they, but the
compressed rows that they are made of.

What `normkit.convert` makes of them stands in [conversions](conversions.md).

**Share of parameters.** Plain norms' share in the family's full default size; empty where the stock class cannot be
built without arguments.
"""


def take(names: Sequence[str] = ()) -> tuple[Facts, ...]:
    """Measure the families of these names, or all."""
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings(action="ignore"):
        return tuple(measure(family) for family in families() if not names or family.name in names)


def page(taken: Sequence[Facts]) -> str:
    """The whole page in Markdown."""
    undated = sum(facts.year is None for facts in taken)
    head = INTRODUCTION.format(count=len(taken), version=transformers.__version__, recent=RECENT, undated=undated)
    groups = _groups(taken)
    parts = [
        head,
        "## Counts\n\nFamilies of each kind, and of these the recent ones.\n",
        _table(["", *groups], _formula_counts(groups.values())),
        "Where norms sit:\n",
        _table(["", *groups], _placement_counts(groups.values())),
        "An eps that acts in at least one norm of the family:\n",
        _table(["eps", *groups], _eps_counts(groups.values())),
    ]
    for kind, title in TITLES.items():
        rows = [row(facts) for facts in taken if facts.kind == kind]
        parts += [f"## {title}\n", "\n".join([_HEADER, *rows]) + "\n"]
    parts += ["## Another eps than the configuration's\n", _unconfigured(taken), "## Not counted\n", _left_out()]
    return "\n".join(parts)


COLUMNS = ("family", "norms", "placement", "final norm", "QK-norm", "norms a block", "share of parameters", "notice")
_HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def row(facts: Facts) -> str:
    """One family's row in Markdown."""
    norms = [_norm(norm) for norm in facts.norms]
    others = [f"{count} {name}{'s' * (count > 1)}" for name, count in facts.others.items()]
    cells = (
        facts.family.name,
        " + ".join(["; ".join(norms), *others] if norms else others) or "none",
        _placement(facts),
        "yes" if facts.final_norm else "no" if facts.placements else "",
        ", ".join(facts.query_key) or "no",
        "" if facts.per_layer is None else "-".join(map(str, sorted(set(facts.per_layer)))),
        "" if facts.share is None or not norms else f"{100 * facts.share:.2g} %",
        "" if facts.year is None else str(facts.year),
    )
    return f"| {' | '.join(cells)} |"


def _norm(norm: NormKind) -> str:
    return f"{norm.name} {'machine eps' if norm.eps is None else format(norm.eps, 'g')} {norm.rounding}"


def _placement(facts: Facts) -> str:
    if len(facts.placements) < 2:
        return facts.placement
    return ", ".join(f"{count} {name}" for name, count in sorted(facts.placements.items()))


Groups = dict[str, list[Facts]]


def _groups(taken: Sequence[Facts]) -> Groups:
    """All and the recent ones of each kind, by the heading of their column."""
    groups: Groups = {}
    for kind in get_args(Kind):
        of_kind = [facts for facts in taken if facts.kind == kind]
        groups[kind] = of_kind
        groups[f"recent {kind}"] = [facts for facts in of_kind if is_recent(facts)]
    return groups


def is_recent(facts: Facts) -> bool:
    """Whether the copyright notice says so."""
    return facts.year is not None and facts.year >= RECENT


def is_rms(facts: Facts) -> bool:
    """Whether all its plain norms are RMSNorms."""
    return facts.formulas == {"RMSNorm"}


def is_pre(facts: Facts) -> bool:
    """Whether every block's norms stand before its branches, and there alone."""
    return facts.placement in ("pre", "parallel")


Rule = Callable[[Facts], bool]
_FORMULAS: dict[str, Rule] = {
    "families": lambda _facts: True,
    "LayerNorm alone": lambda facts: facts.formulas == {"LayerNorm"},
    "RMSNorm alone": is_rms,
    "RMSNorm and LayerNorm": lambda facts: facts.formulas == {"RMSNorm", "LayerNorm"},
    "GroupNorm among others": lambda facts: "GroupNorm" in facts.formulas,
    "no plain norm, BatchNorm": lambda facts: not facts.formulas and "batch norm" in facts.others,
    "a norm that is gated, adaptive or other": lambda facts: bool(facts.others.keys() - {"batch norm"}),
    "a gain stored as 1 + w": lambda facts: any("1 + w" in norm.name for norm in facts.norms),
    "no gain on any norm": lambda facts: bool(facts.norms) and all("no gain" in norm.name for norm in facts.norms),
    "RMSNorm rounded early": lambda facts: _rounds(facts, "early"),
    "RMSNorm rounded late": lambda facts: _rounds(facts, "late"),
    "QK-norm per head": lambda facts: "per head" in facts.query_key,
    "QK-norm over all heads": lambda facts: "all heads" in facts.query_key,
    "latent norms": lambda facts: "latent" in facts.query_key,
    "final norm": lambda facts: facts.final_norm is not None,
}


def _rounds(facts: Facts, rounding: str) -> bool:
    """Whether its RMSNorms with a gain, without which both are one, round so."""
    return any(
        "RMSNorm" in norm.name and "no gain" not in norm.name and norm.rounding == rounding for norm in facts.norms
    )


def _formula_counts(groups: Iterable[list[Facts]]) -> list[list[str]]:
    columns = list(groups)
    return [[name, *(str(sum(map(rule, column))) for column in columns)] for name, rule in _FORMULAS.items()]


def _placement_counts(groups: Iterable[list[Facts]]) -> list[list[str]]:
    columns = list(groups)
    return [
        [name, *(str(sum(facts.placement == name for facts in column)) for column in columns)] for name in PLACEMENTS
    ]


def _eps_counts(groups: Iterable[list[Facts]]) -> list[list[str]]:
    columns = [[{norm.eps for norm in facts.norms} for facts in column] for column in groups]
    values = sorted({eps for column in columns for each in column for eps in each if eps is not None}, reverse=True)
    return [[f"{eps:g}", *(str(sum(eps in each for each in column)) for column in columns)] for eps in values]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _unconfigured(taken: Iterable[Facts]) -> str:
    """Where an eps acts that no field has, one line a family."""
    lines = [
        "Here some norms take the default of their class, or a number in the code, beside what the fields say.",
        "",
    ]
    for facts in taken:
        if facts.unconfigured:
            acting = ", ".join(f"{eps:g}" for eps in facts.unconfigured)
            fields = ", ".join(f"`{name}` is {eps:g}" for name, eps in facts.configured.items())
            lines.append(f"- {facts.family.name}: {acting}; {fields}")
    return "\n".join(lines) + "\n"


def _left_out() -> str:
    """Reasons with the families that they hold for."""
    reasons: dict[str, list[str]] = {}
    for name, reason in refused().items():
        reasons.setdefault(reason, []).append(name)
    return (
        "\n".join(f"- {reason} ({len(names)}): {', '.join(names)}" for reason, names in sorted(reasons.items())) + "\n"
    )


def main() -> None:
    """Write the page, check it, or print rows."""
    arguments = sys.argv[1:]
    if arguments and arguments != ["--check"]:
        print(_HEADER, *map(row, take(arguments)), sep="\n")
        return
    settle(PAGE, page(take()), check=bool(arguments))


if __name__ == "__main__":
    main()
