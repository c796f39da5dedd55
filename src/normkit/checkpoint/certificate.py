"""The certificate: what was done to a checkpoint, enough to derive each tensor again and compare it bit for bit.

It is not trusted. `normkit verify` makes another from the two folders and compares the two; only what was asked for is
taken from this one. It contains no time, no path and no name of a machine.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normkit.checkpoint.build_model import Reload
from normkit.checkpoint.limits import LIMITS, limits_of
from normkit.checkpoint.matrices import factors
from normkit.checkpoint.model_folder import (
    CERTIFICATE,
    HUB_SOURCE,
    LONGEST_NAME,
    Fingerprint,
    file_names,
    fingerprints,
    is_sound_name,
    snapshot_of,
)
from normkit.checkpoint.opening import OpenedFolder, folded_config
from normkit.checkpoint.plan import DTYPES, OPERATIONS, OPTIONS, FoldPlan, Quotient, VectorEdit
from normkit.checkpoint.reader import vector
from normkit.errors import InputError, ModelError
from normkit.files import field, json_text, parse_json
from normkit.text import own_version, quoted

_SCHEMA_VERSION = 1
# Bytes; the certificate of a mixture of a thousand experts has a quarter of that.
_LARGEST = 2**26


@dataclass(frozen=True, kw_only=True)
class Written:
    """Hashes of the files of weights that were read and written, and residuals."""

    inputs: dict[str, str]
    """The source's files of weights -> SHA-256."""
    outputs: dict[str, str]
    """The result's files of weights -> SHA-256."""
    residuals: dict[str, float]
    """Output tensor of a `MEASURED` relation -> how far rounding left it from its definition, as in `MadeVector` and
    `Outcome`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Certificate:
    """The changes that folding made to a checkpoint."""

    normkit: str
    """Version that made it."""
    operations: tuple[str, ...]
    """The operations asked for, in the order of `OPERATIONS`."""
    untie: bool
    """Whether a tied head was to be given a table of its own."""
    dtype: str
    """The dtype that was asked for: "same", or "float32"."""
    architecture: str
    """Class in the source's config.json."""
    becomes: str
    """Class in the result's config.json."""
    source: Mapping[str, Fingerprint]
    """The source's files from which the result was made, by name."""
    result: Mapping[str, Fingerprint]
    """The result's files except this one, by name."""
    plan: Mapping[str, Any]
    """The `FoldPlan` as JSON, without its edits."""
    tensors: Mapping[str, Any]
    """Name of each tensor of the result -> how it follows from the source, and for sums what rounding left."""
    smallest_divisor: Mapping[str, Any] | None
    """The gain nearest to zero that a bias was divided by: its weight, coordinate and size; None if nothing was
    divided."""
    reload: Mapping[str, Any]
    """The report of transformers on loading the result: a `Reload` as JSON."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The numbers that operations were given: some of `OPTIONS`."""
    hub: str = ""
    """The "org/name@commit" of the Hub that the source is, or "" for a folder from elsewhere."""
    limits: tuple[str, ...] = ()
    """The limits of the proof, in words; certificates of early versions have none."""

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, the same for the same certificate."""
        return {
            "schema_version": _SCHEMA_VERSION,
            "normkit": self.normkit,
            "asked": {
                "operations": list(self.operations),
                "untie": self.untie,
                "dtype": self.dtype,
                **({"options": dict(self.options)} if self.options else {}),
            },
            "source": {
                "architecture": self.architecture,
                **({"hub": self.hub} if self.hub else {}),
                "files": _listed(self.source),
            },
            "result": {"architecture": self.becomes, "files": _listed(self.result)},
            "reload": dict(self.reload),
            "smallest_divisor": None if self.smallest_divisor is None else dict(self.smallest_divisor),
            "plan": dict(self.plan),
            "tensors": dict(self.tensors),
            **({"does_not_prove": list(self.limits)} if self.limits else {}),
        }

    def text(self) -> str:
        """The content of the file."""
        return json_text(self.to_json())

    @classmethod
    def read(cls, folder: Path) -> Certificate:
        """The certificate in the folder of a result.

        Raises:
            InputError: If there is none, or it cannot be read.
            ModelError: If it is not a certificate, has another schema, or names a file outside of its folder; one line.
        """
        content = read_certificate(folder)
        try:
            if len(content) > _LARGEST:
                raise ModelError(f"it has more than {_LARGEST:,} bytes")
            return certificate_of(parse_json(content))
        except (InputError, ModelError) as error:
            raise ModelError(
                f"{folder / CERTIFICATE} is no certificate of a fold: {error}; fold the source again"
            ) from None


def operations_between(source: Path, result: Path) -> tuple[str, ...]:
    """The operations that made a folder from another, as its certificate says; () where there is none, or of another.

    The sizes of the source's files tell, and nothing is proved.
    """
    if not (result / CERTIFICATE).is_file():
        return ()
    try:
        certificate = Certificate.read(result)
    except (InputError, ModelError):
        return ()
    files = ((source / name, each.size) for name, each in certificate.source.items())
    is_source = all(file.is_file() and file.stat().st_size == size for file, size in files)
    return certificate.operations if is_source else ()


def certify(
    plan: FoldPlan,
    written: Written,
    reload: Reload,
    opened: OpenedFolder,
    folder: Path,
    *,
    dtype: str,
    untie: bool = False,
) -> Certificate:
    """The certificate of a result, in a folder to which only the certificate is missing.

    The files beside the weights are hashed here. `untie` says what was asked for; the plan may have refused it.

    Raises:
        InputError: If a file cannot be read.
    """
    beside = [name for name in file_names(folder) if name not in {*written.outputs, CERTIFICATE}]
    shared = [name for name in beside if (opened.folder / name).is_file()]
    planned = plain(plan.to_json())
    tensors = {edit.pop("name"): _filled(edit) for edit in planned.pop("edits")}
    for name, residual in written.residuals.items():
        tensors[name]["residual"] = residual
    return Certificate(
        normkit=own_version(),
        operations=plan.operations,
        untie=untie or plan.untie,
        dtype=dtype,
        architecture=plan.architecture,
        becomes=str(folded_config(opened.config, plan)["architectures"][0]),
        source=fingerprints(opened.folder, shared, written.inputs),
        result=fingerprints(folder, beside, written.outputs),
        plan=planned,
        tensors=tensors,
        smallest_divisor=_smallest_divisor(plan, opened),
        reload=plain(dataclasses.asdict(reload)),
        options=plan.options,
        hub=snapshot_of(opened.folder),
        limits=(*LIMITS, *limits_of(plan.operations)),
    )


def read_certificate(folder: Path) -> bytes:
    """The bytes of the certificate in a folder, at most one more than are allowed.

    Raises:
        InputError: If there is none, or it cannot be read.
    """
    path = folder / CERTIFICATE
    if not path.is_file():
        raise InputError(
            f"expected the folder of a folded checkpoint, found no {CERTIFICATE} in {folder}; give SRC, then DST"
        )
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST + 1)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def plain(document: Any) -> Any:
    """A JSON document as it is read again: lists in place of tuples."""
    return json.loads(json.dumps(document))


def _listed(prints: Mapping[str, Fingerprint]) -> dict[str, dict[str, Any]]:
    return {name: {"bytes": found.size, "sha256": found.sha256} for name, found in prints.items()}


def _filled(values: dict[str, Any]) -> dict[str, Any]:
    """A dictionary without the entries that are None, an empty list, or false."""
    return {
        key: _filled(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None and value is not False and value != []
    }


def _smallest_divisor(plan: FoldPlan, opened: OpenedFolder) -> dict[str, Any] | None:
    found: list[tuple[float, str, int]] = []
    for edit in plan.edits:
        if edit.relation != "product" or not isinstance(edit, VectorEdit) or not isinstance(edit.value, Quotient):
            continue
        gain = edit.value.gain
        sizes = factors(gain, vector(opened.source, gain.weight)).abs()
        # 0 / 0 is 0, and kept coordinates are not divided.
        is_divided = vector(opened.source, str(edit.source)) != 0
        is_divided[list(gain.kept)] = False
        sizes = sizes.masked_fill(~is_divided, math.inf)
        if bool(is_divided.any()):
            found.append((float(sizes.min()), gain.weight, int(sizes.argmin())))
    if not found:
        return None
    size, name, place = min(found)
    return {"weight": name, "coordinate": place, "size": size}


def certificate_of(document: Any) -> Certificate:
    """The certificate in a JSON document.

    Raises:
        ModelError: If it is not one; the message is the reason alone.
    """
    if not isinstance(document, dict):
        raise ModelError(f"it holds a {type(document).__name__}")
    found = document.get("schema_version")
    if type(found) is not int or found != _SCHEMA_VERSION:
        raise ModelError(f"expected schema_version {_SCHEMA_VERSION}, found {quoted(found)}")
    asked, source, result = (field(document, key, dict) for key in ("asked", "source", "result"))
    operations, untie = field(asked, "operations", list, "asked"), field(asked, "untie", bool, "asked")
    dtype, divisor = field(asked, "dtype", str, "asked"), document.get("smallest_divisor")
    if unknown := [name for name in operations if name not in OPERATIONS]:
        raise ModelError(f"expected operations of {', '.join(OPERATIONS)}, found {quoted(unknown[0])}")
    if dtype not in DTYPES:
        raise ModelError(f"expected a dtype of {', '.join(DTYPES)}, found {quoted(dtype)}")
    options = asked.get("options", {})
    if not isinstance(options, dict) or any(type(value) is not OPTIONS.get(key) for key, value in options.items()):
        raise ModelError(f"expected options of {', '.join(OPTIONS)}, found {quoted(options)}")
    if not (divisor is None or isinstance(divisor, dict)):
        raise ModelError(f"expected a table or nothing under 'smallest_divisor', found {quoted(divisor)}")
    for words in (document.get("normkit"), source.get("architecture"), result.get("architecture")):
        if not isinstance(words, str) or not words.isprintable() or len(words) > LONGEST_NAME:
            raise ModelError(f"expected a version and two names of classes, found {quoted(words)}")
    hub = source.get("hub", "")
    if not isinstance(hub, str) or (hub and not HUB_SOURCE.fullmatch(hub)):
        raise ModelError(f"expected a name and a commit of the Hub, found {quoted(hub)}")
    limits = document.get("does_not_prove", [])
    if not isinstance(limits, list) or not all(isinstance(words, str) and words.isprintable() for words in limits):
        raise ModelError(f"expected sentences under 'does_not_prove', found {quoted(limits)}")
    return Certificate(
        normkit=document["normkit"],
        operations=tuple(operations),
        untie=untie,
        dtype=dtype,
        architecture=source["architecture"],
        becomes=result["architecture"],
        source={name: _fingerprint(name, entry) for name, entry in field(source, "files", dict, "source").items()},
        result={name: _fingerprint(name, entry) for name, entry in field(result, "files", dict, "result").items()},
        plan=field(document, "plan", dict),
        tensors=field(document, "tensors", dict),
        smallest_divisor=divisor,
        reload=field(document, "reload", dict),
        options=options,
        hub=hub,
        limits=tuple(limits),
    )


def _fingerprint(name: str, entry: Any) -> Fingerprint:
    if not is_sound_name(name):
        raise ModelError(f"it names the file {quoted(name)}, which is none beside it")
    size, digest = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if type(size) is not int or size < 0 or not isinstance(digest, str) or len(digest) != 64:
        raise ModelError(f"expected the size and the SHA-256 of {quoted(name)}, found {quoted(entry)}")
    return Fingerprint(size, digest)
