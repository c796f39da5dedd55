"""What a watch writes: one line a report, and the page where something broke and at the end."""

from __future__ import annotations

import errno
import json
import math
import os
from bisect import bisect_right
from pathlib import Path

from normkit import files
from normkit.inspection.result import Inspection
from normkit.watching.chronicle import Chronicle


class Journal:
    """The files of one watch.

    Args:
        folder: Where report.html, report.json and history.jsonl are written; made at the first line.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, chronicle: Chronicle) -> None:
        """Append all series as they were at the last report to history.jsonl, as one line that is written whole."""
        values: dict[str, dict[str, float | str]] = {}
        step = -1 if chronicle.reading is None else chronicle.reading.step
        for series in chronicle.series():
            # Losses of later steps are known before a report has come.
            known = bisect_right(series.steps, step)
            if known:
                newest = series.values[known - 1]
                shown = newest if math.isfinite(newest) else str(newest)
                values.setdefault(series.quantity, {})[series.path] = shown
        line = json.dumps({"step": step, **values}, ensure_ascii=False)
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "history.jsonl").open("ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(content := f"{line}\n".encode()) != len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)
                raise

    def write(self, inspection: Inspection) -> Path:
        """Write report.json and report.html, each whole or not at all, and return the page's path."""
        files.write_text(self._folder / "report.json", files.json_text(inspection.to_json()))
        return inspection.write_html(self._folder / "report.html")
