"""The flags of `python -m trainer_kit.train` with their meanings, and the text of --help."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from trainer_kit.config.modes import MODES

EXAMPLES = {
    (
        "Train an experiment that comes with trainer_kit, evaluate it during training, and write"
        " to runs/digits:"
    ): (
        "python -m trainer_kit.train --experiment=digits --mode=train_and_eval"
        " --model_dir=runs/digits"
    ),
    (
        "Do the same with your own experiment from the file my_task.py, and change a value of its"
        " config:"
    ): (
        "python -m trainer_kit.train --import_module=my_task.py --experiment=rings"
        " --mode=train_and_eval \\\n      --model_dir=runs/rings"
        " --params_override=trainer.train_steps=2000"
    ),
}
REQUIRED_FLAGS = ("experiment", "mode", "model_dir")
_WIDTH = 100


@dataclass(frozen=True)
class FlagText:
    """The text of a flag in --help.

    Attributes:
      value: The placeholder of its value, such as FILE. Empty for a switch.
      sentence: A sentence that says what the flag does.
      default: The value without the flag. None if it has no default.
      kind: One of text, repeated (each use adds a value), count (a number of 0 or more), step,
        switch and absl (defined by absl).
    """

    value: str
    sentence: str
    default: str | None = None
    kind: Literal["text", "repeated", "count", "step", "switch", "absl"] = "text"


FLAGS: dict[str, FlagText] = {
    "experiment": FlagText(
        "NAME", "The experiment to run; `trainer-kit list` shows all experiments."
    ),
    "mode": FlagText("MODE", "What the run does; the modes are listed below."),
    "model_dir": FlagText(
        "FOLDER", "The folder of the run, for its checkpoints, records and summaries."
    ),
    "config_file": FlagText(
        "FILE", "Reads config values from a YAML or JSON file.", kind="repeated"
    ),
    "gin_file": FlagText("FILE", "Reads gin bindings from a file.", kind="repeated"),
    "gin_params": FlagText(
        "BINDING", "Sets a gin binding, such as TrainerConfig.train_steps = 500.", kind="repeated"
    ),
    "params_override": FlagText(
        "VALUES",
        "Sets config values, given as a.b=c,d=[1,2], as YAML text, or as the path of a YAML or JSON"
        " file.",
        kind="repeated",
    ),
    "import_module": FlagText(
        "MODULE",
        "Imports a module, by dotted name or .py file, that registers experiments, callbacks or gin"
        " names.",
        kind="repeated",
    ),
    "checkpoint": FlagText(
        "WHICH",
        "The checkpoint that mode eval evaluates: latest, best, a step, the path of a checkpoint,"
        " or initial for the initial weights.",
        default="latest",
    ),
    "eval_name": FlagText(
        "NAME", "The name of a continuous_eval sidecar and of its files.", default="continuous_eval"
    ),
    "allow_config_change": FlagText(
        "PATH", "Allows a resumed run to change the config value at this path.", kind="repeated"
    ),
    "allow_partial_restore": FlagText(
        "",
        "Restores the variables that fit from a checkpoint of another model or optimizer of Keras"
        " 3, and lists all others.",
        default="false",
        kind="switch",
    ),
    "from_step": FlagText(
        "STEP",
        "Resumes from the checkpoint of this step and moves later ones to archived/; 0 starts from"
        " the beginning.",
        kind="step",
    ),
    "max_restarts": FlagText(
        "N",
        "Runs under a supervisor, which restarts the run whenever it is preempted, and up to N"
        " times when it crashes or stalls; with 0 the run has no supervisor.",
        default="0",
        kind="count",
    ),
    "profile": FlagText(
        "A:B", "Traces the steps A to B for TensorBoard, into the folder model_dir/train."
    ),
    "tpu": FlagText("NAME", "The name or address of the TPU; it sets runtime.tpu."),
    "tf_data_service": FlagText(
        "ADDRESS",
        "The address of a tf.data service, for tasks that read data from one, such as TF Model"
        " Garden's.",
    ),
    "debug": FlagText(
        "", "Prints the whole traceback of an error.", default="false", kind="switch"
    ),
    "help": FlagText("", "Shows this text and exits.", default="false", kind="switch"),
    "flagfile": FlagText("FILE", "Reads further flags from a file, one per line.", kind="absl"),
}
SOURCES_NOTE = (
    "A flag marked * may be repeated. Config values come from the experiment, then from"
    " --config_file, the gin flags and --params_override; later ones win."
)


def format_help_text() -> str:
    """Returns the text of --help: two commands to copy, the flags and the modes."""
    lines = ["Runs an experiment:", ""]
    for comment, command in EXAMPLES.items():
        lines += [f"  # {comment}", f"  {command}", ""]

    lines += ["flags:"]
    for name, flag in FLAGS.items():
        mark = " *" if flag.kind == "repeated" else ""
        usage = format_usage(name)
        description = describe_flag(name)
        lines += [f"  {usage}{mark}", *_indent_text(description, 6)]
    lines += ["", *_indent_text(SOURCES_NOTE, 2), ""]

    lines += ["modes:"]
    for mode, properties in MODES.items():
        meaning = properties.meaning
        first_letter = meaning[0].upper()
        sentence = f"{first_letter}{meaning[1:]}."
        lines += [f"  {mode}", *_indent_text(sentence, 6)]
    return "\n".join(lines)


def format_usage(name: str) -> str:
    """Returns a flag as it is written on the command line, such as --model_dir=FOLDER."""
    if name == "help":
        return "--help, -h"
    value = FLAGS[name].value
    if value:
        return f"--{name}={value}"
    return f"--{name}"


def describe_flag(name: str) -> str:
    """Returns the sentence of a flag, and whether it is required or which default it has."""
    flag = FLAGS[name]
    more = " Required." if name in REQUIRED_FLAGS else ""
    if flag.default and flag.kind != "switch":
        more = f" Default: {flag.default}."
    return flag.sentence + more


def _indent_text(text: str, spaces: int) -> Iterator[str]:
    indent = " " * spaces
    yield from textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)
