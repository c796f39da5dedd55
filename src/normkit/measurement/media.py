"""The input of a model of images or sound, with text or alone: files, installed photographs, or a signal."""

from __future__ import annotations

import inspect as signatures
import struct
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normkit.checkpoint.build_model import quiet_libraries
from normkit.checkpoint.loading import LoadedModel
from normkit.errors import InputError, ModelError
from normkit.measurement.texts import Batches, context_length
from normkit.text import clipped, counted, typed_line

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
MOST_FILES = 64
"""Most images or recordings that are taken: statistics of rows hardly change from there on."""
# A larger file would need more than a gigabyte.
_MOST_PIXELS = 100_000_000
# A writer that cannot go back to the size of the samples, as of a pipe, leaves one of 2 GB or more.
_OPEN = 2**31 - 2**16
_MOST_SECONDS = 30
# Seconds to which a feature extractor may fill up a sound.
_LONGEST = 600
_SIGNAL_SECONDS = 6
# Characters of the text beside an image or a recording.
_PIECE = 256
# Words that a decoder is given beside a sound.
_WORDS = 64


def from_images(loaded: LoadedModel, folder: Path | None, *, batch_size: int, words: str = "") -> Batches:
    """Images as the model's own processor makes its input of them.

    Args:
        loaded: A model that reads pixel_values.
        folder: Holds images, or is one; None takes the photographs that scikit-learn and matplotlib bring, whole and in
            quarters.
        batch_size: Images a batch.
        words: What a decoder reads, as in `from_sound`.

    Raises:
        InputError: If there is no image, or one cannot be read.
        ModelError: If the processor is missing, or fails.
    """
    _require_processor(loaded, "images", "an image processor")
    images, source = _pictures(folder)
    batches = [
        _with_words(
            loaded,
            _processed(loaded, f"images {start + 1} and following", images[start : start + batch_size]),
            words,
        )
        for start in range(0, len(images), batch_size)
    ]
    return Batches(batches=tuple(batches), source=source, decode=None)


def from_random_pixels(model: Any) -> Batches:
    """Two images of random pixels, of the first size that a model takes.

    Raises:
        InputError: If it takes none.
    """
    import torch

    from normkit.checkpoint.norm_neighbours import made_up

    for drawn in made_up(model):
        pixels = drawn.to(next(model.parameters()).dtype)
        with torch.no_grad(), suppress(RuntimeError, ValueError, TypeError, IndexError):
            model(pixel_values=pixels)
            source = f"random pixels, seed 0, {pixels.shape[-1]} a side"
            return Batches(batches=({"pixel_values": pixels},), source=source, decode=None)
    raise InputError(
        f"{type(model).__name__} runs on no image of random pixels that was tried; verify without --logits"
    )


def _pictures(folder: Path | None) -> tuple[list[Image], str]:
    """The images of a folder, or photographs that are installed; and what they are, in words."""
    if folder is None:
        files = _photographs()
    else:
        files = [folder] if folder.is_file() else _files(folder, IMAGES, "images", "--images FOLDER")
    if not files:
        raise InputError("no photographs are installed; give --images FOLDER")
    taken = files[:MOST_FILES]
    images: list[Image] = []
    for file in taken:
        image = _image(file)
        images.append(image)
        if folder is None:
            half, lower = image.width // 2, image.height // 2
            corners = [(left, top, left + half, top + lower) for left in (0, half) for top in (0, lower)]
            images += [image.crop(corner) for corner in corners]
    if folder is not None:
        source = _some(taken, files) + (f" of {folder.resolve().name or folder}" if folder.is_dir() else "")
        return images, source + _flat([image.getcolors(1) is not None for image in images], "of one colour")
    names = ", ".join(file.name for file in taken)
    return images, f"{counted(len(taken), 'photograph')} ({names}), whole and in quarters"


def from_sound(loaded: LoadedModel, given: Sequence[Path], *, words: str = "") -> Batches:
    """Recordings as the model's own feature extractor makes its input of them, one a batch, 30 seconds of each.

    Args:
        loaded: A model that reads input_features or input_values.
        given: .wav files, or folders with some; without one, a signal is synthesized: a voice-like tone that glides,
            with noise and pauses.
        words: What a decoder reads; without words or without a tokenizer, token ids at random.

    Raises:
        InputError: If a file cannot be read, or has another rate than the model takes.
        ModelError: If the feature extractor is missing, or fails.
    """
    _require_processor(loaded, "sound", "a feature extractor")
    rate = _rate(loaded, loaded.processor)
    sounds, source = _sounds(given, rate)
    batches = tuple(
        _with_words(loaded, _processed(loaded, name, sound, sampling_rate=rate), words) for name, sound in sounds
    )
    return Batches(batches=batches, source=source, decode=None)


