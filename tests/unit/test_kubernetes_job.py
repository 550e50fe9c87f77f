"""configs/kubernetes_job.yaml: what the Job does with each of our exit codes, and the rules that Kubernetes sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer_kit.config.modes import MODES
from trainer_kit.errors import ExitCode
from trainer_kit.run.flags import parse_flags
from trainer_kit.run.supervisor.restart_rules import Decision, outcome

PATH = Path(__file__).parents[2] / "configs" / "kubernetes_job.yaml"
ACTIONS = {Decision.END: "FailJob", Decision.RESTART: "Ignore", Decision.RETRY: "Count"}


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    """The manifest."""
    value: dict[str, Any] = yaml.safe_load(PATH.read_text())
    return value


@pytest.fixture(scope="module")
def rules(job: dict[str, Any]) -> list[dict[str, Any]]:
    """What it does with pods that have failed."""
    found: list[dict[str, Any]] = job["spec"]["podFailurePolicy"]["rules"]
    return found


def _action(rules: list[dict[str, Any]], code: int) -> str:
    """Returns the action on a pod that ended with `code` and met no disruption: that of the first rule that matches."""
    matching = (rule["action"] for rule in rules if code in rule.get("onExitCodes", {}).get("values", ()))
    return next(matching, "Count")


def test_each_exit_code_but_success_is_named_once(rules: list[dict[str, Any]]) -> None:
    named = [code for rule in rules for code in rule.get("onExitCodes", {}).get("values", ())]
    assert sorted(named) == sorted(set(ExitCode) - {ExitCode.DONE})


@pytest.mark.parametrize("code", sorted(set(ExitCode) - {ExitCode.DONE, ExitCode.MODEL_DIR_IN_USE}))
def test_the_job_decides_as_our_own_supervisor_does(rules: list[dict[str, Any]], code: int) -> None:
    assert _action(rules, code) == ACTIONS[outcome(code)[1]]


def test_a_model_dir_in_use_is_retried(rules: list[dict[str, Any]]) -> None:
    assert _action(rules, ExitCode.MODEL_DIR_IN_USE) == "Count"


@pytest.mark.parametrize("number", [6, 9, 11])
def test_death_by_a_signal_counts(rules: list[dict[str, Any]], number: int) -> None:
    assert _action(rules, 128 + number) == "Count"


def test_disruptions_do_not_count_but_final_ends_come_first(rules: list[dict[str, Any]]) -> None:
    assert [(rule["action"], "onPodConditions" in rule) for rule in rules] == [
        ("FailJob", False), ("Ignore", False), ("Ignore", True), ("Count", False),
    ]  # fmt: skip
    assert rules[2]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_the_rules_are_as_kubernetes_requires_them(job: dict[str, Any], rules: list[dict[str, Any]]) -> None:
    pod = job["spec"]["template"]["spec"]
    assert (job["apiVersion"], job["kind"], pod["restartPolicy"]) == ("batch/v1", "Job", "Never")
    assert job["spec"]["podReplacementPolicy"] == "Failed"
    for rule in rules:
        assert len(rule) == 2
        if codes := rule.get("onExitCodes"):
            assert codes["operator"] == "In" and codes["values"] == sorted(set(codes["values"]))
            assert 0 not in codes["values"]
            assert codes["containerName"] in [container["name"] for container in pod["containers"]]


def test_the_container_leaves_restarts_to_the_job(job: dict[str, Any]) -> None:
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"][:3] == ["python", "-m", "trainer_kit.train"]
    values = parse_flags(container["command"][2:])
    assert values.max_restarts == 0 and values.mode in MODES and values.experiment == "digits"
    (mount,) = container["volumeMounts"]
    assert values.model_dir.startswith(mount["mountPath"] + "/")
    assert [volume["name"] for volume in pod["volumes"]] == [mount["name"]]
