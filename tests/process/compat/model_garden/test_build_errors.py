"""What `check` says of what cannot be built: one line with the section, the exit code, and bugs as
they are.
"""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.compat.model_garden.lazy import ONE_BLOCK
from trainer_kit.cli.main import main
from trainer_kit.compat.model_garden.build_errors import explain_config_errors
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import DataError, UsageError
from trainer_kit.runtime.precision import precision_scope

LAZY_MODULE = "tests.process.compat.model_garden.lazy"
LAZY = "tests_lazy"
# A ResNet of fewer layers, which are made sooner
SMALL = f"task.model.backbone.resnet.model_id={ONE_BLOCK}"
RESNET = "resnet_imagenet"

CASES = [
    ("mock", "", 2, "trainer.optimizer_config: Model Garden refuses its values: "),
    ("bert/tagging", "", 2, "task.model: Model Garden refuses its values: TypeError: "),
    ("image_classification", "", 2, "task.model.num_classes: is 0; give the number of classes"),
    ("wmt_transformer/large", "task.sentencepiece_model_path=no.model", 5, "task: NotFoundError: "),
    (
        RESNET,
        SMALL,
        5,
        "task.train_data: ValueError: imagenet-2012-tfrecord/train* does not match any files",
    ),
    (
        RESNET,
        f"{SMALL},task.train_data.input_path=''",
        2,
        "task.train_data: Model Garden refuses its values: ",
    ),
    (
        RESNET,
        "task.model.backbone.resnet.model_id=51",
        2,
        "task.model: Model Garden refuses its values: ",
    ),
    (LAZY, "task.train_data.input_path=no/*.tfrecord", 5, "no/*.tfrecord"),
    (
        LAZY,
        "task.train_data.tfds_name=1",
        2,
        "task.train_data.tfds_name (--params_override): 1 is not text",
    ),
]


BUGS = {
    "model": "ValueError: a bug of the user's",
    "data": "TypeError: object",
    "map": "NameError: name 'misspelt' is not defined",
    "slices": "ValueError: Dimensions 3 and 4 are not compatible",
}
FILE = "data.tfrecord"


@pytest.fixture
def check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs the command here, in a folder with a file of data: a process of its own would import for
    longer.
    """
    (tmp_path / FILE).touch()
    monkeypatch.chdir(tmp_path)

    def run(name: str, override: str = "") -> tuple[int, str]:
        flags = [f"--params_override={override}", f"--import_module={LAZY_MODULE}"]
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(text):
            code = main(["check", f"tfm/{name}", *flags])
        return code, text.getvalue()

    # The precision of this process is afterwards what it was.
    with precision_scope(RuntimeConfig()):
        yield run


@pytest.mark.parametrize(
    ("name", "override", "code", "message"), CASES, ids=[f"{n} {o}"[:90] for n, o, _, _ in CASES]
)
def test_check_names_a_missing_value_by_its_path(
    check: Any, name: str, override: str, code: int, message: str
) -> None:
    exit_code, text = check(name, override)

    assert exit_code == code, text
    assert message in text.partition("error: ")[2]
    assert "Traceback" not in text
    assert "In call to configurable" not in text


def test_a_model_that_its_first_call_builds_is_checked(check: Any) -> None:
    code, text = check(LAZY)
    assert code == 0, text
    assert "tfm/tests_lazy is ready to run" in text


@pytest.mark.parametrize("bug", BUGS)
def test_a_users_bug_stays_a_traceback_without_data(check: Any, bug: str) -> None:
    code, text = check(LAZY, f"task.bug={bug}")
    assert code == 1, text
    assert "the whole traceback: " in text
    assert BUGS[bug] in text


def test_a_missing_package_or_file_is_told() -> None:
    cause = "ModuleNotFoundError: No module named 'no_such_package'"
    message = f"task.train_data: a package is missing: {cause}"
    with pytest.raises(UsageError, match=message), explain_config_errors("task.train_data"):
        importlib.import_module("no_such_package")

    message = r"^task\.model: FileNotFoundError: cannot open no/1$"
    with pytest.raises(DataError, match=message), explain_config_errors("task.model"):
        raise FileNotFoundError("cannot open no/1")


def test_an_unexplained_error_gets_a_note_with_its_section() -> None:
    with pytest.raises(ZeroDivisionError) as error, explain_config_errors("task.model"):
        raise ZeroDivisionError
    assert error.value.__notes__ == [
        "this happened in the use of the section task.model of the config"
    ]
