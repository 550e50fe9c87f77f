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

from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import DataError, UsageError
from trainer_kit.inputs.sources.arrays import ArraySource, array_identity

EXAMPLES, BATCH = 11, 4


def _training(batch: int = BATCH, **values: Any) -> DataConfig:
    return DataConfig(**{"is_training": True, "global_batch_size": batch, "seed": 7, **values})


def _validation(batch: int = BATCH, **values: Any) -> DataConfig:
    return DataConfig(**{"is_training": False, "global_batch_size": batch, "drop_remainder": False, **values})


def _source(params: DataConfig, examples: int = EXAMPLES) -> ArraySource:
    return ArraySource(np.arange(examples), params)


def _context(replicas: int, pipelines: int = 1, pipeline: int = 0) -> tf.distribute.InputContext:
    return tf.distribute.InputContext(pipelines, pipeline, replicas)


def _read(dataset: tf.data.Dataset, batches: int = -1) -> list[list[int]]:
    return [batch.tolist() for batch in dataset.take(batches).as_numpy_iterator()]


def _stream(source: ArraySource, batches: int, position: int = 0) -> list[int]:
    return list(itertools.chain(*_read(source.at(position), batches)))


def _shares(source: ArraySource, replicas: int, pipelines: int, batches: int, position: int = 0) -> list[list[int]]:
    """What each replica gets, all of the first global batch, then all of the second, and so on."""
    here = replicas // pipelines
    read = [_read(source.at(position, _context(replicas, pipelines, i)), batches * here) for i in range(pipelines)]
    rows = [[one[k : k + here] for one in read] for k in range(0, len(read[0]), here)]
    return [share for row in rows for part in row for share in part]


def _joined(shares: list[list[int]], replicas: int) -> list[list[int]]:
    return [list(itertools.chain(*shares[k : k + replicas])) for k in range(0, len(shares), replicas)]


def test_the_seed_decides_the_order_in_every_source() -> None:
    first, again = (_stream(_source(_training(1)), 3 * EXAMPLES) for _ in range(2))
    assert first == again
    assert first != _stream(_source(_training(1, seed=8)), 3 * EXAMPLES)
    assert _stream(_source(_training(1, seed=None)), 20) == _stream(_source(_training(1, seed=0)), 20)


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    stream = _stream(_source(_training(1)), 20 * EXAMPLES)
    epochs = [tuple(stream[k : k + EXAMPLES]) for k in range(0, len(stream), EXAMPLES)]
    assert all(sorted(epoch) == list(range(EXAMPLES)) for epoch in epochs)
    assert len(set(epochs)) == 20


def test_order_ignores_the_batch_size_and_batches_cross_epochs() -> None:
    by_one = _stream(_source(_training(1)), 44)
    batches = _read(_source(_training()).at(0), 11)
    assert list(itertools.chain(*batches)) == by_one
    assert {len(batch) for batch in batches} == {BATCH}  # 4 does not divide 11, and no batch is cut


def test_a_batch_may_be_as_large_as_an_epoch() -> None:
    assert [sorted(batch) for batch in _read(_source(_training(EXAMPLES)).at(3), 2)] == [list(range(EXAMPLES))] * 2


def test_training_from_a_position_drops_the_batches_before_it() -> None:
    source = _source(_training())
    whole = _read(source.at(0), 35)
    for position in (2, 3, 11, 30):  # at the end of an epoch, inside one, at the start of one, and far
        assert _read(source.at(position), 5) == whole[position : position + 5]


def test_a_far_position_is_reached_at_once() -> None:
    source, far = _source(_training()), 11 * 10**15
    batches = _read(source.at(far), 11)  # four epochs, from the start of one on
    assert _read(source.at(far + 3), 8) == batches[3:]
    epochs = np.reshape(batches, (4, EXAMPLES))
    assert np.sort(epochs, axis=1).tolist() == [list(range(EXAMPLES))] * 4


@settings(max_examples=12, deadline=None, derandomize=True)
@given(some.data())
def test_replicas_together_get_what_one_gets_from_any_position(data: some.DataObject) -> None:
    examples, pipelines = data.draw(some.integers(1, 23)), data.draw(some.sampled_from([1, 2]))
    replicas = pipelines * data.draw(some.sampled_from([1, 2, 3]))
    training = data.draw(some.booleans()) and examples >= replicas
    most = examples // replicas if training else 4
    batch = replicas * data.draw(some.integers(1, most)) if training else data.draw(some.integers(1, 4 * replicas))
    position = data.draw(some.integers(0, 9))
    source = _source((_training if training else _validation)(batch), examples)
    expected = _read(source.at(0).skip(position), 4)
    assert _read(source.at(position), 4) == expected
    assert _joined(_shares(source, replicas, pipelines, 4, position), replicas) == expected


