"""The sections of the table: their contenders, durations and goals.

A goal is a ratio to another row. Those here are what trainer_kit has set itself, for a machine with two cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from scripts.benchmarks import keras_subject, recipe_subject
from scripts.benchmarks.race import Contender, Plan
from scripts.benchmarks.results import MOST_ROUNDS, ROUNDS, Goal
from scripts.benchmarks.subject import BY_HAND, LOOP, OURS, SMALL_STEPS, Subject, at_least, by_hand, ours

OTHERS, TORCH, SAVES = "scripts.benchmarks.others", "scripts.benchmarks.torch_lightning", "scripts.benchmarks.saves"
FUSE = 100  # steps in one program
TITLES = {
    "dense": "dense net 64-32-10, batch 32",
    "conv": "convolutional net on 32x32 images, batch 32",
    "transformer": "transformer, two blocks on 16 tokens, batch 32, Adam",
}
EPOCH = {"dense": 1000, "conv": 100, "transformer": 100}  # steps of Keras' fit between two turns
GARDEN_GOALS = {"dense": 2.0, "conv": 1.0, "transformer": 1.0}  # of Model Garden as shipped
SHORT, LONG = 57 * 32 - 27, 1000 * 32  # examples of an evaluation; the first is that of the digits


def peers(net: str, to: str) -> Iterator[Contender]:
    """Yields the alternatives to trainer_kit."""
    for at_once in (1, LOOP):
        yield Contender(
            name=f"keras_fit_{at_once}",
            label=f"Keras fit, steps_per_execution={at_once}",
            run=f"{OTHERS}:keras_fit",
            options={"net": net, "epoch": EPOCH[net], "at_once": at_once},
            to=to,
        )
    for name, label, strategy in (
        ("model_garden", "Model Garden as shipped (mirrored over one device)", "mirrored"),
        ("model_garden_off", "Model Garden, strategy off", "off"),
    ):
        options = {"net": net, "loop": LOOP, "strategy": strategy}
        yield Contender(name=name, label=label, run=f"{OTHERS}:model_garden", options=options, to=to)
    yield Contender(
        name="ours_garden",
        label="the same task of Model Garden on our engine",
        run=f"{OTHERS}:model_garden_on_ours",
        options={"net": net, "loop": LOOP},
        to="model_garden",
        goals=(at_least(GARDEN_GOALS[net], "model_garden"),),
        quick=True,
    )
    yield Contender(
        name="lightning",
        label="PyTorch Lightning",
        run=f"{TORCH}:fit",
        options={"net": net, "epoch": LOOP},
        to=to,
        needs=("torch", "lightning"),
        fresh=True,
    )


def fused() -> Iterator[Contender]:
    """Yields the dense net with many steps in one program of XLA, by hand and in trainer_kit."""
    yield Contender(
        name="fused_by_hand",
        label=f"by hand, {FUSE} steps in one XLA program",
        run=f"{BY_HAND}:train_fused",
        options={"net": "dense", "loop": 1000, "fuse": FUSE},
        to="by_hand",
    )
    yield ours(
        "ours_fused",
        f"ours, fuse_steps={FUSE}",
        "dense",
        at_least(3.0),
        at_least(0.9, "fused_by_hand"),
        loop=1000,
        trainer={"fuse_steps": FUSE},
    )


def dense() -> Subject:
    """Returns the step rate of the dense net, in all forms."""
    hundred = {"net": "dense", "loop": 100}
    contenders = [
        *by_hand({"net": "dense", "loop": 1000}, "by hand, loops of 1,000"),
        ours("ours", "ours, loops of 1,000", "dense", at_least(0.97), loop=1000),
        ours("ours_arrays", "ours with an ArraySource", "dense", loop=1000, task={"source": "arrays"}),
        Contender(
            name="by_hand_100", label="by hand, loops of 100", run=f"{BY_HAND}:train", options=hundred, to="by_hand"
        ),
        ours(
            "ours_100",
            "ours, loops of 100",
            "dense",
            at_least(0.95, "by_hand_100"),
            at_least(1.0, "keras_fit_100"),
            to="by_hand_100",
        ),
        *fused(),
        *peers("dense", "by_hand_100"),
    ]
    return Subject(
        name="dense",
        title=TITLES["dense"],
        unit="steps/s",
        contenders=tuple(contenders),
        plan=SMALL_STEPS,
        quick_rounds=2,
    )


ONE_THREAD = {"executor": "single_threaded"}
SIZES = (10_000, 30_000, 100_000)  # parameters in three dense layers


def executors() -> Subject:
    """Returns the step rate of dense nets of three sizes under each executor."""
    contenders = []
    for size in SIZES:
        base, task = f"default_{size}", {"size": size}
        label = f"{size:,} parameters, executor="
        row = ours(base, f"{label}default", "wide", loop=1000, to="", task=task)
        contenders.append(row)
        if size == SIZES[0]:
            contenders.append(replace(row, name="again", label=f"{row.label}, again", to=base))
        name = f"single_threaded_{size}"
        name_shown = f"{label}single_threaded"
        contenders.append(ours(name, name_shown, "wide", loop=1000, to=base, task=task, runtime=ONE_THREAD))
    return Subject(
        name="executors",
        title="three dense layers, batch 32, by executor",
        unit="steps/s",
        contenders=tuple(contenders),
        plan=SMALL_STEPS,
        equals=(f"default_{SIZES[0]}", "again"),
        quick_rounds=0,
    )


def named_tensors() -> Subject:
    """Returns the step rate with tensors that are exposed, and with one that a summary asks for."""
    trainer = {"summaries": ({"tensor": "logits_0", "type": "histogram"},)}
    plain = ours("plain", "no tensor is exposed", "dense", loop=1000, to="")
    ten: dict[str, Any] = {"loop": 1000, "to": "plain", "task": {"exposed": 10}}
    contenders = (
        replace(plain, quick=True),
        replace(plain, name="again", label=f"{plain.label}, again", to="plain", quick=True),
        ours("ten_exposed", "ten are exposed, and none is asked for", "dense", at_least(0.98, "plain"), **ten),
        ours("one_asked", "one of ten is a histogram", "dense", at_least(0.9, "plain"), trainer=trainer, **ten),
    )
    return Subject(
        name="named_tensors",
        title="named tensors, dense net, loops of 1,000",
        unit="steps/s",
        contenders=contenders,
        plan=SMALL_STEPS,
        equals=("plain", "again"),
        quick_rounds=0,
    )


def larger(net: str, title: str) -> Subject:
    """Returns the step rate of the convolutional net or the transformer."""
    contenders = [
        *by_hand({"net": net, "loop": LOOP}),
        ours("ours", "ours", net, at_least(0.98)),
        ours("ours_single_threaded", "ours, executor=single_threaded", net, runtime=ONE_THREAD),
        *peers(net, "by_hand"),
    ]
    plan = Plan(rounds=ROUNDS, most_rounds=MOST_ROUNDS, windows=4, seconds=0.6)
    return Subject(name=net, title=title, unit="steps/s", contenders=tuple(contenders), plan=plan)


def replicas(net: str) -> Subject:
    """Returns the step rate on two logical CPUs."""
    loop = 100 if net == "dense" else 20
    options = {"net": net, "loop": loop, "replicas": 2}
    contenders = [
        *by_hand(options, "by hand, strategy.run in the loop", "train_replicas"),
        ours("ours", "ours", net, at_least(0.97), loop=loop, runtime={"virtual_cpus": 2}),
    ]
    return Subject(
        name=f"replicas_{net}",
        title=f"two replicas on virtual CPUs, {net}",
        unit="steps/s",
        contenders=tuple(contenders),
        plan=Plan(rounds=2, windows=3, seconds=0.6),
        quick_rounds=int(net == "dense"),
    )


def everything(net: str, loop: int, checkpoint_interval: int, seconds: float) -> Subject:
    """Returns the step rate with all usual features on, against trainer_kit's loop without them."""
    arrays: dict[str, Any] = {"task": {"source": "arrays"}}
    bare = ours("bare", "ours, bare: no checkpoints, summaries, progress, actions", net, loop=loop, bare=True, **arrays)
    contenders = (
        replace(bare, to="", quick=True),
        replace(bare, name="again", label="ours, bare, again", to="bare", quick=True),
        Contender(
            name="everything",
            label=f"ours, everything on, a checkpoint every {checkpoint_interval:,} steps",
            run=f"{OURS}:train_with_everything",
            options={"net": net, "loop": loop, "checkpoint_interval": checkpoint_interval, **arrays},
            to="bare",
            goals=(at_least(0.93, "bare"),),
            quick=True,
        ),
    )
    return Subject(
        name=f"everything_{net}",
        title=f"asynchronous checkpoints, summaries, progress, ten actions (evaluations do not count), {net}",
        unit="steps/s",
        contenders=contenders,
        plan=Plan(rounds=3, windows=2, seconds=seconds, warm_up=2.5),
        equals=("bare", "again"),
    )


