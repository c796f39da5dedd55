"""Judge a run: `python judge.py OUT.json [--form FORM.json] [--all]` prints truth beside output and writes the form;
`python judge.py OUT.json --tally FORM.json` counts what the form holds (a human's entry before the machine's).

Verdicts: right (healthy or hostile case answered as it should be; undecided said), found first, found, misplaced, misnamed,
missed, false alarm, crash, silence (nothing said about what was not checked). `eye` marks what a human has to read, and why.
"""

import argparse
import collections
import json
import re
import sys
from pathlib import Path

HEAD = 14  # lines of output that count as "first"
VERDICTS = ("right", "found first", "found", "misplaced", "misnamed", "missed", "false alarm", "crash", "silence")
ALL = re.compile(r"\ball\b|\bevery\b|\beach\b|\d+ of \d+|\d+ norms", re.I)


def pattern(token):
    """A token of the output, perhaps with braces and stars, as a regular expression for whole names or their ends."""
    out, i = "", 0
    for m in re.finditer(r"\{([^}]*)\}|\[([^\]]*)\]|\*+|…|\.\.\.", token):
        out += re.escape(token[i:m.start()])
        inner = m.group(1) if m.group(1) is not None else m.group(2)
        if inner is None:
            out += r".*?"
        else:
            parts = []
            for piece in re.split(r"[,|]\s*", inner):
                r = re.fullmatch(r"(\d+)\s*(?:-|–|\.\.|:)\s*(\d+)", piece.strip())
                parts += [str(n) for n in range(int(r[1]), int(r[2]) + 1)] if r and int(r[2]) - int(r[1]) < 500 else [re.escape(piece.strip())]
            out += "(?:" + "|".join(parts) + ")"
        i = m.end()
    return out + re.escape(token[i:])


def placed(text, where):
    if not where:
        return None
    low = text.lower()
    for name in where:
        if re.search(r"(?<![\w])" + re.escape(name.lower()) + r"(?![\w])", low):
            return True
    for token in set(re.findall(r"[\w.{}\[\],|*…/–:-]{3,}", text)):
        token = token.strip(".,:;")
        if not re.search(r"[{*\[…]", token):
            continue
        try:
            r = re.compile(r"(?:.*\.)?" + pattern(token.removesuffix(".weight").removesuffix(".bias")) + r"(?:\.weight|\.bias)?", re.I)
        except re.error:
            continue
        if token.count(".") and any(r.fullmatch(n) for n in where):
            return True
    return len(where) >= 6 and bool(ALL.search(text))


def said(text, patterns):
    return any(re.search(p, text, re.I) for p in patterns)


def judge(r):
    """(verdict, [why an eye is needed])"""
    if not r.get("built"):
        return "crash", [f"the case was not built: {r.get('error')}"]
    t, eye = r["truth"], []
    text, err = r["stdout"], r["stderr"]
    everything = text + "\n" + err
    lines = [l for l in text.splitlines() if l.strip()]
    head = "\n".join(lines[:HEAD])
    if t["kind"] == "python":
        head = "\n".join(lines[lines.index("RESULT BEGINS") + 1:][:HEAD]) if "RESULT BEGINS" in lines else head
    if r["timed_out"]:
        return "crash", ["ran past the time limit"]
    if r["rc"] == 101 or r["rc"] < 0 or "Traceback (most recent call last)" in everything:
        return "crash", []
    if t["kind"] == "python" and r["rc"]:
        return "crash", []
    if r["canary"]:
        return "crash", ["code of the file ran"]
    if r["peak_mib"] > t["max_mib"]:
        eye.append(f"peak memory {r['peak_mib']} MiB, more than {t['max_mib']}")
    exit_ok = r["rc"] in t["exit"] or t["kind"] == "python"
    false = [w for w in t["wrong"] if re.search(w, head, re.I)]
    if t["group"] == "hostile":
        if re.search("\x1b\\[2J|\x07", everything):
            return "crash", ["an escape of the file reached the terminal"]
        words = [l for l in (err if r["rc"] == 2 else everything).splitlines() if l.strip()]
        if not exit_ok:
            return ("missed" if r["rc"] == 0 else "misnamed"), [f"exit {r['rc']}, meant {t['exit']}"]
        if r["rc"] == 2 and len(words) > 3:
            eye.append(f"{len(words)} lines for one refusal")
        if not words or not said(everything, t["say"]):
            return "silence", eye
        return "right", eye
    if t["healthy"]:
        if not exit_ok:
            return ("false alarm" if r["rc"] == 1 else "misnamed"), eye + [f"exit {r['rc']}, meant {t['exit']}"]
        if false:
            return "false alarm", eye + [f"says {f!r}" for f in false]
        if t["seen"] == "nobody" and not said(everything, t["say"]):
            return "silence", eye + ["does it say which levels it could not look at?"]
        if not said(everything, t["say"]):
            eye.append("exit code right, none of the expected wordings")
        if r["rc"] == 1 and t["kind"] == "compare":
            eye.append("exit 1 allowed here: is what it says true?")
        if t["kind"] == "python":
            eye.append("no exit code: read the verdict")
        return "right", eye
    says_head, says_all = said(head, t["say"]), said(everything, t["say"])
    place_head, place_all = placed(head, t["where"]), placed(everything, t["where"])
    if false:
        eye.append("head matches wording that would be false: " + "; ".join(false))
    if "no norm" in t["fault"] or "every norm right" in t["fault"] or t["group"] == "blind":
        eye.append("not a norm's fault: does it blame one?")
    if not exit_ok:
        if r["rc"] == 2:
            return "misnamed", eye + ["refused: exit 2"]
        if r["rc"] == 0:
            return ("found" if says_all and place_all else "missed"), eye + ["exit 0"]
    if r["rc"] == 0 and 1 in t["exit"] and not says_all:
        return "missed", eye
    if t["seen"] == "undecided":
        return ("right" if says_all else "misnamed"), eye + ([] if says_head else ["does it leave open what the data leave open?"])
    if t["kind"] == "python" and t["group"] == "rows":
        return ("found first" if says_all and not false else "misnamed"), eye
    if false and says_head:
        return "misnamed", eye
    if says_head and place_head is not False:
        return "found first", eye + (["no place to check by machine"] if place_head is None else [])
    if says_all and place_all is not False:
        return "found", eye + ["not within the first lines" if not says_head else "place not within the first lines"]
    if says_all:
        return "misplaced", eye + ["none of the names of the truth is there"]
    if place_all:
        return "misnamed", eye + ["place named, none of the expected wordings: read it"]
    return "missed", eye + (["exit 1, but neither name nor place"] if r["rc"] == 1 else [])


