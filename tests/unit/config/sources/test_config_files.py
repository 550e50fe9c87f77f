"""Config files and the three spellings of --params_override."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.config_builders import collect_mistakes
from trainer_kit.config.sources.config_files import read_config_file, read_params_override
from trainer_kit.config.sources.layer import ConfigLayer
from trainer_kit.errors import ConfigError

NESTED = {"trainer": {"train_steps": 5, "loss_upper_bound": 0.001}, "task": {"weights": [1, 2]}}


def test_a_yaml_file_gives_values_with_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "conf.yaml"

    path.write_text("trainer:\n  train_steps: 5\n")

    assert read_config_file(path) == ConfigLayer(
        {"trainer": {"train_steps": 5}},
        {"trainer": f"{path}:1", "trainer.train_steps": f"{path}:2"},
    )


def test_json_is_known_by_its_name_or_by_its_text(tmp_path: Path) -> None:
    for name in ("conf.json", "conf.txt", "conf.yaml"):
        (tmp_path / name).write_text(json.dumps(NESTED, indent="\t"))
        layer = read_config_file(tmp_path / name)
        assert layer.values == NESTED
        assert layer.origins["trainer.train_steps"] == f"{tmp_path / name}:3"


def test_an_empty_file_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# later\n")
    assert read_config_file(tmp_path / "empty.yaml") == ConfigLayer()


def test_a_missing_file_names_the_near_ones_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "digits.yaml").touch()
    mistake = collect_mistakes(read_config_file, tmp_path / "digit.yaml")[""]

    assert mistake.origin == str(tmp_path / "digit.yaml")
    assert f"did you mean {tmp_path}/digits.yaml?" in str(mistake)
    assert "there is no folder" in str(
        collect_mistakes(read_config_file, tmp_path / "nowhere" / "digits.yaml")[""]
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.mkdir(), "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b"a: \xff\xfe"), "UTF-8 (byte 3)"),
        (lambda path: path.symlink_to(path), "cannot be read"),
        (lambda path: path.symlink_to("/dev/zero"), "is longer than"),
        (lambda path: path.write_text("- 1\n- 2\n"), "is a list"),
        (lambda path: path.write_text("hello\n"), "'hello' is not a setting"),
    ],
    ids=["folder", "binary", "loop", "endless", "list", "word"],
)
def test_a_file_that_holds_no_settings_is_refused(
    tmp_path: Path, make: Callable[[Path], object], said: str
) -> None:
    make(tmp_path / "conf.yaml")
    mistake = collect_mistakes(read_config_file, tmp_path / "conf.yaml")[""]

    assert said in str(mistake)
    assert mistake.origin.startswith(f"{tmp_path}/conf.yaml")


@pytest.mark.parametrize("path", ["gs://bucket/conf.yaml", "s3://bucket/conf.yaml"])
def test_a_remote_file_is_refused(path: str) -> None:
    assert "not a local file" in str(collect_mistakes(read_config_file, path)[""])


@pytest.mark.parametrize(
    "text",
    [
        "trainer.train_steps=5,trainer.loss_upper_bound=1e-3,task.weights=[1, 2]",
        " trainer.train_steps = 5 , task.weights = [1,2] ,trainer.loss_upper_bound=0.001",
        "{trainer: {train_steps: 5, loss_upper_bound: 1e-3}, task: {weights: [1, 2]}}",
        "trainer:\n  train_steps: 5\n  loss_upper_bound: 1e-3\ntask:\n  weights: [1, 2]\n",
        json.dumps(NESTED),
        json.dumps(NESTED, indent="\t"),
        "a=b.yaml",
        "over.json",
    ],
)
def test_the_spellings_of_an_override_say_the_same(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a=b.yaml").write_text(
        "trainer: {train_steps: 5, loss_upper_bound: 1e-3}\ntask: {weights: [1, 2]}"
    )
    (tmp_path / "over.json").write_text(json.dumps(NESTED))
    monkeypatch.chdir(tmp_path)

    assert read_params_override(text).values == NESTED


def test_the_origin_of_an_override_is_the_flag_or_the_file(tmp_path: Path) -> None:
    assert read_params_override("a.b=1").origins == {"a.b": "--params_override"}
    assert set(read_params_override("{a: {b: 1}}").origins.values()) == {"--params_override"}

    (tmp_path / "over.yml").write_text("a:\n  b: 1\n")

    assert (
        read_params_override(str(tmp_path / "over.yml")).origins["a.b"]
        == f"{tmp_path / 'over.yml'}:2"
    )


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        ("  ", {}),
        ("a=", {"a": ""}),
        ("a=off,b=true,c=null", {"a": "off", "b": True, "c": None}),
        (
            "a=[x, 'y,z', [1, 2]],b={c: 1, d: [2, 3]}",
            {"a": ["x", "y,z", [1, 2]], "b": {"c": 1, "d": [2, 3]}},
        ),
        ("a='it''s, ok',b=\"x, \\\"y\\\"\"", {"a": "it's, ok", "b": 'x, "y"'}),
        ("a=it's,b=2", {"a": "it's", "b": 2}),
        ("a=h1:1;h2:2,b='h1:1,h2:2'", {"a": "h1:1;h2:2", "b": "h1:1,h2:2"}),
        ("a.path=gs://x/*.tf,b=*.txt", {"a": {"path": "gs://x/*.tf"}, "b": "*.txt"}),
        ("a=x=y", {"a": "x=y"}),
        ("a.file=runs/best.yaml", {"a": {"file": "runs/best.yaml"}}),
        ("input_path.en-de=x", {"input_path": {"en-de": "x"}}),
        ("a=__import__('os')", {"a": "__import__('os')"}),
        ("a=1,", {"a": 1}),
    ],
)
def test_assignments_keep_commas_inside_brackets_and_quotes(text: str, values: object) -> None:
    assert read_params_override(text).values == values


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("trainer.train_steps", "", "is not a setting"),
        ("5", "", "is not a setting"),
        ("[a, b]", "", "is a list"),
        ("a=1,b", "", "'b' is not a setting"),
        ("a=h1:1,h2:2", "", "'h2:2' is not a setting"),
        ("a..b=1", "", "is not a setting"),
        ("a=1,a=2", "a", "given twice"),
        ("a=1,a.b=2", "a.b", "a itself is set to a value"),
        ("a.b=1,a=2", "a", "given twice"),
        ("a=[1,2", "", "] is missing"),
        ("a='x", "", "' is missing"),
        ("a='x'y", "a", "is not YAML"),
        ("{a: 1", "", "is not YAML"),
        ("{a: 1, a: 2}", "a", "given twice"),
        ("missing.yaml", "", "there is no such file"),
        ("a=" + "[" * 300 + "]" * 300, "a", "levels deep"),
    ],
)
def test_an_override_that_is_none_of_the_spellings_is_refused(
    text: str, path: str, said: str
) -> None:
    mistake = collect_mistakes(read_params_override, text)[path]

    assert said in str(mistake)
    assert mistake.origin.startswith(("--params_override", "missing.yaml"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".hidden.yaml", "here there are no config files"),
        ("digits.yaml", "did you mean digits.yaml?"),
    ],
)
def test_a_missing_override_file_is_told_with_near_visible_files(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()

    assert said in str(collect_mistakes(read_params_override, "dgits.yaml")[""])


def test_all_mistakes_of_one_override_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        read_params_override("x=1,a,b.=1,d=1,d=2")

    assert [mistake.path for mistake in caught.value.mistakes] == ["", "", "d"]
