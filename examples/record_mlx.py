"""Record every norm of a model in MLX on a text; `normkit record --template` writes normkit_recorder.py beside this.

    python record_mlx.py FOLDER TEXT FILE.safetensors

FOLDER is one of mlx-lm or of Hugging Face, TEXT a file. Quantized models are recorded alike.
"""

import sys
from pathlib import Path

import ml_dtypes
import mlx.core as mx
import mlx_lm
import numpy
from normkit_recorder import Recorder


def as_numpy(value):
    """An array with the same bits: numpy itself has no bfloat16."""
    if value.dtype == mx.bfloat16:
        return numpy.array(value.view(mx.uint16)).view(ml_dtypes.bfloat16)
    return numpy.array(value)


folder, text, file = sys.argv[1:]
model, tokenizer = mlx_lm.load(folder)
ids = tokenizer.encode(Path(text).read_text(encoding="utf-8"))[:256]

recorder = Recorder(array=as_numpy)
norms = {id(norm): path for path, norm in model.named_modules() if type(norm).__name__.endswith("Norm")}


def recorded(call):
    """A norm's `__call__` that is recorded too."""

    def called(norm, x, *rest):
        y = call(norm, x, *rest)
        recorder.add(norms[id(norm)], x, y, norm.get("weight"), norm.get("bias"))
        return y

    return called


# Python looks for __call__ at the class: each class of norms is changed once.
for kind in {type(norm) for norm in model.modules() if id(norm) in norms}:
    kind.__call__ = recorded(kind.__call__)

logits = model(mx.array([ids]))
recorder.save(file, tokens=[ids], outputs=logits, runtime=f"mlx {mx.__version__}")
print(f"wrote {file}: {len(norms)} norms, {len(ids)} tokens")
