"""What the table of sizes does not fit: sizes of single families, their inputs, and the families that are not built."""

from __future__ import annotations

from typing import Any, TypeVar

Value = TypeVar("Value")

# Families whose configuration holds others of their own kind, and is built all the same.
COMPOSITIONS = frozenset({"dbrx", "esm", "mpt", "t5gemma", "t5gemma2"})

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 36, "qk_nope_head_dim": 16, "v_head_dim": 16}
_LINEAR_THEN_FULL = {"layer_types": ["linear_attention", "full_attention"]}
_LINEAR = {
    **_LINEAR_THEN_FULL,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
_HYBRID = {"num_hidden_layers": 4, "num_key_value_heads": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
_SWIN = {"image_size": 64, "patch_size": 4, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
_PYRAMID = {"hidden_sizes": (16, 24, 32, 48), "depths": (2, 2, 2, 2), "num_attention_heads": (1, 2, 2, 4)}
_CONVNEXT = {"hidden_sizes": (16, 24, 32, 48), "depths": (1, 1, 2, 1), "image_size": 64}
_WAVES = {"conv_dim": (32,) * 7, "num_conv_pos_embedding_groups": 4, "num_conv_pos_embeddings": 16}


def _each(names: str, value: Value) -> dict[str, Value]:
    return dict.fromkeys(names.split(), value)


def _sections(*sizes: int) -> dict[str, Any]:
    return {"rope_parameters": _ROPE | {"mrope_section": list(sizes)}}


SIZES: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "bailing_hybrid": {**_LATENT, "layer_group_size": 2, "first_k_dense_replace": 1},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "cpmant": {"prompt_types": 4, "segment_types": 4, "prompt_length": 4},
    "cvt": {"embed_dim": (16, 24, 48), "depth": (1, 2, 3)},
    "data2vec-audio": {"conv_dim": (32,) * 7, "num_conv_pos_embedding_groups": 4},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dinov3_convnext": {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 2, 1], "image_size": 64},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "num_key_value_heads": 4},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "focalnet": {
        "embed_dim": 16,
        "hidden_sizes": (16, 32),
        "depths": (2, 2),
        "focal_levels": (2, 2),
        "focal_windows": (3, 3),
    },
    "funnel": {"block_sizes": [2, 2], "num_decoder_layers": 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "intermediate_size": 128,
    },
    "glm4v_moe_text": _sections(1, 1, 2),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA, **_LINEAR_THEN_FULL},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "kimi_linear": {
        **_LATENT,
        **_LINEAR_THEN_FULL,
        "q_lora_rank": None,
        "mlp_layer_types": ["dense", "sparse"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "levit": {
        "hidden_sizes": (32, 48, 64),
        "num_attention_heads": (2, 3, 4),
        "depths": (1, 1, 1),
        "image_size": 64,
        "patch_size": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 72, "num_attention_heads": 6},
    "longcat_flash": {**_LATENT, "zero_expert_num": 2, "head_dim": 8},
    "longformer": {"attention_window": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 16},
    "minimax": {**_LINEAR_THEN_FULL, "block_size": 8},
    "mobilevit": {"image_size": 64, "hidden_sizes": (16, 24, 32), "neck_hidden_sizes": (8, 8, 16, 16, 24, 32, 48)},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 64,
    },
    "olmo_hybrid": {**_LINEAR, "num_key_value_heads": 4},
    "poolformer": _CONVNEXT,
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64},
    "regnet": {"embedding_size": 16, "hidden_sizes": (16, 32), "depths": (1, 1), "groups_width": 8},
    "resnet": {"embedding_size": 16, "hidden_sizes": [32, 64], "depths": (1, 1)},
    "swiftformer": {"image_size": 64, "depths": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 48)},
    "swin2sr": {**_SWIN, "image_size": 16, "num_heads": (2, 2), "patch_size": 1},
    "xmod": {"languages": ("en_XX",), "default_language": "en_XX"},
    "zamba": {
        **_HYBRID,
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {**_HYBRID, "chunk_size": 16},
    "zaya": {"num_experts_per_tok": 1},
    **_each("axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa hy_v4", _LATENT),
    **_each("minicpm3 mistral4 mistral_large4_text youtu", _LATENT),
    **_each("qwen3_next qwen3_5_text qwen3_5_moe_text", _LINEAR),
    **_each("cosmos3_edge_text glm4v_text glm_image_text glm_ocr_text hunyuan_vl_text", _sections(2, 3, 3)),
    **_each("qwen2_vl_text qwen2_5_vl_text", _sections(2, 3, 3)),
    **_each("convnext convnextv2", {**_CONVNEXT, "patch_size": 4}),
    **_each("glpn segformer", _PYRAMID),
    **_each("pvt pvt_v2", {**_PYRAMID, "image_size": 64}),
    **_each("swin swinv2 donut-swin maskformer-swin", _SWIN),
    **_each("hubert speecht5 unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm", _WAVES),
}