def evaluation(name: str, examples: int) -> Subject:
    """Returns the rate of whole evaluations, each from the start of the data to the numbers on the host."""
    options = {"net": "dense", "examples": examples}
    contenders = [*by_hand(options, function="evaluate")]
    run, in_graph = f"{OURS}:evaluate", {"eval_tf_while_loop": True}
    rows: list[tuple[str, str, tuple[Goal, ...], dict[str, Any]]] = [
        ("ours", "ours", (at_least(0.95),), {}),
        ("ours_arrays", "ours with an ArraySource", (), {"source": "arrays"}),
        ("ours_in_graph", "ours, aggregating in one graph", (), {"aggregates": True, "trainer": in_graph}),
    ]
    if examples <= SHORT:  # a long one takes seconds, of a table that should not take many minutes
        rows.append(("ours_aggregating", "ours, aggregating step by step", (), {"aggregates": True}))
    for row, label, goals, more in rows:
        given = {**options, **more}
        contenders.append(
            Contender(name=row, label=label, run=run, options=given, to="by_hand", goals=goals, quick=bool(goals))
        )
    peer = f"{OTHERS}:model_garden_evaluate"
    contenders.append(Contender(name="model_garden", label="Model Garden", run=peer, options=options, to="by_hand"))
    return Subject(
        name=name,
        title=f"evaluations of {-(-examples // 32):,} batches, dense",
        unit="batches/s",
        contenders=tuple(contenders),
        plan=Plan(rounds=2, windows=3, seconds=0.5, warm_up=0.5),
    )


