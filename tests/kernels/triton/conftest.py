"""What the tests of the kernels need, and no others: Triton, its language or its interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from triton_kernels import triton_kernels


@pytest.fixture
def kernels() -> Iterator[None]:
    """The Triton kernels compute what the test asks for."""
    pytest.importorskip("triton")
    with triton_kernels():
        yield
