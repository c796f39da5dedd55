"""Runs the cases, each in a forked process, and writes what was said as JSON and as a table."""

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

import normkit as nk

from . import (  # noqa: F401
    healthy_models,
    healthy_runs,
    inspect_casts,
    inspect_formula,
    inspect_gain,
    inspect_place,
    inspect_rest,
    material,
    single_norms,
    watch_faults,
    watch_strikes,
)
from .cases import CASES, Case, Draw, Run, Scene, Single
from .judging import judge_inspection, judge_passport, judge_violations
from .table import markdown

LIMIT = 100.0
FAMILIES = (
    "GPT2",
    "Llama",
    "Mistral",
    "Qwen2",
    "Qwen3",
    "Olmo2",
    "Gemma",
    "Gemma2",
    "GPTNeoX",
    "Bert",
    "OPT",
    "StableLm",
    "Phi3",
    "Cohere",
)


def inspect(case: Case, scene: Scene) -> dict[str, Any]:
    """Show a model to `nk.inspect`; where there is a sound one, with the intent file that it gives."""
    if scene.sound is None:
        return judge_inspection(case, nk.inspect(scene.model, scene.batch), scene.places)
    with tempfile.TemporaryDirectory() as folder:
        intent = Path(folder) / "intent.json"
        nk.inspect(scene.sound, scene.batch, intent=intent)
        return judge_inspection(case, nk.inspect(scene.model, scene.batch, intent=intent), scene.places)


def watch(case: Case, run: Run) -> dict[str, Any]:
    """Show a training run to `nk.watch`."""
    said: list[str] = []
    losses: list[float] = []
    with nk.watch(run.model, run.optimizer, every=run.every, say=said.append) as watching:
        for step in range(run.steps):
            run.before(step)
            if run.clears:
                run.optimizer.zero_grad()
            total = torch.zeros(())
            for _ in range(run.parts):
                loss = run.loss(step) / run.parts
                loss.backward()
                total += loss.detach().float()
            watching.step(total)
            losses.append(float(total))
            run.after_backward(step)
            run.optimizer.step()
    inspection = watching.inspection()
    record = judge_inspection(case, inspection, run.places)
    record["said"] = said[:3]
    record["losses"] = [round(value, 3) for value in (losses[0], losses[len(losses) // 2], losses[-1])]
    training = getattr(inspection, "training", None)
    record["answers"] = [f"{answer.question} {answer.verdict}" for answer in getattr(training, "answers", ())]
    return record


def single(case: Case, norm: Single) -> dict[str, Any]:
    """Show one norm to `nk.identify` or `nk.testing.violations`."""
    if case.verb == "identify":
        return judge_passport(case, norm, nk.identify(norm.norm, norm.shape))
    options = {name: value for name, value in (("weight", norm.weight), ("bias", norm.bias)) if value is not None}
    return judge_violations(case, nk.testing.violations(norm.norm, norm.spec, norm.shape, skip=norm.skip, **options))


SHOW = {"inspect": inspect, "watch": watch, "identify": single, "violations": single}


def answer(case: Case, seed: int, models: Path) -> dict[str, Any]:
    """Build one case and show it; an exception is a result, in the building `setup` and in the tool `crash`."""
    places: list[str] = []
    try:
        built = case.build(Draw(seed, case.name, models))
        places = list(getattr(built, "places", ()))
    except Exception:
        return {"outcome": "setup", "findings": [], "trace": traceback.format_exc()[-1500:], "places": places}
    start = time.perf_counter()
    try:
        record = SHOW[case.verb](case, built)
    except Exception:
        record = {"outcome": "crash", "findings": [], "trace": traceback.format_exc()[-1500:]}
    return {**record, "places": places[:8], "note": built.note, "seconds": round(time.perf_counter() - start, 2)}


def in_a_fork(case: Case, seed: int, models: Path) -> dict[str, Any]:
    """The answer of a forked process, so that patches of a class end with their case; one that hangs is ended."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as pipe, Path(os.devnull).open("w") as void, contextlib.redirect_stderr(void):
            json.dump(answer(case, seed, models), pipe, default=str)
        os._exit(0)
    os.close(writing)
    content, end = b"", time.monotonic() + LIMIT
    while time.monotonic() < end:
        if select.select([reading], [], [], 1.0)[0]:
            part = os.read(reading, 1 << 16)
            if not part:
                break
            content += part
    else:
        os.kill(child, signal.SIGKILL)
    os.close(reading)
    os.waitpid(child, 0)
    try:
        return json.loads(content)
    except ValueError:
        return {
            "outcome": "crash",
            "findings": [],
            "trace": f"the process ended or took longer than {LIMIT:g} s",
            "places": [],
        }


def warm_up() -> None:
    """What every case would load again: classes, other packages, the tool itself."""
    import x_transformers  # noqa: F401

    for family in FAMILIES:
        material.tiny(Draw(0, "warm up", None), family)
    nk.inspect(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)), {"input": torch.randn(2, 5, 8)})
    _ = nk.watch, nk.testing.violations


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=int, default=1, metavar="SEED")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="cases whose name holds one of these, with commas between"
    )
    parser.add_argument(
        "--models", type=Path, default=Path("models"), metavar="FOLDER", help="holds smollm2, gemma3 and qwen05"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    wanted = [part for part in options.only.split(",") if part]
    cases = [case for case in CASES.values() if not wanted or any(part in case.name for part in wanted)]
    begin = time.perf_counter()
    warm_up()
    records = {}
    for case in cases:
        lacking = [name for name in case.needs if not (options.models / name / "config.json").exists()]
        if lacking:
            result: dict[str, Any] = {"outcome": "setup", "findings": [], "trace": f"no model {lacking}", "places": []}
        else:
            for name in case.needs:
                material.load(name, options.draw, options.models)
            result = in_a_fork(case, options.draw, options.models)
        stated = {
            name: getattr(case, name) for name in ("kind", "verb", "truth", "say", "seeable", "innocent", "clean")
        }
        records[case.name] = {**stated, **result}
        sys.stderr.write(f"{case.name:45} {result['outcome']:12} {result.get('seconds', 0):6.2f} s\n")
    seconds = round(time.perf_counter() - begin, 1)
    document = {"draw": options.draw, "seconds": seconds, "cases": records}
    options.out.write_text(json.dumps(document, indent=1))
    options.out.with_suffix(".md").write_text(markdown(document))
    sys.stderr.write(f"{len(records)} cases, {seconds} s; {options.out} and {options.out.with_suffix('.md')}\n")
