"""A passport: what a norm was found to compute, each convention with evidence and confidence."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from normkit import reference
from normkit.errors import IdentificationError
from normkit.spec import NormSpec
from normkit.text import dtype_name

Verdict = Literal[
    "norm",
    "batch",
    "gated",
    "adaptive",
    "identity",
    "affine",
    "linear",
    "elementwise",
    "softmax",
    "not a norm",
    "undecidable",
]

_SCHEMA = 1
_DOUBT = 0.9
"""Factor on the confidence for each thing that could not be decided."""
_ELEMENTWISE = ("identity", "affine", "batch")
_CAUSES = ("other sizes", "degree", "rescaled eps", "partial statistics", "rounding", "root", "large rows", "kind")
"""Readings that say why no spec describes a norm; the first that is there says most."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One thing that was found out about a norm."""

    value: Any = None
    """The result, as plain JSON. For a reading that could not be decided: the conventions that were decided all the
    same, or None."""
    confidence: float = 1.0
    """1.0 if it was measured; less if it rests on a rule of thumb; 0.0 if it is open."""
    evidence: tuple[str, ...] = ()
    """The observations, one sentence each."""
    undecidable: str | None = None
    """Why it could not be decided."""

    @classmethod
    def open(cls, reason: str, *evidence: str) -> Reading:
        """A reading that could not be decided, for this reason."""
        return cls(confidence=0.0, evidence=evidence, undecidable=reason)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        plain: dict[str, Any] = {
            "value": self.value,
            "confidence": round(self.confidence, 4),
            "evidence": list(self.evidence),
        }
        return plain if self.undecidable is None else {**plain, "undecidable": self.undecidable}


