"""Faults of place: a norm missing, twice, shared, unused, elsewhere, bypassed; norms that are functions."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from .blocks import Block, function_language, language, torch_encoder, x_decoder
from .cases import Draw, Scene, fault, get, norm_paths, put
from .inspect_formula import block_norm, random_model
from .material import as_if_trained, byte_batch, demo, real

PLACE, FUNCTION = "place", "norms that are functions"
NO_MODULE = r"function|no norm|no module|not modules|unrecogni[sz]ed|none of (its|the) blocks"


@fault(
    PLACE,
    "norm[^.;]*missing",
    "missing norm",
    "lacks",
    "no norm",
    "absent",
    "has no",
    "identity",
    say="this block lacks the norm before its attention",
    needs=["smollm2"],
)
def norm_missing(draw: Draw) -> Scene:
    """One norm of SmolLM2 is nn.Identity."""
    model, batch = real(draw, "smollm2")
    path = block_norm(draw, model)
    put(model, path, nn.Identity())
    return Scene(model, batch, [path, path.rpartition(".")[0]])


@fault(
    PLACE,
    "norm[^.;]*missing",
    "missing norm",
    "lacks",
    "no norm",
    "absent",
    "has no",
    "identity",
    say="the architecture's query norms are missing in one layer",
)
def query_norm_missing(draw: Draw) -> Scene:
    """Qwen 3's q_norm is left out in one layer: copied from Qwen 2."""
    model = random_model(draw, "Qwen3")
    path = draw.choice(norm_paths(model, "q_norm"))
    put(model, path, nn.Identity())
    return Scene(model, byte_batch(draw), [path, path.rpartition(".")[0].rpartition(".")[0]])


@fault(PLACE, "final norm", "no norm behind", "lacks", say="there is no final norm behind a pre-norm stack")
def final_norm_missing(draw: Draw) -> Scene:
    """torch.nn.TransformerEncoder with norm_first=True and no norm=: the sum of all blocks leaves without a norm."""
    model = torch_encoder(draw, norm_first=True, final=False, depth=draw.randint(3, 5))
    return Scene(model, {"src": torch.randn(2, 24, model.layers[0].norm1.normalized_shape[0])})


@fault(
    PLACE,
    "norm[^.;]*missing",
    "missing norm",
    "lacks",
    "no norm",
    "absent",
    "has no",
    "identity",
    "final norm",
    say="the final norm of the architecture is missing",
)
def final_norm_missing_in_llama(draw: Draw) -> Scene:
    """The trained Llama's final norm is nn.Identity: a draft head taken before the norm (vllm PR 14464)."""
    model = demo("rmsnorm")
    put(model, "model.norm", nn.Identity())
    return Scene(model, byte_batch(draw), ["model.norm", "lm_head"])


@fault(PLACE, "twice", "doubled", "follows a norm", "two norms", say="a norm follows a norm")
def norm_applied_twice(draw: Draw) -> Scene:
    """The caller normalizes, and so does the layer: two norms in a row at one place."""
    model = random_model(draw, "Llama", "GPT2")
    path = block_norm(draw, model)
    put(model, path, nn.Sequential(get(model, path), copy.deepcopy(get(model, path))))
    return Scene(model, byte_batch(draw), [path])


@fault(PLACE, "shared?", "several places", "same norm", "serves", say="one norm module serves two places")
def norm_shared(draw: Draw) -> Scene:
    """[Block(norm)] * depth style: two blocks hold the same norm module, though their config has one each."""
    model = random_model(draw, "Mistral", "OPT")
    ending = "input_layernorm" if norm_paths(model, "input_layernorm") else "self_attn_layer_norm"
    one, other = draw.sample(norm_paths(model, ending), 2)
    put(model, other, get(model, one))
    return Scene(model, byte_batch(draw), [one, other])


@fault(PLACE, "after the norm", "residual", say="the residual is taken after the norm")
def residual_after_norm(draw: Draw) -> Scene:
    """x = norm(x); x = x + f(x) in one block of a pre-norm model."""
    model = language(draw, depth=draw.randint(3, 5))
    as_if_trained(model)
    number = draw.randrange(len(model.blocks))
    model.blocks[number].order = "wrong"
    return Scene(model, byte_batch(draw), [f"blocks.{number}"])


@fault(
    PLACE,
    "unused",
    "not used",
    "no effect",
    "ignored",
    "without a norm",
    "not normalized",
    "nobody reads",
    "norm[^.;]*missing",
    "missing norm",
    "lacks",
    "no norm",
    say="a norm runs and nobody reads what it gives",
)
def norm_output_unused(draw: Draw) -> Scene:
    """norm(x) is called and its result dropped, so the branch reads the raw stream."""
    model = language(draw, depth=draw.randint(3, 5))
    as_if_trained(model)
    number = draw.randrange(len(model.blocks))
    model.blocks[number].order = "unused"
    return Scene(model, byte_batch(draw), [f"blocks.{number}"])


