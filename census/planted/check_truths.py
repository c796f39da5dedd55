"""Show that each fault changes what its model gives: relative difference of the outputs to the clean model's.

python check_truths.py SEED
"""

import sys
import tempfile
from pathlib import Path

import torch

import catalogue
from run import save


def outputs(drawn) -> list[torch.Tensor]:
    """The first tensor that the model gives, for each batch."""
    model, given = drawn.model, []
    with torch.no_grad():
        for batch in drawn.batches:
            if isinstance(batch, dict):
                out = model(**batch)
            else:
                out = model(*batch) if isinstance(batch, tuple) else model(batch)
            held = (
                out if isinstance(out, torch.Tensor) else next(v for v in out.values() if isinstance(v, torch.Tensor))
            )
            given.append(held.float())
    return given


def main() -> None:
    seed = int(sys.argv[1])
    for identifier, case in catalogue.CASES.items():
        if (
            case.how == "watch"
            or case.family == "oddities"
            or case.sort == "clean"
            or (case.family in ("unet", "dit")) != (len(sys.argv) > 2)
        ):
            continue
        drawn, reference = catalogue.build(identifier, seed), catalogue.build(f"{case.family}/clean", seed)
        if isinstance(drawn.model, Path) or isinstance(reference.model, Path):
            continue
        note = ""
        if drawn.edit:
            folder = Path(tempfile.mkdtemp()) / "model"
            save(drawn, folder)
            drawn.model, info = type(drawn.model).from_pretrained(folder, output_loading_info=True)
            note = f"missing {sorted(info['missing_keys'])[:3]}"
        one, two = outputs(drawn), outputs(reference)
        off = max(((a - b).norm() / b.norm()).item() for a, b in zip(one, two, strict=False))
        print(f"{off:9.3g}  {case.sort:10} {identifier} {note}", flush=True)


if __name__ == "__main__":
    main()
