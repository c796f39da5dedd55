"""Record the norms of a model in vLLM or SGLang (untried); `normkit record --template` writes the file imported here.

python record_serving.py FOLDER TEXT FILE.safetensors    # vLLM; docs/how-to/record-other-runtimes.md has SGLang
"""

import os
import sys
from functools import partial
from pathlib import Path

import ml_dtypes
import torch
from normkit_recorder import Recorder


def as_numpy(tensor):
    """An array with the same bits: numpy itself has no bfloat16."""
    bits = tensor.detach().cpu()
    return bits.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if bits.dtype == torch.bfloat16 else bits.numpy()


def record_norms(model, recorder, prefix=""):
    """Record every norm of a torch model, fused ones with the residual that they add."""

    def before(norm, args, kwargs):
        # A fused norm writes its output over its input, and the sum over the residual.
        norm.entered = [each.clone() for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)][:2]

    def after(path, norm, _args, result):
        (x, *residual), y = norm.entered, result[0] if isinstance(result, tuple) else result
        recorder.add(path, x, y, getattr(norm, "weight", None), getattr(norm, "bias", None), *residual)

    for path, norm in model.named_modules():
        if type(norm).__name__.endswith("Norm"):
            norm.register_forward_pre_hook(before, with_kwargs=True)
            norm.register_forward_hook(partial(after, prefix + path))


def of_sglang(config):
    """SGLang's hook before `model`; each pass writes the file anew."""
    recorder = Recorder(array=as_numpy)

    def install(model, _args):
        if not recorder.order:
            record_norms(model, recorder, "model.")
            model.register_forward_hook(lambda *_: recorder.save(config["file"], runtime="sglang"))

    return install


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # The model lies in this process.
    from vllm import LLM, SamplingParams

    llm = LLM(sys.argv[1], enforce_eager=True)  # A CUDA graph calls no hook.
    ids, recorder = llm.get_tokenizer().encode(Path(sys.argv[2]).read_text())[:256], Recorder(array=as_numpy)
    llm.apply_model(partial(record_norms, recorder=recorder))
    llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1))
    recorder.save(sys.argv[3], tokens=[ids], runtime="vllm")