@pytest.mark.parametrize(("replicas", "pipelines"), [(4, 1), (4, 2)])
@pytest.mark.parametrize("params", [_training(8), _validation(8)], ids=["training", "validation"])
def test_shares_are_equal_and_in_order_while_batches_are_full(
    params: DataConfig, replicas: int, pipelines: int
) -> None:
    source = _source(params, 40)
    shares = _shares(source, replicas, pipelines, 5)
    assert {len(share) for share in shares} == {8 // replicas}
    assert _joined(shares, replicas) == _read(source.at(0), 5)


def test_the_ragged_end_of_a_pass_keeps_every_example_once() -> None:
    shares = _shares(_source(_validation()), 4, 1, 10)
    assert list(itertools.chain(*shares)) == list(range(EXAMPLES))
    assert len(shares) == 3 * 4
    last = [len(share) for share in shares[-4:]]
    assert sum(last) == 3 and max(last) - min(last) <= 1


def test_too_few_examples_give_the_last_replicas_empty_batches() -> None:
    assert _shares(_source(_validation(), 2), 4, 2, 5) == [[0], [1], [], []]


def test_mirrored_replicas_get_the_ragged_end_and_empty_batches() -> None:
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(4)])
    source = _source(_validation(), 5)
    dataset = strategy.distribute_datasets_from_function(lambda context: source.at(0, context))
    seen = [[part.numpy().tolist() for part in strategy.experimental_local_results(step)] for step in dataset]
    assert seen == [[[0], [1], [2], [3]], [[4], [], [], []]]


def test_a_pass_is_in_the_order_of_the_arrays_and_ends() -> None:
    source = _source(_validation())
    assert _read(source.at(0)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert _read(source.at(2)) == [[8, 9, 10]]
    assert _read(source.at(3)) == _read(source.at(9)) == []
    assert [int(source.at(position).cardinality()) for position in (0, 2, 3, 9)] == [3, 1, 0, 0]


def test_drop_remainder_leaves_out_the_batch_that_is_not_full() -> None:
    shares = _shares(_source(_validation(drop_remainder=True)), 2, 1, 10)
    assert _joined(shares, 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("params", "size"),
    [(_training(8), 4), (_validation(8, drop_remainder=True), 4), (_validation(6), 3), (_validation(8), None)],
)
def test_the_batch_dimension_is_static_when_every_batch_is_full(params: DataConfig, size: int | None) -> None:
    assert _source(params, 18).at(0, _context(2)).element_spec.shape == [size]


def test_training_data_is_known_to_have_no_end() -> None:
    assert int(_source(_training()).at(0, _context(2)).cardinality()) == tf.data.INFINITE_CARDINALITY


def _arrays() -> dict[str, Any]:
    return {
        "image": np.arange(12, dtype=np.uint8).reshape(6, 2),
        "more": (np.linspace(0, 1, 6), {"name": np.array([b"a", b"b", b"c", b"d", b"e", b"f"])}),
        "label": np.arange(6, dtype=np.float16),
    }


def test_structures_and_dtypes_stay_and_rows_stay_together() -> None:
    source = ArraySource(_arrays(), _training(6))
    assert source.num_examples == 6
    batch = next(iter(source.at(0)))
    rows = batch["label"].numpy().astype(int)
    tf.nest.assert_same_structure(batch, _arrays())
    for mine, theirs in zip(tf.nest.flatten(batch), tf.nest.flatten(_arrays()), strict=True):
        assert mine.dtype == tf.constant(theirs).dtype
        np.testing.assert_array_equal(mine.numpy(), theirs[rows])


def test_a_transform_changes_whole_batches_in_their_order() -> None:
    seen: list[Any] = []

    def transform(batch: tf.Tensor) -> dict[str, tf.Tensor]:
        seen.append(batch.shape)
        return {"doubled": 2 * batch}

    dataset = ArraySource(np.arange(EXAMPLES), _validation(), transform=transform).at(1)
    assert [batch["doubled"].tolist() for batch in dataset.as_numpy_iterator()] == [[8, 10, 12, 14], [16, 18, 20]]
    assert seen == [[None]]  # traced once, for a batch


def test_changing_the_arrays_afterwards_changes_nothing() -> None:
    array = np.arange(EXAMPLES)
    source = ArraySource(array, _validation(EXAMPLES))
    array[:] = -1
    assert _read(source.at(0)) == [list(range(EXAMPLES))]


@pytest.mark.parametrize(("buffer", "prefetches"), [(None, True), (3, True), (0, False)])
def test_batches_are_prefetched_unless_the_buffer_is_0(buffer: int | None, prefetches: bool) -> None:
    dataset = _source(_validation(prefetch_buffer_size=buffer)).at(0)
    assert ("Prefetch" in repr(dataset._input_dataset)) == prefetches
    assert len(_read(dataset)) == 3


def test_tf_data_options_of_the_config_are_set() -> None:
    options = _source(_training(deterministic=False, autotune_algorithm="HILL_CLIMB")).at(0).options()
    assert options.deterministic is False
    assert options.autotune.enabled
    assert options.autotune.autotune_algorithm == tf.data.experimental.AutotuneAlgorithm.HILL_CLIMB
    assert _source(_training()).at(0).options().deterministic is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (np.zeros((0, 3)), r"hold no examples: shapes \[\(0, 3\)\]"),
        ((np.zeros(3), np.zeros((4, 2))), r"differ in their number of examples.*shapes \[\(3,\), \(4, 2\)\]"),
        ([1, 2, 3], "got a list of shapes"),
        (np.float32(1), "got a float32 of shapes"),
        ({"a": np.zeros(3), "b": None}, "got a dict of shapes"),
        ({}, r"got a dict of shapes \[\]"),
    ],
)
def test_what_is_no_data_is_told_with_its_shapes(arrays: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ArraySource(arrays, _training(1))


def test_a_batch_of_0_is_refused() -> None:
    with pytest.raises(UsageError, match="global_batch_size is 0; set it in the data's section"):
        _source(_training(0))


def test_a_batch_larger_than_the_data_is_refused_with_what_fits() -> None:
    with pytest.raises(DataError, match=r"is 12, but there are 11 examples.*set it to 11 or less$"):
        _source(_training(12))
    with pytest.raises(DataError, match=r"set it to 11 or less, or drop_remainder to false"):
        _source(_validation(12, drop_remainder=True))
    assert _read(_source(_validation(12)).at(0)) == [list(range(EXAMPLES))]


@pytest.mark.parametrize(("batch", "nearest"), [(6, "4 or 8"), (2, "4")])
def test_a_batch_that_replicas_cannot_share_names_near_sizes(batch: int, nearest: str) -> None:
    with pytest.raises(UsageError, match=rf"batch {batch} on 4 replicas leaves 2 over; .*equally: {nearest}$"):
        _source(_training(batch)).at(0, _context(4))


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_first_replicas_get_one_example_more_of_an_uneven_batch(drop_remainder: bool) -> None:
    shares = _shares(_source(_validation(6, drop_remainder=drop_remainder)), 4, 2, 2)
    full, rest = [[0, 1], [2, 3], [4], [5]], [[6, 7], [8], [9], [10]]
    assert shares == (full if drop_remainder else full + rest)


def test_replicas_that_get_nothing_get_empty_batches() -> None:
    assert _shares(_source(_validation(1), 2), 3, 1, 2) == [[0], [], [], [1], [], []]


@pytest.mark.parametrize(("batch", "shape"), [(4, [None]), (11, [11])])
def test_equal_batches_of_a_pass_have_a_static_size(batch: int, shape: list[int | None]) -> None:
    dataset = _source(_validation(batch)).at(0)
    assert dataset.element_spec.shape.as_list() == shape
    assert int(dataset.cardinality()) == -(-EXAMPLES // batch)


def test_without_an_autotune_algorithm_nothing_is_tuned() -> None:
    assert _source(_training()).at(0).options().autotune.enabled is False


def test_an_unknown_autotune_algorithm_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"autotune_algorithm: 'hil_climb' is not an .*did you mean hill_climb"):
        _source(_training(autotune_algorithm="hil_climb"))


def test_one_warning_names_fields_without_effect_on_arrays(caplog: pytest.LogCaptureFixture) -> None:
    _source(_training(input_path="a", shuffle_buffer_size=7, tf_data_service_address="b", cycle_length=1))
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "trainer_kit.inputs.sources.arrays")
    named = {word for word in record.getMessage().replace(",", " ").replace(";", " ").split() if "_" in word}
    assert named == {"input_path", "shuffle_buffer_size", "tf_data_service_address", "cycle_length"}


