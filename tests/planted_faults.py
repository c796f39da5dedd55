"""Faults planted in a loaded model, in memory: what a slip in a port does, for a report to find.

Both are mistakes that a model survives: it still runs and still predicts, only worse.
"""

from __future__ import annotations

from torch import nn

from normkit.errors import ModelError

# Where the families keep the norm before the output embedding.
_FINAL_NORMS = ("transformer.ln_f", "model.norm")


def wrong_eps(model: nn.Module, eps: float = 1e-2) -> nn.Module:
    """Give every norm of a model another eps, as a port does that overlooks the configuration's.

    Args:
        model: Changed in place.
        eps: In units of x squared.

    Returns:
        The same model.

    Raises:
        ModelError: If no module has an eps.
    """
    found = False
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, eps)
                found = True
    if not found:
        raise ModelError(f"expected norms with an eps, found none in {type(model).__name__}; give a model with norms")
    return model


def without_final_norm(model: nn.Module) -> nn.Module:
    """Replace the norm before the output embedding by the identity, as a port does that forgets it.

    Args:
        model: A GPT-2 or Llama of `transformers`, changed in place.

    Returns:
        The same model.

    Raises:
        ModelError: If there is no such norm, or it is gone already.
    """
    modules = dict(model.named_modules())
    for name in _FINAL_NORMS:
        if name in modules and not isinstance(modules[name], nn.Identity):
            model.set_submodule(name, nn.Identity())
            return model
    raise ModelError(
        f"expected a final norm named {' or '.join(_FINAL_NORMS)}, found none in {type(model).__name__}; "
        "give a freshly loaded GPT-2 or Llama"
    )
