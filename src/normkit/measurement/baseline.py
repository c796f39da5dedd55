"""Declarations of a model's norms: written in a file, or taken from a first run and compared with later ones.

Some wirings are a bug in one model and the design of another: a norm on the branch only, one norm at two places, one
norm over all heads. The formula cannot decide which it is; the intent file does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from normkit import files
from normkit.errors import InputError, SpecError
from normkit.measurement.facts import Placement, Role, Spectrum
from normkit.spec import NormSpec

_SCHEMA = 1
_CONTENT = "normkit intent"
_HOW = "`normkit inspect MODEL --intent FILE` writes such a file where there is none"


@dataclass(frozen=True, kw_only=True)
class Values:
    """The numbers of one gain or bias as they act: a summary and digests instead of the numbers."""

    size: int
    minimum: float
    median: float
    maximum: float
    negative: float
    """Share of entries below 0."""
    digest: str
    """As in `Spectrum`."""
    members: str
    """As in `Spectrum`."""

    @classmethod
    def of(cls, spectrum: Spectrum | None) -> Values | None:
        """The values of a parameter; None without a parameter, or if an entry is NaN or infinite."""
        if spectrum is None or spectrum.nonfinite or not spectrum.digest:
            return None
        return cls(
            size=spectrum.size,
            minimum=spectrum.quantiles[0],
            median=spectrum.quantiles[3],
            maximum=spectrum.quantiles[-1],
            negative=spectrum.negative,
            digest=spectrum.digest,
            members=spectrum.members,
        )


@dataclass(frozen=True, kw_only=True)
class DeclaredNorm:
    """The declaration of one norm."""

    spec: NormSpec
    role: Role
    features: int
    """Features a row, n: one head's, or those of all heads."""
    calls: int
    """Calls in one forward pass: more than one where it is shared."""
    dtype: str
    """Dtype of the input, as in "float32"."""
    output_dtype: str
    """Dtype of the output."""
    factor: float = 1.0
    """A factor on the output besides the gain, as in `Site`."""
    gain: Values | None = None
    """Its numbers; None where they are not known."""
    bias: Values | None = None


