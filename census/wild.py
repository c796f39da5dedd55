"""Norms of other people's libraries, identified as they are installed: docs/wild.md.

    python census/wild.py                     run every group in an environment of its own, write the page
    python census/wild.py vision jax          run these groups
    python census/wild.py --here vision       run in this environment
    python census/wild.py --page              write the page from what was recorded
    python census/wild.py --check             say whether the page is up to date

An environment is made below normkit-out/wild from the pinned versions of census/wild_libraries/requirements. The rows
of a group are recorded in census/wild_libraries/results; a library that is missing or does not run here becomes a row
that says so.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

CENSUS = Path(__file__).parent
ROOT = CENSUS.parent
LIBRARIES = CENSUS / "wild_libraries"
RESULTS = LIBRARIES / "results"
GROUPS = (
    *("transformers", "vision", "diffusers", "training", "teaching", "keras_torch", "jax", "mlx", "triton", "exported"),
    "transcribed",
)
ENVIRONMENT = {"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
"""Variables of the processes of all groups; a group adds its own in `SETTINGS`."""
SETTINGS = {"triton": {"TRITON_INTERPRET": "1"}, "jax": {"KERAS_BACKEND": "jax"}}


def environment(group: str) -> tuple[Path, str]:
    """The Python of a group's environment, which is made where it is missing, and the seconds in which it was made."""
    folder = ROOT / "normkit-out" / "wild" / group
    python, stamp, pins = folder / "bin" / "python", folder / "made.txt", LIBRARIES / "requirements" / f"{group}.txt"
    wanted, begun = pins.read_text(), time.perf_counter()
    if not stamp.exists() or not stamp.read_text().startswith(wanted):
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        torch = next(line for line in wanted.split() if line.startswith("torch=="))
        # The libraries of one group may ask for other versions of what they share: all that is loaded is pinned.
        for what in ([torch], ["--no-deps", "-r", pins]):
            subprocess.run([python, "-m", "pip", "install", "--quiet", *what], check=True)
        stamp.write_text(f"{wanted}made in {time.perf_counter() - begun:.0f} s")
    return python, stamp.read_text().removeprefix(wanted)


def run(group: str, *, here: bool) -> None:
    """Run a group in a process of its own, and record what it found."""
    python, made = (Path(sys.executable), "as it was") if here else environment(group)
    settings = os.environ | ENVIRONMENT | SETTINGS.get(group, {})
    done = subprocess.run([python, __file__, "--take", group], env=settings, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{group}: its process ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    recorded = json.loads(done.stdout.splitlines()[-1])
    recorded["environment"] = made
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{group}.json").write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    print(f"{group}: {len(recorded['rows'])} rows in {recorded['seconds']} s")


def take(group: str) -> None:
    """Print what a group finds in this environment as one line of JSON."""
    from wild_libraries.rows import take

    module = importlib.import_module(f"wild_libraries.{group}")
    print(json.dumps(take(module.ROWS, module.PACKAGES)))


def main() -> None:
    """Run groups and write the page, or what the docstring says."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--take"]:
        take(arguments[1])
        return
    names = [name for name in arguments if not name.startswith("--")]
    unknown = sorted(set(names) - set(GROUPS))
    if unknown:
        sys.exit(f"expected groups among {', '.join(GROUPS)}, got {', '.join(unknown)}")
    if not {"--page", "--check"} & set(arguments):
        for group in names or GROUPS:
            run(group, here="--here" in arguments)
    from pages import settle
    from wild_page import PAGE, page

    settle(PAGE, page(), check="--check" in arguments)


if __name__ == "__main__":
    main()
