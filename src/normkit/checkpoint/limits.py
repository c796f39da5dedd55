"""The limits of a passed verification, in words."""

from __future__ import annotations

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

ONE_WAY = "what stands beside a batch norm is seen in one run of its class: another way through the model is not"
"""A further limit where batch norms were folded."""
