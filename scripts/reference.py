"""Writes the reference pages of the documentation, docs/reference/*.md, from the code.

It writes all of them but run_directory.md.

    python -m scripts.reference

tests/unit/docs/test_reference.py fails when a page is not what this writes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from scripts.markdown import page, table
from scripts.python_reference import render_python_page
from scripts.source_files import ROOT
from trainer_kit.cli.main import CHECKPOINTS, CHECKS, VERBS, add_common_arguments
from trainer_kit.config.allowed_values import format_value
from trainer_kit.config.field_docs import FieldDoc, read_class_summary, read_field_docs
from trainer_kit.config.modes import MODES
from trainer_kit.config.schema.configclass import Config
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.section import Section
from trainer_kit.errors import EXIT_CODES
from trainer_kit.run.flag_texts import EXAMPLES, FLAGS, SOURCES_NOTE, describe_flag, format_usage

FOLDER = ROOT / "docs" / "reference"


def render_config_page() -> str:
    """Returns the page of the config: each section with its fields, outer sections first."""
    lines = [
        "Values are written with their path, such as `trainer.train_steps=500` in"
        " `--params_override`, or nested in a YAML file. "
        '"Unset" is `null` in YAML and `None` in Python. A task may have a config class of its own,'
        " with further fields: `trainer-kit show EXPERIMENT` lists those of an experiment.",
    ]
    paths: dict[type[Section], str] = {}
    for path, config_class, value in _sections("", ExperimentConfig, ExperimentConfig()):
        lines += ["", f"## `{path}`" if path else "## The whole config", ""]
        if config_class in paths:
            lines += [_describe_repeated_section(paths[config_class], config_class, value)]
        else:
            lines += [
                f"{read_class_summary(config_class)} Class: `{config_class.__name__}`.",
                "",
                *_fields(path, config_class),
            ]
        paths.setdefault(config_class, path)
    return page("Config", lines)


def render_command_line_page() -> str:
    """Returns the page of the commands: flags of training, then verbs of trainer-kit."""
    lines = ["## python -m trainer_kit.train", ""]
    lines += ["`trainer-kit train` is the same program.", "", "```bash"]
    lines += [
        "\n\n".join(f"# {comment}\n{command}" for comment, command in EXAMPLES.items()),
        "```",
        "",
    ]
    rows = [
        (f"`{format_usage(name)}`{' *' if flag.kind == 'repeated' else ''}", describe_flag(name))
        for name, flag in FLAGS.items()
    ]
    lines += [
        *table(("flag", "meaning"), rows),
        "",
        SOURCES_NOTE.replace("*", "\\*"),
        "",
        "### Modes",
        "",
    ]
    lines += table(
        ("mode", "what it does"),
        [(f"`{name}`", _sentence(mode.meaning)) for name, mode in MODES.items()],
    )
    lines += ["", "The exit codes are in [a table of their own](exit_codes.md)."]
    commands = {f"checkpoint {name}": module for name, module in CHECKPOINTS.items()}
    commands |= {f"doctor {name}": module for name, module in CHECKS.items()}
    for name, module in {**VERBS, **commands}.items():
        text = (module.__doc__ or "").split("\n")[0]
        lines += ["", f"## trainer-kit {name}", "", text, "", *_arguments(module)]
    return page("Command line", lines)


def render_exit_codes_page() -> str:
    """Returns the page of the exit codes."""
    rows = [(str(code.value), f"`{code.name}`", meaning) for code, meaning in EXIT_CODES.items()]
    lines = [
        "`python -m trainer_kit.train` and `trainer-kit` end with these codes. In Python they are "
        "`trainer_kit.errors.ExitCode`, and an error has its own in the attribute `exit_code`.",
        "",
        *table(("code", "name", "meaning"), rows),
    ]
    return page("Exit codes", lines)


PAGES = {
    "config.md": render_config_page,
    "command_line.md": render_command_line_page,
    "python.md": lambda: render_python_page(render_config_page()),
    "exit_codes.md": render_exit_codes_page,
}


def write_pages(folder: Path = FOLDER) -> None:
    """Writes all pages into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, render in PAGES.items():
        (folder / name).write_text(render(), encoding="utf-8")


def _sections(
    path: str, config_class: type[Section], value: Any
) -> Iterator[tuple[str, type[Section], Any]]:
    """Yields path, class and default of a section and of all sections inside it.

    The model section of a task is left out.
    """
    yield path, config_class, value
    for name, doc in read_field_docs(config_class).items():
        if doc.section is not None and doc.section is not Config:
            yield from _sections(
                f"{path}.{name}{_get_placeholder(doc)}".lstrip("."),
                doc.section,
                getattr(value, name, None),
            )


def _describe_repeated_section(path: str, config_class: type[Section], value: Any) -> str:
    """Returns the text for a section whose class the page has already.

    The text has the defaults that differ.
    """
    others = {
        name: format_value(getattr(value, name))
        for name, doc in read_field_docs(config_class).items()
        if isinstance(value, Config)
        and doc.default
        and format_value(getattr(value, name)) != doc.default
    }
    differing = "".join(
        f" Here the default of `{name}` is `{other}`." for name, other in others.items()
    )
    return (
        f"The fields are those of [`{path}`](#{_anchor(path)}). Class:"
        f" `{config_class.__name__}`.{differing}"
    )


def _get_placeholder(doc: FieldDoc) -> str:
    """Returns the placeholder for the name or the number of one of several sections."""
    return (
        ".<name>"
        if doc.allowed_values.startswith("a mapping")
        else "[<n>]"
        if "a list" in doc.allowed_values
        else ""
    )


def _fields(path: str, config_class: type[Section]) -> list[str]:
    rows = []
    for name, doc in read_field_docs(config_class).items():
        inside = doc.section is not None and doc.section is not Config
        link = (
            f"[`{name}`](#{_anchor(f'{path}.{name}{_get_placeholder(doc)}'.lstrip('.'))})"
            if inside
            else f"`{name}`"
        )
        rows.append((link, doc.text, doc.allowed_values, f"`{doc.default}`" if doc.default else ""))
    return table(("field", "meaning", "takes", "default"), rows)


def _anchor(heading: str) -> str:
    """Returns the anchor that mkdocs makes of a heading."""
    return "".join(letter for letter in heading.lower() if letter.isalnum() or letter in "_-")


class _ArgumentRecorder(argparse.ArgumentParser):
    """A parser that records how its arguments are written and what they mean.

    Attributes:
      recorded_arguments: pairs of an argument's form and its meaning.
    """

    def __init__(self) -> None:
        super().__init__(add_help=False)
        self.recorded_arguments: list[tuple[str, str]] = []

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Adds an argument, and records it."""
        choices = options.get("choices")
        value = options.get("metavar") or (
            " or ".join(choices) if choices else names[0].lstrip("-").upper()
        )
        takes_none = options.get("action") == "store_true"
        separator, value = (
            (" ", " ".join(value)) if isinstance(value, tuple) else ("=", value)
        )  # several values
        shown = (
            f"{names[0]}{separator}{value}"
            if names[0].startswith("-") and not takes_none
            else names[0]
        )
        self.recorded_arguments.append(
            (f"`{shown if names[0].startswith('-') else value}`", options.get("help", ""))
        )
        return super().add_argument(*names, **options)


def _arguments(verb: ModuleType) -> list[str]:
    """Returns the table of a verb's arguments."""
    recorder = _ArgumentRecorder()
    verb.add_arguments(recorder)
    add_common_arguments(recorder)
    return table(("argument", "meaning"), recorder.recorded_arguments)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


if __name__ == "__main__":
    write_pages()
