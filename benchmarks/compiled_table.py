"""The table of docs/explanation/gpu-kernels.md: registers, spills and loads of the compiled kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MARKS = ("<!-- table -->", "<!-- end of table -->")

ON_PAGE = ("layer_norm {} bfloat16", "rms_norm {} bfloat16", "layer_norm {} float32")
SHAPES_ON_PAGE = (
    *((32768, n) for n in (256, 1024, 4096, 8192, 16384, 65536)),
    *((8192, n) for n in (1000, 5120, 12288, 262144)),
    (128, 4096),
)
HEADING = (
    "norm, rows x n, dtype",
    "kernel",
    "tile",
    "warps",
    "registers",
    "stack",
    "shared",
    "bits",
    "warps at once",
    "programs",
    "predicted",
)


def bits(widths: dict[str, dict[str, int]]) -> str:
    """The width of the loads and stores, then those arguments that have narrower ones."""
    narrowest = {name: min(map(int, counts)) for name, counts in widths.items()}
    widest = max((int(width) for counts in widths.values() for width in counts), default=0)
    others = [f"{name} {width}" for name, width in narrowest.items() if width < widest]
    return ", ".join([str(widest), *others])


def line(entry: dict[str, Any]) -> str:
    figures = entry["figures"]["90"]
    tile = f"{entry['BLOCK_ROWS'] or 1} x {entry['BLOCK_N']}"
    stages = f", {entry['STAGES']} stages" if (entry["STAGES"] or 1) > 1 else ""
    least, most = (f"{share:.0%}" for share in entry["predicted_share_of_copy"])
    cells = (
        entry["case"],
        f"`{entry['kernel']}`",
        tile + stages,
        entry["warps"],
        figures["registers"],
        figures["stack"],
        figures["shared"],
        bits(figures["widths"]),
        figures["resident"],
        entry["programs"],
        most if least == most else f"{least} to {most}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def differences(document: dict[str, Any]) -> Iterator[str]:
    """For each architecture which kernels of all that were compiled spill, and how many are read in other widths."""
    entries = document["entries"]
    for arch in entries[0]["figures"]:
        spilled: dict[str, str] = {}
        for entry in entries:
            norm, shape, dtypes = re.match(r"(.*) (\d+x\d+) (.*)", entry["case"]).groups()  # type: ignore[union-attr]
            if stack := entry["figures"][arch]["stack"]:
                n = int(shape.split("x")[1])
                spilled[f"{norm} of {n:,} {dtypes} in `{entry['kernel']}`"] = f"{stack} bytes"
        told = "; ".join(f"{name}: {stack}" for name, stack in spilled.items()) or "none"
        widths = (
            "" if arch == "90" else f" Other widths than on sm_90: {_others(entries, arch)} of {len(entries)} launches."
        )
        yield f"- sm_{arch}, registers that did not suffice: {told}.{widths}"


def _others(entries: list[dict[str, Any]], arch: str) -> int:
    return sum(entry["figures"][arch]["widths"] != entry["figures"]["90"]["widths"] for entry in entries)


def page_part(document: dict[str, Any]) -> str:
    """What stands between the marks of the page."""
    names = {form.format("x".join(map(str, shape))) for form in ON_PAGE for shape in SHAPES_ON_PAGE}
    chosen = [
        entry for entry in document["entries"] if entry["case"] in names and entry["kernel"] != "add_partial_sums"
    ]
    drawn = [f"| {' | '.join(HEADING)} |", f"|{'---|' * 3}{'---:|' * (len(HEADING) - 3)}", *map(line, chosen)]
    made = f"Triton {document['triton']}, {document['date']}, {document['kernels_compiled']} kernels."
    return "\n".join([*drawn, "", made, "", *differences(document)])


def with_part(page: str, part: str) -> str:
    """The page with another table."""
    before, rest = page.split(MARKS[0])
    return f"{before}{MARKS[0]}\n{part}\n{MARKS[1]}{rest.split(MARKS[1])[1]}"
