"""One inspection from the command line: other libraries are silenced, and the notes of loading join the source."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from normkit.checkpoint.build_model import quiet_libraries
from normkit.checkpoint.loading import LoadedModel
from normkit.cli.terminal import Progress
from normkit.inspection.inspecting import inspect
from normkit.inspection.result import Inspection
from normkit.measurement.running import first_of
from normkit.measurement.texts import Batches, check_runs
from normkit.text import dtype_name

# Weights times tokens; with as many a product in software takes some ten seconds.
_LONG = 2 * 10**10


def slow_dtype(model: Any, batches: Batches) -> str | None:
    """A remark where a run on a text takes long because the CPU has no instructions for the dtype of the weights."""
    known = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    if model.dtype not in known or model.device.type != "cpu":
        return None
    tokens = sum(batch["input_ids"].numel() for batch in batches.batches if "input_ids" in batch)
    work = tokens * sum(parameter.numel() for parameter in model.parameters())
    is_supported = getattr(torch.ops.mkldnn, known[model.dtype], None)
    if work < _LONG or is_supported is None or is_supported():
        return None
    name = dtype_name(model.dtype)
    return (
        f"this CPU computes {name} in software: --dtype float32 takes a third of the time, and shows no {name} rounding"
    )


def measure(
    loaded: LoadedModel,
    batches: Batches,
    *,
    progress: Progress,
    model: Any = None,
    site: str | None = None,
    intent: Path | None = None,
    during: AbstractContextManager[object] | None = None,
) -> Inspection:
    """Inspect a loaded model.

    Args:
        loaded: The model, its name and the notes of its loading.
        batches: What to run it on.
        progress: Told of each stage.
        model: To inspect in place of the loaded one, as with a fault planted in a copy.
        site: The norm of the token walk.
        intent: The intent file, which is written if it is not there.
        during: A context in which the model runs on all batches.

    Raises:
        ModelError: If the model cannot be run.
        InputError: If the intent file cannot be used.
    """
    total = len(batches.batches)

    def report(stage: str, done: int, steps: int) -> None:
        progress(f"{loaded.name}: {stage}", done, steps or total)

    with quiet_libraries():
        # Of sounds of several lengths the shortest may be too short.
        check_runs(loaded.model, min(batches.batches, key=lambda batch: first_of(batch).numel()))
        return inspect(
            loaded.model if model is None else model,
            batches.batches,
            name=loaded.name,
            source="; ".join([batches.source, *loaded.notes]),
            decode=batches.decode,
            site=site,
            intent=intent,
            during=during,
            progress=report,
        )
