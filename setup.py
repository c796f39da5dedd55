"""What pyproject.toml cannot say: how the C++ of the CPU kernels is built, if it can be.

The library registers kernels with torch when it is loaded. It knows nothing of Python: one file serves every
version of Python, and of torch from 2.10. Where it cannot be built the package installs without it and computes
with plain torch: the name of the wheel that pip makes and `normkit env` say which.
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


def torch_folder() -> Path | None:
    """Where torch lies: in the build's own environment, or in the one that pip builds for and hides from the build."""
    # Importing torch takes seconds; where it lies is enough.
    if found := find_spec("torch"):
        return Path(found.submodule_search_locations[0])
    hidden = Path(sysconfig.get_path("platlib"), "torch")
    return hidden if (hidden / "include/torch/csrc/stable").is_dir() else None


def obstacle() -> str | None:
    """Why the kernels cannot be built here, on one line; None if they can."""
    if sys.platform == "win32":
        return "they need g++ or clang++, and are not built on Windows"
    if torch_folder() is None:
        return "torch is not installed where the package is built; install it first, then use --no-build-isolation"
    compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    if shutil.which(shlex.split(compiler)[0]) is None:
        return f"there is no C++ compiler {compiler!r}; install one (Debian: g++) or name it in CXX"
    return None


def extension() -> Extension:
    """The library next to normkit/kernels/cpu.py, from every C++ file of its folder."""
    torch = torch_folder()
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
        extra_compile_args=["-O3", "-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-g0", "-fvisibility=hidden"],
        # Conversions of float16 from libgcc.a, as older systems lack them in libgcc_s; csrc/symbols.cpp has the rest.
        extra_link_args=["-lgcc"] if sys.platform == "linux" else [],
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


class NamedWheel(bdist_wheel):
    """A wheel whose name says what is in it: the library for any Python, or none."""

    def get_tag(self) -> tuple[str, str, str]:
        """Any Python from 3.11 on this platform; without the library any platform, and a name that says so."""
        if any(Path(self.bdist_dir).rglob("_cpu.*")):
            return "cp311", "abi3", super().get_tag()[2]
        self.build_number = "0_without_kernels"
        return "py3", "none", "any"


problem = obstacle()
if problem:
    sys.stderr.write(f"normkit: installed without its C++ kernels: {problem}\n")
setup(
    ext_modules=[] if problem else [extension()],
    cmdclass={"build_ext": ParallelBuild, "bdist_wheel": NamedWheel},
)
