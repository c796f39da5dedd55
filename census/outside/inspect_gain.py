"""Faults of gain and bias: lost, doubled, re-initialised, copied, rounded; most in the first blocks of trained
models."""

import torch

from . import formulas as f
from .cases import Draw, Scene, fault, get, norm_paths, put
from .inspect_formula import block_norm, planted, random_model
from .material import byte_batch, demo, real, tiny

GAIN, OFFSET, LOAD, BIAS, HIDDEN = (
    "gain: values",
    "gain: offset",
    "gain: loading",
    "bias",
    "values that no tool can know",
)
VALUES = r"(gain|weight|value|parameter)s?\b.*(source|reference|compare|another checkpoint|are not checked)"


def weight(model: torch.nn.Module, path: str) -> torch.Tensor:
    """The stored gain at a path."""
    return get(model, path).weight.data


@fault(GAIN, "gain", "weight", say="the norm has a gain that it does not use", needs=["smollm2"])
def gain_not_applied(draw: Draw) -> Scene:
    """The gain is stored but the code leaves it out, in one norm of SmolLM2."""
    model, batch = real(draw, "smollm2", torch.float32)
    return planted(model, block_norm(draw, model), f.without_gain, batch)


@fault(GAIN, "gain", "weight", say="the gain multiplies twice")
def gain_applied_twice(draw: Draw) -> Scene:
    """weight is multiplied in the kernel and once more by the caller."""
    model = demo("rmsnorm")
    return planted(model, draw.choice(norm_paths(model)), f.gain_twice, byte_batch(draw))


@fault(GAIN, "gain", "before", say="the gain multiplies before the statistics")
def gain_before_statistics(draw: Draw) -> Scene:
    """norm(x * weight) for norm(x) * weight."""
    model = random_model(draw, "Llama", "Qwen2")
    return planted(model, block_norm(draw, model), f.gain_first, byte_batch(draw))


@fault(GAIN, "collapsed", "zero", "vanish", "gains? .*0", say="the gains of this norm are all zero", needs=["smollm2"])
def gain_all_zero(draw: Draw) -> Scene:
    """One gain of SmolLM2 is all zero: allocated with torch.empty or zeros and never filled."""
    model, batch = real(draw, "smollm2")
    path = draw.choice(norm_paths(model, "post_attention_layernorm"))
    weight(model, path).zero_()
    return Scene(model, batch, [path])


@fault(GAIN, "collapsed", "zero", "vanish", say="a third of the gains are zero", needs=["qwen05"])
def gain_partly_zero(draw: Draw) -> Scene:
    """A third of a gain is zero: a shard that was not gathered."""
    model, batch = real(draw, "qwen05")
    path = block_norm(draw, model)
    count = weight(model, path).numel() // 3
    start = draw.choice([0, count, 2 * count])
    weight(model, path)[start : start + count] = 0
    return Scene(model, batch, [path])


@fault(GAIN, "blown", "largest", "outlier", "huge", "large", say="one entry of this gain is huge", needs=["smollm2"])
def gain_one_huge_entry(draw: Draw) -> Scene:
    """One entry of a gain is multiplied by 2^10 or 2^14: a flipped bit in the exponent of a bfloat16."""
    model, batch = real(draw, "smollm2")
    path = block_norm(draw, model)
    weight(model, path)[draw.randrange(weight(model, path).numel())] *= draw.choice([2.0**10, 2.0**14])
    return Scene(model, batch, [path])


@fault(GAIN, "nan", "non-?finite", r"\binf", say="one gain holds a NaN or an infinity", needs=["gemma3"])
def gain_overflows_float16(draw: Draw) -> Scene:
    """Conversion to float16: one gain entry beyond 65504 became infinite; the model then runs in bfloat16."""
    model, batch = real(draw, "gemma3")
    path = draw.choice(norm_paths(model, "post_feedforward_layernorm"))
    weight(model, path)[draw.randrange(weight(model, path).numel())] = float("inf")
    return Scene(model, batch, [path])


