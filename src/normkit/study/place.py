"""Where a study runs: device, dtype, threads, processes; it decides the bits of its numbers."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version

import torch

from normkit.errors import InputError
from normkit.study.ranks import ALONE, Ranks
from normkit.text import dtype_name, first_line


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a study runs.

    Attributes:
        device: Of models and batches.
        dtype: Of both.
        threads: Torch's, of each trial.
        ranks: The processes that share each batch.
    """

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    threads: int = 1
    ranks: Ranks = ALONE

    def in_words(self) -> dict[str, str]:
        """What a reader of the numbers has to know of it; the same wherever the same bits are to be expected."""
        on_cuda = torch.device(self.device).type == "cuda"
        words = {
            "normkit": version("normkit"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": f"{self.device} ({torch.cuda.get_device_name(self.device)})" if on_cuda else self.device,
            "cpu": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
            "dtype": dtype_name(self.dtype),
            "threads": str(self.threads),
        }
        return words if self.ranks.size == 1 else {**words, "processes": str(self.ranks.size)}


def require_device(device: str) -> None:
    """Refuse a device that is not here.

    Raises:
        InputError: If torch does not know it, or finds none such.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = first_line(error)
        raise InputError(f"cannot compute on the device {device!r}: {reason}; --device cpu always works") from None
