"""Faults of patches and wrappers around norms, of the stream and attention, and faults that are no norm's."""

import torch
from torch import nn

from . import formulas as f
from .blocks import language, torch_encoder, vision
from .cases import Draw, Scene, fault, get, norm_paths, put
from .inspect_formula import block_norm, planted, random_model
from .material import as_if_trained, byte_batch, demo, real, tiny

WRAPPER, STREAM, OTHER = "patches and wrappers", "stream and attention", "not a norm's, must not be blamed on one"


@fault(
    WRAPPER,
    "hook",
    "formula",
    r"1\.5",
    say="what leaves this norm is not what it computes: a hook scales it",
)
def hook_scales_output(draw: Draw) -> Scene:
    """A forward hook from a steering experiment multiplies one norm's output by 1.5."""
    model = random_model(draw, "Llama", "Qwen2")
    path = block_norm(draw, model)
    get(model, path).register_forward_hook(lambda _module, _args, output: output * 1.5)
    return Scene(model, byte_batch(draw), [path])


@fault(WRAPPER, "hook", "formula", "clamp", "clip", say="a pre-hook changes what enters this norm")
def hook_clips_input(draw: Draw) -> Scene:
    """A forward pre-hook clamps what enters one norm to [-1, 1]: a plaster against overflow (onnxruntime #26732)."""
    model = demo("rmsnorm")
    path = draw.choice(norm_paths(model, "post_attention_layernorm"))
    get(model, path).register_forward_pre_hook(lambda _module, args: (args[0].clamp(-1, 1),))
    return Scene(model, byte_batch(draw), [path])


@fault(
    WRAPPER,
    r"1 \+ weight",
    r"\b1 of\b",
    "offset",
    say="the class's forward is Llama's: the 1 is missing",
    needs=["gemma3"],
)
def class_patched(draw: Draw) -> Scene:
    """A kernel library replaced Gemma3RMSNorm.forward for all instances by one that multiplies by weight."""
    model, batch = real(draw, "gemma3", torch.bfloat16)
    kind = type(get(model, norm_paths(model)[0]))

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        row = x.float()
        return (row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)

    kind.forward = forward
    return Scene(model, batch, norm_paths(model))


@fault(
    WRAPPER,
    "state",
    "repeat",
    "calls",
    "differ",
    "formula",
    "running",
    say="the norm remembers: its scale is that of an earlier call",
)
def scale_cached(draw: Draw) -> Scene:
    """The scale of the first call is kept and used ever after: a cache for decoding that is never cleared."""
    model = language(draw, norm=lambda n: nn.RMSNorm(n, eps=1e-6))
    cache: dict[tuple[int, ...], torch.Tensor] = {}

    def cached(norm: f.Written, x: torch.Tensor) -> torch.Tensor:
        row = x.float()
        scale = cache.setdefault(tuple(x.shape), torch.rsqrt(f.mean_square(row) + norm.eps))
        return f.affine(norm, row * scale, x)

    return planted(model, draw.choice(norm_paths(model, "norm1")), cached, byte_batch(draw))


@fault(WRAPPER, "batch", "running", "statistics", say="the batch norm's running statistics were never updated")
def batch_norm_never_ran(draw: Draw) -> Scene:
    """BatchNorm in an encoder that goes to evaluation with mean 0 and variance 1, beside trained gains."""
    model = torch_encoder(draw, norm_first=True)
    width = model.layers[0].norm1.normalized_shape[0]

    class BatchNormOfTokens(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.transpose(1, 2)).transpose(1, 2)

    paths = [path for path in norm_paths(model) if path.endswith("norm2")]
    for path in paths:
        put(model, path, BatchNormOfTokens(width).eval())
    as_if_trained(model)
    return Scene(model, {"src": torch.randn(2, 24, width)}, paths)


