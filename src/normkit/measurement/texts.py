"""The batches that a model is run on: windows of a text, or token ids at random."""

from __future__ import annotations

import inspect as signatures
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normkit.checkpoint.build_model import quiet_libraries
from normkit.checkpoint.loading import LoadedModel
from normkit.errors import InputError, ModelError
from normkit.text import clipped

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_LENGTH = 256
_SEED = 0
# A shorter rest says little about the neighbours of a row; it is left out if there is a longer window.
_SHORTEST_REST = 8
# Where a text is cut off, it may have other tokens than the whole text has there.
_MARGIN = 64


@dataclass(frozen=True, eq=False, kw_only=True)
class Batches:
    """The inputs that a model is run on."""

    batches: tuple[dict[str, Tensor], ...]
    """Arguments of `model(**batch)`, without padding: the windows of one batch have one length."""
    source: str
    """The source of the batches, in words."""
    decode: Callable[[int], str] | None
    """The text of one token id, or None."""


def from_text(
    text: str, name: str, model: Any, tokenizer: Any, *, length: int | None, max_tokens: int, batch_size: int
) -> Batches:
    """Tokenise a text and cut it into windows, each framed by the special tokens that the tokenizer adds.

    Args:
        text: Not empty.
        name: What to call it.
        model: Of transformers; its configuration limits the length of a window.
        tokenizer: Its tokenizer.
        length: Tokens a window; None is 256. Cut to the model's context.
        max_tokens: Tokens in all.
        batch_size: Windows a batch.

    Raises:
        InputError: If there is no token in the text, or no room for one in a window.
        ModelError: If the tokenizer does not belong to the model.
    """
    # A tokenizer takes some hundred bytes for each token: it is given no more than twice the text that is needed.
    size = max_tokens + _MARGIN
    while len(ids := _ids(tokenizer, text[:size], special=False)) < max_tokens + _MARGIN and size < len(text):
        size *= 2
    if not ids:
        raise InputError(f"expected a text in {name}, the model's tokenizer finds no token in it; give another")
    prefix, suffix = _frame(tokenizer)
    length = _window_length(model, tokenizer, length)
    if length <= len(prefix) + len(suffix):
        raise InputError(
            f"windows of {length} tokens have no room beside the tokenizer's {len(prefix) + len(suffix)} special "
            "tokens; give a larger --seq-length"
        )
    windows, used = _windows(ids, prefix, suffix, length, max_tokens)
    highest, size = max(max(window) for window in windows), _vocabulary(model)
    if highest >= size:
        raise ModelError(
            f"the tokenizer gives token {highest}, the model embeds {size}; they do not belong together: "
            "give the folder with the model's own tokenizer"
        )
    source = f"{'the start of ' if used < len(ids) else ''}{name}{_in_windows(len(windows), length)}"
    return Batches(
        batches=_batches(windows, model, batch_size), source=source, decode=lambda token: str(tokenizer.decode([token]))
    )


def from_random_ids(model: Any, *, length: int | None, max_tokens: int, batch_size: int) -> Batches:
    """Windows of token ids drawn at random from a fixed seed, without special tokens.

    The arguments are those of `from_text`.
    """
    import torch

    length = min(_window_length(model, None, length), max_tokens)
    special = {str(value) for key, value in model.config.to_dict().items() if key.endswith("_token_id")}
    vocabulary = range(_vocabulary(model))
    allowed = torch.tensor([token for token in vocabulary if str(token) not in special] or list(vocabulary))
    generator = torch.Generator().manual_seed(_SEED)
    count = max(1, max_tokens // length)
    drawn = allowed[torch.randint(len(allowed), (count, length), generator=generator)]
    source = f"random token ids, seed {_SEED}{_in_windows(count, length)}"
    return Batches(batches=_batches(drawn.tolist(), model, batch_size), source=source, decode=None)


def check_runs(model: Any, batch: dict[str, Tensor]) -> None:
    """Run a model on the first few tokens of each window of a batch; or on the first row of images, sound or else.

    Raises:
        ModelError: If it cannot run on the batch.
    """
    import torch

    from normkit.measurement.running import rows, runner, tensors

    is_text = batch.keys() <= {"input_ids", "attention_mask", "decoder_input_ids"}
    # An image beside text has rows of its own.
    few = {key: value[:, :_SHORTEST_REST] for key, value in batch.items()} if is_text else batch
    few = rows(batch, 0) if not is_text and "input_ids" not in batch else few
    try:
        with torch.no_grad():
            runner(model, few)()
    except Exception as error:  # whatever the model's own code raises
        words = " ".join(str(error).split())
        if not is_text:
            shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in tensors(few))
            raise ModelError(
                f"{type(model).__name__} cannot be run on {shapes} ({type(error).__name__}: {clipped(words, 160)}); "
                "give input of the size or length that it was made for, through its own processor"
            ) from error
        raise ModelError(
            f"{type(model).__name__} cannot be run on token ids alone ({type(error).__name__}: {words}); "
            "give a language model or a text encoder"
        ) from error