INPUTS: dict[str, dict[str, tuple[int, ...]]] = {
    "audio-spectrogram-transformer": {"input_values": (1, 64, 32)},
    "lasr_encoder": {"input_features": (1, 64, 128)},
    "swin2sr": {"pixel_values": (1, 3, 16, 16)},
    "timesformer": {"pixel_values": (1, 8, 3, 32, 32)},
    "videomae": {"pixel_values": (1, 16, 3, 32, 32)},
    "vivit": {"pixel_values": (1, 32, 3, 32, 32)},
    "wav2vec2-bert": {"input_features": (1, 16, 160)},
    "whisper": {"input_features": (1, 80, 128)},
    **_each("bros layoutlmv3 lilt", {"input_ids": (1, 12), "bbox": (1, 12, 4)}),
    **_each("convnext convnextv2 dinov3_convnext levit mobilevit", {"pixel_values": (1, 3, 64, 64)}),
    **_each("poolformer pvt pvt_v2 swiftformer", {"pixel_values": (1, 3, 64, 64)}),
    **_each("swin swinv2 donut-swin maskformer-swin", {"pixel_values": (1, 3, 64, 64)}),
}

REFUSED: dict[str, str] = {
    "wants a grid, masks or positions beside its pixels": "cohere_compass_vision cosmos3_edge_vision exaone4_5_vision "
    "gemma4_vision glm4v_moe_vision glm4v_vision glm5_next_vision glm_image_vision glm_ocr_vision "
    "granite_docling_vision hunyuan_vl_vision idefics3_vision inkling2_vision kimi_k25_vision lfm3_vl_vision "
    "minicpm_ocr_vision minicpmv4_7_vision muse_glimmer_vision muse_spark_vision qwen2_5_vl_vision "
    "qwen3_5_moe_vision qwen3_5_vision qwen3_vl_moe_vision qwen3_vl_vision qwen4_exp_vision seggpt "
    "siglip2_vision_model smolvlm_vision video_llama_3_vision videoprism_vision_model vjepa2",
    "wants input that is neither text, image nor sound": "autoformer blip_2_qformer decision_transformer informer "
    "lxmert muse_glimmer_assistant patchtsmixer patchtst perceiver time_series_transformer timesfm timesfm2_5 udop "
    "vilt sam3_lite_text_text_model",
    "an encoder or codec of sound with sizes tied to each other": "audioflamingo3_encoder dac encodec "
    "fun_asr_nano_encoder gemma3n_audio gemma4_audio glmasr_encoder granite_speech5_encoder mimi mimi_decoder "
    "mimi_encoder moss_transcribe_diarize_audio muse_spark_audio nemotron3_5_transcribe_asr_audio "
    "nemotron3_5_transcribe_word_timestamp nemotron3_diarization_audio pocket_tts_audio_tokenizer "
    "pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder qwen2_audio_encoder qwen3_asr_encoder "
    "univnet vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder "
    "voxtral_encoder voxtral_realtime_encoder",
    "has sizes tied to each other": "dots3_note_text efficientloftr efficientnet glm5_next_text glm_image_vqmodel "
    "hiera mgp-str mobilevitv2 sam2_hiera_det_model",
    "runs two streams, or stacks of different lengths, which replaying its blocks would misread": "canine reformer",
    "has norms that return a pair, which are no sites": "ibert",
    "keeps a cache of keys that cannot be switched off, which replaying its blocks would fill": "flaubert xlm",
    "computes its attention in a CUDA kernel alone": "mra",
    "draws random numbers while it runs": "vits",
    "needs another library (timm, natten, detectron2)": "dinat gemma3n_vision layoutlmv2 timm_backbone timm_wrapper",
    "is named by transformers 5.23 but not there": "voxtral_realtime_text",
}
