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
    if model.config.model_type.startswith("qwen2") and hasattr(config, "vision_config"):
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
    if config.model_type == "gemma3":
        marked = torch.full((ROWS, config.mm_tokens_per_image), config.image_token_index)
        return {"input_ids": torch.cat([ids(TOKENS - 4).clamp(min=7), marked], dim=1), **pixels}
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
    if "token_type_ids" in inspect.signature(model.forward).parameters and hasattr(config, "type_vocab_size"):
        inputs["token_type_ids"] = torch.randint(config.type_vocab_size, (ROWS, TOKENS), generator=generator)
    return inputs
