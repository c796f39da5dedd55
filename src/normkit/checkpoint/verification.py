"""What was proved about a folded checkpoint, and the words for what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normkit.checkpoint.plan import Relation
from normkit.text import quoted

RELATIONS: dict[Relation, str] = {
    "identical": "the source's bits",
    "product": "one product or quotient an element, rounded once",
    "sum": "sums in float64, rounded once",
    "constant": "constants",
}
"""How a tensor of the result follows from the source, in words."""

LIMITS = (
    "SRC is taken as it is: that it is what its authors published is not checked",
    "the certificate is not signed: whoever can write SRC and DST can make all three anew",
    "sentences in the certificate (reasons, remarks) are not compared, only what they stand beside",
    "hidden files are neither copied nor looked at",
    "code that comes with a model is not copied and never run: what is proved is proved of the stock class",
    "an adapter that was trained on SRC does not fit DST",
    "runtimes other than transformers may read other files or keys: none of them was asked",
)
"""What a passed verification does not prove."""

_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """One thing that was proved, or not."""

    name: str
    passed: bool | None
    """Whether it holds; None if it could not be tried here."""
    what: str
    """What was found, with the place of the first failure."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found about a folded checkpoint and its source."""

    source: str
    """Class in the source's config.json."""
    result: str
    """Class in the result's config.json."""
    checks: tuple[Checked, ...]

    @property
    def passed(self) -> bool:
        """Whether no check fails."""
        return all(check.passed is not False for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary with a `schema_version`."""
        return {
            "schema_version": _SCHEMA_VERSION,
            "passed": self.passed,
            "source": self.source,
            "result": self.result,
            "checks": {check.name: {"passed": check.passed, "what": check.what} for check in self.checks},
        }


def difference(found: Any, due: Any, path: str) -> str | None:
    """The first place where two JSON documents differ, and what is there; None if they are equal."""
    if isinstance(found, Mapping) and isinstance(due, Mapping):
        if unexpected := sorted(found.keys() ^ due.keys()):
            where = quoted(f"{path}.{unexpected[0]}")
            return f"{where} is recorded and does not follow" if unexpected[0] in found else f"{where} is not recorded"
        differences = (difference(found[key], due[key], f"{path}.{key}") for key in due)
        return next(filter(None, differences), None)
    if isinstance(found, list | tuple) and isinstance(due, list | tuple) and len(found) == len(due):
        pairs = enumerate(zip(found, due, strict=True))
        return next(filter(None, (difference(one, other, f"{path}.{at}") for at, (one, other) in pairs)), None)
    if type(found) is type(due) and found == due:
        return None
    return f"{path} is recorded as {quoted(found)}, {quoted(due)} follows from the source"


def judged(name: str, faults: Sequence[str], said: str) -> Checked:
    """A check that passes if there is no fault; else it shows the first fault and how many more there are."""
    if not faults:
        return Checked(name=name, passed=True, what=said)
    more = f" (and {len(faults) - 1:,} more)" if len(faults) > 1 else ""
    return Checked(name=name, passed=False, what=faults[0] + more)
