"""What the models read: digits, text and sound, made on this machine from what is installed."""

from __future__ import annotations

import functools
import json
import math
import os
import pydoc_data.topics
import wave
from pathlib import Path

import numpy
import torch
from torch import nn

FOLDER = Path(os.environ.get("FAMILIES_WORK", "families-work"))  # what is built is kept here
MODELS = Path(os.environ.get("FAMILIES_MODELS", "models"))  # real models: smollm2, gemma3, crepe


@functools.cache
def digits(size: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 handwritten digits as images in -1 to 1 of three channels, shuffled, and their labels."""
    kept = FOLDER / "digits.pt"  # for an environment without scikit-learn
    if kept.exists():
        raw, target = torch.load(kept)
    else:
        from sklearn.datasets import load_digits

        data = load_digits()
        raw, target = torch.tensor(data.images, dtype=torch.float32), torch.tensor(data.target)
        FOLDER.mkdir(parents=True, exist_ok=True)
        torch.save((raw, target), kept)
    images = raw[:, None] / 16.0
    images = nn.functional.interpolate(images, size=(size, size), mode="bilinear").clamp(0, 1)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(5))
    images = (images[order] * 255).round() / 255
    return images.repeat(1, 3, 1, 1) * 2 - 1, target[order]


def pixels(count: int, start: int = 1500, size: int = 32) -> torch.Tensor:
    """Digits that no model was trained on."""
    return digits(size)[0][start : start + count].clone()


def image_folder() -> Path:
    """A folder with 48 of those digits as .png files."""
    from PIL import Image

    folder = FOLDER / "digits"
    if not folder.exists():
        folder.mkdir(parents=True)
        for index, image in enumerate(pixels(48)):
            array = ((image + 1) / 2 * 255).round().byte().permute(1, 2, 0).numpy()
            Image.fromarray(array).save(folder / f"{index:02}.png")
    return folder


@functools.cache
def text() -> str:
    """Python's own help pages: 700 kB of English."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode()


def text_file() -> Path:
    """The last part of the text, which no model was trained on, as a file."""
    path = FOLDER / "text.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text()[-20000:])
    return path


def ids(count: int, length: int, start: int = 0, shift: int = 3) -> torch.Tensor:
    """Windows of the text as token ids, one byte each, above three special ones."""
    raw = torch.tensor(list(text()[-20000:].encode())[start : start + count * length]) + shift
    return raw.view(count, length)


def tokenizer():
    """A tokenizer with one token per byte: id = byte + 3 for what is printable."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {"<pad>": 0, "<s>": 1, "</s>": 2}
    table = bytes_to_unicode()
    letters |= {table[byte]: byte + 3 for byte in range(256)}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=256
    )


def bytes_to_unicode() -> dict[int, str]:
    """GPT-2's table of a printable letter for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {byte: chr(byte) for byte in kept}, 0
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + extra)
            extra += 1
    return table


def voice(seconds: float = 2.0, pitch: float = 140.0, rate: int = 16000) -> torch.Tensor:
    """A synthesized voice: harmonics with a moving pitch, in syllables, over a little noise."""
    time = torch.arange(int(seconds * rate)) / rate
    moving = pitch * (1 + 0.2 * torch.sin(2 * math.pi * 1.3 * time))
    phase = 2 * math.pi * torch.cumsum(moving, 0) / rate
    sound = sum(torch.sin(phase * k) / k * math.exp(-(((k * pitch - 700) / 900) ** 2)) for k in range(1, 20))
    syllables = torch.sin(2 * math.pi * 3.1 * time).clamp(min=0) ** 0.5
    noise = torch.randn(len(time), generator=torch.Generator().manual_seed(int(pitch)))
    return 0.2 * sound * syllables + 0.004 * noise


def audio_folder() -> Path:
    """A folder with four such voices as .wav files."""
    folder = FOLDER / "voices"
    if not folder.exists():
        folder.mkdir(parents=True)
        for index, pitch in enumerate((110, 150, 190, 240)):
            with wave.open(str(folder / f"{index}.wav"), "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(16000)
                samples = (voice(2.5, pitch).clamp(-1, 1) * 32767).numpy().astype(numpy.int16)
                file.writeframes(samples.tobytes())
    return folder


def rename_tensors(folder: Path, change) -> None:
    """Rewrite model.safetensors: `change` gets name -> tensor and gives another such dictionary."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = change(load_file(path))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def set_config(folder: Path, **values) -> None:
    """Change keys of config.json; a double underscore goes one level down."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in values.items():
        holder = config
        *outer, last = key.split("__")
        for name in outer:
            holder = holder[name]
        holder[last] = value
    path.write_text(json.dumps(config, indent=1))


def lost(made, path: str, other: str, stored: str = "") -> None:
    """Give the tensors of a norm another name in the file, so that loading makes the norm anew."""
    stored = stored or path
    made.where = (path,)

    def edit(folder: Path) -> None:
        def change(held: dict) -> dict:
            renamed = {
                k.replace(f"{stored}.", f"{other}.") if k.startswith(f"{stored}.") else k: v for k, v in held.items()
            }
            if renamed.keys() == held.keys():
                raise ValueError(f"no tensor of {stored}")
            return renamed

        rename_tensors(folder, change)

    made.edit = edit