def main():
    a = argparse.ArgumentParser()
    a.add_argument("out", type=Path)
    a.add_argument("--form", type=Path)
    a.add_argument("--tally", type=Path)
    a.add_argument("--all", action="store_true", help="print right answers too")
    a = a.parse_args()
    run = json.loads(a.out.read_text())
    if a.tally:
        form = json.loads(a.tally.read_text())
        table, extra = collections.defaultdict(collections.Counter), []
        for r in run["cases"]:
            f = form[r["id"]]
            v = f["human"] or f["machine"]
            assert v in VERDICTS, (r["id"], v)
            g = r["truth"]["group"] if r.get("truth") else "unbuilt"
            table[g][v] += 1
            table["all"][v] += 1
        print("group".ljust(12) + "cases".rjust(6) + "".join(v.rjust(13) for v in VERDICTS))
        for g, c in table.items():
            print(g.ljust(12) + str(sum(c.values())).rjust(6) + "".join(str(c[v] or "").rjust(13) for v in VERDICTS))
        open_ = [k for k, f in form.items() if f["eye"] and not f["human"]]
        print(f"{len(open_)} marked for an eye and not yet judged by one")
        return
    form = {}
    for r in run["cases"]:
        verdict, eye = judge(r)
        form[r["id"]] = {"machine": verdict, "eye": eye, "human": None, "note": "", "choices": "|".join(VERDICTS)}
        if verdict == "right" and not eye and not a.all:
            continue
        t = r.get("truth", {})
        print("=" * 100)
        print(f"{r['id']}  [{verdict}]" + ("  EYE: " + "; ".join(eye) if eye else ""))
        print(f"  truth   {t.get('fault')}")
        if t.get("where"):
            print(f"  where   {', '.join(t['where'][:6])}{' ...' if len(t['where']) > 6 else ''}")
        if t.get("second"):
            print(f"  second  {t['second']}")
        if t.get("note"):
            print(f"  note    {t['note']}")
        print(f"  level {t.get('level')}  seen {t.get('seen')}  exit {r.get('rc')} (meant {t.get('exit')})  {r.get('seconds')} s  {r.get('peak_mib')} MiB")
        lines = [l for l in (r.get("stdout") or "").splitlines() if l.strip()]
        for l in lines[:HEAD]:
            print("  |", l)
        for l in (r.get("stderr") or "").splitlines()[-6:]:
            print("  !", l)
    path = a.form or a.out.with_suffix(".form.json")
    path.write_text(json.dumps(form, indent=1))
    print("=" * 100)
    print(collections.Counter(f["machine"] for f in form.values()))
    print(sum(bool(f["eye"]) for f in form.values()), "marked for an eye; form:", path)


if __name__ == "__main__":
    main()
