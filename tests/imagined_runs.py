"""Made-up training runs of an inspected model: at its own norms, blocks and attentions, with numbers by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from normkit.inspection.result import Inspection
from normkit.measurement.training import Answer, Origin, Parameter, Quantity, Series, Training

QUESTIONS = (
    "Is a norm wrong?",
    "Is the learning rate too high, and where?",
    "Would clipping have held it, and at which norm?",
    "Is the initialisation off?",
)


def series(quantity: Quantity, path: str, steps: Sequence[int], value: Callable[[int], float]) -> Series:
    return Series(quantity=quantity, path=path, steps=tuple(steps), values=tuple(value(step) for step in steps))


def parameter(path: str, **changes: object) -> Parameter:
    ours = Parameter(
        path=path,
        kind="weight",
        site="",
        block=None,
        size=4096,
        dtype="float32",
        trained=True,
        gradient_steps=437,
        learning_rate=1e-3,
        weight_decay=0.1,
        rms=0.02,
        gradient_rms=3e-4,
        update_ratio=2e-3,
        first_update_ratio=1.2e-2,
    )
    return dataclasses.replace(ours, **changes)


def parameters(inspection: Inspection) -> tuple[Parameter, ...]:
    """An embedding, and each block's gains, biases and one weight."""
    found = [parameter("transformer.wte.weight", kind="embedding")]
    for site in inspection.sites:
        shared = {"site": site.path, "block": site.block, "weight_decay": 0.0, "size": 64}
        found += [
            parameter(f"{site.path}.weight", kind="gain", rms=1.02, update_ratio=4e-4, **shared),
            parameter(f"{site.path}.bias", kind="bias of a norm", rms=1e-3, update_ratio=0.2, **shared),
        ]
    for block in inspection.blocks:
        ratio = 2e-3 * (1 + block.index)
        found.append(parameter(f"{block.path}.mlp.c_fc.weight", block=block.index, update_ratio=ratio))
    return tuple(found)


def calm(inspection: Inspection, *, steps: int = 437, every: int = 25) -> Training:
    """A run in which nothing moves out of its range."""
    whole, reports = range(steps), range(0, steps, every)
    found = [
        series("loss", "", whole, lambda step: 2 + 3.5 * math.exp(-step / 90) + 0.05 * math.sin(1.7 * step)),
        series("gradient norm", "", whole, lambda step: 0.4 + 2 * math.exp(-step / 60) + 0.1 * math.cos(2.3 * step)),
    ]
    for place, block in enumerate(inspection.blocks, 1):
        found += [
            series("stream rms", block.path, reports, lambda step, n=place: 0.12 * n * (1 + step / 400)),
            series("activation gradient", block.path, reports, lambda step, n=place: 1e-5 * (3 - n / 4) / (1 + step)),
            series("update ratio", f"{block.path}.mlp.c_fc.weight", reports, lambda _, n=place: 2e-3 * n),
        ]
    for attention in inspection.attentions:
        found.append(series("logit bound", attention.path, reports, lambda step: 4.0 + step / 60))
    for place, site in enumerate(inspection.sites, 1):
        found += [
            series("gain mean", site.path, reports, lambda step, n=place: 1 + 1e-4 * n * step / 10),
            series("input rms", site.path, reports, lambda step, n=place: 0.1 * n + step / 1000),
            series("kurtosis", site.path, reports, lambda step, n=place: 3 + n * step / 2000),
            series("eps share", site.path, reports, lambda step, n=place: max(0.0, 0.4 - 0.03 * n - step / 500)),
        ]
    return Training(
        steps=steps,
        every=every,
        reports=len(reports),
        reason="end of the run",
        reason_step=steps - 1,
        ranks=1,
        observer="observer verified: 3 known shards in, largest error 2.1e-7 of the float64 truth",
        remarks=(),
        optimizers=("AdamW, learning rate 1e-3, betas 0.9 and 0.95, 38 parameters in 2 groups",),
        series=tuple(found),
        parameters=parameters(inspection),
        vocabulary=256,
        answers=(
            Answer(question=QUESTIONS[0], verdict="no", detail="All norms compute their specs to 1.3 machine eps."),
            Answer(question=QUESTIONS[1], verdict="no", detail="Updates stay below 0.012 of a parameter's rms."),
            Answer(question=QUESTIONS[2], verdict="no", detail="No gradient norm was 6 deviations over its median."),
            Answer(question=QUESTIONS[3], verdict="no", detail="The first loss, 5.50, is that of chance, 5.55."),
        ),
    )