def _sounds(given: Sequence[Path], rate: int) -> tuple[list[tuple[str, np.ndarray[Any, Any]]], str]:
    """Names and samples of recordings, or of the signal; and what they are, in words."""
    if not given:
        return [("the signal", _signal(rate))], f"a synthesized signal of {_SIGNAL_SECONDS} s at {rate:,} Hz"
    files = [
        file
        for path in given
        for file in (_files(path, (".wav",), ".wav files", "--audio FILE.wav") if path.is_dir() else [path])
    ]
    taken = files[:MOST_FILES]
    sounds = [(file.name, _wave(file, rate)) for file in taken]
    flat = _flat([bool((samples == samples[0]).all()) for _, samples in sounds], "silent")
    return sounds, f"{_some(taken, files)} at {rate:,} Hz{flat}"


def with_text(
    loaded: LoadedModel, words: str, name: str, *, images: Path | None = None, sound: Sequence[Path] | None = None
) -> Batches:
    """Images or recordings as the model's own processor puts them into a text, one beside a piece of it in each batch.

    Args:
        loaded: A model that reads token ids, and pixel_values, input_features or input_values beside them.
        words: The text, which is cut into as many pieces as there are images or recordings, of 256 characters each.
        name: What to call it.
        images: As `folder` of `from_images`.
        sound: As `given` of `from_sound`; None for a model of images.

    Raises:
        InputError: If an image or a recording cannot be read.
        ModelError: If the processor is missing, or fails.
    """
    _require_processor(loaded, "text with images" if sound is None else "text with sound", "a processor")
    processor = loaded.processor
    media: list[tuple[str, dict[str, Any]]]
    if sound is None:
        pictures, source = _pictures(images)
        media = [(f"image {place}", {"images": [picture]}) for place, picture in enumerate(pictures, 1)]
    else:
        extractor = getattr(processor, "feature_extractor", None)
        rate = _rate(loaded, extractor)
        sounds, source = _sounds(sound, rate)
        key = next((key for key in ("audio", "audios") if key in signatures.signature(processor).parameters), "audio")
        media = [(place, {key: [samples], "sampling_rate": rate}) for place, samples in sounds]
    # A processor puts as many tokens as an image needs where its mark stands; others expect no mark.
    marks = [
        getattr(processor, each, None) for each in ("boi_token", "image_token" if sound is None else "audio_token")
    ]
    mark = next((str(each) for each in marks if each), "")
    tokenizer = getattr(processor, "tokenizer", None)
    ends = [getattr(loaded.model.config, f"vision_{side}_token_id", None) for side in ("start", "end")]
    if mark and sound is None and tokenizer is not None and all(isinstance(end, int) for end in ends):
        mark = mark.join(str(tokenizer.decode([end])) for end in ends)
    # Without a mark, image and text are read apart, and the text is cut to what its tower takes.
    most = context_length(loaded.model, tokenizer)
    cut = {"truncation": True, "max_length": most}
    options: dict[str, Any] = {} if mark or most is None else {"text_kwargs": cut}
    pieces = [words[start : start + _PIECE] for start in range(0, max(len(words), 1), _PIECE)]
    batches = []
    for place, (what, given) in enumerate(media):
        text = mark + pieces[place % len(pieces)]
        batches.append(_processed(loaded, what, needed="input_ids", text=[text], **given, **options))
    decode = None if tokenizer is None else lambda token: str(tokenizer.decode([token]))
    each = "each " if len(media) > 1 else ""
    return Batches(batches=tuple(batches), source=f"{source}, {each}with a piece of {name}", decode=decode)


def _rate(loaded: LoadedModel, extractor: Any) -> int:
    rate = getattr(extractor, "sampling_rate", None)
    if not isinstance(rate, int) or not 1000 <= rate <= 200_000:
        raise ModelError(
            f"{loaded.name}: expected a feature extractor with a sampling rate, found {rate!r}; correct it"
        )
    samples = getattr(extractor, "n_samples", None)
    if isinstance(samples, int) and samples > _LONGEST * rate:
        raise ModelError(
            f"{loaded.name}: its feature extractor makes {samples // rate:,} s of each sound, expected at most "
            f"{_LONGEST:,}; correct it"
        )
    return rate


