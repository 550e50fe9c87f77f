"""The order of arrays in memory, from any position and on any number of replicas."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as some

from tests.builders import input_context, read_batches, replicas, training_data, validation_data
from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import DataError, UsageError
from trainer_kit.inputs.sources.arrays import ArraySource, compute_array_identity

EXAMPLES = 11
BATCH = 4


def _create_source(params: DataConfig, examples: int = EXAMPLES) -> ArraySource:
    return ArraySource(np.arange(examples), params)


def _read_stream(source: ArraySource, batches: int, position: int = 0) -> list[int]:
    return list(itertools.chain(*read_batches(source.at(position), batches)))


def _read_shares(
    source: ArraySource, replicas: int, pipelines: int, batches: int, position: int = 0
) -> list[list[int]]:
    """What each replica gets, all of the first global batch, then all of the second, and so on."""
    here = replicas // pipelines
    read = [
        read_batches(source.at(position, input_context(replicas, pipelines, i)), batches * here)
        for i in range(pipelines)
    ]
    rows = [[share[k : k + here] for share in read] for k in range(0, len(read[0]), here)]
    return [share for row in rows for part in row for share in part]


def test_the_seed_decides_the_order_in_every_source() -> None:
    first, again = (_read_stream(_create_source(training_data(1)), 3 * EXAMPLES) for _ in range(2))

    assert first == again
    assert first != _read_stream(_create_source(training_data(1, seed=8)), 3 * EXAMPLES)
    assert _read_stream(_create_source(training_data(1, seed=None)), 20) == _read_stream(
        _create_source(training_data(1, seed=0)), 20
    )


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    stream = _read_stream(_create_source(training_data(1)), 20 * EXAMPLES)
    epochs = [tuple(stream[k : k + EXAMPLES]) for k in range(0, len(stream), EXAMPLES)]

    assert all(sorted(epoch) == list(range(EXAMPLES)) for epoch in epochs)
    assert len(set(epochs)) == 20


def test_order_ignores_the_batch_size_and_batches_cross_epochs() -> None:
    by_one = _read_stream(_create_source(training_data(1)), 44)
    batches = read_batches(_create_source(training_data()).at(0), 11)

    assert list(itertools.chain(*batches)) == by_one
    assert {len(batch) for batch in batches} == {BATCH}  # 4 does not divide 11, and no batch is cut


def test_a_far_position_is_reached_at_once() -> None:
    source = _create_source(training_data())
    far = 11 * 10**15

    batches = read_batches(source.at(far), 11)  # four epochs, from the start of one on

    assert read_batches(source.at(far + 3), 8) == batches[3:]

    epochs = np.reshape(batches, (4, EXAMPLES))
    assert np.sort(epochs, axis=1).tolist() == [list(range(EXAMPLES))] * 4


@settings(max_examples=12, deadline=None, derandomize=True)
@given(some.data())
def test_replicas_together_get_what_one_gets_from_any_position(data: some.DataObject) -> None:
    examples = data.draw(some.integers(1, 23))
    pipelines = data.draw(some.sampled_from([1, 2]))
    replicas = pipelines * data.draw(some.sampled_from([1, 2, 3]))
    training = data.draw(some.booleans()) and examples >= replicas
    most = examples // replicas if training else 4
    if training:
        params = training_data(replicas * data.draw(some.integers(1, most)))
    else:
        params = validation_data(data.draw(some.integers(1, 4 * replicas)))
    position = data.draw(some.integers(0, 9))
    source = _create_source(params, examples)

    expected = read_batches(source.at(0).skip(position), 4)
    shares = _read_shares(source, replicas, pipelines, 4, position)
    joined = [
        list(itertools.chain(*shares[k : k + replicas])) for k in range(0, len(shares), replicas)
    ]

    assert read_batches(source.at(position), 4) == expected
    assert joined == expected


# By name: config, number of examples, replicas and pipelines, what each replica gets of each batch.
UNEVEN: dict[str, tuple[DataConfig, int, tuple[int, int], list[list[int]]]] = {
    "a ragged end": (validation_data(), 7, (4, 1), [[0], [1], [2], [3], [4], [5], [6], []]),
    "fewer examples than replicas": (validation_data(), 2, (4, 2), [[0], [1], [], []]),
    "replicas that get nothing": (validation_data(1), 2, (3, 1), [[0], [], [], [1], [], []]),
    "one example more": (
        validation_data(6),
        11,
        (4, 2),
        [[0, 1], [2, 3], [4], [5], [6, 7], [8], [9], [10]],
    ),
    "a dropped end": (
        validation_data(6, drop_remainder=True),
        11,
        (4, 2),
        [[0, 1], [2, 3], [4], [5]],
    ),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_an_uneven_batch_is_shared_in_order(case: str) -> None:
    params, examples, (count, pipelines), expected = UNEVEN[case]
    assert _read_shares(_create_source(params, examples), count, pipelines, 3) == expected


def test_mirrored_replicas_get_the_ragged_end_and_empty_batches() -> None:
    strategy = replicas(4)
    source = _create_source(validation_data(), 5)
    dataset = strategy.distribute_datasets_from_function(lambda context: source.at(0, context))
    shares = [
        [part.numpy().tolist() for part in strategy.experimental_local_results(step)]
        for step in dataset
    ]

    assert shares == [[[0], [1], [2], [3]], [[4], [], [], []]]


def test_a_pass_is_in_the_order_of_the_arrays_and_ends() -> None:
    source = _create_source(validation_data())

    assert read_batches(source.at(0)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert read_batches(source.at(2)) == [[8, 9, 10]]
    assert read_batches(source.at(3)) == read_batches(source.at(9)) == []
    assert [int(source.at(position).cardinality()) for position in (0, 2, 3, 9)] == [3, 1, 0, 0]


@pytest.mark.parametrize(
    ("params", "size"),
    [
        (training_data(8), 4),
        (validation_data(8, drop_remainder=True), 4),
        (validation_data(6), 3),
        (validation_data(8), None),
    ],
)
def test_the_batch_dimension_is_static_when_every_batch_is_full(
    params: DataConfig, size: int | None
) -> None:
    dataset = _create_source(params, 18).at(0, input_context(2))

    assert dataset.element_spec.shape == [size]
    assert (int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY) == bool(params.is_training)


def _build_arrays() -> dict[str, Any]:
    return {
        "image": np.arange(12, dtype=np.uint8).reshape(6, 2),
        "more": (np.linspace(0, 1, 6), {"name": np.array([b"a", b"b", b"c", b"d", b"e", b"f"])}),
        "label": np.arange(6, dtype=np.float16),
    }


def test_structures_and_dtypes_stay_and_rows_stay_together() -> None:
    source = ArraySource(_build_arrays(), training_data(6))

    assert source.num_examples == 6

    batch = next(iter(source.at(0)))
    rows = batch["label"].numpy().astype(int)

    tf.nest.assert_same_structure(batch, _build_arrays())

    for mine, theirs in zip(tf.nest.flatten(batch), tf.nest.flatten(_build_arrays()), strict=True):
        assert mine.dtype == tf.constant(theirs).dtype
        np.testing.assert_array_equal(mine.numpy(), theirs[rows])


def test_a_transform_changes_whole_batches_in_their_order() -> None:
    shapes: list[Any] = []

    def transform(batch: tf.Tensor) -> dict[str, tf.Tensor]:
        shapes.append(batch.shape)
        return {"doubled": 2 * batch}

    dataset = ArraySource(np.arange(EXAMPLES), validation_data(), transform=transform).at(1)

    assert [batch["doubled"].tolist() for batch in dataset.as_numpy_iterator()] == [
        [8, 10, 12, 14],
        [16, 18, 20],
    ]
    assert shapes == [[None]]  # traced once, for a batch


def test_changing_the_arrays_afterwards_changes_nothing() -> None:
    array = np.arange(EXAMPLES)
    source = ArraySource(array, validation_data(EXAMPLES))

    array[:] = -1

    assert read_batches(source.at(0)) == [list(range(EXAMPLES))]


@pytest.mark.parametrize(("buffer", "prefetches"), [(None, True), (3, True), (0, False)])
def test_batches_are_prefetched_unless_the_buffer_is_0(
    buffer: int | None, prefetches: bool
) -> None:
    dataset = _create_source(validation_data(prefetch_buffer_size=buffer)).at(0)

    assert ("Prefetch" in repr(dataset._input_dataset)) == prefetches
    assert len(read_batches(dataset)) == 3


def test_tf_data_options_of_the_config_are_set() -> None:
    options = (
        _create_source(training_data(deterministic=False, autotune_algorithm="HILL_CLIMB"))
        .at(0)
        .options()
    )

    assert options.deterministic is False
    assert options.autotune.enabled
    assert options.autotune.autotune_algorithm == tf.data.experimental.AutotuneAlgorithm.HILL_CLIMB

    default = _create_source(training_data()).at(0).options()
    assert (default.deterministic, default.autotune.enabled) == (None, False)


@pytest.mark.parametrize(
    "arrays",
    [
        np.zeros((0, 3)),
        (np.zeros(3), np.zeros((4, 2))),
        [1, 2, 3],
        np.float32(1),
        {"a": np.zeros(3), "b": None},
        {},
    ],
    ids=["no examples", "other lengths", "a list", "a number", "None", "an empty dict"],
)
def test_what_is_no_data_is_refused(arrays: Any) -> None:
    with pytest.raises(DataError):
        ArraySource(arrays, training_data(1))


@pytest.mark.parametrize(
    ("params", "error"),
    [
        (training_data(0), UsageError),
        (training_data(12), DataError),
        (validation_data(12, drop_remainder=True), DataError),
        (training_data(6), UsageError),
        (training_data(autotune_algorithm="hil_climb"), UsageError),
    ],
    ids=[
        "no batch",
        "larger than an epoch",
        "larger than a pass",
        "not for 4 replicas",
        "algorithm",
    ],
)
def test_what_makes_no_batches_is_refused(params: DataConfig, error: type[Exception]) -> None:
    with pytest.raises(error):
        _create_source(params).at(0, input_context(4))


def test_one_warning_names_fields_without_effect_on_arrays(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _create_source(
        training_data(
            input_path="a", shuffle_buffer_size=7, tf_data_service_address="b", cycle_length=1
        )
    )
    (record,) = caplog.records

    assert record.levelname == "WARNING"
    assert record.name == "trainer_kit.inputs.sources.source_pipeline"

    named = {
        word
        for word in record.getMessage().replace(",", " ").replace(";", " ").split()
        if "_" in word
    }
    assert named == {"input_path", "shuffle_buffer_size", "tf_data_service_address", "cycle_length"}


def test_what_arrays_use_or_need_not_use_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    used = {"cache": True, "sharding": False, "prefetch_buffer_size": 1, "deterministic": True}

    _create_source(training_data(autotune_algorithm="max_parallelism", **used))
    _create_source(validation_data())

    assert caplog.records == []


def test_the_identity_of_arrays_tells_which_one_has_changed() -> None:
    features = np.random.default_rng(0).normal(size=(20, 3))
    labels = np.arange(20)

    identity = ArraySource((features, labels), training_data()).identity()

    assert (
        json.loads(json.dumps(identity))
        == ArraySource((features, labels), validation_data()).identity()
    )

    other = ArraySource((features, np.where(labels == 13, 0, labels)), training_data()).identity()
    assert [name for name in identity if identity[name] != other[name]] == ["array 1"]

    reordered = ArraySource((features[::-1], labels), training_data()).identity()
    assert [name for name in identity if identity[name] != reordered[name]] == ["array 0"]
    assert identity["array 1"].startswith("int64 [20], checksum ")


def test_the_identity_of_a_large_array_reads_a_sample() -> None:
    large = np.zeros(2**25, np.uint8)  # 32 MiB, of which every second byte is read
    identity = compute_array_identity(large)
    large[7] = 1

    assert compute_array_identity(large) == identity

    large[8] = 1
    assert compute_array_identity(large) != identity


def test_strings_have_an_identity_that_is_not_their_address() -> None:
    words = [b"one", b"two", b"three"]

    assert compute_array_identity(np.array(words, object)) == compute_array_identity(
        tf.constant(words)
    )
    assert compute_array_identity(np.array(words, object)) != compute_array_identity(
        tf.constant(words[::-1])
    )
