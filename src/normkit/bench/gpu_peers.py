"""Who takes part on a GPU: what else fuses norms there, with the arithmetic of torch's, in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from normkit.bench.cases import EPS, Arguments, Case
from normkit.bench.peers import COMPILED, NORMKIT, TORCH, AbsentError, Call, Peer, reason, with_residual


# Once: a package that fails to load takes as long to fail again.
@cache
def _loaded(name: str) -> Any:
    """The module, or why there is none."""
    try:
        return import_module(name)
    except Exception as error:  # whatever a package raises that finds no driver, or not the version it wants
        return reason(error)


def _module(name: str, package: str) -> Any:
    """A module of a package.

    Raises:
        AbsentError: If it cannot be imported.
    """
    found = _loaded(name)
    if not isinstance(found, str):
        return found
    if found.startswith("ModuleNotFoundError"):
        raise AbsentError(f"is not installed: pip install {package} ({found.partition(' ')[2]})")
    raise AbsentError(f"cannot be imported: {found}")


def _liger(case: Case, given: Arguments) -> Call:
    # "gemma" names the arithmetic of torch's own norms. In place, dx would be written over the dy of all the others.
    arithmetic = (EPS, 0.0, "gemma", False)
    x, residual, weight, bias = given.x, given.residual, given.weight, given.bias
    if case.centres:
        layer_norm = _module("liger_kernel.ops.layer_norm", "liger-kernel").LigerLayerNormFunction
        return with_residual(given, lambda x: layer_norm.apply(x, weight, bias, EPS))
    if residual is None:
        rms_norm = _module("liger_kernel.ops.rms_norm", "liger-kernel").LigerRMSNormFunction
        return lambda: (rms_norm.apply(x, weight, *arithmetic),)
    added = _module("liger_kernel.ops.fused_add_rms_norm", "liger-kernel").LigerFusedAddRMSNormFunction
    return lambda: tuple(added.apply(x, residual, weight, *arithmetic))


def _quack(case: Case, given: Arguments) -> Call:
    if case.centres and case.is_differentiated:
        raise AbsentError("its LayerNorm has no gradient that autograd knows")
    quack = _module("quack.rmsnorm", "quack-kernels")
    x, residual, weight, bias = given.x, given.residual, given.weight, given.bias
    if bias is not None:
        # It takes no others.
        wide = weight.float(), bias.float()
        return with_residual(given, lambda x: quack.layernorm_fwd(x, *wide, eps=EPS))
    if residual is None:
        return lambda: (quack.rmsnorm(x, weight, eps=EPS),)
    return lambda: tuple(quack.rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True))


def _flash_attention(case: Case, given: Arguments) -> Call:
    flash = _module("flash_attn.ops.triton.layer_norm", "flash-attn")
    function: Callable[..., Any] = flash.layer_norm_fn if case.centres else flash.rms_norm_fn
    x, residual, weight, bias = given.x, given.residual, given.weight, given.bias
    if residual is None:
        return lambda: (function(x, weight, bias, eps=EPS),)
    return lambda: tuple(function(x, weight, bias, residual=residual, eps=EPS, prenorm=True))


GPU_PEERS = (
    NORMKIT,
    TORCH,
    COMPILED,
    Peer("Liger", _liger),
    Peer("quack", _quack),
    Peer("flash-attn", _flash_attention),
)
PACKAGES = ("triton", "nvidia-cutlass-dsl", "liger-kernel", "quack-kernels", "flash-attn")
"""Whose versions belong to a result; with the second, torch has a kernel of its own for RMSNorm."""
