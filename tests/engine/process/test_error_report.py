"""What a command prints of an error; test_mistakes.py has the real errors."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.errors import DataError, add_note
from trainer_kit.errors.user_exits import build_exit_error
from trainer_kit.errors.user_frames import find_user_frames, get_frame_locals, parse_frames
from trainer_kit.process.error_report import LINES, describe_structure, format_reason, print_error


def _fail(points: np.ndarray) -> None:
    raise ValueError(f"a shape of {points.shape}")


def _raise_error(points: np.ndarray | None = None) -> Exception:
    with pytest.raises(ValueError) as caught:
        _fail(np.zeros([2, 3], np.float32) if points is None else points)
    return caught.value


def test_the_deepest_line_of_the_user_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_error(_raise_error(), model_dir=str(tmp_path)) == 1

    first, code, why, where, *_ = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {__file__}:")
    assert first.endswith(", in _fail")
    assert code.strip().startswith("raise ValueError")
    assert why == "  ValueError: a shape of (2, 3)"
    assert where == "  where points is float32 [2, 3]"


def test_the_traceback_goes_to_the_folder_of_a_recorded_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "params.yaml").write_text("")
    print_error(_raise_error(), model_dir=str(tmp_path))
    [file] = (tmp_path / "errors").iterdir()

    assert f"  the whole traceback: {file}\n" in capsys.readouterr().err
    assert "Traceback (most recent call last)" in file.read_text()


def test_a_traceback_may_contain_a_name_that_is_not_utf_8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "params.yaml").write_text("")
    monkeypatch.setattr(sys, "argv", ["trainer-kit", "caf\udce9"])

    assert print_error(_raise_error(), model_dir=str(tmp_path)) == 1

    [file] = (tmp_path / "errors").iterdir()
    assert file.read_text().startswith("command: trainer-kit caf\\udce9\n")


def test_without_a_record_the_model_dir_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_error(_raise_error(), model_dir=str(tmp_path / "run"))
    file = Path(capsys.readouterr().err.splitlines()[-1].split(": ")[1])

    assert file.is_file()
    assert not (tmp_path / "run").exists()

    file.unlink()


def test_debug_prints_the_traceback_and_writes_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "params.yaml").write_text("")
    print_error(_raise_error(), debug=True, model_dir=str(tmp_path))
    text = capsys.readouterr().err

    assert text.startswith("Traceback")
    assert text.endswith("  the whole traceback: above\n")
    assert not (tmp_path / "errors").exists()


def test_an_explained_error_is_its_message_and_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_error(DataError("no batch")) == 5
    assert capsys.readouterr().err == "error: no batch\n"


def test_an_error_without_a_user_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TypeError) as caught:
        int("1", bases=3)  # type: ignore[call-overload]

    error = caught.value
    error.__traceback__ = None

    assert find_user_frames(error) == []

    print_error(error, model_dir=str(tmp_path))

    assert "no line of your code is in this traceback" in capsys.readouterr().err


def test_a_variable_made_from_a_steps_values_gets_advice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    variables: list[tf.Variable] = []

    @tf.function(autograph=False)  # type: ignore[misc]
    def step(features: tf.Tensor) -> None:
        variables.append(tf.Variable(features + 1.0))

    with pytest.raises(Exception, match="Unable to lift tensor") as caught:
        step.get_concrete_function(tf.TensorSpec([2]))

    print_error(caught.value, debug=True)
    report = capsys.readouterr().err.rsplit("\nerror: ", 1)[1]

    assert (
        "create variables in build_model, and those of an optimizer with "
        "optimizer.build(variables)\n"
    ) in report


def _leave(value: tf.Tensor) -> tf.Tensor:
    sys.exit(int(value.shape[0]))


@pytest.mark.parametrize("translated", [True, False])
def test_an_exit_is_reported_with_its_line_or_function(translated: bool) -> None:
    with pytest.raises(SystemExit) as caught:
        tf.function(_leave, autograph=translated)(tf.zeros([3]))

    line = _leave.__code__.co_firstlineno + 1
    place = "your code, in _leave," if translated else f"{__file__}:{line}: this line"

    assert str(build_exit_error(caught.value)).startswith(
        f"{place} ends the program (SystemExit(3)); raise an error"
    )


def test_a_report_has_few_lines_however_much_there_is_to_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = _raise_error()

    add_note(error, "\n".join(map(str, range(100))))
    print_error(error, debug=True)
    report = capsys.readouterr().err.rsplit("\nerror: ", 1)[1]

    assert len(report.splitlines()) == LINES


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{{function_node __wrapped__Sub}} sizes differ [Op:Sub] name: ", "sizes differ"),
        (
            (
                'in user code:\n\n    File "a.py", line 3, in f  *\n        x = y\n\n    '
                "ValueError: no fit\n"
            ),
            "no fit",
        ),
        (
            "Graph execution error:\n\nDetected at node A defined at (most recent call last):\n"
            '  File "a.py", line 3, in f\n\nlabel 7\n\t [[{{node A}}]] [Op:__inference_1]',
            "label 7",
        ),
        (
            "Exception encountered when calling Net.call().\n\n\x1b[1mcannot add for '{{node "
            "a}} = Sub[T=DT_FLOAT](b)' "
            "with input shapes: [2], [3].\x1b[0m\n\nArguments received by Net.call():\n  x=1",
            "cannot add for the operation Sub with input shapes: [2], [3].",
        ),
    ],
)
def test_the_reason_is_without_stacks_and_names_of_nodes(text: str, line: str) -> None:
    assert format_reason(ValueError(text)) == [f"ValueError: {line}"]


def test_structures_are_described_with_dtypes_and_shapes() -> None:
    points = np.zeros([2, 3], np.float32)
    labels = np.zeros([2], np.int32)

    assert (
        describe_structure(({"points": points}, [labels]))
        == "({points: float32 [2, 3]}, (int32 [2]))"
    )
    assert describe_structure({"points": points, "name": "x"}) == ""
    assert describe_structure("x") == ""


def test_frames_in_the_text_of_an_error_are_found() -> None:
    [frame] = parse_frames(f'Detected at\n  File "{__file__}", line 7, in f\n\nwrong')

    assert frame.file == __file__
    assert frame.line == 7
    assert frame.function == "f"
    assert find_user_frames(ValueError(f'File "{__file__}", line 7, in f')) == [frame]


def test_values_are_those_of_the_frame() -> None:
    error = _raise_error(np.zeros([4], np.float64))
    assert list(get_frame_locals(error, find_user_frames(error)[-1])) == ["points"]
