"""The configurations of the tiny models: what each family needs beside the sizes that all have."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from tiny_inputs import TOKENS

WIDTH, LAYERS, HEADS = 32, 2, 4
_FUSED = {"intermediate_size": WIDTH // 2}


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


def _sound(name: str = "Wav2Vec2", **options: Any) -> Recipe:
    sizes = {"conv_dim": [20, 24], "conv_kernel": [4, 3], "conv_stride": [2, 2], "vocab_size": 21}
    places = {"mask_time_prob": 0.0, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 4}
    return Recipe(name=name, head="ForCTC", options={**sizes, **places, **options}, ties=())


def _image(name: str, **options: Any) -> Recipe:
    sizes = {"image_size": 8, "patch_size": 4, "num_labels": 7, **options}
    return Recipe(name=name, head="ForImageClassification", options=sizes, square={"num_labels": WIDTH}, ties=())


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
_STABLE = {"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True}
_BUCKETS = {"num_buckets": 8, "max_bucket_distance": 20}
_DISENTANGLED = {"relative_attention": True, "pos_att_type": "p2c|c2p", "norm_rel_ebd": "layer_norm"}
_DISENTANGLED |= {"share_att_key": True, "position_buckets": 4}
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

_SCAN = {"mamba_n_heads": 8, "mamba_d_state": 6, "mamba_n_groups": 2, "mamba_d_head": 8, "mamba_chunk_size": 4}
_BAMBA = {"attn_layer_indices": [1], **_SCAN}
_JAMBA = {
    "num_hidden_layers": 3,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "mamba_d_state": 6,
    "mamba_dt_rank": 5,
}
_NEMOTRON = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 6,
    "n_groups": 2,
    "chunk_size": 4,
    "moe_shared_expert_intermediate_size": 18,
    **_GROUPS,
}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 28}
_ZAMBA2 = {
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    "num_hidden_layers": 3,
    "num_key_value_heads": HEADS,
    "n_mamba_heads": 8,
    "mamba_d_state": 6,
    "mamba_ngroups": 2,
    "chunk_size": 4,
    "adapter_rank": 6,
}
_LFM2 = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
# A buffer holds the second ones, in float32 where the model is loaded.
_MUP = {"mlp_multipliers": [0.7, 1.3], "ssm_multipliers": [0.75, 1.25, 0.875, 1.125, 1.5], "key_multiplier": 0.6}
_MUP |= {"embedding_multiplier": 1.5, "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.1}
_MUP |= {"ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.7, "lm_head_multiplier": 0.8, "mamba_d_ssm": 64}

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
_DEEP = {"depth": 3, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1], "out_hidden_size": WIDTH}
_QWEN3_VISION = Recipe(
    name="",
    config="Qwen3VLVisionConfig",
    options={"hidden_size": 24, "intermediate_size": 36, **_MERGED, **_DEEP},
)
_QWEN3_VISION_MOE = dataclasses.replace(_QWEN3_VISION, config="Qwen3VLMoeVisionConfig")
_SIGLIP_BARE = dataclasses.replace(_SIGLIP, options={**_SIGLIP.options, "vision_use_head": False})
_IDEFICS = Recipe(name="", config="Idefics3VisionConfig", options=_IMAGE)
_SEEN = {"image_token_index": 6}
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
    "qwen3_vl": _seeing("Qwen3VL", "Qwen3VLText", _QWEN3_VISION, inner=_MROPE, **_QWEN_TOKENS),
    "qwen3_vl_moe": _seeing(
        "Qwen3VLMoe", "Qwen3VLMoeText", _QWEN3_VISION_MOE, inner={**_MROPE, **_MOE}, **_QWEN_TOKENS
    ),
    "paligemma": _seeing("PaliGemma", "Gemma", _SIGLIP_BARE, projection_dim=WIDTH, **_SEEN),
    "paligemma_2": _seeing("PaliGemma", "Gemma2", _SIGLIP_BARE, inner=_GEMMA, projection_dim=WIDTH, **_SEEN),
    "llava": _seeing("Llava", "Llama", _CLIP, **_SEEN),
    "llava_mistral": _seeing("Llava", "Mistral", _SIGLIP_BARE, vision_feature_select_strategy="full", **_SEEN),
    "llava_qwen2": _seeing("Llava", "Qwen2", _SIGLIP, vision_feature_select_strategy="full", **_SEEN),
    "llava_onevision": _seeing("LlavaOnevision", "Qwen2", _SIGLIP_BARE, image_grid_pinpoints=[[8, 8]], **_SEEN),
    "idefics3": _seeing("Idefics3", "Llama", _IDEFICS, image_token_id=6),
    "smolvlm": _seeing(
        "SmolVLM", "Llama", dataclasses.replace(_IDEFICS, config="SmolVLMVisionConfig"), image_token_id=6
    ),
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
    "wav2vec2_stable": _sound(**_STABLE),
    "hubert": _sound("Hubert"),
    "hubert_stable": _sound("Hubert", **_STABLE),
    "wavlm": _sound("WavLM", **_BUCKETS),
    "wavlm_stable": _sound("WavLM", **_STABLE, **_BUCKETS),
    "deberta-v2": _encoder("DebertaV2", **_DISENTANGLED),
    "albert": _encoder("Albert", embedding_size=20),
    "bart": Recipe(name="Bart", head="ForConditionalGeneration", ties=(True,)),
    "mbart": Recipe(name="MBart", head="ForConditionalGeneration", ties=(True,)),
    "dinov2": dataclasses.replace(_image("Dinov2"), square={"mlp_ratio": 1, "num_labels": 2 * WIDTH}),
    "dinov2_gated": dataclasses.replace(_image("Dinov2", use_swiglu_ffn=True), square={"num_labels": 2 * WIDTH}),
    "beit": _image("Beit", use_relative_position_bias=True),
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
    "jamba": _causal("Jamba", **_JAMBA),
    "bamba": _causal("Bamba", **_BAMBA),
    "falcon_h1": _causal("FalconH1", **_SCAN, **_MUP, mamba_rms_norm=True),
    "falcon_h1_no_norm": _causal("FalconH1", **_SCAN, **_MUP),
    "granitemoehybrid": _causal("GraniteMoeHybrid", **_HYBRID, **_SCAN),
    "nemotron_h": Recipe(name="NemotronH", options=_NEMOTRON, ties=()),
    "nemotron_h_latent": Recipe(name="NemotronH", options={**_NEMOTRON, "moe_latent_size": 14}, ties=()),
    "zamba2": _causal("Zamba2", **_ZAMBA2),
    "zamba2_adapters": _causal("Zamba2", **_ZAMBA2, use_shared_attention_adapter=True, use_mem_rope=True),
    "lfm2": _causal("Lfm2", **_LFM2),
    "t5": Recipe(name="T5", head="ForConditionalGeneration", options={"feed_forward_proj": "gated-gelu", **_T5}),
    "t5_relu": Recipe(name="T5", head="ForConditionalGeneration", options=_T5),
    "whisper": Recipe(
        name="Whisper", head="ForConditionalGeneration", options={"num_mel_bins": 10}, square={"num_mel_bins": WIDTH}
    ),
    "vit": _image("ViT"),
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
    "bart": "its norms have 1e-5 in their code, as opt's",
    "mbart": "as bart",
    "wav2vec2_stable": "the norms behind its convolutions have 1e-5",
    "qwen2_vl": "the norms of its vision model have 1e-6",
    "qwen2_5_vl": "as qwen2_vl",
    "qwen3_vl": "as qwen2_vl",
    "qwen3_vl_moe": "as qwen2_vl",
    "hubert_stable": "as wav2vec2_stable",
    "wavlm_stable": "as wav2vec2_stable",
    "zamba2": "the gated norms of its state-space layers have 1e-5",
    "zamba2_adapters": "as zamba2",
}
"""What is out of the ordinary about a family's eps; after loading a saved one, call `set_eps` again."""
