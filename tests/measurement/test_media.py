"""Images and sound become the input of a model; every file that cannot be used is one line."""

from __future__ import annotations

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from media_models import write_wave
from normkit.checkpoint.loading import LoadedModel
from normkit.errors import InputError, ModelError
from normkit.measurement.media import from_images, from_sound, with_text

RATE = 16_000


def sizes(images: Any, **_: str) -> dict[str, torch.Tensor]:
    """A processor: the width, the height and the first red value of each image."""
    return {
        "pixel_values": torch.tensor([[image.width, image.height, image.getpixel((0, 0))[0]] for image in images]),
        "unknown": torch.zeros(1),
    }


class Hears:
    """A feature extractor that changes nothing."""

    sampling_rate = RATE

    def __call__(self, sound: Any, *, sampling_rate: int, **_: str) -> dict[str, torch.Tensor]:
        assert sampling_rate == RATE
        return {"input_values": torch.as_tensor(sound)[None]}


class Model(torch.nn.Module):
    dtype, main_input_name, config = torch.float32, "pixel_values", SimpleNamespace(is_encoder_decoder=False)

    def forward(self, pixel_values: Any = None, input_values: Any = None, input_ids: Any = None) -> None: ...


def loaded(processor: Any, reads: str = "pixel_values") -> LoadedModel:
    model = Model()
    model.main_input_name = reads
    return LoadedModel(
        model=model, tokenizer=None, name="tiny", architecture="Model", path=Path(), notes=(), processor=processor
    )


class WithText:
    """A processor that puts what it was given into the ids."""

    tokenizer = SimpleNamespace(decode=lambda ids: {7: "<start>", 8: "<end>"}[ids[0]])

    def __init__(self, **marks: str) -> None:
        self.texts: list[str] = []
        self.__dict__ |= marks

    def __call__(self, *, text: list[str], images: Any = None, audio: Any = None, **_: Any) -> dict[str, torch.Tensor]:
        self.texts += text
        assert len(text) == len(images or audio) == 1
        return {"input_ids": torch.zeros(1, 3, dtype=torch.long), "pixel_values": torch.zeros(1, 3, 2, 2)}


@pytest.mark.parametrize(
    ("marks", "config", "beginning"),
    [
        ({}, {}, "0123"),
        ({"image_token": "<image>"}, {}, "<image>0123"),
        ({"image_token": "<image>", "boi_token": "<begin>"}, {}, "<begin>0123"),
        ({"image_token": "<pad>"}, {"vision_start_token_id": 7, "vision_end_token_id": 8}, "<start><pad><end>0123"),
    ],
    ids=["none", "LLaVA", "Gemma 3", "Qwen2.5-VL"],
)
def test_an_image_stands_where_the_processor_has_its_mark(
    marks: dict[str, str], config: dict[str, int], beginning: str
) -> None:
    processor = WithText(**marks)
    given = loaded(processor)
    given.model.config = SimpleNamespace(**config)
    made = with_text(given, "0123456789" * 40, "words")
    assert len(made.batches) == len(processor.texts)
    assert processor.texts[0].startswith(beginning)
    # Each image has a piece of its own, and the text begins anew behind its end.
    assert [text.rpartition(">")[2] for text in processor.texts[:3]] == [
        *(("0123456789" * 40)[:256], ("0123456789" * 40)[256:]),
        ("0123456789" * 40)[:256],
    ]
    assert made.source.endswith(", each with a piece of words")


def test_sound_beside_text_has_a_rate() -> None:
    processor = WithText(audio_token="<sound>")
    with pytest.raises(ModelError, match="expected a feature extractor with a sampling rate, found None"):
        with_text(loaded(processor), "words", "words", sound=())
    processor.feature_extractor = Hears()
    made = with_text(loaded(processor), "words", "words", sound=())
    assert processor.texts == ["<sound>words"]
    assert made.source == "a synthesized signal of 6 s at 16,000 Hz, with a piece of words"


def heard(*files: Path) -> list[list[float]]:
    return [batch["input_values"][0].tolist() for batch in from_sound(loaded(Hears(), "input_values"), files).batches]


def test_photographs_that_are_installed() -> None:
    made = from_images(loaded(sizes), None, batch_size=8)
    rows = torch.cat([batch["pixel_values"] for batch in made.batches]).tolist()
    assert [list(batch) for batch in made.batches] == [["pixel_values"], ["pixel_values"]]
    # Each is there whole and in four quarters.
    assert len(rows) == 15
    assert rows[0][:2] == [640, 427]
    assert rows[1][:2] == [320, 213]
    assert made.source == "3 photographs (china.jpg, flower.jpg, grace_hopper.jpg), whole and in quarters"


def test_photographs_of_a_core_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normkit.measurement.media.find_spec", lambda _name: None)
    made = from_images(loaded(sizes), None, batch_size=8)
    assert made.source == "1 photograph (grace_hopper.jpg), whole and in quarters"
    monkeypatch.setattr("matplotlib.get_data_path", lambda: "nowhere")
    with pytest.raises(InputError, match=r"^no photographs are installed; give --images FOLDER$"):
        from_images(loaded(sizes), None, batch_size=8)


