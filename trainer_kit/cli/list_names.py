"""Lists what a config can name, such as experiments, optimizers, metrics and callbacks.

It also lists schedules, gradient processors and datasets. Experiments are those in ./experiments,
modules named by --import_module, in entry points and in trainer_kit, with --all also those of other
frameworks. Registered names are listed if their modules are imported: with --import_module, or by
./experiments.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence

from trainer_kit.cli.config_arguments import add_import_argument
from trainer_kit.config import discovery
from trainer_kit.config.experiment_registry import experiments
from trainer_kit.config.field_docs import get_first_sentence, read_class_summary
from trainer_kit.config.schema.experiment import DatasetConfig
from trainer_kit.config.schema.gradient_processor_configs import GradientProcessorConfig
from trainer_kit.config.schema.metric_configs import MetricConfig
from trainer_kit.config.schema.open_choice import OpenOneOfConfig
from trainer_kit.config.schema.optimizer_configs import OptimizerConfig
from trainer_kit.config.schema.schedules import LrConfig
from trainer_kit.errors import ExitCode

EXAMPLE = "trainer-kit list optimizers"

EXPERIMENTS = "experiments"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what to list, and --all."""
    parser.add_argument(
        "kind",
        nargs="?",
        choices=[EXPERIMENTS, *_LISTINGS],
        default=EXPERIMENTS,
        help="What is listed.",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="Also lists the experiments of other frameworks, such as tfm/mock.",
    )
    add_import_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints one line for each name: the name, and a sentence about it.

    A package that cannot be imported is reported on standard error. The others are listed, and the
    exit code is 0.
    """
    names, broken = discovery.import_all_experiments(arguments.import_module)
    for error in broken:
        print(f"not listed: {str(error).removeprefix('--experiment: ')}", file=sys.stderr)
    if arguments.kind != EXPERIMENTS:
        _print(_LISTINGS[arguments.kind]())
        return ExitCode.DONE

    if arguments.all:
        discovery.register_framework_experiments()
        names = experiments.names()
    sentences = {name: _get_first_line(experiments.lookup(name)) for name in names}
    _print(dict(sorted({**_read_shipped_sentences(), **sentences}.items())))
    return ExitCode.DONE


def _read_shipped_sentences() -> dict[str, str]:
    """Returns the first line of the docstring of each shipped experiment.

    Nothing is imported, since most of them import TensorFlow.
    """
    sentences = {}
    for name in discovery.list_shipped_experiments():
        file = discovery.SHIPPED_FOLDER / name / "__init__.py"
        if not file.exists():
            file = discovery.SHIPPED_FOLDER / f"{name}.py"
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        sentences[name] = docstring.partition("\n")[0]
    return sentences


def _print(sentences: Mapping[str, str]) -> None:
    width = max(map(len, sentences), default=0)
    for name, sentence in sentences.items():
        print(f"{name:<{width}}  {sentence}".rstrip())


def _branches(choice: type[OpenOneOfConfig]) -> dict[str, str]:
    """Returns the first sentence about each branch.

    It is that of the registered function, else that of the config class.
    """
    sentences: dict[str, str] = {}
    for name, config_class in choice.branches().items():
        sentence = ""
        if name in choice.registry:
            entry = choice.registry.lookup(name)
            sentence = _get_first_line(entry.build)
        if not sentence:
            summary = read_class_summary(config_class)
            sentence = get_first_sentence(summary)
        sentences[name] = sentence
    return sentences


def _callbacks() -> dict[str, str]:
    # This imports NumPy, which takes time.
    from trainer_kit.callbacks.configured_callbacks import get_registered_callbacks

    return {name: _get_first_line(kind) for name, kind in get_registered_callbacks().items()}


def _get_first_line(target: object) -> str:
    """Returns the first line of a docstring."""
    text = inspect.getdoc(target) or ""
    lines: Sequence[str] = text.splitlines()
    return lines[0] if lines else ""


_LISTINGS: dict[str, Callable[[], dict[str, str]]] = {
    "optimizers": lambda: _branches(OptimizerConfig),
    "schedules": lambda: _branches(LrConfig),
    "gradient_processors": lambda: _branches(GradientProcessorConfig),
    "datasets": lambda: _branches(DatasetConfig),
    "metrics": lambda: _branches(MetricConfig),
    "callbacks": _callbacks,
}
