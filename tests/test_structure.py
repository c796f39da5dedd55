"""The house is in order: imports point one way, files are short, names do not clash, nothing of one machine is left."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from types import FunctionType

import pytest

import normkit
from helpers import ROOT, SOURCE

# A module imports from its own package and from what stands before it here; nothing else.
ROWS = [
    ["errors", "text", "files", "conventions", "spec", "specs", "show"],
    ["reference", "units", "kernels"],
    ["ops", "geometry"],
    ["arguments", "functional"],
    ["layers"],
    ["identification", "models"],
    ["conversion", "hub_kernels"],
    ["checkpoint"],
    ["measurement"],
    ["rules"],
    ["inspection", "watching"],
    ["study", "demo"],
    ["comparison", "bench", "plots"],
    ["testing"],
    ["explorer"],
    ["cli"],
    ["__main__"],
]
ORDER = {name: position for position, name in enumerate(name for row in ROWS for name in row)}

# Names of functions that are public, or will be: loading a module of that name would replace the function.
FIXED_FUNCTIONS = {
    *("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "normalize", "add_normalize", "identify"),
    *("identify_rows", "compare", "record", "convert", "revert", "probe", "watch", "inspect", "fold", "load"),
    "explore",
}
VAGUE_NAMES = {"utils", "util", "common", "misc", "helpers", "base", "core", "manager"}
HEAVY = {"torch", "transformers", "matplotlib", "click", "rich", "jinja2", "safetensors", "numpy"}
LINES = 400
# What everything else stands on: from the conventions to the layers and the operators.
BASE_LINES = 3_050

# Tests that mirror no file, and what they are about.
EXTRA_TESTS = {
    "measurement/test_blocks_of_maps.py": "blocks of feature maps, which layout.py finds",
    "measurement/test_roles.py": "roles of norms in placement.py, whose own tests would be too long",
    "study/experiments/test_recent_claims.py": "the studies of papers from 2023 to 2026",
    "comparison/test_gguf_ports.py": "tests/gguf_ports.py, models as llama.cpp has them, right and with faults",
    "golden/test_record.py": "what each verb reports on fixed inputs",
    "comparison/test_other_runtimes.py": "the recipes in examples/ that record other runtimes",
    "checkpoint/test_forgery.py": "certificates edited to agree with forged files",
    "cli/test_hostile_files.py": "files made to hurt, given to every verb that reads some",
    "bench/test_gpu_script.py": "benchmarks/gpu.py",
    "census/test_atlas.py": "census/atlas.py",
    "census/test_families.py": "census/families.py",
    "census/test_finds.py": "census/finds and docs/wild/reports",
    "census/test_media_families.py": "census/media_families.py",
    "census/test_norm_classes.py": "census/norm_classes.py",
    "census/test_planted_families.py": "census/planted/table.py",
    "census/test_ports_page.py": "census/ports_page.py",
    "census/test_recorded_rows.py": "census/recorded_rows.py",
    "census/test_report_picture.py": "census/report_picture.py",
    "census/test_studies.py": "census/studies.py",
    "census/test_wild.py": "census/wild.py",
    "comparison/test_own_code_ports.py": "ports in code of their own, with norms that no usual one is",
    "comparison/test_norms_compared.py": "two models of torch: their norms, and one run of both",
    "conversion/test_families.py": "families of transformers",
    "identification/test_finds.py": "what was found in other packages, docs/wild/reports",
    "identification/test_third_party.py": "norms of other packages",
    "identification/test_published.py": "norms by their published formula",
    "checkpoint/test_header.py": "headers of safetensors files, whole and damaged",
    "checkpoint/test_workers.py": "the threads of a fold",
    "checkpoint/test_walk.py": "how many files a fold passes",
    "inspection/test_key_selectability.py": "normkit.inspection.first_text: which keys a query could select",
    "inspection/test_walk.py": "normkit.inspection.first_text: one token through a norm",
    "inspection/report/test_page.py": "normkit.inspection.report.description: the page",
    "inspection/test_files_entered.py": "how many files an inspection and its page pass",
    "checkpoint/test_journal.py": "the journal of a fold, whole and torn",
    "checkpoint/test_writing.py": "the weights of a fold: threads, memory, interrupts and full disks",
    "checkpoint/test_families.py": "every family of normkit.models, folded in memory and on disk",
    "models/test_mutations.py": "readers and writers of every family's file, dropped one by one",
    "models/test_joined_rows.py": "rows side by side, exchanged axes and lists that count, as families have them",
    "conversion/test_models.py": "whole models of transformers and PyTorch",
    "docs/test_build_site.py": "docs/building",
    "docs/test_rule_examples.py": "docs/building/rule_examples.toml",
    "testing/test_page.py": "docs/how-to/test-your-norm.md",
    "explorer/test_bad_input.py": "hostile and degenerate points in a browser",
    "identification/test_faults.py": "tests/faulty_norms.py",
    "identification/test_runtime_finds.py": "docs/wild/reports, of MLX, Core ML and runtimes of C++ and Rust",
    "test_helpers.py": "tests/helpers.py",
    "test_tiny_models.py": "tests/tiny_models.py",
    "test_notes.py": "the five notes that the product grew from",
    "test_judges.py": "tests of PyTorch and ONNX",
    "test_readme.py": "the README and the pages of docs/",
    "test_examples.py": "the scripts of examples/",
    "test_repository.py": "the files around the package",
    "test_setup.py": "setup.py",
    "test_transformers.py": "the oldest transformers and the newest",
    "test_structure.py": "this file",
    "test_public_api.py": "what `import normkit` offers",
    **{
        f"claims/test_{name}.py": "docs/explanation/claims.md"
        for name in ("ledger", "definition", "centring", "shape", "gradient", "scores", "batch", "practice", "training")
    },
    "explorer/test_hosts.py": "the page on a disk, in a sandboxed frame and without scripts",
    "explorer/test_layout.py": "the page in every window and scheme",
    "demo/test_shipped_models.py": "the weights that ship",
    **{
        f"kernels/test_{name}.py": "the numbers contract, whatever computes"
        for name in (
            *("forward_numbers", "backward_numbers", "added_numbers", "degenerate_rows", "layouts"),
            *("odd_arguments", "paths", "conventions", "row_groups", "row_ends", "subnormal_numbers"),
        )
    },
    **{
        f"kernels/triton/test_{name}.py": "the numbers contract, by the Triton kernels"
        for name in ("added", "conventions", "degenerate", "layouts", "long_rows")
    },
    "kernels/triton/test_interpreter.py": "tests/triton_kernels.py",
    "kernels/triton/test_compiled.py": "the machine code of the Triton kernels",
    "test_injection.py": "tests/injection.py, and what docs/explanation/faults.md states",
    "watching/test_bad_input.py": "models, optimizers and calls that a watch has not foreseen",
    "watching/test_compile.py": "torch.compile",
    "measurement/test_counting_a_text.py": "normkit.measurement.sampling: what a probe counts of a text",
    "show/test_formula.py": "specs in a few words, normkit.show.parts, and as MathML, normkit.show.html",
    "measurement/test_own_formula.py": "normkit.measurement.sampling: outputs against their own formula",
    "rules/test_media_families.py": "all rules together, on untrained models of images and of sound",
    "cli/test_media.py": "normkit inspect on images and on sound",
    "rules/test_values_of_batch_norms.py": "normkit.rules.values, .parameters and .placement, of batch norms",
    "rules/test_families.py": "all rules together, on untrained models of many families",
}

PYTHON = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TEXT_SUFFIXES = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".css",
    ".js",
    ".html",
    ".json",
    ".jsonl",
    ".sh",
    ".yml",
    ".cpp",
    ".h",
    "",
}
TEXTS = sorted(
    path
    for path in [
        *ROOT.glob("*"),
        *(
            path
            for top in ("src", "tests", "docs", "benchmarks", "examples", ".ci")
            for path in (ROOT / top).rglob("*")
        ),
    ]
    if path.is_file() and path.suffix in TEXT_SUFFIXES and not path.name.startswith(".git")
)


def module_name(path: Path) -> str:
    parts = ["normkit", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PYTHON}


def home(module: str, name: str) -> str:
    """The module that `from module import name` depends on."""
    if f"{module}.{name}" in MODULES:
        return f"{module}.{name}"
    return normkit._HOME[name] if module == "normkit" else module


@functools.cache
def imports(source: str) -> list[tuple[str, str]]:
    """(module of normkit, innermost function around the import or "") for all but imports under TYPE_CHECKING."""
    found = []

    def walk(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, function) for alias in node.names if alias.name.split(".")[0] == "normkit")
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if (node.module or "").split(".")[0] == "normkit":
                found.extend((home(node.module, alias.name), function) for alias in node.names)
        inner = node.name if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
        for child in ast.iter_child_nodes(node):
            walk(child, inner)

    walk(ast.parse(source), "")
    return found


def top(module: str) -> str:
    return module.split(".")[1]


def upward_imports(module: str, source: str) -> list[str]:
    """The imports of a module that point at something not before it."""
    return [
        f"{module} imports {target}" + (f" in {function}" if function else "")
        for target, function in imports(source)
        if top(target) != top(module) and ORDER[top(target)] >= ORDER[top(module)]
    ]


def test_every_module_has_its_row():
    assert {top(module) for module in MODULES if module != "normkit"} <= ORDER.keys()


@pytest.mark.slow
def test_imports_point_one_way():
    wrong = [
        line
        for module, path in MODULES.items()
        if module != "normkit"
        for line in upward_imports(module, path.read_text())
    ]
    assert wrong == []


@pytest.mark.slow
def test_no_modules_import_each_other():
    graph = {
        module: {target for target, _ in imports(path.read_text())}
        for module, path in MODULES.items()
        if module != "normkit"
    }
    # Raises, with the cycle, if there is one.
    TopologicalSorter(graph).prepare()


def test_the_package_itself_imports_nothing_of_its_own():
    assert imports((SOURCE / "__init__.py").read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("normkit.reference", "from normkit.layers import Norm", ["normkit.reference imports normkit.layers"]),
        ("normkit.spec", "from normkit import specs", ["normkit.spec imports normkit.specs"]),
        ("normkit.layers", "from normkit import inspect", ["normkit.layers imports normkit.inspection.inspecting"]),
        ("normkit.files", "import normkit.spec", ["normkit.files imports normkit.spec"]),
        (
            "normkit.inspection.result",
            "class A:\n    def to_json(self):\n        from normkit.explorer import document",
            ["normkit.inspection.result imports normkit.explorer.document in to_json"],
        ),
        ("normkit.spec", "if TYPE_CHECKING:\n    from normkit.layers import Norm", []),
        ("normkit.specs", "from normkit.spec import NormSpec", []),
        ("normkit.inspection.walk", "from normkit.inspection.result import Inspection", []),
    ],
)
def test_the_walk_sees_what_it_should(module, source, expected):
    assert upward_imports(module, source) == expected


def test_the_base_reads_in_an_hour():
    base = ("conventions", "spec", "specs", "reference", "units", "functional", "layers", "ops")
    paths = [path for name, path in MODULES.items() if name != "normkit" and top(name) in base]
    assert sum(len(path.read_text().splitlines()) for path in paths) <= BASE_LINES


@pytest.mark.slow
def test_no_file_is_longer_than_one_can_read():
    # 300 is the goal.
    scripts = sorted(SOURCE.rglob("*.js"))
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in [*PYTHON, *scripts, *TESTS]}
    assert {name: lines for name, lines in lengths.items() if lines > LINES} == {}


def loaded(statement: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after a statement."""
    program = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    return HEAVY & set(json.loads(result.stdout))


