"""What was done to a checkpoint, beside its weights: enough to derive each tensor again and compare it bit for bit.

Nothing in it is believed. `normkit verify` makes it anew from the two folders and holds it against this one; only what
was asked for is taken from it. It holds no time, no path and no name of a machine.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from normkit.checkpoint.fingerprints import LONGEST_NAME, Fingerprint, file_names, fingerprints, is_sound_name
from normkit.checkpoint.opening import Opened, folded_config
from normkit.checkpoint.plan import OPERATIONS, Plan, Quotient, VectorEdit
from normkit.checkpoint.planning import DTYPES
from normkit.checkpoint.reloading import Reload
from normkit.checkpoint.source import vector
from normkit.checkpoint.verification import LIMITS
from normkit.checkpoint.writing import Written
from normkit.errors import InputError, ModelError
from normkit.files import json_text, parse_json
from normkit.text import quoted

NAME = "normkit_certificate.json"
"""Of the file, in the folder of the result."""

_SCHEMA_VERSION = 1
# A mixture of a thousand experts takes a quarter of it.
_LARGEST = 2**26
_KEYS: dict[str, dict[str, type]] = {
    "asked": {"operations": list, "untie": bool, "dtype": str},
    "source": {"architecture": str, "files": dict},
    "result": {"architecture": str, "files": dict},
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Certificate:
    """What folding made of a checkpoint.

    Attributes:
        normkit: Version that made it.
        operations: What was asked for, in the order of `OPERATIONS`.
        untie: Whether a tied head was to be given a table of its own.
        dtype: Of the result: "same", or "float32".
        architecture: Class that the source's config names.
        becomes: Class that the result's config names.
        source: Name -> file of the source that the result was made from.
        result: Name -> file of the result, but for this one.
        plan: What becomes of each norm, what was refused and why, what changes in config.json: a `Plan` as JSON.
        tensors: Name of each tensor of the result -> how it follows from the source, and for sums what rounding left.
        smallest_divisor: The gain nearest to zero that a bias was divided by: its weight, its coordinate, its size.
            None where nothing was divided.
        reload: What transformers says when it loads the result: a `Reload` as JSON.
        limits: What the certificate does not prove, in words; none in those of early versions.
    """

    normkit: str
    operations: tuple[str, ...]
    untie: bool
    dtype: str
    architecture: str
    becomes: str
    source: Mapping[str, Fingerprint]
    result: Mapping[str, Fingerprint]
    plan: Mapping[str, Any]
    tensors: Mapping[str, Any]
    smallest_divisor: Mapping[str, Any] | None
    reload: Mapping[str, Any]
    limits: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, the same for the same certificate."""
        return {
            "schema_version": _SCHEMA_VERSION,
            "normkit": self.normkit,
            "asked": {"operations": list(self.operations), "untie": self.untie, "dtype": self.dtype},
            "source": {"architecture": self.architecture, "files": _listed(self.source)},
            "result": {"architecture": self.becomes, "files": _listed(self.result)},
            "reload": dict(self.reload),
            "smallest_divisor": None if self.smallest_divisor is None else dict(self.smallest_divisor),
            "plan": dict(self.plan),
            "tensors": dict(self.tensors),
            **({"does_not_prove": list(self.limits)} if self.limits else {}),
        }

    def text(self) -> str:
        """What the file holds."""
        return json_text(self.to_json())

    @classmethod
    def read(cls, folder: Path) -> Certificate:
        """The certificate in the folder of a result.

        Raises:
            InputError: If there is none, or it cannot be read.
            ModelError: If it is none, of another schema, or names a file outside of its folder; one line.
        """
        path = folder / NAME
        content = read_certificate(folder)
        try:
            if len(content) > _LARGEST:
                raise ModelError(f"it has more than {_LARGEST:,} bytes")
            return _certificate(parse_json(content))
        except (InputError, ModelError) as error:
            raise ModelError(f"{path} is no certificate of a fold: {error}; fold the source again") from None


def certify(
    plan: Plan,
    written: Written,
    reload: Reload,
    opened: Opened,
    folder: Path,
    *,
    dtype: str,
    untie: bool = False,
) -> Certificate:
    """The certificate of a result that is whole but for it.

    Args:
        plan: What was done.
        written: What was read and written of the weights; other files are hashed here.
        reload: What transformers says of the result.
        opened: The source.
        folder: The result.
        dtype: As asked.
        untie: As asked: a plan may have refused it.

    Raises:
        InputError: If a file cannot be read.
    """
    beside = [name for name in file_names(folder) if name not in {*written.outputs, NAME}]
    shared = [name for name in beside if (opened.folder / name).is_file()]
    planned = plain(plan.to_json())
    tensors = {edit.pop("name"): _filled(edit) for edit in planned.pop("edits")}
    for name, residual in written.residuals.items():
        tensors[name]["residual"] = residual
    return Certificate(
        normkit=version("normkit"),
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
        limits=LIMITS,
    )


