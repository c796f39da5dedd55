"""Faults of the formula of one norm: statistics, divisor, eps, root, axes, groups. The norm is replaced by a
hand-written one."""

import torch

from . import formulas as f
from .blocks import language, x_decoder
from .cases import Draw, Scene, fault, get, norm_paths, put
from .material import as_if_trained, byte_batch, demo, real, tiny

EPS, DIVISOR, CENTRE, ROWS, FORM = (
    "formula: eps",
    "formula: divisor and root",
    "formula: centring",
    "formula: rows",
    "formula: form",
)


def planted(model: torch.nn.Module, path: str, formula: f.Formula, batch: dict, eps: float | None = None) -> Scene:
    """A model with one norm replaced by a written one."""
    put(model, path, f.instead(get(model, path), formula, eps))
    return Scene(model, batch, [path])


def block_norm(draw: Draw, model: torch.nn.Module, ending: str = "") -> str:
    """A drawn norm of a block."""
    return draw.choice(norm_paths(model, ending)[:-1] or norm_paths(model, ending))


def random_model(draw: Draw, *families: str) -> torch.nn.Module:
    """A tiny model of a drawn family, its gains as if trained."""
    model = tiny(draw, draw.choice(families))
    as_if_trained(model)
    return model


@fault(EPS, r"\beps\b", say="the eps of this norm is not the config's", needs=["smollm2"])
def eps_of_one_norm_too_large(draw: Draw) -> Scene:
    """One RMSNorm of SmolLM2 has its eps a thousand to a hundred thousand times the config's 1e-5 (llama#771: an eps
    lost in a port)."""
    model, batch = real(draw, "smollm2", draw.choice([torch.float32, torch.bfloat16]))
    path = draw.choice(norm_paths(model, "input_layernorm"))
    get(model, path).variance_epsilon = draw.choice([1e-2, 3e-2, 1e-1])
    return Scene(model, batch, [path])


@fault(EPS, r"\beps\b", say="the config's eps is large beside the mean squares that enter", needs=["smollm2"])
def eps_of_config_wrong(draw: Draw) -> Scene:
    """The config itself says eps 0.1: a typing error in a config file. The rows behind the embedding have mean
    squares near 0.01, so they shrink."""
    model, batch = real(draw, "smollm2", torch.float32)
    model.config.rms_norm_eps = 0.1
    paths = norm_paths(model)
    for path in paths:
        get(model, path).variance_epsilon = 0.1
    return Scene(model, batch, paths)


@fault(EPS, r"\beps\b", say="eps is 1e-3, BERT's config says 1e-12")
def eps_of_post_norms(draw: Draw) -> Scene:
    """All output LayerNorms of a BERT have eps 1e-2 and not 1e-12: a class default used where the config's value was
    to be passed (Megatron-Bridge PR 5712)."""
    model = random_model(draw, "Bert")
    paths = norm_paths(model, "output.LayerNorm")
    for path in paths:
        get(model, path).eps = 1e-2
    return Scene(model, byte_batch(draw), paths)


@fault(EPS, "outside", say="eps is added outside the root")
def eps_outside(draw: Draw) -> Scene:
    """Eps is added to the root mean square and not to the mean square (annotated transformer; PyG's layer_norm.py)."""
    model = random_model(draw, "Llama", "Mistral", "Qwen2")
    return planted(model, block_norm(draw, model), f.rms_eps_outside, byte_batch(draw), draw.choice([1e-3, 1e-2]))


@fault(
    EPS, "clamp", "lower bound", "lower limit", r"\bmax\(", say="eps is a lower bound of the divisor and is not added"
)
def eps_clamped(draw: Draw) -> Scene:
    """The divisor is max(rms, eps), as in F.normalize, and not sqrt(mean square + eps)."""
    model = random_model(draw, "Llama", "Mistral", "Phi3")
    return planted(model, block_norm(draw, model), f.rms_eps_clamped, byte_batch(draw))


