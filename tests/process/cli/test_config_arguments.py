"""The arguments by which verbs take an experiment and its config."""

from __future__ import annotations

import argparse

from absl import flags

from trainer_kit.cli.config_arguments import add_config_arguments, sources
from trainer_kit.config.resolve import Sources
from trainer_kit.run.flags import parse_flags
from trainer_kit.run.flags import sources as train_sources

_TEXTS = [
    "--params_override=a=1", "--config_file=one.yaml", "--gin_params=a.b = 1", "--config_file=two.yaml",
    "--gin_file=one.gin", "--params_override=a=2", "--gin_file=two.gin", "--gin_params=a.b = 2",
]  # fmt: skip


def _parsed(*texts: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    return parser.parse_args(["mine", *texts])


def test_sources_are_kept_in_the_order_in_which_they_are_given() -> None:
    assert sources(_parsed(*_TEXTS)) == Sources(
        config_files=("one.yaml", "two.yaml"),
        gin_files=("one.gin", "two.gin"),
        gin_params=("a.b = 1", "a.b = 2"),
        params_overrides=("a=1", "a=2"),
    )


def test_training_takes_the_same_sources_by_the_same_names() -> None:
    values: flags.FlagValues = parse_flags(["train", *_TEXTS])
    assert train_sources(values) == sources(_parsed(*_TEXTS))


def test_sources_default_to_none_and_are_not_shared_by_parses() -> None:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    assert sources(parser.parse_args(["mine", "--params_override=a=1"])).params_overrides == ("a=1",)
    assert sources(parser.parse_args(["mine"])) == Sources()
