"""What is advised about the time of a run: figures in, one line out."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from trainer_kit.config.fields import get_fields
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.telemetry.time_advice import RunSettings, advise_on_time
from trainer_kit.telemetry.time_ledger import TimeAccount

_SETTINGS = RunSettings(steps_per_loop=100, can_fuse=True)


def _build_account(
    steps: int = 1000, evaluations: int = 5, first_evaluation: float = 0.0, **seconds: float
) -> TimeAccount:
    """Of a run of 100 s, the rest of which were steps."""
    parts = {"start": 5.0, "input": 1.0, **seconds}
    parts["step"] = seconds.get("step", 100.0 - sum(parts.values()))
    return TimeAccount(
        parts, 100.0, steps, evaluations, first_evaluation or seconds.get("evaluation", 0.0) / 5
    )


@pytest.mark.parametrize(
    ("times", "told"),
    [
        (
            _build_account(start=60),
            r"^start-up dominates: 60 % of 100\.0 s .*; for advice .* make a longer run$",
        ),
        (
            _build_account(input=62),
            r"^input: 62 % .* waiting for data; `trainer-kit doctor data` shows .*; try larger",
        ),
        (
            _build_account(input=62, steps=400_000),
            r"^input: 62 % .* steps are short: try trainer\.fuse_steps=20, which",
        ),
        (_build_account(input=25), r"^input: 25 % of the time was spent waiting"),
        (
            _build_account(evaluation=40),
            r"^evaluation: 40 % .*raise trainer\.validation_interval, or .*continuous",
        ),
        (_build_account(save=30), r"^save: 30 % .*raise trainer\.checkpoint_interval$"),
        (_build_account(callbacks=12), r"^callbacks: 12 % .*raise trainer\.steps_per_loop"),
        (_build_account(report=12), r"^report: 12 % .*raise trainer\.steps_per_loop"),
        (
            _build_account(steps=2 * 10**6),
            r"^short loops: 94 % .* of 0\.047 ms; raise trainer\.steps_per_loop$",
        ),
        (
            _build_account(steps=400_000),
            r"^short steps: 94 % .* of 0\.23 ms; try trainer\.fuse_steps=20, in a new",
        ),
        (
            _build_account(steps=1000),
            (
                r"^compute-bound: 94 % of the time was spent in steps of 94 ms; "
                r".*mixed_precision_dtype="
            ),
        ),
        (_build_account(steps=10), r"in steps of 9400 ms; "),
        (
            _build_account(start=40, input=19, step=20),
            r"^no advice: 20 % of the time was spent in steps of",
        ),
        (_build_account(steps=0), r"^$"),
        (
            _build_account(report=9, input=19, step=8),
            r"^no advice: 8 % of the time was spent in steps of 8 ms$",
        ),
    ],
)
def test_the_verdict_names_the_cause_and_the_setting_to_try(times: TimeAccount, told: str) -> None:
    assert re.search(told, advise_on_time(times, _SETTINGS)), advise_on_time(times, _SETTINGS)


def test_the_largest_of_what_is_worth_a_change_comes_first() -> None:
    assert advise_on_time(_build_account(evaluation=19, save=12), _SETTINGS).startswith(
        "save: 12 %"
    )
    assert advise_on_time(_build_account(evaluation=21, save=12), _SETTINGS).startswith(
        "evaluation: 21 %"
    )


def test_fused_steps_on_a_cpu_may_be_slow_convolutions() -> None:
    fused = replace(_SETTINGS, is_on_cpu=True, can_fuse=False, is_fused=True)

    assert "if the model has convolutions, try trainer.fuse_steps=1" in advise_on_time(
        _build_account(), fused
    )


def test_low_precision_is_not_advised_where_all_devices_are_cpus() -> None:
    told = advise_on_time(_build_account(), replace(_SETTINGS, is_on_cpu=True))

    assert told.startswith("compute-bound: 94 %")
    assert "a faster device" in told
    assert "bfloat16" not in told


def test_a_final_evaluation_and_tracing_cannot_be_saved() -> None:
    assert not advise_on_time(_build_account(evaluation=40, evaluations=1), _SETTINGS).startswith(
        "evaluation"
    )
    assert not advise_on_time(
        _build_account(evaluation=40, first_evaluation=36), _SETTINGS
    ).startswith("evaluation")
    assert advise_on_time(_build_account(evaluation=40, first_evaluation=16), _SETTINGS).startswith(
        "evaluation: 40 %"
    )


def test_what_the_run_has_already_is_not_advised() -> None:
    short = _build_account(steps=400_000)

    assert advise_on_time(short, replace(_SETTINGS, can_fuse=False)).startswith("compute-bound")

    tiny = replace(_SETTINGS, can_fuse=False, can_use_one_thread=True, steps_per_loop=1000)
    assert advise_on_time(_build_account(steps=10**6), tiny).endswith(
        "0.094 ms; try runtime.executor=single_threaded, in a new model_dir"
    )

    for done in ({"can_use_one_thread": False}, {"is_fused": True}):
        assert advise_on_time(_build_account(steps=10**6), replace(tiny, **done)).startswith(
            "compute-bound"
        )

    assert advise_on_time(short, replace(_SETTINGS, steps_per_loop=1)).startswith(
        "short loops: 94 %"
    )

    eager = replace(_SETTINGS, to_compile=("runtime.run_eagerly=false",))
    assert re.search(
        r"^eager steps: 94 % .*; try runtime\.run_eagerly=false$", advise_on_time(short, eager)
    )


def test_where_the_wait_for_data_is_not_known_the_steps_say_so() -> None:
    times = TimeAccount({"start": 5.0, "step": 95.0}, 100.0, 1000)
    assert "which include their unmeasured wait for data" in advise_on_time(times, _SETTINGS)


def test_every_setting_that_is_advised_is_one_of_the_config() -> None:
    runs = [
        _build_account(**{name: 50})
        for name in ("input", "evaluation", "save", "callbacks", "report")
    ]
    lines = [
        advise_on_time(times, _SETTINGS)
        for times in (*runs, _build_account(), _build_account(steps=400_000))
    ]
    lines += [advise_on_time(_build_account(), replace(_SETTINGS, is_on_cpu=True, is_fused=True))]
    eager = (
        "trainer.train_tf_function=true",
        "trainer.train_tf_while_loop=true",
        "runtime.run_eagerly=false",
    )
    lines += [advise_on_time(_build_account(), replace(_SETTINGS, to_compile=eager))]
    lines += [
        advise_on_time(
            _build_account(steps=600_000),
            replace(_SETTINGS, can_fuse=False, can_use_one_thread=True),
        )
    ]
    named = {
        name
        for line in lines
        for name in re.findall(r"\b(?:task|trainer|runtime)\.[a-z_.]*[a-z_]", line)
    }
    config = ExperimentConfig()
    paths = {
        f"{part}.{name}"
        for part in ("task", "trainer", "runtime")
        for name in get_fields(type(getattr(config, part)))
    }

    paths |= {f"task.train_data.{name}" for name in get_fields(type(config.task.train_data))}

    assert named <= paths
    assert len(named) >= 10