def test_a_folder_of_images(tmp_path: Path) -> None:
    Image.new("RGB", (5, 4), (7, 0, 0)).save(tmp_path / "b.png")
    Image.new("L", (3, 2), 9).save(tmp_path / "a.PNG")
    (tmp_path / "notes.txt").write_text("no image")
    made = from_images(loaded(sizes), tmp_path, batch_size=8)
    assert made.batches[0]["pixel_values"].tolist() == [[3, 2, 9], [5, 4, 7]]
    assert made.source == f"2 files of {tmp_path.name}, of one colour"
    one = from_images(loaded(sizes), tmp_path / "b.png", batch_size=8)
    assert (one.batches[0]["pixel_values"].tolist(), one.source) == ([[5, 4, 7]], "b.png, of one colour")
    Image.fromarray(np.arange(36, dtype=np.uint8).reshape(3, 4, 3)).save(tmp_path / "c.png")
    made = from_images(loaded(sizes), tmp_path, batch_size=8)
    assert made.source == f"3 files of {tmp_path.name}, 2 of them of one colour"


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1"])
@pytest.mark.parametrize("size", [(1, 1), (7, 1000), (3000, 20)])
def test_images_of_any_size_and_mode(tmp_path: Path, mode: str, size: tuple[int, int]) -> None:
    file = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    Image.new(mode, size).save(file)
    made = from_images(loaded(sizes), file, batch_size=8)
    assert made.batches[0]["pixel_values"][0, :2].tolist() == [*size]


def test_wide_pixels_keep_their_range_and_photographs_stand_upright(tmp_path: Path) -> None:
    Image.fromarray(np.full((2, 3), 40_000, dtype=np.uint16)).save(tmp_path / "a.png")
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.new("RGB", (5, 4), (7, 0, 0)).save(tmp_path / "b.png", exif=turned)
    made = from_images(loaded(sizes), tmp_path, batch_size=8)
    assert made.batches[0]["pixel_values"].tolist() == [[3, 2, 40_000 // 256], [4, 5, 7]]
    Image.fromarray(np.ones((2, 3), dtype=np.float32)).save(tmp_path / "c.tif")
    with pytest.raises(InputError, match="which have no known range"):
        from_images(loaded(sizes), tmp_path, batch_size=8)


def test_of_many_images_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normkit.measurement.media.MOST_FILES", 2)
    for name in "abc":
        Image.new("RGB", (1, 1)).save(tmp_path / f"{name}.png")
    made = from_images(loaded(sizes), tmp_path, batch_size=8)
    said = f"the first 2 of 3 files of {tmp_path.name}, of one colour"
    assert (len(made.batches[0]["pixel_values"]), made.source) == (2, said)


def test_folders_and_images_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: Path, processor: Any = sizes) -> str:
        with pytest.raises((InputError, ModelError)) as caught:
            from_images(loaded(processor), folder, batch_size=8)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert refused(tmp_path / "none").startswith("expected a folder with images, got ")
    assert refused(tmp_path).startswith("expected images (.jpg, ")
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff no image")
    assert refused(tmp_path).startswith(f"cannot read the image {tmp_path / 'a.jpg'}: Pillow knows no such image")
    Image.new("RGB", (64, 64)).save(tmp_path / "a.jpg")
    whole = (tmp_path / "a.jpg").read_bytes()
    (tmp_path / "a.jpg").write_bytes(whole[:-20])
    assert "truncated" in refused(tmp_path)
    (tmp_path / "a.jpg").write_bytes(whole)
    monkeypatch.setattr("normkit.measurement.media._MOST_PIXELS", 4095)
    assert refused(tmp_path).endswith("has 64 x 64 pixels, expected at most 4,095; scale it")
    monkeypatch.undo()
    missing = refused(tmp_path, "it has no preprocessor_config.json")
    assert missing == "tiny reads images through an image processor: it has no preprocessor_config.json"

    def endless(_images: Any, **_: str) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.full((1,), torch.inf)}

    assert "gives pixel_values with numbers that are not finite for images 1 and" in refused(tmp_path, endless)
    assert refused(tmp_path, Hears()).startswith("Hears of tiny failed on images 1 and following: TypeError")
    assert refused(tmp_path, lambda _images, **_: {"x": torch.zeros(1)}).endswith(
        "gives x, the model reads pixel_values; save the model's own processor beside it"
    )


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width(tmp_path: Path, width: int) -> None:
    largest = 2 ** (8 * width - 1)
    file = write_wave(tmp_path / "a.wav", [[0], [largest - 1], [-largest], [-1]], width=width)
    # Whole numbers of up to 24 bits are exact in float32.
    expected = np.float32([0, (largest - 1) / largest, -1, -1 / largest]).tolist()
    assert heard(file) == [expected]