@dataclass(frozen=True, kw_only=True, eq=False)
class Passport:
    """The formula that a norm was found to compute; call the passport to compute it.

    Example:
        >>> import normkit as nk
        >>> passport = nk.identify(torch.nn.LayerNorm(8), 8)
        >>> x = torch.randn(2, 8)
        >>> torch.allclose(passport(x), torch.nn.functional.layer_norm(x, (8,)), atol=1e-6)
        True
        >>> passport.readings["eps"].value
        {'eps': 1e-05, 'eps_placement': 'inside'}
    """

    verdict: Verdict
    """Either "norm": without a spec it normalizes in a way that no spec describes, with a reading "residual" it adds a
    second input to the first and normalizes the sum as the spec says. Or "batch" if it couples samples; "gated" or
    "adaptive" if a second input multiplies or steers it; "identity", "affine", "linear", "elementwise" or "softmax";
    "not a norm" for any other map; "undecidable"."""
    spec: NormSpec | None
    """The conventions; None if no spec describes it. Those of undecidable readings are placeholders: they make no
    difference to what was seen."""
    readings: Mapping[str, Reading]
    """The readings by name. Those named in `CONVENTIONS` decide conventions of the spec."""
    shape: tuple[int, ...] = ()
    """Shape of the inputs that were used."""
    dtype: str = "float32"
    """Dtype of input and parameters when the formula was found, such as "float32"."""
    weight: Tensor | None = field(default=None, repr=False)
    """The spec's weight as it was found; the slope of an elementwise map."""
    bias: Tensor | None = field(default=None, repr=False)
    """The spec's bias as it was found; the constant of an elementwise map."""
    weight_name: str | None = None
    """Name of the module's parameter that is the weight; several names are separated by commas."""
    bias_name: str | None = None
    """Name of the module's parameter that is the bias; several names are separated by commas."""
    recorded: Mapping[str, dict[str, Any] | None] = field(default_factory=dict, repr=False)
    """For a passport that was read from a file: what the file says about weight and bias."""

    def __str__(self) -> str:
        """The formula, each convention in words, and how sure it is, as `normkit identify` prints them."""
        from normkit.identification.report import describe_passport
        from normkit.show.terminal import printed, section

        return printed(section(describe_passport(self)))

    def __repr__(self) -> str:
        return f"<Passport: {self.verdict if self.spec is None else self.spec}>"

    @cached_property
    def parameters(self) -> dict[str, dict[str, Any] | None]:
        """Name, shape, dtype and digest of "weight" and "bias"; None for what is not there."""
        return {
            "weight": _summary(self.weight, self.weight_name) or self.recorded.get("weight"),
            "bias": _summary(self.bias, self.bias_name) or self.recorded.get("bias"),
        }

    @property
    def undecidable(self) -> dict[str, str]:
        """The readings that could not be decided, each with its reason."""
        return {name: reading.undecidable for name, reading in self.readings.items() if reading.undecidable is not None}

    @property
    def confidence(self) -> float:
        """1.0 if everything was measured; each open reading leaves 0.9 of it, each rule of thumb its own share."""
        total = 1.0
        for reading in self.readings.values():
            total *= _DOUBT if reading.undecidable is not None else reading.confidence
        return total

    @property
    def evidence(self) -> tuple[str, ...]:
        """All evidence, one line each; then what was not decided, in lines that begin with "undecided:"."""
        seen = tuple(line for reading in self.readings.values() for line in reading.evidence)
        return seen + tuple(f"undecided: {name}: {reason}" for name, reason in self.undecidable.items())

    @property
    def cause(self) -> str | None:
        """The line that says most about what it is where no spec describes it; None if nothing was seen."""
        lines = [line for name in _CAUSES if name in self.readings for line in self.readings[name].evidence[:1]]
        return lines[0] if lines else None

    def __call__(self, x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """The output for x of the norm that the passport describes.

        Args:
            x: Input, as the norm takes it.
            weight: In place of the weight that was found; needed where the passport was read from a file.
            bias: Likewise.

        Raises:
            IdentificationError: If nothing was found that could be computed, or a parameter is missing.
        """
        weight = self.weight if weight is None else weight
        bias = self.bias if bias is None else bias
        if self.spec is not None:
            for name, given, needed in (
                ("weight", weight, self.spec.has_weight),
                ("bias", bias, self.spec.has_bias),
            ):
                if needed and given is None:
                    raise IdentificationError(
                        f"this passport holds no {name}, as passports from files do; pass {name}="
                    )
            return reference.forward(x, self.spec, weight, bias)
        if self.verdict not in _ELEMENTWISE:
            raise IdentificationError(
                f"no formula was found for this norm (verdict {self.verdict!r}), so its passport cannot be called"
            )
        if self.verdict != "identity" and weight is None:
            raise IdentificationError("this passport holds no weight, as passports from files do; pass weight=")
        y = x.double()
        y = y if weight is None else y * weight.double()
        return (y if bias is None else y + bias.double()).to(x.dtype)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for `json.dumps`; "undecidable" names what in "spec" is a placeholder."""
        return {
            "schema_version": _SCHEMA,
            "verdict": self.verdict,
            "formula": None if self.spec is None else str(self.spec),
            "spec": None if self.spec is None else self.spec.to_json(),
            "undecidable": self.undecidable,
            "confidence": round(self.confidence, 4),
            "shape": list(self.shape),
            "dtype": self.dtype,
            "parameters": self.parameters,
            "readings": {name: reading.to_json() for name, reading in self.readings.items()},
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Passport:
        """The passport that `to_json` wrote: the same, but for the values of weight and bias.

        Raises:
            IdentificationError: If this is no passport, or one of another schema.
            SpecError: If its spec has conventions that do not exist.
        """
        missing = [
            name for name in ("schema_version", "verdict", "spec", "parameters", "readings") if name not in values
        ]
        if missing:
            raise IdentificationError(f"a passport has {', '.join(missing)}; this has none, so it is no passport")
        if values["schema_version"] != _SCHEMA:
            raise IdentificationError(
                f"expected a passport of schema_version {_SCHEMA}, got {values['schema_version']!r}; write it anew"
            )
        if values["verdict"] not in get_args(Verdict):
            raise IdentificationError(
                f"verdict must be one of {', '.join(get_args(Verdict))}, got {values['verdict']!r}"
            )
        parameters = dict(values["parameters"])
        return cls(
            verdict=values["verdict"],
            spec=None if values["spec"] is None else NormSpec.from_json(values["spec"]),
            readings={
                name: Reading(
                    value=reading.get("value"),
                    confidence=reading.get("confidence", 0.0),
                    evidence=tuple(reading.get("evidence", ())),
                    undecidable=reading.get("undecidable"),
                )
                for name, reading in values["readings"].items()
            },
            shape=tuple(values.get("shape", ())),
            dtype=values.get("dtype", "float32"),
            weight_name=(parameters.get("weight") or {}).get("name"),
            bias_name=(parameters.get("bias") or {}).get("name"),
            recorded=parameters,
        )


def without_spec(verdict: Verdict, *evidence: str, **readings: Reading) -> Passport:
    """The passport of something that no spec describes: this evidence under "kind", and further readings."""
    return Passport(
        verdict=verdict, spec=None, readings={"kind": Reading(value=verdict, evidence=evidence), **readings}
    )


def _summary(parameter: Tensor | None, name: str | None) -> dict[str, Any] | None:
    if parameter is None:
        return None
    values = parameter.detach().cpu()
    digest = hashlib.sha256(values.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
    return {
        "name": name,
        "shape": list(values.shape),
        "dtype": dtype_name(values.dtype),
        "sha256": digest,
    }