@dataclass(frozen=True, kw_only=True)
class DeclaredBatchNorm:
    """The declaration of one batch norm."""

    eps: float | None
    """Added to the variance; None where it is not known."""
    share: float | None
    """Share of the running mean that a batch replaces, as in `BatchNorm`; None where it is not known."""
    gain: Values | None = None
    """Its numbers; None where they are not known."""
    bias: Values | None = None
    mean: Values | None = None
    """Those of its running means."""
    variance: Values | None = None


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """The declaration of a model: its norms, and the placements of its blocks."""

    source: str
    """The file that declares it."""
    norms: Mapping[str, DeclaredNorm]
    """By path, in forward order."""
    placements: Mapping[str, Placement]
    """Placements of the blocks, by path."""
    final_norm: str | None
    """Path of the norm after the last block, or None."""
    others: tuple[str, ...] = ()
    """Paths of norms that no spec describes, such as batch norms."""
    batch_norms: Mapping[str, DeclaredBatchNorm] = dataclasses.field(default_factory=dict)
    """The batch norms, by path, in forward order; they are among the others too."""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary with a `schema_version`; all but the source."""
        norms = {}
        for path, norm in self.norms.items():
            shallow = {field.name: getattr(norm, field.name) for field in dataclasses.fields(norm)}
            parts = {"gain": norm.gain, "bias": norm.bias}
            values = {name: None if part is None else dataclasses.asdict(part) for name, part in parts.items()}
            norms[path] = {**shallow, "spec": norm.spec.to_json(), **values}
        batches = {path: dataclasses.asdict(norm) for path, norm in self.batch_norms.items()}
        return {
            "schema_version": _SCHEMA,
            "content": _CONTENT,
            "final_norm": self.final_norm,
            "placements": dict(self.placements),
            "norms": norms,
            "others": list(self.others),
            **({"batch_norms": batches} if batches else {}),
        }


def declared(intent: Baseline | Path | str | None) -> tuple[Baseline | None, Path | None]:
    """The declaration, and the path of the intent file if that file has yet to be written.

    Raises:
        InputError: If there is a file that cannot be used.
    """
    if intent is None or isinstance(intent, Baseline):
        return intent, None
    path = Path(intent)
    return (read(path), None) if path.exists() else (None, path)


def check_fits(baseline: Baseline | None, paths: Collection[str]) -> None:
    """Refuse a baseline of another model: one that shares no norm with this one.

    Raises:
        InputError: If so.
    """
    if baseline is not None and baseline.norms and paths and not set(paths) & set(baseline.norms):
        raise InputError(
            f"{baseline.source or 'the baseline'} declares {len(baseline.norms)} norms such as "
            f"{next(iter(baseline.norms))}, and this model has none of them; give the intent of this model"
        )


def write(baseline: Baseline, path: Path) -> Path:
    """Write an intent file, whole or not at all, the same bytes for the same values; returns its path.

    Raises:
        InputError: If it cannot be written there.
    """
    try:
        return files.write_text(path, files.json_text(baseline.to_json()))
    except InputError as error:
        reason, _, _ = str(error).partition(";")
        raise InputError(f"{reason}; give another path for the intent file") from None


def read(path: Path) -> Baseline:
    """Read an intent file.

    Raises:
        InputError: If it cannot be read, holds something else or is damaged; the message names the file.
    """
    try:
        values = files.parse_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; {_HOW}") from None
    except InputError as error:
        raise InputError(f"expected an intent file in {path}, found no JSON: {error}; {_HOW}") from None
    if not isinstance(values, dict) or values.get("content") != _CONTENT:
        raise InputError(f"expected an intent file in {path}, found other JSON; {_HOW}")
    if values.get("schema_version") != _SCHEMA:
        raise InputError(
            f"expected schema_version {_SCHEMA} in {path}, got {values.get('schema_version')!r}; update normkit, or "
            "remove the file and have it written anew"
        )
    try:
        placements, norms = files.field(values, "placements", dict), files.field(values, "norms", dict)
        for block, placement in placements.items():
            _check_one_of(placement, get_args(Placement), f'"placements" of {block}')
        final_norm, others = values.get("final_norm"), files.field(values, "others", list)
        if not isinstance(final_norm, str | None):
            raise InputError(f'"final_norm" must be a path or null, got {final_norm!r}')
        if not all(isinstance(other, str) for other in others):
            raise InputError(f'"others" must be paths, got {others!r}')
        # Older files have none.
        batch_norms = files.field({"batch_norms": {}, **values}, "batch_norms", dict)
        return Baseline(
            source=path.name,
            norms={name: _norm(name, norm) for name, norm in norms.items()},
            placements=placements,
            final_norm=final_norm,
            others=tuple(others),
            batch_norms={name: _batch_norm(name, norm) for name, norm in batch_norms.items()},
        )
    except (InputError, SpecError) as error:
        raise InputError(f"the intent file {path} is damaged: {error}; mend it, or have it written anew") from None


def _norm(path: str, values: Any) -> DeclaredNorm:
    if not isinstance(values, dict):
        raise InputError(f"{path} must be an object, got {values!r}")
    kinds = {"spec": dict, "role": str, "features": int, "calls": int, "dtype": str, "output_dtype": str}
    given: dict[str, Any] = {name: files.field(values, name, kind, path) for name, kind in kinds.items()}
    # Older files have no factor: it is 1.
    factor = values.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor == 0 or not math.isfinite(factor):
        raise InputError(f'"factor" of {path} must be a finite number other than 0, got {factor!r}')
    _check_one_of(given["role"], get_args(Role), f'"role" of {path}')
    for name in ("features", "calls"):
        if given[name] < 1:
            raise InputError(f'"{name}" of {path} must be at least 1, got {given[name]}')
    try:
        given |= _values(path, values, ("gain", "bias"))
        return DeclaredNorm(**{**given, "spec": NormSpec.from_json(given["spec"]), "factor": float(factor)})
    except (SpecError, TypeError) as error:
        raise InputError(f'"spec" of {path}: {error}') from None


def _values(path: str, declared: Mapping[str, Any], names: Collection[str]) -> dict[str, Values]:
    """The numbers of parameters; none in a file without them, or if the norm has no such parameter."""
    given = {}
    for name in names:
        if (part := declared.get(name)) is not None:
            if not isinstance(part, dict):
                raise InputError(f'"{name}" of {path} must be an object or null, got {part!r}')
            kinds, where = get_type_hints(Values), f"the {name} of {path}"
            given[name] = Values(**{key: files.field(part, key, kind, where) for key, kind in kinds.items()})
    return given


def _batch_norm(path: str, values: Any) -> DeclaredBatchNorm:
    if not isinstance(values, dict):
        raise InputError(f"{path} must be an object, got {values!r}")
    numbers = {
        name: None if values.get(name) is None else float(files.field(values, name, float, path))
        for name in ("eps", "share")
    }
    parts: dict[str, Any] = _values(path, values, ("gain", "bias", "mean", "variance"))
    return DeclaredBatchNorm(eps=numbers["eps"], share=numbers["share"], **parts)


def _check_one_of(value: object, allowed: tuple[str, ...], where: str) -> None:
    if value not in allowed:
        raise InputError(f"{where} must be one of {', '.join(allowed)}, got {value!r}")
