"""Inputs of the tiny models: texts, images, sounds, or several of them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

ROWS, TOKENS = 2, 11


def inputs_of(model: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """Two rows of whatever the model reads; where it takes a mask and looks both ways, the second is padded."""

    def ids(tokens: int) -> Tensor:
        return torch.randint(3, text.vocab_size, (ROWS, tokens), generator=generator)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64).to(model.dtype)

    config = model.config
    text = config.get_text_config()
    image = getattr(config, "vision_config", config)
    if config.model_type.startswith("qwen") and hasattr(config, "vision_config"):
        # One image a row, of two by four patches, of which four make a token.
        marked = torch.tensor([[4, 6, 6, 3]]).expand(ROWS, -1)
        grid = torch.tensor([[1, 2, 4]]).expand(ROWS, -1)
        tokens = torch.cat([ids(3).clamp(min=7), marked, ids(TOKENS - 7).clamp(min=7)], dim=1)
        patches = numbers(8, 3 * image.patch_size**2).flatten(0, 1)
        return {
            "input_ids": tokens,
            "pixel_values": patches,
            "image_grid_thw": grid,
            "mm_token_type_ids": (tokens == 6).long(),
        }
    pixels = {}
    if hasattr(image, "image_size"):
        pixels = {"pixel_values": numbers(image.num_channels, image.image_size, image.image_size)}
    if (model.main_input_name == "pixel_values" and not hasattr(config, "text_config")) or "ImageClass" in type(
        model
    ).__name__:
        return pixels
    if hasattr(config, "image_token_id") or hasattr(config, "image_token_index"):
        # One image a row, before and behind which are tokens of text.
        patches = (image.image_size // image.patch_size) ** 2
        if config.model_type in ("idefics3", "smolvlm"):
            pixels, patches = {"pixel_values": pixels["pixel_values"].unsqueeze(1)}, patches // config.scale_factor**2
        if config.model_type == "llava_onevision":
            # The whole image and one piece of it, each of whose rows ends with a learned one.
            pixels = {"pixel_values": numbers(2, 3, 8, 8), "image_sizes": torch.tensor([[8, 8]] * ROWS)}
            patches = patches + patches + image.image_size // image.patch_size
        marked = torch.full((ROWS, patches), config.image_token_id)
        tokens = torch.cat([ids(3).clamp(min=7), marked, ids(4).clamp(min=7)], dim=1)
        # As its processor gives it: without it, its two ways of attention look at other tokens.
        kinds = {"token_type_ids": torch.zeros_like(tokens)} if config.model_type == "paligemma" else {}
        return {"input_ids": tokens, **kinds, **pixels}
    if model.main_input_name == "input_values":
        return {"input_values": numbers(50)}
    if model.main_input_name == "input_features":
        # Two frames make one position.
        features = numbers(config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": features, "decoder_input_ids": ids(TOKENS)}
    inputs = {"input_ids": ids(TOKENS), **pixels}
    if config.is_encoder_decoder or not hasattr(model, "generate"):
        inputs["attention_mask"] = torch.ones(ROWS, TOKENS, dtype=torch.long)
        inputs["attention_mask"][1, -1] = 0
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids(TOKENS - 3)
    if config.model_type in ("bart", "mbart"):
        # One class takes the mask of the encoder for the decoder, another reads the last state of a row's end.
        inputs["decoder_input_ids"] = ids(TOKENS)
        inputs["input_ids"][:, -2] = config.eos_token_id
    if "token_type_ids" in inspect.signature(model.forward).parameters and getattr(config, "type_vocab_size", 0):
        inputs["token_type_ids"] = torch.randint(config.type_vocab_size, (ROWS, TOKENS), generator=generator)
    return inputs
