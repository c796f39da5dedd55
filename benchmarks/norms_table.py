"""The recorded CPU times as the table of docs/explanation/measurements.md.

    python benchmarks/norms_table.py [results/norms.json]

normkit's own time and its multiple of the floor; of the others how many times as long they take.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from normkit.bench.table import readable

RECORDED = Path(__file__).parent / "results" / "norms.json"
PEERS = ("torch", "torch.compile", "LlamaRMSNorm", "onnxruntime")
SHAPES = ([64, 4096], [2048, 4096])
PASSES = ("forward", "forward+backward")


def times_as_long(peer: str, cell) -> str:
    """How many times as long a peer takes as normkit, and whether its answer is wrong."""
    found = {entry["peer"]: entry for entry in cell["measurements"]}
    if peer not in found:
        return ""
    ratio = found[peer]["seconds"] / found["normkit"]["seconds"]
    wrong = f", **wrong {found[peer]['worst']}**" if found[peer]["is_wrong"] else ""
    return f"{ratio:.{1 if ratio < 9.95 else 0}f}{wrong}"


def main() -> None:
    document = json.loads(Path(sys.argv[1] if sys.argv[1:] else RECORDED).read_text())
    print(f"| | normkit | times a copy | {' | '.join(PEERS)} |")
    print(f"|---|{'---:|' * (2 + len(PEERS))}")
    for cell in document["cells"]:
        case = cell["case"]
        if case["shape"] not in SHAPES or case["direction"] not in PASSES:
            continue
        (own,) = (entry["seconds"] for entry in cell["measurements"] if entry["peer"] == "normkit")
        name = f"{case['op']} {case['direction']}, {'x'.join(map(str, case['shape']))} {case['dtype']}"
        others = " | ".join(times_as_long(peer, cell) for peer in PEERS)
        print(f"| {name} | {readable(own)} | {own / cell['floor_seconds']:.2f} | {others} |")
    where = document["machine"]
    print(f"\n{where['date']}, {where['cpu']}, {where['threads']} threads, torch {where['torch']}, {where['kernels']}.")


if __name__ == "__main__":
    main()
