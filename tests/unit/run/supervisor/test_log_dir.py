"""Which process of a run keeps its attempts where."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import ConfigError
from trainer_kit.run.preflight import Request
from trainer_kit.run.supervisor.log_dir import ask_log_dir, log_dir_of

_HOSTS = {"worker_hosts": "a:1,b:1,c:1"}
_CHIEF = {"chief": ["a:1"], "worker": ["b:1", "c:1"]}


def _log_dir(mode: str = "train", eval_name: str = "continuous_eval", **runtime: Any) -> str:
    return log_dir_of(Request("mine", mode, "run/a", eval_name=eval_name), ExperimentConfig().replace(runtime=runtime))


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)


@pytest.mark.parametrize("mode", ["train", "train_and_eval", "train_and_post_eval"])
def test_who_trains_alone_keeps_them_in_model_dir(mode: str) -> None:
    assert _log_dir(mode) == "run/a"
    assert _log_dir(mode, task_index=2) == "run/a"  # of no workers


def test_an_evaluation_keeps_them_with_what_it_finds() -> None:
    assert _log_dir("continuous_eval") == "run/a/evals/continuous_eval"
    assert _log_dir("continuous_eval", "test_set") == "run/a/evals/test_set"
    assert _log_dir("eval", "test_set") == "run/a/evals/eval"


@pytest.mark.parametrize(("index", "folder"), [(0, "run/a"), (1, "run/a/workers/1"), (2, "run/a/workers/2")])
def test_workers_but_the_first_have_a_folder_each(index: int, folder: str) -> None:
    assert _log_dir(**_HOSTS, task_index=index) == folder


@pytest.mark.parametrize(
    ("jobs", "kind", "index", "folder"),
    [
        (_CHIEF, "chief", 0, "run/a"),
        (_CHIEF, "worker", 0, "run/a/workers/1"),
        (_CHIEF, "worker", "1", "run/a/workers/2"),
        (_CHIEF, "evaluator", 1, "run/a"),
        ({"worker": ["a:1", "b:1"]}, "worker", 0, "run/a"),
        ({"worker": ["a:1", "b:1"]}, "worker", 1, "run/a/workers/1"),
        ({"worker": ["a:1"]}, "worker", 0, "run/a"),
    ],
)
def test_a_platform_that_tells_the_workers_wins_over_the_config(
    monkeypatch: pytest.MonkeyPatch, jobs: dict[str, list[str]], kind: str, index: int | str, folder: str
) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}}))
    assert _log_dir(**_HOSTS, task_index=2) == folder


def test_workers_that_evaluate_together_have_a_folder_each() -> None:
    assert _log_dir("continuous_eval", **_HOSTS, task_index=1) == "run/a/evals/continuous_eval/workers/1"


def test_a_description_of_workers_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    with pytest.raises(ConfigError, match="TF_CONFIG: it is not JSON"):
        _log_dir()


def test_the_answer_is_the_last_line_whatever_else_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('loading', end=''); print('a warning', file=sys.stderr); " + (
        "from trainer_kit.run.supervisor.log_dir import tell; tell('runs/é \\n x')"
    )
    assert ask_log_dir([sys.executable, "-c", code]) == (0, "runs/é \n x")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("end", "code"), [("sys.exit(6)", 6), ("os.kill(os.getpid(), 9)", 1)])
def test_a_failed_process_gives_its_code_and_its_output(capfd: pytest.CaptureFixture[str], end: str, code: int) -> None:
    said = "import os, sys; print('out', flush=True); print('error', file=sys.stderr, flush=True); "
    assert ask_log_dir([sys.executable, "-c", said + end]) == (code, "")
    assert capfd.readouterr() == ("out\n", "error\n")
