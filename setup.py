"""What pyproject.toml cannot say: how the C++ of the CPU kernels is built, if it can be.

The library registers kernels with torch when it is loaded. It knows nothing of Python: one file serves every
version of Python, and of torch from 2.10. Where it cannot be built the package installs without it and computes
with plain torch; `normkit env` says which.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/normkit/kernels/csrc")


def obstacle() -> str | None:
    """Why the kernels cannot be built here, on one line; None if they can."""
    if sys.platform == "win32":
        return "they need g++ or clang++, and are not built on Windows"
    if find_spec("torch") is None:
        return "torch is not installed where the package is built; install it first, then use --no-build-isolation"
    compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    if shutil.which(shlex.split(compiler)[0]) is None:
        return f"there is no C++ compiler {compiler!r}; install one (Debian: g++) or name it in CXX"
    return None


def extension() -> Extension:
    """The library next to normkit/kernels/cpu.py, from every C++ file of its folder."""
    # Importing torch takes seconds; where it lies is enough.
    torch = Path(find_spec("torch").submodule_search_locations[0])
    return Extension(
        "normkit.kernels._cpu",
        # The one that takes longest comes first, so that all cores are busy to the end.
        sources=sorted(map(str, SOURCES.glob("*.cpp")), key=lambda name: ("portable" not in name, name)),
        depends=sorted(map(str, SOURCES.glob("*.h"))),
        include_dirs=[str(torch / "include")],
        library_dirs=[str(torch / "lib")],
        libraries=["torch_cpu"],
        # The oldest torch that the library is to run with: 2.10.
        define_macros=[("TORCH_TARGET_VERSION", "0x020a000000000000")],
        # Instruction sets are chosen function by function, at run time; Python's own flags ask for debug symbols.
        extra_compile_args=["-O3", "-std=c++20", "-ffp-contract=off", "-g0", "-fvisibility=hidden"],
        language="c++",
        optional=True,
        py_limited_api=True,
    )


class ParallelBuild(build_ext):
    """Compiles the files of the library side by side."""

    def build_extension(self, ext: Extension) -> None:
        """Compile each source on a thread of its own, then link."""
        compile_one = self.compiler.compile

        def compile_all(sources: list[str], **options: object) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                objects = threads.map(lambda source: compile_one([source], **options), sources)
                return [item for result in objects for item in result]

        self.compiler.compile = compile_all
        super().build_extension(ext)


class AnyPythonWheel(bdist_wheel):
    """A wheel that is bound to a platform, but to no version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """Keep the platform only."""
        return "py3", "none", super().get_tag()[2]


problem = obstacle()
if problem:
    sys.stderr.write(f"normkit: installed without its C++ kernels: {problem}\n")
setup(
    ext_modules=[] if problem else [extension()],
    cmdclass={"build_ext": ParallelBuild, "bdist_wheel": AnyPythonWheel},
)
