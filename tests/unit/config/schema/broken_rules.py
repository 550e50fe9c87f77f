"""What the tests of config sections share: which rules a section breaks."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit.config.schema.base import Config
from trainer_kit.config.schema.section import FieldError


def broken(config_class: type[Config], values: dict[str, Any]) -> list[str]:
    """The fields that break a rule when a section is made of `values`."""
    with pytest.raises(FieldError) as caught:
        config_class(**values)
    return [mistake.path for mistake in caught.value.inner]
