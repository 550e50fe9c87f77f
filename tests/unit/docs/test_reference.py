"""The reference pages are what the code says today."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainer_kit
import trainer_kit.testing
from scripts.reference import FOLDER, PAGES, write_pages
from trainer_kit.compat import keras as tk_keras
from trainer_kit.compat import pipelines
from trainer_kit.config.field_docs import read_docs_by_path
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import EXIT_CODES
from trainer_kit.run.flags import define_flags


@pytest.mark.parametrize("name", PAGES)
def test_a_checked_in_page_is_the_generated_one(name: str) -> None:
    page = FOLDER / name

    assert page.is_file() and page.read_text() == PAGES[name](), (
        f"{page} is old; run `python -m scripts.reference`"
    )


def test_there_are_no_other_reference_pages(tmp_path: Path) -> None:
    write_pages(tmp_path)
    written = {path.name for path in tmp_path.iterdir()}

    assert {path.name for path in FOLDER.iterdir()} == {*written, "run_directory.md"}


def test_the_config_page_has_every_field() -> None:
    page = PAGES["config.md"]()
    names = {path.rpartition(".")[2] for path in read_docs_by_path(ExperimentConfig())}

    assert [name for name in names if f"`{name}`" not in page] == []
    assert "Here the default of `drop_remainder` is `false`." in page


def test_the_command_line_page_has_every_flag_and_verb() -> None:
    page = PAGES["command_line.md"]()

    assert [name for name in define_flags() if name != "h" and f"`--{name}" not in page] == []
    assert all(f"## trainer-kit {verb}\n" in page for verb in ("list", "show", "doctor resume"))


def test_every_exit_code_is_in_its_table() -> None:
    page = PAGES["exit_codes.md"]()
    assert all(f"| {code.value} | `{code.name}` |" in page for code in EXIT_CODES)


def test_the_python_page_has_every_public_name() -> None:
    page = PAGES["python.md"]()
    names = [
        *trainer_kit.__all__,
        *trainer_kit.testing.__all__,
        *pipelines.__all__,
        *tk_keras.__all__,
    ]

    assert [name for name in names if name != "__version__" and f"### `{name}`\n" not in page] == []
    assert page.count("### `register_task`\n") == 1  # without its overloads
    assert "configclass(cls: type[ConfigT]) -> type[ConfigT]\n" in page  # cls is no method's here
    # Of a signature of several lines.
    assert "    model_dir: str,\n    best: str | bool | None = None,\n" in page
    assert "| `x`, `y`, `batch_size`," in page  # arguments that have one text
    assert "#### `Task.build_model`\n" in page
    assert "`Task._" not in page


def test_names_in_angle_brackets_are_no_html() -> None:
    cells = "".join(page() for page in PAGES.values()).split("`")[::2]  # what is not code
    assert [cell for cell in cells if "<" in cell.replace("<!--", "")] == []
