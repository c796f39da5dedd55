"""The speeds that normkit is held to on an H200-class GPU, against what was recorded: what, bar, measured, met or not.

    python benchmarks/gpu_bars.py [results/gpu.json]

The floor is the time to copy the bytes that must move, in the same run: forward 1 copy of x, backward 1.5. What others
are compared in is what each of many calls adds: the larger of device time and host time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bars import verdict

from normkit.bench.table import BUSY, NOISY

RECORDED = Path(__file__).parent / "results" / "gpu.json"
DTYPES = ("bfloat16", "float32")
NORMS = ("layer_norm", "rms_norm")
FULL = (*(f"32768x{1 << power}" for power in range(10, 17)), "8192x262144")
LATENCY = tuple(f"{rows}x4096" for rows in (1, 8, 32, 128, 512, 2048))
GRID = (
    *("32768x256", "32768x512", *FULL[:-1], "16384x131072", FULL[-1]),
    *dict.fromkeys([*(f"{rows}x{1 << power}" for rows in (2048, 4096) for power in range(10, 16)), *LATENCY]),
)
# Two medians agree to about a hundredth.
NO_SLOWER = 0.99


class Line(NamedTuple):
    """One bar: what, how much is asked for, how much was measured; None where it was not."""

    what: str
    bar: str
    least: float
    measured: float | None = None
    note: str = ""
    is_quiet: bool = True

    @property
    def is_met(self) -> bool:
        return self.measured is not None and self.measured >= self.least and "WRONG" not in self.note

    def __str__(self) -> str:
        if self.measured is None:
            return f"{self.what:48}{self.bar:34}{'':>9}  not measured"
        end = f" {self.note}" if self.note else ""
        return f"{self.what:48}{self.bar:34}{self.measured:9.2f}  {verdict(self.is_met, self.is_quiet)}{end}"


def cells(document) -> dict[str, dict]:
    return {
        f"{case['op']} {case['direction']} {'x'.join(map(str, case['shape']))} {case['dtype']}": cell
        for cell in document["cells"]
        for case in [cell["case"]]
    }


def latency(entry) -> float:
    return max(entry["seconds"], entry["host_seconds"] or 0)


def against_copy(what: str, least: float, cell) -> Line:
    bar = f">= {least:.0%} of the copy"
    own = _entries(cell).get("normkit")
    if own is None:
        return Line(what, bar, least)
    quiet = max(own["spread"], cell["floor_spread"]) <= NOISY
    return Line(what, bar, least, cell["floor_seconds"] / own["seconds"], _wrong(own), quiet)


def against_peers(what: str, bar: str, least: float, cell, names: tuple[str, ...] | None = None) -> Line:
    """The fastest of them whose answers are right, over normkit."""
    found = _entries(cell)
    own = found.pop("normkit", None)
    rivals = [entry for name, entry in found.items() if (names is None or name in names) and not entry["is_wrong"]]
    if own is None or not rivals:
        return Line(what, bar, least)
    best = min(rivals, key=latency)
    quiet = max(own["spread"], best["spread"]) <= NOISY and (cell["others"] or 0) <= BUSY
    note = f"{best['peer']} {_wrong(own)}".strip()
    return Line(what, bar, least, latency(best) / latency(own), note, quiet)


def _entries(cell) -> dict[str, dict]:
    return {} if cell is None else {entry["peer"]: entry for entry in cell["measurements"]}


def _wrong(entry) -> str:
    return f"WRONG {entry['worst']}" if entry["is_wrong"] else ""


def lines(document) -> Iterator[Line]:
    recorded = cells(document)
    for direction, usual, widest in (("forward", 0.9, 0.8), ("backward", 0.8, 0.8)):
        for norm in NORMS:
            for dtype in DTYPES:
                for shape in FULL:
                    what = f"{norm} {direction} {shape} {dtype}"
                    yield against_copy(what, widest if shape == FULL[-1] else usual, recorded.get(what))
    for norm in NORMS:
        for dtype in DTYPES:
            what = f"{norm} forward+backward 128x4096 {dtype}"
            yield against_peers(what, "no slower than torch", NO_SLOWER, recorded.get(what), ("torch",))
            for shape in GRID:
                what = f"{norm} forward+backward {shape} {dtype}"
                yield _against_the_best(what, recorded.get(what))
    yield from (
        _against_the_best(what, cell)
        for what, cell in recorded.items()
        if what.startswith("add_") and "forward+backward" in what
    )
    failed = [False for what in document["not_measured"] if what.startswith("bits")]
    same = [*document["bits"].values(), *failed]
    ratio = sum(same) / len(same) if same else None
    yield Line("bits, whatever the run and the batch", "the same in all cases", 1.0, ratio)


def _against_the_best(what: str, cell) -> Line:
    if "layer_norm" in what:
        return against_peers(what, ">= 1.3 x faster than the best", 1.3, cell)
    return against_peers(what, "no slower than the best", NO_SLOWER, cell)


def show(document) -> None:
    where = document["machine"]
    versions = "".join(f", {package} {version}" for package, version in where["versions"])
    print(f"{where['date']}, {where['gpu']}, torch {where['torch']}{versions}; {where['kernels']}\n")
    print(f"{'what':48}{'bar':34}{'measured':>9}  met")
    found = list(lines(document))
    for line in found:
        print(line)
    missing = sum(line.measured is None for line in found)
    print(f"\n{sum(line.is_met for line in found)} of {len(found) - missing} met; {missing} not measured")


if __name__ == "__main__":
    show(json.loads(Path(sys.argv[1] if sys.argv[1:] else RECORDED).read_text(encoding="utf-8")))
