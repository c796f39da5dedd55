"""Tokens to learn from: the source of Python's standard library, as windows of bytes, and a Markov chain.

The library's text differs from one Python version to the next, so a training run records which text it
read: every file's name, size and hash, and one digest of them all.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.errors import InputError
from normkit.identification.state import in_mode
from normkit.study.training_run import Batch
from normkit.study.transformer import Transformer

SEPARATOR = b"\0"
"""The byte before each file; a source file never holds it."""

_HELD_OUT_OF = 20
# Tests are a different kind of text; encodings/ holds generated tables, which any model predicts too easily;
# the build's configuration holds the paths of one machine.
_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idle_test", "lib-dynload", "site-packages", "test", "tests"}
)
_SKIPPED_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "config-", "sitecustomize", "usercustomize")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the corpus."""

    name: str
    """Path below the root, with forward slashes."""
    text: bytes
    """Valid UTF-8."""
    sha256: str
    """SHA-256 of the text, in hexadecimal."""
    held_out: bool
    """Not trained on: one file in twenty, chosen by the hash of its name."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Source files in the order of their names."""

    files: tuple[SourceFile, ...]

    @property
    def training(self) -> bytes:
        """The files to learn from, each after a separator."""
        return b"".join(SEPARATOR + file.text for file in self.files if not file.held_out)

    @property
    def held_out(self) -> bytes:
        """The files to measure on, each after a separator."""
        return b"".join(SEPARATOR + file.text for file in self.files if file.held_out)

    @property
    def digest(self) -> str:
        """sha256 over all names and hashes: equal exactly if two corpora are."""
        lines = (f"{file.sha256}  {file.name}\n" for file in self.files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The listing without the texts, ready for `json.dumps`."""
        return {
            "python": platform.python_version(),
            "digest": self.digest,
            "training_bytes": len(self.training),
            "held_out_bytes": len(self.held_out),
            "files": [
                {"name": file.name, "bytes": len(file.text), "sha256": file.sha256, "held_out": file.held_out}
                for file in self.files
            ],
        }


def read(root: Path | None = None) -> Corpus:
    """Read every Python source file below `root` except tests and generated tables.

    Args:
        root: A folder; the running Python's standard library if None.

    Raises:
        InputError: If there is no file to train on, or no file to hold out.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    files = []
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if any(part in _SKIPPED_FOLDERS or part.startswith(_SKIPPED_PREFIXES) for part in name.split("/")):
            continue
        text = (root / name).read_bytes()
        held_out = int(hashlib.sha256(name.encode()).hexdigest(), 16) % _HELD_OUT_OF == 0
        if _is_plain_text(text):
            files.append(SourceFile(name, text, hashlib.sha256(text).hexdigest(), held_out))
    corpus = Corpus(tuple(files))
    if not corpus.training or not corpus.held_out:
        raise InputError(
            f"expected *.py files for training and for holding out, found {len(files)} in {root}; give a larger folder"
        )
    return corpus


def _is_plain_text(text: bytes) -> bool:
    """UTF-8 without the separator; a few old modules are in other encodings."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return SEPARATOR not in text


@cache
def text_of_the_library() -> tuple[bytes, bytes]:
    """Training and held-out text: the running Python's standard library."""
    corpus = read()
    return corpus.training, corpus.held_out


def windows(text: bytes, *, batch: int, window: int, seed: int) -> Iterator[Batch]:
    """Endless batches (batch, window + 1) of token ids from random places of a text; the last id is only predicted."""
    stream = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(stream) - window, (batch,), generator=generator)
        yield (stream[starts[:, None] + torch.arange(window + 1)].long(),)


class MarkovChain:
    """A chain in which each symbol decides how likely the next one is, over sequences of token ids.

    The start is drawn from the stationary distribution, so the expected `next_token_loss` of the best predictor is the
    entropy rate of the chain, in nats per token: `floor`.

    Args:
        symbols: Token ids.
        window: Tokens that are read; a sequence has one more, which is only predicted.
        sharpness: Standard deviation of the logits of `transitions`; 0 gives independent symbols.

    Raises:
        InputError: If symbols or window are less than 1.

    Source:
        Cover & Thomas 2006, theorem 4.2.4, for the entropy rate.
    """

    def __init__(self, symbols: int = 32, *, window: int, sharpness: float = 2.0) -> None:
        for name, value in (("symbols", symbols), ("window", window)):
            if value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        self.symbols, self.window = symbols, window
        likely = transitions(symbols, sharpness)
        self._start = stationary(likely)
        self._bounds = likely.cumsum(-1)[:, :-1].contiguous()
        self.floor = float(self._start @ torch.special.entr(likely).sum(-1))

    def batches(self, *, batch: int, seed: int) -> Iterator[Batch]:
        """Endless batches (batch, window + 1) of token ids."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            ids = [torch.multinomial(self._start, batch, replacement=True, generator=generator)]
            for uniform in torch.rand(self.window, batch, generator=generator, dtype=torch.float64):
                ids.append((self._bounds[ids[-1]] <= uniform[:, None]).sum(-1))
            yield (torch.stack(ids, dim=1),)


def transitions(symbols: int, sharpness: float) -> Tensor:
    """The probability of each symbol after each symbol, (symbols, symbols), float64: softmax of normal logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(symbols, symbols, generator=generator, dtype=torch.float64)
    return (sharpness * logits).softmax(-1)


def stationary(likely: Tensor) -> Tensor:
    """The long-run probability of each symbol, (symbols,), under transition probabilities (symbols, symbols)."""
    now = torch.full((len(likely),), 1 / len(likely), dtype=likely.dtype)
    for _ in range(10_000):
        before, now = now, (now[:, None] * likely).sum(0)
        if torch.allclose(before, now, rtol=1e-14, atol=0):
            break
    return now


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy, in nats, of each token after the first under the logits of a model of token ids."""
    (ids,) = batch
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, text: bytes | None = None, *, window: int | None = None, count: int = 64) -> float:
    """Mean cross-entropy in evaluation mode over `count` windows spread evenly over a text, in nats a byte.

    Args:
        model: A model of token ids.
        text: The held-out text of the standard library if None.
        window: Tokens that the model reads; those of the `Transformer` if None.
        count: Of windows.
    """
    text = text_of_the_library()[1] if text is None else text
    window = cast(Transformer, model).config.context if window is None else window
    stream = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.linspace(0, len(stream) - window - 1, count).long()
    ids = stream[starts[:, None] + torch.arange(window + 1)].long()
    device = next(model.parameters()).device
    with in_mode(model, training=False):
        losses = [next_token_loss(model, (part.to(device),)).item() * len(part) for part in torch.split(ids, 16)]
    return sum(losses) / count
