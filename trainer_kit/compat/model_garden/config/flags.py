"""The flags of Model Garden's training programs."""

from __future__ import annotations

import contextlib

from absl import flags

MODES = (
    "train",
    "eval",
    "train_and_eval",
    "continuous_eval",
    "continuous_train_and_eval",
    "train_and_validate",
    "train_and_post_eval",
)
_TEXTS = {
    "experiment": "Name under which the experiment's config was registered.",
    "model_dir": "Folder of the run: checkpoints, records and summaries.",
    "params_override": "Config values that win over those of --config_file: YAML text, a.b=c pairs, or a YAML file.",
    "tpu": "Name or grpc:// address of the Cloud TPU.",
    "tf_data_service": "Address of a tf.data service.",
    "tpu_platform": "Kind of TPU platform; not used here.",
    "tfhub_handle": "Handle under which to publish to TFHub; not used here.",
    "tflex_output_uri": "Where a TFleX pipeline takes the model from; not used here.",
}
_GIN_TEXTS = {"gin_file": "gin file with bindings; may be repeated.", "gin_params": "gin binding; may be repeated."}


def define_flags(*, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Defines the flags that a training program of Model Garden reads; none is required.

    Where something else has defined gin_file or gin_params, that stays.

    Args:
      flag_values: where they are defined.

    Raises:
      absl.flags.DuplicateFlagError: when something else has defined one of the others.
    """
    for name, text in _TEXTS.items():
        flags.DEFINE_string(name, None, text, flag_values=flag_values)
    modes = f"What to do: {', '.join(MODES)}; continuous_train_and_eval and train_and_validate are refused by a run."
    flags.DEFINE_enum("mode", None, list(MODES), modes, flag_values=flag_values)
    files = "YAML or JSON file with config values; may be repeated, later ones win."
    flags.DEFINE_multi_string("config_file", None, files, flag_values=flag_values)
    for name, text in _GIN_TEXTS.items():
        with contextlib.suppress(flags.DuplicateFlagError):
            flags.DEFINE_multi_string(name, None, text, flag_values=flag_values)
