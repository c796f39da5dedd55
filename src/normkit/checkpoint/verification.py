"""What was proved of a folded checkpoint, and the words for what differs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
"""How a tensor of the result follows from the source."""

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
    """One thing that was proved, or not.

    Attributes:
        name: What it is about.
        passed: Whether it holds; None if it could not be tried here.
        what: What was found, with the place where it fails.
    """

    name: str
    passed: bool | None
    what: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What holds of a folded checkpoint and its source.

    Attributes:
        source: Class that the source's config names.
        result: Class that the result's config names.
        checks: In the order in which they were made.
    """

    source: str
    result: str
    checks: tuple[Checked, ...]

    @property
    def passed(self) -> bool:
        """Nothing fails."""
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
    """The first place where two JSON documents differ, and what is there."""
    if isinstance(found, Mapping) and isinstance(due, Mapping):
        if strange := sorted(found.keys() ^ due.keys()):
            where = quoted(f"{path}.{strange[0]}")
            return f"{where} is recorded and does not follow" if strange[0] in found else f"{where} is not recorded"
        return _first(difference(found[key], due[key], f"{path}.{key}") for key in due)
    if isinstance(found, list | tuple) and isinstance(due, list | tuple) and len(found) == len(due):
        pairs = enumerate(zip(found, due, strict=True))
        return _first(difference(one, other, f"{path}.{at}") for at, (one, other) in pairs)
    if type(found) is type(due) and found == due:
        return None
    return f"{path} is recorded as {quoted(found)}, {quoted(due)} follows from the source"


def judged(name: str, faults: Sequence[str], said: str) -> Checked:
    """Passed without a fault; else the first fault and how many there are beyond."""
    if not faults:
        return Checked(name=name, passed=True, what=said)
    more = f" (and {len(faults) - 1:,} more)" if len(faults) > 1 else ""
    return Checked(name=name, passed=False, what=faults[0] + more)


def _first(differences: Iterable[str | None]) -> str | None:
    return next((difference for difference in differences if difference), None)
