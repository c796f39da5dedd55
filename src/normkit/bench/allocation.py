"""The memory allocator's settings, the same for all that is timed."""

from __future__ import annotations

import os
import sys

SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""Outputs above glibc's threshold would be mapped anew at each call, and their page faults timed instead of norms."""


def settle() -> None:
    """Start this process again with the settings, unless it has them: glibc reads them at the start only.

    What the environment sets already stays. Only on Linux; elsewhere they mean nothing.
    """
    if sys.platform == "linux" and not SETTINGS.keys() <= os.environ.keys():
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**SETTINGS, **os.environ})
