"""Compares the config that began a run with the one that resumes it.

Changes that would make it another run are refused.

Safe changes affect how long, how fast and how visibly the run continues. Dangerous changes would
train something else under the same name: another optimizer, another model, other batches in another
order, other numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import JsonValue

from trainer_kit.config.allowed_values import format_value
from trainer_kit.config.fields import flatten_values, list_sections
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.optimization import AVERAGE
from trainer_kit.config.schema.section import Section
from trainer_kit.config.serialize import parse_params
from trainer_kit.config.sources import yaml_loader
from trainer_kit.config.sources.layer import is_inside, join_keys
from trainer_kit.errors import ConfigError, Mistake, suggest_names

ALLOW_FLAG = "--allow_config_change"
Kind = Literal["safe", "dangerous"]

# The paths of one of several optimizers, and of one of several tasks.
_OPTIMIZER_NAME = re.compile(r"^(trainer\.optimizers)\.\w+")
_TASK_ROUTINE_PREFIX = re.compile(r"^task\.task_routines\.[^.]+\.task_config\.")

# The longest entry that contains a path decides. * stands for any name.
_KINDS: dict[str, Kind] = {
    "": "dangerous",
    "trainer": "safe",
    "trainer.trainer_class": "dangerous",
    "trainer.freeze": "dangerous",
    "trainer.fuse_steps": "dangerous",
    "trainer.accumulate_steps": "dangerous",
    "trainer.overfit_batches": "dangerous",
    "trainer.optimizer_config.optimizer": "dangerous",
    "trainer.optimizer_config.ema": "dangerous",
    "trainer.optimizer_config.gradient_processors": "dangerous",
    "trainer.optimizers": "dangerous",
    "trainer.optimizers.*.learning_rate": "safe",
    "trainer.optimizers.*.warmup": "safe",
    "trainer.optimizers.*.learning_rate_multipliers": "safe",
    "trainer.optimizers.*.layer_decay": "safe",
    "runtime": "safe",
    "runtime.random_seed": "dangerous",
    "runtime.mixed_precision_dtype": "dangerous",
    "runtime.loss_scale": "dangerous",
    "runtime.inter_op_threads": "dangerous",
    "runtime.intra_op_threads": "dangerous",
    "runtime.executor": "dangerous",
    "task": "dangerous",
    "task.name": "safe",
    "task.init_checkpoint": "safe",
    "task.allow_image_summary": "safe",
    "task.validation_data": "safe",
    "task.evaluated_tasks": "safe",
    "task.train_data.cache": "safe",
    "task.train_data.prefetch_buffer_size": "safe",
    "task.train_data.autotune_algorithm": "safe",
    "task.train_data.ram_budget": "safe",
    "task.train_data.trainer_id": "safe",
    "task.train_data.tf_data_service_address": "safe",
    "task.train_data.tf_data_service_job_name": "safe",
}

_FRAMEWORK_SECTIONS = ("trainer.", "runtime.")

# Fields that sections of earlier releases did not have, by the end of the path, with what those
# releases did. Without a `dataset.type`, the task makes the data of a section.
_DEFAULTS_BY_SUFFIX: dict[str, Any] = {
    ".dataset.type": None,
    ".data_is_sharded": False,
    ".gradient_processors": [],
    ".ema.more_decays": {},
    ".ema.evaluate": [AVERAGE],
}


class _Absent:
    """The value of a key that one of the two configs does not have."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


@dataclass(frozen=True)
class Change:
    """One value that differs.

    Attributes:
      path: The dotted path of the value.
      old, new: The plain values. ABSENT stands for a key that vanished or appeared.
      kind: "safe", or "dangerous" when the resumed run would not be the same one.
    """

    path: str
    old: Any
    new: Any
    kind: Kind

    def __str__(self) -> str:
        old = format_value(self.old)
        new = format_value(self.new)
        return f"{self.path}: {old} -> {new}"


