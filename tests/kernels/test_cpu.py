"""The compiled library: it is there, clean, loads, and obeys NORMKIT_CPU; without it, one line says why."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import struct
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forks import Fork
from normkit import specs
from normkit.errors import InputError
from normkit.kernels import cpu, signatures

NOT_BUILT = "not built; install a C++ compiler and torch, then reinstall normkit with --no-build-isolation"
LIBRARY = cpu.library()

# By Itanium mangling: something of at:: or c10::, or a function of Python.
UNSTABLE = re.compile(r"(?<!\d)2at(?=[\dE])|(?<!\d)3c10(?=[\dE])|^_?Py[A-Z_]")


def undefined_symbols(path: Path) -> list[str]:
    """What a 64-bit ELF library wants from others: the entries of .dynsym that are in no section."""
    data = path.read_bytes()
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    # Type, offset, length and link of each section header.
    sections = [struct.unpack_from("<4xI16xQQI", data, start + index * size) for index in range(count)]
    _, offset, length, link = next(section for section in sections if section[0] == 11)
    strings = sections[link][1]
    names = []
    for symbol in range(offset, offset + length, 24):
        name, section = struct.unpack_from("<I2xH", data, symbol)
        if name and section == 0:
            names.append(data[strings + name : data.index(b"\0", strings + name)].decode())
    return names


def in_a_fresh_process(choice: str, program: str) -> str:
    process = Fork(program, environment={**os.environ, "NORMKIT_CPU": choice}, ours=False)
    out, error = process.communicate()
    assert (process.returncode, error) == (0, "")
    return out.strip()


def sets_of_this_machine() -> list[str]:
    """The instruction sets that the library must offer here."""
    if LIBRARY is None:
        return []
    flags = set(re.findall(r"\w+", next(iter(re.findall(r"^flags.*", Path("/proc/cpuinfo").read_text(), re.M)), "")))
    sets = ["portable"]
    sets += ["avx2"] if flags >= {"avx2", "f16c"} else []
    sets += ["avx512"] if flags >= {"avx512f", "avx512bw", "avx512dq", "avx512vl"} else []
    return sets


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before the first `load`."""
    monkeypatch.setattr(cpu, "_is_tried", False)
    monkeypatch.setattr(cpu, "_library", None)
    monkeypatch.setattr(cpu, "_reason", None)


def test_it_is_built_where_there_is_a_compiler() -> None:
    compiler = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    assert LIBRARY is not None or shutil.which(compiler.split()[0]) is None


def test_it_wants_only_the_stable_interface() -> None:
    for name in undefined_symbols(LIBRARY) if LIBRARY else []:
        assert not UNSTABLE.search(name)


def test_it_registers_implementations() -> None:
    # Else the reading above is of the wrong table.
    assert LIBRARY is None or "torch_library_impl" in undefined_symbols(LIBRARY)


@pytest.mark.parametrize("pattern", ["2at", "3c10", "Py"])
def test_an_unstable_symbol_would_be_seen(pattern: str) -> None:
    names = undefined_symbols(Path(torch.__file__).parent / "lib" / "libtorch_python.so")
    assert any(pattern in match.group() for match in map(UNSTABLE.search, names) if match)


@pytest.fixture(scope="module")
def fresh() -> list[str]:
    """What one fresh process says: of loading, twice; the set it begins with; each set of this machine, selected."""
    program = f"""
from normkit.kernels import cpu
print(cpu.load())
print(cpu.load())
if {sets_of_this_machine()}: print(cpu.instructions())
for name in {sets_of_this_machine()}: cpu.select(name); print(cpu.instructions())
"""
    return in_a_fresh_process("auto", program).splitlines()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_it_loads_in_a_fresh_process(fresh: list[str]) -> None:
    expected = "None" if LIBRARY else NOT_BUILT
    assert fresh[:2] == [expected, expected]


@pytest.mark.slow
def test_the_best_instruction_set_is_the_default(fresh: list[str]) -> None:
    assert fresh[2:3] == sets_of_this_machine()[-1:]


