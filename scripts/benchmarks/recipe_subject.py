"""The section of the benchmark that compares training recipes with loops by hand that do the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from scripts.benchmarks.race import Contender
from scripts.benchmarks.subject import SMALL_STEPS, Subject, at_least

MODULE, LOOP = "scripts.benchmarks.recipes", 1000
LABELS = {
    "groups": "two optimizers, one for each layer",
    "accumulation": "four micro-batches to a batch",
    "average": "a moving average of the weights",
}


def recipes() -> Subject:
    """Returns the step rate of what recipes need beyond one optimizer."""
    contenders = [one for recipe in LABELS for one in _by_hand_and_ours(recipe)]
    contenders.append(
        Contender(
            name="accumulation_at_once",
            label="four micro-batches to a batch: by hand, in the memory of all four",
            run=f"{MODULE}:by_hand",
            options={"recipe": "accumulation_at_once", "loop": LOOP},
            to="accumulation_by_hand",
        )
    )
    first = contenders[0]
    again = replace(first, name="again", label=f"{first.label}, again", to=first.name)
    return Subject(
        name="recipes",
        title="several optimizers, micro-batches, averages and a GAN, batch 32, loops of 1,000",
        unit="steps/s",
        contenders=(first, again, *contenders[1:], *_gan()),
        plan=SMALL_STEPS,
        equals=(first.name, "again"),
        quick_rounds=1,
    )


def _by_hand_and_ours(recipe: str) -> Iterator[Contender]:
    hand, options = f"{recipe}_by_hand", {"recipe": recipe, "loop": LOOP}
    yield Contender(name=hand, label=f"{LABELS[recipe]}: by hand", run=f"{MODULE}:by_hand", options=options, quick=True)
    yield _ours(recipe, LABELS[recipe], f"{MODULE}:ours", options)


def _ours(recipe: str, label: str, run: str, options: dict[str, Any]) -> Contender:
    hand = f"{recipe}_by_hand"
    return Contender(
        name=recipe,
        label=f"{label}: ours",
        run=run,
        options=options,
        to=hand,
        goals=(at_least(0.95, hand),),
        quick=True,
    )


def _gan() -> Iterator[Contender]:
    options, label = {"loop": LOOP}, "a GAN in turns"
    yield Contender(
        name="gan_by_hand", label=f"{label}: by hand", run=f"{MODULE}:gan_by_hand", options=options, quick=True
    )
    yield _ours("gan", label, f"{MODULE}:gan", options)
