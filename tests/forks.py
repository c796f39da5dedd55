"""Programs in processes of their own that are there at once: each is a fork of one that has imported torch.

To import torch takes two seconds, and what is built on it one more: a test that starts five programs would do little
else. A fork is a program as `python -c` starts it: it has its own arguments, environment and folder, ends as any does,
and may be killed. torch has one thread in it, whatever the environment says.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LIBRARIES = ("torch._dynamo", "pytest", "hypothesis", "matplotlib.pyplot", "scipy.stats")
"""What the programs import; the first is what torch imports when an optimizer takes its first step."""

OURS = ("normkit.study.running", "normkit.study.report", "study_runs", "tiny_study")
"""The same of this project. Its kernels are chosen while it is imported, once and for all."""


class Fork:
    """A running program, with the part of `subprocess.Popen` that tests ask for.

    Args:
        program: Python source.
        arguments: What `sys.argv` holds behind the first.
        environment: All of it; by default that of this process.
        ours: Whether normkit has been imported, too; one that has not can choose other kernels.
    """

    def __init__(
        self, program: str, *arguments: object, environment: Mapping[str, str] | None = None, ours: bool = True
    ) -> None:
        request = {
            "program": program,
            "arguments": [str(argument) for argument in arguments],
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(Path.cwd()),
        }
        self._told = [os.memfd_create(name) for name in ("stdout", "stderr")]
        reading, writing = os.pipe()
        socket.send_fds(_servers()[ours], [json.dumps(request).encode()], [*self._told, writing])
        os.close(writing)
        self._status = os.fdopen(reading)
        self.pid = int(self._status.readline())
        os.set_blocking(reading, False)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative of a signal, or None while it runs."""
        if self.returncode is None and (line := self._status.readline()):
            self.returncode = os.waitstatus_to_exitcode(int(line))
            self._status.close()
        return self.returncode

    def told(self) -> str:
        """What it has written to stdout so far."""
        return self._text(self._told[0])

    def kill(self) -> None:
        """End it at once."""
        os.kill(self.pid, signal.SIGKILL)

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        """What it wrote to stdout and to stderr, when it has ended."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"a program was expected to end within {timeout:g} s")
            time.sleep(0.005)
        out, error = map(self._text, self._told)
        for handle in self._told:
            os.close(handle)
        return out, error

    @staticmethod
    def _text(handle: int) -> str:
        return os.pread(handle, os.fstat(handle).st_size, 0).decode()


def pair(program: str, *arguments: object) -> list[Fork]:
    """Two that share a run, as `torchrun --nproc-per-node 2` starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    environments = [os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    return [Fork(program, *arguments, environment=environment) for environment in environments]


@functools.cache
def _servers() -> list[socket.socket]:
    """The lines to the two processes that are forked, which end when the lines do."""
    ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
    handles = [line.fileno() for line in theirs]
    command = [sys.executable, __file__, json.dumps(sys.path), *map(str, handles)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=handles)
    for line in theirs:
        line.close()

    def end() -> None:
        for line in ours:
            line.close()
        process.wait()

    atexit.register(end)
    return list(ours)


def _asked(line: socket.socket) -> dict[str, Any]:
    """Wait for requests, and fork for each: this returns in the fork, which is to become the program."""
    # Who waits for a program is a fork as well, and nobody waits for that one.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, handles, _, _ = socket.recv_fds(line, 1 << 20, 3)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            break
        for handle in handles:
            os.close(handle)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    line.close()
    out, error, status = handles
    program = os.fork()
    if program:
        os.write(status, f"{program}\n".encode())
        os.write(status, f"{os.waitpid(program, 0)[1]}\n".encode())
        os._exit(0)
    os.dup2(out, 1)
    os.dup2(error, 2)
    for handle in handles:
        os.close(handle)
    return json.loads(request)


def _become(request: dict[str, Any]) -> None:
    """Be the program: `__main__` is a module of no file, as that of `python -c`."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["-c", *request["arguments"]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(request["program"], "<string>", "exec"), vars(main))


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    lines = [socket.socket(fileno=int(handle)) for handle in sys.argv[2:]]
    for name in LIBRARIES:
        importlib.import_module(name)
    # As in the tests themselves: a product of matrices has other bits with two threads.
    sys.modules["torch"].set_num_threads(1)
    is_ours = os.fork() == 0
    line = lines.pop(is_ours)
    lines.pop().close()
    for name in OURS if is_ours else ():
        importlib.import_module(name)
    # Else each fork would at its end look through all that it was given.
    gc.freeze()
    _become(_asked(line))


def until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait for a condition; fail if it does not hold in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_running(process: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
