"""What `nk.inspect` finds in clean models of images, sound and several inputs: docs/reference/media-families.md.

python census/media_families.py           write the page
python census/media_families.py --check   say whether the page is up to date
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

import normkit as nk
from normkit.inspection.report.tables import PLACEMENTS, placed
from normkit.inspection.result import Inspection
from normkit.text import counted
from pages import settle

# The tiny models are a part of the tests.
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from media_models import MODELS, OTHERS, media_model, other_model

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "media-families.md"
INTRODUCTION = """\
# Models of images, of sound, and of several inputs

Each model is a tiny one of its family with random weights, run by `nk.inspect` on a small batch. DiT and LSTM are
written for this page; the others are classes of transformers. None has an error or a warning.

    python census/media_families.py           # writes this page
    python census/media_families.py --check   # says whether it is up to date

**Norms** are layers whose formula is a function of single rows; **batch norms** keep running statistics, and are
judged by rules of their own. **Rows**: what one row of a norm is, or is a part of. **Placement** is read off how the
output of a block grows with its input; of batch norms, whose statistics do not follow the input, off what is left with
their outputs at 0. A block maps rows (B, rows, features), rows (N, features)
to which it adds, or a feature map to the same sizes: the first block of a stage changes them, and is not counted.
"""
COLUMNS = ("family", "norms", "rows", "batch norms", "placement of the blocks", "final norm", "notes")


def families() -> dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]]:
    """Name -> a function that builds the model and a batch."""
    return {
        **{name: lambda name=name: media_model(name) for name in MODELS},  # type: ignore[misc]
        **{name: lambda name=name: other_model(name) for name in OTHERS},  # type: ignore[misc]
    }


def row(name: str, inspection: Inspection) -> str:
    """One family's row in Markdown."""
    rows = Counter(site.row for site in inspection.sites).most_common()
    placements = Counter(PLACEMENTS[block.placement] for block in inspection.blocks).most_common()
    cells = (
        name,
        str(len(inspection.sites) or ""),
        ", ".join(counted(number, name) for name, number in rows),
        str(len(inspection.batch_norms) or ""),
        ", ".join(placed(number, name) for name, number in placements),
        f"`{inspection.final_norm}`" if inspection.final_norm else "",
        ", ".join(f"**{each.rule}**" if each.severity != "note" else each.rule for each in inspection.findings),
    )
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """The whole page."""
    head = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
    rows = [row(name, nk.inspect(*build())) for name, build in families().items()]
    return "\n".join([INTRODUCTION, head, *rows]) + "\n"


if __name__ == "__main__":
    settle(PAGE, page(), check="--check" in sys.argv)
