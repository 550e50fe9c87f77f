"""The experiments that come with trainer_kit, found by their entry points in pyproject.toml."""
