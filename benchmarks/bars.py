"""The speeds that normkit is held to, against what was recorded: what, bar, measured, met or not.

    python benchmarks/bars.py [results/norms.json results/llama.json] [--before norms.json]

`--before` puts what another run measured beside it, for a change that was timed on both sides on one machine. The floor
is the time to copy the bytes that must move, in the same run: forward 1 copy of x, forward+backward 2.5.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from normkit.bench.table import BUSY, NOISY

RESULTS = Path(__file__).parent / "results"
NORMS = {"LN": "layer_norm", "RMS": "rms_norm"}
DTYPES = ("float32", "bfloat16")
MANY_ROWS = ("64x4096", "512x768", "2048x4096", "16384x128", "8192x8192")


class Bar:
    """One line: `normkit` over `than` must be at most, or `than` over `normkit` at least, so much."""

    def __init__(self, what: str, key: tuple[str, str, str, str], than: str, *, most: float = 0.0, least: float = 0.0):
        self.what, self.key, self.than, self.most, self.least = what, key, than, most, least

    @property
    def text(self) -> str:
        return f"<= {self.most:g} x {self.than}" if self.most else f">= {self.least:g} x faster than {self.than}"

    def measured(self, times: dict[str, float]) -> float:
        ratio = times["normkit"] / times[self.than]
        return ratio if self.most else 1 / ratio

    def is_met(self, times: dict[str, float]) -> bool:
        return self.measured(times) <= self.most if self.most else self.measured(times) >= self.least


def bars() -> Iterator[Bar]:
    def of(norm: str, direction: str, dtype: str, shape: str) -> tuple[str, tuple[str, str, str, str]]:
        return f"{norm} {direction} {shape} {dtype}", (NORMS[norm], direction, dtype, shape)

    for norm in NORMS:
        for dtype, out, both in (("float32", 1.1, 1.4), ("bfloat16", 1.25, 1.6)):
            yield Bar(*of(norm, "forward-out", dtype, "2048x4096"), "floor", most=out)
            yield Bar(*of(norm, "forward+backward", dtype, "2048x4096"), "floor", most=both)
        for dtype in DTYPES:
            for shape in MANY_ROWS:
                case = of(norm, "forward+backward", dtype, shape)
                yield Bar(*case, "torch.compile", least=2.0)
                yield Bar(*case, "torch", least=1.5 if norm == "LN" else 5.0)
            for shape, compiled in (("1x4096", 2.4), ("4x262144", 1.2)):
                case = of(norm, "forward+backward", dtype, shape)
                yield Bar(*case, "torch", most=1.15) if norm == "LN" else Bar(*case, "torch", least=1.6)
                yield Bar(*case, "torch.compile", least=compiled)
        yield Bar(*of(norm, "forward", "bfloat16", "64x4096"), "floor", most=3.5 if norm == "LN" else 2.5)
        for dtype in DTYPES:
            case = of(norm, "forward", dtype, "1x4096")
            yield Bar(*case, "torch", most=1.5) if norm == "LN" else Bar(*case, "torch", least=2.0)


def verdict(is_met: bool, is_quiet: bool) -> str:
    return ("yes" if is_met else "NO") + ("" if is_quiet else " (not quiet)")


def cells(document) -> dict[tuple[str, str, str, str], tuple[dict[str, float], dict[str, bool]]]:
    """Seconds by peer, and whether the machine was quiet for it, by (op, pass, dtype, shape)."""
    found = {}
    for cell in document["cells"]:
        case, measured = cell["case"], cell["measurements"]
        times = {entry["peer"]: entry["seconds"] for entry in measured} | {"floor": cell["floor_seconds"]}
        spreads = {entry["peer"]: entry["spread"] for entry in measured} | {"floor": cell["floor_spread"]}
        quiet = {peer: spread <= NOISY and (cell["others"] or 0) <= BUSY for peer, spread in spreads.items()}
        key = (case["op"], case["direction"], case["dtype"], "x".join(map(str, case["shape"])))
        found[key] = times, quiet
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("norms", nargs="?", type=Path, default=RESULTS / "norms.json")
    parser.add_argument("llama", nargs="?", type=Path, default=RESULTS / "llama.json")
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    document = json.loads(options.norms.read_text())
    earlier = cells(json.loads(options.before.read_text())) if options.before else {}
    where, recorded = document["machine"], cells(document)
    print(f"{where['date']}, {where['cpu']}, threads {where['threads']}, torch {where['torch']}; {where['kernels']}\n")
    print(f"{'what':48}{'bar':34}{'before' if earlier else '':>9}{'measured':>9}  met")
    met, met_before = [], []
    for bar in bars():
        if bar.key not in recorded or bar.than not in recorded[bar.key][0]:
            print(f"{bar.what:48}{bar.text:34}{'':>18}  not measured")
            continue
        times, quiet = recorded[bar.key]
        met.append(bar.is_met(times))
        before = ""
        if earlier:
            met_before.append(bar.is_met(earlier[bar.key][0]))
            before = f"{bar.measured(earlier[bar.key][0]):.2f}"
        print(
            f"{bar.what:48}{bar.text:34}{before:>9}{bar.measured(times):9.2f}  "
            f"{verdict(met[-1], quiet['normkit'] and quiet[bar.than])}"
        )
    if earlier:
        print(f"\n{sum(met_before)} of these {len(met_before)} were met before, {sum(met)} now\n")
    for row in json.loads(options.llama.read_text())["rows"] if options.llama.exists() else ():
        gain = row["seconds"]["stock"] / row["seconds"]["normkit"]
        spread = max(row["spread"]["stock"], row["spread"]["normkit"])
        # Two medians agree to about a hundredth.
        met.append(gain >= 0.99)
        what = f"Llama, {row['what']}, {row['dtype']}"
        print(f"{what:48}{'no slower than stock':34}{'':9}{gain:9.2f}  {verdict(met[-1], spread <= NOISY)}")
    print(f"\n{sum(met)} of {len(met)} met")


if __name__ == "__main__":
    main()
