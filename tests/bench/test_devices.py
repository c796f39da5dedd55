"""What a run can be measured on, and what a GPU says of itself."""

from __future__ import annotations

import json

import pytest
import torch

from normkit.bench import devices
from normkit.bench.cases import Case
from normkit.bench.devices import CPU, CUDA, find
from normkit.bench.running import measure
from normkit.errors import InputError
from normkit.kernels.triton import loading


def test_the_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (find("cpu"), find("cuda")) == (CPU, CUDA)
    with pytest.raises(InputError, match="a device is one of cpu, cuda, got 'gpu'"):
        find("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"^device cuda: torch .* sees no GPU here; run this where it sees one"):
        find("cuda")


@pytest.mark.parametrize(
    ("reason", "kernels"), [(None, "Triton kernels"), ("no Triton", "plain torch (no Triton)")], ids=["fast", "plain"]
)
def test_what_a_gpu_says_of_itself(reason, kernels, monkeypatch):
    monkeypatch.setattr(loading, "device_reason", lambda _index: reason)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    monkeypatch.setattr(devices, "installed_version", {"triton": "3.9"}.get)
    found = CUDA.machine()
    assert (found.gpu, found.kernels, found.versions) == ("some GPU", kernels, (("triton", "3.9"),))
    assert (found.cpu, found.torch, CPU.machine().gpu) == (CPU.machine().cpu, torch.__version__, None)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
def test_two_cases_on_a_gpu(direction):
    cases = [Case(op, (64, 256), "bfloat16", direction) for op in ("layer_norm", "add_rms_norm")]
    peers = [peer for peer in CUDA.peers if peer.name in ("normkit", "torch")]
    found = measure(cases, device=CUDA, seconds=0.0, peers=peers)
    assert found.machine.gpu == torch.cuda.get_device_name()
    for cell in found.cells:
        assert cell.left_out == ()
        assert [(one.peer, one.is_wrong) for one in cell.measurements] == [("normkit", False), ("torch", False)]
        assert all(0 < one.seconds < 0.1 and 0 < one.host_seconds < 0.1 for one in cell.measurements)
    json.dumps(found.to_json())
