"""The verdict on a module or function that no spec describes: batch norms, faulty norms, other maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from normkit import reference
from normkit.conventions.eps import eps_in
from normkit.conventions.gain import NO_GAIN
from normkit.errors import IdentificationError, NormkitError, ShapeError
from normkit.identification import conditioning, coupling, direction, formula, gating, maps, other_sizes, row_sizes
from normkit.identification.gating import Recover
from normkit.identification.maps import drawn
from normkit.identification.passport import Passport, Reading, without_spec
from normkit.identification.specimen import Specimen, UnrecognisedError, one_of
from normkit.spec import NormSpec
from normkit.text import dtype_name, percent

_BATCH_ROW = 32
"""Elements that share statistics, at least: with two, the length of a row tells little."""
_LARGEST_EPS = 0.1
_FEATURES_TRIED, _MOVED = 16, 1e-3
_RETURNED = 3
"""Number of outputs that are tried, of a function that returns several."""
_ROWS = 16
_SCALE = 4.0
"""Rows of this length are far from eps, and a row that is divided by v^2 is not lost beside a bias."""
_ROUNDS = 20
_SAME = 1e-5
"""Rounding to float32 leaves less; a number is one of bfloat16 by chance within it once in 400 times."""
_NUMBER, _NUMBERS = 5e-7, 0.9
"""Rounding of y * s to float32, and of y to a bias of 1; the share of other numbers that are so near to one of
float16 by chance is 1 %."""
_FITS = 1e-3
"""Another direction than that of a norm leaves 0.03 or more; rounding beside a bias leaves 1e-5."""
_STRAIGHT = 0.02
_IS_OTHER = 0.05


def verdict_without_spec(
    specimen: Specimen,
    shape: tuple[int, ...],
    generator: torch.Generator,
    seen: UnrecognisedError,
    recover: Recover,
) -> Passport:
    """Look again at something for which the search has found no spec, and name what it is.

    Args:
        specimen: The norm, its parameters as they are.
        shape: Of inputs that it takes.
        generator: Source of inputs.
        seen: What ended the search for a spec.
        recover: The search, for what is a norm once something is held constant.

    Raises:
        IdentificationError: If it returns several tensors, one of them a norm of its input.
    """
    match seen.verdict:
        case "undecidable":
            return without_spec("undecidable", seen.reason, **seen.readings)
        case "gated":
            return gating.two_inputs(specimen, shape, generator, seen.reason, recover)
        case "not a norm" if _overflows(specimen, shape, generator):
            if narrow := _narrow_rounding(specimen, shape, generator, recover, (torch.float16,)):
                return without_spec("norm", f"{seen.reason}, as numbers inside overflow in float16", **narrow)
    try:
        found = maps.plain_map(specimen, shape, generator)
    except UnrecognisedError:
        _refuse_several(specimen, shape, generator)
        return without_spec(seen.verdict, seen.reason)
    except NormkitError:
        return without_spec(seen.verdict, seen.reason)
    if found is not None and found.verdict in ("identity", "affine"):
        return running_batch_norm(specimen, shape, generator, recover) or found
    if found is not None:
        return found
    match seen.verdict:
        case "batch":
            # It couples samples in eval mode too.
            line = f"{seen.reason}, in eval mode too"
            shared = _shared_axes(specimen, shape, generator)
            if shared is None:
                return without_spec("batch", line)
            evidence, reading = _batch_conventions(specimen, shape, shared, "always", recover)
            return without_spec("batch", line, *evidence, batch=reading)
        case "norm":
            return _faulty_norm(specimen, shape, generator, seen, recover)
    return _no_norm(specimen, shape, generator, seen, recover)


def _no_norm(
    specimen: Specimen,
    shape: tuple[int, ...],
    generator: torch.Generator,
    seen: UnrecognisedError,
    recover: Recover,
    *lines: str,
) -> Passport:
    """The verdict on what is no norm of large rows: it may be one of ordinary rows, or one but for a power."""
    if large := row_sizes.large_rows(specimen, shape, generator, recover):
        return without_spec(
            "norm", f"for inputs of magnitude {specimen.precision.far:g} {seen.reason}", *lines, **large
        )
    return without_spec("not a norm", seen.reason, *lines, **degree_reading(specimen, shape, generator))


def running_batch_norm(
    specimen: Specimen, shape: Sequence[int], generator: torch.Generator, recover: Recover
) -> Passport | None:
    """The batch norm behind a map that is elementwise in eval mode, from its training mode; None if there is none."""
    if not specimen.has_running_statistics:
        return None
    training = specimen.in_mode(training=True)
    for parameter in training.parameters.values():
        # With a gain of 0 no input moves an output.
        parameter.fill_(1.0)
    try:
        shared = _shared_axes(training, shape, generator)
    except (ShapeError, UnrecognisedError):
        return None
    if shared is None or math.prod(shape[axis] for axis in shared) == 1:
        return None
    if 0 in shared:
        seen = "in training mode, changing one sample moves the others"
    else:
        seen = "in training mode, a sample is normalized by its own statistics"
    line = "in eval mode a straight line of each input, from running statistics"
    evidence, reading = _batch_conventions(training, shape, shared, "training", recover)
    in_eval = maps.affine_map(specimen, shape)
    lines = (seen, line, *in_eval.readings["kind"].evidence, *evidence)
    return replace(without_spec("batch", *lines, batch=reading), weight=in_eval.weight, bias=in_eval.bias)


def _shared_axes(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> tuple[int, ...] | None:
    """The axes along which one element moves others; None if it moves nothing."""
    reach = coupling.reach(specimen, shape, generator)
    return None if reach is None else tuple(axis for axis, size in enumerate(reach) if size > 1)


def _batch_conventions(
    specimen: Specimen, shape: Sequence[int], shared: tuple[int, ...], mode: str, recover: Recover
) -> tuple[tuple[str, ...], Reading]:
    """The conventions of a batch norm: all elements that share statistics are taken for one row of a norm."""
    own = tuple(axis for axis in range(len(shape)) if axis not in shared)
    sizes, elements = list(shape), math.prod(shape[axis] for axis in shared)
    if 0 in shared and elements < _BATCH_ROW:
        sizes[0] = shape[0] * math.ceil(_BATCH_ROW / elements)
    order = (*own, *shared)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    count, length = (math.prod(sizes[axis] for axis in axes) for axes in (own, shared))
    for parameter in specimen.parameters.values():
        # All rows get one gain and one bias.
        parameter.fill_(1.0)

    def of_rows(x: Tensor) -> Tensor:
        """The batch norm of rows (rows, length), in chunks of as many rows as it has channels."""
        chunks = []
        for rows in torch.split(x, count):
            filled = torch.cat([rows, rows[:1].expand(count - len(rows), -1)])
            y = specimen(filled.reshape([sizes[axis] for axis in order]).permute(inverse))
            chunks.append(y.permute(order).reshape(count, length)[: len(rows)])
        return torch.cat(chunks)

    passport = recover(Specimen(of_rows, dtype=specimen.dtype, device=specimen.device), (2, length))
    value: dict[str, Any] = {"axes": list(shared), "mode": mode}
    axes = ", ".join(map(str, shared))
    if passport is None or passport.spec is None:
        return (f"statistics over axes {axes}; no formula of a norm explains them",), Reading(value=value)
    # Gain and bias are the channels', not the rows'.
    spec = passport.spec.replace(**NO_GAIN.conventions())
    value["centred"] = spec.centring.is_full
    conventions = {"eps": spec.placement.conventions(spec.eps), "divisor": {"correction": spec.divisor.correction}}
    for reading, fields in conventions.items():
        if reading in passport.readings and reading not in passport.undecidable:
            value |= fields
    return (f"over axes {axes}, as rows: {spec}",), Reading(value=value)


def _faulty_norm(
    specimen: Specimen,
    shape: tuple[int, ...],
    generator: torch.Generator,
    seen: UnrecognisedError,
    recover: Recover,
) -> Passport:
    """The verdict on a map that does not grow with its input: it saturates, or is a norm that no spec describes."""
    with drawn(specimen, generator):
        saturates = formula.saturates(specimen, shape, generator)
    if saturates:
        line = "its output for small inputs has another direction than for large ones: it saturates"
        return _no_norm(specimen, shape, generator, seen, recover, line)
    readings = {**seen.readings, **coupling.time_reading(specimen, shape, generator, None)}
    try:
        rows = coupling.rows_of(specimen, shape, generator)
    except (UnrecognisedError, NormkitError):
        rows = None
    if rows is not None and "other sizes" not in readings:
        readings |= other_sizes.other_sizes(specimen, shape, rows.row)
    if rows is not None and rows.choices[0].are_last:
        readings |= direction.centring_readings(specimen, shape, generator)
        narrow = _narrow_rounding(specimen, shape, generator, recover)
        partial = {} if narrow else _partial_statistics(specimen, shape, generator)
        rescaled = {} if narrow or partial else _rescaled_eps(specimen, shape, generator)
        root = {} if narrow or partial or rescaled else row_sizes.approximate_root(specimen, shape, generator)
        readings = {**narrow, **partial, **rescaled, **root, **readings}
    return without_spec("norm", seen.reason, **readings)


def _overflows(specimen: Specimen, shape: tuple[int, ...], generator: torch.Generator) -> bool:
    """Whether rows of usual length leave with one length, though large ones leave as 0 or are not finite."""
    if specimen.dtype != torch.float32:
        return False
    x = torch.randn(_ROWS, *shape[1:], generator=generator).to(specimen.device)
    try:
        one, four, far = (specimen(scale * x).double() for scale in (1.0, _SCALE, specimen.precision.far))
    except (NormkitError, UnrecognisedError):
        return False
    is_lost = not bool(far.isfinite().all()) or not bool(far.any())
    return is_lost and bool((four - one).norm() < _IS_OTHER * one.norm())


def _narrow_rounding(
    specimen: Specimen,
    shape: tuple[int, ...],
    generator: torch.Generator,
    recover: Recover,
    dtypes: Sequence[torch.dtype] = reference.HALF,
) -> dict[str, Reading]:
    """Reading "rounding" of a norm that rounds to 16 bits on its way whatever it is given: the 16-bit dtype.

    Called in that dtype it has a formula. In float32 its outputs are off this by about a rounding of each element, and
    numbers of that dtype can be seen: its rows, times the gain or over s, or 1/s, s or s^2 - eps.
    """
    if specimen.dtype != torch.float32:
        return {}
    x = torch.randn(_ROWS, *shape[1:], generator=generator)
    plain = specimen.in_dtype(torch.float32)
    for parameter in plain.parameters.values():
        parameter.fill_(1.0)
    y = plain(x.to(specimen.device)).cpu().double()
    for dtype in dtypes:
        again = plain(x.to(dtype).float().to(specimen.device)).cpu()
        # With parameters of that dtype it may refuse to run.
        wide = Specimen(lambda x: plain(x.float()), dtype=dtype, device=specimen.device)
        passport = recover(specimen.in_dtype(dtype), shape) or recover(wide, shape)
        if passport is None or (spec := passport.spec) is None:
            continue
        normalized = reference.forward(x.double(), spec.replace(cast="late", output_dtype="input"))
        gain = 1.0 + spec.gain.offset if spec.has_weight else 1.0
        odd = y - 1.0 if spec.has_bias else y
        off = (odd - gain * normalized).square().mean().sqrt() / odd.square().mean().sqrt()
        # A mean that is rounded moves a row as a whole.
        rows, odd = normalized - normalized.mean(-1, keepdim=True), odd - odd.mean(-1, keepdim=True)
        factor = (odd * rows).sum(-1, keepdim=True) / rows.square().sum(-1, keepdim=True)
        left = (odd - factor * rows).square().mean().sqrt() / odd.square().mean().sqrt()
        scale = reference.statistics(x.double(), spec, eps := eps_in("float32", spec.eps)).scale * gain / factor
        numbers = [scale.reciprocal(), scale, scale.square() - eps]
        is_of_dtype = any(bool(((v - v.to(dtype).double()).abs() < _SAME * v.abs()).all()) for v in numbers)
        name, what = dtype_name(dtype), "its input" if torch.equal(y, again.double()) else "its rows"
        if left < _SAME and is_of_dtype:
            what = "its statistics"
        elif not torch.finfo(dtype).eps / 8 < off < torch.finfo(dtype).eps:
            continue
        if what == "its rows" and not _shows_numbers_of(dtype, x, (y - 1.0 if spec.has_bias else y) / gain, spec):
            continue
        line = (
            f"it rounds {what} to {name} whatever dtype it is given: its formula in {name} is {spec}"
            f"{', its eps undecided,' if 'eps' in passport.undecidable else ','} and in float32 "
        )
        return {"rounding": Reading(value=name, evidence=(f"{line}it is off that by {percent(float(off))}",))}
    return {}


def _shows_numbers_of(dtype: torch.dtype, x: Tensor, y: Tensor, spec: NormSpec) -> bool:
    """Whether outputs y of float32 are numbers of a 16-bit dtype, or are over the 1/s of their rows, in float32."""
    eps = eps_in("float32", spec.eps)
    scales = [reference.statistics(given.double(), spec, eps).scale for given in (x, x.to(dtype))]
    for v in (y, *(scale * y for scale in scales)):
        # Digits that a bias of 1 has rounded off are lost.
        is_number = (v - v.to(dtype).double()).abs() <= _NUMBER * (1 + v.abs())
        if float(is_number.double().mean()) > _NUMBERS:
            return True
    return False


def _partial_statistics(specimen: Specimen, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Reading]:
    """Reading "partial statistics" of a norm whose divisor leaves features out: the share of those tried that count."""
    n = shape[-1]
    tried = sorted({round(place * (n - 1) / _FEATURES_TRIED) for place in range(_FEATURES_TRIED + 1)})
    left_out = []
    with drawn(specimen, generator):
        x = torch.randn(tuple(shape), generator=generator).to(specimen.device, specimen.dtype)
        y = specimen(x)
        for feature in tried:
            grown, others = x.clone(), torch.arange(n) != feature
            grown[..., feature] = n * x.abs().amax(-1)
            moved = (specimen(grown) - y)[..., others].abs().amax() / y[..., others].abs().amax()
            left_out += [] if bool(moved > _MOVED) else [feature]
    if not left_out or left_out == tried:
        return {}
    line = f"its statistics leave features out: {len(left_out)} of {len(tried)} that were tried change no other output"
    share = (len(tried) - len(left_out)) / len(tried)
    return {"partial statistics": Reading(value=share, evidence=(f"{line}, such as feature {left_out[0]}",))}


def _rescaled_eps(specimen: Specimen, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Reading]:
    """Reading "rescaled eps" of a norm whose eps is too large for its rows to fit any formula."""
    with drawn(specimen, generator):
        for parameter in specimen.parameters.values():
            parameter.fill_(1.0)
        for centred in (False, True):
            spec = NormSpec(centre_numerator=centred, centre_statistics=centred)
            found = conditioning.rescaled_eps(specimen, spec, shape, generator)
            # More is no eps: a division by the largest element itself looks like an eps without limit.
            if found is not None and 0 < found < _LARGEST_EPS:
                line = conditioning.RESCALED_EPS.format(found)
                return {"rescaled eps": Reading(value=float(f"{found:.3g}"), evidence=(line,))}
    return {}


def _refuse_several(specimen: Specimen, shape: tuple[int, ...], generator: torch.Generator) -> None:
    """Ask for a call where one of several things that are returned is a norm of the input."""

    def at_index(index: int, run: Callable[..., object], x: Tensor) -> object:
        return one_of(run(x), index)

    for index in range(_RETURNED):
        one = specimen.adapted(partial(at_index, index))
        try:
            formula.check_kind(one, shape, generator)
            coupling.rows_of(one, shape, generator)
        except (UnrecognisedError, NormkitError):
            continue
        raise IdentificationError(
            f"the norm returns several things, and that at {index} is a norm of its input; "
            f"pass call=lambda norm, x: norm(x)[{index}]"
        )


def degree_reading(specimen: Specimen, shape: Sequence[int], generator: torch.Generator) -> dict[str, Reading]:
    """Reading "degree" of a map that turns a row as a norm does, but whose output grows or shrinks with the row.

    f(x) = g * (x - m) / s * s**degree + b with m and s of a norm: -3 where v**2 divides in place of its root, -1 where
    v does, 2 where the reciprocal root divides in place of the root. Nothing for anything else, a power of 1 included.
    """
    lengths = _SCALE * 2 ** (3 * torch.rand(_ROWS, *shape[1:-1], 1, generator=generator) - 1.5)
    x = lengths * torch.randn(_ROWS, *shape[1:], generator=generator)
    with drawn(specimen, generator):
        odd = (specimen(x.to(specimen.device)) - specimen(-x.to(specimen.device))).cpu().double() / 2
    rows, odd = x.double().flatten(0, -2), odd.flatten(0, -2)
    size = odd.square().mean(-1, keepdim=True).sqrt()
    if not bool(torch.isfinite(odd).all()) or not bool((size > 0).all()):
        return {}
    for centred in (True, False):
        spec = NormSpec(centre_numerator=centred, centre_statistics=centred, eps=0.0, has_weight=False, has_bias=False)
        factors = _factors(odd / size, reference.forward(rows, spec))
        if factors is None:
            continue
        # log |factor * size| over log(scale) is a straight line, its slope the degree.
        scale = reference.statistics(rows, spec, 0.0).scale.log().flatten()
        length = (factors.abs() * size).log().flatten()
        scale, length = scale - scale.mean(), length - length.mean()
        degree = float((scale * length).sum() / scale.square().sum())
        residual = float((length - degree * scale).square().mean().sqrt())
        if residual < _STRAIGHT and min(abs(degree), abs(degree - 1)) > _IS_OTHER:
            divides = "standard deviation" if centred else "root mean square"
            line = f"a row gets the direction that a norm gives it, but as its length its {divides} to the power "
            line += f"{degree:.2f}, not 0"
            return {"degree": Reading(value=round(degree, 2), evidence=(line,))}
    return {}


def _factors(odd: Tensor, normalized: Tensor) -> Tensor | None:
    """The c in odd = c * gain * normalized, one for each row, with one gain for each feature; None if nothing fits."""
    gain = torch.ones_like(normalized[:1])
    factors = gain[:, :1]
    for _ in range(_ROUNDS):
        along = gain * normalized
        factors = (odd * along).sum(-1, keepdim=True) / along.square().sum(-1, keepdim=True)
        along = factors * normalized
        gain = (odd * along).sum(0, keepdim=True) / along.square().sum(0, keepdim=True)
    residual = float((odd - factors * gain * normalized).square().mean().sqrt())
    return factors if residual < _FITS else None
