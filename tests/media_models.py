"""Tiny untrained models of images and of sound, each with a batch, and processors that make such a batch."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

_ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_SMALL = {**_ENCODER, "image_size": 32, "patch_size": 8}
_STAGES = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2]}
_RESNET = tf.ResNetConfig(**_STAGES, layer_type="basic", out_features=["stage2"])
_SPEECH = {
    **_ENCODER,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_SIDES = ("encoder_layers", "decoder_layers")
_HALVES = {
    **dict.fromkeys(_SIDES, 2),
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
    "d_model": 32,
}
_WHISPER = tf.WhisperConfig(
    **_HALVES,
    vocab_size=99,
    num_mel_bins=16,
    max_source_positions=50,
    max_target_positions=20,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
)

MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "ViT": (lambda: tf.ViTModel(tf.ViTConfig(**_SMALL)), 32),
    "DeiT": (lambda: tf.DeiTModel(tf.DeiTConfig(**_SMALL)), 32),
    "DINOv2": (lambda: tf.Dinov2Model(tf.Dinov2Config(**_SMALL)), 32),
    "CLIP": (lambda: tf.CLIPVisionModel(tf.CLIPVisionConfig(**_SMALL)), 32),
    "SigLIP": (lambda: tf.SiglipVisionModel(tf.SiglipVisionConfig(**_SMALL)), 32),
    "Swin": (
        lambda: tf.SwinModel(
            tf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
        ),
        32,
    ),
    "ConvNeXt": (
        lambda: tf.ConvNextForImageClassification(tf.ConvNextConfig(hidden_sizes=[8, 16], depths=[2, 2], num_stages=2)),
        32,
    ),
    "DETR": (
        lambda: tf.DetrForObjectDetection(
            tf.DetrConfig(**_HALVES, use_timm_backbone=False, backbone_config=_RESNET, num_queries=5)
        ),
        64,
    ),
    "ResNet": (lambda: tf.ResNetForImageClassification(_RESNET), 32),
    "RegNet": (lambda: tf.RegNetForImageClassification(tf.RegNetConfig(**_STAGES, groups_width=4)), 32),
    "MobileNet": (lambda: tf.MobileNetV1Model(tf.MobileNetV1Config(image_size=32, depth_multiplier=0.25)), 32),
    "Whisper": (lambda: tf.WhisperForConditionalGeneration(_WHISPER), 0),
    "Wav2Vec2": (lambda: tf.Wav2Vec2Model(tf.Wav2Vec2Config(**_SPEECH)), 0),
    "Wav2Vec2-large": (
        lambda: tf.Wav2Vec2Model(tf.Wav2Vec2Config(**_SPEECH, feat_extract_norm="layer", do_stable_layer_norm=True)),
        0,
    ),
}
"""Name -> the model, and the pixels of a side of its images; 0 for one of sound."""


def media_model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in evaluation mode, and a batch of two."""
    build, side = MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    if side:
        return model, {"pixel_values": torch.randn(2, 3, side, side)}
    if name == "Whisper":
        return model, {"input_features": torch.randn(2, 16, 100), "decoder_input_ids": torch.tensor([[1], [1]])}
    return model, {"input_values": torch.randn(2, 1600)}


def saved(name: str, folder: Path) -> Path:
    """The model with its processor in a folder."""
    model: Any = media_model(name)[0]
    model.save_pretrained(folder)
    side = MODELS[name][1]
    if side:
        values = {"image_processor_type": "ViTImageProcessor", "size": {"height": side, "width": side}}
    elif name == "Whisper":
        values = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": 1}
        values |= {"n_fft": 400, "hop_length": 160, "sampling_rate": 16_000, "padding_value": 0.0}
    else:
        values = {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "feature_size": 1, "sampling_rate": 16_000}
        values |= {"do_normalize": True, "padding_value": 0.0, "return_attention_mask": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    return folder


def write_wave(
    file: Path, samples: Sequence[Sequence[int]], *, width: int = 2, rate: int = 16_000, channels: int = 1
) -> Path:
    """A .wav file of whole numbers; those of one byte are stored from 0 to 255."""
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(channels)
        sound.setsampwidth(width)
        sound.setframerate(rate)
        shift = 128 if width == 1 else 0
        flat = [value + shift for frame in samples for value in frame]
        sound.writeframes(b"".join(value.to_bytes(width, "little", signed=width > 1) for value in flat))
    return file