def _require_processor(loaded: LoadedModel, what: str, kind: str) -> None:
    if loaded.processor is None or isinstance(loaded.processor, str):
        reason = loaded.processor or f"it has none; save {kind} of transformers beside it"
        raise ModelError(f"{loaded.name} reads {what} through {kind}: {reason}")


def _some(taken: Sequence[Path], files: Sequence[Path]) -> str:
    if len(taken) < len(files):
        return f"the first {len(taken)} of {len(files):,} files"
    return taken[0].name if len(taken) == 1 else counted(len(taken), "file")


def _flat(flags: Sequence[bool], what: str) -> str:
    """Words for files whose pixels or samples are all the same: their rows say little of a model."""
    return "" if not any(flags) else f", {what}" if all(flags) else f", {sum(flags)} of them {what}"


def _files(folder: Path, suffixes: Sequence[str], what: str, advice: str) -> list[Path]:
    """The files of a folder with some suffix, by name."""
    if not folder.is_dir():
        raise InputError(f"expected a folder with {what}, got {folder}; give {advice}")
    found = sorted(file for file in folder.iterdir() if file.suffix.lower() in suffixes and file.is_file())
    if not found:
        raise InputError(f"expected {what} ({', '.join(suffixes)}) in {folder}, found none; give {advice}")
    return found


