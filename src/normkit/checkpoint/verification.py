"""`normkit verify`: a folded checkpoint compared with its source, from the files alone; neither model is run.

Only what was asked for is taken from the certificate. From that and the source the plan is made again, from the plan
every tensor, and from all of it another certificate: nothing has to be trusted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from normkit.checkpoint.applying import vectors
from normkit.checkpoint.arithmetic import one_thread_an_operation
from normkit.checkpoint.build_model import Reload, reload_check
from normkit.checkpoint.certificate import Certificate, Written, certify, plain, read_certificate
from normkit.checkpoint.derivation import derive, header_faults
from normkit.checkpoint.folding import Progress, Workers
from normkit.checkpoint.limits import limits_of
from normkit.checkpoint.migration import asked_scales
from normkit.checkpoint.model_folder import (
    CERTIFICATE,
    CONFIG,
    INDEX,
    Fingerprint,
    copied_files,
    fingerprints,
    sha256,
    snapshot_of,
)
from normkit.checkpoint.opening import OpenedFolder, folded_config, open_checkpoint
from normkit.checkpoint.orthogonal import asked_matrices
from normkit.checkpoint.plan import RELATIONS, FoldPlan
from normkit.checkpoint.planning import make_plan
from normkit.checkpoint.shard import FileLayout, index, lay_out
from normkit.errors import InputError, ModelError
from normkit.files import json_text
from normkit.text import counted, quoted

_SCHEMA_VERSION = 1
# Figures are compared on their own. The sentences may be worded better in a later version.
_UNCOMPARED = {"residual", "reason", "reasons", "remarks"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """One thing that was proved, or not."""

    name: str
    passed: bool | None
    """Whether it holds; None if it could not be tried here."""
    what: str
    """The finding, with the place of the first failure."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The checks of a folded checkpoint against its source."""

    source: str
    """Class in the source's config.json."""
    result: str
    """Class in the result's config.json."""
    checks: tuple[Checked, ...]
    unproved: tuple[str, ...] = ()
    """The statements about the operations done that the files do not show, one sentence each."""

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
            **({"does_not_prove": list(self.unproved)} if self.unproved else {}),
            "checks": {check.name: {"passed": check.passed, "what": check.what} for check in self.checks},
        }


