"""What all sources do with DataConfig; test_arrays.py and test_tfrecords.py test it through the sources."""

from __future__ import annotations

import tensorflow as tf

from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.inputs.dataset_structure import kind_of, transformations
from trainer_kit.inputs.sources.source_pipeline import finished, options_of, warning_of_unread


def test_unread_fields_are_set_but_used_by_no_reader() -> None:
    params = DataConfig(global_batch_size=4, seed=3, input_path="a", cycle_length=2, cache=True)
    assert warning_of_unread("X", params, {"cache"}).startswith("X does not read input_path, cycle_length;")
    assert warning_of_unread("X", params, {"cache", "input_path", "cycle_length"}) == ""


def test_a_finished_pipeline_is_prefetched_and_has_the_options() -> None:
    params = DataConfig(prefetch_buffer_size=0, deterministic=True)
    dataset = finished(tf.data.Dataset.range(3), params, options_of(params))
    assert [int(value) for value in dataset] == [0, 1, 2]
    assert dataset.options().deterministic is True and "Prefetch" not in {kind_of(part) for part in dataset._inputs()}
    plain = finished(tf.data.Dataset.range(3), DataConfig(), tf.data.Options())
    assert {kind_of(part) for part in transformations(plain)} >= {"Prefetch", "Range"}
