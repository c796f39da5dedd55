"""Mamba, RWKV, an LSTM with LayerNorm in its cell, and an MLP-Mixer."""

from __future__ import annotations

import torch
from torch import nn

import broken
import words as w
from dress import kept, train_on_digits, train_on_text
from kit import Subject, case, clean, draw, fresh, norms, replace, subject
from material import ids, lost, pixels, set_config, text_file, tokenizer


def reading(model: nn.Module, **more) -> Subject:
    """A subject that reads bytes of English."""
    arguments = ("--text", str(text_file()), "--max-tokens", "512", "--seq-length", "64")
    batches = [{"input_ids": ids(4, 64, 256 * k)} for k in range(2)]
    return Subject(model, batches, [tokenizer()], arguments=arguments, row="token", **more)


# Mamba, trained on English


@subject("mamba")
def mamba(rng, seed):
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=260,
        hidden_size=48,
        num_hidden_layers=3,
        state_size=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = kept("mamba", seed, lambda: MambaForCausalLM(config), lambda m: train_on_text(m, seed, 25, 24))
    return reading(model, sites=4, batch_norms=0, placement="pre-norm")


clean("mamba", "folder")


@case("mamba", "norm_f lost", "folder", "the final norm is stored as backbone.norm and made anew", w.LOST, w.MISSING)
def _(rng, made):
    lost(made, "backbone.norm_f", "backbone.final_norm")


@case("mamba", "one added", "code", "one norm adds 1 to gains that are stored whole", w.OFFSET)
def _(rng, made):
    path = draw(rng, norms(made.model), "layers.")
    broken.write(made.model, path, broken.plus_one)
    made.where = (path,)


@case("mamba", "16 bits", "python", "one norm computes its mean square in bfloat16", w.CAST)
def _(rng, made):
    path = draw(rng, norms(made.model), "layers.")
    broken.write(made.model, path, broken.half_statistics)
    made.where = (path,)


@case("mamba", "block bare", "code", "one block reads the stream without a norm", w.MISSING)
def _(rng, made):
    index = rng.randrange(1, 3)
    held = made.model.backbone.layers[index].norm

    class Pass(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(held.weight.detach().clone())

        def forward(self, x):
            return x

    made.model.backbone.layers[index].norm = Pass()
    made.where = (f"backbone.layers.{index}",)


@case("mamba", "centred", "python", "one norm is a LayerNorm without bias instead of an RMSNorm", w.CENTRE, "LayerNorm")
def _(rng, made):
    path = draw(rng, norms(made.model), "layers.")
    broken.write(made.model, path, broken.centred)
    made.where = (path,)


# RWKV 4, trained on English


@subject("rwkv")
def rwkv(rng, seed):
    from transformers import RwkvConfig, RwkvForCausalLM

    config = RwkvConfig(
        vocab_size=260,
        hidden_size=48,
        num_hidden_layers=3,
        context_length=128,
        bos_token_id=1,
        eos_token_id=2,
        rescale_every=0,
    )

    def ready(model: nn.Module) -> None:
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(std=0.7 * module.in_features**-0.5)
            model.rwkv.embeddings.weight.normal_(std=0.1)
        train_on_text(model, seed, 25, 24)

    model = kept("rwkv", seed, lambda: RwkvForCausalLM(config), ready)
    return reading(model, sites=8, batch_norms=0, placement="pre-norm")


clean("rwkv", "folder")


@case(
    "rwkv",
    "ln0",
    "folder",
    "the norm behind the embedding is stored as blocks.0.ln0, the original's name",
    w.LOST,
    w.MISSING,
)
def _(rng, made):
    lost(made, "rwkv.blocks.0.pre_ln", "rwkv.blocks.0.ln0")


@case("rwkv", "ln1 for ln2", "folder", "ln1 and ln2 of one block are exchanged", sort="unseeable")
def _(rng, made):
    block = made.model.rwkv.blocks[rng.randrange(3)]
    block.ln1, block.ln2 = block.ln2, block.ln1


@case("rwkv", "no ln_out", "code", "the head reads the stream without ln_out", w.MISSING, "final norm")
def _(rng, made):
    made.model.rwkv.ln_out = nn.Identity()
    made.where = ("rwkv.ln_out", "rwkv", "head", "")


@case("rwkv", "eps typed", "folder", "layer_norm_epsilon is 1.0 instead of 1e-5", w.EPS)
def _(rng, made):
    made.edit = lambda folder: set_config(folder, layer_norm_epsilon=1.0)
    made.where = ("rwkv.blocks", "rwkv.ln_out")


@case("rwkv", "channel mixing bare", "python", "one block's channel mixing reads the stream, not ln2 of it", w.MISSING)
def _(rng, made):
    index = rng.randrange(3)

    def forward(self, hidden, state=None, use_cache=False, output_attentions=False):
        hidden = self.pre_ln(hidden) if self.layer_id == 0 else hidden
        attention, state = self.attention(self.ln1(hidden), state=state, use_cache=use_cache)
        hidden = hidden + attention
        feed_forward, state = self.feed_forward(hidden, state=state)
        return hidden + feed_forward, state, attention if output_attentions else None

    broken.method(made.model.rwkv.blocks[index], forward)
    made.where = (f"rwkv.blocks.{index}",)


# An LSTM with LayerNorm in its cell (Ba et al. 2016), trained on English


class Cell(nn.Module):
    """LSTM cell: LayerNorm on what comes from the input, from the state, and on the cell."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.from_input, self.from_state = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(width, 4 * width, bias=False),
        )
        self.norm_input, self.norm_state, self.norm_cell = (
            nn.LayerNorm(4 * width),
            nn.LayerNorm(4 * width),
            nn.LayerNorm(width),
        )

    def forward(self, x, state):
        hidden, cell = state
        gates = self.norm_input(self.from_input(x)) + self.norm_state(self.from_state(hidden))
        put, forget, new, out = gates.chunk(4, dim=-1)
        cell = torch.sigmoid(forget + 1) * cell + torch.sigmoid(put) * torch.tanh(new)
        return torch.sigmoid(out) * torch.tanh(self.norm_cell(cell)), cell


class Recurrent(nn.Module):
    """Two such layers over bytes."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(260, width), nn.Linear(width, 260)
        self.cells = nn.ModuleList([Cell(width), Cell(width)])

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for cell in self.cells:
            state, outputs = (torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0])), []
            for step in range(x.shape[1]):
                state = cell(x[:, step], state)
                outputs.append(state[0])
            x = torch.stack(outputs, 1)
        return self.head(x)