@fault(
    GAIN,
    "sign",
    "negative",
    say="all gains of this norm are negative, those of all others are positive",
    needs=["smollm2"],
)
def gain_sign_flipped(draw: Draw) -> Scene:
    """The sign of one norm's gains is flipped (the other norms have next to none that is negative)."""
    model, batch = real(draw, "smollm2")
    path = draw.choice(norm_paths(model, "input_layernorm")[1:])
    weight(model, path).neg_()
    return Scene(model, batch, [path])


@fault(
    GAIN,
    "same",
    "identical",
    "equal",
    "cop(y|ied)",
    "duplicate",
    say="two norms have the same trained gains",
    needs=["qwen05"],
)
def gain_of_another_layer(draw: Draw) -> Scene:
    """A loader's loop counts wrong: one norm holds a copy of another layer's trained gain, bit for bit."""
    model, batch = real(draw, "qwen05")
    source, target = draw.sample(norm_paths(model, "input_layernorm"), 2)
    weight(model, target).copy_(weight(model, source))
    return Scene(model, batch, [source, target])


@fault(
    GAIN,
    "distinct",
    "quantiz",
    "levels",
    r"only \d+ values",
    say="the gain takes 4 values: it was quantized",
    needs=["smollm2"],
)
def gain_quantized_coarsely(draw: Draw) -> Scene:
    """A quantizer did not leave out the norms: gains take 4 values (2 bits, one scale for the tensor)."""
    model, batch = real(draw, "smollm2", torch.float32)
    path = block_norm(draw, model)
    gain = weight(model, path)
    low, high = float(gain.min()), float(gain.max())
    gain.copy_(((gain - low) / (high - low) * 3).round() / 3 * (high - low) + low)
    return Scene(model, batch, [path])


@fault(OFFSET, r"1 \+ weight", r"\b1 of\b", "offset", say="the 1 of 1 + weight is missing", needs=["gemma3"])
def offset_lost(draw: Draw) -> Scene:
    """Gemma's stored gains are used as they are: Llama's forward was patched in (Liger-Kernel #74)."""
    model, batch = real(draw, "gemma3", draw.choice([torch.float32, torch.bfloat16]))
    paths = norm_paths(model)
    for path in paths:
        norm = f.instead(get(model, path), f.rms_norm)
        norm.offset = 0.0
        put(model, path, norm)
    return Scene(model, batch, paths)


@fault(
    OFFSET, r"1 \+ weight", r"\b1 of\b", "offset", "twice", say="the 1 is added twice: in the code", needs=["gemma3"]
)
def offset_doubled_in_code(draw: Draw) -> Scene:
    """One norm of Gemma 3 adds 2 (candle #3492: weight + 1 where the stored gain has it already)."""
    model, batch = real(draw, "gemma3", torch.float32)
    return planted(model, draw.choice(norm_paths(model, "pre_feedforward_layernorm")), f.plus_two, batch)


@fault(
    OFFSET,
    r"1 \+ weight",
    r"\b1 of\b",
    "offset",
    "twice",
    "shift",
    say="gains lie one above what such models have: converted twice",
    needs=["gemma3"],
    seeable=False,
    unchecked=VALUES,
)
def offset_doubled_in_file(draw: Draw) -> Scene:
    """All stored gains are one too large: a conversion added the 1 that the class adds (mlx-vlm PR 2114: 8 of 11
    published conversions). Values alone can only make it likely."""
    model, batch = real(draw, "gemma3")
    paths = norm_paths(model)
    for path in paths:
        weight(model, path).add_(1.0)
    return Scene(model, batch, paths)


