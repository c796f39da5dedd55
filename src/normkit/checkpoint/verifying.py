"""`normkit verify`: a folded checkpoint held against its source, from the files alone; neither model is run.

Of the certificate only what was asked for is taken. From that and the source the plan is made anew, from the plan every
tensor, and from all of it another certificate: nothing needs to be believed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from normkit.checkpoint.applying import Progress
from normkit.checkpoint.arithmetic import one_thread_an_operation
from normkit.checkpoint.carrying import carried, code
from normkit.checkpoint.certificate import NAME, Certificate, certify, plain, read_certificate
from normkit.checkpoint.configuration import CONFIG
from normkit.checkpoint.derivation import Derived, derive, header_faults
from normkit.checkpoint.fingerprints import Fingerprint, fingerprints, sha256
from normkit.checkpoint.layout import FileLayout, index, lay_out
from normkit.checkpoint.opening import Opened, folded_config, open_checkpoint
from normkit.checkpoint.plan import Plan
from normkit.checkpoint.planning import make_plan
from normkit.checkpoint.reloading import Reload, reload_check
from normkit.checkpoint.verification import RELATIONS, Checked, Verification, difference, judged
from normkit.checkpoint.weights import INDEX
from normkit.checkpoint.workers import Workers
from normkit.checkpoint.writing import Written
from normkit.errors import InputError, ModelError
from normkit.files import json_text
from normkit.text import quoted

_UNCOMPARED = {"residual", "reason", "reasons", "remarks"}


def verify(
    source: Path | str, result: Path | str, *, threads: int = 1, progress: Progress | None = None
) -> Verification:
    """Prove that a folder is what folding makes of another, or say where it is not.

    Every file is hashed, the plan is made anew, and every tensor is derived anew from the source and compared bit for
    bit. Files are read in pieces, so that memory does not grow with them.

    Args:
        source: The folder that was folded.
        result: The folder that came of it, with its certificate.
        threads: How many compute at a time.
        progress: Called with a stage, bytes done, and all bytes.

    Raises:
        InputError: If a folder or the certificate is not there.
        ModelError: If the certificate is none.

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
    workers = Workers(threads, "verifying", progress)
    try:
        with open_checkpoint(folder) as opened, one_thread_an_operation():
            checks = _checks(recorded, opened, made, workers)
    except ModelError as error:
        # The files as recorded may still be told from those that are there.
        checks = [_files("source files", folder, recorded.source), _files("result files", made, recorded.result)]
        checks.append(Checked(name="derivation", passed=False, what=str(error)))
    return Verification(source=recorded.architecture, result=recorded.becomes, checks=tuple(checks))


def _checks(recorded: Certificate, opened: Opened, folder: Path, workers: Workers) -> list[Checked]:
    plan = _plan(recorded, opened)
    layouts = lay_out(plan, opened.source)
    faults = header_faults(layouts, folder)
    whole = [layout for layout in layouts if layout.name not in faults]
    present = [folder / layout.name for layout in layouts if (folder / layout.name).is_file()]
    workers.total = sum(file.stat().st_size for file in (*opened.source.files, *present))
    workers.total += sum(layout.size - layout.starts[0] for layout in whole)
    derived = derive(plan, opened.source, whole, folder, workers=workers)
    written = Written(
        inputs=_hashes(opened.source.files, workers),
        outputs=_hashes(present, workers),
        residuals=derived.residuals,
    )
    settings = list(_settings(plan, layouts, opened, folder))
    # transformers would build whatever a forged configuration asks for.
    is_due = not faults and all(check.passed for check in settings)
    reload, reloaded = _reload(folder, recorded) if is_due else _not_reloaded()
    anew = certify(plan, written, reload, opened, folder, dtype=recorded.dtype, untie=recorded.untie)
    return [
        _same_files("source files", recorded.source, {**anew.source, **_others(recorded, anew, opened.folder)}),
        _same_files("result files", recorded.result, anew.result),
        _names(layouts, opened, anew),
        _same_plan(recorded, anew, plan),
        _headers(layouts, faults),
        *_relations(derived),
        *settings,
        _carried(opened.folder, anew),
        _figures(recorded, anew),
        reloaded,
        _spelling(recorded, folder),
    ]


def _plan(recorded: Certificate, opened: Opened) -> Plan:
    """What folding does to the source when it is asked for the same."""
    try:
        return make_plan(
            opened.graph,
            opened.config,
            opened.source,
            operations=recorded.operations,
            untie=recorded.untie,
            dtype=recorded.dtype,
            code=code(opened.states),
        )
    except InputError as error:
        raise ModelError(str(error)) from None


def _hashes(files: Sequence[Path], workers: Workers) -> dict[str, str]:
    found = workers.map([partial(sha256, file, workers.step) for file in files])
    return {file.name: digest for file, digest in zip(files, found, strict=True)}


def _others(recorded: Certificate, anew: Certificate, folder: Path) -> dict[str, Fingerprint]:
    """The files of the source that the certificate names and that the result, as it is now, has not."""
    names = [name for name in recorded.source if name not in anew.source and (folder / name).is_file()]
    return fingerprints(folder, names, {})


def _files(name: str, folder: Path, recorded: Mapping[str, Fingerprint]) -> Checked:
    there = [file for file in recorded if (folder / file).is_file()]
    return _same_files(name, recorded, fingerprints(folder, there, {}))