def _photographs() -> list[Path]:
    """The photographs of other packages: two of scikit-learn, where it is installed, and one of matplotlib."""
    import matplotlib

    places = [Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"]
    if (sklearn := find_spec("sklearn")) is not None and sklearn.submodule_search_locations:
        images = Path(next(iter(sklearn.submodule_search_locations))) / "datasets" / "images"
        places = [images / "china.jpg", images / "flower.jpg", *places]
    return [place for place in places if place.is_file()]


def _image(file: Path) -> Image:
    import numpy as np
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise InputError(
                    f"{file} has {image.width:,} x {image.height:,} pixels, expected at most {_MOST_PIXELS:,}; scale it"
                )
            # As transformers' own loader turns photographs upright.
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I;16") or (upright.mode == "I" and file.suffix.lower() == ".png"):
                # Pillow would cut what is above 255 off.
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            if upright.mode in ("F", "I"):
                raise InputError(f"{file} has pixels of more than 16 bits, which have no known range; save it as PNG")
            return upright.convert("RGB")
    except InputError:
        raise
    except Exception as error:  # a damaged file makes Pillow raise errors of many types
        unknown = isinstance(error, UnidentifiedImageError)
        words = "Pillow knows no such image" if unknown else clipped(typed_line(error), 160)
        raise InputError(f"cannot read the image {file}: {words}; take it out, or save it again") from error


def _processed(loaded: LoadedModel, what: str, *given: Any, needed: str = "", **options: Any) -> dict[str, Any]:
    """The tensors that the processor returns and that the model takes."""
    takes = signatures.signature(loaded.model.forward).parameters
    try:
        with quiet_libraries():
            made = loaded.processor(*given, return_tensors="pt", **options)
    except Exception as error:  # each processor fails in its own way
        words = clipped(typed_line(error), 160)
        raise ModelError(f"{type(loaded.processor).__name__} of {loaded.name} failed on {what}: {words}") from error
    dtype = loaded.model.dtype
    batch = {
        key: value.to(dtype) if value.is_floating_point() else value for key, value in made.items() if key in takes
    }
    needed = needed or loaded.model.main_input_name
    if strange := [key for key, value in batch.items() if value.is_floating_point() and not value.isfinite().all()]:
        raise ModelError(
            f"{type(loaded.processor).__name__} of {loaded.name} gives {strange[0]} with numbers that are not finite "
            f"for {what}; correct its mean and deviation, or {loaded.model.dtype} is too narrow for them"
        )
    if needed not in batch:
        raise ModelError(
            f"{type(loaded.processor).__name__} of {loaded.name} gives {', '.join(made)}, the model reads "
            f"{needed}; save the model's own processor beside it"
        )
    return batch


def _wave(file: Path, rate: int) -> np.ndarray[Any, Any]:
    """The first 30 seconds of a .wav file, channels averaged; whole numbers count from -1 to 1.

    Raises:
        InputError: If it is no .wav file of whole numbers or floats, is empty, or has another rate.
    """
    import numpy as np

    try:
        with file.open("rb") as sound:
            start = sound.read(12)
            if start[:4] != b"RIFF" or start[8:] != b"WAVE":
                raise InputError(f"expected a .wav file, {file} is none; convert it: ffmpeg -i {file.name} new.wav")
            form, channels, found, bits, held = 0, 1, rate, 16, b""
            while len(head := sound.read(8)) == 8:
                name, size = struct.unpack("<4sI", head)
                if name == b"data":
                    held = sound.read(wanted := min(size, _MOST_SECONDS * min(found, rate) * channels * (bits // 8)))
                    if len(held) < wanted and size < _OPEN:
                        raise InputError(f"{file} is cut off before the end of its samples; give a whole file")
                    break
                fields = sound.read(min(size, 40))
                if name == b"fmt " and len(fields) >= 16:
                    form, channels, found, _, _, bits = struct.unpack("<HHIIHH", fields[:16])
                    # An extensible header has the form at the beginning of its last 16 bytes.
                    form = struct.unpack("<H", fields[24:26])[0] if form == 0xFFFE and len(fields) >= 26 else form
                # Chunks begin at even places.
                sound.seek(size - len(fields) + size % 2, 1)
    except OSError as error:
        raise InputError(f"cannot read the sound {file}: {error.strerror}; give a .wav file") from None
    if form == 0:
        raise InputError(f"{file} does not say the form of its samples, as a file that is cut off; give a whole file")
    if (form, bits) not in {*((1, 8 * each) for each in (1, 2, 3, 4)), (3, 32), (3, 64)} or not 0 < channels <= 64:
        raise InputError(
            f"expected a .wav file of whole numbers (PCM) of 8 to 32 bits, or of floats, {file} has form {form} of "
            f"{bits} bits and {counted(channels, 'channel')}; convert it: ffmpeg -i {file.name} -c:a pcm_s16le new.wav"
        )
    if found != rate:
        raise InputError(
            f"{file} has {found:,} samples a second, the model takes {rate:,}; resample it: "
            f"ffmpeg -i {file.name} -ar {rate} new.wav"
        )
    width = bits // 8
    held = held[: len(held) // (width * channels) * width * channels]
    if not held:
        raise InputError(f"expected a sound in {file}, found no sample; give another file")
    values: np.ndarray[Any, Any]
    if form == 3:
        values = np.frombuffer(held, f"<f{width}")
        if not np.isfinite(values).all():
            raise InputError(f"{file} has samples that are not finite; give another file")
    else:
        # Samples of one byte count from 0 to 255, of others from below 0.
        bytes_ = np.frombuffer(held, np.uint8).reshape(-1, width).astype(np.int64)
        values = (bytes_ << (8 * np.arange(width))).sum(1)
        values = values - 128 if width == 1 else values - ((values >> (8 * width - 1)) << (8 * width))
        values = values / 2 ** (8 * width - 1)
    mono: np.ndarray[Any, Any] = values.reshape(-1, channels).mean(1)
    return mono.astype(np.float32)


def _signal(rate: int) -> np.ndarray[Any, Any]:
    """A tone of 100 to 200 Hz with its harmonics in syllables of a third of a second, over a little noise."""
    import numpy as np

    time = np.arange(_SIGNAL_SECONDS * rate) / rate
    pitch = 2 * np.pi * np.cumsum(150 + 50 * np.sin(1.7 * time)) / rate
    voice = sum(np.sin(order * pitch) / order for order in range(1, 20))
    loudness = np.clip(np.sin(2 * np.pi * 1.5 * time), 0, None) * (time % 3 < 2.5)
    noise = np.random.default_rng(0).standard_normal(len(time))
    signal: np.ndarray[Any, Any] = 0.2 * voice * loudness + 0.003 * noise
    return signal.astype(np.float32)


def _with_words(loaded: LoadedModel, batch: dict[str, Any], words: str) -> dict[str, Any]:
    """The batch with ids for the decoder, of a model that has one."""
    import torch

    config, model = loaded.model.config, loaded.model
    if not getattr(config, "is_encoder_decoder", False):
        return batch
    takes = signatures.signature(model.forward).parameters
    if "decoder_input_ids" not in takes:
        return batch
    start = getattr(config, "decoder_start_token_id", None) or 0
    most = min(_WORDS, int(getattr(config, "max_target_positions", None) or _WORDS) - 1)
    if loaded.tokenizer is not None and words:
        # Without the remark that the words are more than the model takes.
        with quiet_libraries():
            ids = list(loaded.tokenizer(words[: 16 * _WORDS])["input_ids"])[:most]
    else:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(config.vocab_size, (most,), generator=generator).tolist()
    return {**batch, "decoder_input_ids": torch.tensor([[start, *ids]])}
