"""Tiny untrained models of images, of sound, of both with text and of neither, each with a batch; and processors."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers as tf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
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

_TEXT = {**_ENCODER, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1}
_TEXT |= {"eos_token_id": 2}
_DECODER = {**_TEXT, "num_key_value_heads": 2}
_IMAGE_TOKEN = 5


class AdaptiveBlock(nn.Module):
    """A block of a DiT (Peebles & Xie 2022, section 3.2): a condition scales, shifts and gates its norms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, -1)
        y = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(y, y, y, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """A diffusion transformer: patches of a noisy image, and its step."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.step = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(AdaptiveBlock(width) for _ in range(2))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.out = nn.Linear(width, 16)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        condition = self.step(timestep[:, None] / 1000)
        rows = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            rows = block(rows, condition)
        y: Tensor = self.out(self.norm(rows))
        return y


class ConvolutionBlock(nn.Module):
    """A block of a UNet of diffusion: a norm of channel groups before each convolution (Ho et al. 2020, appendix B)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, width), nn.Conv2d(width, out, 3, padding=1)
        self.step = nn.Linear(16, out)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(width, out, 1) if width != out else nn.Identity()

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.step(step)[:, :, None, None]
        z: Tensor = self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))
        return z


class UNet(nn.Module):
    """A noisy image, halved once, with a connection past the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.step = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(1, 16)
        self.down, self.halve = ConvolutionBlock(16, 32), nn.Conv2d(32, 32, 3, stride=2, padding=1)
        self.middle = nn.ModuleList(ConvolutionBlock(32, 32) for _ in range(2))
        self.up, self.norm, self.leave = ConvolutionBlock(64, 16), nn.GroupNorm(4, 16), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor, timestep: Tensor) -> Tensor:
        step = F.silu(self.step(timestep[:, None] / 1000))
        past = self.down(self.enter(x), step)
        y = self.halve(past)
        for block in self.middle:
            y = block(y, step)
        y = self.up(torch.cat([F.interpolate(y, scale_factor=2.0), past], 1), step)
        z: Tensor = self.leave(F.silu(self.norm(y)))
        return z


class RecurrentCell(nn.Module):
    """An LSTM with norms of its gates and of its cell (Ba, Kiros & Hinton 2016, equations 20 to 22)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_input, self.of_state = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.input_norm, self.state_norm = nn.LayerNorm(4 * width), nn.LayerNorm(4 * width)
        self.cell_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros_like(x[:, 0])
        outputs = []
        for step in x.unbind(1):
            gates = self.input_norm(self.of_input(step)) + self.state_norm(self.of_state(h))
            i, f, g, o = gates.chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * self.cell_norm(c).tanh()
            outputs.append(h)
        return torch.stack(outputs, 1)