def _same_files(name: str, recorded: Mapping[str, Fingerprint], found: Mapping[str, Fingerprint]) -> Checked:
    """Whether the files are those that the certificate names."""
    faults = [f"{file} is missing" for file in recorded if file not in found]
    faults += [f"{file!a} is not in the certificate" for file in found if file not in recorded]
    for file in found:
        if file in recorded and found[file] != recorded[file]:
            faults.append(f"{file} is not the one in the certificate: {_contrast(recorded[file], found[file])}")
    size = sum(found[file].size for file in found)
    return judged(name, faults, f"{len(found)}, {size:,} bytes, of the size and SHA-256 that the certificate names")


def _contrast(recorded: Fingerprint, found: Fingerprint) -> str:
    if recorded.size != found.size:
        return f"{found.size:,} bytes, not {recorded.size:,}"
    return f"SHA-256 {found.sha256[:12]}..., not {recorded.sha256[:12]!a}..."


def _names(layouts: Sequence[FileLayout], opened: Opened, anew: Certificate) -> Checked:
    """Whether the result has the files that follow from the source, and no other."""
    due = {layout.name for layout in layouts} | {CONFIG} | {name for name, _ in carried(opened.folder)}
    due |= set() if index(tuple(layouts), opened.source) is None else {INDEX}
    faults = [f"{name} does not follow from the source" for name in sorted(anew.result.keys() - due)]
    faults += [f"{name} is missing" for name in sorted(due - anew.result.keys())]
    return judged("file names", faults, "each follows from the source, and none is missing")


def _same_plan(recorded: Certificate, anew: Certificate, plan: Plan) -> Checked:
    """Whether the certificate says of norms, tensors and settings what follows from the source."""
    parts = ("operations", "architecture", "becomes", "plan", "tensors")
    faults = []
    for part in parts:
        found, due = (_decided(getattr(certificate, part)) for certificate in (recorded, anew))
        if fault := difference(found, due, part):
            faults.append(fault)
    if faults and recorded.normkit != anew.normkit:
        faults[0] += f" (it was made by normkit {recorded.normkit!a}, this is {anew.normkit})"
    folded = sum(bool({norm.gain, norm.bias} & {"folded", "divided"}) for norm in plan.norms)
    rms = sum(norm.becomes_rms for norm in plan.norms)
    done = f"{folded} of {len(plan.norms)} norms folded"
    done += f", {rms} made RMSNorms" if rms else ""
    done += f", {len(plan.centred)} writers centred" if plan.centred else ""
    return judged("plan", faults, f"made anew from the source, it is the one recorded: {done}")


def _decided(part: Any) -> Any:
    """A part of a certificate without figures, which are compared on their own, and without its English.

    What is done to each norm and tensor, and what is refused where, is compared; why stands there for people, and may
    be worded better in a later version.
    """
    if isinstance(part, Mapping):
        return {key: _decided(value) for key, value in part.items() if key not in _UNCOMPARED}
    return [_decided(value) for value in part] if isinstance(part, list | tuple) else part


def _headers(layouts: Sequence[FileLayout], faults: Mapping[str, str]) -> Checked:
    count = sum(len(layout.edits) for layout in layouts)
    return judged("headers", list(faults.values()), f"names, dtypes, shapes and order of {count:,} tensors")


def _relations(derived: Derived) -> Iterator[Checked]:
    for relation, words in RELATIONS.items():
        if count := derived.tensors[relation]:
            faults = [deviation.what for deviation in derived.deviations.get(relation, ())]
            elements = derived.elements[relation]
            said = f"{count:,} {'tensor' if count == 1 else 'tensors'}, {elements:,} elements: {words}"
            yield judged(relation, faults, said)


def _settings(plan: Plan, layouts: Sequence[FileLayout], opened: Opened, folder: Path) -> Iterator[Checked]:
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


def _carried(folder: Path, anew: Certificate) -> Checked:
    """Whether what lies beside the weights is what lies beside those of the source."""
    names = [name for name, _ in carried(folder)]
    faults = [
        f"{name} differs from the source's"
        for name in names
        if name in anew.result and anew.source.get(name) != anew.result[name]
    ]
    return judged("carried files", faults, f"{len(names)}, as in the source")


def _figures(recorded: Certificate, anew: Certificate) -> Checked:
    """Whether the certificate states how far rounding went as it is."""
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
    largest = max(measured.values(), default=0.0)
    said = f"largest residual of a sum {largest:.2g}" if measured else "no sum was rounded"
    if anew.smallest_divisor is not None:
        said += f", smallest gain divided by {anew.smallest_divisor['size']:.3g}"
    return judged("figures", [fault for fault in faults if fault], said)


def _reload(folder: Path, recorded: Certificate) -> tuple[Reload, Checked]:
    """What transformers says of the result, and whether that is what the certificate says."""
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


def _not_reloaded() -> tuple[Reload, Checked]:
    reason = "the files do not follow from the source"
    unknown = Checked(name="reload", passed=None, what=f"not tried: {reason}")
    return Reload(class_name="", ran=False, reason=reason), unknown


def _spelling(recorded: Certificate, folder: Path) -> Checked:
    """Whether the certificate holds nothing beside what it was read for."""
    try:
        is_plain = recorded.text().encode() == read_certificate(folder)
    except (ValueError, RecursionError):
        is_plain = False
    faults = [] if is_plain else [f"{NAME} is not written as normkit writes it"]
    return judged("certificate", faults, f"it says nothing else; made by normkit {recorded.normkit}")