@fault(EPS, r"\beps\b", say="eps enters twice, inside and outside the root")
def eps_twice(draw: Draw) -> Scene:
    """Eps is added inside and outside the root: 1e-2 each."""
    model = language(draw, norm=lambda n: torch.nn.RMSNorm(n, eps=1e-2))
    as_if_trained(model)
    return planted(model, block_norm(draw, model, "norm1"), f.rms_eps_twice, byte_batch(draw))


@fault(EPS, r"\beps\b", "nan", "0/0", "missing", say="there is no eps: a row of zeros gives NaN")
def eps_missing(draw: Draw) -> Scene:
    """No eps at all: a row of zeros, a padding embedding for example, becomes 0/0."""
    model = demo("rmsnorm")
    return planted(model, draw.choice(norm_paths(model, "input_layernorm")), f.rms_without_eps, byte_batch(draw))


@fault(EPS, r"\beps\b", say="eps follows the dtype of the input: None means machine epsilon")
def eps_none(draw: Draw) -> Scene:
    """torch.nn.RMSNorm(width) with its eps left out takes the machine epsilon (torch #155527); the config says 1e-6."""
    model = random_model(draw, "Qwen2", "Mistral")
    paths = norm_paths(model)
    for path in paths:
        norm = torch.nn.RMSNorm(get(model, path).weight.shape[0])
        norm.weight = get(model, path).weight
        put(model, path, norm)
    return Scene(model, byte_batch(draw), paths)


@fault(
    DIVISOR, "n - 1", "unbiased", "bessel", "divisor", "divided by", "outside", say="the variance is divided by n - 1"
)
def divisor_std(draw: Draw) -> Scene:
    """Tensor.std divides by n - 1, and eps stands outside the root (annotated transformer, line 326)."""
    model = random_model(draw, "GPT2", "GPTNeoX")
    return planted(model, block_norm(draw, model), f.layer_norm_std, byte_batch(draw))


@fault(
    DIVISOR,
    r"n - 1",
    "unbiased",
    "bessel",
    "divisor",
    r"divided by",
    say="the variance is divided by n - 1",
    needs=["mpnet"],
)
def divisor_var(draw: Draw) -> Scene:
    """Tensor.var divides by n - 1: 768 features make 0.065 % of length."""
    model, batch = real(draw, "mpnet")
    return planted(model, block_norm(draw, model), f.layer_norm_var, batch)


@fault(
    DIVISOR,
    "divisor",
    "divided by",
    "length",
    "factor",
    "wrong number",
    r"0\.707",
    say="the sum of squares is divided by n/2",
    needs=["gemma3"],
)
def divisor_half(draw: Draw) -> Scene:
    """The sum of squares is divided by half the width: a norm's outputs are shorter by the root of 2; Gemma 3 with
    its `1 + weight`."""
    model, batch = real(draw, "gemma3", torch.float32)
    return planted(model, draw.choice(norm_paths(model, "input_layernorm")), f.rms_half_divisor, batch)


@fault(
    DIVISOR,
    "sum of squares",
    "divided by",
    "divisor",
    "L2",
    r"sqrt\(n\)",
    say="an L2 norm stands where an RMSNorm is meant: sqrt(n) is missing",
)
def summed_not_mean(draw: Draw) -> Scene:
    """The sum of squares and not their mean divides: outputs are shorter by sqrt(n) (Megatron's L2Norm is an
    RMSNorm, so the name misleads)."""
    model = random_model(draw, "Llama", "Qwen2", "Olmo2")
    return planted(model, block_norm(draw, model), f.rms_summed, byte_batch(draw))


@fault(DIVISOR, "power", "root", r"row's length", say="the root is missing: the mean square divides")
def root_missing(draw: Draw) -> Scene:
    """x / (mean(x^2) + eps): the root was forgotten, so long rows leave short and short rows long."""
    model = demo("rmsnorm")
    return planted(model, draw.choice(norm_paths(model)), f.rms_no_root, byte_batch(draw))


@fault(DIVISOR, "power", "root", r"row's length", say="the fourth root divides, not the second")
def root_twice(draw: Draw) -> Scene:
    """The root is taken twice: sqrt of a standard deviation."""
    model = language(draw, norm=lambda n: torch.nn.RMSNorm(n, eps=1e-6))
    as_if_trained(model)
    return planted(model, block_norm(draw, model, "norm2"), f.rms_fourth_root, byte_batch(draw))


