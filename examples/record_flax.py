"""Record the norms of flax models, linen and nnx; `normkit record --template` writes normkit_recorder.py beside this.

    python record_flax.py

Call the model outside `jax.jit`: inside, a norm is given tracers, which hold no numbers.
"""

from contextlib import contextmanager
from unittest.mock import patch

import flax
import jax
import jax.numpy as jnp
from flax import linen, nnx
from normkit_recorder import Recorder


@contextmanager
def linen_norms(recorder):
    """Record every norm of linen modules that are called inside the block."""

    def keep(call, args, kwargs, context):
        y, norm = call(*args, **kwargs), context.module
        if isinstance(norm, linen.LayerNorm | linen.RMSNorm) and context.method_name == "__call__":
            own = norm.variables.get("params", {})
            recorder.add(".".join(norm.path), args[0], y, own.get("scale"), own.get("bias"))
        return y

    with linen.intercept_methods(keep):
        yield


@contextmanager
def nnx_norms(recorder, model, kind):
    """Record every norm of one class, such as nnx.RMSNorm, that a model calls inside the block."""
    call = kind.__call__
    norms = {id(node): ".".join(map(str, path)) for path, node in nnx.iter_graph(model) if isinstance(node, kind)}

    def keep(norm, x, *rest, **named):
        y = call(norm, x, *rest, **named)
        scale, bias = (getattr(norm, name, None) for name in ("scale", "bias"))
        recorder.add(norms[id(norm)], x, y, scale and scale[...], bias and bias[...])
        return y

    with patch.object(kind, "__call__", keep):
        yield


if __name__ == "__main__":
    keys = iter(jax.random.split(jax.random.key(0), 3))
    # Long and short rows, with a mean: they show eps and the centring.
    x = (0.3 + jax.random.normal(next(keys), (512, 64))) * jnp.logspace(-5, 1, 512)[:, None]
    scale, bias = (jax.random.uniform(next(keys), (64,), minval=low) for low in (0.5, -0.5))
    recorder, model = Recorder(), nnx.Dict(nnx_norm=nnx.RMSNorm(64, rngs=nnx.Rngs(0)))
    model.nnx_norm.scale[...] = scale
    with linen_norms(recorder), nnx_norms(recorder, model, nnx.RMSNorm):
        linen.Sequential([linen.LayerNorm()]).apply({"params": {"layers_0": {"scale": scale, "bias": bias}}}, x)
        model.nnx_norm(x)
    recorder.save("flax.safetensors", runtime=f"flax {flax.__version__}")
