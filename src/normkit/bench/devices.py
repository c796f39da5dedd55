"""The device of a run: the CPU, or a GPU. All that differs between them is here."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from normkit.bench import timing
from normkit.bench.peers import GPU_PEERS, PACKAGES, PEERS, Peer
from normkit.bench.results import Machine
from normkit.bench.timing import Calls, CudaStream, Time
from normkit.errors import InputError
from normkit.kernels import cpu
from normkit.kernels.triton import loading
from normkit.text import installed_version


@dataclass(frozen=True)
class Device:
    """A device that tensors are on and calls are timed on."""

    name: str
    """As torch calls it."""
    noun: str
    """The word for what has the memory."""
    peers: tuple[Peer, ...]
    machine: Callable[[], Machine]
    """Describes the machine as it is now."""
    memory: Callable[[], int | None]
    """Bytes that a case may use; None if the system does not say."""
    times: Callable[[Calls, float], dict[str, Time]]
    """Times calls, for this many seconds each."""


def _host() -> Machine:
    reason = cpu.load()
    kernels = f"C++ kernels, {cpu.instructions()}" if reason is None else f"plain torch ({reason})"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Machine(_cpu_name(), torch.get_num_threads(), torch.__version__, kernels, date)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _host_memory() -> int | None:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None


def _gpu() -> Machine:
    reason = loading.device_reason(torch.cuda.current_device())
    return replace(
        _host(),
        kernels="Triton kernels" if reason is None else f"plain torch ({reason})",
        gpu=torch.cuda.get_device_name(),
        versions=tuple((name, version) for name in PACKAGES if (version := installed_version(name)) is not None),
    )


def _gpu_memory() -> int:
    # Memory that torch keeps from earlier cases is cut to their sizes.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@cache
def _stream() -> CudaStream:
    return CudaStream()


def _gpu_times(calls: Calls, seconds: float) -> dict[str, Time]:
    return timing.device_times(calls, seconds, _stream())


CPU = Device("cpu", "machine", PEERS, _host, _host_memory, timing.times)
CUDA = Device("cuda", "GPU", GPU_PEERS, _gpu, _gpu_memory, _gpu_times)


def find(name: str) -> Device:
    """The device of a name.

    Raises:
        InputError: If there is no such kind of device, or none here.
    """
    known = {device.name: device for device in (CPU, CUDA)}
    if name not in known:
        raise InputError(f"a device is one of {', '.join(known)}, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"device cuda: torch {torch.__version__} sees no GPU here; run this where it sees one, or choose cpu"
        )
    return known[name]
