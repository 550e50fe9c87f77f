"""The exit codes, the report of several mistakes, and near names."""

from __future__ import annotations

import pickle

import pytest

from trainer_kit import errors
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.errors import (
    EXIT_CODES,
    ConfigError,
    ExitCode,
    Mistake,
    TrainerKitError,
    UsageError,
    find_similar_names,
    find_trainer_kit_error,
    suggest_names,
)


def test_the_exit_codes_are_an_interface() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "DONE": 0,
        "BUG": 1,
        "USAGE": 2,
        "DIVERGED": 3,
        "MODEL_DIR_IN_USE": 4,
        "DATA": 5,
        "STORAGE": 6,
        "STALLED": 7,
        "NOTHING_TO_WAIT_FOR": 8,
        "PREEMPTED": 75,
        "INTERRUPTED": 130,
    }


def test_a_config_error_comes_back_from_a_process_pool() -> None:
    with pytest.raises(ConfigError) as raised:
        TrainerConfig(train_steps="many")

    again = pickle.loads(pickle.dumps(raised.value))
    assert isinstance(again, ConfigError)
    assert str(again) == str(raised.value)


def test_every_exit_code_is_explained() -> None:
    assert EXIT_CODES.keys() == set(ExitCode)
    assert all(EXIT_CODES.values())


def test_every_exception_has_the_exit_code_of_its_kind() -> None:
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, TrainerKitError)
    ]
    codes = {
        error_class.__name__: error_class.exit_code
        for error_class in classes
        if error_class not in (TrainerKitError, ConfigError)
    }

    assert len(codes) >= 8
    assert len(set(codes.values())) == len(codes)
    assert ExitCode.DONE not in codes.values()
    assert ExitCode.BUG not in codes.values()
    assert ConfigError.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("mistake", "line"),
    [
        (Mistake("a.b", "is wrong"), "a.b: is wrong"),
        (Mistake("a.b", "is wrong", "do this"), "a.b: is wrong; do this"),
        (Mistake("a.b", "is wrong", "do this", "f.yaml:3"), "a.b (f.yaml:3): is wrong; do this"),
        (Mistake("", "is wrong", "", "f.yaml:3"), "f.yaml:3: is wrong"),
        (Mistake("", "is wrong"), "is wrong"),
    ],
)
def test_a_mistake_is_one_line_with_its_path_and_origin(mistake: Mistake, line: str) -> None:
    assert str(mistake) == line


def test_a_report_counts_its_mistakes_and_has_a_line_for_each() -> None:
    mistakes = [Mistake("a", "is wrong"), Mistake("b", "is wrong too")]
    error = ConfigError(iter(mistakes))

    assert [line.strip() for line in str(error).splitlines()] == [
        "2 mistakes",
        "a: is wrong",
        "b: is wrong too",
    ]
    assert error.mistakes == tuple(mistakes)
    assert isinstance(error, ValueError)
    assert str(ConfigError(mistakes[:1])) == "a: is wrong"


def test_near_names_come_best_first_whatever_their_case() -> None:
    names = ["train_steps", "train_step", "TrainerConfig", "other"]

    assert find_similar_names("train_step", names)[:2] == ("train_step", "train_steps")
    assert find_similar_names("trainerconfg", names)[0] == "TrainerConfig"
    assert find_similar_names("zzz", names) == ()
    assert find_similar_names("train_step", ["train_steps", "validation_steps", "trainer"]) == (
        "train_steps",
    )
    assert len(find_similar_names("train", [f"train{i}" for i in range(9)], limit=2)) == 2


def test_a_suggestion_is_the_near_names_or_what_there_is() -> None:
    assert suggest_names("digit", ["digits", "lm"]) == "did you mean digits?"
    assert suggest_names("zzz", ["b", "a"]) == "there are: a, b"
    assert suggest_names("zzz", []) == "there are none"

    many = suggest_names("zzz", [f"name{i:02}" for i in range(20)])
    assert "name11" in many
    assert "name12" not in many
    assert "20 in all" in many


def test_only_an_error_wrapped_by_autograph_is_found() -> None:
    inner = UsageError("what to do")
    handled = UsageError("was handled")
    inner.ag_error_metadata = object()  # type: ignore[attr-defined]
    wrapped = RuntimeError("in user code: ...")
    later = RuntimeError("a bug")
    wrapped.__context__ = inner

    later.__context__ = handled

    assert find_trainer_kit_error(inner) is inner
    assert find_trainer_kit_error(wrapped) is inner
    assert find_trainer_kit_error(handled) is handled
    assert find_trainer_kit_error(later) is None
