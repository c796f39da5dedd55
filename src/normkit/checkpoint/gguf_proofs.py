"""`normkit verify SRC DST.gguf`: a fold that was written as a GGUF file, derived again from its source and compared.

The file says what was asked for; the plan is made again from the source, every tensor from the plan, arranged, rounded
and compared bit for bit, one tensor in memory at a time. Where the GGUF file that gave the metadata is given, keys and
arrangements must be its; else a kind of tensor must have one arrangement in all layers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normkit.checkpoint.applying import contents, vectors
from normkit.checkpoint.arithmetic import one_thread_an_operation
from normkit.checkpoint.certificate import Certificate, certificate_of
from normkit.checkpoint.folding import Progress, Workers
from normkit.checkpoint.gguf_folds import (
    DTYPES,
    FILE_TYPE,
    FOLD,
    HEAD,
    Naming,
    arranged,
    as_stored,
    differing_keys,
    gguf_dtypes,
    read,
)
from normkit.checkpoint.limits import limits_of
from normkit.checkpoint.matrices import Outcome
from normkit.checkpoint.model_folder import fingerprints
from normkit.checkpoint.opening import OpenedFolder, open_checkpoint
from normkit.checkpoint.plan import RELATIONS, Edit, FoldPlan
from normkit.checkpoint.planning import make_plan
from normkit.checkpoint.shard import output_info
from normkit.checkpoint.verification import Checked, Verification, asked_options, hashes, judged, same_files
from normkit.errors import InputError, ModelError
from normkit.files import parse_json
from normkit.text import counted, quoted, shortened

_UNSEEN = (
    "tokenizer and settings of a GGUF file are no part of SRC: with --metadata they are compared with those of the "
    "file that they were taken from",
)


def verify_gguf(
    source: Path | str,
    result: Path | str,
    *,
    metadata: Path | str | None = None,
    scales: Path | str | None = None,
    matrix: Path | str | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> Verification:
    """Prove that a GGUF file is what folding makes of a folder, or say where it is not.

    Args:
        source: The folder that was folded.
        result: The GGUF file that folding wrote.
        metadata: The GGUF file of the source that tokenizer and settings were taken from.
        scales: The file that "migrate" was given.
        matrix: The file that "rotate" was given.
        threads: How many threads compute gains and biases.
        progress: Called with a stage, bytes done, and all bytes.

    Raises:
        InputError: If a file is not there, or the package gguf is missing.
        ModelError: If the file is no GGUF file that normkit wrote.

    Example:
        >>> verify_gguf("SmolLM2-135M", "folded.gguf", metadata="smollm2.gguf").passed  # doctest: +SKIP
        True
    """
    folder, made = Path(source).expanduser(), Path(result).expanduser()
    if not folder.is_dir():
        raise InputError(f"expected the folder of a checkpoint, got {folder}: it is none; give SRC, then DST.gguf")
    for path in (made, *([] if metadata is None else [Path(metadata)])):
        if not path.is_file():
            raise InputError(f"expected a GGUF file, found none at {path}; give SRC, then DST.gguf")
    reader = read(made)
    recorded = _recorded(reader, made)
    options = asked_options(recorded, made, scales, matrix)
    workers = Workers(threads, progress)
    other = None if metadata is None else Path(metadata)
    try:
        with open_checkpoint(folder) as opened, one_thread_an_operation():
            checks = list(_checks(recorded, opened, reader, made, other, workers, options))
    except ModelError as error:
        checks = [Checked(name="derivation", passed=False, what=str(error))]
    return Verification(
        source=recorded.architecture,
        result=recorded.becomes,
        checks=tuple(checks),
        unproved=(*limits_of(recorded.operations), *(_UNSEEN if other is None else ())),
    )


def _recorded(reader: Any, path: Path) -> Certificate:
    """The record of the fold in the file: what was asked for, and of what."""
    if FOLD not in reader.fields:
        raise ModelError(
            f"expected a GGUF file that normkit fold wrote, {path} has no key {FOLD}; fold the source again"
        )
    try:
        return certificate_of(parse_json(str(reader.fields[FOLD].contents()).encode()))
    except (InputError, ModelError) as error:
        raise ModelError(f"{FOLD} of {path} is no record of a fold: {error}; fold the source again") from None


def _checks(
    recorded: Certificate,
    opened: OpenedFolder,
    reader: Any,
    made: Path,
    metadata: Path | None,
    workers: Workers,
    options: Mapping[str, Any],
) -> Iterator[Checked]:
    try:
        plan = make_plan(opened, operations=recorded.operations, untie=recorded.untie, dtype=recorded.dtype, **options)
    except InputError as error:
        raise ModelError(str(error)) from None
    workers.begin("hashing", sum(file.stat().st_size for file in opened.source.files))
    inputs = hashes(opened.source.files, workers)
    beside = [name for name in recorded.source if name not in inputs and (opened.folder / name).is_file()]
    yield same_files("source files", recorded.source, fingerprints(opened.folder, beside, inputs))
    becomes = plan.config.get("architectures", [plan.architecture])[0]
    due = (plan.operations, plan.architecture, becomes)
    faults = [
        f"{quoted(str(found))} is recorded, {quoted(str(wanted))} follows from the source"
        for found, wanted in zip((recorded.operations, recorded.architecture, recorded.becomes), due, strict=True)
        if found != wanted
    ]
    asked = ", ".join([*plan.operations, *(f"{key} {value}" for key, value in plan.options.items())])
    yield judged("plan", faults, f"made anew: {asked}; {plan.num_folded} of {len(plan.norms)} norms folded")
    naming = Naming.of(reader, made)
    held = {tensor.name: tensor for tensor in reader.tensors}
    edits = {naming.name(edit.name) or edit.name: edit for edit in plan.edits}
    if opened.graph.is_tied and not plan.untie:
        edits.pop(HEAD, None)
    kinds = {tensor.tensor_type.name for tensor in held.values() if len(tensor.shape) > 1}
    dtype = next((dtype for dtype, (kind, _, _) in DTYPES.items() if {kind} == kinds), "")
    faults = [f"{name} is missing" for name in edits if name not in held]
    faults += [f"{name} does not follow from the source" for name in held if name not in edits]
    faults += [] if dtype else [f"its matrices are {', '.join(sorted(kinds))}, not one of {', '.join(DTYPES)}"]
    for name in edits.keys() & held.keys():
        shape = output_info(edits[name], opened.source.tensors).shape
        if tuple(int(axis) for axis in held[name].shape[::-1]) != shape:
            faults.append(f"{name} has another shape than {shape}")
        elif len(shape) == 1 and held[name].tensor_type.name != "F32":
            faults.append(f"{name} is {held[name].tensor_type.name}, and vectors are F32")
    if dtype and gguf_dtypes(opened.source, dtype)[1] != recorded.dtype:
        faults.append(f"a fold of dtype {recorded.dtype} does not give {dtype}")
    yield judged("tensors", faults, f"names, dtypes and shapes of {counted(len(held), 'tensor')}, matrices in {dtype}")
    arrangements = None
    if metadata is not None:
        other = read(metadata)
        seen = arranged(other, opened.source, metadata, opened.graph.is_tied)
        arrangements = {each.name: each.words for each in seen}
        yield judged("metadata", differing_keys(reader, other), f"{len(other.fields):,} keys, as in {metadata.name}")
    written = reader.fields[FILE_TYPE].contents() if FILE_TYPE in reader.fields else None
    wrong = [] if dtype and written == DTYPES[dtype][2] else [f"{FILE_TYPE} is {written}"]
    yield judged("file type", wrong, f"{FILE_TYPE} is {written}, as llama.cpp numbers {dtype}")
    if not faults:
        yield from _derived(plan, edits, opened, held, naming, dtype, arrangements, workers)


def _derived(
    plan: FoldPlan,
    edits: Mapping[str, Edit],
    opened: OpenedFolder,
    held: Mapping[str, Any],
    naming: Naming,
    dtype: str,
    due: Mapping[str, str] | None,
    workers: Workers,
) -> Iterator[Checked]:
    """Every tensor made again, under each arrangement that it may have."""
    made = vectors(plan, opened.source, workers)
    workers.begin("verifying", sum(int(tensor.n_bytes) for tensor in held.values()))
    deviations: dict[str, list[str]] = defaultdict(list)
    tensors: dict[str, int] = defaultdict(int)
    elements: dict[str, int] = defaultdict(int)
    fitting: dict[str, set[str]] = {}
    for name, edit in edits.items():
        shape = output_info(edit, opened.source.tensors).shape
        values = torch.cat([chunk.flatten() for chunk in contents(edit, opened.source, made, Outcome())]).reshape(shape)
        there = np.ascontiguousarray(held[name].data).reshape(-1).view(np.uint8)
        choices, found = naming.choices(name, shape), {}
        for words, arrange in choices.items() if due is None or name not in due else [(due[name], choices[due[name]])]:
            stored = as_stored(arrange(values), dtype, name).numpy().reshape(-1)
            found[words] = int((stored.view(np.uint8) != there).sum())
        kind = re.sub(r"\d+", "*", name)
        fits = {words for words, count in found.items() if not count}
        if not fits:
            best = min(found, key=lambda each: found[each])
            said = f", {best}" if len(choices) > 1 else ""
            deviations[edit.relation].append(f"{name} differs from what follows in {found[best]:,} bytes{said}")
        else:
            fitting[kind] = fitting.get(kind, fits) & fits
        tensors[edit.relation] += 1
        elements[edit.relation] += values.numel()
        workers.step(there.size)
    for relation, words in RELATIONS.items():
        if tensors[relation]:
            said = f"{counted(tensors[relation], 'tensor')}, {elements[relation]:,} elements: {words}"
            yield judged(relation, deviations[relation], said)
    yield _arrangement(fitting, due is not None)


def _arrangement(fitting: Mapping[str, set[str]], is_seen: bool) -> Checked:
    """Whether each kind of tensor is arranged in one way in all layers."""
    faults = [f"{kind} is arranged differently in different layers" for kind, words in fitting.items() if not words]
    alike: dict[str, list[str]] = defaultdict(list)
    for kind, words in fitting.items():
        if words:
            alike["as it is" if "as it is" in words else min(words)].append(kind)
    said = "; ".join(f"{words}: {shortened(kinds, 3)}" for words, kinds in alike.items() if words != "as it is")
    rest = f"{said or 'none'}; all others as they are" if alike else "none"
    return judged("arrangement", faults, rest + (", as in the metadata's file" if is_seen else ""))