@fault(
    DIVISOR,
    r"sqrt\(n\)",
    "factor",
    "formula",
    "sum of squares",
    "L2",
    say="the multiplier sqrt(n) is missing",
)
def multiplier_lost_x_transformers(draw: Draw) -> Scene:
    """x-transformers' RMSNorm is F.normalize(x) * dim**0.5 * g; here dim**0.5 is lost at one place (its `scale` is
    1)."""
    model = x_decoder(draw, use_rmsnorm=True)
    path = draw.choice(norm_paths(model)[:-1])
    get(model, path).scale = 1.0
    return Scene(model, {"x": byte_batch(draw)["input_ids"]}, [path])


@fault(
    CENTRE,
    "centr",
    r"\bmean is (not )?subtracted",
    "subtract",
    say="the standard deviation divides but the mean stays in",
)
def mean_kept(draw: Draw) -> Scene:
    """x / std(x): the mean is left in the numerator."""
    model = random_model(draw, "GPT2", "OPT")
    return planted(model, block_norm(draw, model), f.std_without_centring, byte_batch(draw))


@fault(CENTRE, "centr", "subtract", say="the mean is subtracted, but the uncentred root mean square divides")
def mean_kept_in_statistics(draw: Draw) -> Scene:
    """(x - mean) / rms(x): the mirror image of Keras' rms_scaling (keras ops/nn.py)."""
    model = random_model(draw, "GPTNeoX", "StableLm")
    return planted(model, block_norm(draw, model), f.centring_over_rms, byte_batch(draw))


@fault(CENTRE, "centr", "subtract", "RMSNorm", "root mean square", say="RMSNorm stands where GPT-2 has LayerNorm")
def rms_for_layer_norm(draw: Draw) -> Scene:
    """An RMSNorm with bias stands where GPT-2 has a LayerNorm, and nothing was centred to make up for it."""
    model = demo("layernorm")
    return planted(model, draw.choice(norm_paths(model)), f.rms_norm, byte_batch(draw))


@fault(CENTRE, "centr", "LayerNorm", "subtract", say="LayerNorm stands where Qwen has RMSNorm", needs=["qwen05"])
def layer_norm_for_rms(draw: Draw) -> Scene:
    """A LayerNorm stands where Qwen 2.5 has an RMSNorm."""
    model, batch = real(draw, "qwen05", torch.float32)
    return planted(model, block_norm(draw, model), f.layer_norm, batch)


@fault(CENTRE, "cancel", r"E\[x", "one pass", say="the variance is computed in one pass and cancels")
def variance_cancels(draw: Draw) -> Scene:
    """E[x^2] - E[x]^2 in float32 (ggml-cuda norm.cu), in a stream whose mean is four thousand times its deviation."""
    model = language(draw, norm=torch.nn.LayerNorm)
    with torch.no_grad():
        model.embedding.weight.add_(2000.0)
    return planted(model, draw.choice(norm_paths(model, "norm1")), f.layer_norm_one_pass, byte_batch(draw))


@fault(ROWS, "axis", "axes", "position", "time", "Rows lie", say="statistics are taken over positions too")
def rows_over_positions(draw: Draw) -> Scene:
    """normalized_shape of (time, features): one mean and variance for a whole text, so early tokens see late ones."""
    model = language(draw, norm=torch.nn.LayerNorm)
    return planted(model, draw.choice(norm_paths(model, "norm1")), f.over_positions_too, byte_batch(draw))


@fault(ROWS, "axis", "axes", "time", "position", say="statistics are taken along time, not along features")
def rows_along_time(draw: Draw) -> Scene:
    """dim=1 for dim=-1 in (batch, time, features)."""
    model = random_model(draw, "Llama", "Gemma")
    return planted(model, block_norm(draw, model), f.along_time, byte_batch(draw))


