"""Run the catalogue once: `python run.py SEED OUT.json [--only GLOB ...] [--jobs 2] [--keep] [--resume] [--tool PATH]`.

Each case is built below a temporary folder and run there by the real command line, 80 columns, 120 s; at most two at once.
Recorded: stdout, stderr, exit code, seconds, peak memory, comparison.json, whether a file's own code ran. The truth is
recorded beside it, as `cases.build` gave it before the run.
"""

import argparse
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import cases

LIMIT, CEILING = 120, 16 * 2**30  # seconds; bytes of address space, so that no file can take the machine down


# A small process of its own starts the tool: peak memory would else begin at that of this process, which holds torch.
LAUNCH = '''
import os, resource, sys
pid = os.fork()
if not pid:
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
    os.execv(sys.argv[2], sys.argv[2:])
_, status, usage = os.wait4(pid, 0)
open(".usage", "w").write(f"{os.waitstatus_to_exitcode(status)} {usage.ru_maxrss}")
'''


def call(command, cwd, limit=LIMIT):
    env = {**os.environ, "COLUMNS": "80", "LINES": "40", "NO_COLOR": "1", "TERM": "dumb", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    out, err = cwd / ".stdout", cwd / ".stderr"
    with open(out, "wb") as o, open(err, "wb") as e:
        t0 = time.monotonic()
        p = subprocess.Popen([sys.executable, "-S", "-c", LAUNCH, str(CEILING), *map(str, command)], cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=o, stderr=e, start_new_session=True)
        late = threading.Event()

        def stop():
            late.set()
            os.killpg(p.pid, signal.SIGKILL)

        timer = threading.Timer(limit, stop)
        timer.start()
        p.wait()
        timer.cancel()
    usage = cwd / ".usage"
    rc, peak = (int(v) for v in usage.read_text().split()) if usage.exists() else (-9, 0)  # no file: killed at the limit
    usage.unlink(missing_ok=True)
    text = lambda f: f.read_bytes()[:200_000].decode("utf-8", "replace")
    got = dict(command=[str(c) for c in command], rc=rc, seconds=round(time.monotonic() - t0, 2), peak_mib=round(peak / 1024, 1), timed_out=late.is_set(), stdout=text(out), stderr=text(err))
    out.unlink(), err.unlink()
    return got


def one(name, seed, folder, tool, keep):
    python = str(Path(tool).parent / "python")
    try:
        with BUILDING:
            truth = cases.build(name, seed, folder)
    except Exception as e:
        return dict(id=name, built=False, error=repr(e))
    truth.pop("check")
    cwd = Path(truth["dir"])
    pre = [call([tool, *c], cwd) for c in truth["pre"]]
    got = call([python if truth["kind"] == "python" else tool, *truth["args"]], cwd)
    reports = {}
    for f in sorted(cwd.glob("normkit-out/**/*.json")):
        if f.stat().st_size < 400_000:
            try:
                reports[str(f.relative_to(cwd))] = json.loads(f.read_text())
            except ValueError:
                reports[str(f.relative_to(cwd))] = "no JSON"
        else:
            reports[str(f.relative_to(cwd))] = f"{f.stat().st_size} bytes"
    got["reports"], got["canary"] = reports, (cwd / cases.CANARY).exists()
    if not keep:
        shutil.rmtree(cwd, ignore_errors=True)
    return dict(id=name, built=True, truth=truth, pre=pre, **got)


BUILDING = threading.Lock()


def main():
    a = argparse.ArgumentParser()
    a.add_argument("seed", type=int)
    a.add_argument("out", type=Path)
    a.add_argument("--only", nargs="*", default=["*"])
    a.add_argument("--jobs", type=int, default=1, choices=(1, 2))
    a.add_argument("--keep", action="store_true")
    a.add_argument("--resume", action="store_true")
    a.add_argument("--tool", default=str(Path(sys.executable).with_name("normkit")))
    a = a.parse_args()
    if subprocess.run([a.tool, "compare", "--help"], capture_output=True).returncode:
        sys.exit(f"{a.tool} has no command compare yet: nothing was run")
    names = [n for n in cases.CASES if any(fnmatch.fnmatch(n, g) for g in a.only)]
    done = {r["id"]: r for r in json.loads(a.out.read_text())["cases"]} if a.resume and a.out.exists() else {}
    todo = [n for n in names if n not in done]
    folder = tempfile.mkdtemp(prefix=f"ports-{a.seed}-")
    lock = threading.Lock()

    def worker():
        while True:
            with lock:
                if not todo:
                    return
                name = todo.pop(0)
            record = one(name, a.seed, folder, a.tool, a.keep)
            with lock:
                done[name] = record
                print(f"{len(done)}/{len(names)} {name}: exit {record.get('rc')}, {record.get('seconds')} s, {record.get('peak_mib')} MiB", flush=True)
                part = a.out.with_suffix(".part")
                part.write_text(json.dumps({"seed": a.seed, "cases": [done[n] for n in names if n in done]}, indent=1))
                part.replace(a.out)

    threads = [threading.Thread(target=worker) for _ in range(a.jobs)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if not a.keep:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print("kept:", folder)


if __name__ == "__main__":
    main()
