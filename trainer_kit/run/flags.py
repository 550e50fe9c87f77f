"""Parses the flags of `python -m trainer_kit.train` into a Request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from absl import flags

from trainer_kit.config.resolve import ConfigSources
from trainer_kit.config.sources.layer import ConfigLayer
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.run.flag_texts import FLAGS
from trainer_kit.run.preflight import RunRequest

REPEATED = tuple(name for name, flag in FLAGS.items() if flag.kind == "repeated")
SUPERVISOR_FLAG = "max_restarts"
FIRST_ATTEMPT_FLAG = "from_step"


class _StepParser(flags.ArgumentParser):
    """Parses a step or the name of its checkpoint, ckpt-<step>."""

    def parse(self, argument: str | int) -> int:
        """Returns the step.

        Raises:
          ValueError: for any other text. The message says what to give.
        """
        text = str(argument).strip().removeprefix("ckpt-")
        if text.isascii() and text.isdecimal():
            return int(text)
        advice = (
            "give a step of this run's checkpoints, such as 500 or ckpt-500, or 0 to start again"
        )
        if os.sep in text:
            advice += "; to start from the weights of another run, set task.init_checkpoint"
        raise ValueError(f"it is not a whole number of 0 or more; {advice}")


def define_flags() -> flags.FlagValues:
    """Returns the flags of this command in a new FlagValues.

    The global flags of absl stay as they are.
    """
    values = flags.FlagValues()
    for name, flag in FLAGS.items():
        if flag.kind == "text":
            flags.DEFINE_string(name, flag.default, flag.sentence, flag_values=values)
        elif flag.kind == "repeated":
            flags.DEFINE_multi_string(name, [], flag.sentence, flag_values=values)
        elif flag.kind == "count":
            flags.DEFINE_integer(
                name, int(flag.default or 0), flag.sentence, lower_bound=0, flag_values=values
            )
        elif flag.kind == "step":
            flags.DEFINE(_StepParser(), name, None, flag.sentence, flag_values=values)
        elif flag.kind == "switch":
            short = "h" if name == "help" else None
            flags.DEFINE_boolean(name, False, flag.sentence, short_name=short, flag_values=values)
    return values


def parse_flags(argv: Sequence[str]) -> flags.FlagValues:
    """Returns the parsed flags of `argv`, which begins with the program's name.

    Raises:
      UsageError: for an unknown flag, a wrong value or an argument that is not a flag.
    """
    values = define_flags()
    try:
        rest = values(list(argv))[1:]
    except flags.UnrecognizedFlagError as error:
        names = [f"--{name}" for name in values]
        suggestion = suggest_names(f"--{error.flagname}", names)
        raise UsageError(f"--{error.flagname}: no such flag; {suggestion}") from error
    except flags.Error as error:
        text = str(error).replace("invalid literal for int() with base 10", "not a whole number")
        if "Non-boolean argument" in text:
            advice = "it is neither true nor false; give the flag without a value for true"
            text = f"{text.partition(': ')[0]}: {advice}"
        raise UsageError(text) from error

    if rest:
        raise UsageError(
            f"{rest[0]!r} is not a flag; flags begin with --, as in --experiment=digits; see --help"
        )
    return values


def format_attempt_flags(values: flags.FlagValues) -> list[str]:
    """Returns the arguments of each attempt under the supervisor.

    They are the same flags without --max_restarts. They lack --from_step too, which would rewind
    the run at each restart: `format_first_attempt_flags` returns it.
    """
    arguments: list[str] = []
    for name in values:
        flag = values[name]
        if not flag.present or name in (SUPERVISOR_FLAG, FIRST_ATTEMPT_FLAG, flag.short_name):
            continue
        if flag.boolean:
            arguments.append(f"--{name}" if flag.value else f"--no{name}")
        else:
            flag_values = flag.value if name in REPEATED else [flag.value]
            arguments += [f"--{name}={value}" for value in flag_values]
    return arguments


def format_first_attempt_flags(values: flags.FlagValues) -> list[str]:
    """Returns --from_step for the supervised attempts up to the first one that begins to train.

    With it, every later restart would rewind the run again.
    """
    if values.from_step is None:
        return []
    return [f"--{FIRST_ATTEMPT_FLAG}={values.from_step}"]


def build_sources(values: flags.FlagValues) -> ConfigSources:
    """Returns the sources of config values.

    --tpu and --tf_data_service win over every other source.
    """
    set_by_flags: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if values.tpu is not None:
        set_by_flags["runtime"] = {"tpu": values.tpu}
        origins["runtime.tpu"] = "--tpu"
    if values.tf_data_service is not None:
        address = {"tf_data_service_address": values.tf_data_service}
        set_by_flags["task"] = {"train_data": address, "validation_data": address}
        origins["task"] = "--tf_data_service"
    return ConfigSources(
        config_files=tuple(values.config_file),
        gin_files=tuple(values.gin_file),
        gin_params=tuple(values.gin_params),
        params_overrides=tuple(values.params_override),
        flags=ConfigLayer(set_by_flags, origins),
    )


def build_request(values: flags.FlagValues) -> RunRequest:
    """Returns the run that the flags ask for."""
    return RunRequest(
        experiment=values.experiment,
        mode=values.mode,
        model_dir=values.model_dir,
        sources=build_sources(values),
        import_modules=tuple(values.import_module),
        allow_config_change=tuple(values.allow_config_change),
        checkpoint=values.checkpoint,
        eval_name=values.eval_name,
        from_step=values.from_step,
        profile=values.profile,
    )