@pytest.mark.slow
def test_instruction_sets_can_be_changed_while_running(fresh: list[str]) -> None:
    assert fresh[3:] == sets_of_this_machine()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) for name in ("portable", "avx2", "avx512")],
)
def test_each_instruction_set_can_be_chosen(name: str) -> None:
    program = """
import torch, normkit
from normkit.kernels import cpu, signatures
reason = cpu.load()
x = torch.linspace(-3.0, 5.0, 7 * 1003).reshape(7, 1003)
wrong = (normkit.layer_norm(x, (1003,)) - torch.nn.functional.layer_norm(x.double(), (1003,))).abs().max()
print(reason or cpu.instructions(), wrong.item() < 1e-6)
"""
    if LIBRARY is None:
        expected = NOT_BUILT
    elif name in sets_of_this_machine():
        expected = name
    else:
        expected = f"NORMKIT_CPU={name}, which this CPU does not have"
    # 1e-6: outputs reach 1.8, where the machine epsilon of float32 is 1.2e-7, and each takes a few roundings.
    assert in_a_fresh_process(name, program) == f"{expected} True"


@pytest.mark.slow
def test_without_kernels_the_reference_computes() -> None:
    program = """
import torch, normkit
from normkit.kernels import cpu, signatures
x = torch.linspace(-3.0, 5.0, 1003).bfloat16()
y = normkit.rms_norm(x, (1003,))
print(cpu.load(), torch.equal(y, normkit.reference.forward(x, normkit.specs.TORCH_RMS_NORM.replace(has_weight=False))))
"""
    assert in_a_fresh_process("off", program) == "NORMKIT_CPU=off True"


@pytest.mark.usefixtures("untried")
def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMKIT_CPU", "sse2")
    with pytest.raises(InputError, match=r"^NORMKIT_CPU must be auto, avx512, avx2, portable or off, got 'sse2'$"):
        cpu.load()


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(InputError, match="must be auto, avx512, avx2 or portable, got 'off'"):
        cpu.select("off")


@pytest.mark.usefixtures("untried")
def test_kernels_out_of_use_have_no_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMKIT_CPU", "off")
    with pytest.raises(InputError, match=r"^the C\+\+ kernels are not in use: NORMKIT_CPU=off$"):
        cpu.instructions()


@pytest.mark.usefixtures("untried")
def test_a_missing_library_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
    monkeypatch.delenv("NORMKIT_CPU", raising=False)
    assert cpu.library() is None
    assert cpu.load() == NOT_BUILT


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("torch_library", [None, "libtorch_global_deps.so"])
def test_a_library_that_does_not_fit_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, torch_library: str | None
) -> None:
    broken = tmp_path / "_cpu.abi3.so"
    if torch_library is None:
        broken.write_bytes(b"no library")
    else:
        broken.symlink_to(Path(torch.__file__).parent / "lib" / torch_library)
    monkeypatch.setattr(cpu, "__file__", str(tmp_path / "cpu.py"))
    monkeypatch.delenv("NORMKIT_CPU", raising=False)
    reason = cpu.load()
    assert reason
    assert reason.startswith("_cpu.abi3.so does not fit this torch; reinstall normkit: ")
    assert "\n" not in reason


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("is_numbered", [True, False])
def test_a_library_of_other_sources_is_told(monkeypatch: pytest.MonkeyPatch, is_numbered: bool) -> None:
    if LIBRARY is None:
        return
    monkeypatch.delenv("NORMKIT_CPU", raising=False)
    if is_numbered:
        monkeypatch.setattr(signatures, "version", lambda: 7)
    else:
        # One that was built before the sources had a number.
        monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(normkit_select_instructions=lambda _: 1))
    reason = cpu.load()
    assert reason == f"{LIBRARY.name} was built from other sources than the Python files; reinstall normkit"
    with pytest.raises(InputError, match="not in use"):
        cpu.instructions()


ROW = torch.zeros(4, 4)


