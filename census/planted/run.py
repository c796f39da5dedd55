"""Run the catalogue of families once: python run.py SEED OUT.json [--only FAMILY,...] [--expected FILE]

SEED draws places, sizes and values again. FAMILIES_MODELS names a folder with `smollm2` and `crepe`, FAMILIES_WORK one
where trained bases are kept. The cases of diffusers run where diffusers can be imported, in a second call with --only.
Each case runs in a process of its own, forked from one that has imported torch and transformers.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import runpy
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
import transformers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import catalogue  # noqa: E402
import material  # noqa: E402

LIMIT = 1500  # seconds for one case, on a machine that others use too


def save(drawn, folder: Path) -> None:
    """Write the folder of a case."""
    if isinstance(drawn.model, Path):
        folder.mkdir(parents=True)
        for file in drawn.model.iterdir():
            if file.is_file() and file.suffix in (".json", ".safetensors", ".txt", ".jinja"):
                shutil.copyfile(file, folder / file.name)
    else:
        drawn.model.save_pretrained(folder)
        for held in drawn.processors:
            held.save_pretrained(folder)
    if drawn.edit:
        drawn.edit(folder)


def command(identifier: str, seed: int, place: Path) -> list[str]:
    """The arguments of the command for a case on disk or in code."""
    drawn = catalogue.build(identifier, seed)
    if catalogue.CASES[identifier].how == "folder":
        save(drawn, place / "model")
        return ["inspect", str(place / "model"), *drawn.arguments, "--out", str(place / "out")]
    file = place / "case.py"
    lines = ["import sys", f"sys.path.insert(0, {str(HERE)!r})", "import catalogue", ""]
    for name, part in (("model", "model"), ("batches", "batches")):
        lines += [f"def {name}():", f"    return catalogue.build({identifier!r}, {seed}).{part}", ""]
    file.write_text("\n".join(lines))
    return ["inspect", f"{file}:model", "--batch", f"{file}:batches", "--out", str(place / "out")]


def by_command(identifier: str, seed: int, place: Path) -> dict:
    arguments = command(identifier, seed, place)
    sys.argv = ["normkit", *arguments]
    begin = time.time()
    try:
        runpy.run_module("normkit", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as stop:
        code = stop.code
    seconds = time.time() - begin
    found = sorted((place / "out").rglob("report.json"))
    document = json.loads(found[0].read_text()) if found else None
    return {"arguments": arguments, "exit": code, "seconds": seconds, "document": document}


def by_inspect(identifier: str, seed: int, place: Path) -> dict:
    import normkit as nk

    drawn = catalogue.build(identifier, seed)
    begin = time.time()
    inspection = nk.inspect(drawn.model, drawn.batches, name=identifier)
    seconds = time.time() - begin
    print(inspection)
    document = inspection.to_json()
    return {
        "seconds": seconds,
        "exit": None,
        "document": json.loads(document) if isinstance(document, str) else document,
    }


def by_watch(identifier: str, seed: int, place: Path) -> dict:
    import normkit as nk

    run = catalogue.build(identifier, seed).model
    torch.manual_seed(seed)
    run.model.train()
    begin, lines, losses = time.time(), [], []
    with nk.watch(run.model, run.optimizer, every=run.every, out=place / "watch", say=lines.append) as watch:
        for step in range(run.steps):
            run.before(step)
            given, wanted = run.batch(step)
            loss = run.loss(run.model(*given), wanted)
            run.optimizer.zero_grad()
            loss.backward()
            watch.step(loss)
            run.optimizer.step()
            losses.append(loss.item())
    inspection = watch.inspection()
    document = inspection.to_json()
    document = json.loads(document) if isinstance(document, str) else document
    answers = [{"question": a.question, "verdict": a.verdict, "detail": a.detail} for a in inspection.training.answers]
    print("\n".join(lines))
    return {
        "seconds": time.time() - begin,
        "exit": None,
        "document": document,
        "said": lines,
        "answers": answers,
        "losses": losses,
    }


def child(identifier: str, seed: int, place: Path) -> None:
    """Run one case; what it prints and gives is left in files."""
    streams = [os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("stdout", "stderr")]
    os.dup2(streams[0], 1)
    os.dup2(streams[1], 2)
    how = catalogue.CASES[identifier].how
    try:
        result = {"python": by_inspect, "watch": by_watch}.get(how, by_command)(identifier, seed, place)
    except BaseException:
        result = {"crash": traceback.format_exc()}
    sys.stdout.flush()
    sys.stderr.flush()
    (place / "result.json").write_text(json.dumps(result, default=str))
    os._exit(0)


def run(identifier: str, seed: int) -> dict:
    """Run one case in a process of its own, and gather everything."""
    place = material.FOLDER / "cases" / identifier.replace("/", "--").replace(" ", "-").replace("'", "")
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    begin = time.time()
    process = os.fork()
    if process == 0:
        child(identifier, seed, place)
    while os.waitpid(process, os.WNOHANG)[0] == 0:
        if time.time() - begin > LIMIT:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            break
        time.sleep(0.05)
    file = place / "result.json"
    result = json.loads(file.read_text()) if file.exists() else {"crash": "no result: killed or timed out"}
    for name in ("stdout", "stderr"):
        path = place / name
        result[name] = path.read_text(errors="replace")[-60000:] if path.exists() else ""
    result["all_seconds"] = time.time() - begin
    shutil.rmtree(place / "model", ignore_errors=True)
    return result


def preload() -> None:
    """Import what the product imports, once for all cases; nothing of it is called here."""
    import importlib

    file = material.FOLDER / "imported.txt"
    for name in file.read_text().split() if file.exists() else ["normkit"]:
        try:
            importlib.import_module(name)
        except Exception:
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="families or cases, with commas between")
    parser.add_argument("--resume", action="store_true", help="leave out the cases that OUT.json has already")
    parser.add_argument("--expected", type=Path, help="write what is expected to this file, and run nothing")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    only = [part for part in chosen.only.split(",") if part]
    missing = {"unet", "dit"} if importlib.util.find_spec("diffusers") is None else set()
    picked = [
        i for i, c in catalogue.CASES.items() if c.family not in missing and (not only or c.family in only or i in only)
    ]
    written = chosen.expected or chosen.out
    kept = json.loads(written.read_text()) if written.exists() else {}
    if not chosen.expected:
        preload()
    for identifier in picked:
        if chosen.resume and identifier in kept:
            continue
        if chosen.expected:
            kept[identifier] = catalogue.expected(identifier, chosen.seed)
        else:
            kept[identifier] = run(identifier, chosen.seed)
            print(f"{kept[identifier]['all_seconds']:6.1f} s  {identifier}", flush=True)
        written.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
