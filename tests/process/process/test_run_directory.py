"""The records of a run: what is written when, and which run may go on in a folder."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.builders import read_json
from tests.config_builders import collect_mistakes
from tests.fork_server import Ended, ForkServer
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.serialize import to_yaml
from trainer_kit.errors import ExitCode, StorageError, UsageError
from trainer_kit.process.run_directory import (
    RunDirectory,
    check_model_dir,
    compute_config_hash,
    count_starts,
    read_thread_counts,
)


def _config(**trainer: object) -> ExperimentConfig:
    return ExperimentConfig().replace(trainer={"train_steps": 50, **trainer})


def _directory(folder: Path, sidecar: str = "") -> RunDirectory:
    return RunDirectory(str(folder), TrainerConfig(), sidecar)


def _start_run(
    folder: Path, config: ExperimentConfig | None = None, experiment: str = "mine"
) -> RunDirectory:
    """A run that has written its record and a checkpoint."""
    directory = _directory(folder)
    directory.write_record(config or _config(), experiment, "train", {})
    (folder / "ckpt-10.index").write_text("")
    return directory


def _list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_every_file_of_a_run_lies_in_model_dir(tmp_path: Path) -> None:
    options = TrainerConfig(
        best_checkpoint_export_subdir="top", validation_summary_subdir="held_out"
    )
    directory = RunDirectory(str(tmp_path), options)
    places = {
        name: str(Path(path).relative_to(tmp_path))
        for name, path in vars(directory).items()
        if path
    }

    assert places == {
        "path": ".",
        "output_dir": ".",
        "best_dir": "top",
        "output_best_dir": "top",
        "output_named_bests_dir": "best_checkpoints",
        "train_summary_dir": "train",
        "eval_summary_dir": "held_out",
        "evals_dir": "evals",
        "training_ledger_path": "evals/validation.jsonl",
        "ledger_path": "evals/validation.jsonl",
        "metrics_path": "metrics.jsonl",
        "params_path": "params.yaml",
        "manifest_path": "manifest.json",
        "final_path": "final.json",
        "log_path": "log.txt",
    }
    assert _list_files(tmp_path) == []


def test_the_files_of_a_sidecar_lie_apart_from_the_run(tmp_path: Path) -> None:
    run = vars(_directory(tmp_path))
    sidecar = vars(_directory(tmp_path, "test_set"))

    own = {
        name: str(Path(path).relative_to(tmp_path))
        for name, path in sidecar.items()
        if path != run[name]
    }
    assert own == {
        "output_dir": "evals/test_set",
        "output_best_dir": "evals/test_set/best_ckpt",
        "output_named_bests_dir": "evals/test_set/best_checkpoints",
        "eval_summary_dir": "evals/test_set",
        "ledger_path": "evals/test_set.jsonl",
        "log_path": "evals/test_set/log.txt",
    }


def test_the_record_holds_config_experiment_command_and_versions(tmp_path: Path) -> None:
    config = _config().replace(runtime={"random_seed": 5})
    folder = tmp_path / "run"

    _directory(folder).write_record(
        config, "mine", "train_and_eval", {"operative.gin": "a.b = 1\n"}
    )

    assert _list_files(folder) == ["manifest.json", "operative.gin", "params.yaml"]
    assert (folder / "params.yaml").read_text() == to_yaml(config)
    assert (folder / "operative.gin").read_text() == "a.b = 1\n"
    record = read_json(folder / "manifest.json")
    assert record["experiment"] == "mine"
    assert record["mode"] == "train_and_eval"
    assert record["random_seed"] == 5
    assert record["command"] == sys.argv
    assert set(record["packages"]) == {
        "trainer_kit",
        "tensorflow",
        "keras",
        "tf-models-official",
        "numpy",
    }
    assert record["packages"]["numpy"]
    assert record["installed"]["numpy"] == record["packages"]["numpy"]


def test_a_folder_that_was_moved_is_no_longer_the_runs(tmp_path: Path) -> None:
    directory = _directory(tmp_path / "run")
    directory.check_run_id()  # the run has no record yet
    directory.write_record(_config(), "mine", "train", {})
    directory.check_run_id()

    (tmp_path / "run").rename(tmp_path / "moved")
    message = r"was moved or removed during the run: .* give its new path"
    with pytest.raises(StorageError, match=message):
        directory.check_run_id()

    _start_run(tmp_path / "run")
    message = r"contains another run now, .* or with another model_dir"
    with pytest.raises(StorageError, match=message):
        directory.check_run_id()

    directory.remove_records([directory.params_path])
    assert directory.is_recorded()


@pytest.mark.parametrize(
    ("exporter", "best"),
    [
        (None, {}),
        (SimpleNamespace(best=None), {}),
        (
            SimpleNamespace(best=("accuracy", 0.75, 30)),
            {"best": {"metric": "accuracy", "value": 0.75, "step": 30}},
        ),
    ],
)
@pytest.mark.parametrize(
    "more", [{}, {"stopped": "enough", "time": {"seconds": 2.5, "verdict": "short steps"}}]
)
def test_final_json_exists_from_the_end_until_a_resume(
    tmp_path: Path, exporter: object, best: dict[str, Any], more: dict[str, Any]
) -> None:
    directory = _start_run(tmp_path)
    assert directory.read_final() is None

    directory.write_final(
        50, "train", {"accuracy": 0.5}, exporter, more.get("stopped", ""), more.get("time")
    )
    assert directory.read_final() == {
        "step": 50,
        "mode": "train",
        "metrics": {"accuracy": 0.5},
        **best,
        **more,
    }

    directory.write_record(_config(train_steps=80), "mine", "train", {})
    assert directory.read_final() is None
    assert not (tmp_path / "final.json").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b'{"step": 5',
        b"[1]",
        b"5",
        b"{}",
        b"\xff",
        b'{"step": 5, "mode": "train"}',
        b'{"step": null, "mode": "train", "metrics": {}}',
        b'{"step": 5, "mode": "train", "metrics": 3}',
    ],
)
def test_a_damaged_final_json_counts_as_none_with_one_warning(
    tmp_path: Path, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "final.json").write_bytes(text)
    assert [_directory(tmp_path).read_final() for _ in range(3)] == [None] * 3

    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}/final.json cannot be read (")


def test_another_experiment_is_refused_before_anything_else(tmp_path: Path) -> None:
    directory = _start_run(tmp_path, experiment="mine")
    config = _config()

    with pytest.raises(UsageError, match=r"holds a run of the experiment 'mine', not of 'yours'"):
        check_model_dir(directory, config, "yours", ["task"])
    assert check_model_dir(directory, config, "mine", []) == []
    # A caller may have no name for its experiment.
    assert check_model_dir(directory, config, "", []) == []


@pytest.mark.parametrize("manifest", ["", "{", '["mine"]', "{}", '{"threads": 3, "starts": 7}'])
def test_a_damaged_manifest_stops_nobody(tmp_path: Path, manifest: str) -> None:
    directory = _start_run(tmp_path)
    (tmp_path / "manifest.json").write_text(manifest)

    assert check_model_dir(directory, _config(), "yours", []) == []
    assert read_thread_counts(str(tmp_path)) is None
    assert count_starts(tmp_path) == 0


def test_safe_changes_are_returned_and_dangerous_ones_refused(tmp_path: Path) -> None:
    directory = _start_run(tmp_path)
    changed = _config(train_steps=80).replace(
        task={"train_data": {"global_batch_size": 8}}, runtime={"random_seed": 2}
    )

    mistakes = collect_mistakes(
        check_model_dir, directory, changed, "mine", ["runtime.random_seed"]
    )
    assert mistakes.keys() == {"task.train_data.global_batch_size"}

    allowed_paths = ["runtime.random_seed", "task.train_data"]
    changes = check_model_dir(directory, changed, "mine", allowed_paths)
    assert [change.kind for change in changes] == ["dangerous", "dangerous", "safe"]
    assert str(changes[-1]) == "trainer.train_steps: 50 -> 80"


@pytest.mark.parametrize("missing", ["params.yaml", "ckpt-10.index"])
def test_a_folder_without_config_or_checkpoint_fits_any_run(tmp_path: Path, missing: str) -> None:
    directory = _start_run(tmp_path)
    (tmp_path / missing).unlink()
    other = _config().replace(runtime={"random_seed": 2})

    assert check_model_dir(directory, other, "mine", []) == []


def test_a_folder_name_like_a_pattern_is_refused(tmp_path: Path) -> None:
    message = r"reads \* and \[ in the path of a checkpoint as a pattern"
    with pytest.raises(UsageError, match=message):
        check_model_dir(_directory(tmp_path / "run[1]*"), _config(), "mine", [])


@pytest.mark.parametrize("name", ["params.yaml", "manifest.json", "metrics.jsonl", "final.json"])
@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["FIFO", "device"]
)
def test_what_is_no_file_is_not_read(
    make: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    directory = _start_run(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)

    assert directory.read_steps_per_epoch() is None  # which a fit asks for first
    with pytest.raises(StorageError, match=f"{tmp_path}/{name} is not a file; remove it"):
        check_model_dir(directory, _config(), "mine", [])


def test_best_weights_that_cannot_be_read_end_a_run_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = _start_run(tmp_path)
    make = tempfile.TemporaryFile
    (tmp_path / "best_ckpt").mkdir()

    def refuse(*, dir: Path) -> Any:  # the user who runs the tests may do everything
        if dir.name == "best_ckpt":
            raise PermissionError(errno.EACCES, "Permission denied")
        return make(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(StorageError, match="best_ckpt cannot be written: Permission denied"):
        check_model_dir(directory, _config(), "mine", [])


def test_an_unwritable_place_is_a_storage_error_with_code_6(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    directory = _directory(tmp_path / "file" / "run")
    for action in (
        lambda: check_model_dir(directory, _config(), "mine", []),
        lambda: directory.write_record(_config(), "mine", "train", {}),
        lambda: directory.write_final(1, "train", {}, None),
    ):
        with pytest.raises(StorageError, match=r"file") as error:
            action()
        assert error.value.exit_code == ExitCode.STORAGE == 6


@pytest.mark.parametrize("folder", ["gs://bucket/run", "s3://bucket"])
def test_a_remote_folder_is_refused_with_what_to_do(folder: str) -> None:
    message = f"'{folder}' is a remote folder; only local and mounted folders"
    with pytest.raises(UsageError, match=message) as error:
        RunDirectory(folder, TrainerConfig())
    assert error.value.exit_code == ExitCode.USAGE == 2


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_bytes(b"task:\n  name: caf\xe9\n"), "it is not text in UTF-8"),
        (lambda path: path.mkdir(), "Is a directory"),
    ],
    ids=["binary", "folder"],
)
def test_an_unreadable_params_yaml_is_a_storage_error(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    directory = _start_run(tmp_path)
    (tmp_path / "params.yaml").unlink()
    make(tmp_path / "params.yaml")

    message = rf"{tmp_path}/params\.yaml, .* cannot be read: {reason}.*; restore it"
    with pytest.raises(StorageError, match=message):
        check_model_dir(directory, _config(), "mine", [])


def test_the_config_hash_covers_what_evaluations_depend_on() -> None:
    config = _config()
    overfit = config.replace(trainer={"overfit_batches": 1})
    others = (
        config.replace(task={"validation_data": {"seed": 3}}),
        config.replace(trainer={"validation_steps": 7}),
        config.replace(trainer={"optimizer_config": {"ema": {"average_decay": 0.9}}}),
        config.replace(runtime={"mixed_precision_dtype": "bfloat16"}),
        overfit,
        overfit.replace(task={"train_data": {"seed": 3}}),  # it is evaluated then
    )
    other_training_data = config.replace(task={"train_data": {"seed": 3}})

    config_hash = compute_config_hash(config)

    assert len({config_hash, *map(compute_config_hash, others)}) == 7
    assert compute_config_hash(other_training_data) == config_hash
    assert compute_config_hash(_config(train_steps=51)) == config_hash
    assert len(config_hash) == 12


def test_the_config_hash_is_that_of_earlier_releases() -> None:
    # Of a config before datasets had names in it.
    assert compute_config_hash(ExperimentConfig()) == "19d2ba3d1665"

    # Of a config before there were several averages.
    average = {"average_decay": 0.9, "more_decays": {"fast": 0.5}}
    config = ExperimentConfig().replace(trainer={"optimizer_config": {"ema": average}})

    assert compute_config_hash(config) == "8c7500f33386"


def test_the_config_hash_covers_the_averages_that_are_evaluated() -> None:
    def average(**ema: Any) -> ExperimentConfig:
        return ExperimentConfig().replace(
            trainer={"optimizer_config": {"ema": {"average_decay": 0.9, **ema}}}
        )

    single = average(more_decays={"fast": 0.5})
    both = average(more_decays={"fast": 0.5}, evaluate=["average", "fast"])
    other_decay = average(more_decays={"fast": 0.6}, evaluate=["average", "fast"])
    third = average(more_decays={"fast": 0.5, "slow": 0.9}, evaluate=["average", "fast"])

    hashes = [compute_config_hash(config) for config in (single, both, other_decay)]
    assert len(set(hashes)) == 3
    # What is not evaluated does not count.
    assert compute_config_hash(third) == compute_config_hash(both)


@configclass
class Evaluating(ExperimentConfig):
    """With a section of its own."""

    eval_tasks: tuple[str, ...] = ()


def test_an_unknown_validation_set_has_the_hash_of_all_sets() -> None:
    config = Evaluating(task=_config().task, trainer=_config().trainer)
    with_task = config.replace(eval_tasks=("one",))

    config_hash = compute_config_hash(config)

    assert compute_config_hash(config, "one") == config_hash
    assert compute_config_hash(config, "other") == config_hash
    assert compute_config_hash(with_task, "one") != config_hash


def test_the_first_thread_counts_and_all_starts_are_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = _directory(tmp_path)
    assert read_thread_counts(str(tmp_path)) is None
    assert count_starts(tmp_path) == 0

    for start, count in enumerate((2, 2, 4), start=1):
        directory.write_record(_config(), "mine", "train", {}, {"inter_op": count, "intra_op": 2})
        assert count_starts(tmp_path) == start
    assert read_thread_counts(str(tmp_path)) == {"inter_op": 4, "intra_op": 2}

    warning = "threads: {'inter_op': 2, 'intra_op': 2} when the run was started, "
    assert caplog.text.count(warning) == 1


def test_withdrawing_a_record_removes_only_new_files(tmp_path: Path) -> None:
    directory = _directory(tmp_path)
    (tmp_path / "notes.gin").write_text("the user's")
    new = directory.list_missing_records(["notes.gin", "other.gin"])

    names = ("params.yaml", "manifest.json", "log.txt", "other.gin")
    assert new == [str(tmp_path / name) for name in names]

    directory.write_record(_config(), "mine", "train", {"notes.gin": "", "other.gin": ""})
    assert directory.is_recorded()

    directory.remove_records(new)
    assert _list_files(tmp_path) == ["notes.gin"]
    assert not directory.is_recorded()

    directory.write_record(_config(), "mine", "train", {})
    assert directory.list_missing_records([]) == [directory.log_path]


def test_the_record_of_a_checkpoint_stays(tmp_path: Path) -> None:
    directory = _directory(tmp_path / "run[1]")
    new = directory.list_missing_records([])
    directory.write_record(_config(), "mine", "train", {})
    (tmp_path / "run[1]" / "ckpt-0.index").write_text("")
    directory.remove_records(new)

    assert _list_files(tmp_path / "run[1]") == ["ckpt-0.index", "manifest.json", "params.yaml"]


# What comes to an end in a real run: before there is a record, and after, in the first step.
_EXPERIMENTS = """
import os
import trainer_kit
from trainer_kit.errors import UsageError
from trainer_kit.testing import TinyConfig, TinyTask, tiny_experiment