def wave_of_form(file: Path, form: int, bits: int, samples: bytes, channels: int = 1, more: bytes = b"") -> Path:
    """A .wav file with another header than whole numbers have."""
    size = bits // 8 * channels
    head = struct.pack("<HHIIHH", form, channels, RATE, RATE * size, size, bits) + more
    chunks = b"LIST" + struct.pack("<I", 3) + b"abc\0"
    chunks += b"fmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", len(samples)) + samples
    file.write_bytes(b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks)
    return file


def test_samples_of_other_forms(tmp_path: Path) -> None:
    floats = np.float32([0, 0.5, -1.25])
    for bits, dtype in ((32, "<f4"), (64, "<f8")):
        assert heard(wave_of_form(tmp_path / "a.wav", 3, bits, floats.astype(dtype).tobytes())) == [floats.tolist()]
    extended = struct.pack("<HHIH", 22, 16, 4, 1) + bytes(14)
    assert heard(wave_of_form(tmp_path / "a.wav", 0xFFFE, 16, b"\0\x40", more=extended)) == [[0.5]]


def test_channels_are_averaged_and_folders_read(tmp_path: Path) -> None:
    write_wave(tmp_path / "b.wav", [[16384, -16384], [16384, 0]], channels=2)
    write_wave(tmp_path / "a.wav", [[8192]])
    assert heard(tmp_path) == [[0.25], [0.0, 0.25]]
    long = write_wave(tmp_path / "b.wav", [[1]] * (31 * 100), rate=RATE)
    assert len(heard(long)[0]) == 3100


def test_thirty_seconds_are_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normkit.measurement.media._MOST_SECONDS", 1)
    assert len(heard(write_wave(tmp_path / "a.wav", [[1]] * (RATE + 5)))[0]) == RATE


def test_silence_is_said(tmp_path: Path) -> None:
    def source() -> str:
        return from_sound(loaded(Hears(), "input_values"), [tmp_path]).source

    write_wave(tmp_path / "a.wav", [[0]] * 8)
    assert source() == "a.wav at 16,000 Hz, silent"
    write_wave(tmp_path / "b.wav", [[0], [5]])
    assert source() == "2 files at 16,000 Hz, 1 of them silent"


def test_a_signal_is_synthesized() -> None:
    made = from_sound(loaded(Hears(), "input_values"), [])
    signal = made.batches[0]["input_values"]
    assert made.source == "a synthesized signal of 6 s at 16,000 Hz"
    assert signal.shape == (1, 6 * RATE)
    # It has pauses, and is nowhere clipped.
    assert signal.abs().max() < 1
    assert signal[0, :RATE].std() > 10 * signal[0, -RATE // 3 :].std()


def test_sounds_that_cannot_be_used(tmp_path: Path) -> None:
    def refused(file: Path, processor: Any = None) -> str:
        with pytest.raises((InputError, ModelError)) as caught:
            from_sound(loaded(processor or Hears(), "input_values"), [file])
        assert "\n" not in str(caught.value)
        return str(caught.value)

    file = tmp_path / "a.wav"
    assert refused(file) == f"cannot read the sound {file}: No such file or directory; give a .wav file"
    assert refused(tmp_path) == f"expected .wav files (.wav) in {tmp_path}, found none; give --audio FILE.wav"
    file.write_bytes(b"ID3")
    assert refused(file) == f"expected a .wav file, {file} is none; convert it: ffmpeg -i a.wav new.wav"
    for form, bits, channels in ((7, 8, 1), (1, 12, 1), (3, 16, 1), (1, 16, 0)):
        line = refused(wave_of_form(file, form, bits, b"abcd", channels))
        assert f"has form {form} of {bits} bits and {channels} channel{'s' * (channels != 1)}; convert it" in line
    assert "not finite" in refused(wave_of_form(file, 3, 32, np.float32([np.nan]).tobytes()))
    write_wave(file, [[1]], rate=44_100)
    assert refused(file) == (
        f"{file} has 44,100 samples a second, the model takes 16,000; resample it: ffmpeg -i a.wav -ar 16000 new.wav"
    )
    file.write_bytes(write_wave(file, [[1]]).read_bytes()[:30])
    assert refused(file) == (
        f"{file} does not say the form of its samples, as a file that is cut off; give a whole file"
    )
    whole = write_wave(file, [[1], [2]]).read_bytes()
    file.write_bytes(whole[:-2])
    assert refused(file) == f"{file} is cut off before the end of its samples; give a whole file"
    # As ffmpeg writes to a pipe.
    file.write_bytes(whole[:-8] + b"\xff" * 4 + whole[-4:])
    assert len(heard(file)[0]) == 2
    write_wave(file, [])
    assert refused(file) == f"expected a sound in {file}, found no sample; give another file"
    assert "expected a feature extractor with a sampling rate" in refused(file, sizes)
    hears = Hears()
    hears.n_samples = 10**6 * RATE  # type: ignore[attr-defined]
    assert "makes 1,000,000 s of each sound, expected at most 600" in refused(file, hears)
    assert refused(file, "it has none").startswith("tiny reads sound through a feature extractor: it has none")
