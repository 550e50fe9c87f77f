"""Advises in one line which setting would make a run faster, from its time account. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from trainer_kit.telemetry.report_lines import format_number
from trainer_kit.telemetry.time_ledger import TimeAccount, percent

# Seconds. In a shorter step, the host's work for each op is a large part.
_SHORT_STEP = 0.5e-3
# Seconds. One thread runs a shorter step faster than several threads do.
_TINY_STEP = 0.2e-3
# Seconds. A loop costs the host about half a millisecond in addition to its steps.
_SHORT_LOOP = 5e-3
# A run keeps the value that it was started with.
_NEW_RUN = ", in a new model_dir"
_FUSE = "trainer.fuse_steps=20"
# The share of the start above which no other advice is given.
_START_SHARE = 0.5
# For each activity, the share above which it is worth a change, how its time was spent, and what to
# try.
_ADVICE: dict[str, tuple[float, str, str]] = {
    "input": (
        0.2,
        "waiting for data",
        (
            "`trainer-kit doctor data` shows which function is slow; try larger batches, maps with"
            " num_parallel_calls=tf.data.AUTOTUNE in build_inputs, task.train_data.cache=true if it"
            " reads that, or runtime.dataset_num_private_threads"
        ),
    ),
    "evaluation": (
        0.2,
        "in evaluations",
        (
            "raise trainer.validation_interval, or evaluate in another process with"
            " --mode=continuous_eval"
        ),
    ),
    "save": (0.1, "saving", "raise trainer.checkpoint_interval"),
    "callbacks": (
        0.1,
        "in actions",
        "raise trainer.steps_per_loop, so that they are called less often",
    ),
    "report": (0.1, "between loops", "raise trainer.steps_per_loop, so that there are fewer loops"),
}


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run that the advice depends on.

    Attributes:
      steps_per_loop: The trainer's setting, in steps.
      to_compile: The settings to change so that steps are compiled in one loop. Empty if they are.
      is_fused: Whether several steps are one program.
      can_fuse: Whether steps could be fused, but are not.
      can_use_one_thread: Whether runtime.executor could be single_threaded, but is not.
      is_on_cpu: Whether all devices are CPUs, on which low precision is not faster.
    """

    steps_per_loop: int
    to_compile: tuple[str, ...] = ()
    is_fused: bool = False
    can_fuse: bool = False
    can_use_one_thread: bool = False
    is_on_cpu: bool = False


def advise_on_time(times: TimeAccount, settings: RunSettings) -> str:
    """Returns the activity whose time could be saved and the setting to try.

    Returns "" for a run without steps.

    Args:
      times: The account of the run's time.
      settings: The run's settings.
    """
    if not times.steps:
        return ""
    if times.share("start") >= _START_SHARE:
        return (
            f"start-up dominates: {percent(times.share('start'))} of {times.wall:.1f} s passed"
            " before the first step was done; for advice on what to change, make a longer run"
        )

    # The activities whose share is large enough to be worth a change.
    large_shares: dict[str, float] = {}
    for name, (least_share, _, _) in _ADVICE.items():
        share = times.share(name)
        # The first evaluation is traced, so that only later ones show what could be saved.
        if name == "evaluation":
            share = 0.0
            if times.evaluations > 1 and times.wall:
                later_seconds = times.seconds.get(name, 0.0) - times.first_evaluation_seconds
                seconds_per_evaluation = later_seconds / (times.evaluations - 1)
                share = seconds_per_evaluation * times.evaluations / times.wall
        if share >= least_share:
            large_shares[name] = share
    if not large_shares:
        return _advise_on_steps(times, settings)

    name = max(large_shares, key=large_shares.__getitem__)
    _, activity, advice = _ADVICE[name]
    seconds = times.seconds[name] + times.seconds.get("step", 0.0)
    are_steps_short = seconds < _SHORT_STEP * times.steps
    if name == "input" and settings.can_fuse and are_steps_short:
        advice = f"steps are short: try {_FUSE}, which takes many batches at once{_NEW_RUN}"
    share_text = percent(times.share(name))
    return f"{name}: {share_text} of the time was spent {activity}; {advice}"


def _advise_on_steps(times: TimeAccount, settings: RunSettings) -> str:
    """Returns the advice for a run that spends most of its time in the steps themselves."""
    share = times.share("step")
    step_seconds = times.seconds.get("step", 0.0) / times.steps
    milliseconds = format_number(1000 * step_seconds, 2)
    usage = f"{percent(share)} of the time was spent in steps of {milliseconds} ms"
    if settings.to_compile:
        return f"eager steps: {usage}; try {' and '.join(settings.to_compile)}"
    if step_seconds * settings.steps_per_loop < _SHORT_LOOP:
        return f"short loops: {usage}; raise trainer.steps_per_loop"
    if step_seconds < _SHORT_STEP and settings.can_fuse:
        return f"short steps: {usage}; try {_FUSE}{_NEW_RUN}"
    if step_seconds < _TINY_STEP and not settings.is_fused and settings.can_use_one_thread:
        return f"short steps: {usage}; try runtime.executor=single_threaded{_NEW_RUN}"

    waits = "" if "input" in times.seconds else ", which include their unmeasured wait for data"
    largest_share = max(times.share(name) for name in times.seconds)
    if share < largest_share:
        return f"no advice: {usage}{waits}"

    if settings.is_on_cpu and settings.is_fused:
        return (
            f"compute-bound: {usage}{waits}; if the model has convolutions, try"
            f" trainer.fuse_steps=1{_NEW_RUN}"
        )
    if settings.is_on_cpu:
        return f"compute-bound: {usage}{waits}; a faster device or more devices would help"
    return (
        f"compute-bound: {usage}{waits}; if the device supports it, try"
        " runtime.mixed_precision_dtype=bfloat16"
    )
