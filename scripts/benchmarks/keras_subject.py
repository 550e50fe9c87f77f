"""The sections of the table on `Model.fit`: by Keras, and on trainer_kit's engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from scripts.benchmarks.race import Contender, Plan
from scripts.benchmarks.results import Goal
from scripts.benchmarks.subject import LOOP, Subject, at_least

RUN = "scripts.benchmarks.keras_door:fit"
EPOCH, SHORT = {"dense": 1000, "conv": 100, "transformer": 100}, 57  # steps; the second is that of the digits
FUSE = 100  # steps in one program
_FUSED = {"fuse_steps": FUSE}


def fits(net: str, title: str) -> Subject:
    """Returns the step rate of fit for a net, with a checkpoint after each epoch in trainer_kit."""
    steps = EPOCH[net]
    first = _row("keras", f"Keras, epochs of {steps:,} steps", net, steps, door=False, quick=True)
    rows = [
        first,
        replace(first, name="again", label=f"{first.label}, again", to="keras"),
        _row("ours", f"ours, epochs of {steps:,} steps", net, steps, at_least(5.0 if net == "dense" else 1.0, "keras")),
    ]
    if net == "dense":
        rows += [
            _row("keras_100", f"Keras, steps_per_execution={LOOP}", net, steps, door=False, at_once=LOOP),
            _row("ours_fused", f"ours, fuse_steps={FUSE}", net, steps, at_least(12.0, "keras"), options=_FUSED),
            _row("keras_batch", "Keras, a callback in each batch", net, steps, door=False, to="", by_batch=True),
            _row("ours_batch", "ours, the same", net, steps, at_least(1.0, "keras_batch"), by_batch=True),
            _row("keras_short", f"Keras, epochs of {SHORT} steps", net, SHORT, door=False, to=""),
            _row("ours_short", f"ours, epochs of {SHORT} steps", net, SHORT, at_least(1.0, "keras_short")),
        ]
    return Subject(
        name=f"fit_{net}",
        title=f"Model.fit on arrays, {title}",
        unit="steps/s",
        contenders=tuple(rows),
        plan=Plan(rounds=3, windows=2, seconds=0.6, warm_up=0.7),
        equals=("keras", "again"),
    )


def _row(
    name: str, label: str, net: str, steps: int, *goals: Goal, to: str | None = None, quick: bool = False, **given: Any
) -> Contender:
    """Returns a row, which is compared with its goal or with Keras's fit."""
    options = {"net": net, "steps": steps, "door": True, **given}
    compared = to if to is not None else goals[0].to if goals else "" if name == "keras" else "keras"
    return Contender(
        name=name, label=label, run=RUN, options=options, to=compared, goals=goals, quick=quick or bool(goals)
    )
