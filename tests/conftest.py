"""One thread, fixed seeds, a fixed order of hypothesis' examples, and the models that ship."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from normkit import demo

# Examples are the same on every machine; time limits are not a property of the code.
settings.register_profile(
    "fixed", deadline=None, derandomize=True, print_blob=False, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _single_thread_and_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def demo_directories() -> dict[str, Path]:
    """The folders of the two models that ship: "layernorm" (a GPT-2) and "rmsnorm" (a Llama)."""
    return {name: demo.directory(name) for name in ("layernorm", "rmsnorm")}
