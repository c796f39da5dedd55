"""The exceptions that normkit raises on bad input.

    NormkitError (ValueError)      everything this package raises because of what it was given
    |-- SpecError                  a NormSpec that contradicts itself, or an unknown convention
    |-- ShapeError (RuntimeError)  sizes do not fit; torch raises RuntimeError here, so this is one too
    |-- DtypeError (RuntimeError)  a dtype that cannot be normalized; RuntimeError for the same reason
    |-- UseError (RuntimeError)    tensors that cannot be used so; RuntimeError for the same reason
    |-- KindError (TypeError)      an argument that is no tensor, number or shape; torch raises TypeError
    |-- IdentificationError        a norm that cannot be called, or a passport that cannot be used
    |-- ModelError                 a model or checkpoint that cannot be loaded or run
    |-- LostRankError              another process of a distributed run has ended
    `-- InputError                 a text, an option or a file that cannot be used

Every message says what was expected, what was given and what to do, on one line.
"""

from __future__ import annotations


class NormkitError(ValueError):
    """Base of everything normkit raises on bad input; catch this one."""


class SpecError(NormkitError):
    """A NormSpec contradicts itself, or names a convention that does not exist."""


class ShapeError(NormkitError, RuntimeError):
    """Sizes do not fit together; the message holds both."""


class DtypeError(NormkitError, RuntimeError):
    """A dtype that a norm cannot work in; the message lists what can."""


class UseError(NormkitError, RuntimeError):
    """Tensors cannot be used together, or not in this way: two devices, or `out` although a gradient is needed."""


class KindError(NormkitError, TypeError):
    """An argument has the wrong Python type: it is no tensor, number or shape."""


class IdentificationError(NormkitError):
    """A norm cannot be called as it must be to identify it, or a passport cannot be used."""


class ModelError(NormkitError):
    """A model or checkpoint could not be read, built or run."""


class LostRankError(NormkitError):
    """Another process of the run has ended early: nothing more can be computed, finished work is kept."""


class InputError(NormkitError):
    """A text, an option or a file that cannot be used."""
