"""Tiny models of the families that fold, with nothing in them that would hide a mistake.

Gains have both signs and one zero each, biases and embeddings have means, and no two sizes of a model are alike; or, in
the square variant, as many as can be. Weights are drawn in float64, so that a seed gives one model in every dtype.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tiny_inputs import TOKENS, inputs_of

WIDTH, LAYERS, HEADS = 32, 2, 4

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "dim"), WIDTH),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), LAYERS
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_kv"), 12),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "encoder_ffn_dim", "hidden_dim"), 40
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "original_max_position_embeddings"), 28),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 6),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    "decoder_ffn_dim": 44,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 18,
    "max_source_positions": 20,
    "max_target_positions": 28,
    "pad_token_id": 0,
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id"), 1),
    "eos_token_id": 2,
}
# Where a fused reader and its writer cannot both be square, the family says that the reader is.
_SQUARE: dict[str, Any] = {
    **{name: WIDTH for name, size in _SIZES.items() if size in (97, 40, 44, 28, 20, 18, 6)},
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_kv"), WIDTH // HEADS),
}
_FUSED = {"intermediate_size": WIDTH // 2}
_EPS = ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps", "norm_eps", "norm_epsilon")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a family needs beside the sizes above.

    Attributes:
        name: Of its classes, as in "Llama".
        head: What its model is for, as its class says it.
        options: Fields of the configuration.
        square: Further ones of the square variant.
        ties: The values that `tied` can take.
        config: Of its configuration, if that is not called as its classes.
    """

    name: str
    head: str = "ForCausalLM"
    options: dict[str, Any] = field(default_factory=dict)
    square: dict[str, Any] = field(default_factory=dict)
    ties: tuple[bool, ...] = (False, True)
    config: str = ""


def _causal(name: str, square: dict[str, Any] | None = None, config: str = "", **options: Any) -> Recipe:
    return Recipe(name=name, options=options, square=square or {}, config=config)


def _sound(**options: Any) -> Recipe:
    sizes = {"conv_dim": [20, 24], "conv_kernel": [4, 3], "conv_stride": [2, 2], "vocab_size": 21}
    places = {"mask_time_prob": 0.0, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 4}
    return Recipe(name="Wav2Vec2", head="ForCTC", options={**sizes, **places, **options}, ties=())


def _encoder(name: str, **options: Any) -> Recipe:
    types = {"type_vocab_size": 3, **options}
    return Recipe(name=name, head="ForMaskedLM", options=types, square={"type_vocab_size": WIDTH})


