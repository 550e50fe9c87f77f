"""The table of contenders: sections, rows and goals. No TensorFlow.

The goals are what trainer_kit has set itself, for a machine with two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.benchmarks.results import CONTROL, MOST_ROUNDS, ROUNDS, Contender, Section

HAND_TRAIN = "scripts.benchmarks.by_hand:train"
HAND_SAVE = "scripts.benchmarks.by_hand:save"
HAND_REPLICAS = "scripts.benchmarks.by_hand:train_replicas"
OUR_TRAIN = "scripts.benchmarks.ours:train"
OUR_EVALUATE = "scripts.benchmarks.ours:evaluate"
OUR_SAVE = "scripts.benchmarks.ours:save"
KERAS_FIT = "scripts.benchmarks.others:keras_fit"
MODEL_GARDEN = "scripts.benchmarks.others:model_garden"
PREDICT = "scripts.benchmarks.predictions:predict"
FIRST_STEP = "scripts.benchmarks.commands:reach_first_step"
RUN_TO_END = "scripts.benchmarks.commands:run_to_end"

TITLES = {
    "dense": "dense net 64-32-10, batch 32",
    "conv": "convolutional net on 32x32 images, batch 32",
    "transformer": "transformer, two blocks on 16 tokens, batch 32, Adam",
}
RESOLVED: dict[str, Any] = {"rounds": ROUNDS, "most_rounds": MOST_ROUNDS, "windows": 4}


def _with_control(first: Contender, *others: Contender) -> list[Contender]:
    """Returns the rows, with the first one a second time as the control."""
    return [first, Contender(CONTROL, first.run, first.options, skip=first.skip), *others]


def _peers(net: str, epoch: int, garden_goal: float) -> list[Contender]:
    """Returns the alternatives to trainer_kit, and Model Garden's task on trainer_kit's engine."""
    fit = {"net": net, "epoch": epoch, "source": "pipeline"}
    garden = {"net": net, "loop": 100}
    ours = {**garden, "is_ours": True}
    return [
        Contender("keras_fit_1", KERAS_FIT, fit),
        Contender("keras_fit_100", KERAS_FIT, {**fit, "at_once": 100}),
        # As it is shipped: mirrored over one device.
        Contender("model_garden", MODEL_GARDEN, {**garden, "strategy": "mirrored"}),
        Contender("model_garden_off", MODEL_GARDEN, {**garden, "strategy": "off"}),
        Contender("ours_garden", MODEL_GARDEN, ours, {"model_garden": garden_goal}),
    ]


def _dense() -> Section:
    long = {"net": "dense", "loop": 1000}
    short = {"net": "dense", "loop": 100}
    one_thread = {"executor": "single_threaded"}
    # Each window has a checkpoint.
    intervals = {"checkpoint_interval": 2000, "summary_interval": 1000}
    everything = {**long, "source": "arrays", "trainer": intervals, "actions": 10}
    fused = {**long, "trainer": {"fuse_steps": 100}}
    rows = _with_control(
        Contender("by_hand", HAND_TRAIN, long),
        Contender("ours", OUR_TRAIN, long, {"by_hand": 0.97}),
        Contender("ours_arrays", OUR_TRAIN, {**long, "source": "arrays"}),
        Contender("ours_single_threaded", OUR_TRAIN, {**long, "runtime": one_thread}),
        Contender("by_hand_100", HAND_TRAIN, short),
        Contender("ours_100", OUR_TRAIN, short, {"by_hand_100": 0.95, "keras_fit_100": 1.0}),
        Contender("fused_by_hand", "scripts.benchmarks.by_hand:train_fused", {**long, "fuse": 100}),
        Contender("ours_everything", OUR_TRAIN, everything, {"ours": 0.93}),
        Contender("ours_fused", OUR_TRAIN, fused, {"by_hand": 3.0, "fused_by_hand": 0.9}),
        *_peers("dense", epoch=1000, garden_goal=2.0),
    )
    title = f"{TITLES['dense']}, loops of 1,000"
    return Section(name="dense", title=title, contenders=rows, **RESOLVED)


def _larger(net: str) -> Section:
    options = {"net": net, "loop": 100}
    rows = _with_control(
        Contender("by_hand", HAND_TRAIN, options),
        Contender("ours", OUR_TRAIN, options, {"by_hand": 0.98}),
        *_peers(net, epoch=100, garden_goal=1.0),
    )
    return Section(name=net, title=f"{TITLES[net]}, loops of 100", contenders=rows, **RESOLVED)


def _recipes() -> Section:
    rows = []
    for recipe in ("groups", "accumulation", "average"):
        options = {"recipe": recipe, "loop": 1000}
        base = f"{recipe}_by_hand"
        rows.append(Contender(base, "scripts.benchmarks.recipes:by_hand", options, to=base))
        rows.append(Contender(recipe, "scripts.benchmarks.recipes:ours", options, {base: 0.95}))
    title = "two optimizers, four micro-batches, an average of the weights; dense, loops of 1,000"
    return Section(name="recipes", title=title, contenders=_with_control(*rows), **RESOLVED)


def _fit(net: str, epoch: int, goal: float, more: Iterable[Contender] = ()) -> Section:
    options = {"net": net, "epoch": epoch}
    rows = _with_control(
        Contender("keras", KERAS_FIT, options),
        Contender("ours", KERAS_FIT, {**options, "is_ours": True}, {"keras": goal}),
        *more,
    )
    title = f"Model.fit on arrays, epochs of {epoch:,} steps, {TITLES[net]}"
    return Section(name=f"fit_{net}", title=title, contenders=rows, rounds=3)


def _fit_dense() -> Section:
    long = {"net": "dense", "epoch": 1000}
    fused = {**long, "is_ours": True, "fuse_steps": 100}
    rows = [
        Contender("ours_fused", KERAS_FIT, fused, {"keras": 12.0}),
    ]
    # A callback that reads each batch's loss, and epochs that are as short as those of the digits.
    variants = {"batch": {**long, "reads_batches": True}, "short": {"net": "dense", "epoch": 57}}
    for variant, options in variants.items():
        base = f"keras_{variant}"
        ours = {**options, "is_ours": True}
        rows.append(Contender(base, KERAS_FIT, options))
        rows.append(Contender(f"ours_{variant}", KERAS_FIT, ours, {base: 1.0}))
    return _fit("dense", 1000, 5.0, rows)


def _replicas(net: str, loop: int) -> Section:
    options = {"net": net, "loop": loop, "replicas": 2}
    rows = _with_control(
        Contender("by_hand", HAND_REPLICAS, options),
        Contender("ours", OUR_TRAIN, options, {"by_hand": 0.97}),
    )
    title = f"two replicas on virtual CPUs, {TITLES[net]}"
    return Section(name=f"replicas_{net}", title=title, contenders=rows)


def _evaluation(name: str, examples: int) -> Section:
    options = {"net": "dense", "examples": examples}
    rows = _with_control(
        Contender("by_hand", "scripts.benchmarks.by_hand:evaluate", options),
        Contender("ours", OUR_EVALUATE, options, {"by_hand": 0.95}),
        Contender("ours_arrays", OUR_EVALUATE, {**options, "source": "arrays"}),
    )
    title = f"evaluations of {examples:,} examples in batches of 32, dense"
    return Section(name=name, title=title, contenders=rows, unit="batches/s")


def _predictions(net: str, row_count: int, goal: float) -> Section:
    options = {"net": net, "rows": row_count}
    rows = _with_control(
        Contender("keras", PREDICT, options),
        Contender("ours", PREDICT, {**options, "is_ours": True}, {"keras": goal}),
    )
    title = f"predictions for {row_count:,} rows, {TITLES[net]}"
    return Section(
        name=f"predict_{net}", title=title, contenders=rows, unit="rows/s", seconds=2, rounds=3
    )


# The programs do not train the same. Model Garden's `mock` feeds zeros to one dense unit, which is
# in its favour, and has no optimizer, so sgd is named for it. The loop by hand reads random data.
DIGITS = ("-m", "trainer_kit.train", "--experiment=digits_mlp", "--mode=train")
MOCK = ("-m", "official.nlp.train", "--experiment=mock", "--mode=train")
LOOP_BY_HAND = ("-m", "scripts.benchmarks.by_hand")
ONE_STEP_LOOPS = "--params_override=trainer.steps_per_loop=1,trainer.summary_interval=1"
OPTIMIZER = "trainer.optimizer_config"
SGD = (
    f",trainer.train_steps=5,{OPTIMIZER}.optimizer.type=sgd,{OPTIMIZER}.learning_rate.type=constant"
)
MISTAKE = "--params_override=trainer.train_stepz=5"
TRAINER_KIT = str(Path(sys.executable).with_name("trainer-kit"))


def _startup() -> Section:
    mock = {"program": (*MOCK, ONE_STEP_LOOPS + SGD)}
    digits = {"program": (*DIGITS, ONE_STEP_LOOPS)}
    theirs = {"command": (sys.executable, *MOCK, MISTAKE), "code": 1}
    ours = {"command": (sys.executable, *DIGITS, MISTAKE), "code": 2}
    rows = _with_control(
        Contender("model_garden", FIRST_STEP, mock),
        Contender("by_hand", FIRST_STEP, {"program": LOOP_BY_HAND}),
        Contender("ours", FIRST_STEP, digits, {"model_garden": 0.85}),
        Contender("mistake_model_garden", RUN_TO_END, theirs),
        Contender("mistake", RUN_TO_END, ours, to="mistake_model_garden"),
        Contender("list", RUN_TO_END, {"command": (TRAINER_KIT, "list")}),
    )
    title = "from a cold start to the first step, to the message of a mistake, or to the end"
    return Section(name="startup", title=title, contenders=rows, unit="s", rounds=1, seconds=0)


def _growth(
    name: str,
    title: str,
    points: Mapping[int, Mapping[str, Any]],
    *,
    by_hand: str = HAND_TRAIN,
    ours: str = OUR_TRAIN,
    goals: Mapping[str, float] | None = None,
    skips: bool = False,
    **fields: Any,
) -> Section:
    """Returns a section with the loop by hand and ours at each point of a quantity that grows.

    Args:
      name, title: See Section.
      points: The point -> the options of its contenders.
      by_hand, ours: The functions of the contenders.
      goals: The goals of ours at the last point.
      skips: Whether the point is the number of steps before the measurement.
      **fields: Further fields of the section.
    """
    rows = []
    for point, options in points.items():
        skip = point if skips else 0
        base = f"by_hand_{point}"
        rows.append(Contender(base, by_hand, options, to=base, skip=skip))
        rows.append(Contender(f"ours_{point}", ours, options, to=base, skip=skip))
    rows[-1] = replace(rows[-1], goals=goals or {})

    fields = {"unit": "us/step", **fields}
    return Section(
        name=name, title=title, contenders=_with_control(*rows), is_growth=True, **fields
    )


def _growth_sections() -> list[Section]:
    dense = {"net": "dense", "loop": 100}
    long = {"net": "dense", "loop": 1000}
    by_steps = dict.fromkeys((10_000, 1_000_000), long)
    by_metrics = {count: {**dense, "metrics": count} for count in (1, 10, 30, 100)}
    by_replicas = {count: {**dense, "replicas": count} for count in (1, 2, 4)}
    by_actions = {count: {**dense, "actions": count} for count in (0, 1, 10, 50)}

    # Loops take about as long at each size.
    loops = {10: 1000, 100: 200, 1000: 100, 5000: 20}
    by_variables = {
        count: {"net": "many", "size": count, "loop": loop} for count, loop in loops.items()
    }

    loops = {10_000: 1000, 100_000: 500, 1_000_000: 100, 10_000_000: 10, 100_000_000: 2}
    by_size = {size: {"net": "wide", "size": size, "loop": loop} for size, loop in loops.items()}
    saved = {size: {"net": "wide", "size": size} for size in loops}

    flat = {"ours_10000": 1.03}
    linear = {"by_hand_5000": 1.1}
    save: dict[str, Any] = {"by_hand": HAND_SAVE, "ours": OUR_SAVE, "unit": "ms", "seconds": 0}
    return [
        _growth("steps", "a step, by steps already done, dense", by_steps, goals=flat, skips=True),
        _growth("variables", "a step, by variables", by_variables, goals=linear),
        _growth("parameters", "a step, by parameters, three dense layers", by_size),
        _growth("metrics", "a step, by metrics, dense, loops of 100", by_metrics),
        _growth("replicas", "a step, by replicas, dense", by_replicas, by_hand=HAND_REPLICAS),
        _growth("actions", "a step, by actions, dense, loops of 100", by_actions),
        _growth("save_stall", "how long a save stops the loop, by parameters", saved, **save),
    ]


SECTIONS = (
    _dense(),
    _larger("conv"),
    _larger("transformer"),
    _recipes(),
    _fit_dense(),
    _fit("conv", 100, 1.0),
    _fit("transformer", 100, 1.0),
    _replicas("dense", 100),
    _replicas("conv", 20),
    _replicas("transformer", 20),
    _evaluation("evaluation_short", 1797),
    _evaluation("evaluation_long", 32_000),
    _predictions("dense", 50_000, 1.2),
    _predictions("conv", 5_000, 1.0),
    _startup(),
    *_growth_sections(),
)
