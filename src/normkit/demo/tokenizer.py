"""The twins' tokenizer: one token a byte, its id the byte's value, no merges, no special tokens."""

from __future__ import annotations

from typing import Any


def byte_tokenizer(window: int) -> Any:
    """A `transformers` tokenizer over the 256 byte values; any text round-trips.

    Args:
        window: The longest input of the models it is for, in bytes.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=window, clean_up_tokenization_spaces=False
    )


def _byte_alphabet() -> list[str]:
    """The character that GPT-2's byte-level tokenizer writes for each byte.

    Printable Latin-1 stands for itself; the others take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
