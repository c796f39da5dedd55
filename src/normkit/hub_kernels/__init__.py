"""normkit's norms as layers of the Hugging Face `kernels` package, for models loaded with `use_kernels=True`.

layers.py     the layers: each finds out by behaviour what the class that it replaces computes
repository/   the local repository that `kernels` loads them from
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from normkit.errors import InputError
from normkit.kernels.triton import loading

__all__ = ["mapping"]

_REPOSITORY = Path(__file__).parent / "repository"

# The decorators of transformers' classes -> the layer that serves them.
_LAYERS = {"RMSNorm": "RMSNorm", "RMSNormZeroCentered": "RMSNorm", "LayerNorm": "LayerNorm"}


def mapping() -> dict[str, dict[str, Any]]:
    """The mapping to give to `kernels.register_kernel_mapping`, for the CPU and, where its kernels are on, for the GPU.

    They are on with `NORMKIT_CUDA=on` (`normkit env` says what computes). Models of transformers loaded with
    `use_kernels=True` afterwards compute their RMSNorms with normkit. For `torch.nn.LayerNorm`, which transformers does
    not offer to `kernels`, say so first: `kernels.replace_kernel_forward_from_hub(torch.nn.LayerNorm, "LayerNorm")`.

    Raises:
        InputError: If the package `kernels` is not installed.

    Example:
        >>> sorted(mapping())
        ['LayerNorm', 'RMSNorm', 'RMSNormZeroCentered']
    """
    if find_spec("kernels") is None:
        raise InputError("the mapping needs the package kernels, which is not installed; pip install kernels")
    from kernels import LocalLayerRepository

    devices = ("cpu", "cuda") if loading.load() is None else ("cpu",)
    return {
        name: {device: LocalLayerRepository(_REPOSITORY, layer_name=layer) for device in devices}
        for name, layer in _LAYERS.items()
    }