@fault(
    OFFSET, r"1 \+ weight", r"\b1 of\b", "offset", say="a plain gain gets a 1 that it must not have", needs=["smollm2"]
)
def offset_where_none_belongs(draw: Draw) -> Scene:
    """Gemma's forward on a Llama: 1 + weight where the class multiplies by weight."""
    model, batch = real(draw, "smollm2", torch.float32)
    return planted(model, block_norm(draw, model), f.plus_one, batch)


@fault(OFFSET, "16 bits", "bfloat16", "weight's dtype", "offset", say="the 1 is added in bfloat16", needs=["gemma3"])
def offset_added_in_bfloat16(draw: Draw) -> Scene:
    """1 + weight is computed in bfloat16 (mlx-lm gemma.py, candle gemma.rs, litgpt): gains lose what is below 2^-8."""
    model, batch = real(draw, "gemma3", torch.bfloat16)
    paths = norm_paths(model)
    for path in paths:
        put(model, path, f.instead(get(model, path), f.plus_one_in_weights_dtype))
    return Scene(model, batch, paths)


@fault(
    LOAD,
    "never loaded",
    "not loaded",
    "initial",
    r"\ball (are )?1\b",
    say="this trained model has one norm whose gains are still 1",
    needs=["smollm2"],
)
def gain_of_one_norm_not_loaded(draw: Draw) -> Scene:
    """One tensor of the checkpoint did not match by name: its gain is 1 everywhere, as the class begins, in a
    trained model."""
    model, batch = real(draw, "smollm2")
    path = block_norm(draw, model)
    weight(model, path).fill_(1.0)
    return Scene(model, batch, [path])


@fault(
    LOAD,
    "never loaded",
    "not loaded",
    "initial",
    say="all query and key norms are at their start: a merge dropped them",
    needs=["gemma3"],
)
def query_key_gains_dropped(draw: Draw) -> Scene:
    """A merge lost q_norm and k_norm (mergekit PR 699), so both are at their start (0 in Gemma) in a trained model."""
    model, batch = real(draw, "gemma3")
    paths = norm_paths(model, "q_norm") + norm_paths(model, "k_norm")
    for path in paths:
        weight(model, path).zero_()
    return Scene(model, batch, paths)


@fault(LOAD, "never loaded", "not loaded", "initial", say="no norm was loaded: gamma and beta were not renamed")
def gamma_and_beta_not_renamed(draw: Draw) -> Scene:
    """A checkpoint with gamma and beta is loaded with strict=False into a model with weight and bias (transformers
    PR 35615)."""
    trained, fresh = demo("layernorm"), None
    state = {}
    paths = set(norm_paths(trained))
    for name, tensor in trained.state_dict().items():
        path, _, leaf = name.rpartition(".")
        state[f"{path}.{'gamma' if leaf == 'weight' else 'beta'}" if path in paths else name] = tensor
    fresh = type(trained)(trained.config).eval()
    fresh.load_state_dict(state, strict=False)
    return Scene(fresh, byte_batch(draw), norm_paths(fresh))


@fault(LOAD, "never loaded", "not loaded", "initial", say="the final norm was not loaded", needs=["mpnet"])
def embedding_norm_not_loaded(draw: Draw) -> Scene:
    """The LayerNorm behind the embeddings of all-mpnet-base-v2 is at gain 1 and bias 0: its key had another prefix."""
    model, batch = real(draw, "mpnet")
    path = norm_paths(model)[0]
    weight(model, path).fill_(1.0)
    get(model, path).bias.data.zero_()
    return Scene(model, batch, [path])


@fault(
    HIDDEN,
    "order",
    "permut",
    say="gain values are not checked against a source",
    needs=["smollm2"],
    seeable=False,
    unchecked=VALUES,
)
def gain_permuted(draw: Draw) -> Scene:
    """The entries of one trained gain are in another order: same values, another place."""
    model, batch = real(draw, "smollm2")
    path = block_norm(draw, model)
    gain = weight(model, path)
    gain.copy_(gain[torch.randperm(gain.numel())])
    return Scene(model, batch, [path])