def verify(
    source: Path | str,
    result: Path | str,
    *,
    scales: Path | str | None = None,
    matrix: Path | str | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> Verification:
    """Prove that a folder is what folding makes of another, or say where it is not.

    Every file is hashed, the plan is made again, and every tensor is derived again from the source and compared bit for
    bit. Files are read in pieces, so that memory does not grow with them.

    Args:
        source: The folder that was folded.
        result: The folder that folding wrote, with its certificate.
        scales: The file that "migrate" was given.
        matrix: The file that "rotate" was given.
        threads: How many threads compute.
        progress: Called with a stage, bytes done, and all bytes.

    Raises:
        InputError: If a folder or the certificate is not there, or a file that the fold was given is not.
        ModelError: If the certificate cannot be read as one.

    Example:
        >>> import tempfile
        >>> from normkit import demo
        >>> from normkit.checkpoint.folding import fold
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = fold(demo.directory("rmsnorm"), f"{folder}/folded", untie=True)
        ...     verify(demo.directory("rmsnorm"), f"{folder}/folded").passed
        True
    """
    folder, made = Path(source).expanduser(), Path(result).expanduser()
    for path in (folder, made):
        if not path.is_dir():
            raise InputError(f"expected the folder of a checkpoint, got {path}: it is none; give SRC, then DST")
    recorded = Certificate.read(made)
    options = asked_options(recorded, made, scales, matrix)
    workers = Workers(threads, progress)
    try:
        with open_checkpoint(folder) as opened, one_thread_an_operation():
            checks = _checks(recorded, opened, made, workers, options)
    except ModelError as error:
        checks = []
        # The recorded files can still be compared with those that are there.
        for name, inner, files in (
            ("source files", folder, recorded.source),
            ("result files", made, recorded.result),
        ):
            there = fingerprints(inner, [file for file in files if (inner / file).is_file()], {})
            checks.append(same_files(name, files, there))
        checks.append(Checked(name="derivation", passed=False, what=str(error)))
    return Verification(
        source=recorded.architecture,
        result=recorded.becomes,
        checks=tuple(checks),
        unproved=limits_of(recorded.operations),
    )


def asked_options(
    recorded: Certificate, made: Path, scales: Path | str | None, matrix: Path | str | None
) -> dict[str, Any]:
    """The options of a recorded fold as `make_plan` takes them, with the files that it was given.

    Raises:
        InputError: If a file is missing, or is one that it was not given.
    """
    options = dict(recorded.options)
    for name, file in (("scales", scales), ("matrix", matrix)):
        digest = options.pop(name, None)
        if (digest is None) != (file is None):
            raise InputError(
                f"{made} was folded without --{name}; leave it out"
                if digest is None
                else f"{made} was folded with a file (SHA-256 {digest[:12]!a}...); give it with --{name}"
            )
    given = {key: options.pop(key) for key in ("alpha", "powers_of_two") if key in options}
    return options | {"scales": asked_scales(scales, **given), "matrix": asked_matrices(matrix)}


def _checks(
    recorded: Certificate, opened: OpenedFolder, folder: Path, workers: Workers, options: Mapping[str, Any]
) -> list[Checked]:
    try:
        plan = make_plan(opened, operations=recorded.operations, untie=recorded.untie, dtype=recorded.dtype, **options)
    except InputError as error:
        raise ModelError(str(error)) from None
    layouts = lay_out(plan, opened.source)
    faults = header_faults(layouts, folder)
    whole = [layout for layout in layouts if layout.name not in faults]
    present = [folder / layout.name for layout in layouts if (folder / layout.name).is_file()]
    made = vectors(plan, opened.source, workers)
    sizes = [file.stat().st_size for file in (*opened.source.files, *present)]
    workers.begin("verifying", sum(sizes) + sum(layout.size - layout.starts[0] for layout in whole))
    derived = derive(made, opened.source, whole, folder, workers=workers)
    written = Written(
        inputs=hashes(opened.source.files, workers),
        outputs=hashes(present, workers),
        residuals=derived.residuals,
    )
    settings = list(_settings(plan, layouts, opened, folder))
    # transformers would build whatever a forged configuration asks for.
    if faults or not all(check.passed for check in settings):
        reason = "the files do not follow from the source"
        reload = Reload(class_name="", ran=False, reason=reason)
        reloaded = Checked(name="reload", passed=None, what=f"not tried: {reason}")
    else:
        reload, reloaded = _reload(folder, recorded)
    anew = certify(plan, written, reload, opened, folder, dtype=recorded.dtype, untie=recorded.untie)
    # Files of the source that the certificate names and the result, as it is now, does not have.
    others = [name for name in recorded.source if name not in anew.source and (opened.folder / name).is_file()]
    num_tensors = sum(len(layout.edits) for layout in layouts)
    relations = [
        judged(
            relation,
            derived.deviations.get(relation, []),
            f"{counted(derived.tensors[relation], 'tensor')}, {derived.elements[relation]:,} elements: {words}",
        )
        for relation, words in RELATIONS.items()
        if derived.tensors[relation]
    ]
    copied = [name for name, _ in copied_files(opened.folder)]
    changed = [
        f"{name} differs from the source's"
        for name in copied
        if name in anew.result and anew.source.get(name) != anew.result[name]
    ]
    return [
        same_files("source files", recorded.source, {**anew.source, **fingerprints(opened.folder, others, {})}),
        same_files("result files", recorded.result, anew.result),
        _names(layouts, opened, anew),
        _same_plan(recorded, anew, plan),
        judged("headers", list(faults.values()), f"names, dtypes, shapes and order of {num_tensors:,} tensors"),
        *relations,
        *settings,
        judged("carried files", changed, f"{len(copied)}, as in the source"),
        _figures(recorded, anew),
        reloaded,
        _spelling(recorded, folder, snapshot_of(opened.folder)),
    ]


def hashes(files: Sequence[Path], workers: Workers) -> dict[str, str]:
    """File name -> SHA-256."""
    found = workers.map([partial(sha256, file, workers.step) for file in files])
    return {file.name: digest for file, digest in zip(files, found, strict=True)}


def same_files(name: str, recorded: Mapping[str, Fingerprint], found: Mapping[str, Fingerprint]) -> Checked:
    """Whether the files are those that the certificate names."""
    faults = [f"{file} is missing" for file in recorded if file not in found]
    faults += [f"{file!a} is not in the certificate" for file in found if file not in recorded]
    for file in found:
        if file in recorded and found[file] != recorded[file]:
            old, new = recorded[file], found[file]
            differs = f"{new.size:,} bytes, not {old.size:,}"
            if old.size == new.size:
                differs = f"SHA-256 {new.sha256[:12]}..., not {old.sha256[:12]!a}..."
            faults.append(f"{file} is not the one in the certificate: {differs}")
    size = sum(found[file].size for file in found)
    return judged(name, faults, f"{len(found)}, {size:,} bytes, of the size and SHA-256 that the certificate names")


def _names(layouts: Sequence[FileLayout], opened: OpenedFolder, anew: Certificate) -> Checked:
    """Whether the result has the files that follow from the source, and no other."""
    due = {layout.name for layout in layouts} | {CONFIG} | {name for name, _ in copied_files(opened.folder)}
    due |= set() if index(tuple(layouts), opened.source) is None else {INDEX}
    faults = [f"{name} does not follow from the source" for name in sorted(anew.result.keys() - due)]
    faults += [f"{name} is missing" for name in sorted(due - anew.result.keys())]
    return judged("file names", faults, "each follows from the source, and none is missing")


def _same_plan(recorded: Certificate, anew: Certificate, plan: FoldPlan) -> Checked:
    """Whether what the certificate says about norms, tensors and settings follows from the source."""
    faults = []
    for part in ("operations", "architecture", "becomes", "plan", "tensors"):
        found, due = (_decided(getattr(certificate, part)) for certificate in (recorded, anew))
        if fault := difference(found, due, part):
            faults.append(fault)
    if faults and recorded.normkit != anew.normkit:
        faults[0] += f" (it was made by normkit {recorded.normkit!a}, this is {anew.normkit})"
    done = f"{plan.num_folded} of {len(plan.norms)} norms folded"
    done += f", {plan.num_rms} made RMSNorms" if plan.num_rms else ""
    done += f", {len(plan.centred)} writers centred" if plan.centred else ""
    return judged("plan", faults, f"made anew from the source, it is the one recorded: {done}")


def _decided(part: Any) -> Any:
    """A part of a certificate without its figures and sentences: only what is done where, and refused where."""
    if isinstance(part, Mapping):
        return {key: _decided(value) for key, value in part.items() if key not in _UNCOMPARED}
    return [_decided(value) for value in part] if isinstance(part, list | tuple) else part


def _settings(plan: FoldPlan, layouts: Sequence[FileLayout], opened: OpenedFolder, folder: Path) -> Iterator[Checked]:
    """Whether config.json and the index are, byte for byte, what folding writes."""
    config = json_text(folded_config(opened.config, plan))
    said = ", ".join([*plan.config, *(f"no {key}" for key in plan.dropped)]) or "nothing"
    yield _same_text("config.json", folder / CONFIG, config, f"the source's, changed: {said}")
    document = index(tuple(layouts), opened.source)
    if document is not None:
        yield _same_text("index", folder / INDEX, json_text(document), f"names the file of each tensor, in {INDEX}")


def _same_text(name: str, path: Path, due: str, said: str) -> Checked:
    if not path.is_file():
        return Checked(name=name, passed=False, what=f"{path.name} is missing")
    found = path.read_bytes()
    if found == due.encode():
        return Checked(name=name, passed=True, what=said)
    pairs = enumerate(zip(found.splitlines(), due.encode().splitlines(), strict=False), 1)
    line, (there, wanted) = next(((at, pair) for at, pair in pairs if pair[0] != pair[1]), (0, (b"", b"")))
    what = f"line {line} is {quoted(there)}, {quoted(wanted)} follows from the source" if line else "it ends elsewhere"
    return Checked(name=name, passed=False, what=f"{path.name}: {what}")


def _figures(recorded: Certificate, anew: Certificate) -> Checked:
    """Whether the certificate states correctly how far rounding went."""
    measured = {name: edit["residual"] for name, edit in anew.tensors.items() if "residual" in edit}
    stated = {
        name: edit["residual"]
        for name, edit in recorded.tensors.items()
        if isinstance(edit, dict) and "residual" in edit
    }
    faults = [
        difference(stated, measured, "residual"),
        difference(recorded.smallest_divisor, anew.smallest_divisor, "smallest_divisor"),
    ]
    sums, powers = (
        [residual for name, residual in measured.items() if anew.tensors[name]["relation"] == relation]
        for relation in ("sum", "power")
    )
    said = f"largest residual of a sum {max(sums):.2g}" if sums else "no sum was rounded"
    if powers:
        lost = sum(residual > 0 for residual in powers)
        said += f", {counted(lost, 'tensor')} lost bits to underflow" if lost else ", no power of two lost a bit"
    if anew.smallest_divisor is not None:
        said += f", smallest gain divided by {anew.smallest_divisor['size']:.3g}"
    return judged("figures", [fault for fault in faults if fault], said)


def _reload(folder: Path, recorded: Certificate) -> tuple[Reload, Checked]:
    """The report of transformers on the result, and whether the certificate says the same."""
    try:
        found = reload_check(folder)
    except ModelError as error:
        return Reload(class_name="", ran=False), Checked(name="reload", passed=False, what=str(error))
    if not found.ran:
        return found, Checked(name="reload", passed=None, what=f"not tried: {found.reason}")
    faults = [f"{name} is missing" for name in found.missing]
    faults += [f"{name} is not used" for name in found.unexpected]
    faults += [f"{name} has another shape" for name in found.mismatched]
    stated = {**recorded.reload, "ran": True, "reason": ""}
    if fault := difference(stated, plain(dataclasses.asdict(found)), "reload"):
        faults.append(fault)
    said = f"transformers loads it as {found.class_name}, with no weight missing or left over"
    return found, judged("reload", faults, said)


def _spelling(recorded: Certificate, folder: Path, given: str) -> Checked:
    """Whether the certificate contains nothing but what was read from it, and the commit that was given, if one was."""
    try:
        is_plain = recorded.text().encode() == read_certificate(folder)
    except (ValueError, RecursionError):
        is_plain = False
    faults = [] if is_plain else [f"{CERTIFICATE} is not written as normkit writes it"]
    name, _, commit = recorded.hub.partition("@")
    if given.partition("@")[0] == name and recorded.hub != given:
        faults.append(f"{CERTIFICATE} names the commit {commit} of {name}, and {given} was given")
    source = f" from {name}, commit {commit[:8]}" if name else ""
    return judged("certificate", faults, f"it says nothing else; made by normkit {recorded.normkit}{source}")


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