def compare_configs(old: Mapping[str, JsonValue], new: Section) -> list[Change]:
    """Returns what differs between an old and a new config, sorted by path.

    When the chosen branch of a "oneof" changes, its `type` stands for the fields of both branches.
    A field of trainer_kit that `old` lacks, as a record of TF Model Garden does, counts as its
    default.

    Args:
      old: Plain nested dicts, as in params.yaml.
      new: The section to compare them with.
    """
    old_values = dict(_iterate_flattened(old, "")) if old else {}
    new_values = dict(_iterate_flattened(new.as_dict(), ""))

    # What the record lacks counts as its default, if the new config has it.
    if old_values:
        defaults: dict[str, Any] = {}
        framework_config = ExperimentConfig().as_dict()
        for path, value in _iterate_flattened(framework_config, ""):
            if path.startswith(_FRAMEWORK_SECTIONS) and path in new_values:
                defaults[path] = value
        for suffix, value in _DEFAULTS_BY_SUFFIX.items():
            for path in new_values:
                if path.endswith(suffix):
                    defaults[path] = value
        old_values = {**defaults, **old_values}

    changes = []
    for path in sorted(old_values.keys() | new_values.keys()):
        old_value = old_values.get(path, ABSENT)
        new_value = new_values.get(path, ABSENT)

        # In Python True equals 1, so the types are compared too.
        both_alike = isinstance(old_value, bool) == isinstance(new_value, bool)
        if old_value == new_value and both_alike:
            continue

        # Other numbers of fused steps give the same bits in any grouping.
        both_fused = path == "trainer.fuse_steps" and all(
            type(value) is int and value > 1 for value in (old_value, new_value)
        )
        # Evaluations may use further weights, as long as the first ones, which decide the best,
        # stay.
        both_lists = isinstance(old_value, list) and isinstance(new_value, list)
        same_first = (
            path.endswith(".ema.evaluate") and both_lists and old_value[:1] == new_value[:1]
        )
        kind: Kind = "safe" if both_fused or same_first else get_change_kind(path)
        changes.append(Change(path, old_value, new_value, kind))

    # The change of a `type` stands for the fields of the branches that are left and entered.
    old_branches = []
    new_branches = []
    for change in changes:
        choice, dot, name = change.path.rpartition(".")
        if dot and name == "type":
            old_branches.append(f"{choice}.{change.old}")
            new_branches.append(f"{choice}.{change.new}")

    remaining = []
    for change in changes:
        branches: list[str] = []
        if change.new is ABSENT:
            branches += old_branches
        if change.old is ABSENT:
            branches += new_branches
        if not any(is_inside(change.path, branch) for branch in branches):
            remaining.append(change)
    return remaining


def check_resume(
    old_yaml_text: str, new: ExperimentConfig, allowed_paths: Sequence[str]
) -> list[Change]:
    """Returns the changes since a run began that do not prevent a resume.

    They are the safe ones, and the dangerous ones that are allowed.

    Args:
      old_yaml_text: The text of the run's params.yaml.
      new: The config to resume with.
      allowed_paths: The values of --allow_config_change: dotted paths of values or of whole
        sections.

    Raises:
      ConfigError: For each dangerous change that is not allowed. The message names the flag that
        would allow it.
    """
    recorded = parse_params(old_yaml_text)
    changes = compare_configs(recorded.values, new)
    refused = []
    for change in changes:
        is_allowed = any(is_inside(change.path, allowed) for allowed in allowed_paths if allowed)
        if change.kind == "dangerous" and not is_allowed:
            refused.append(change)
    if refused:
        raise ConfigError(
            Mistake(
                change.path,
                f"was {format_value(change.old)} when this run began"
                f" and is {format_value(change.new)} now",
                "go back to the old value, use another model_dir, or accept it with"
                f" {ALLOW_FLAG}={change.path} (run_experiment:"
                f" allow_config_change=[{change.path!r}])",
            )
            for change in refused
        )
    return changes


