"""Logging, progress bars and warnings of other libraries: off for a while, then as they were."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries(*, downloads: bool = False) -> Iterator[None]:
    """Keep the messages of transformers and huggingface_hub off the terminal.

    Args:
        downloads: Leave the Hub's download bars on.
    """
    from huggingface_hub.utils import logging as hub_logging
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as model_logging

    level, hub_level = model_logging.get_verbosity(), hub_logging.get_verbosity()
    bars, hub_bars = model_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    model_logging.set_verbosity(logging.CRITICAL)
    hub_logging.set_verbosity(logging.CRITICAL)
    model_logging.disable_progress_bar()  # the Hub's bars with it
    if downloads and hub_bars:
        enable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        model_logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if bars:
            model_logging.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
        else:
            disable_progress_bars()