@fault(ROWS, "batch", "sample", say="the samples of a batch are coupled")
def rows_along_batch(draw: Draw) -> Scene:
    """dim=0: written for (time, batch, features), fed with (batch, time, features)."""
    model = random_model(draw, "Mistral", "Qwen2")
    return planted(model, block_norm(draw, model), f.along_batch, byte_batch(draw, rows=draw.randint(2, 4)))


@fault(ROWS, "time", "position", "earlier", "past", "axis", say="the statistics run over earlier positions")
def rows_over_the_past(draw: Draw) -> Scene:
    """A causal running mean of squares: each position depends on all before it."""
    model = demo("rmsnorm")
    return planted(
        model, draw.choice(norm_paths(model, "post_attention_layernorm")), f.past_positions, byte_batch(draw)
    )


@fault(ROWS, "half", "part of", "formula", "groups?", say="the statistics see half the features")
def statistics_of_half_a_row(draw: Draw) -> Scene:
    """The mean square is that of the first half of the features (partial RMSNorm of the paper, without the intent)."""
    model = demo("rmsnorm")
    return planted(model, draw.choice(norm_paths(model)), f.first_half, byte_batch(draw))


@fault(ROWS, "group", "head", "parts", "half", say="two halves of a row have statistics of their own")
def rows_in_halves(draw: Draw) -> Scene:
    """Tensor parallel without the reduction: each shard of two normalizes by its own mean square (sglang PR 20967)."""
    model = random_model(draw, "Olmo2", "Llama")
    return planted(model, block_norm(draw, model), f.in_halves, byte_batch(draw))


@fault(ROWS, "head", "group", say="the query norm spans one head where OLMo 2 has all heads")
def query_norm_per_head(draw: Draw) -> Scene:
    """OLMo 2 normalizes queries over all heads at once; here each head has its own statistics."""
    model = random_model(draw, "Olmo2")

    def per_head(norm: f.Written, x: torch.Tensor) -> torch.Tensor:
        row = x.float().unflatten(-1, (4, -1))
        return f.affine(norm, (row * torch.rsqrt(f.mean_square(row) + norm.eps)).flatten(-2), x)

    return planted(model, draw.choice(norm_paths(model, "q_norm")), per_head, byte_batch(draw))


@fault(ROWS, "head", "axis", "axes", "group", say="the key norm spans all heads where Qwen 3 has one")
def key_norm_over_heads(draw: Draw) -> Scene:
    """Qwen 3 normalizes each head's key on its own; here the statistics are taken over the heads too."""
    model = random_model(draw, "Qwen3")

    def all_heads(norm: f.Written, x: torch.Tensor) -> torch.Tensor:
        row = x.float()
        return f.affine(norm, row * torch.rsqrt(row.pow(2).mean((-2, -1), keepdim=True) + norm.eps), x)

    return planted(model, draw.choice(norm_paths(model, "k_norm")), all_heads, byte_batch(draw))


@fault(FORM, "formula", "absolute", "L1", "follow", "divisor", "divided", say="the mean of absolute values divides")
def mean_of_absolute_values(draw: Draw) -> Scene:
    """x / mean|x|: about 1.25 times as long as an RMSNorm's rows for Gaussian features."""
    model = random_model(draw, "Llama", "Phi3")
    return planted(model, block_norm(draw, model), f.mean_absolute, byte_batch(draw))


@fault(FORM, "formula", "absolute", "follow", "largest", "divisor", "max", say="the largest absolute value divides")
def largest_value_divides(draw: Draw) -> Scene:
    """x / max|x|, as quantizers scale, in one norm of a trained model."""
    model = demo("rmsnorm")
    return planted(model, draw.choice(norm_paths(model)), f.largest_absolute, byte_batch(draw))


@fault(
    FORM,
    "no norm",
    "not a norm",
    "missing",
    "formula",
    "elementwise",
    "follow",
    say="tanh stands where the architecture has a norm",
)
def tanh_for_norm(draw: Draw) -> Scene:
    """A DyT layer (Zhu et al. 2025) stands at one place of a Llama."""
    model = random_model(draw, "Llama", "Mistral")
    return planted(model, block_norm(draw, model), f.tanh_instead, byte_batch(draw))
