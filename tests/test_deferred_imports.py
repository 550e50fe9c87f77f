"""Importing TensorFlow and Keras imports nothing for wrappers and plots, which are there when they are used."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from trainer_kit.deferred_imports import DeferringFinder, defer_imports
from trainer_kit.testing import ForkServer


def use_wrappers_and_plots() -> None:
    """In a process that has imported TensorFlow and Keras as a command does."""
    defer_imports()
    assert sum(isinstance(finder, DeferringFinder) for finder in sys.meta_path) == 1
    import keras
    import tensorflow as tf

    assert tf.keras.layers.Dense and "keras.wrappers" in sys.modules
    for heavy in ("sklearn", "matplotlib"):
        assert heavy not in sys.modules, heavy
    from keras.wrappers import SKLearnClassifier

    assert SKLearnClassifier is tf.keras.wrappers.SKLearnClassifier
    assert any(base.__module__ == "sklearn.base" for base in SKLearnClassifier.__mro__)
    assert "matplotlib" not in sys.modules
    assert callable(keras.visualization.plot_image_gallery)
    assert "matplotlib" in sys.modules
    try:
        import keras.wrappers.nothing  # type: ignore[import-not-found]
    except ModuleNotFoundError as error:
        assert "keras.wrappers.nothing" in str(error)
    else:
        raise AssertionError("a module that does not exist was found")


def test_wrappers_and_plots_are_imported_when_they_are_used_and_not_before() -> None:
    with ForkServer() as server:
        ended = server.run(use_wrappers_and_plots)
    assert ended.code == 0, ended.text


@pytest.mark.parametrize("command", ["trainer_kit.train", "trainer_kit.cli.main"])
def test_the_commands_defer_them_and_the_library_does_not(command: str) -> None:
    code = f"""
import sys, trainer_kit, {command}
from trainer_kit.deferred_imports import DeferringFinder

def deferring():
    return any(isinstance(finder, DeferringFinder) for finder in sys.meta_path)

assert not deferring()
try:
    {command}.main(["--help"])
except SystemExit:
    pass
assert deferring()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


_MODULE = """
import os
from pathlib import Path

import slow_one

runs = Path(__file__).with_name("runs")
runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
if "SLOW_ONE_FAILS" in os.environ:
    raise ImportError("what it needs is not there")
__all__ = ["answer"]
answer, other = 42, slow_one.__name__


class Thing:
    pass
"""


@pytest.fixture
def slow_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module that is deferred and notes in the file `runs` how often its code ran."""
    (tmp_path / "slow_one.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [DeferringFinder({"slow_one"}), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "slow_one", raising=False)
    return importlib.import_module("slow_one")


def _runs(module: ModuleType) -> int:
    path = Path(str(module.__file__)).with_name("runs")
    return len(path.read_text()) if path.exists() else 0


def test_what_tools_ask_of_every_module_does_not_run_it_and_a_name_does_once(slow_one: ModuleType) -> None:
    assert slow_one.__spec__ is not None and not hasattr(slow_one, "__wrapped__")
    assert _runs(slow_one) == 0
    assert (slow_one.answer, slow_one.other, _runs(slow_one)) == (42, "slow_one", 1)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        slow_one.nothing  # noqa: B018
    assert {"__getattr__", "__dir__"}.isdisjoint(vars(slow_one)) and _runs(slow_one) == 1


def test_dir_a_star_import_and_pickle_see_all_of_it(slow_one: ModuleType) -> None:
    assert {"answer", "Thing"} <= set(dir(slow_one))
    assert pickle.loads(pickle.dumps(slow_one.Thing())).__class__ is slow_one.Thing


def test_a_star_import_gets_what_the_module_says(slow_one: ModuleType) -> None:
    found: dict[str, object] = {}
    exec("from slow_one import *", found)
    assert found["answer"] == 42 and "other" not in found


def test_threads_that_ask_at_once_run_it_once_and_see_all_of_it(slow_one: ModuleType) -> None:
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(slow_one.answer)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (seen, _runs(slow_one)) == ([42] * 8, 1)


def test_an_error_is_raised_each_time_until_its_cause_is_gone(
    slow_one: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "SLOW_ONE_FAILS", "yes")
    for _ in range(2):
        with pytest.raises(ImportError, match="what it needs is not there"):
            slow_one.answer  # noqa: B018
    monkeypatch.delitem(os.environ, "SLOW_ONE_FAILS")
    assert slow_one.answer == 42


def test_a_reload_runs_it_again(slow_one: ModuleType) -> None:
    assert slow_one.answer == 42
    importlib.reload(slow_one)
    assert (slow_one.answer, _runs(slow_one)) == (42, 2)
