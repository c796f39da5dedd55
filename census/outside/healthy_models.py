"""Models in which nothing is wrong, some of them odd: an error or a warning on one of them is a false alarm."""

import copy

import torch
from torch import nn

from . import formulas as f
from .blocks import Language, ParallelBlock, function_language, language, torch_encoder, vision, x_decoder
from .cases import Draw, Scene, clean, get, norm_paths, put
from .material import as_if_trained, byte_batch, demo, real, tiny


@clean(needs=["smollm2"])
def smollm2_as_released(draw: Draw) -> Scene:
    """The first blocks of SmolLM2-135M, in bfloat16 as released."""
    return Scene(*real(draw, "smollm2"))


@clean(needs=["gemma3"])
def gemma3_as_released(draw: Draw) -> Scene:
    """The first blocks of Gemma 3 270M, in bfloat16 as released."""
    return Scene(*real(draw, "gemma3"))


@clean(needs=["mpnet"])
def mpnet_as_released(draw: Draw) -> Scene:
    """The first blocks of all-mpnet-base-v2, in its own dtype."""
    return Scene(*real(draw, "mpnet"))


@clean(needs=["qwen05"])
def qwen_as_released(draw: Draw) -> Scene:
    """The first blocks of Qwen2.5-Coder 0.5B; its key biases make attention logits above 1,000, by design of
    training."""
    return Scene(*real(draw, "qwen05"))


@clean(needs=["smollm2"])
def smollm2_in_float32(draw: Draw) -> Scene:
    """A trained model widened to float32: gains keep bfloat16's 8 bits, which is no quantization fault."""
    return Scene(*real(draw, "smollm2", torch.float32))


