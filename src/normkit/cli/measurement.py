"""One inspection from the command line: other libraries are silenced, and the notes of loading join the source."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from normkit.checkpoint.build_model import quiet_libraries
from normkit.checkpoint.loading import LoadedModel
from normkit.cli.terminal import Progress
from normkit.inspection.inspecting import inspect
from normkit.inspection.result import Inspection
from normkit.measurement.running import first_of
from normkit.measurement.texts import Batches, check_runs


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
        # If sounds have several lengths, the shortest may be too short.
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
