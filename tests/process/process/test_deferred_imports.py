"""Importing TensorFlow, Keras and Orbit imports nothing that few programs use; it is there when it is used."""

from __future__ import annotations

import importlib
import os
import pickle
import random
import subprocess
import sys
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from trainer_kit.process.deferred_imports import DeferringFinder, defer_imports, when_asked, when_imported

ROOT = Path(__file__).parents[3]


def import_orbit_without_keras_2() -> None:
    """In a process that has imported TensorFlow, Keras and Orbit as a command does."""
    import numpy as np
    import orbit

    assert isinstance(orbit.__loader__, SourceFileLoader)
    assert not [name for name in ("tf_keras", "pandas") if name in sys.modules]
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    ArrayDataAdapter(np.ones((4, 2)), np.ones(4), batch_size=2)
    assert "pandas" in sys.modules


def use_wrappers_and_plots() -> None:
    """In a process that has imported TensorFlow and Keras as a command does."""
    defer_imports()  # for the second time
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


def import_keras_2_late() -> None:
    """Of Keras 2, when numbers have been drawn already, only what is its own is seeded."""
    from trainer_kit.config.schema.runtime import RuntimeConfig
    from trainer_kit.distribution.precision import set_precision
    from trainer_kit.distribution.seeds import seed_everything

    for seed, dtype in ((6, "float16"), (7, "bfloat16")):
        seed_everything(seed)
        set_precision(RuntimeConfig(mixed_precision_dtype=dtype))
    drawn = random.random()
    assert "tf_keras" not in sys.modules
    import tf_keras
    from tf_keras.src import backend

    assert tf_keras.mixed_precision.global_policy().name == "mixed_bfloat16"
    assert backend.is_tf_random_generator_enabled()
    assert backend._SEED_GENERATOR.generator.random() == random.Random(7).random() == drawn
    expected = random.Random(7)
    assert [expected.random(), expected.random()] == [drawn, random.random()]
    assert tf_keras.Model


def import_all() -> None:
    """In a process of its own: each import comes after the one that could bring it along."""
    importlib.import_module("tests.preloaded")  # what a command that trains imports
    for use in (import_orbit_without_keras_2, use_wrappers_and_plots, import_keras_2_late):
        use()


def test_what_few_use_is_imported_when_it_is_used_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)  # Model Garden sets it for the whole process
    code = "from tests.process.process.test_deferred_imports import import_all; import_all()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["trainer_kit.train", "trainer_kit.cli.main"])
def test_the_commands_defer_them_and_the_library_does_not(command: str) -> None:
    code = f"""
import sys, trainer_kit, {command}
from trainer_kit.process.deferred_imports import DeferringFinder

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
    monkeypatch.setattr(sys, "meta_path", [DeferringFinder({"slow_one": when_asked}), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "slow_one", raising=False)
    return importlib.import_module("slow_one")


def _runs(module: ModuleType) -> int:
    path = Path(str(module.__file__)).with_name("runs")
    return len(path.read_text()) if path.exists() else 0


def test_only_the_first_use_of_a_name_runs_the_module(slow_one: ModuleType) -> None:
    assert slow_one.__spec__ is not None and not hasattr(slow_one, "__wrapped__")
    assert _runs(slow_one) == 0
    assert (slow_one.answer, slow_one.other, _runs(slow_one)) == (42, "slow_one", 1)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        slow_one.nothing  # noqa: B018
    assert _runs(slow_one) == 1 and isinstance(slow_one.__loader__, SourceFileLoader)


def test_pickle_sees_all_of_it(slow_one: ModuleType) -> None:
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


def test_waiting_functions_get_the_module_after_its_code_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waited_for.py").write_text("answer = 42")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [DeferringFinder({}), *sys.meta_path])
    seen: list[object] = []
    for act in (lambda _: seen.append("replaced"), lambda module: seen.append(module.answer)):
        when_imported("waited_for", "look", act)
    when_imported("waited_for", "look too", lambda module: seen.append(type(module.__loader__)))
    importlib.import_module("waited_for")
    assert seen == [42, SourceFileLoader]
    when_imported("waited_for", "look", lambda module: seen.append("now"))
    assert seen[2:] == ["now"]
