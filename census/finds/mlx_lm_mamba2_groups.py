"""mlx-lm: Mamba-2's gated norm takes all features as one row, where the model has groups.

    python census/finds/mlx_lm_mamba2_groups.py

`n_groups` splits the features of the norm after the scan; mamba_ssm and transformers norm each group by itself. The
report is docs/wild/reports/mlx_lm_mamba2_groups.md.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models import mamba2
from mlx_lm.utils import load_model
from safetensors.torch import save_file
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

import normkit as nk
from patching import fixed, versions

FEATURES, GROUPS = 64, 8
# The sizes of Mamba-Codestral-7B, an eighth as wide and two blocks instead of 64.
SIZES = {"hidden_size": 512, "num_heads": 16, "head_dim": 64, "n_groups": GROUPS, "state_size": 128, "expand": 2}


def arguments(module):
    """The arguments of a block whose norm has eight groups of eight features."""
    given = {
        "model_type": "mamba2",
        "num_heads": 8,
        "head_dim": 8,
        "vocab_size": 8,
        "hidden_size": 32,
        "n_groups": GROUPS,
    }
    given |= {"intermediate_size": FEATURES, "state_size": 4, "num_hidden_layers": 1, "layer_norm_epsilon": 1e-5}
    given |= {"conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True}
    return module.ModelArgs(**given, time_step_limit=(0.0, float("inf")), time_step_rank="auto")


def show(module):
    norm = module.Mamba2Block(arguments(module), 0).norm

    def called(x, weight):
        norm.weight = mx.array(np.asarray(weight))
        return np.array(norm(mx.array(np.asarray(x))))

    passport = nk.identify(called, FEATURES, weight=torch.ones(FEATURES))
    print(f"  normkit: groups {passport.spec.groups}, {passport.spec}")
    row = mx.array([[1.0] * 8 + [10.0] * 56])
    y = np.array(norm(row))[0]
    print(f"  a group of ones and seven of tens: {y[0]:.3f} and {y[-1]:.3f}")


def logits(module, folder, tokens):
    # mlx-lm asks for the inner width, which transformers 5 computes from `expand`.
    inner = {"intermediate_size": SIZES["expand"] * SIZES["hidden_size"]}
    classes = (module.Model, module.ModelArgs)
    model, _ = load_model(folder, model_config=inner, get_model_classes=lambda **_: classes)
    return torch.from_numpy(np.array(model(mx.array(tokens.numpy()))))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(versions("mlx", "mlx-lm", "torch", "transformers"))
    torch.manual_seed(0)
    reference = Mamba2ForCausalLM(Mamba2Config(**SIZES, num_hidden_layers=2, vocab_size=512)).eval()
    for block in reference.backbone.layers:
        torch.nn.init.normal_(block.mixer.norm.weight, 1.0, 0.1)
    tokens = torch.randint(512, (1, 64))
    with torch.no_grad():
        right = reference(tokens).logits
    theirs = nk.identify(MambaRMSNormGated(FEATURES, FEATURES // GROUPS, 1e-5), FEATURES).spec
    print(f"transformers\n  normkit: groups {theirs.groups}, {theirs}")
    with tempfile.TemporaryDirectory() as folder:
        save_file(reference.state_dict(), Path(folder, "model.safetensors"), {"format": "pt"})
        reference.config.to_json_file(Path(folder, "config.json"))
        for title, module in (("as installed", mamba2), ("with the fix", fixed("mlx_lm_mamba2_groups", mamba2))):
            print(title)
            show(module)
            off = (logits(module, Path(folder), tokens) - right).abs().max()
            largest = right.abs().max()
            print(f"  Mamba-2 of two blocks, {GROUPS} groups: largest logit {largest:.3f}, off by at most {off:.4f}")