class Recurrent(nn.Module):
    """Two layers of an LSTM between an embedding and a head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(99, width)
        self.layers = nn.ModuleList(RecurrentCell(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 99)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(self.norm(x))
        return y


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


def _tokens(length: int, images: slice = slice(0)) -> Tensor:
    """Token ids of one text; those of a slice stand for an image."""
    ids = torch.randint(10, 99, (1, length), generator=torch.Generator().manual_seed(0))
    ids[0, images] = _IMAGE_TOKEN
    return ids


def _gemma3() -> tuple[nn.Module, dict[str, Tensor]]:
    text = {**_DECODER, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}
    config = tf.Gemma3Config(
        text_config=text, vision_config=_SMALL, mm_tokens_per_image=4, image_token_index=5, boi_token_index=7
    )
    ids = _tokens(40, slice(2, 6))
    batch = {
        "input_ids": ids,
        "token_type_ids": (ids == _IMAGE_TOKEN).long(),
        "pixel_values": torch.randn(1, 3, 32, 32),
    }
    return tf.Gemma3ForConditionalGeneration(config), batch


def _qwen25_vl() -> tuple[nn.Module, dict[str, Tensor]]:
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
    config = tf.Qwen2_5_VLConfig(
        text_config={**_DECODER, "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        vision_config=vision,
        image_token_id=_IMAGE_TOKEN,
        video_token_id=6,
        vision_start_token_id=7,
        vision_end_token_id=8,
    )
    ids = _tokens(40, slice(3, 19))
    ids[0, 2], ids[0, 19] = 7, 8
    images = {"pixel_values": torch.randn(64, 96), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    return tf.Qwen2_5_VLForConditionalGeneration(config), {
        "input_ids": ids,
        "mm_token_type_ids": (ids == _IMAGE_TOKEN).long(),
        **images,
    }


def _llava() -> tuple[nn.Module, dict[str, Tensor]]:
    vision = {"model_type": "clip_vision_model", **_SMALL, "projection_dim": 32}
    config = tf.LlavaConfig(
        text_config={"model_type": "llama", **_DECODER}, vision_config=vision, image_token_index=_IMAGE_TOKEN
    )
    return tf.LlavaForConditionalGeneration(config), {
        "input_ids": _tokens(40, slice(3, 19)),
        "pixel_values": torch.randn(1, 3, 32, 32),
    }


def _two_towers(config: Any, model: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    text = {**_TEXT, "max_position_embeddings": 20}
    built = model(config(text_config=text, vision_config=_SMALL))
    return built, {"input_ids": _tokens(10), "pixel_values": torch.randn(1, 3, 32, 32)}


def _paligemma() -> tuple[nn.Module, dict[str, Tensor]]:
    config = tf.PaliGemmaConfig(
        text_config={"model_type": "gemma", **_DECODER, "head_dim": 8},
        vision_config=_SMALL,
        projection_dim=32,
        image_token_index=_IMAGE_TOKEN,
    )
    ids = _tokens(40, slice(2, 18))
    batch = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "pixel_values": torch.randn(1, 3, 32, 32)}
    return tf.PaliGemmaForConditionalGeneration(config), batch


_STATES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2}

OTHERS: dict[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]]] = {
    "CLIP, both towers": lambda: _two_towers(tf.CLIPConfig, tf.CLIPModel),
    "SigLIP, both towers": lambda: _two_towers(tf.SiglipConfig, tf.SiglipModel),
    "LLaVA": _llava,
    "Qwen2.5-VL": _qwen25_vl,
    "Gemma 3": _gemma3,
    "PaliGemma": _paligemma,
    "DiT": lambda: (DiT(), {"x": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([10.0, 500.0])}),
    "UNet": lambda: (UNet(), {"x": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([10.0, 500.0])}),
    "Mamba": lambda: (
        tf.MambaForCausalLM(tf.MambaConfig(**_STATES, state_size=8, time_step_rank=4)),
        {"input_ids": _tokens(32)},
    ),
    "RWKV": lambda: (
        tf.RwkvForCausalLM(tf.RwkvConfig(**_STATES, attention_hidden_size=32, intermediate_size=64, context_length=64)),
        {"input_ids": _tokens(32)},
    ),
    "LSTM": lambda: (Recurrent(), {"input_ids": _tokens(32)}),
}
"""Name -> the model and a batch, of images and text at once, of diffusion, or of text without attention."""


def other_model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model in evaluation mode, and a batch."""
    torch.manual_seed(0)
    model, batch = OTHERS[name]()
    return model.eval(), batch


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


def saved_clip(folder: Path) -> Path:
    """CLIP with both towers, its processor and a tokenizer of single characters."""
    model: Any = other_model("CLIP, both towers")[0]
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{chr(code): code - 93 for code in range(97, 123)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    size = {"height": 32, "width": 32}
    images = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32}, "crop_size": size}
    (folder / "preprocessor_config.json").write_text(json.dumps({**images, "processor_class": "CLIPProcessor"}))
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
