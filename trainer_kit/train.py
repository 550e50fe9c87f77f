"""`python -m trainer_kit.train`: flags -> config -> run_experiment. Wiring only.

Whatever flags, files and config can tell is reported before TensorFlow is imported.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, TextIO, cast

from absl import flags

from trainer_kit import discovery
from trainer_kit.config.layers import Layer
from trainer_kit.config.overrides import Resolved
from trainer_kit.config.resolve import Sources, resolve
from trainer_kit.config.sources import gin_second_pass, operative_gin
from trainer_kit.errors import ConfigError, ExitCode, Mistake, TrainerKitError, UsageError, suggestion
from trainer_kit.modes import MODES, lookup_mode
from trainer_kit.run_directory import RunDirectory, check_model_dir

TEXTS = {
    "experiment": (None, "Name of the experiment; `trainer-kit list` shows those that there are."),
    "mode": (None, "; ".join(f"{name}: {mode.meaning}" for name, mode in MODES.items())),
    "model_dir": (None, "Folder of the run: checkpoints, records, summaries."),
    "checkpoint": ("latest", "What mode eval evaluates: latest, best, a step, or the path of a checkpoint."),
    "eval_name": ("continuous_eval", "Name of a continuous_eval sidecar and its files."),
    "tpu": (None, "Name or address of the TPU; sets runtime.tpu."),
    "tf_data_service": (None, "Address of a tf.data service; sets it for the training data."),
}
REPEATED = {
    "config_file": "YAML or JSON file with config values; later ones win.",
    "gin_file": "gin file with bindings.",
    "gin_params": "A gin binding.",
    "params_override": "Config values: a.b=c,d=[1,2], YAML text, or a YAML or JSON file; later ones win.",
    "import_module": "Module, dotted name or .py file, that registers experiments or gin names.",
    "allow_config_change": "Path of a config value that may differ from the run in model_dir.",
}


def define_flags() -> flags.FlagValues:
    """Returns the flags of this command, which are defined nowhere else."""
    values = flags.FlagValues()
    for name, (default, meaning) in TEXTS.items():
        flags.DEFINE_string(name, default, meaning, flag_values=values)
    for name, meaning in REPEATED.items():
        flags.DEFINE_multi_string(name, [], meaning, flag_values=values)
    flags.DEFINE_boolean("debug", False, "Show tracebacks of errors that are explained.", flag_values=values)
    flags.DEFINE_boolean("help", False, "Show this text.", short_name="h", flag_values=values)
    return values


def parse_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Returns the parsed flags of `argv`, which begins with the program's name.

    Raises:
      UsageError: for an unknown flag, a wrong value or an argument that is no flag.
    """
    values = define_flags()
    try:
        rest = values(list(argv))[1:]
    except flags.UnrecognizedFlagError as error:
        raise UsageError(f"--{error.flagname}: no such flag; {suggestion(error.flagname, list(values))}") from error
    except flags.Error as error:
        raise UsageError(str(error)) from error
    if rest:
        raise UsageError(f"{rest[0]!r} is not a flag; flags begin with --, as in --experiment=digits; see --help")
    return values


def sources(values: flags.FlagValues) -> Sources:
    """Returns the sources of config values that the flags name."""
    return Sources(
        config_files=tuple(values.config_file),
        gin_files=tuple(values.gin_file),
        gin_params=tuple(values.gin_params),
        params_overrides=tuple(values.params_override),
        flags=_layer(values),
    )


def _layer(values: flags.FlagValues) -> Layer:
    """The config values that flags of their own set; they win over every other source."""
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if values.tpu is not None:
        given["runtime"] = {"tpu": values.tpu}
        origins["runtime.tpu"] = "--tpu"
    if values.tf_data_service is not None:
        service = {"tf_data_service_address": values.tf_data_service, "enable_tf_data_service": True}
        given["task"] = {"train_data": service}
        origins["task.train_data"] = "--tf_data_service"
    return Layer(given, origins)


def configure(values: flags.FlagValues) -> Resolved:
    """Returns the config, from all that can be known without TensorFlow.

    Raises:
      ConfigError: with every mistake.
      StorageError: when model_dir cannot be written.
    """
    resolved = None
    needed = [name for name in ("experiment", "mode", "model_dir") if not values[name].value]
    mistakes = [Mistake(f"--{name}", "is needed", "see --help") for name in needed]
    try:
        if values.mode:
            lookup_mode(values.mode)
    except UsageError as error:
        mistakes.append(Mistake("--mode", str(error)))
    try:
        if values.experiment:
            discovery.find_experiment(values.experiment, values.import_module)
            resolved = resolve(values.experiment, sources(values))
    except ConfigError as error:
        mistakes.extend(error.mistakes)
    except UsageError as error:
        mistakes.append(Mistake("", str(error)))
    if mistakes or resolved is None:
        raise ConfigError(mistakes)
    if MODES[values.mode].trains:
        check_model_dir(
            RunDirectory(values.model_dir, resolved.config.trainer),
            resolved.config,
            values.experiment,
            values.allow_config_change,
        )
    return resolved


def run(values: flags.FlagValues) -> None:
    """Runs the experiment; imports TensorFlow when the config is known to be sound."""
    resolved = configure(values)
    from trainer_kit.launcher import launch

    launch(
        resolved.config,
        values.mode,
        values.model_dir,
        before_task=lambda: gin_second_pass(values.gin_file, values.gin_params),
        experiment=values.experiment,
        checkpoint=values.checkpoint,
        eval_name=values.eval_name,
        allow_config_change=values.allow_config_change,
        records=lambda: {f"operative_config.{values.mode}.gin": operative_gin()},
    )


class _StandardError:
    """sys.stderr as it is at each write: while the progress display draws, it has put itself in its place."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code; explained errors are printed without a traceback."""
    argv = sys.argv if argv is None else argv
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=cast(TextIO, _StandardError()))
    logging.getLogger("trainer_kit").setLevel(logging.INFO)
    try:
        values = parse_flags(argv)
        if values.help:
            print(__doc__, values.get_help(), sep="\n")
        else:
            run(values)
    except TrainerKitError as error:
        if "--debug" in argv:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped by Ctrl-C before there was anything to save", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


if __name__ == "__main__":
    sys.exit(main())
