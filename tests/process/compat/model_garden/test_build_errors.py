"""What `check` says of what cannot be built: one line with the section, the exit code, and bugs as they are."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from official.vision.configs.image_classification import ImageClassificationTask

from tests.process.compat.model_garden.lazy import ONE_BLOCK
from trainer_kit.cli.main import main
from trainer_kit.compat.model_garden.build_errors import explain_config_errors, part_of, sections_of
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import DataError, UsageError
from trainer_kit.runtime.precision import precision

LAZY_MODULE = "tests.process.compat.model_garden.lazy"
LAZY = "tests_lazy"
SMALL = f"resnet_imagenet task.model.backbone.resnet.model_id={ONE_BLOCK}"  # of fewer layers, which are made sooner

CASES = [
    ("mock", "", 2, "trainer.optimizer_config: Model Garden refuses its values: "),
    ("bert/tagging", "", 2, "task.model: Model Garden refuses its values: TypeError: "),
    ("image_classification", "", 2, "task.model.num_classes: is 0; give the number of classes"),
    ("wmt_transformer/large", "task.sentencepiece_model_path=no.model", 5, "task: NotFoundError: "),
    (SMALL, "", 5, "task.train_data: ValueError: imagenet-2012-tfrecord/train* does not match any files"),
    (SMALL, "task.train_data.input_path=''", 2, "task.train_data: Model Garden refuses its values: "),
    (SMALL, "task.model.norm_activation.activation=reluu", 2, "task.model: Model Garden refuses its values: "),
    ("resnet_imagenet", "task.model.backbone.resnet.model_id=51", 2, "task.model: Model Garden refuses its values: "),
    (LAZY, "task.train_data.input_path=no/*.tfrecord", 5, "no/*.tfrecord"),
    (LAZY, "task.train_data.tfds_name=1", 2, "task.train_data.tfds_name (--params_override): 1 is not text"),
]


BUGS = {
    "model": "ValueError: a bug of the user's",
    "data": "TypeError: object",
    "map": "NameError: name 'misspelt' is not defined",
    "slices": "ValueError: Dimensions 3 and 4 are not compatible",
}
FILE = "data.tfrecord"


@dataclass(frozen=True)
class Told:
    """The exit code of a check, and what it has written."""

    code: int
    text: str


def _arguments(name: str, override: str = "") -> list[str]:
    name, _, first = name.partition(" ")
    override = ",".join(filter(None, (first, override)))
    return ["check", f"tfm/{name}", f"--params_override={override}", f"--import_module={LAZY_MODULE}"]


Check = Callable[..., Told]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    """Runs the command here, in a folder with a file of data: a process of its own would import for longer."""
    (tmp_path / FILE).touch()
    monkeypatch.chdir(tmp_path)

    def run(name: str, override: str = "") -> Told:
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(text):
            code = main(_arguments(name, override))
        return Told(code, text.getvalue())

    with precision(RuntimeConfig()):  # the precision of this process is afterwards what it was
        yield run


@pytest.mark.parametrize(("name", "override", "code", "message"), CASES, ids=[f"{n} {o}"[:90] for n, o, _, _ in CASES])
def test_what_is_missing_is_told_by_its_path(check: Check, name: str, override: str, code: int, message: str) -> None:
    ended = check(name, override)
    assert ended.code == code, ended.text
    assert "Traceback" not in ended.text
    error = ended.text.partition("\nerror: ")[2] or ended.text.removeprefix("error: ")
    for part in message.split("\n"):
        assert [line for line in error.splitlines() if part in line], error
    assert "In call to configurable" not in error


def test_a_model_that_its_first_call_builds_is_checked(check: Check) -> None:
    ended = check(LAZY)
    assert ended.code == 0, ended.text
    assert "tfm/tests_lazy is ready to run" in ended.text


@pytest.mark.parametrize("bug", BUGS)
def test_a_users_bug_stays_a_traceback_without_data(check: Check, bug: str) -> None:
    ended = check(LAZY, f"task.bug={bug}")
    assert ended.code == 1, ended.text
    assert "the whole traceback: " in ended.text
    assert BUGS[bug] in ended.text


def test_errors_that_explain_themselves_pass() -> None:
    with pytest.raises(DataError, match="mine"), explain_config_errors("task.model"):
        raise DataError("mine")


def test_a_missing_package_is_told() -> None:
    message = "task.train_data: a package is missing: ModuleNotFoundError: No module named 'no_such_package'"
    with pytest.raises(UsageError, match=message), explain_config_errors("task.train_data"):
        importlib.import_module("no_such_package")


def test_data_of_one_of_several_tasks_is_found_by_its_section() -> None:
    tasks = [SimpleNamespace(task_config=ImageClassificationTask()) for _ in range(2)]
    path = "task.task_routines.1.task_config.train_data"
    assert part_of(sections_of(tasks), tasks[1].task_config.train_data) == path


def test_a_missing_file_is_a_data_error() -> None:
    with (
        pytest.raises(DataError, match=r"^task\.model: FileNotFoundError: cannot open no/1$"),
        explain_config_errors("task.model"),
    ):
        raise FileNotFoundError("cannot open no/1")


def test_another_error_gets_a_note() -> None:
    with pytest.raises(ZeroDivisionError) as error, explain_config_errors("task.model"):
        raise ZeroDivisionError
    assert error.value.__notes__ == ["this happened in the use of the section task.model of the config"]


def test_a_section_of_data_is_found_by_what_it_is() -> None:
    config = ImageClassificationTask()
    assert part_of({"task": config}, config.validation_data) == "task.validation_data"
    assert part_of({"task": config}, None) == "task"