def read_certificate(folder: Path) -> bytes:
    """The bytes of the certificate in a folder.

    At most one byte more than one may have.

    Raises:
        InputError: If there is none, or it cannot be read.
    """
    path = folder / NAME
    if not path.is_file():
        raise InputError(f"expected the folder of a folded checkpoint, found no {NAME} in {folder}; give SRC, then DST")
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
    """A dictionary without what says nothing: None, an empty list, a flag that is not set."""
    return {
        key: _filled(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None and value is not False and value != []
    }


def _smallest_divisor(plan: Plan, opened: Opened) -> dict[str, Any] | None:
    found: list[tuple[float, str, int]] = []
    for edit in plan.edits:
        if not isinstance(edit, VectorEdit) or not isinstance(edit.value, Quotient):
            continue
        gain = edit.value.gain
        sizes = (vector(opened.source, gain.weight) + gain.offset).abs()
        # 0 / 0 is 0, and a kept coordinate is not divided.
        is_divided = vector(opened.source, str(edit.source)) != 0
        is_divided[list(gain.kept)] = False
        sizes = sizes.masked_fill(~is_divided, math.inf)
        if bool(is_divided.any()):
            found.append((float(sizes.min()), gain.weight, int(sizes.argmin())))
    if not found:
        return None
    size, name, place = min(found)
    return {"weight": name, "coordinate": place, "size": size}


def _certificate(document: Any) -> Certificate:
    """The certificate that a JSON document is.

    Raises:
        ModelError: If it is none; with the reason alone.
    """
    if not isinstance(document, dict):
        raise ModelError(f"it holds a {type(document).__name__}")
    found = document.get("schema_version")
    if type(found) is not int or found != _SCHEMA_VERSION:
        raise ModelError(f"expected schema_version {_SCHEMA_VERSION}, found {quoted(found)}")
    for key, kinds in _KEYS.items():
        part = document.get(key)
        if not isinstance(part, dict):
            raise ModelError(f"expected a table under {key!r}, found {quoted(part)}")
        for inner, kind in kinds.items():
            if type(part.get(inner)) is not kind:
                raise ModelError(f"expected a {kind.__name__} under '{key}.{inner}', found {quoted(part.get(inner))}")
    for key in ("plan", "tensors", "reload"):
        if not isinstance(document.get(key), dict):
            raise ModelError(f"expected a table under {key!r}, found {quoted(document.get(key))}")
    asked, divisor = document["asked"], document.get("smallest_divisor")
    if unknown := [name for name in asked["operations"] if name not in OPERATIONS]:
        raise ModelError(f"expected operations of {', '.join(OPERATIONS)}, found {quoted(unknown[0])}")
    if asked["dtype"] not in DTYPES:
        raise ModelError(f"expected a dtype of {', '.join(DTYPES)}, found {quoted(asked['dtype'])}")
    if not (divisor is None or isinstance(divisor, dict)):
        raise ModelError(f"expected a table or nothing under 'smallest_divisor', found {quoted(divisor)}")
    for words in (document.get("normkit"), document["source"]["architecture"], document["result"]["architecture"]):
        if not isinstance(words, str) or not words.isprintable() or len(words) > LONGEST_NAME:
            raise ModelError(f"expected a version and two names of classes, found {quoted(words)}")
    limits = document.get("does_not_prove", [])
    if not isinstance(limits, list) or not all(isinstance(words, str) and words.isprintable() for words in limits):
        raise ModelError(f"expected sentences under 'does_not_prove', found {quoted(limits)}")
    return Certificate(
        normkit=document["normkit"],
        operations=tuple(asked["operations"]),
        untie=asked["untie"],
        dtype=asked["dtype"],
        architecture=document["source"]["architecture"],
        becomes=document["result"]["architecture"],
        source={name: _fingerprint(name, entry) for name, entry in document["source"]["files"].items()},
        result={name: _fingerprint(name, entry) for name, entry in document["result"]["files"].items()},
        plan=document["plan"],
        tensors=document["tensors"],
        smallest_divisor=divisor,
        reload=document["reload"],
        limits=tuple(limits),
    )


def _fingerprint(name: str, entry: Any) -> Fingerprint:
    if not is_sound_name(name):
        raise ModelError(f"it names the file {quoted(name)}, which is none beside it")
    size, digest = (entry.get("bytes"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
    if type(size) is not int or size < 0 or not isinstance(digest, str) or len(digest) != 64:
        raise ModelError(f"expected the size and the SHA-256 of {quoted(name)}, found {quoted(entry)}")
    return Fingerprint(size, digest)
