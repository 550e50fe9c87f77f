"""Config of initial weights: a checkpoint of any program, and the variables to take from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.number_types import find_broken_patterns
from trainer_kit.config.schema.section import ONE, SEVERAL


@configclass
class InitCheckpointConfig(Config):
    """The variables that a new run takes from one checkpoint.

    Each chosen variable has to be in the checkpoint.

    Attributes:
      path: The path of a checkpoint of trainer_kit or another program, a folder of checkpoints, the
        folder of a run, a SavedModel, or a `.keras`, `.weights.h5` or `.h5` file.
      variables: Regular expressions of the model's variables that are loaded. Each is searched in
        the path of a variable, such as encoder/dense/kernel. Empty means all variables.
      exclude: Regular expressions of variables that are not loaded, such as those of a new head.
      rename: Replacements in the names of the checkpoint's variables, by regular expression. They
        are applied in order; the result is the path of the model's variable. `trainer-kit
        checkpoint list` shows the names.
      other_shapes: What happens to a variable that has another shape in the checkpoint. `error`
        refuses it, `skip` leaves the new value, and `slice` copies the part that both shapes have.
    """

    path: str
    variables: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rename: dict[str, str] = Field(default_factory=dict)
    other_shapes: Literal["error", "skip", "slice"] = "error"

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that there is a path, and that patterns and replacements can be used."""
        if not self.path:
            yield "path", "is empty; give the path of a checkpoint"
        yield from find_broken_patterns("variables", self.variables)
        yield from find_broken_patterns("exclude", self.exclude)

        # The replacement for a broken pattern cannot be checked.
        broken_patterns = list(find_broken_patterns("rename", tuple(self.rename)))
        yield from broken_patterns
        if broken_patterns:
            return
        for pattern, replacement in self.rename.items():
            try:
                re.sub(pattern, replacement, "")
            except (re.error, IndexError) as error:
                problem = f"{replacement!r} is no replacement for {pattern!r} ({error})"
                yield "rename", f"{problem}; use \\1 for its first group"


def _get_union_tag(value: object) -> str:
    # With a tag, a mistake in a section is reported once. Otherwise pydantic would also report that
    # the list is not a path.
    return SEVERAL if isinstance(value, (list, tuple)) else ONE


InitCheckpoint = Annotated[
    Annotated[str, Tag(ONE)] | Annotated[tuple[InitCheckpointConfig, ...], Tag(SEVERAL)],
    Discriminator(_get_union_tag),
]