def context_length(model: Any, tokenizer: Any) -> int | None:
    """The most tokens that a model takes at once, or None if nothing limits it."""
    from torch import nn

    config = getattr(model.config, "text_config", model.config)
    limits = [getattr(config, key, None) for key in ("max_position_embeddings", "n_positions", "max_seq_len")]
    limits.append(getattr(tokenizer, "model_max_length", None))
    for name, module in model.named_modules():
        # RoBERTa and its kin number positions from padding_idx + 1 on.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            limits.append(module.num_embeddings - module.padding_idx - 1)
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def _window_length(model: Any, tokenizer: Any, wanted: int | None) -> int:
    context = context_length(model, tokenizer)
    wanted = wanted or DEFAULT_LENGTH
    return wanted if context is None else min(wanted, context)


def _vocabulary(model: Any) -> int:
    # Imported here because it brings torch, and a wrong path is reported at once.
    from normkit.measurement.running import vocabulary

    size = vocabulary(model)
    if size is None:
        raise ModelError(
            f"{type(model).__name__} has no one embedding of tokens; give a language model or a text encoder"
        )
    return size


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    # A tokenizer warns about any text longer than the context.
    with quiet_libraries():
        return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    bare, framed = _ids(tokenizer, "a", special=False), _ids(tokenizer, "a", special=True)
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    return [], []


def _windows(
    ids: list[int], prefix: list[int], suffix: list[int], length: int, max_tokens: int
) -> tuple[list[list[int]], int]:
    """The windows, and how many of the ids they hold."""
    windows: list[list[int]] = []
    frame, used, budget = len(prefix) + len(suffix), 0, max_tokens
    while used < len(ids) and (budget > frame or not windows):
        part = ids[used : used + max(min(length, budget) - frame, 1)]
        if windows and len(part) + frame < _SHORTEST_REST:
            break
        windows.append([*prefix, *part, *suffix])
        used += len(part)
        budget -= len(windows[-1])
    return windows, used


def _in_windows(count: int, length: int) -> str:
    return f", in windows of {length}" if count > 1 else ""


def _batches(windows: list[list[int]], model: Any, batch_size: int) -> tuple[dict[str, Tensor], ...]:
    """Windows of one length together, at most `batch_size` of them."""
    import torch

    arguments = signatures.signature(model.forward).parameters
    batches, start = [], 0
    while start < len(windows):
        stop = start + 1
        while stop < len(windows) and stop < start + batch_size and len(windows[stop]) == len(windows[start]):
            stop += 1
        ids = torch.tensor(windows[start:stop])
        batch = {"input_ids": ids}
        if "attention_mask" in arguments:
            batch["attention_mask"] = torch.ones_like(ids)
        if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in arguments:
            batch["decoder_input_ids"] = _shifted(ids, model.config)
        batches.append(batch)
        start = stop
    return tuple(batches)


def _shifted(ids: Tensor, config: Any) -> Tensor:
    """The input from which a decoder predicts `ids`: its start token, then all ids but the last."""
    import torch

    candidates = (getattr(config, key, None) for key in ("decoder_start_token_id", "bos_token_id", "pad_token_id"))
    start = next((token for token in candidates if isinstance(token, int)), 0)
    return torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)


def batches_for(
    loaded: LoadedModel,
    words: str,
    name: str,
    *,
    is_own: bool,
    length: int | None,
    max_tokens: int,
    batch_size: int,
) -> Batches:
    """Batches for a model.

    The arguments are those of `from_text`. A text that is not the user's own gives way to token ids at random if the
    model has no tokenizer.

    Raises:
        InputError: If there is a text of the user and no tokenizer for it, or nothing of it can be used.
    """
    if loaded.tokenizer is None:
        if is_own:
            raise InputError(f"{loaded.name} has no tokenizer for the text {name}; add its files, or leave out --text")
        return from_random_ids(loaded.model, length=length, max_tokens=max_tokens, batch_size=batch_size)
    return from_text(
        words, name, loaded.model, loaded.tokenizer, length=length, max_tokens=max_tokens, batch_size=batch_size
    )
