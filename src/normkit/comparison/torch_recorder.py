"""Records a torch model: `record` to a file while a block runs, `recorded` on one batch in memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.overrides import TorchFunctionMode

from normkit.comparison.recording import RecordedNorm, Recording
from normkit.errors import InputError
from normkit.identification.finder import PARAMETERS_PER_FEATURE, forward_arguments, may_be_norm
from normkit.identification.sharding import is_distributed, whole
from normkit.identification.sites import is_within
from normkit.identification.state import hooked, undisturbed
from normkit.identification.tracing import NORM_FUNCTIONS, first_output, first_tensor, norm_arguments
from normkit.measurement.running import arguments, evaluating, fitted, runner, token_ids, token_mask

_SAMPLES = 16
"""Samples of a norm that normalizes whole samples, such as images."""
_OUTPUTS = 64
"""Rows of the model's output: one may have a quarter of a million numbers."""
_HEADS = 4
"""Linear maps at the end of a run among which heads are looked for."""
_LINEAR_MAPS = {F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__}
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Names by which torch's wrappers hold what they wrap."""


@contextmanager
def record(model: nn.Module, path: str | Path, *, rows: int = 512) -> Iterator[None]:
    """Record what enters and leaves each norm of a model, while the block runs, to one file.

    A module counts as a norm here if it has as few parameters as one, its output has the shape of its input, and an
    element of its output depends on the other elements of the row; so do calls of torch's norm functions. Where a norm
    is called with a residual, that is recorded too. Compiled models run uncompiled inside the block. The file is
    written at its end, whole or not at all; if the block raises, nothing is written. Parameters and rows that are
    spread over processes are gathered: all processes enter the block, and the first one writes the file.

    Args:
        model: The model; nothing of it is changed.
        path: The file, named `*.safetensors`; its folder is made.
        rows: Tokens that are kept: the first of the first calls, with every head. Where a norm's rows are no tokens, so
            many rows.

    Raises:
        InputError: If rows is less than 1, no norm was called, or the file cannot be written.

    Example:
        >>> import tempfile
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with record(model, f"{folder}/run.safetensors"):
        ...         y = model(torch.randn(16, 4))
        ...     recording = Recording.read(f"{folder}/run.safetensors")
        >>> {name: tuple(norm.input.shape) for name, norm in recording.norms.items()}
        {'1': (16, 8)}
    """
    with _recording(model, rows) as recorder:
        yield
    found = recorder.recording(Path(path).stem)
    if not found.norms:
        raise InputError("expected a call of the model inside `with record(...)`; no norm of it was called")
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank()):
        found.write(path)


def recorded(
    model: nn.Module, batch: Any, *, rows: int = 512, name: str = "", spans: Mapping[str, int | None] | None = None
) -> Recording:
    """Run a model on one batch, in evaluation mode, and return what `record` would write.

    Args:
        model: The model; it is left as it was.
        batch: As for `inspect`. Token ids are given as the model names its first argument.
        rows: As for `record`.
        name: Name of the model; that of its class by default.
        spans: Path of a norm -> trailing axes of its rows, or None where it normalizes whole samples, for norms whose
            rows are not what their module or function says, else the last axis.

    Raises:
        InputError: If rows is less than 1, or the model takes no such arguments.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        >>> recorded(model, torch.randn(16, 4)).outputs.shape
        torch.Size([16, 8])
    """
    given = fitted(model, arguments(model, batch))
    with torch.no_grad(), evaluating(model), _recording(model, rows, spans) as recorder:
        runner(model, given)()
    return recorder.recording(name or type(model).__name__)


@contextmanager
def _recording(model: nn.Module, rows: int, spans: Mapping[str, int | None] | None = None) -> Iterator[_Recorder]:
    if rows < 1:
        raise InputError(f"rows must be at least 1, got {rows}")
    recorder = _Recorder(model, rows, spans or {})
    with hooked(recorder.hooks()), torch.compiler.set_stance("force_eager"), recorder:
        yield recorder


@dataclass
class _Place:
    """The calls of one norm so far."""

    module: nn.Module | None
    """None for a function."""
    parameters: Mapping[str, Any]
    """The arguments of a function."""
    calls: list[tuple[Tensor, Tensor, Tensor | None]]
    """Rows of input, output and residual."""


