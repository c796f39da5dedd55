"""The process starts itself again, once, with what glibc reads at the start."""

from __future__ import annotations

import os
import sys

import pytest

from normkit.bench import allocation


@pytest.fixture
def started(monkeypatch):
    """What would have been executed."""
    found = []
    monkeypatch.setattr(os, "execve", lambda *given: found.append(given))
    monkeypatch.setattr(sys, "platform", "linux")
    return found


def test_it_starts_itself_again(started, monkeypatch):
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_", raising=False)
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1")
    allocation.settle()
    ((path, command, environment),) = started
    assert command == [path, *sys.orig_argv[1:]]
    # What is set already stays.
    assert environment["MALLOC_MMAP_THRESHOLD_"] == "1"
    assert environment["MALLOC_TRIM_THRESHOLD_"] == allocation.SETTINGS["MALLOC_TRIM_THRESHOLD_"]


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_not_twice_and_not_elsewhere(started, monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    for name, value in allocation.SETTINGS.items():
        if platform == "linux":
            monkeypatch.setenv(name, value)
        else:
            monkeypatch.delenv(name, raising=False)
    allocation.settle()
    assert started == []