@clean(needs=["smollm2"])
def gains_folded_by_hand(draw: Draw) -> Scene:
    """All block norms of SmolLM2 are folded: gains are multiplied into the matrices behind them and are 1. The
    function is the same."""
    model, batch = real(draw, "smollm2", torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                for reader in readers:
                    reader.weight.mul_(norm.weight)
                norm.weight.fill_(1.0)
    return Scene(model, batch)


@clean(needs=["qwen05"])
def gain_scaled_and_undone(draw: Draw) -> Scene:
    """SmoothQuant's move: a gain is divided by 4 and the matrices behind it are multiplied by 4."""
    model, batch = real(draw, "qwen05", torch.float32)
    layer = draw.choice(list(model.model.layers))
    with torch.no_grad():
        layer.input_layernorm.weight.div_(4)
        for reader in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            reader.weight.mul_(4)
    return Scene(model, batch)


@clean(needs=["mpnet"])
def matrices_in_eight_bits(draw: Draw) -> Scene:
    """Matrices are rounded to 8 bits a row, norms are left alone: what a quantizer should do."""
    model, batch = real(draw, "mpnet")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                scale = module.weight.abs().amax(1, keepdim=True) / 127
                module.weight.copy_((module.weight / scale).round() * scale)
    return Scene(model, batch)


@clean(needs=["gemma3"])
def norms_kept_in_float32(draw: Draw) -> Scene:
    """A bfloat16 Gemma 3 whose gains are kept in float32, as quantizers and trainers do; outputs stay bfloat16."""
    model, batch = real(draw, "gemma3", torch.bfloat16)
    for path in norm_paths(model):
        get(model, path).float()
    return Scene(model, batch)


@clean()
def centred_and_made_rms(draw: Draw) -> Scene:
    """The trained GPT-2 with every writer of the stream centred and every LayerNorm an RMSNorm with bias: exact
    (QuaRot, SliceGPT)."""
    model = demo("layernorm")
    body = model.transformer
    with torch.no_grad():
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        for table in (body.wte.weight, body.wpe.weight):
            table.sub_(table.mean(-1, keepdim=True))
        for block in body.h:
            for writer in (block.attn.c_proj, block.mlp.c_proj):
                writer.weight.sub_(writer.weight.mean(1, keepdim=True))
                writer.bias.sub_(writer.bias.mean())
    for path in norm_paths(model):
        put(model, path, f.instead(get(model, path), f.rms_norm))
    return Scene(model, byte_batch(draw))


@clean()
def gemma2_fresh(draw: Draw) -> Scene:
    """A Gemma 2 with random weights: norms before and after each branch, 1 + weight with weight 0."""
    return Scene(tiny(draw, "Gemma2"), byte_batch(draw))


@clean()
def qwen3_as_if_trained(draw: Draw) -> Scene:
    """A Qwen 3 with query and key norms a head; gains with a spread."""
    model = tiny(draw, "Qwen3")
    as_if_trained(model)
    return Scene(model, byte_batch(draw))


@clean()
def olmo2_as_if_trained(draw: Draw) -> Scene:
    """An OLMo 2: norms on the branches' outputs only, query and key norms over all heads."""
    model = tiny(draw, "Olmo2")
    as_if_trained(model)
    return Scene(model, byte_batch(draw))


@clean()
def gpt_neox_fresh(draw: Draw) -> Scene:
    """A GPT-NeoX: attention and MLP side by side, each with its own norm of the same stream."""
    return Scene(tiny(draw, "GPTNeoX"), byte_batch(draw))


@clean()
def cohere_as_if_trained(draw: Draw) -> Scene:
    """A Cohere: one LayerNorm without bias feeds attention and MLP."""
    model = tiny(draw, "Cohere")
    as_if_trained(model)
    return Scene(model, byte_batch(draw))


@clean()
def albert_shares_its_norms(draw: Draw) -> Scene:
    """ALBERT runs one block several times: each norm serves all layers, by design."""
    model = tiny(draw, "Albert")
    as_if_trained(model)
    return Scene(model, byte_batch(draw))


@clean()
def bloom_norms_its_embedding(draw: Draw) -> Scene:
    """BLOOM has a LayerNorm right behind the embedding, in front of the first block's own: two norms in a row by
    design."""
    return Scene(tiny(draw, "Bloom"), byte_batch(draw))


@clean()
def t5_encoder_fresh(draw: Draw) -> Scene:
    """A T5 encoder: unscaled attention, RMSNorms."""
    return Scene(tiny(draw, "T5"), byte_batch(draw))


@clean()
def mixtral_as_if_trained(draw: Draw) -> Scene:
    """A Mixtral: a norm feeds a router and experts."""
    model = tiny(draw, "Mixtral")
    as_if_trained(model)
    return Scene(model, byte_batch(draw))


@clean()
def post_norm_encoder_of_torch(draw: Draw) -> Scene:
    """torch.nn.TransformerEncoder, post-norm, without a final norm: it needs none."""
    model = torch_encoder(draw, norm_first=False, final=False)
    return Scene(model, {"src": torch.randn(2, 24, model.layers[0].norm1.normalized_shape[0])})


@clean()
def pre_norm_encoder_of_torch(draw: Draw) -> Scene:
    """torch.nn.TransformerEncoder, pre-norm, with a final norm."""
    model = torch_encoder(draw, norm_first=True)
    return Scene(model, {"src": torch.randn(2, 24, model.layers[0].norm1.normalized_shape[0])})


@clean()
def x_transformers_decoder(draw: Draw) -> Scene:
    """A decoder of x-transformers with RMSNorm or its simple kind without a gain."""
    option = draw.choice(["use_rmsnorm", "use_simple_rmsnorm", "use_scalenorm"])
    model = x_decoder(draw, **{option: True})
    return Scene(model, {"x": byte_batch(draw)["input_ids"]}, note=option)


@clean()
def vision_transformer_of_timm(draw: Draw) -> Scene:
    """A vision transformer with timm's norms, on queries and keys too."""
    model, batch = vision(draw)
    return Scene(model, batch)


@clean()
def sandwich_with_query_norms(draw: Draw) -> Scene:
    """Hand-written blocks with norms on both sides of each branch, and on queries and keys."""
    model = language(draw, order="sandwich", qk=True)
    as_if_trained(model)
    return Scene(model, byte_batch(draw))


@clean()
def parallel_blocks(draw: Draw) -> Scene:
    """One norm a block feeds attention and MLP."""
    model = Language([ParallelBlock(48, 3, nn.LayerNorm) for _ in range(3)], 48, nn.LayerNorm(48)).eval()
    return Scene(model, byte_batch(draw))


@clean()
def no_norm_at_all(draw: Draw) -> Scene:
    """A model with DyT layers (tanh with a gain) and no norm, by design (Zhu et al. 2025)."""

    class DyT(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.alpha = nn.Parameter(torch.tensor(0.5))
            self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.alpha * x) * self.weight + self.bias

    return Scene(language(draw, norm=DyT), byte_batch(draw))


@clean()
def norms_as_right_functions(draw: Draw) -> Scene:
    """All norms are right functions without parameters, as in nanochat."""
    return Scene(
        function_language(draw, lambda x: nn.functional.rms_norm(x, (x.shape[-1],), eps=1e-6)), byte_batch(draw)
    )


@clean()
def branches_start_at_zero(draw: Draw) -> Scene:
    """A fresh model whose output matrices start at 0, so that each block begins as the identity (GPT-J style, muP)."""
    model = language(draw)
    for block in model.blocks:
        nn.init.zeros_(block.attention.output.weight)
        nn.init.zeros_(block.mlp[-1].weight)
        nn.init.zeros_(block.mlp[-1].bias)
    return Scene(model, byte_batch(draw))


@clean()
def few_negative_gains(draw: Draw) -> Scene:
    """A hundredth of all gains is negative, as in many trained models."""
    model = demo("layernorm")
    for path in norm_paths(model):
        weight = get(model, path).weight.data
        weight[torch.randperm(len(weight))[:1]] *= -1
    return Scene(model, byte_batch(draw))


@clean()
def padded_on_the_left(draw: Draw) -> Scene:
    """Texts of different lengths, padded on the left, with a mask."""
    batch = byte_batch(draw, rows=3)
    mask = torch.ones_like(batch["input_ids"])
    for row in range(3):
        mask[row, : draw.randrange(5, 40)] = 0
    batch["input_ids"] = batch["input_ids"] * mask
    return Scene(demo("rmsnorm"), {**batch, "attention_mask": mask})


@clean()
def one_short_text(draw: Draw) -> Scene:
    """One text of nine tokens through a trained model."""
    return Scene(demo("rmsnorm"), byte_batch(draw, rows=1, length=9))


@clean()
def logging_hooks_of_a_user(draw: Draw) -> Scene:
    """The user's own hooks read all norms' outputs and change nothing."""
    model = demo("layernorm")
    seen: list[float] = []
    for path in norm_paths(model):
        get(model, path).register_forward_hook(lambda _module, _args, output: seen.append(float(output.abs().max())))
    return Scene(model, byte_batch(draw))


@clean()
def model_in_a_wrapper(draw: Draw) -> Scene:
    """The model is the attribute `module` of a wrapper, as under DataParallel."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, **named: object) -> object:
            return self.module(**named)

    return Scene(Wrapper(tiny(draw, "Llama")).eval(), byte_batch(draw))


@clean()
def model_left_in_training_mode(draw: Draw) -> Scene:
    """A model with dropout that is handed over in training mode; inspect says that it evaluates."""
    model = language(draw)
    as_if_trained(model)
    for block in model.blocks:
        block.mlp.append(nn.Dropout(0.3))
    return Scene(model.train(), byte_batch(draw))


@clean()
def intent_that_holds(draw: Draw) -> Scene:
    """An intent file written from a model, and the same model again with other weights."""
    sound = language(draw, qk=True, depth=3)
    model = copy.deepcopy(sound)
    as_if_trained(model)
    return Scene(model, byte_batch(draw), sound=sound)


@clean()
def written_norms_that_are_right(draw: Draw) -> Scene:
    """All norms but those of the first block are hand-written, and right."""
    model = language(draw, norm=nn.LayerNorm)
    as_if_trained(model)
    for path in norm_paths(model):
        if not path.startswith("blocks.0."):
            put(model, path, f.instead(get(model, path), f.layer_norm))
    return Scene(model, byte_batch(draw))
