"""The golden record: what each verb reports on fixed inputs, as JSON files beside this one.

    python tests/golden/record.py            write the record anew
    python tests/golden/record.py --check    compare; print each difference, exit 1 if there is one
    python tests/golden/record.py --check NAME...
    python tests/golden/record.py --check --any-cpu

A change that only moves code leaves the record equal on the CPU on which it was written: write it, change the code,
check. On another CPU rounding errors differ, and the sentences of evidence quote them: `--any-cpu` leaves those numbers
out, and `test_record.py` checks so. Numbers are kept to five digits; times, versions, checksums and paths are left out.
Only public functions and commands are called, so that this script does not change with the code behind them.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit as nk

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))

from tiny_models import tiny  # noqa: E402

INSPECTED = ("gpt2", "gemma2", "t5")
CONVERTED = ("gpt2", "gemma2", "olmo", "t5", "cohere_qk_norm")
PLANNED = ("gpt2", "llama_bias", "gemma2", "olmo2", "opt")
FOLDED = ("gpt2", "gemma2")
STUDIED = {
    "attention": ["--budget", "quick"],
    "invariances": ["--seeds", "1"],
    "epsilon": ["--seeds", "1", "--set", "steps=4"],
    "final-norm": ["--seeds", "1", "--set", "steps=4"],
}
# Times, versions, paths, and single rounding errors, by name.
_NOISE = re.compile(
    r"seconds|version|sha256|digest|checksum|error|difference|residual_of|created|path_of|bytes|threads|machine|"
    r"torch|cpu|duration|file_name|source$|folder"
)
# How far a result is off its exact value, and the fingerprint of gains that were trained.
_ROUNDING = {"units", "original_units", "equal", "members"}
_WIDTH = 160
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def main(arguments: list[str]) -> int:
    """Write or compare; the exit code."""
    torch.set_num_threads(1)
    names = [name for name in arguments if not name.startswith("--")] or list(RECORDED)
    differences = []
    for name in names:
        if "--check" in arguments:
            differences += [f"{name}{line}" for line in checked(name, any_cpu="--any-cpu" in arguments)]
        else:
            (FOLDER / f"{name}.json").write_text(written(found(name)) + "\n", encoding="utf-8")
    sys.stdout.write("".join(f"{line}\n" for line in differences) or ("equal\n" if "--check" in arguments else ""))
    return 1 if differences else 0


def found(name: str) -> dict[str, Any]:
    """What a verb reports now."""
    torch.manual_seed(0)
    return {case: plain(value) for case, value in RECORDED[name]()}


def checked(name: str, *, any_cpu: bool) -> list[str]:
    """A line for each place where a verb reports something else than the record."""
    kept = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return list(compared(kept, json.loads(written(found(name))), any_cpu=any_cpu))


def inspected() -> Iterator[tuple[str, Any]]:
    """`inspect` of tiny models of several families, and of the demo's faulty twin."""
    for family in INSPECTED:
        model, batch = tiny(family, dtype=torch.float32)
        yield family, without_passports(nk.inspect(model, batch, name=family).to_json())
    with tempfile.TemporaryDirectory() as folder:
        from normkit.demo import write_twins

        faulty, _ = write_twins(Path(folder))
        arguments = ["inspect", str(faulty), "--max-tokens", "512", "--no-report", "--json"]
        yield "the demo's faulty twin", without_passports(command(arguments))


def identified() -> Iterator[tuple[str, Any]]:
    """`identify` of each preset, of torch's own norms and of functions that are written by hand."""
    for name in sorted(name for name in dir(nk.specs) if isinstance(getattr(nk.specs, name), nk.NormSpec)):
        spec = getattr(nk.specs, name)
        shape = (2, 16) if spec.axes == (-1,) else (2, 16, 4)
        yield name, nk.identify(nk.Norm(spec, 16), shape).to_json()
    for name, function in WRITTEN_BY_HAND.items():
        yield name, nk.identify(function, (4, 16)).to_json()