@subject("lstm")
def lstm(rng, seed):
    model = kept("lstm", seed, Recurrent, lambda m: train_on_text(m, seed, 60, 24))
    made = reading(model, sites=6, batch_norms=0)
    made.batches = [ids(8, 32), ids(8, 32, 256)]
    return made


clean("lstm", "code")


@case("lstm", "over samples", "code", "the norm of one cell's state is over the samples of the batch", w.AXIS)
def _(rng, made):
    path = draw(rng, norms(made.model), "norm_cell")
    broken.write(made.model, path, broken.over_batch)
    made.where = (path,)


@case(
    "lstm", "annotated", "python", "one norm is std + eps with n - 1, as in many older repositories", w.DIVISOR, w.ROOT
)
def _(rng, made):
    path = draw(rng, norms(made.model))
    broken.write(made.model, path, broken.annotated, 1e-6)
    made.where = (path,)


@case(
    "lstm",
    "gain not applied",
    "python",
    "one norm computes without the gain and bias that it holds",
    w.GAIN,
    "not applied",
    "never",
)
def _(rng, made):
    path = draw(rng, norms(made.model))
    broken.write(made.model, path, broken.no_gain)
    made.where = (path,)


@case("lstm", "cell bare", "code", "the second layer's cell is not normalized; the first's is", w.MISSING)
def _(rng, made):
    index = rng.randrange(2)
    made.model.cells[index].norm_cell = nn.Identity()
    made.where = (f"cells.{index}",)


@case("lstm", "one fresh", "python", "one norm of the trained cell was made anew", w.LOST)
def _(rng, made):
    path = draw(rng, norms(made.model))
    fresh(made.model.get_submodule(path))
    made.where = (path,)


# An MLP-Mixer in one's own code, trained on the digits


class Mix(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.tokens = nn.Sequential(nn.Linear(tokens, 48), nn.GELU(), nn.Linear(48, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """Patches, four blocks, a final norm, the mean over patches, a head."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, 8)
        self.blocks = nn.Sequential(*[Mix(16, width) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 10)

    def forward(self, images):
        return self.head(self.norm(self.blocks(self.stem(images).flatten(2).transpose(1, 2))).mean(1))


@subject("mixer")
def mixer(rng, seed):
    model = kept("mixer", seed, Mixer, lambda m: train_on_digits(m, seed, 150))
    return Subject(model, [pixels(16), pixels(16, 1600)], sites=9, batch_norms=0, placement="pre-norm", row="patch")


clean("mixer", "python")


@case(
    "mixer",
    "after the transpose",
    "code",
    "one block transposes first, so that norm1 is over the patches; its gains are over features",
    w.AXIS,
)
def _(rng, made):
    path = f"blocks.{rng.randrange(4)}.norm1"
    broken.write(made.model, path, broken.over_tokens)
    made.where = (path,)


@case(
    "mixer",
    "one norm in two blocks",
    "python",
    "two blocks hold the same norm object by mistake; the others have their own",
    w.SHARED,
)
def _(rng, made):
    one, two = sorted(rng.sample(range(4), 2))
    made.model.blocks[two].norm2 = made.model.blocks[one].norm2
    made.where = (f"blocks.{one}.norm2", f"blocks.{two}.norm2")


@case("mixer", "norm2 left out", "code", "one block feeds its second MLP without a norm", w.MISSING)
def _(rng, made):
    index = rng.randrange(4)
    replace(made.model, f"blocks.{index}.norm2", nn.Identity())
    made.where = (f"blocks.{index}",)


@case(
    "mixer",
    "residual of the normed",
    "python",
    "one block adds to the normalized rows: x = norm1(x) + f(norm1(x))",
    w.PLACE,
    "residual",
    "stream",
)
def _(rng, made):
    index = rng.randrange(1, 4)

    def forward(self, x):
        x = self.norm1(x)
        x = x + self.tokens(x.transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))

    broken.method(made.model.blocks[index], forward)
    made.where = (f"blocks.{index}",)


@case("mixer", "final fresh", "python", "the final norm of the trained model was made anew", w.LOST)
def _(rng, made):
    fresh(made.model.norm)
    made.where = ("norm",)