_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
_GEMMA = {"sliding_window": 4, "query_pre_attn_scalar": 12}
_MOE = {"num_hidden_layers": 3, "mlp_only_layers": [1]}
_GROUPS = {"n_group": 2, "topk_group": 1}
_RANKS = {"q_lora_rank": 14, "kv_lora_rank": 22, "qk_nope_head_dim": 10, "qk_rope_head_dim": 4, "v_head_dim": 6}
_MLA = _RANKS | {"num_hidden_layers": 3, "num_key_value_heads": HEADS, "first_k_dense_replace": 1} | _GROUPS
_SQUARE_MLA = {"q_lora_rank": WIDTH, "kv_lora_rank": WIDTH, "qk_nope_head_dim": 4, "v_head_dim": 8}
_T5 = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
# OPT's table of positions has two rows more.
_NARROW = {"word_embed_proj_dim": WIDTH, "max_position_embeddings": WIDTH - 2}
_MODERN = {"local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 14}
_THREE = ["sliding_attention", "full_attention", "sliding_attention"]

_IMAGE = {"hidden_size": 24, "intermediate_size": 36, "image_size": 8, "patch_size": 4}


def _tower(name: str, kind: str, *, head: str, **options: Any) -> Recipe:
    """The text or vision model of CLIP or SigLIP."""
    sizes = _IMAGE if kind == "Vision" else {"projection_size": 24, "max_position_embeddings": TOKENS}
    config = f"{name}{kind}Config"
    return Recipe(name=f"{name}{kind}", head=head, options={**sizes, **options}, config=config, ties=())


_CLIP = _tower("CLIP", "Vision", head="ModelWithProjection", projection_dim=20)
_CLIP_TEXT = _tower("CLIP", "Text", head="ModelWithProjection", projection_dim=20)
_SIGLIP = _tower("Siglip", "Vision", head="Model")
_SIGLIP_TEXT = _tower("Siglip", "Text", head="Model")
_MERGED = {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 1}
_QWEN_VISION = Recipe(name="", config="Qwen2VLVisionConfig", options={"embed_dim": 24, "hidden_size": WIDTH, **_MERGED})
_QWEN2_5_VISION = Recipe(
    name="",
    config="Qwen2_5_VLVisionConfig",
    options={"hidden_size": 24, "intermediate_size": 36, "out_hidden_size": WIDTH, "window_size": 8, **_MERGED},
)
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_GEMMA_TOKENS = {"mm_tokens_per_image": 4, "image_token_index": 6}
_QWEN_TOKENS = {"image_token_id": 6, "video_token_id": 5, "vision_start_token_id": 4, "vision_end_token_id": 3}


def _seeing(name: str, text: str, vision: Recipe, **options: Any) -> Recipe:
    """A model of text and images."""
    text_config = Recipe(name="", config=f"{text}Config", options=options.pop("inner", {}))
    inner = {"text_config": text_config, "vision_config": vision}
    return Recipe(name=name, head="ForConditionalGeneration", options={**inner, **options})


RECIPES: dict[str, Recipe] = {
    "gpt2": Recipe(name="GPT2", head="LMHeadModel"),
    "llama": _causal("Llama"),
    "llama_bias": _causal("Llama", attention_bias=True, mlp_bias=True),
    "qwen3": _causal("Qwen3"),
    "gemma2": _causal("Gemma2", **_GEMMA),
    "olmo": _causal("Olmo"),
    "gpt_neox": _causal("GPTNeoX"),
    "gpt_neox_sequential": _causal("GPTNeoX", use_parallel_residual=False),
    "mixtral": _causal("Mixtral"),
    "bert": _encoder("Bert"),
    "roberta": _encoder("Roberta"),
    "xlm-roberta": _encoder("XLMRoberta"),
    "camembert": _encoder("Camembert"),
    "mpnet": _encoder("MPNet"),
    "distilbert": _encoder("DistilBert"),
    "electra": _encoder("Electra", embedding_size=20),
    "electra_wide": _encoder("Electra", embedding_size=WIDTH),
    "mistral": _causal("Mistral", sliding_window=4),
    "qwen2": _causal("Qwen2"),
    "gemma": _causal("Gemma"),
    "gemma3": Recipe(
        name="Gemma3",
        config="Gemma3TextConfig",
        options={"num_hidden_layers": 3, "layer_types": _THREE, **_GEMMA},
    ),
    "gemma3_vision": _seeing(
        "Gemma3", "Gemma3Text", _SIGLIP, inner=_GEMMA, mm_tokens_per_image=4, image_token_index=96
    ),
    "qwen2_vl": _seeing("Qwen2VL", "Qwen2VLText", _QWEN_VISION, inner=_MROPE, **_QWEN_TOKENS),
    "qwen2_5_vl": _seeing("Qwen2_5_VL", "Qwen2_5_VLText", _QWEN2_5_VISION, inner=_MROPE, **_QWEN_TOKENS),
    "clip": Recipe(name="CLIP", head="Model", options={"text_config": _CLIP_TEXT, "vision_config": _CLIP}, ties=()),
    "clip_text": _CLIP_TEXT,
    "clip_vision": _CLIP,
    "siglip": Recipe(
        name="Siglip", head="Model", options={"text_config": _SIGLIP_TEXT, "vision_config": _SIGLIP}, ties=()
    ),
    "siglip_text": _SIGLIP_TEXT,
    "siglip_vision": _SIGLIP,
    "siglip_vision_no_head": dataclasses.replace(_SIGLIP, options={**_SIGLIP.options, "vision_use_head": False}),
    "phi3": _causal("Phi3", _FUSED),
    "olmo2": _causal("Olmo2"),
    "olmo3": _causal("Olmo3", sliding_window=4),
    "qwen3_next": _causal("Qwen3Next", **{**_DELTA, **_MOE}),
    "qwen3_5_text": _causal("Qwen3_5", **_DELTA, config="Qwen3_5TextConfig"),
    "wav2vec2": _sound(),
    "wav2vec2_stable": _sound(do_stable_layer_norm=True, feat_extract_norm="layer", conv_bias=True),
    "granite": _causal(
        *("Granite",), embedding_multiplier=2.5, logits_scaling=3.0, residual_multiplier=0.7, attention_multiplier=0.3
    ),
    "seed_oss": _causal("SeedOss"),
    "smollm3": _causal("SmolLM3", num_hidden_layers=3, no_rope_layers=[1, 0, 1]),
    "glm4": _causal("Glm4", _FUSED),
    "gptj": _causal("GPTJ", rotary_dim=4),
    "gpt_neo": _causal("GPTNeo", attention_types=[[["global", "local"], 1]], window_size=4),
    "opt": _causal("OPT", _NARROW),
    "opt_post_norm": _causal("OPT", _NARROW, do_layer_norm_before=False, word_embed_proj_dim=24),
    "falcon": _causal("Falcon"),
    "falcon_two_norms": _causal("Falcon", new_decoder_architecture=True, num_kv_heads=2),
    "falcon_one_norm": _causal("Falcon", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    "falcon_sequential": _causal("Falcon", parallel_attn=False, multi_query=False, bias=True, alibi=True),
    "phi": _causal("Phi"),
    "phi_qk_norm": _causal("Phi", qk_layernorm=True),
    "stablelm": _causal("StableLm"),
    "stablelm_bias": _causal("StableLm", use_qkv_bias=True),
    "stablelm_parallel": _causal("StableLm", use_parallel_residual=True, qk_layernorm=True, use_qkv_bias=True),
    "starcoder2": _causal("Starcoder2"),
    "cohere": _causal("Cohere"),
    "cohere2": _causal("Cohere2", sliding_window=4),
    "cohere_qk_norm": _causal("Cohere", use_qk_norm=True),
    "bloom": _causal("Bloom"),
    "qwen2_moe": _causal("Qwen2Moe", **_MOE),
    "qwen3_moe": _causal("Qwen3Moe", **_MOE),
    "gpt_oss": _causal("GptOss", {**_FUSED, "max_position_embeddings": 28}, sliding_window=4, rope_parameters=_YARN),
    "deepseek_v3": _causal("DeepseekV3", _SQUARE_MLA, **_MLA),
    "deepseek_v3_full_q": _causal("DeepseekV3", {**_SQUARE_MLA, "q_lora_rank": None}, **{**_MLA, "q_lora_rank": None}),
    "t5": Recipe(name="T5", head="ForConditionalGeneration", options={"feed_forward_proj": "gated-gelu", **_T5}),
    "t5_relu": Recipe(name="T5", head="ForConditionalGeneration", options=_T5),
    "whisper": Recipe(
        name="Whisper", head="ForConditionalGeneration", options={"num_mel_bins": 10}, square={"num_mel_bins": WIDTH}
    ),
    "vit": Recipe(
        name="ViT",
        head="ForImageClassification",
        options={"image_size": 8, "patch_size": 4, "num_labels": 7},
        square={"num_labels": WIDTH},
        ties=(),
    ),
    "modernbert": Recipe(
        name="ModernBert", head="ForMaskedLM", options={"num_hidden_layers": 3, **_MODERN}, square=_FUSED
    ),
    "modernbert_bias": Recipe(
        name="ModernBert",
        head="ForMaskedLM",
        options={"norm_bias": True, "attention_bias": True, "mlp_bias": True, **_MODERN},
        square=_FUSED,
    ),
}

FIXED_EPS = {
    "olmo": "its norms have 1e-5 in their code: eps is ignored",
    "opt": "its norms have nn.LayerNorm's 1e-5 whatever the configuration says: eps is set on them and lost by saving",
    "opt_post_norm": "as opt",
    "whisper": "as opt",
    "deepseek_v3": "q_a_layernorm and kv_a_layernorm have 1e-6 whatever the configuration says, and keep it here",
    "deepseek_v3_full_q": "as deepseek_v3",
    "distilbert": "its norms have 1e-12 in their code: eps is ignored",
    "wav2vec2_stable": "the norms behind its convolutions have 1e-5",
    "qwen2_vl": "the norms of its vision model have 1e-6",
    "qwen2_5_vl": "as qwen2_vl",
}
"""What is out of the ordinary about a family's eps; after loading a saved one, call `set_eps` again."""


def tiny(
    family: str,
    *,
    square: bool = False,
    tied: bool | None = None,
    eps: float | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    class_name: str = "",
    **options: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """A model in evaluation mode, and keyword arguments for a call of it.

    Args:
        family: A key of `RECIPES`.
        square: Make matrices square that can be, the embedding among them.
        tied: Whether the head shares the embedding, one of the recipe's `ties`; None is the class's own choice.
        eps: Of every norm; see `FIXED_EPS`. None is the class's own choice.
        seed: Of all weights and inputs.
        dtype: Of the weights.
        class_name: Another class of the family than the recipe's.
        options: Further fields of the configuration; without them, nothing is dropped out.
    """
    import transformers

    recipe = RECIPES[family]
    if tied not in (None, *recipe.ties):
        raise ValueError(f"{family} cannot have tied={tied}")
    config = configuration(recipe, square=square, tied=tied, eps=eps, **options)
    class_: Any = getattr(transformers, class_name or f"{recipe.name}{recipe.head}")
    # The quicker ways of computing experts know no float64.
    model = class_._from_config(config, dtype=dtype, experts_implementation="eager").eval()
    if recipe.name == "T5" and tied is False:
        # No configuration unties it: a checkpoint does that holds both tables.
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.shared.weight))
    if recipe.name == "GPTJ":
        # Its angles are of the dtype in which it is made, except where it is loaded.
        for made, module in zip(class_(config).modules(), model.modules(), strict=True):
            if hasattr(module, "embed_positions"):
                module.embed_positions = made.embed_positions.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    _draw(model, generator)
    if eps is not None and family in ("opt", "opt_post_norm", "whisper"):
        set_eps(model, eps)
    return model, inputs_of(model, generator)


def configuration(
    recipe: Recipe, *, square: bool = False, tied: bool | None = None, eps: float | None = None, **options: Any
) -> Any:
    """The configuration of a recipe."""
    import transformers

    kind = getattr(transformers, recipe.config or f"{recipe.name}Config")
    names = {each.name for each in dataclasses.fields(kind)} | set(recipe.options)
    sizes = {**_SIZES, **recipe.options, **({**_SQUARE, **recipe.square} if square else {})}
    values = {name: size for name, size in sizes.items() if name in names}
    values |= {name: 0.0 for name in names if "drop" in name and name not in values}
    values |= {name: eps for name in _EPS if eps is not None and name in names}
    if tied is not None:
        values["tie_word_embeddings"] = tied
    for name, inner in recipe.options.items():
        if isinstance(inner, Recipe):
            below = {key.partition(".")[2]: options.pop(key) for key in [*options] if key.startswith(f"{name}.")}
            values[name] = configuration(inner, square=square, eps=eps, **below).to_dict()
    # A configuration writes into the dictionaries that it is given.
    return kind(**copy.deepcopy({**values, **options}))


def norms(model: nn.Module) -> dict[str, nn.Module]:
    """The norms of a model by path."""
    return {
        path: module
        for path, module in model.named_modules()
        if type(module).__name__.endswith(("Norm", "NormGated"))
        and type(module).__name__ not in ("GroupNorm", "_WeightNorm")
        and (hasattr(module, "weight") or not list(module.children()))
    }


def gain_offset(norm: nn.Module) -> float:
    """1 for a norm that adds 1 to its stored gain."""
    name = type(norm).__name__
    return float(name.startswith("Gemma") or name in ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm"))


def set_eps(model: nn.Module, eps: float) -> None:
    """Give every norm of a model this eps."""
    for module in norms(model).values():
        for name in ("eps", "variance_epsilon"):
            if hasattr(module, name):
                setattr(module, name, eps)


def _draw(model: nn.Module, generator: torch.Generator) -> None:
    """Draw all weights, and persistent buffers of floating point, in place."""
    gains = {
        module.weight: gain_offset(module)
        for module in norms(model).values()
        if getattr(module, "weight", None) is not None
    }
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    stored = {id(value) for value in model.state_dict(keep_vars=True).values()}
    buffers = [buffer for buffer in model.buffers() if id(buffer) in stored and buffer.is_floating_point()]
    with torch.no_grad():
        for tensor in [*model.parameters(), *buffers]:
            drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            if tensor in gains:
                drawn = (0.5 + drawn.abs()) * torch.where(torch.rand(drawn.shape, generator=generator) < 0.25, -1, 1)
                drawn.view(-1)[torch.randint(drawn.numel(), (), generator=generator)] = 0.0
                drawn -= gains[tensor]
            elif tensor in tables or tensor.dim() != 2:
                # Rows and vectors with a mean; of three axes and more, those are tokens, patches and experts.
                drawn = 0.4 * drawn + 0.3 if tensor.dim() < 3 or 1 in tensor.shape else drawn / WIDTH**0.5
            else:
                drawn = (drawn + 0.2) / WIDTH**0.5
            tensor.copy_(drawn)
