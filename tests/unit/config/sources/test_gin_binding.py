"""Names of sections and experiments in gin, and forgetting. The rest is in test_gin_source.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gin
import pytest

from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.config.sources import gin_binding
from trainer_kit.config.sources.gin_scan import scan
from trainer_kit.errors import UsageError


@gin.configurable("theirs", module="gin_binding")
def _theirs(size: Any = 1, **others: Any) -> Any:
    return size, others


@gin.configurable("made", module="gin_binding")
def _made() -> int:
    return 7


@gin.configurable("held", module="gin_binding")
def _held(thing: Any = None, number: int = 0) -> tuple[Any, int]:
    return thing, number


@gin.configurable("single", module="gin_binding")
def _single(thing: Any = None) -> Any:
    return thing


@pytest.mark.parametrize(
    ("name", "selector"),
    [
        ("digits", "experiment.digits"),
        ("vision/resnet/cifar-10", "experiment.vision.resnet.cifar_10"),
        ("3d/unet", "experiment._3d.unet"),
    ],
)
def test_an_experiments_name_becomes_one_that_gin_allows(name: str, selector: str) -> None:
    assert gin_binding.experiment_selector(name) == selector


def test_forgetting_unbinds_what_was_bound_and_no_more() -> None:
    selector = gin_binding.section_selector(TrainerConfig)
    gin_binding.forget(gin)
    before = gin.config_str()
    gin_binding.collect(gin, selector, "trainer")
    assert gin_binding.bind_ours(gin, scan(gin, [], ["TrainerConfig.train_steps = 5"]), "trainer_kit.") == []
    assert gin_binding.call(selector) == {"train_steps": 5}
    assert gin_binding.scopes(selector) == ["trainer"]
    gin_binding.forget(gin)
    assert gin_binding.call(selector) == {}
    assert gin.config_str() == before
    gin_binding.forget(gin)
    assert "TrainerConfig" not in gin.operative_config_str()


def _bind_and_forget() -> None:
    gin_binding.collect(gin, gin_binding.section_selector(TrainerConfig), "trainer")
    gin_binding.bind_ours(gin, scan(gin, [], ["TrainerConfig.train_steps = 5"]), "trainer_kit.")
    gin_binding.bind_others(gin, scan(gin, [], ["theirs.ours = 6", "our_macro = 8"]), strict=True)
    assert _theirs()[1]["ours"] == 6
    gin_binding.forget(gin)


def test_bindings_of_other_code_stay_complete() -> None:
    with gin.unlock_config():
        gin.parse_config(
            "theirs = 'the name of a macro, too'\ntheirs.size = [@made(), %theirs]\nin/scope/theirs.late = {'a': None}"
        )
    before = gin.config_str()
    _bind_and_forget()
    assert _theirs() == ([7, "the name of a macro, too"], {})
    with gin.config_scope("in/scope"):
        assert _theirs() == ([7, "the name of a macro, too"], {"late": {"a": None}})
    assert gin.config_str() == before
    with pytest.raises(ValueError, match="no bound parameters"):
        gin.query_parameter("our_macro/gin.macro.value")


@pytest.mark.parametrize("scope", ["", "in/scope"])
def test_objects_that_other_code_has_bound_stay_themselves(scope: str) -> None:
    thing = max  # a function: gin copies other objects for each call
    with gin.unlock_config():
        gin.bind_parameter((scope, "gin_binding.held", "thing"), thing)
        gin.bind_parameter((scope, "gin_binding.held", "number"), 3)
        gin.bind_parameter(("an_object", "gin.macro", "value"), thing)
        gin.parse_config("alone/held.thing = %an_object")
        _bind_and_forget()
        _bind_and_forget()
    with gin.config_scope(scope or None):
        assert _held() == (thing, 3)
    with gin.config_scope("alone"):
        assert _held()[0] is thing


def test_an_object_bound_in_a_scope_stays_only_there() -> None:
    thing = max  # a function: gin copies other objects for each call
    with gin.unlock_config():
        gin.bind_parameter("far/away/single.thing", thing)
        with gin.config_scope("elsewhere"):
            _bind_and_forget()
    assert _single() is None
    with gin.config_scope("far/away"):
        assert _single() is thing


def test_imports_of_other_code_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gin_usermod.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    with gin.unlock_config():
        gin.parse_config("import gin_usermod")
        _bind_and_forget()
        assert "import gin_usermod\n" in gin.config_str()


def test_a_warning_names_an_import_that_fails_now(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    with gin.unlock_config():
        _bind_and_forget()
        gin.bind_parameter("theirs.size", 3)
        listed = gin.config_str()
        with monkeypatch.context() as patched:
            patched.setattr(gin, "config_str", lambda: f"import gin_no_such_module\n{listed}")
            gin_binding.forget(gin)
    assert "gin could not repeat `import gin_no_such_module` and no longer knows this import: " in caplog.text
    assert _theirs()[0] == 3


def test_a_locked_gin_is_locked_again_after_forgetting() -> None:
    with gin.unlock_config():
        gin.finalize()
        assert gin.config_is_locked()
        with gin.unlock_config():
            _bind_and_forget()
        assert gin.config_is_locked()


def test_bindings_that_cannot_be_read_back_are_an_error_and_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    with gin.unlock_config():
        _bind_and_forget()
        gin.bind_parameter("theirs.size", 3)
        monkeypatch.setattr(gin, "config_str", lambda: "no_such_name.size = 3")
        with pytest.raises(UsageError, match=r"no_such_name\.size.*start each run in a new process"):
            gin_binding.forget(gin)
    assert _theirs() == (3, {})
