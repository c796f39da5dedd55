"""normkit's norms through `kernels`, Hugging Face's own way to exchange a layer: RMSNorm, and `nn.LayerNorm`.

Both demo models are loaded with `use_kernels=True` and without, and compared. transformers and kernels must fit
(5.23 wants kernels 0.18.2, 5.22 took 0.17.2); where they do not, `kernels.kernelize` makes the same exchange.
"""

from __future__ import annotations

import time

import torch
from kernels import Mode, kernelize, register_kernel_mapping, replace_kernel_forward_from_hub
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.utils.import_utils import is_kernels_available

from normkit import demo
from normkit.hub_kernels import mapping

register_kernel_mapping(mapping())
# transformers offers its RMSNorms to `kernels` by itself; nn.LayerNorm it does not.
replace_kernel_forward_from_hub(nn.LayerNorm, "LayerNorm")
if not is_kernels_available():
    replace_kernel_forward_from_hub(LlamaRMSNorm, "RMSNorm")


def exchanged(folder: object) -> nn.Module:
    """The model of a folder with normkit's norms."""
    if is_kernels_available():
        return AutoModelForCausalLM.from_pretrained(folder, use_kernels=True).eval()
    return kernelize(AutoModelForCausalLM.from_pretrained(folder).eval(), mode=Mode.INFERENCE)


def milliseconds(model: nn.Module) -> float:
    """The fastest of ten forward passes."""
    times = []
    for _ in range(10):
        start = time.perf_counter()
        model(ids)
        times.append(1000 * (time.perf_counter() - start))
    return min(times)


print("use_kernels=True" if is_kernels_available() else "kernels.kernelize: this transformers refuses this kernels")
ids = torch.arange(512).reshape(4, 128) % 128
with torch.no_grad():
    for name in ("layernorm", "rmsnorm"):
        plain = AutoModelForCausalLM.from_pretrained(demo.directory(name)).eval()
        ours = exchanged(demo.directory(name))
        difference = float((ours(ids).logits - plain(ids).logits).abs().max())
        norms = sum("_normkit_recipe" in vars(module) for module in ours.modules())
        print(f"{name}: {norms} norms exchanged, logits move by at most {difference:.0e}")
        print(f"  forward pass {milliseconds(plain):.1f} ms -> {milliseconds(ours):.1f} ms")