@dataclass
class _Entered:
    """The rows that a norm was called on."""

    rows: Tensor
    residual: Tensor | None
    is_named: bool
    """The residual was given by that name."""
    x: Tensor
    span: int | None


class _Recorder(TorchFunctionMode):
    """Keeps rows of what enters and leaves each norm; as a mode it sees the norms that are called as functions."""

    def __init__(self, model: nn.Module, rows: int, spans: Mapping[str, int | None]) -> None:
        super().__init__()
        self._model, self._rows, self._spans = model, rows, spans
        self._places: dict[str, _Place] = {}
        self._order: list[str] = []
        self._tokens: list[tuple[int, ...]] = []
        self._outputs: list[Tensor] = []
        self._heads: list[Tensor] = []
        # Path of the module, what the map takes and makes, and whether no norm is called after it.
        self._maps: list[tuple[str, Any, Any, bool]] = []
        self._more_heads: dict[str, list[Tensor]] = {}
        self._runs = 0
        # Which tokens of this run are kept, (B, T); None where there are no tokens.
        self._kept: Tensor | None = None
        self._entered: dict[str, _Entered] = {}
        self._frames: list[tuple[str, bool, Counter[str]]] = [("", False, Counter())]

    def hooks(self) -> Iterator[Any]:
        """Hooks on all modules of the model."""
        yield self._model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for name, module in self._model.named_modules():
            path = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
            is_norm = module is not self._model and may_be_norm(module)
            yield module.register_forward_pre_hook(partial(self._enter, path, is_norm), with_kwargs=True)
            yield module.register_forward_hook(partial(self._leave, path, is_norm))
        yield self._model.register_forward_hook(self._end)

    def _begin(self, _: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        batch: dict[Any, Any] = {**dict(enumerate(given)), **named}
        ids, mask = token_ids(batch), token_mask(batch)
        del self._frames[1:]
        self._kept = None
        if ids is not None:
            counted = torch.ones_like(ids, dtype=torch.bool) if mask is None or mask.shape != ids.shape else mask
            missing = self._rows - sum(map(len, self._tokens))
            self._kept = (counted & (counted.flatten().cumsum(0).view(ids.shape) <= missing)).cpu()
            chosen = zip(ids.cpu(), self._kept, strict=True)
            self._tokens += [tuple(row[kept].tolist()) for row, kept in chosen if bool(kept.any())]

    def _end(self, _: nn.Module, _given: object, output: Any) -> None:
        if isinstance(output, Mapping):
            output = tuple(output[key] for key in sorted(output, key=lambda key: key != "logits"))
        y = first_output(output)
        missing = _OUTPUTS - sum(map(len, self._outputs))
        if y is not None and y.dim() > 1 and missing > 0:
            self._outputs.append(self._picked(_gathered(y), 1, missing)[:missing])
            seen = Counter[str]()
            for place, (path, x, made, is_last) in enumerate(self._maps, 1):
                # Between the head and the output there may be a scale, a softcap or a cast, or another map.
                makes = _are_rows(made) and made.shape[:-1] == y.shape[:-1]
                if _are_rows(x) and makes and not is_distributed(x) and (is_last or _makes(made, y)):
                    rows = self._picked(x, 1, missing)[:missing]
                    seen[path] += 1
                    key = f"{path or 'of the model'}#{seen[path]}" if seen[path] > 1 else path or "of the model"
                    self._more_heads.setdefault(key, []).append(rows)
                    if place == len(self._maps) and made.shape == y.shape:
                        self._heads.append(rows)
        self._maps = []
        self._runs += 1

    def _enter(
        self, path: str, is_norm: bool, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._frames.append((path, is_norm or self._frames[-1][1], Counter()))
        tensors = [each for each in (*given, *named.values()) if _are_rows(each)] if is_norm else []
        if not tensors:
            return
        beside = dict(zip((each.name for each in forward_arguments(module)), given, strict=False)) | named
        is_named = _are_rows(beside.get("residual"))
        second = beside["residual"] if is_named else tensors[1] if len(tensors) > 1 else None
        sizes = getattr(module, "normalized_shape", None)
        span = self._spans.get(path, len(sizes) if isinstance(sizes, tuple) else 1)
        self._before(path, tensors[0], second, span, is_named=is_named)

    def _leave(self, path: str, is_norm: bool, module: nn.Module, _given: object, output: Any) -> None:
        # A call that raised never came here: its frame, and any below it, are dropped.
        while len(self._frames) > 1 and self._frames.pop()[0] != path:
            continue
        if is_norm:
            self._after(path, output, module, {})

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _LINEAR_MAPS:
            y = function(*args, **kwargs)
            # The tensors are the model's own until the end of its run; the last ones stay.
            self._maps = [*self._maps[1 - _HEADS :], (self._frames[-1][0], first_tensor(args, kwargs), y, True)]
            return y
        parent, is_inside, made = self._frames[-1]
        if is_inside or (name := NORM_FUNCTIONS.get(function)) is None:
            return function(*args, **kwargs)
        made[name] += 1
        path = f"{parent}:{name}" + (f"#{made[name]}" if made[name] > 1 else "")
        given = norm_arguments(name, args, kwargs)
        span = self._spans.get(path, len(given["normalized_shape"]) if "normalized_shape" in given else None)
        self._before(path, first_tensor(args, kwargs), None, span, is_named=False)
        y = function(*args, **kwargs)
        self._after(path, y, None, given)
        return y

    def _before(self, path: str, x: Any, second: Any, span: int | None, *, is_named: bool) -> None:
        """Copy the input: a norm may overwrite it."""
        if not _are_rows(x):
            return
        residual = second if _are_rows(second) and second.shape == x.shape else None
        held = self._places.get(path)
        missing = self._rows - (sum(len(call[0]) for call in held.calls) if held else 0)
        with torch.no_grad():
            rows = self._picked(_gathered(x), span, missing)
            beside = None if residual is None else self._picked(_gathered(residual), span, missing)
        if len(rows):
            self._entered[path] = _Entered(rows, beside, is_named, x, span)

    def _after(self, path: str, output: Any, module: nn.Module | None, parameters: Mapping[str, Any]) -> None:
        """Keep what a call that was seen to begin has returned, if it has the input's shape."""
        if (entered := self._entered.pop(path, None)) is None:
            return
        x, y = entered.x, output[0] if isinstance(output, tuple) and output else output
        if is_distributed(x) and isinstance(y, Tensor) and not is_distributed(y):
            split: Any = x
            y = type(split).from_local(y, split.device_mesh, split.placements)
        if not (_are_rows(y) and y.shape == x.shape):
            return
        # A square linear map looks like a norm until it is tried.
        self._maps = [(where, given, made, is_last and where == path) for where, given, made, is_last in self._maps]
        with torch.no_grad():
            left = self._picked(_gathered(y), entered.span, len(entered.rows))
        # A second input that is no residual gates or steers; a norm that adds it returns the sum too.
        is_added = entered.is_named or (isinstance(output, tuple) and len(output) > 1)
        call = (entered.rows, left, entered.residual if is_added else None)
        self._places.setdefault(path, _Place(module, parameters, [])).calls.append(call)
        if not self._runs:
            self._order.append(path)

    def _picked(self, x: Tensor, span: int | None, missing: int) -> Tensor:
        """Copies of rows on the CPU: the tokens that are kept, in their order, with every head; else the first rows."""
        if span is None:
            return x.detach()[: min(missing, _SAMPLES)].cpu().clone()
        leading = tuple(x.shape[: x.dim() - span])
        rows = x.detach().reshape(-1, *x.shape[x.dim() - span :])
        places = None if self._kept is None else token_major(leading, self._kept)
        return (rows[: max(missing, 0)] if places is None else rows[places.to(rows.device)]).cpu().clone()

    def recording(self, name: str) -> Recording:
        """The recording; all processes come here, as parameters are gathered."""
        found = {path: norm for path, place in self._places.items() if (norm := _norm(place)) is not None}
        # If a norm has modules inside it, the outermost is the norm.
        norms = {
            path: norm
            for path, norm in found.items()
            if not any(path != outer and is_within(path, outer) for outer in found)
        }
        return Recording(
            norms=norms,
            name=name,
            runtime=f"torch {torch.__version__}",
            tokens=tuple(self._tokens),
            outputs=torch.cat(self._outputs) if self._outputs else None,
            head=torch.cat(self._heads) if self._heads else None,
            heads={path: torch.cat(rows) for path, rows in self._more_heads.items()},
            order=tuple(path for path in self._order if path in norms),
        )


def _norm(place: _Place) -> RecordedNorm | None:
    """The norm with its parameters; None if the module is none."""
    inputs, outputs, residuals = zip(*place.calls, strict=True)
    x, y = torch.cat(inputs), torch.cat(outputs)
    residual = None
    if any(part is not None for part in residuals):
        # The first call of some models has no residual, the others have one.
        dtype = next(part.dtype for part in residuals if part is not None)
        parts = (
            torch.zeros_like(rows, dtype=dtype) if part is None else part
            for part, rows in zip(residuals, inputs, strict=True)
        )
        residual = torch.cat([*parts])
    calls = tuple(map(len, inputs))
    if place.module is None:
        parameters = _parameters(place.parameters, x)
        return RecordedNorm(input=x, output=y, residual=residual, calls=calls, **parameters)
    with whole(place.module):
        if not _mixes(place.module, x):
            return None
        held: dict[str, Any] = dict(place.module.named_parameters(recurse=False))
        if held.keys().isdisjoint(("weight", "bias")):
            # Ports have names of their own.
            vectors = [each for each in held.values() if each.dim() == 1]
            held = dict(zip(("weight", "bias"), vectors, strict=False))
        return RecordedNorm(input=x, output=y, residual=residual, calls=calls, **_parameters(held, x))


def _parameters(held: Mapping[str, Any], rows: Tensor) -> dict[str, Tensor]:
    """Copies of the weight and the bias that have one number for each feature, flat."""
    parts = {key: held.get(key) for key in ("weight", "bias")}
    return {
        key: part.detach().cpu().flatten().clone()
        for key, part in parts.items()
        if isinstance(part, Tensor) and part.shape == rows.shape[1:] and not part.is_meta
    }


def token_major(leading: tuple[int, ...], kept: Tensor) -> Tensor | None:
    """Numbers of the rows whose token is kept, token after token; None where the rows are no tokens.

    The leading axes may be (B, T, ...), (B, H, T) or (B * T, ...).
    """
    batch, tokens = kept.shape
    places = torch.arange(math.prod(leading))
    if leading[:2] == (batch, tokens):
        places = places.view(leading)
    elif len(leading) == 3 and (leading[0], leading[2]) == (batch, tokens):
        places = places.view(leading).transpose(1, 2)
    elif leading[:1] == (batch * tokens,):
        places = places.view(batch, tokens, *leading[1:])
    else:
        return None
    return places[kept].flatten()


def _makes(made: Tensor, y: Tensor) -> bool:
    """Whether what a linear map makes is the output, or one of two parts of it."""
    return made.shape[:-1] == y.shape[:-1] and y.shape[-1] in (made.shape[-1], 2 * made.shape[-1])


def _gathered(x: Any) -> Tensor:
    """A tensor whose parts are spread over processes, as one."""
    whole_tensor: Tensor = x.full_tensor() if is_distributed(x) else x
    return whole_tensor


def _mixes(module: nn.Module, rows: Tensor) -> bool:
    """Whether it has few parameters and the first element of a row moves others, or it takes no row alone."""
    if sum(parameter.numel() for parameter in module.parameters()) > PARAMETERS_PER_FEATURE * rows[0].numel():
        return False
    row = rows[:1].clone()
    moved = row.clone()
    # The step has the size of the row: a smaller one moves nothing beside a massive activation.
    moved.view(-1)[0] += 1 + row.abs().max()
    try:
        with torch.no_grad(), undisturbed():
            here, there = (module(each.to(next(module.parameters(), each).device)) for each in (row, moved))
            return bool((here.view(-1)[1:] != there.view(-1)[1:]).any())
    except Exception:  # a foreign module may refuse in any way
        return True


def _are_rows(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
