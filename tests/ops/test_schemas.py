"""The operators keep torch's rules for operators."""

from __future__ import annotations

import pytest
import torch

from fake_kernels import python_kernels
from helpers import PRESETS
from normkit.kernels import cpu, signatures
from normkit.kernels.signatures import SIGNATURES
from normkit.ops import calls, schemas
from normkit.ops.plans import plan

ROWS = [name for name, spec in PRESETS.items() if signatures.supports_spec(spec) is None]


# The compiled library too, where there is one.
@pytest.fixture(autouse=True, params=["python", *(["library"] if cpu.load() is None else [])])
def _kernels(request):
    if request.param == "library":
        yield
    else:
        with python_kernels():
            yield


def forward_arguments(name, dtype, shape):
    spec = PRESETS[name]
    x = torch.randn(shape).to(dtype)
    weight, bias = (torch.randn(shape[-1]).to(dtype) if has else None for has in (spec.has_weight, spec.has_bias))
    found = plan(spec)
    return x, (weight, bias, found.conventions, found.eps, found.offset)


def samples(name, dtype, shape):
    """Each operator with arguments it may be given."""
    x, rest = forward_arguments(name, dtype, shape)
    residual = torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32))
    y, new_residual = torch.empty_like(x), torch.empty_like(residual)
    statistics = schemas.normalize_forward(x, *rest)[1]
    needed = True, rest[0] is not None, rest[1] is not None
    # The tables of a watch of two places.
    sums, bins = torch.zeros(2, 10, dtype=torch.float64), torch.zeros(2, 2, 1024, dtype=torch.float64)
    peaks = torch.full((2, 5), -torch.inf, dtype=torch.float64)
    return {
        "normalize_rows": (x, *rest),
        "normalize_rows_out": (x, *rest, y),
        "normalize_forward": (x, *rest),
        "add_normalize_forward": (x, residual, *rest),
        "add_normalize_rows_out": (x, residual, *rest, y, new_residual),
        "normalize_backward": (x, x, statistics, *rest, x, *needed),
        "count_rows": (x, None, True, True, 0, 8.0, 1e-2, 7.0, 2.0, 1, sums, bins, peaks),
        "mark_seen": (x, 1, torch.zeros(2, 2)),
    }


NAMES = ["TORCH_LAYER_NORM", "GEMMA", "NANOCHAT"]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SHAPES = [(3, 8), (8,), (2, 1, 4)]
# Any two of them meet once; those of one place in each list are quick.
ARGUMENTS = [
    pytest.param(name, dtype, SHAPES[(2 * column - row) % 3], marks=() if row == column else pytest.mark.slow)
    for row, name in enumerate(NAMES)
    for column, dtype in enumerate(DTYPES)
]


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize("operator", SIGNATURES)
@pytest.mark.parametrize(("name", "dtype", "shape"), ARGUMENTS)
def test_torchs_own_checks_of_operators_hold(operator, name, dtype, shape):
    arguments = samples(name, dtype, shape)[operator]
    result = torch.library.opcheck(getattr(torch.ops.normkit, operator).default, arguments)
    assert set(result.values()) == {"SUCCESS"}


def test_a_wrong_fake_would_be_seen():
    library = torch.library.Library("normkit_wrong", "DEF")
    library.define("wrong(Tensor x) -> Tensor")
    library.impl("wrong", lambda x: x[:1].clone(), "CPU")
    torch.library.register_fake("normkit_wrong::wrong", torch.empty_like, lib=library)
    with pytest.raises(Exception, match=r"(?i)fake"):
        torch.library.opcheck(torch.ops.normkit_wrong.wrong.default, (torch.ones(3, 8),), test_utils="test_faketensor")
    library._destroy()


def test_there_is_no_gradient_behind_the_node():
    x = torch.randn(3, 8, requires_grad=True)
    y = calls.normalize(x, plan(PRESETS["NANOCHAT"]), None, None)
    assert type(y.grad_fn).__name__ == "_NormalizeBackward"


@pytest.mark.parametrize("operator", SIGNATURES)
def test_autograd_looks_at_none_of_them(operator):
    # Else torch goes through the arguments of each call, which takes a tenth of a call of one row.
    registered = torch._C._dispatch_dump(f"normkit::{operator}").splitlines()
    assert any(line.startswith("Autograd") and "fallthrough" in line for line in registered)


BAD = {
    "an integer input": ("normalize_rows", lambda a: (a["x"].long(), *a["rest"])),
    "a scalar": ("normalize_rows", lambda a: (a["x"][0, 0], *a["rest"])),
    "a gain of another size": ("normalize_rows", lambda a: (a["x"][:, :5], *a["rest"])),
    "a wide gain": ("normalize_rows", lambda a: (a["x"], a["rest"][0].double(), *a["rest"][1:])),
    "an output of another shape": ("normalize_rows_out", lambda a: (a["x"], *a["rest"], a["x"][:2].clone())),
    "an output without rows": ("normalize_rows_out", lambda a: (a["x"], *a["rest"], torch.empty(8, 3).T)),
    "16 bits to the other 16": ("normalize_rows_out", lambda a: (a["x"].half(), *a["rest"], a["x"].bfloat16())),
    "64 bits to 32": ("normalize_rows_out", lambda a: (a["x"].double(), *a["rest"], a["x"].clone())),
    "a residual of another shape": ("add_normalize_forward", lambda a: (a["x"], a["x"][:2], *a["rest"])),
    "16 bits added to the other 16": (
        "add_normalize_forward",
        lambda a: (a["x"].half(), a["x"].bfloat16(), *a["rest"]),
    ),
    "64 bits added to 32": ("add_normalize_forward", lambda a: (a["x"].double(), a["x"], *a["rest"])),
    "a new residual of another dtype": (
        "add_normalize_rows_out",
        lambda a: (a["x"], a["x"], *a["rest"], a["x"].clone(), a["x"].half()),
    ),
    "other statistics": ("normalize_backward", lambda a: (a["x"], a["x"], a["s"][:2], *a["rest"], None, *a["needs"])),
    "narrow statistics": (
        "normalize_backward",
        lambda a: (a["x"], a["x"], a["s"].float(), *a["rest"], None, *a["needs"]),
    ),
    "dy of another shape": (
        "normalize_backward",
        lambda a: (a["x"][:2], a["x"], a["s"], *a["rest"], None, *a["needs"]),
    ),
    "an addend of another dtype": (
        "normalize_backward",
        lambda a: (a["x"], a["x"], a["s"], *a["rest"], a["x"].half(), *a["needs"]),
    ),
    "a gradient of what is not there": (
        "normalize_backward",
        lambda a: (a["x"], a["x"], a["s"], None, *a["rest"][1:], None, *a["needs"]),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_the_library_refuses_what_does_not_fit(request, case):
    if "library" not in request.node.callspec.id:
        return
    operator, arguments = BAD[case]
    x, rest = forward_arguments("TORCH_LAYER_NORM", torch.float32, (3, 8))
    given = {"x": x, "rest": rest, "s": schemas.normalize_forward(x, *rest)[1], "needs": (True, True, True)}
    with pytest.raises(RuntimeError, match="normkit: expected "):
        getattr(schemas, operator)(*arguments(given))