@pytest.mark.slow
def test_importing_normkit_loads_nothing_heavy():
    assert (
        loaded("import normkit; dir(normkit); normkit.__version__; normkit.NormSpec; str(normkit.specs.LLAMA)") == set()
    )


@pytest.mark.exhaustive
@pytest.mark.slow
def test_heavy_imports_would_be_seen():
    assert loaded(f"import warnings; warnings.simplefilter('ignore'); import {', '.join(sorted(HEAVY))}") == HEAVY


def test_no_module_bears_the_name_of_a_public_function():
    functions = {name for name in normkit.__all__ if isinstance(getattr(normkit, name), FunctionType)}
    assert functions <= FIXED_FUNCTIONS
    names = {part for module in MODULES for part in module.split(".")}
    assert names & FIXED_FUNCTIONS == set()


def test_no_module_has_a_vague_name():
    assert {part for module in MODULES for part in module.split(".")} & VAGUE_NAMES == set()


def test_every_test_file_mirrors_a_source_file():
    strangers = []
    for path in TESTS:
        if not path.name.startswith("test_"):
            continue
        relative = path.relative_to(ROOT / "tests")
        stem = path.stem.removeprefix("test_")
        mirrored = SOURCE / relative.parent / f"{stem}.py"
        package = SOURCE / relative.parent / "__init__.py" if stem == relative.parent.name else mirrored
        if str(relative) not in EXTRA_TESTS and not any(
            path.exists() for path in (mirrored, mirrored.with_suffix(".js"), package)
        ):
            strangers.append(str(relative))
    assert strangers == []


