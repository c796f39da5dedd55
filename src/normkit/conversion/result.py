"""The result of a conversion: the swapped norms with their figures, and the others with the reason."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from normkit.spec import NormSpec
from normkit.text import counted, shortened

_SCHEMA = 1
_DRIFT = (
    "the other 16-bit values change logits as another rounding does: "
    "SmolLM2-135M in bfloat16 kept its top token at 502 of 512 places and its distance to float32 "
    "(KL 0.0012 nats)"
)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison of normkit's computation with the original's."""

    setting: str
    """The dtypes, such as "float32" or "bfloat16 under autocast"."""
    elements: int = 0
    """Number of outputs that were compared."""
    equal: float = 0.0
    """Share of the outputs that are the original's bit for bit."""
    units: float | None = None
    """Largest error of an output against float64, in units of the numbers contract. None for outputs that are rounded
    to 16 bits: their bits are compared with those of the original."""
    original_units: float | None = None
    """Largest error of an output of the original, in the same units."""
    gradients: tuple[tuple[str, float, float], ...] = ()
    """For the input, the weight and the bias: the largest error of the gradient in the same units, and the
    original's."""
    problem: str | None = None
    """Why the swap is not made."""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return {
            "setting": self.setting,
            "elements": self.elements,
            "equal": self.equal,
            "units": self.units,
            "original_units": self.original_units,
            "gradients": {name: {"units": ours, "original_units": theirs} for name, ours, theirs in self.gradients},
            "problem": self.problem,
        }


@dataclass(frozen=True, kw_only=True)
class SwappedNorm:
    """A norm that normkit computes from now on."""

    path: str
    """Path of the module; "" for the model itself."""
    others: tuple[str, ...]
    """Further paths of the same module."""
    class_name: str
    """The class before."""
    replacement: str
    """The class now."""
    spec: NormSpec
    slow: str | None
    """Why no kernel computes it. Plain torch does then, in float64 and so slowly."""
    own_under_autocast: bool
    """Under autocast its own forward computes, because autocast changes the dtypes of its operations."""
    checks: tuple[Check, ...]
    """How the swap was verified."""

    @property
    def computed_by(self) -> str:
        """Kernel or plain torch, and where neither."""
        how = "kernel" if self.slow is None else f"plain torch: {self.slow}"
        return f"{how}; under autocast its own forward" if self.own_under_autocast else how

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return {
            "path": self.path,
            "others": list(self.others),
            "class": self.class_name,
            "replacement": self.replacement,
            "formula": str(self.spec),
            "spec": self.spec.to_json(),
            "computed_by": self.computed_by,
            "own_under_autocast": self.own_under_autocast,
            "checks": [check.to_json() for check in self.checks],
        }


@dataclass(frozen=True, kw_only=True)
class LeftAlone:
    """A norm that stays as it is, or a module that looks like one."""

    path: str
    """Path of the module; "parent:function" for a call of a norm function."""
    class_name: str
    """Name of the class or of the function."""
    reason: str

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return {"path": self.path, "class": self.class_name, "reason": self.reason}


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """The result of `convert`."""

    swapped: tuple[SwappedNorm, ...]
    """The norms that normkit computes from now on, in the order of the model's modules."""
    left_alone: tuple[LeftAlone, ...]
    """The norms that stay as they are."""

    @property
    def counts(self) -> dict[str, int]:
        """How many were swapped, how many of these are slow, and how many were left alone."""
        slow = sum(norm.slow is not None for norm in self.swapped)
        return {"swapped": len(self.swapped), "slow": slow, "left_alone": len(self.left_alone)}

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for `json.dumps`."""
        return {
            "schema_version": _SCHEMA,
            "counts": self.counts,
            "swapped": [norm.to_json() for norm in self.swapped],
            "left_alone": [norm.to_json() for norm in self.left_alone],
        }

    def __str__(self) -> str:
        """A short table: norms that are alike share a line."""
        lines = [f"{counted(len(self.swapped), 'norm')} swapped, {len(self.left_alone)} left alone"]
        alike = Counter((norm.class_name, str(norm.spec), norm.computed_by) for norm in self.swapped)
        rows = [(f"{count} x", name, formula, how) for (name, formula, how), count in alike.items()]
        lines += _aligned(rows)
        if self.swapped:
            checks = [check for norm in self.swapped for check in norm.checks]
            lines.append(_verified(checks))
            if any(check.units is None and check.equal < 1 for check in checks if check.problem is None):
                lines.append(_DRIFT)
        if self.left_alone:
            lines.append("left alone:")
            reasons: dict[tuple[str, str], list[str]] = {}
            for norm in self.left_alone:
                reasons.setdefault((norm.class_name, norm.reason), []).append(norm.path or "(the model)")
            lines += _aligned([(shortened(paths, 1), name, reason) for (name, reason), paths in reasons.items()])
        return "\n".join(lines)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _verified(checks: Sequence[Check]) -> str:
    """The worst figures of all checks."""
    settings = list(dict.fromkeys(check.setting for check in checks))
    parts = []
    for setting in settings:
        of = [check for check in checks if check.setting == setting]
        wide = [check.units for check in of if check.units is not None]
        # Rounded down: 100 % is said of no less.
        share = math.floor(1e5 * min(check.equal for check in of)) / 1e3
        figure = f"within {max(wide):.2g} units of rounding" if wide else f"{share:g} % bit-equal"
        parts.append(f"{setting} {figure}")
    return f"verified: {'; '.join(parts)}; gradients as near to float64 as before, or within the contract"
