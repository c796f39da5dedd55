"""Clean models that read images and text at once, from a folder, through their own processors."""

from __future__ import annotations

from dress import kept, season
from kit import Subject, case
from material import image_folder, tokenizer

WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def both(name: str, truth: str):
    return case("multimodal", name, "folder", truth, sort="clean", ideal="no finding above a note, norms of both parts")


def given(made: Subject, model, processors: list, sites: int, row: str = "") -> None:
    made.model, made.processors, made.sites, made.batch_norms, made.row = model, processors, sites, 0, row
    made.arguments = ("--images", str(image_folder()))


@both("CLIP", "CLIPModel with CLIPProcessor: both towers are run")
def _(rng, made):
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

    text = WIDE | {
        "vocab_size": 260,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = CLIPConfig(text_config=text, vision_config=WIDE | {"image_size": 32, "patch_size": 8}, projection_dim=32)
    model = kept("clip-both", 1, lambda: CLIPModel(config), lambda m: season(m, 1))
    words = tokenizer()
    words.model_max_length = 64
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    given(made, model, [CLIPProcessor(images, words)], 11)


@both("SigLIP", "SiglipModel with SiglipProcessor: both towers are run")
def _(rng, made):
    from transformers import (
        SiglipConfig,
        SiglipImageProcessor,
        SiglipModel,
        SiglipProcessor,
    )

    text = WIDE | {
        "vocab_size": 260,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = SiglipConfig(text_config=text, vision_config=WIDE | {"image_size": 32, "patch_size": 8})
    model = kept("siglip-both", 1, lambda: SiglipModel(config), lambda m: season(m, 1))
    words = tokenizer()
    words.model_max_length = 64
    given(made, model, [SiglipProcessor(SiglipImageProcessor(size={"height": 32, "width": 32}), words)], 11)
