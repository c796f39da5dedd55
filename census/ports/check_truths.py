"""Build every case with a seed and compute its truth in float64: `python check_truths.py SEED OUT.json [name ...]`.

Imports no normkit. differs: > 1e-4 of the logits' spread; rounding: 1e-9 ... 0.2; same: < 5e-6.
"""

import json
import shutil
import sys
import tempfile
import time
import traceback

import cases
import torch

seed, out = int(sys.argv[1]), sys.argv[2]
names = sys.argv[3:] or list(cases.CASES)
folder = tempfile.mkdtemp(prefix="ports-")
rows, bad = [], 0
for name in names:
    t0 = time.time()
    try:
        t = cases.build(name, seed, folder)
    except Exception:
        bad += 1
        print(name, "BUILD FAILED")
        traceback.print_exc(limit=-3)
        continue
    check, value, verdict = t.pop("check"), None, ""
    if check:
        try:
            value = check()
            ok = {"differs": value > 1e-4 or value != value, "rounding": (1e-10 if not t["healthy"] else -1) < value < 0.3, "quantized": 0 < value < 0.8, "same": value < 5e-6, None: True}[t["expect"]]
            verdict = "" if ok else f"TRUTH DOUBTFUL: expected {t['expect']}"
        except Exception:
            verdict = "CHECK FAILED"
            traceback.print_exc(limit=-3)
        bad += bool(verdict)
    size = sum(f.lstat().st_size for f in (cases.Path(folder) / name).rglob("*") if f.is_file()) / 2**20
    t["measured"], t["build_s"], t["mib"] = value, round(time.time() - t0, 2), round(size, 2)
    rows.append(t)
    if verdict or t["build_s"] > 5:
        print(name, value, verdict, f"{t['build_s']} s {size:.1f} MiB", flush=True)
    shutil.rmtree(cases.Path(folder) / name)
json.dump(rows, open(out, "w"), indent=1)
print(len(rows), "cases,", bad, "doubtful")