@fault(WRAPPER, "batch", "sample", "coupled", say="the norm uses the batch's statistics in evaluation")
def batch_norm_without_running_statistics(draw: Draw) -> Scene:
    """BatchNorm with track_running_stats=False: in evaluation too, a sample's output depends on its neighbours."""
    model = torch_encoder(draw, norm_first=False)
    width = model.layers[0].norm1.normalized_shape[0]

    class BatchNormOfTokens(nn.BatchNorm1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.transpose(1, 2)).transpose(1, 2)

    path = draw.choice(norm_paths(model, "norm1"))
    put(model, path, BatchNormOfTokens(width, track_running_stats=False).eval())
    return Scene(model, {"src": torch.randn(3, 24, width)}, [path])


@fault(
    WRAPPER,
    "gains?.*collapsed",
    "gains?.*small",
    "vanish",
    "formula",
    say="this norm's gain is 1e-4 of its neighbours'",
)
def gain_divided_by_loss_scale(draw: Draw) -> Scene:
    """One gain was divided by 4096 with the gradients it was thought to be one of."""
    model = demo("rmsnorm")
    path = draw.choice(norm_paths(model)[:-1])
    get(model, path).weight.data.div_(4096)
    return Scene(model, byte_batch(draw), [path])


@fault(STREAM, "logit", "attention", say="attention logits are too large", needs=["smollm2"])
def attention_logits_explode(draw: Draw) -> Scene:
    """One layer's query matrix of SmolLM2 is 60 times as large: its softmax is one-hot."""
    model, batch = real(draw, "smollm2", torch.float32)
    number = draw.randrange(len(model.model.layers))
    model.model.layers[number].self_attn.q_proj.weight.data.mul_(60)
    return Scene(model, batch, [f"model.layers.{number}"])


@fault(STREAM, "nothing", "dead", "no effect", "zero", "adds", say="this block adds nothing to the stream")
def block_is_dead(draw: Draw) -> Scene:
    """Both output matrices of one block of the trained GPT-2 are zero."""
    model = demo("layernorm")
    number = draw.randrange(1, 5)
    for layer in (model.transformer.h[number].attn.c_proj, model.transformer.h[number].mlp.c_proj):
        layer.weight.data.zero_()
        layer.bias.data.zero_()
    return Scene(model, byte_batch(draw), [f"transformer.h.{number}"])


@fault(
    STREAM,
    "stream",
    "scale",
    "residual",
    "grows",
    "large",
    say="the stream leaves this block a thousand times as long",
    needs=["smollm2"],
)
def branch_is_huge(draw: Draw) -> Scene:
    """One MLP's output matrix of SmolLM2 is 3000 times as large: a wrong scale in dequantization."""
    model, batch = real(draw, "smollm2", torch.float32)
    number = draw.randrange(1, len(model.model.layers))
    model.model.layers[number].mlp.down_proj.weight.data.mul_(3000)
    return Scene(model, batch, [f"model.layers.{number}"])


@fault(STREAM, "nan", "non-?finite", r"\binf", say="NaN begins in this MLP")
def nan_from_a_matrix(draw: Draw) -> Scene:
    """One weight of an MLP is NaN; all norms behind it show NaN, and none of them is the cause."""
    model = random_model(draw, "Qwen2", "Llama")
    number = draw.randrange(len(model.model.layers) - 1)
    matrix = model.model.layers[number].mlp.up_proj.weight.data
    matrix[draw.randrange(matrix.shape[0]), draw.randrange(matrix.shape[1])] = float("nan")
    return Scene(model, byte_batch(draw), [f"model.layers.{number}"])


@fault(
    STREAM,
    r"\beps\b",
    "small",
    "embedding",
    "scale",
    "shrink",
    say="the embedding is so small that eps shortens the first norm's rows",
)
def embedding_too_small(draw: Draw) -> Scene:
    """The embedding of a trained model is a thousandth of what it was (a muP multiplier applied twice): the first
    norm's eps is not small beside it."""
    model = demo("rmsnorm")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.model.embed_tokens.weight.data.div_(1000)
    return Scene(model, byte_batch(draw), ["model.layers.0", "model.embed_tokens"])


