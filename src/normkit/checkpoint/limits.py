"""The limits of a passed verification, in words: of any, and of each operation. `--help` says them: torch stays out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LIMITS = (
    "SRC is taken as it is: that it is what its authors published is not checked",
    "the certificate is not signed: whoever can write SRC and DST can make all three anew",
    "sentences in the certificate (reasons, remarks) are not compared, only what they stand beside",
    "hidden files are neither copied nor looked at",
    "code that comes with a model is not copied and never run: what is proved is proved of the stock class",
    "an adapter that was trained on SRC does not fit DST",
    "runtimes other than transformers may read other files or keys: none of them was asked",
)
"""The limits of a passed verification."""

_ROUNDED = "how far the rounding of weights moves answers is not in the files: --logits measures it"
_MEAN = "a mean that rounding leaves in the sums is seen by RMSNorms: --logits measures what it moves"
OF_OPERATIONS: Mapping[str, str] = {
    **dict.fromkeys(("gain", "bias", "final"), _ROUNDED),
    **dict.fromkeys(("centre", "rms"), _MEAN),
    "value": "that the weights of an attention sum to one is read from the family's file, and not computed",
    "exponent": "no weight loses a bit; what a runtime rounds between norm and matrix is its own",
    "migrate": "any positive scales pass: whether they help a quantizer is not proved",
    "scale": "that float16 holds what the model computes was seen on one text, or not at all",
    "rotate": "any orthogonal matrix passes: whether it helps a quantizer is not proved; nor is how far rounding moves "
    "answers, which --logits measures",
    "unoffset": "that the other class computes the same follows from the family's file: --logits runs both",
    "batchnorm": "what stands beside a batch norm is seen in one run of its class: another way through the model "
    "is not",
}
"""The statements about an operation that verifying does not prove beyond that."""


def by_limit() -> list[str]:
    """The further limits of all operations, with the operations that each is of."""
    return [
        f"{', '.join(name for name in OF_OPERATIONS if OF_OPERATIONS[name] == said)}: {said}"
        for said in dict.fromkeys(OF_OPERATIONS.values())
    ]


def limits_of(operations: Iterable[str]) -> tuple[str, ...]:
    """The further limits of some operations, each said once."""
    return tuple(dict.fromkeys(OF_OPERATIONS[name] for name in operations))