def find_data_mistakes(
    old: Mapping[str, Mapping[str, JsonValue]],
    new: Mapping[str, Mapping[str, JsonValue]],
    changes: Sequence[Change],
    allowed_paths: Sequence[str],
) -> Iterator[Mistake]:
    """Yields a mistake for each section of data that is other data than when the run began.

    Values that only one side has are not compared. Neither are sections whose config has changed:
    check_resume judges these.

    Args:
      old: What describes the data that the run began with, by section and name.
      new: The same for the data that the run resumes with.
      changes: The changes of the config.
      allowed_paths: The paths that may differ, as for check_resume.
    """
    changed_paths = []
    for change in changes:
        if change.kind == "dangerous" or "validation_data" in change.path:
            changed_paths.append(change.path)
    for section, new_values in new.items():
        path = f"{section}.identity"
        old_values = old.get(section, {})
        differences = []
        for name, value in new_values.items():
            old_value = old_values.get(name, value)
            if old_value != value:
                differences.append(f"{name} was {old_value} and is {value}")
        is_allowed = any(is_inside(path, allowed) for allowed in allowed_paths if allowed)
        has_changed_config = any(is_inside(changed, section) for changed in changed_paths)
        if not differences or is_allowed or has_changed_config:
            continue

        all_differences = "; ".join(differences)
        yield Mistake(
            section,
            f"the data has changed since this run began: {all_differences}",
            "use another model_dir, go back to that data, or accept it with"
            f" {ALLOW_FLAG}={path} (run_experiment, fit: allow_config_change=[{path!r}])",
        )


def find_unknown_paths(
    allowed_paths: Sequence[str], new: ExperimentConfig, old_yaml_text: str = ""
) -> list[Mistake]:
    """Returns a mistake for each allowed path that neither the new config nor the old one has.

    Args:
      allowed_paths: The values of --allow_config_change, as for check_resume.
      new: The config to resume with.
      old_yaml_text: The text of the run's params.yaml, if it exists. check_resume reports the
        mistakes in it.
    """
    try:
        old = yaml_loader.parse(old_yaml_text, "params.yaml", is_trusted=True).values
    except ConfigError:
        return []

    old_values = old if isinstance(old, dict) else {}
    paths = set(flatten_values(new))
    # The config itself has the path "".
    paths.update(path for path, _, _ in list_sections(new) if path)
    paths.update(path for path, _ in _iterate_flattened(old_values, ""))

    # find_data_mistakes accepts the identity of a section of data, which is no value of the config.
    mistakes = []
    for allowed in allowed_paths:
        section = allowed.removesuffix(".identity")
        if not any(is_inside(path, section) for path in paths if allowed):
            problem = f"the config has no {allowed!r}"
            advice = suggest_names(allowed, sorted(paths))
            mistakes.append(Mistake(ALLOW_FLAG, problem, advice))
    return mistakes


def get_change_kind(path: str) -> Kind:
    """Returns whether a run stays the same one when the value at the dotted `path` changes."""
    # The entries are written without the names of optimizers and tasks.
    path = _OPTIMIZER_NAME.sub(r"\1.*", path)
    path = _TASK_ROUTINE_PREFIX.sub("task.", path)

    entries = [entry for entry in _KINDS if is_inside(path, entry)]
    longest_entry = max(entries, key=len)
    return _KINDS[longest_entry]


def _iterate_flattened(
    values: JsonValue | Mapping[str, JsonValue], path: str
) -> Iterator[tuple[str, Any]]:
    """Yields the plain values by dotted path, also those in lists of sections."""
    items: Iterable[tuple[object, JsonValue]]
    if isinstance(values, Mapping) and values:
        items = values.items()
    elif isinstance(values, list) and any(isinstance(item, Mapping) for item in values):
        items = enumerate(values)
    else:
        yield path, values
        return
    for key, value in items:
        value_path = join_keys(path, key)
        yield from _iterate_flattened(value, value_path)
