"""Clean trained models, whole, at each dtype and on texts of several kinds: there is nothing to find but notes.

python census/trained_models.py FOLDER [--model NAME]... [--dtype DTYPE]... [--text KIND]...

FOLDER holds one folder of transformers for each model; it is NORMKIT_REAL_MODELS by default. One line per run:
model, dtype, text, tokens, seconds, findings. The exit code is 1 where a run has an error or a warning of the model.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from normkit.checkpoint.loading import LoadedModel, load_model
from normkit.cli.measurement import measure
from normkit.errors import NormkitError
from normkit.inspection.result import Inspection
from normkit.measurement.texts import Batches, from_text

DTYPES = ("bfloat16", "float16", "float32")
LONG, LONG_DTYPE = "long", "bfloat16"
CHINESE = """\
归一化是深度学习中常用的一种方法。它先计算一个向量的均值和方差，再把每个分量减去均值，除以标准差。
这样，无论输入的尺度如何变化，输出的长度都保持不变。训练因此更加稳定，学习率也可以取得更大。
清晨的市场里，卖菜的老人一边整理青菜，一边和邻居聊着昨天的大雨。河水涨了不少，桥边的石阶已经看不见了。
孩子们背着书包从巷子里跑出来，笑声传得很远。图书馆九点开门，门口已经排起了长队。
科学家发现，深海中的细菌能够在没有阳光的条件下生存，它们依靠化学反应取得能量。这一发现改变了人们对生命的看法。
"""


def texts() -> Iterator[tuple[str, str, int, int]]:
    """Kind of text, the text, its most tokens, tokens of a window."""
    code = Path(argparse.__file__).read_text()
    yield "code", code, 512, 256
    yield "chinese", CHINESE, 512, 256
    yield LONG, code, 5000, 5000
    yield "repeated", "the" + 127 * " the", 128, 128
    yield "single token", "the", 128, 128


def batches(loaded: LoadedModel, kind: str, text: str, most: int, length: int) -> Batches:
    """One of these texts as batches."""
    return from_text(
        text, kind, loaded.model, loaded.tokenizer, length=length, max_tokens=most, batch_size=4 if length < 5000 else 1
    )


def told(inspection: Inspection) -> str:
    """The findings in short."""
    found = [f"{each.rule} {each.severity} ({each.measured})" for each in inspection.findings]
    return "; ".join(found) or "no finding"


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default=os.environ.get("NORMKIT_REAL_MODELS"))
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--dtype", action="append", default=[], choices=DTYPES)
    parser.add_argument("--text", action="append", default=[], choices=[kind for kind, *_ in texts()])
    given = parser.parse_args()
    if given.folder is None:
        parser.error("give the folder of the models, or set NORMKIT_REAL_MODELS")
    names = given.model or sorted(path.parent.name for path in Path(given.folder).glob("*/config.json"))
    bad = 0
    for name in names:
        for dtype in given.dtype or DTYPES:
            loaded = load_model(str(Path(given.folder) / name), dtype=dtype)
            for kind, *text in texts():
                if (given.text and kind not in given.text) or (kind == LONG and dtype != LONG_DTYPE):
                    continue
                start = time.perf_counter()
                try:
                    found = measure(loaded, batches(loaded, kind, *text), progress=lambda *_: None)
                except NormkitError as error:
                    print(f"{name}  {dtype}  {kind}: not run: {error}", flush=True)
                    bad += 1
                    continue
                seconds = time.perf_counter() - start
                print(
                    f"{name}  {dtype}  {kind}  {found.model.tokens} tokens  {seconds:.0f} s  {told(found)}", flush=True
                )
                # A text of one token is to be said, and says nothing of the model.
                bad += any(each.severity != "note" and each.rule != "F17" for each in found.findings)
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