@fault(
    PLACE,
    r"\bpost-norm",
    "post norm",
    "elsewhere",
    "declared",
    "unlike",
    "other blocks",
    "placement",
    say="one block is post-norm, the others pre-norm",
)
def one_block_post_norm(draw: Draw) -> Scene:
    """One block of a pre-norm model normalizes the sum and not the branch."""
    model = language(draw, depth=draw.randint(3, 5))
    as_if_trained(model)
    number = draw.randrange(1, len(model.blocks))
    model.blocks[number].order = "post"
    return Scene(model, byte_batch(draw), [f"blocks.{number}"])


@fault(
    PLACE,
    r"\bpost-norm",
    "post norm",
    "elsewhere",
    "declared",
    "meant",
    "placement",
    say="the blocks are post-norm, the intent file says pre-norm",
)
def placement_against_intent(draw: Draw) -> Scene:
    """An intent file was written from the sound pre-norm model; the port is post-norm throughout."""
    sound = language(draw, depth=3)
    model = copy.deepcopy(sound)
    for block in model.blocks:
        block.order = "post"
    return Scene(model, byte_batch(draw), ["blocks"], sound=sound)


@fault(
    PLACE,
    "norm[^.;]*missing",
    "missing norm",
    "lacks",
    "no norm",
    "absent",
    "has no",
    "identity",
    say="a norm of the intent file is missing",
)
def norm_missing_against_intent(draw: Draw) -> Scene:
    """An intent file was written from a model with query and key norms; in one block the port has no key norm."""
    sound = language(draw, qk=True, depth=3)
    model = copy.deepcopy(sound)
    number = draw.randrange(3)
    model.blocks[number].attention.key_norm = nn.Identity()
    return Scene(model, byte_batch(draw), [f"blocks.{number}"], sound=sound)


@fault(PLACE, r"\beps\b", say="eps is another than the intent file's")
def eps_against_intent(draw: Draw) -> Scene:
    """An intent file was written from the sound model; in the port the query norms have eps 1e-2 and not 1e-6."""
    sound = language(draw, norm=lambda n: nn.RMSNorm(n, eps=1e-6), qk=True, depth=3)
    model = copy.deepcopy(sound)
    paths = norm_paths(model, "query_norm")
    for path in paths:
        get(model, path).eps = 1e-2
    return Scene(model, byte_batch(draw), paths, sound=sound)


@fault(
    PLACE,
    "norm[^.;]*missing",
    "missing norm",
    "lacks",
    "no norm",
    "absent",
    "has no",
    "identity",
    "skipped",
    "bypass",
    "unlike",
    "elsewhere",
    say="in this block the attention reads the raw stream",
)
def norm_bypassed_by_a_patch(draw: Draw) -> Scene:
    """`norm.forward = lambda x: x` was set on one norm of Gemma 3 for an experiment and stayed."""
    model = random_model(draw, "Gemma2", "Cohere")
    path = block_norm(draw, model, "input_layernorm")
    get(model, path).forward = lambda hidden_states: hidden_states
    return Scene(model, byte_batch(draw), [path, path.rpartition(".")[0]])


@fault(PLACE, "several places", "shared?", "serves", "same norm", say="all norms of the decoder are one module")
def norm_shared_x_transformers(draw: Draw) -> Scene:
    """In an x-transformers decoder the feed-forward norm of one layer is the attention norm of another."""
    model = x_decoder(draw, use_rmsnorm=True)
    one, other = draw.sample(norm_paths(model)[:-1], 2)
    put(model, other, get(model, one))
    return Scene(model, {"x": byte_batch(draw)["input_ids"]}, [one, other])


@fault(
    FUNCTION,
    "not checked",
    "no norm",
    "function",
    r"\beps\b",
    say="no module is a norm here: nothing of them is checked",
    seeable=False,
    unchecked=NO_MODULE,
)
def function_with_wrong_eps(draw: Draw) -> Scene:
    """Norms are F.rms_norm calls with eps 1.0 in the code; there is no module to look at."""
    model = function_language(draw, lambda x: F.rms_norm(x, (x.shape[-1],), eps=1.0))
    return Scene(model, byte_batch(draw), ["blocks"])


@fault(
    FUNCTION,
    "not checked",
    "no norm",
    "function",
    "time",
    "position",
    "future",
    say="no module is a norm here: nothing of them is checked",
    seeable=False,
    unchecked=NO_MODULE,
)
def function_over_positions(draw: Draw) -> Scene:
    """The hand-written function takes its mean square over positions and features, so early tokens see late ones."""
    model = function_language(draw, lambda x: x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + 1e-6))
    return Scene(model, byte_batch(draw), ["blocks"])


@fault(
    FUNCTION,
    "power",
    "root",
    "not checked",
    "no norm",
    "function",
    say="some norms are functions, which are not checked",
    seeable=False,
    unchecked=NO_MODULE,
)
def function_beside_modules(draw: Draw) -> Scene:
    """One block's norms are functions that forget the root; all other norms are modules."""
    model = language(draw, depth=4)
    number = draw.randrange(4)

    class Functional(Block):
        def branch(self, x: torch.Tensor, norm: nn.Module, _after: nn.Module, layer: nn.Module) -> torch.Tensor:
            return x + layer(x / (x.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight)

    model.blocks[number].__class__ = Functional
    return Scene(model, byte_batch(draw), [f"blocks.{number}"])