def test_what_arrays_use_or_need_not_use_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    _source(
        _training(
            cache=True, sharding=False, prefetch_buffer_size=1, deterministic=True, autotune_algorithm="max_parallelism"
        )
    )
    _source(_validation())
    assert caplog.records == []


def test_the_identity_of_arrays_tells_which_one_has_changed() -> None:
    features, labels = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20)
    identity = ArraySource((features, labels), _training()).identity()
    assert json.loads(json.dumps(identity)) == ArraySource((features, labels), _validation()).identity()
    other = ArraySource((features, np.where(labels == 13, 0, labels)), _training()).identity()
    assert [name for name in identity if identity[name] != other[name]] == ["array 1"]
    reordered = ArraySource((features[::-1], labels), _training()).identity()
    assert [name for name in identity if identity[name] != reordered[name]] == ["array 0"]
    assert identity["array 1"].startswith("int64 [20], checksum ")


def test_the_identity_of_a_large_array_reads_a_sample() -> None:
    large = np.zeros(2**25, np.uint8)  # 32 MiB, of which every second byte is read
    identity = array_identity(large)
    large[7] = 1
    assert array_identity(large) == identity
    large[8] = 1
    assert array_identity(large) != identity


def test_strings_have_an_identity_that_is_not_their_address() -> None:
    words = [b"one", b"two", b"three"]
    assert array_identity(np.array(words, object)) == array_identity(tf.constant(words))
    assert array_identity(np.array(words, object)) != array_identity(tf.constant(words[::-1]))