def test_the_extra_tests_exist():
    assert [name for name in EXTRA_TESTS if not (ROOT / "tests" / name).exists()] == []


# Put together from pieces, so that this file does not hold what it looks for.
MACHINE_PATH = re.compile(
    r"(?<![\w.~$}/-])/(?:" + "|".join(["ho" + "me", "ro" + "ot", "tm" + "p", "wo" + "rk", "Us" + "ers"]) + r")(?:/|\b)"
)
UNFINISHED = re.compile(r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X"]) + r")\b")


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in TEXTS
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


@pytest.mark.slow
def test_no_path_of_one_machine_is_left():
    assert lines_with(MACHINE_PATH) == []


@pytest.mark.slow
def test_nothing_is_left_unfinished():
    assert lines_with(UNFINISHED) == []


@pytest.mark.parametrize("text", ["'/{}/x'", "open(/{}/a)", "see /{}/y", "PATH=/{}/bin"])
@pytest.mark.parametrize("folder", ["ho" + "me", "ro" + "ot", "tm" + "p", "wo" + "rk"])
def test_a_path_of_one_machine_would_be_seen(text, folder):
    assert MACHINE_PATH.search(text.format(folder))


@pytest.mark.parametrize("text", ["https://x.org/{}/y", "src/{}/y", "a/{}", "/usr/{}", "~/{}/z"])
@pytest.mark.parametrize("folder", ["ho" + "me", "wo" + "rk"])
def test_other_paths_are_left_alone(text, folder):
    assert not MACHINE_PATH.search(text.format(folder))


def test_the_text_files_are_all_there():
    names = {str(path.relative_to(ROOT)) for path in TEXTS}
    assert {"Makefile", "pyproject.toml", "src/normkit/spec.py", "tests/test_structure.py", ".ci/run"} <= names