def std_outside(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def over_the_batch(x: Tensor) -> Tensor:
    return (x - x.mean(0)) / x.var(0, unbiased=False).add(1e-5).sqrt()


def half_statistics(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def squared_twice(x: Tensor) -> Tensor:
    return x / x.pow(4).mean(-1, keepdim=True).pow(0.25)


WRITTEN_BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "std with eps outside": std_outside,
    "softmax": softmax,
    "statistics over the batch": over_the_batch,
    "rms in the input's dtype": half_statistics,
    "fourth powers": squared_twice,
    "F.normalize": F.normalize,
}


def compared_models() -> Iterator[tuple[str, Any]]:
    """`compare` of a port with another eps, another gain and a norm that is missing."""
    with tempfile.TemporaryDirectory() as folder:
        model, _ = tiny("llama", dtype=torch.float32)
        other, _ = tiny("llama", dtype=torch.float32, eps=1e-3)
        with torch.no_grad():
            other.model.layers[1].input_layernorm.weight[3] += 0.5
        for name, each in (("reference", model), ("port", other)):
            each.save_pretrained(Path(folder) / name)
        arguments = ["compare", f"{folder}/port", f"{folder}/reference"]
        yield "llama", command([*arguments, "--no-report", "--json"])


def converted() -> Iterator[tuple[str, Any]]:
    """`convert` of tiny models."""
    for family in CONVERTED:
        model, _ = tiny(family, dtype=torch.float32)
        yield family, nk.convert(model).to_json()


def folded() -> Iterator[tuple[str, Any]]:
    """Plans, certificates and proofs of `fold` and `verify`."""
    for family in PLANNED:
        with tempfile.TemporaryDirectory() as folder:
            model, _ = tiny(family, dtype=torch.float32, square=True)
            model.save_pretrained(f"{folder}/source")
            arguments = ["fold", f"{folder}/source", f"{folder}/folded", "--untie", "--json"]
            yield f"{family}, plan", command([*arguments, "--plan"])
            if family not in FOLDED:
                continue
            yield f"{family}, certificate", command(arguments)
            yield f"{family}, verified", command(["verify", f"{folder}/source", f"{folder}/folded", "--json"])


def studied() -> Iterator[tuple[str, Any]]:
    """Claims, verdicts and numbers of the cheap studies with one seed."""
    for name, options in STUDIED.items():
        with tempfile.TemporaryDirectory() as folder:
            yield name, command(["study", name, *options, "--threads", "1", "--out", folder, "--json"])


class Decoder(nn.Module):
    """Two pre-norm blocks without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 20)
        self.norms = nn.ModuleList(nn.RMSNorm(16) for _ in range(2))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(self.norm(x))


def watched() -> Iterator[tuple[str, Any]]:
    """`watch` of a short run, and of one whose gain is multiplied in the middle."""
    for name, at in (("a healthy run", None), ("a gain times 50 at step 20", 20)):
        torch.manual_seed(0)
        model = Decoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with nk.watch(model, optimizer) as run:
            for step in range(30):
                if step == at:
                    with torch.no_grad():
                        model.norms[1].weight.mul_(50)
                ids = torch.randint(20, (4, 13), generator=torch.Generator().manual_seed(step))
                ids[:, 1::2] = (3 * ids[:, 0:-1:2] + 1) % 20
                loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step(loss)
            yield name, without_passports(run.inspection().to_json())


RECORDED: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "inspect": inspected,
    "identify": identified,
    "compare": compared_models,
    "convert": converted,
    "fold": folded,
    "study": studied,
    "watch": watched,
}


def command(arguments: list[str]) -> Any:
    """The JSON that the command prints, beside its exit code."""
    from click.testing import CliRunner

    from normkit.cli.entry import verbs

    result = CliRunner().invoke(verbs, arguments, prog_name="normkit")
    try:
        return {"exit code": result.exit_code, **json.loads(result.stdout)}
    except ValueError:
        return {"exit code": result.exit_code, "said": result.output.splitlines(), "raised": repr(result.exception)}


def without_passports(inspection: dict[str, Any]) -> dict[str, Any]:
    """An inspection without the evidence for each norm's formula, which the record of `identify` holds."""
    sites = [{key: value for key, value in site.items() if key != "evidence"} for site in inspection["sites"]]
    return inspection | {"sites": sites}


def plain(value: Any) -> Any:
    """The value as it is recorded."""
    if isinstance(value, dict) and "eps_placement" in value and "cast" in value:
        return value.get("formula") or str(nk.NormSpec.from_json(value))
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items() if not _NOISE.search(str(key))}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    if isinstance(value, str):
        return re.sub(re.escape(tempfile.gettempdir()) + r"[\w./-]+", "...", value)
    return value


def written(value: Any, indent: str = "") -> str:
    """JSON with one line for each part that fits into one."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= _WIDTH:
        return line
    deeper = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {written(each, deeper)}" for key, each in value.items()]
    else:
        parts = [written(each, deeper) for each in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return begin + ",".join(f"\n{deeper}{part}" for part in parts) + f"\n{indent}{end}"


def compared(kept: Any, found: Any, place: str = "", *, any_cpu: bool) -> Iterator[str]:
    """A line for each place where two records differ."""
    if isinstance(kept, dict) and isinstance(found, dict):
        for key in sorted({*kept, *found}):
            if key not in kept or key not in found:
                yield f"{place} / {key}: {'new' if key in found else 'gone'}"
            elif not (any_cpu and key in _ROUNDING):
                yield from compared(kept[key], found[key], f"{place} / {key}", any_cpu=any_cpu)
    elif isinstance(kept, list) and isinstance(found, list) and len(kept) == len(found):
        for index, (old, new) in enumerate(zip(kept, found, strict=True)):
            yield from compared(old, new, f"{place} / {index}", any_cpu=any_cpu)
    elif not (alike(kept, found) if any_cpu else kept == found):
        yield f"{place}: {kept!r} is now {found!r}"


def alike(kept: Any, found: Any) -> bool:
    """Whether two values are equal but for what another CPU rounds differently."""
    if isinstance(kept, str) and isinstance(found, str):
        return _NUMBER.sub("", kept) == _NUMBER.sub("", found)
    if isinstance(kept, float) and isinstance(found, float | int):
        return math.isclose(kept, found, rel_tol=1e-3, abs_tol=1e-6)
    return bool(kept == found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
