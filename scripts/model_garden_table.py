"""The experiments of TF Model Garden, and what `trainer-kit check` says of each on this machine.

    .venv/bin/python -m scripts.model_garden_table [NAME ...]

Prints the table of docs/model_garden_experiments.md; all 41 take about eight minutes on two cores and 3 GB of memory.
Each is checked as it is registered, and, where values are missing that only a user can know, once more with some.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tests.fork_server import ForkServer
from trainer_kit.cli.main import main as command
from trainer_kit.compat.model_garden.experiments import EXPERIMENTS, PREFIX
from trainer_kit.config.discovery import find_experiment
from trainer_kit.config.experiments import get_experiment
from trainer_kit.config.fields import leaves
from trainer_kit.errors import EXIT_CODES, ExitCode

THEIRS = ("official.vision", "official.nlp.tasks", "official.nlp.configs.experiment_configs")
DOOR = (
    "trainer_kit.run.launcher",
    "trainer_kit.training.trainer_creation",
    "trainer_kit.compat.model_garden.training.trainer",
)
_OPTIMIZER = (
    "trainer: {optimizer_config: {optimizer: {type: sgd}, "
    "learning_rate: {type: constant, constant: {learning_rate: 0.1}}}}"
)
_RATE = (
    "trainer: {optimizer_config: {learning_rate: {polynomial: {initial_learning_rate: 1.0e-4, decay_steps: 1000}}, "
    "warmup: {polynomial: {warmup_steps: 100}}}}"
)
_IMAGES, _TWO_CLASSES = "task: {model: {num_classes: 2, input_size: [64, 64, 3]}}", "task: {model: {num_classes: 2}}"

# Values that only a user can know, by experiment; the second check sets them.
GIVEN: dict[str, tuple[str, ...]] = {
    "mock": (_OPTIMIZER,),
    **dict.fromkeys(("image_classification", "retinanet", "semantic_segmentation"), (_OPTIMIZER, _IMAGES)),
    "video_classification": (_OPTIMIZER, "task: {train_data: {num_classes: 2}, validation_data: {num_classes: 2}}"),
    **dict.fromkeys((name for name in EXPERIMENTS if name.startswith(("bert/", "electra/"))), (_RATE,)),
    **dict.fromkeys(("bert/sentence_prediction", "bert/sentence_prediction_text"), (_RATE, _TWO_CLASSES)),
    "bert/tagging": (_RATE, "task: {class_names: [a, b]}"),
}


@dataclass(frozen=True)
class Checked:
    """A result of `check`: its exit code, its message without line breaks, and the seconds it took."""

    code: int
    message: str
    seconds: float


def check(server: ForkServer, name: str, overrides: tuple[str, ...] = ()) -> Checked:
    """Runs `trainer-kit check` for an experiment of Model Garden."""
    arguments = ["check", PREFIX + name, *(f"--params_override={text}" for text in overrides)]
    ended = server.run(_command, arguments, timeout=600)
    _, _, error = ended.text.partition("\nerror: ")
    lines = [line.strip() for line in (error or ended.text.splitlines()[-1]).splitlines() if line.strip()]
    several = lines[0].endswith(" mistakes")
    return Checked(ended.code, "<br>".join(lines[1:] if several else lines[:1]), ended.seconds)


def rows(server: ForkServer, names: list[str]) -> Iterator[tuple[str, ...]]:
    """Yields the cells of the table's rows, one or two for each experiment."""
    for name in names:
        find_experiment(PREFIX + name)
        config = get_experiment(PREFIX + name)
        for overrides in ((), GIVEN[name]) if name in GIVEN else ((),):
            checked = check(server, name, overrides)
            said = "ready to run" if checked.code == ExitCode.DONE else checked.message
            first = ("and with these given", "", "") if overrides else (f"`{PREFIX}{name}`", type(config.task).__name__)
            values = () if overrides else (str(len(leaves(config))),)
            yield (*first, *values, str(checked.code), said, f"{checked.seconds:.0f}")


def main(names: list[str]) -> int:
    """Prints the table; returns how many experiments end in a bug."""
    bugs = 0
    print("| experiment | task's config | values | exit | what `check` says | s |\n|---|---|---:|---:|---|---:|")
    with ForkServer(needs=[*THEIRS, *DOOR]) as server:
        for cells in rows(server, names or list(EXPERIMENTS)):
            print(f"| {' | '.join(cells)} |", flush=True)
            bugs += cells[3] not in {str(int(code)) for code in EXIT_CODES} or cells[3] == str(int(ExitCode.BUG))
    return bugs


def _command(arguments: list[str]) -> None:
    sys.exit(command(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
