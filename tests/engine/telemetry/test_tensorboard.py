from __future__ import annotations

import contextlib
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorboard import context
from tensorboard.backend.event_processing import (
    data_provider,
    event_accumulator,
    plugin_event_multiplexer,
)
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

from tests.builders import json_lines, report
from tests.engine.linear_task import linear_experiment
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.telemetry.background_writer import BackgroundWriter
from trainer_kit.telemetry.summary_manager import (
    SummaryManager,
    TensorBoardOptions,
    TensorBoardWriter,
)


def read_curves(folder: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """The curves that TensorBoard itself shows for `folder`: by run and tag."""
    runs = plugin_event_multiplexer.EventMultiplexer().AddRunsFromDirectory(str(folder))
    runs.Reload()
    provider = data_provider.MultiplexerDataProvider(runs, str(folder))
    scalars = provider.read_scalars(
        context.RequestContext(), experiment_id="", plugin_name="scalars", downsample=10_000
    )
    return {
        run: {tag: [(point.step, point.value) for point in points] for tag, points in tags.items()}
        for run, tags in scalars.items()
    }


def list_event_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*tfevents*"))


def date_back(folder: Path) -> None:
    """Makes event files ten seconds older, by their names: no file waits for the next second."""
    for file in list_event_files(folder):
        older = re.sub(r"(?<=tfevents\.)\d+", lambda match: str(int(match[0]) - 10), file.name)
        file.rename(file.with_name(older))


def test_tensorboard_shows_what_was_written(tmp_path: Path) -> None:
    manager = SummaryManager(str(tmp_path))
    for step in (10, 20):
        manager.write_summaries({"loss": 1.5 / step, "n": np.int64(step), "ok": True}, step=step)

    manager.close()

    assert read_curves(tmp_path) == {
        ".": {
            "loss": [(10, pytest.approx(0.15)), (20, pytest.approx(0.075))],
            "n": [(10, 10.0), (20, 20.0)],
            "ok": [(10, 1.0), (20, 1.0)],
        }
    }


def test_the_curves_are_those_that_orbits_manager_writes(orbit: Any, tmp_path: Path) -> None:
    values = {"loss": 0.5, "a": {"loss": 1.0, "deep": {"x": 2.0}}}
    step = tf.Variable(7, dtype=tf.int64)
    theirs = orbit.utils.SummaryManager(
        str(tmp_path / "theirs"), tf.summary.scalar, global_step=step
    )
    theirs.write_summaries(values)
    theirs.flush()
    ours = SummaryManager(str(tmp_path / "ours"))
    ours.write_summaries(values, step=7)

    ours.flush()

    assert read_curves(tmp_path / "ours") == read_curves(tmp_path / "theirs") != {}


def test_tf_summary_calls_of_the_user_share_the_one_file(tmp_path: Path) -> None:
    manager = SummaryManager(str(tmp_path))
    for step in (1, 2):
        manager.write_summaries({"loss": float(step)}, step=step)
        with manager.summary_writer().as_default():
            tf.summary.scalar("mine", 10.0 * step, step=step)
            tf.summary.text("note", "hello", step=step)

    manager.close()

    assert len(list_event_files(tmp_path)) == 1
    assert read_curves(tmp_path) == {
        ".": {"loss": [(1, 1.0), (2, 2.0)], "mine": [(1, 10.0), (2, 20.0)]}
    }

    reader = event_accumulator.EventAccumulator(str(tmp_path))
    reader.Reload()
    assert set(reader.Tags()["tensors"]) == {"loss", "mine", "note"}


def test_without_a_directory_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manager = SummaryManager(None)
    manager.write_summaries({"loss": 1.0, "a": {"b": 2.0}}, step=1)
    with manager.summary_writer("x").as_default():
        tf.summary.scalar("mine", 1.0, step=1)

    manager.flush()
    manager.close()

    assert list(tmp_path.iterdir()) == []


def test_what_is_no_scalar_is_skipped_with_one_warning_per_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = SummaryManager(str(tmp_path))
    for step in (1, 2, 3):
        values = {
            "loss": 1.0,
            "image": np.zeros((4, 4)),
            "set": {"note": "text", "acc": tf.constant(0.5)},
        }
        manager.write_summaries(values, step=step)

    manager.close()

    assert [record.getMessage() for record in caplog.records] == [
        "image is not written to TensorBoard: it is a ndarray of shape (4, 4), not a single number",
        "set/note is not written to TensorBoard: it is a str, not a single number",
    ]
    assert set(read_curves(tmp_path)["."]) == {"loss"}
    assert read_curves(tmp_path)["set"] == {"acc": [(1, 0.5), (2, 0.5), (3, 0.5)]}


def test_nan_and_infinity_are_written(tmp_path: Path) -> None:
    manager = SummaryManager(str(tmp_path))

    manager.write_summaries({"nan": float("nan"), "inf": float("-inf"), "large": 1e300}, step=1)
    manager.close()
    curves = read_curves(tmp_path)["."]

    assert np.isnan(curves["nan"][0][1])
    assert curves["inf"] == [(1, -np.inf)]
    assert curves["large"] == [(1, np.inf)]


def test_the_step_may_be_tf_summarys_and_has_to_be_known(tmp_path: Path) -> None:
    manager = SummaryManager(str(tmp_path))
    # A Controller that ran before in this process has set it.
    tf.summary.experimental.set_step(None)

    with pytest.raises(UsageError, match="step"):
        manager.write_summaries({"loss": 1.0})

    tf.summary.experimental.set_step(5)
    try:
        manager.write_summaries({"loss": 1.0})
    finally:
        tf.summary.experimental.set_step(None)

    manager.close()

    assert read_curves(tmp_path) == {".": {"loss": [(5, 1.0)]}}


def test_reports_go_to_their_folder_with_their_rates(tmp_path: Path) -> None:
    writer = TensorBoardWriter(
        SummaryManager(str(tmp_path / "train")), SummaryManager(str(tmp_path / "validation"))
    )
    writer.write(report(10, loss=1.0, steps_per_second=5.0, examples_per_second=160.0))
    writer.write(report(10, "validation", acc=0.5, set={"acc": 0.25}))

    writer.close()

    assert read_curves(tmp_path) == {
        "train": {
            "loss": [(10, 1.0)],
            "steps_per_second": [(10, 5.0)],
            "examples_per_second": [(10, 160.0)],
        },
        "validation": {"acc": [(10, 0.5)]},
        "validation/set": {"acc": [(10, 0.25)]},
    }


def test_losses_of_training_and_validation_are_one_chart(tmp_path: Path) -> None:
    writer = TensorBoardWriter(
        SummaryManager(str(tmp_path / "train")), SummaryManager(str(tmp_path / "validation"))
    )
    sets = {"near": {"validation_loss": 3.0}, "far": {"validation_loss": 4.0, "loss": 5.0}}
    writer.write(report(10, training_loss=1.0))
    writer.write(report(10, "validation", validation_loss=2.0, **sets))

    writer.close()

    assert read_curves(tmp_path) == {
        "train": {"loss": [(10, 1.0)]},
        "validation": {"loss": [(10, 2.0)]},
        "validation/near": {"loss": [(10, 3.0)]},
        "validation/far": {"loss": [(10, 5.0)], "validation_loss": [(10, 4.0)]},
    }


def test_losses_keep_their_names_without_a_tag(tmp_path: Path) -> None:
    manager = SummaryManager(str(tmp_path))
    writer = TensorBoardWriter(manager, manager, TensorBoardOptions(loss_tag=""))
    writer.write(report(10, training_loss=1.0))

    writer.close()

    assert read_curves(tmp_path) == {".": {"training_loss": [(10, 1.0)]}}


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a run "a" of two starts, and with a run "b" that has a best metric."""
    folder = tmp_path_factory.mktemp("runs")
    for steps in (5, 10):
        launch(linear_experiment(train_steps=steps), "train", str(folder / "a"))
        date_back(folder / "a")

    config = linear_experiment(best_checkpoint_eval_metric="accuracy", train_steps=10)
    config = config.replace(runtime={"random_seed": 2})
    launch(config, "train_and_eval", str(folder / "b"))
    return folder


def test_hparams_of_runs_are_rows_with_the_best_metric(two_runs: Path) -> None:
    runs = plugin_event_multiplexer.EventMultiplexer().AddRunsFromDirectory(str(two_runs))
    runs.Reload()
    provider = data_provider.MultiplexerDataProvider(runs, str(two_runs))
    request = api_pb2.ListSessionGroupsRequest(
        allowed_statuses=[api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_RUNNING], slice_size=10
    )
    tab = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    rows = list_session_groups.Handler(context.RequestContext(), tab, "", request).run()

    names = {Path(row.name).name: row for row in rows.session_groups}
    assert set(names) == {"a", "b"}
    hparams = names["b"].hparams
    assert hparams["runtime.random_seed"].number_value == 2
    assert hparams["trainer.best_checkpoint_eval_metric"].string_value == "accuracy"
    assert "trainer.keep_interval" not in hparams
    metrics = {metric.name.tag: metric.value for metric in names["b"].metric_values}
    assert set(metrics) == {"accuracy", "best_accuracy", "loss"}
    ledger = json_lines(two_runs / "b" / "evals" / "validation.jsonl")
    best = max(record["metrics"]["accuracy"] for record in ledger)
    assert metrics["best_accuracy"] == pytest.approx(best)


def test_the_config_is_a_text_of_each_start(two_runs: Path) -> None:
    run = two_runs / "a"
    reader = event_accumulator.EventAccumulator(str(run / "train"))
    reader.Reload()
    texts = [event.tensor_proto.string_val[0].decode() for event in reader.Tensors("config")]

    assert len(texts) == 2
    assert "train_steps: 5\n" in texts[0]
    assert texts[1] == f"```yaml\n{(run / 'params.yaml').read_text()}```"
    assert [step for step, _ in read_curves(run)["train"]["loss"]] == [5, 10]


def test_a_manager_without_a_step_is_called_at_once_like_orbit(orbit: Any, tmp_path: Path) -> None:
    step = tf.Variable(0, dtype=tf.int64)
    foreign = orbit.utils.SummaryManager(str(tmp_path), tf.summary.scalar, global_step=step)
    writer = BackgroundWriter([TensorBoardWriter(foreign, foreign)])
    for number in range(1, 4):
        step.assign(number)
        writer.write(report(number, loss=float(number)))

    writer.close()

    assert read_curves(tmp_path) == {".": {"loss": [(1, 1.0), (2, 2.0), (3, 3.0)]}}

    own = SummaryManager(None)
    assert TensorBoardWriter(own, foreign).needs_caller_thread
    assert not TensorBoardWriter(own, own).needs_caller_thread


def test_a_file_in_place_of_a_folder_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("")
    manager = SummaryManager(str(tmp_path / "train"))

    for write in (manager.summary_writer, lambda: manager.write_summaries({"loss": 1.0}, step=1)):
        with pytest.raises(StorageError, match=str(tmp_path / "train")):
            write()


@contextlib.contextmanager
def _limit_file_size() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("step", ["write", "flush", "close", "resume"])
def test_a_full_disk_is_a_storage_error_that_names_the_folder(tmp_path: Path, step: str) -> None:
    manager = SummaryManager(str(tmp_path))
    manager.write_summaries({"set": {"loss": 1.0}}, step=1)
    scope = manager.summary_writer("set").as_default()
    scope.__enter__()  # the user's own summaries: leaving the scope would write them
    tf.summary.scalar("mine", 1.0, step=1)
    writing = {
        "write": lambda: manager.write_summaries({"set": {"loss": 2.0}}, step=2),
        "flush": manager.flush,
        "close": manager.close,
        "resume": lambda: manager.resume(0),
    }[step]

    with _limit_file_size(), pytest.raises(StorageError, match=str(tmp_path / "set")) as error:
        writing()

    assert error.value.exit_code == 6

    with contextlib.suppress(Exception):
        scope.__exit__(None, None, None)


def start_session(
    folder: Path, start: int, end: int, value: float, *, made_up: bool = False
) -> tuple[SummaryManager, SummaryManager]:
    """What a start writes from step `start` on: a training report each step, an evaluation every
    second one.

    The managers stay open, as those of a process that is killed.
    """
    date_back(folder)
    train = SummaryManager(str(folder / "train"))
    validation = SummaryManager(str(folder / "validation"))
    train.resume(start)
    validation.resume(start - 1 if made_up else start)
    for step in range(start, end + 1):
        if step > start:
            train.write_summaries({"loss": value}, step=step)
        if step > 0 and step % 2 == 0 and (step > start or made_up):
            validation.write_summaries({"acc": value, "set": {"acc": value}}, step=step)

    return train, validation


def test_a_run_that_was_resumed_again_and_again_is_one_curve(tmp_path: Path) -> None:
    open_managers = [
        start_session(tmp_path, *arguments) for arguments in ((0, 7, 1.0), (4, 9, 2.0), (6, 8, 3.0))
    ]
    train = [*((step, 1.0) for step in range(1, 5)), (5, 2.0), (6, 2.0), (7, 3.0), (8, 3.0)]
    validation = [(2, 1.0), (4, 1.0), (6, 2.0), (8, 3.0)]

    assert read_curves(tmp_path) == {
        "train": {"loss": train},
        "validation": {"acc": validation},
        "validation/set": {"acc": validation},
    }
    assert len(open_managers) == 3 == len(list_event_files(tmp_path / "train"))


def test_a_repeated_evaluation_replaces_the_earlier_one(tmp_path: Path) -> None:
    open_managers = [
        start_session(tmp_path, 0, 4, 1.0),
        start_session(tmp_path, 4, 6, 2.0, made_up=True),
    ]
    curves = read_curves(tmp_path)

    assert (
        curves["validation"]["acc"]
        == curves["validation/set"]["acc"]
        == [(2, 1.0), (4, 2.0), (6, 2.0)]
    )
    assert [step for step, _ in curves["train"]["loss"]] == [1, 2, 3, 4, 5, 6]
    assert len(open_managers) == 2


def test_a_start_at_step_0_forgets_earlier_events(tmp_path: Path) -> None:
    open_managers = [start_session(tmp_path, 0, 4, 1.0), start_session(tmp_path, 0, 2, 2.0)]

    assert read_curves(tmp_path)["train"]["loss"] == [(1, 2.0), (2, 2.0)]
    assert len(open_managers) == 2


def test_an_event_that_a_kill_cut_does_not_stop_a_resume(tmp_path: Path) -> None:
    manager = SummaryManager(str(tmp_path))
    for step in (1, 2, 3):
        manager.write_summaries({"loss": 1.0}, step=step)
    manager.close()
    (file,) = list_event_files(tmp_path)
    file.write_bytes(file.read_bytes()[:-5])
    date_back(tmp_path)
    manager = SummaryManager(str(tmp_path))

    manager.resume(1)
    manager.write_summaries({"loss": 2.0}, step=2)
    manager.close()

    assert read_curves(tmp_path) == {".": {"loss": [(1, 1.0), (2, 2.0)]}}


def test_a_rollback_during_a_run_continues_in_the_same_file(tmp_path: Path) -> None:
    manager = SummaryManager(str(tmp_path))
    writer = manager.summary_writer()

    @tf.function
    def traced_step(step: tf.Tensor) -> None:  # as a task's train_step with summaries of its own
        tf.summary.scalar("mine", tf.cast(step, tf.float32), step=step)

    def steps(first: int, last: int, value: float) -> None:
        for step in range(first, last + 1):
            with writer.as_default():
                traced_step(tf.constant(step, tf.int64))
            manager.write_summaries({"loss": value}, step=step)

    steps(1, 4, 1.0)
    manager.resume(2)
    steps(3, 5, 2.0)
    manager.resume(4)
    steps(5, 5, 3.0)
    manager.close()

    assert len(list_event_files(tmp_path)) == 1
    assert read_curves(tmp_path) == {
        ".": {
            "loss": [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 3.0)],
            "mine": [(step, float(step)) for step in range(1, 6)],
        }
    }


def test_a_resume_makes_nothing_where_no_events_are(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("no events")

    for directory in (None, str(tmp_path), str(tmp_path / "missing")):
        SummaryManager(directory).resume(3)

    assert [path.name for path in tmp_path.rglob("*")] == ["text.txt"]


def test_a_scalar_that_comes_twice_for_a_step_is_one_point(tmp_path: Path) -> None:
    manager = SummaryManager(str(tmp_path))
    for values in (
        {"loss": 1.0},
        {"loss": 2.0, "set": {"loss": 3.0}},
        {"rate": 4.0, "set": {"loss": 5.0}},
    ):
        manager.write_summaries(values, step=1)

    manager.write_summaries({"loss": 6.0}, step=2)
    manager.close()
    date_back(tmp_path)
    manager.write_summaries({"loss": 7.0}, step=2)
    manager.close()
    expected = {
        ".": {"loss": [(1, 1.0), (2, 6.0)], "rate": [(1, 4.0)]},
        "set": {"loss": [(1, 3.0)]},
    }

    assert read_curves(tmp_path) == expected


def test_event_files_from_the_future_are_told_and_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "events.out.tfevents.4000000000.host.1.0.v2").touch()
    manager = SummaryManager(str(tmp_path))

    manager.resume(1)
    manager.close()
    (warning,) = caplog.records

    assert "from the future" in warning.getMessage()
    assert str(tmp_path) in warning.getMessage()