@fault(
    OTHER,
    "embedding",
    say="nothing of a norm; at best: the embedding is another",
    needs=["gemma3"],
    seeable=False,
    innocent=True,
)
def embedding_scale_lost(draw: Draw) -> Scene:
    """Gemma's sqrt(width) on the embedding is lost: the first block's branches weigh 25 times as much."""
    model, batch = real(draw, "gemma3", torch.float32)
    model.model.embed_tokens.embed_scale = torch.tensor(1.0)
    return Scene(model, batch)


@fault(OTHER, "rope", "rotary", "position", say="nothing of a norm", needs=["smollm2"], seeable=False, innocent=True)
def rotary_base_wrong(draw: Draw) -> Scene:
    """The rotary base is 1000 times too small: positions are wrong, norms are right."""
    model, batch = real(draw, "smollm2", torch.float32)
    model.model.rotary_emb.inv_freq.pow_(0.5)
    return Scene(model, batch)


@fault(
    OTHER,
    "matri",
    "linear",
    "not loaded",
    "random",
    "initial",
    say="nothing of a norm; at best: matrices look fresh",
    needs=["qwen05"],
    seeable=False,
    innocent=True,
)
def matrices_not_loaded(draw: Draw) -> Scene:
    """One block's matrices are fresh (a renamed prefix), its norms are the trained ones."""
    model, batch = real(draw, "qwen05", torch.float32)
    for module in model.model.layers[draw.randrange(len(model.model.layers))].modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    return Scene(model, batch)


@fault(
    OTHER,
    "constant",
    "one token",
    "same token",
    "repeated token",
    "identical",
    "alike",
    say="the text is one token over and over",
    needs=["smollm2"],
    innocent=True,
)
def text_is_constant(draw: Draw) -> Scene:
    """The tokenizer gave one token for everything: all rows are nearly alike. A data fault."""
    model, batch = real(draw, "smollm2")
    batch["input_ids"] = torch.full_like(batch["input_ids"], draw.randrange(4, 100))
    return Scene(model, batch)


@fault(OTHER, "head", "logit", say="nothing of a norm", seeable=False, innocent=True)
def head_permuted(draw: Draw) -> Scene:
    """The rows of the head are in another order than the tokenizer's: a vocabulary fault."""
    model = demo("layernorm")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach()[torch.randperm(256)].clone())
    return Scene(model, byte_batch(draw))


@fault(
    OTHER,
    "stream is out of scale",
    "pixels",
    "scale of the input",
    "input is",
    say="at best: pixels are 255 times too large; no norm is wrong",
    innocent=True,
)
def pixels_not_scaled(draw: Draw) -> Scene:
    """Pictures come as 0 to 255 into a vision transformer that was made for 0 to 1; its norms are right."""
    model, batch = vision(draw)
    batch["x"] = torch.randint(0, 256, batch["x"].shape).float()
    return Scene(model, batch)


@fault(OTHER, "mask", "future", "causal", say="nothing of a norm", seeable=False, innocent=True)
def attention_not_causal(draw: Draw) -> Scene:
    """A language model attends to the future: its mask is lost. No norm mixes positions, and none must be told to."""
    model = demo("rmsnorm")

    def unmasked(_module: nn.Module, args: tuple, named: dict) -> tuple[tuple, dict]:
        length = named["hidden_states"].shape[1] if "hidden_states" in named else args[0].shape[1]
        return args, {**named, "attention_mask": torch.zeros(1, 1, length, length)}

    for layer in model.model.layers:
        layer.self_attn.is_causal = False
        layer.self_attn.register_forward_pre_hook(unmasked, with_kwargs=True)
    return Scene(model, byte_batch(draw))


@fault(OTHER, "dead", "nothing", "activation", say="nothing of a norm; at best: this MLP is dead", innocent=True)
def activation_dead(draw: Draw) -> Scene:
    """All biases of one MLP's first layer are -100: GELU gives 0 everywhere, so the MLP adds its last bias only."""
    model = tiny(draw, "GPT2")
    as_if_trained(model)
    number = draw.randrange(model.config.n_layer)
    model.transformer.h[number].mlp.c_fc.bias.data.fill_(-100.0)
    return Scene(model, byte_batch(draw), [f"transformer.h.{number}"])