@pytest.mark.parametrize(
    ("spec", "x", "weight", "reason"),
    [
        (specs.TORCH_LAYER_NORM, ROW, torch.ones(4), None),
        (specs.TORCH_LAYER_NORM, ROW.t(), torch.ones(1, 4), None),
        (specs.TORCH_LAYER_NORM.replace(axes=(-2, -1)), ROW, torch.ones(4, 4), None),
        (specs.T5, ROW.half(), torch.ones(4), None),
        (specs.T5, ROW.half(), torch.ones(4).bfloat16(), "torch.bfloat16 from torch.float16 rows"),
        (specs.T5, ROW.double(), torch.ones(4), "torch.float32 from torch.float64 rows"),
        (specs.TORCH_LAYER_NORM.replace(axes=tuple(range(-16, 0))), ROW, None, "rows of more than 15 axes"),
        (specs.TORCH_LAYER_NORM, ROW.double(), torch.ones(4).double(), None),
        (specs.TORCH_LAYER_NORM.replace(axes=(1,)), ROW, torch.ones(4), "rows that are not the trailing axes"),
        (specs.TORCH_LAYER_NORM.replace(groups=2), ROW, torch.ones(4), "rows that are not the trailing axes"),
        (
            specs.TORCH_LAYER_NORM.replace(centre_numerator=False),
            ROW,
            torch.ones(4),
            "centring of the numerator or of the statistics alone",
        ),
        (specs.TORCH_RMS_NORM.replace(weight_placement="before"), ROW, torch.ones(4), "a gain before the norm"),
        (specs.TORCH_RMS_NORM.replace(statistics_dtype="input"), ROW.half(), torch.ones(4), "statistics in 16 bits"),
        (specs.TORCH_RMS_NORM.replace(statistics_dtype="input"), ROW, torch.ones(4), None),
        (specs.TORCH_LAYER_NORM, torch.zeros(3, 0), torch.ones(0), "empty rows"),
        (specs.TORCH_LAYER_NORM, ROW, torch.ones(4, 1), "parameters that are not one number a feature"),
        (specs.TORCH_LAYER_NORM, ROW, torch.ones(4, 4), "parameters that are not one number a feature"),
        (specs.TORCH_LAYER_NORM, ROW, torch.ones(()), "parameters that are not one number a feature"),
        (specs.TORCH_LAYER_NORM, ROW, torch.ones(4).double(), "float64 parameters of a narrower input"),
        (specs.TORCH_LAYER_NORM, ROW.to("meta"), torch.ones(4), "tensors on meta"),
        (specs.TORCH_LAYER_NORM, ROW, torch.ones(4, device="meta"), "parameters on meta"),
        (specs.TORCH_LAYER_NORM, ROW.int(), torch.ones(4), "torch.int32"),
    ],
)
def test_supported_norms(spec, x, weight, reason) -> None:
    assert cpu.supports(spec, x, weight, None) == reason
    # What is said of the gain holds for the bias.
    assert reason is None or "parameters" not in reason or cpu.supports(spec, x, None, weight) == reason


@pytest.mark.parametrize(
    ("inner", "stream", "reason"),
    [
        *[(pair[0], pair[1], None) for pair in itertools.product((torch.float32, torch.bfloat16), repeat=2)],
        (torch.float32, torch.float16, None),
        (torch.float16, torch.float32, None),
        (torch.float16, torch.float16, None),
        (torch.float64, torch.float64, None),
        (torch.float16, torch.bfloat16, "torch.float16 added to torch.bfloat16"),
        (torch.bfloat16, torch.float16, "torch.bfloat16 added to torch.float16"),
        (torch.float64, torch.float32, "torch.float64 added to torch.float32"),
        (torch.float32, torch.float64, "torch.float32 added to torch.float64"),
    ],
)
def test_which_streams_the_kernels_add_to(inner, stream, reason) -> None:
    assert cpu.supports(specs.TORCH_RMS_NORM, ROW.to(inner), None, None, ROW.to(stream)) == reason


def test_a_residual_elsewhere_is_told() -> None:
    assert cpu.supports(specs.TORCH_RMS_NORM, ROW, None, None, ROW.to("meta")) == "tensors on meta"
