"""The arguments by which verbs take an experiment and its config."""

from __future__ import annotations

import argparse

from trainer_kit.cli.config_arguments import add_config_arguments, build_sources
from trainer_kit.config.resolve import ConfigSources
from trainer_kit.run.flags import build_sources as train_sources
from trainer_kit.run.flags import parse_flags

_TEXTS = [
    "--params_override=a=1",
    "--config_file=one.yaml",
    "--gin_params=a.b = 1",
    "--config_file=two.yaml",
    "--gin_file=one.gin",
    "--params_override=a=2",
    "--gin_file=two.gin",
    "--gin_params=a.b = 2",
]


def test_sources_are_kept_in_their_order_as_training_takes_them() -> None:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)

    sources = build_sources(parser.parse_args(["mine", *_TEXTS]))

    assert sources == ConfigSources(
        config_files=("one.yaml", "two.yaml"),
        gin_files=("one.gin", "two.gin"),
        gin_params=("a.b = 1", "a.b = 2"),
        params_overrides=("a=1", "a=2"),
    )
    assert train_sources(parse_flags(["train", *_TEXTS])) == sources
