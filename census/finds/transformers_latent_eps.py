"""transformers: norms of latents whose eps is the class's 1e-6, in families whose configuration says 1e-5.

    python census/finds/transformers_latent_eps.py

The report is docs/wild/reports/transformers_latent_eps.md.
"""

from __future__ import annotations

import importlib

import torch
import transformers.models.glm_moe_dsa.modeling_glm_moe_dsa as theirs
from transformers import CONFIG_MAPPING

import normkit as nk
from patching import fixed, versions

FAMILIES = ("glm4_moe_lite", "glm_moe_dsa", "longcat_flash", "kimi_linear", "hy_v4", "deepseek_v3", "glm5_next_text")
SIZES = {
    "hidden_size": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
}


def attention_of(family, module=None):
    """An attention layer of a family with latents, and its configuration."""
    folder = family.removesuffix("_text")
    module = module or importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    without_rotation = {"qk_rope_head_dim": 0} if family == "glm5_next_text" else {}
    config = CONFIG_MAPPING[family](**SIZES | without_rotation)
    config._attn_implementation = "eager"
    for name in sorted(vars(module)):
        if name.endswith(("Attention", "MLA")) and "kv_a_layernorm" in (vars(module)[name].__init__.__code__.co_names):
            return vars(module)[name](config, layer_idx=0), config
    raise LookupError(family)


def told(family, module=None):
    layer, config = attention_of(family, module)
    found = {}
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        norm = getattr(layer, name, None)
        if norm is not None:
            found[name] = nk.identify(norm, len(norm.weight)).spec.eps
    states = ", ".join(f"{name} {eps:g}" for name, eps in found.items())
    print(f"  {family}: configuration {config.rms_norm_eps:g}; by behaviour {states}")


def effect():
    """How far 1e-6 and 1e-5 are apart, by the size of a latent row."""
    for size in (1, 0.1, 0.01, 0.003):
        ratio = ((size**2 + 1e-5) / (size**2 + 1e-6)) ** 0.5
        print(f"  latent rows of root mean square {size:g}: outputs differ by {ratio - 1:.2%}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(versions("torch", "transformers"))
    print("as installed")
    for family in FAMILIES:
        told(family)
    effect()
    print("with the fix")
    told("glm_moe_dsa", fixed("transformers_latent_eps", theirs))