class First(TinyConfig):
    pass


@trainer_kit.register_task(First := trainer_kit.configclass(First))
class FirstTask(TinyTask):
    def build_model(self):
        if ENDS.get(END):
            raise ENDS[END]
        return super().build_model()

    def train_step(self, *arguments, **named):
        raise UsageError("the task's own")


ENDS = {"bug": RuntimeError("bug"), "interrupt": KeyboardInterrupt()}
END = os.path.basename(os.path.dirname(__file__))


@trainer_kit.register_experiment("ends")
def ends():
    return tiny_experiment(train_steps=5).replace(task=First())
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as fork_server:
        yield fork_server


def _run(server: ForkServer, folder: Path, end: str) -> Ended:
    """Runs an experiment whose task ends in this way; its files are in `folder`/run."""
    (folder / end).mkdir(parents=True)
    (folder / end / "ends.py").write_text(_EXPERIMENTS)
    flags = [f"--import_module={folder / end}/ends.py", "--experiment=ends", "--mode=train"]
    return server.run("train", *flags, f"--model_dir={folder}/run")


@pytest.mark.parametrize(("end", "code"), [("bug", 1), ("interrupt", 130)])
def test_a_run_that_ends_before_it_has_begun_leaves_nothing(
    server: ForkServer, tmp_path: Path, end: str, code: int
) -> None:
    child_end = _run(server, tmp_path, end)

    assert child_end.code == code, child_end.text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_mistake_in_step_1_leaves_an_earlier_record_alone(
    server: ForkServer, tmp_path: Path, is_recorded: bool
) -> None:
    folder = tmp_path / "run"
    if is_recorded:
        _directory(folder).write_record(_config(), "ends", "train", {})

    end = _run(server, tmp_path, "in the first step")

    assert end.code == 2, end.text
    names = {path.name for path in folder.glob("*")} - {"train"}  # summaries that were opened
    if is_recorded:
        assert names >= {"params.yaml", "manifest.json", "trainer.lock"}
        assert count_starts(folder) == 2
    else:
        assert names == set()
        assert count_starts(folder) == 0
