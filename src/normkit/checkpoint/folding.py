"""`normkit fold`: a checkpoint on disk in, an exactly folded one out, with a certificate beside its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from normkit.checkpoint.applying import Progress
from normkit.checkpoint.carrying import carried, code
from normkit.checkpoint.certificate import NAME, Certificate, certify
from normkit.checkpoint.configuration import CONFIG
from normkit.checkpoint.layout import output_info
from normkit.checkpoint.memory import require_change
from normkit.checkpoint.opening import Opened, folded_config, open_checkpoint
from normkit.checkpoint.plan import Plan
from normkit.checkpoint.planning import make_plan
from normkit.checkpoint.reloading import Reload, reload_of
from normkit.checkpoint.staging import Staging
from normkit.checkpoint.writing import write_shards
from normkit.errors import InputError, ModelError
from normkit.files import json_text
from normkit.text import shortened


def fold(
    source: Path | str,
    destination: Path | str,
    *,
    operations: Collection[str] | None = None,
    untie: bool = False,
    dtype: str = "same",
    max_memory: int | None = None,
    threads: int = 1,
    resume: bool = False,
    for_training: bool = False,
    progress: Progress | None = None,
) -> Certificate:
    """Fold a checkpoint of transformers, streamed: memory does not grow with it. The source is only read.

    Args:
        source: Its folder, with config.json and safetensors.
        destination: A folder that does not exist yet; it appears when all is done, and not before.
        operations: As `normkit.fold` takes them.
        untie: Give a tied head a table of its own.
        dtype: Of what is written: "same", or "float32".
        max_memory: Bytes that the process may occupy.
        threads: Threads that compute; the bits do not depend on them.
        resume: Finish a fold that was interrupted; the bits are those of one that was not.
        for_training: The result is to be trained further: dropout is then an error.
        progress: Called with a stage, bytes done, and all bytes.

    Returns:
        What was done to each tensor and how far it is exact; also written beside the weights.

    Raises:
        ModelError: If the source is damaged, quantised, pickled, or of a family or class that is not declared; if
            transformers would load something else from it; or if it changes while it is folded.
        InputError: If nothing of what was asked can be done, or the destination cannot be written.
    """
    if threads < 1:
        raise InputError(f"expected threads of 1 or more, got {threads}")
    folder, destination = Path(source).expanduser(), Path(destination).expanduser()
    with open_checkpoint(folder) as opened:
        plan = make_plan(
            opened.graph,
            opened.config,
            opened.source,
            operations=operations,
            untie=untie,
            dtype=dtype,
            for_training=for_training,
            code=code(opened.states),
        )
        require_change(plan)
        beside = list(carried(folder))
        config = folded_config(opened.config, plan)
        with Staging(destination, source=folder, resume=resume) as staging:
            reload = _reloaded(plan, opened, config)
            written = write_shards(
                plan, opened.source, staging, threads=threads, max_memory=max_memory, progress=progress
            )
            staging.write(CONFIG, json_text(config).encode(), like=folder / CONFIG)
            for name, path in beside:
                staging.copy(path, name)
            certificate = certify(plan, written, reload, opened, staging.folder, dtype=dtype, untie=untie)
            staging.write(NAME, certificate.text().encode(), like=folder / CONFIG)
            opened.require_same({name for each in (beside, carried(folder)) for name, _ in each})
            staging.finish()
    return certificate


def _reloaded(plan: Plan, opened: Opened, config: Mapping[str, Any]) -> Reload:
    """What transformers will say of the result; found out before hours are spent on writing it."""
    tensors = {edit.name: output_info(edit, opened.source) for edit in plan.edits}
    reload = reload_of(config, tensors, opened.folder)
    if astray := (*reload.missing, *reload.unexpected, *reload.mismatched):
        raise ModelError(
            f"{reload.class_name} of transformers would not load all of the result ({shortened(list(astray))} lacking, "
            "left over or of another shape), as in the source; give a checkpoint that it loads whole"
        )
    return reload
