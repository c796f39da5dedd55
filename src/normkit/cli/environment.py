"""`normkit env`: what is installed and what computes norms, for a bug report."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import click

from normkit.cli.options import json_option
from normkit.cli.terminal import print_json
from normkit.text import installed_version

EXTRAS = {
    "lightning": ("lightning",),
    "offload": ("accelerate", "transformers"),
    "ports": ("gguf", "onnx", "onnxruntime"),
    "study": ("scikit-learn", "scipy"),
    "video": ("imageio-ffmpeg",),
}
"""The packages that each extra brings."""

# Instructions that decide how 16-bit and fused arithmetic are done.
_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "bf16", "sve")

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@click.command("env", short_help="Show versions, CPU and kernels, for a bug report.")
@json_option
def show_environment(as_json: bool) -> None:
    """Show versions, the CPU, what computes norms here, and which extras are installed. Paste it into a bug report."""
    facts = _environment()
    if as_json:
        print_json(facts)
        return
    for label, value in facts.items():
        if label not in ("schema_version", "norms", "extras"):
            words = (" ".join(value) or "none of note") if isinstance(value, list) else value
            click.echo(f"{label:<16}{'none' if words is None else words}")
    for device, dtypes in facts["norms"].items():
        for dtype, found in dtypes.items():
            click.echo(f"{f'{dtype} norms':<16}{found['implementation']} on {device} ({found['why']})")
    for extra, packages in facts["extras"].items():
        absent = [name for name, found in packages.items() if found is None]
        state = f'missing {", ".join(absent)}: pip install "normkit[{extra}]"' if absent else "installed"
        click.echo(f"{f'extra {extra}':<16}{state}")


def _environment() -> dict[str, Any]:
    import torch

    return {
        "schema_version": 1,
        "normkit": installed_version("normkit"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": installed_version("transformers"),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cpu_flags": _cpu_flags(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "triton": installed_version("triton"),
        "norms": {"cpu": _cpu_norms()} | ({"cuda": _gpu_norms()} if torch.cuda.is_available() else {}),
        "extras": {extra: {name: installed_version(name) for name in packages} for extra, packages in EXTRAS.items()},
    }


def _cpu_norms() -> dict[str, dict[str, str]]:
    """The implementation of norms over trailing axes, by dtype of the input, and why it was chosen."""
    from normkit.kernels import cpu

    reason = cpu.load()
    if reason is None:
        chosen = cpu.choice()
        why = "the best this CPU has" if chosen == "auto" else f"NORMKIT_CPU={chosen}"
        found = {"implementation": f"C++ kernels, {cpu.instructions()}", "why": why}
    else:
        found = {"implementation": "plain torch", "why": f"no C++ kernels: {reason}"}
    return dict.fromkeys(_DTYPES, found)


def _gpu_norms() -> dict[str, dict[str, str]]:
    """The same for the GPU that torch uses."""
    import torch

    from normkit.kernels.triton import loading

    reason = loading.device_reason(torch.cuda.current_device())
    if reason is not None:
        found = {"implementation": "plain torch", "why": f"no Triton kernels: {reason}"}
        return dict.fromkeys(_DTYPES, found)
    found = {"implementation": "Triton kernels", "why": torch.cuda.get_device_name()}
    wide = {"implementation": "plain torch", "why": "the Triton kernels have no float64"}
    return dict.fromkeys(_DTYPES[:3], found) | {"float64": wide}


def _cpu_flags() -> list[str]:
    """The flags of `_FLAGS` that Linux reports for this CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    line = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    present = set(line.partition(":")[2].split())
    return [flag for flag in _FLAGS if flag in present]