def stalls(net: str = "heavy", size: int = 32) -> Subject:
    """Returns the time that a save stops the loop."""
    options = {"net": net, "size": size}
    run = f"{SAVES}:save"
    background, main_thread = {**options, "background": True}, {**options, "background": False}
    contenders = (
        *(replace(one, run=f"{SAVES}:save_by_hand") for one in by_hand(options, "by hand, tf.train.CheckpointManager")),
        Contender(name="main_thread", label="ours, on the main thread", run=run, options=main_thread, to="by_hand"),
        Contender(
            name="ours", label="ours, default: in the background", run=run, options=background, to="by_hand", quick=True
        ),
    )
    return Subject(
        name="save_stall",
        title="how long the loop stands still for a save, 32 variables of 4 MiB",
        unit="ms",
        contenders=contenders,
        plan=Plan(rounds=2, windows=4, seconds=0, warm_up=0),
        scale=1000.0,
        quick_rounds=0,
    )


def resumes(net: str = "heavy", size: int = 32) -> Subject:
    """Returns the time from an imported TensorFlow to the first step."""
    new, resumed = ({"net": net, "size": size, "resumes": resumes} for resumes in (False, True))
    run = f"{SAVES}:start"
    contenders = (
        *(replace(one, run=f"{SAVES}:start_by_hand") for one in by_hand(resumed, "by hand, restored")),
        Contender(name="new_by_hand", label="by hand, new", run=f"{SAVES}:start_by_hand", options=new, to="by_hand"),
        Contender(name="ours", label="ours, resumed", run=run, options=resumed, to="by_hand", quick=True),
        Contender(name="new", label="ours, new", run=run, options=new, to="ours"),
    )
    return Subject(
        name="resume",
        title="from an imported TensorFlow to the first step, 32 variables of 4 MiB",
        unit="ms",
        contenders=contenders,
        plan=Plan(rounds=2, windows=1, seconds=0, warm_up=0),
        scale=1000.0,
        quick_rounds=0,
    )


def seeks() -> Subject:
    """Returns how long it takes to reach a position of the data."""
    contenders = tuple(
        Contender(name=name, label=label, run=f"{SAVES}:seek", options={"position": position}, to=to)
        for name, label, position, to in (
            ("near", "to step 1,000", 1_000, ""),
            ("again", "to step 1,000, again", 1_000, "near"),
            ("far", "to step 1,000,000", 1_000_000, "near"),
        )
    )
    return Subject(
        name="seek",
        title="from an ArraySource to the batch at a step",
        unit="ms",
        contenders=contenders,
        plan=Plan(rounds=2, windows=5, seconds=0, warm_up=0),
        equals=("near", "again"),
        scale=1000.0,
        quick_rounds=0,
    )


def subjects() -> list[Subject]:
    """Returns all subjects, in the order of the table."""
    return [
        dense(),
        *(larger(net, TITLES[net]) for net in ("conv", "transformer")),
        executors(),
        named_tensors(),
        recipe_subject.recipes(),
        *(keras_subject.fits(net, title) for net, title in TITLES.items()),
        *(replicas(net) for net in ("dense", "conv", "transformer")),
        everything("dense", 1000, 10_000, 2.5),
        everything("conv", 100, 100, 3.5),
        evaluation("evaluation_short", SHORT),
        evaluation("evaluation_long", LONG),
        stalls(),
        resumes(),
        seeks(),
    ]
