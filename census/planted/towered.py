"""Tiny Gemma 3 and Qwen2.5-VL, which read images, too."""

from __future__ import annotations

import torch
from torch import nn

import broken
import words as w
from dress import kept, season
from kit import Subject, case, clean, draw, norms, subject
from material import ids, pixels

# Gemma 3, tiny, with its tower


@subject("gemma3")
def gemma3(rng, seed):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    wide = {"num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 3, "hidden_size": 64}
    text = wide | {
        "vocab_size": 300,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=wide | {"image_size": 32, "patch_size": 4},
        mm_tokens_per_image=16,
        image_token_index=290,
        boi_token_index=291,
        eoi_token_index=292,
    )
    model = kept("gemma3", seed, lambda: Gemma3ForConditionalGeneration(config), lambda m: season(m, seed, offset=1.0))
    words = ids(2, 40)
    words[:, 4:20] = 290
    batch = {"input_ids": words, "pixel_values": pixels(2), "token_type_ids": (words == 290).long()}
    batch["attention_mask"] = torch.ones_like(words)
    return Subject(model, [batch], sites=28, batch_norms=0, placement="sandwich", row="token")


clean("gemma3", "python")
ROOT = "model.language_model.layers."


@case("gemma3", "one lost", "code", "the norms of one block multiply by weight instead of 1 + weight", w.OFFSET)
def _(rng, made):
    index = rng.randrange(3)
    for name in (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ):
        norm = made.model.get_submodule(f"{ROOT}{index}.{name}")

        def forward(self, x):
            return (self._norm(x.float()) * self.weight.float()).type_as(x)

        broken.method(norm, forward)
        made.where += (f"{ROOT}{index}.{name}",)


@case("gemma3", "one twice", "python", "a converter added 1 to the weights, and the class adds it again", w.OFFSET)
def _(rng, made):
    for path, norm in norms(made.model).items():
        if "RMSNorm" in type(norm).__name__:
            norm.weight.data.add_(1)
            made.where += (path,)


@case("gemma3", "over all heads", "code", "q_norm of one block normalizes the heads together", w.AXIS, "heads")
def _(rng, made):
    path = f"{ROOT}{rng.randrange(3)}.self_attn.q_norm"

    def forward(self, x):  # (B, heads, T, head_dim)
        x = x.float()
        y = x * torch.rsqrt(x.square().mean((1, 3), keepdim=True) + self.eps)
        return y * (1.0 + self.weight.float())

    broken.method(made.model.get_submodule(path), forward)
    made.where = (path,)


@case(
    "gemma3",
    "after the addition",
    "python",
    "one block applies post_attention_layernorm after the addition, not before",
    w.PLACE,
)
def _(rng, made):
    index = rng.randrange(3)

    def forward(
        self,
        hidden_states,
        position_embeddings=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        **kwargs,
    ):
        given, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )
        hidden_states = self.post_attention_layernorm(hidden_states + given)
        given = self.mlp(self.pre_feedforward_layernorm(hidden_states))
        return hidden_states + self.post_feedforward_layernorm(given)

    broken.method(made.model.get_submodule(f"{ROOT}{index}"), forward)
    made.where = (f"{ROOT}{index}",)


@case("gemma3", "no k_norm", "code", "one block's keys are not normalized, its queries are", w.MISSING)
def _(rng, made):
    index = rng.randrange(3)
    made.model.get_submodule(f"{ROOT}{index}.self_attn").k_norm = nn.Identity()
    made.where = (f"{ROOT}{index}.self_attn", f"{ROOT}{index}")


# Qwen2.5-VL, tiny, with an image


@subject("qwen-vl")
def qwen_vl(rng, seed):
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
    }
    tower = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 8,
        "fullatt_block_indexes": [2],
        "window_size": 32,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=290,
        vision_start_token_id=291,
        vision_end_token_id=292,
        video_token_id=293,
    )
    model = kept("qwen-vl", seed, lambda: Qwen2_5_VLForConditionalGeneration(config), lambda m: season(m, seed))
    words = ids(1, 40)
    words[0, 3], words[0, 4:20], words[0, 20] = 291, 290, 292
    image = pixels(1, 1500, 64)[0]  # (3, 64, 64): 8 x 8 patches, in the order of 2 x 2 merges
    cut = image.unfold(1, 8, 8).unfold(2, 8, 8).reshape(3, 4, 2, 4, 2, 8, 8).permute(1, 3, 2, 4, 0, 5, 6)
    patches = cut.reshape(64, 3, 1, 8, 8).repeat(1, 1, 2, 1, 1).reshape(64, -1)
    batch = {
        "input_ids": words,
        "attention_mask": torch.ones_like(words),
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 8, 8]]),
        "mm_token_type_ids": (words == 290).int(),
    }
    return Subject(model, [batch], sites=14, batch_norms=0, placement="pre-norm", row="token")


clean("qwen-vl", "python")


@case("qwen-vl", "merger bare", "python", "the merger of patches has lost its norm ln_q", w.MISSING, sort="unseeable")
def _(rng, made):
    made.model.model.visual.merger.ln_q = nn.Identity()


@case(
    "qwen-vl",
    "centred",
    "code",
    "one norm of the tower is a LayerNorm, as in Qwen2-VL, not an RMSNorm",
    w.CENTRE,
    "LayerNorm",
)
def _(rng, made):
    path = draw(rng, norms(made.model), "visual.blocks")
    broken.write(made.model, path, broken.centred)
    made.where = (path,)


@case("qwen-vl", "one less", "python", "all gains of the text part were stored less 1", w.OFFSET, w.GAIN)
def _(rng, made):
    for path, norm in norms(made.model.model.language_model).items():
        norm.weight.data.sub_(1)
        made.where += (f"model.language_model.{path}",)


@case("qwen-vl", "copy", "code", "a block of the tower holds the norms of the block before it", w.COPY)
def _(rng, made):
    index = rng.randrange(1, 3)
    blocks = made.model.model.visual.blocks
    for name in ("norm1", "norm2"):
        getattr(blocks[index], name).load_state_dict(getattr(blocks[index - 1], name).state_dict())
    made.where = (f"model.visual.blocks.{index}", f"model.visual.blocks.{index - 1}")


@case("qwen-vl", "16 bits", "python", "one norm of the tower computes its mean square in bfloat16", w.CAST)
def _(rng, made):
    path = draw(rng, norms(made.model), "visual.blocks")
    broken.write(made.model, path, broken.half_statistics)
    made.where = (path,)
