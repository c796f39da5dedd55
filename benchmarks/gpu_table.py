"""The recorded GPU times as the table of docs/explanation/measurements.md; "not measured" where there is no record.

    python benchmarks/gpu_table.py [results/gpu.json]

normkit's own device time, the bytes that must move over it, also as a share of what a copy reaches, and its host time;
of the others how many times as long they take, in what each of many calls adds: the larger of both times.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gpu_bars import cells, latency

from normkit.bench.table import readable

RECORDED = Path(__file__).parent / "results" / "gpu.json"
PEERS = ("torch", "torch.compile", "Liger", "quack")
SHAPES = ("128x4096", "32768x1024", "32768x4096", "32768x65536")
MISSING = "not measured"
ROWS = (
    *(
        f"{norm} {direction} {shape} bfloat16"
        for norm in ("layer_norm", "rms_norm")
        for direction in ("forward", "forward+backward")
        for shape in SHAPES
    ),
    *(f"{norm} forward+backward 32768x4096 bfloat16" for norm in ("add_layer_norm", "add_rms_norm")),
)


def row(cell) -> list[str]:
    """The cells of a row: normkit's four, then one a peer."""
    found = {} if cell is None else {entry["peer"]: entry for entry in cell["measurements"]}
    own = found.get("normkit")
    if own is None:
        return [MISSING] * (4 + len(PEERS))
    return [
        readable(own["seconds"]) + (f", **wrong {own['worst']}**" if own["is_wrong"] else ""),
        f"{own['bytes_per_second'] / 1e9:.0f}",
        f"{cell['floor_seconds'] / own['seconds']:.0%}",
        readable(own["host_seconds"]),
        *(times_as_long(found.get(peer), own, dict(cell["left_out"]), peer) for peer in PEERS),
    ]


def times_as_long(entry, own, left_out: dict[str, str], peer: str) -> str:
    """A ratio; a dash where the peer does not take the case, so that nobody takes it for a missing run."""
    if entry is None:
        return "-" if peer in left_out else MISSING
    ratio = latency(entry) / latency(own)
    wrong = f", **wrong {entry['worst']}**" if entry["is_wrong"] else ""
    return f"{ratio:.{2 if ratio < 1.995 else 1 if ratio < 9.95 else 0}f}{wrong}"


def table(document) -> str:
    """The whole table, with where and when below it."""
    recorded = {} if document is None else cells(document)
    drawn = [
        f"| | normkit | GB/s | of the copy | host | {' | '.join(PEERS)} |",
        f"|---|{'---:|' * (4 + len(PEERS))}",
    ]
    for name in ROWS:
        drawn.append(f"| {name} | {' | '.join(row(recorded.get(name)))} |")
    if document is None:
        return "\n".join([*drawn, "", "No GPU was at hand."])
    where = document["machine"]
    versions = "".join(f", {package} {version}" for package, version in where["versions"])
    return "\n".join([*drawn, "", f"{where['date']}, {where['gpu']}, torch {where['torch']}{versions}."])


def main() -> None:
    path = Path(sys.argv[1] if sys.argv[1:] else RECORDED)
    print(table(json.loads(path.read_text(encoding="utf-8")) if path.exists() else None))


if __name__ == "__main__":
    main()