def spike(inspection: Inspection, *, began: int = 409, noticed: int = 412) -> Training:
    """A weight moves too far, then the gradient, then the loss."""
    run, steps = calm(inspection), noticed + 25
    path = f"{inspection.blocks[-1].path}.mlp.c_fc.weight"

    def struck(each: Series) -> Series:
        late = {"loss": (noticed, 4.5), "gradient norm": (began + 1, 30.0), "logit bound": (began, 21.0)}
        if each.quantity == "update ratio" and each.path == path:
            late["update ratio"] = (began, 11.0)
        at, factor = late.get(each.quantity, (steps, 1.0))
        places = [place for place, step in enumerate(each.steps) if step < steps]
        more = () if each.quantity in ("loss", "gradient norm") else (began,)
        known = [(each.steps[place], each.values[place]) for place in places if each.steps[place] not in more]
        pairs = sorted(known + [(step, each.values[-1]) for step in more])
        return dataclasses.replace(
            each,
            steps=tuple(step for step, _ in pairs),
            values=tuple(value * (factor if step >= at else 1.0) for step, value in pairs),
        )

    changed = tuple(
        dataclasses.replace(each, update_ratio=0.132, gradient_rms=0.21) if each.path == path else each
        for each in run.parameters
    )
    return dataclasses.replace(
        run,
        steps=steps,
        reason="loss spike",
        reason_step=noticed,
        series=tuple(map(struck, run.series)),
        parameters=changed,
        origin=Origin(
            kind="update", step=began, path=path, detail="update ratio 0.132, 31 deviations above its median of 0.0120"
        ),
        answers=(
            Answer(question=QUESTIONS[0], verdict="no", detail="All norms compute their specs to 1.3 machine eps."),
            Answer(
                question=QUESTIONS[1],
                verdict="yes",
                detail="One step changed the weight by 13.2 % of its rms; the usual is 1.2 %.",
                places=(path,),
            ),
            Answer(
                question=QUESTIONS[2],
                verdict="yes",
                detail="The gradient norm rose from 0.41 to 12.3 one step later: a limit of 1.0 would have held it.",
            ),
            Answer(question=QUESTIONS[3], verdict="unknown", detail="Step 0 was not seen: the run was resumed."),
        ),
        first_change=(
            "Lower the learning rate of this weight's group by 3 or more, or lengthen the warm-up.",
            "Clip the gradient norm at 1.0.",
        ),
        confirm="Resume from step 400 with the changed rate: the update ratio stays below 0.02 past step 420.",
    )


def broken(inspection: Inspection) -> Training:
    """Not a number from the first step on."""
    run = calm(inspection, steps=1)
    site = inspection.sites[0].path
    lost = tuple(dataclasses.replace(each, values=(math.nan,)) for each in run.series)
    found = (*lost, Series(quantity="non-finite", path=site, steps=(0,), values=(4096.0,)))
    detail = "4,096 of 4,096 outputs are NaN; every input is finite"
    return dataclasses.replace(
        run,
        reports=1,
        reason="non-finite values",
        reason_step=0,
        series=found,
        parameters=tuple(
            dataclasses.replace(each, gradient_rms=math.nan, update_ratio=math.nan, first_update_ratio=math.nan)
            for each in run.parameters
        ),
        origin=Origin(kind="non-finite in the forward pass", step=0, path=site, detail=detail),
        answers=tuple(
            Answer(question=question, verdict="yes" if number == 0 else "unknown", detail="No number was finite.")
            for number, question in enumerate(QUESTIONS)
        ),
        first_change=("Look at the gain of the first norm: it is NaN in the checkpoint.",),
    )


def bare(inspection: Inspection) -> Training:
    """Nothing but a remark: the watch came too late to see a step."""
    return dataclasses.replace(
        calm(inspection, steps=1),
        steps=0,
        reports=0,
        reason="asked",
        reason_step=0,
        observer="",
        remarks=("Registered after torch.compile: the hooks were ignored; call nk.watch before it.",),
        optimizers=(),
        series=(),
        parameters=(),
        vocabulary=0,
        answers=(),
    )


def short(inspection: Inspection) -> Training:
    """Three points each, some of them infinite, on several processes."""
    run = calm(inspection, steps=3, every=1)
    endless = {"gradient norm", "logit bound", "kurtosis"}
    found = tuple(
        dataclasses.replace(each, values=(*each.values[:2], math.inf)) if each.quantity in endless else each
        for each in run.series
    )
    return dataclasses.replace(run, series=found, ranks=2, reason="asked")


def hostile(inspection: Inspection, text: str) -> Training:
    """A run in which every string is an attack."""
    run = spike(inspection)
    assert run.origin is not None
    return dataclasses.replace(
        run,
        reason=text,
        observer=text,
        remarks=(text,),
        optimizers=(text,),
        series=tuple(dataclasses.replace(each, path=text) if each.path else each for each in run.series),
        parameters=tuple(dataclasses.replace(each, path=text, dtype=text) for each in run.parameters),
        origin=dataclasses.replace(run.origin, path=text, detail=text),
        answers=tuple(dataclasses.replace(a, question=text, detail=text, places=(text,)) for a in run.answers),
        first_change=(text, text),
        confirm=text,
    )