@fault(
    HIDDEN,
    "exchange",
    "swap",
    say="gain values are not checked against a source",
    needs=["gemma3"],
    seeable=False,
    unchecked=VALUES,
)
def query_and_key_gains_exchanged(draw: Draw) -> Scene:
    """q_norm and k_norm of one layer hold each other's gains."""
    model, batch = real(draw, "gemma3")
    query = draw.choice(norm_paths(model, "q_norm"))
    key = query.replace("q_norm", "k_norm")
    first, second = weight(model, query).clone(), weight(model, key).clone()
    weight(model, query).copy_(second)
    weight(model, key).copy_(first)
    return Scene(model, batch, [query, key])


@fault(
    HIDDEN,
    "exchange",
    "swap",
    say="gain values are not checked against a source",
    needs=["qwen05"],
    seeable=False,
    unchecked=VALUES,
)
def two_gains_of_a_block_exchanged(draw: Draw) -> Scene:
    """A renaming table exchanges the two norms of one block."""
    model, batch = real(draw, "qwen05")
    one = draw.choice(norm_paths(model, "input_layernorm"))
    other = one.replace("input_layernorm", "post_attention_layernorm")
    first, second = weight(model, one).clone(), weight(model, other).clone()
    weight(model, one).copy_(second)
    weight(model, other).copy_(first)
    return Scene(model, batch, [one, other])


@fault(
    HIDDEN,
    r"1\.3",
    "merge",
    say="gain values are not checked against a source",
    needs=["smollm2"],
    seeable=False,
    unchecked=VALUES,
)
def gain_scaled_by_a_merge(draw: Draw) -> Scene:
    """A merge with weights 0.6 and 0.7 multiplied one gain by 1.3."""
    model, batch = real(draw, "smollm2")
    path = block_norm(draw, model)
    weight(model, path).mul_(1.3)
    return Scene(model, batch, [path])


@fault(BIAS, r"\bbias", say="the norm has a bias that it does not add")
def bias_not_added(draw: Draw) -> Scene:
    """The bias is stored and not added: a kernel without bias in GPT-2."""
    model = demo("layernorm")
    return planted(model, draw.choice(norm_paths(model)), f.layer_norm_without_bias, byte_batch(draw))


@fault(BIAS, r"\bbias", "twice", say="the bias is added twice")
def bias_added_twice(draw: Draw) -> Scene:
    """The kernel adds the bias and so does the caller."""
    model = random_model(draw, "OPT", "GPTNeoX")
    return planted(model, block_norm(draw, model), f.layer_norm_bias_twice, byte_batch(draw))


@fault(BIAS, r"\bbias", "affine", "before", say="the bias is added before the gain")
def bias_before_gain(draw: Draw) -> Scene:
    """(row + bias) * weight for row * weight + bias."""
    model = random_model(draw, "GPT2", "StableLm")
    return planted(model, block_norm(draw, model), f.bias_before_gain, byte_batch(draw))


@fault(BIAS, r"\bbias", "missing", say="GPT-2's norms have a bias, this one has none")
def bias_parameter_missing(draw: Draw) -> Scene:
    """The norm was built with bias=False where the architecture has one."""
    model = tiny(draw, "GPT2")
    path = block_norm(draw, model)
    old = get(model, path)
    new = torch.nn.LayerNorm(old.weight.shape[0], eps=old.eps, bias=False)
    new.weight = old.weight
    put(model, path, new)
    return Scene(model, byte_batch(draw), [path])


@fault(BIAS, r"\bbias", "blown", "large", "huge", say="one entry of this bias is huge", needs=["mpnet"])
def bias_one_huge_entry(draw: Draw) -> Scene:
    """One entry of a bias is 1e4: a flipped bit."""
    model, batch = real(draw, "mpnet")
    path = block_norm(draw, model)
    get(model, path).bias.data[draw.randrange(768)] = 1e4
    return Scene(model, batch, [path])
