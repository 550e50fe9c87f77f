"""What the functions that users give to a Source are called with."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import input_context, training_data, write_records
from tests.engine.inputs.one_replica import OneReplica, section_of
from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import UsageError
from trainer_kit.inputs.batch_position import Position
from trainer_kit.inputs.dataset_resume import ResumePolicy
from trainer_kit.inputs.fused_batches import build_stacked_dataset_at
from trainer_kit.inputs.sources.arrays import ArraySource
from trainer_kit.inputs.sources.batch_function import BatchFunction
from trainer_kit.inputs.sources.source_protocol import Source
from trainer_kit.inputs.sources.tfrecords import TFRecordSource
from trainer_kit.inputs.train_data import TrainData

EXAMPLES = 23
SIX = np.arange(6)
PARAMS = training_data()
ONE_PASS = PARAMS.replace(is_training=False, drop_remainder=False)
GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "data.md"


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two files that hold the numbers 0 to 22 as text."""
    folder = tmp_path_factory.mktemp("records")
    write_records(folder / "a", [str(number).encode() for number in range(5)])
    write_records(folder / "b", [str(number).encode() for number in range(5, EXAMPLES)])

    return f"{folder}/*"


def _parse_numbers(serialized: tf.Tensor) -> tf.Tensor:
    return tf.strings.to_number(serialized, tf.int64)


def _create_source(transform: Any, params: DataConfig = PARAMS, arrays: Any = None) -> ArraySource:
    return ArraySource(
        np.arange(EXAMPLES) if arrays is None else arrays, params, transform=transform
    )


def _read_seeds(
    source: Source, batches: int = -1, position: int = 0, context: Any = None
) -> list[Any]:
    """Each example as (number, seed), batch by batch."""
    dataset = source.at(position, context).take(batches)
    return [
        list(zip(x.tolist(), map(tuple, seed.tolist()), strict=True))
        for x, seed in dataset.as_numpy_iterator()
    ]


def _return_with_seed(batch: Any, seed: Any) -> Any:
    return batch, seed


@pytest.fixture(scope="module")
def seeded_batches() -> list[Any]:
    """The first 20 training batches of the arrays: three epochs and a part."""
    return _read_seeds(_create_source(_return_with_seed), 20)


class _Method:
    def method(self, batch: Any, seed: Any) -> Any:
        return batch, seed

    def __call__(self, batch: Any, *, seed: Any) -> Any:
        return batch, seed


@pytest.mark.parametrize(
    "function",
    [
        lambda batch, seed: (batch, seed),
        lambda batch, seed=None: (batch, seed),
        lambda batch, *, seed: (batch, seed),
        functools.partial(lambda batch, strength, seed: (batch, seed), strength=3),
        functools.partial(lambda strength, batch, seed: (batch, seed), 3),
        tf.function(_return_with_seed),
        _Method(),
        _Method().method,
    ],
)
def test_a_parameter_named_seed_gets_the_seeds_of_the_batch(function: Any) -> None:
    batch = np.arange(4)
    seeds = np.arange(8, dtype=np.int32).reshape(4, 2)

    changes = BatchFunction(function, "transform")

    assert changes.takes_seed

    (changed,) = changes.apply_to(
        tf.data.Dataset.from_tensors((batch, seeds)), has_seeds=True
    ).as_numpy_iterator()
    assert [part.tolist() for part in changed] == [batch.tolist(), seeds.tolist()]


@pytest.mark.parametrize(
    "function",
    [
        lambda batch: batch,
        lambda batch, strength=2: batch,
        lambda batch, strength=2, seed=1: batch,
        lambda batch, **options: batch,
        lambda *batch: batch[0],
        lambda seed: seed,
        functools.partial(lambda batch, seed: batch, seed=3),
        keras.layers.Identity(),
        tf.identity,
        memoryview,  # a type without a signature
    ],
)
def test_every_other_function_gets_the_structure_alone(function: Any) -> None:
    source = _create_source(function, ONE_PASS)
    if function is not memoryview:
        assert next(source.at(0).as_numpy_iterator()).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize(
    "arrays", [(np.arange(6), np.arange(6)), {"x": np.arange(6)}, (np.arange(6), {"y": np.ones(6)})]
)
def test_a_structure_comes_as_one_argument(arrays: Any, seeded: bool) -> None:
    structures: list[Any] = []

    def note(batch: Any, seed: Any = None) -> Any:
        structures.append(tf.nest.map_structure(lambda part: 0, batch))
        return batch

    _create_source(note if seeded else lambda batch: note(batch), arrays=arrays).at(0)

    assert structures == [tf.nest.map_structure(lambda part: 0, arrays)]


def augment(x: Any, y: Any) -> Any:
    """As for a plain dataset of pairs."""
    return x, y


@pytest.mark.parametrize(
    "function", [augment, lambda: 0, lambda batch, *, strength: batch, lambda a, b, seed: a, 3]
)
def test_a_function_that_cannot_be_called_so_is_refused(function: Any, pattern: str) -> None:
    with pytest.raises(UsageError):
        _create_source(function)

    for functions in ({"parse": _parse_numbers, "batch_transform": function}, {"parse": function}):
        with pytest.raises(UsageError):
            TFRecordSource(pattern, PARAMS, **functions)


@pytest.mark.parametrize("params", [PARAMS, ONE_PASS])
def test_records_and_arrays_give_an_example_the_same_seed(params: DataConfig, pattern: str) -> None:
    expected = _read_seeds(_create_source(_return_with_seed, params), 7)  # over the end of an epoch
    parsed = TFRecordSource(pattern, params, parse=lambda text, seed: (_parse_numbers(text), seed))
    changed = TFRecordSource(
        pattern, params, parse=_parse_numbers, batch_transform=_return_with_seed
    )
    both = TFRecordSource(
        pattern,
        params,
        parse=lambda text, seed: [_parse_numbers(text), seed],
        batch_transform=lambda pair, seed: (pair[0], tf.where(pair[1] == seed, seed, 0)),
    )
    first = TFRecordSource(
        pattern,
        params,
        parse=lambda text, seed: (_parse_numbers(text), seed),
        batch_transform=lambda pair: pair,
    )

    for source in (parsed, changed, both, first):
        assert _read_seeds(source, 7) == expected

    assert len(expected) == (7 if params.is_training else 6)


@pytest.mark.parametrize("params", [PARAMS, ONE_PASS])
def test_seeds_are_the_same_on_four_replicas_of_two_workers(params: DataConfig) -> None:
    """Each worker serves two: any other number of replicas shares examples and seeds alike."""
    contexts = [input_context(4, 2, pipeline) for pipeline in range(2)]
    source = _create_source(_return_with_seed, params)
    joined = [_read_seeds(source, 8, 1, context) for context in contexts]
    seeds = sorted(itertools.chain(*itertools.chain(*joined)))

    assert seeds == sorted(itertools.chain(*_read_seeds(source, 4, 1)))


def test_seeds_depend_on_the_epoch_and_not_on_the_start(seeded_batches: list[Any]) -> None:
    for position in (5, 13):  # in the first epoch and the third
        assert (
            _read_seeds(_create_source(_return_with_seed), 20 - position, position)
            == seeded_batches[position:]
        )

    flat = list(itertools.chain(*seeded_batches))
    assert len({seed for _, seed in flat}) == len(flat) == 80  # three epochs and a part

    one_pass = dict(itertools.chain(*_read_seeds(_create_source(_return_with_seed, ONE_PASS))))
    assert one_pass == dict(flat[:EXAMPLES])  # a pass is epoch 0

    batches_of_6 = itertools.chain(
        *_read_seeds(_create_source(_return_with_seed, PARAMS.replace(global_batch_size=6)), 10)
    )
    assert list(batches_of_6) == flat[:60]

    none, zero = (
        _read_seeds(_create_source(_return_with_seed, PARAMS.replace(seed=seed)), 2)
        for seed in (None, 0)
    )
    assert none == zero != seeded_batches[:2]


def test_stacked_batches_have_the_same_seeds(seeded_batches: list[Any]) -> None:
    plain = [seed for batch in seeded_batches[:12] for _, seed in batch]
    stacks = build_stacked_dataset_at(_create_source(_return_with_seed), Position(), 3).take(4)

    assert [
        tuple(row) for _, (_, seeds) in stacks for row in seeds.numpy().reshape(-1, 2).tolist()
    ] == plain


def test_the_example_of_the_guide_flips_each_image_by_its_seed() -> None:
    example = GUIDE.read_text().split("<!-- example: seeds -->")[1]
    text = example.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"tf": tf}
    exec(text, names)
    images = np.random.default_rng(0).uniform(size=(EXAMPLES, 4, 4, 1)).astype(np.float32)
    source = _create_source(
        names["augment"],
        ONE_PASS.replace(global_batch_size=EXAMPLES),
        (images, np.arange(EXAMPLES)),
    )

    (changed, labels), *_ = source.at(0).as_numpy_iterator()

    assert labels.tolist() == list(range(EXAMPLES))
    assert changed.shape == images.shape

    kept = [bool((result == image).all()) for result, image in zip(changed, images, strict=True)]
    flipped = [
        bool((result == image[:, ::-1]).all())
        for result, image in zip(changed, images, strict=True)
    ]

    assert all(np.logical_xor(kept, flipped))
    assert 5 < sum(flipped) < 18
    assert _find_reasons(source) == []


def _find_reasons(source: Any, **options: Any) -> list[str]:
    """What is reported when a run begins to read the source."""
    section = section_of(lambda params: source, PARAMS)
    policy = ResumePolicy(**options)
    next(TrainData(OneReplica(), section, policy, tf.Variable(0, dtype=tf.int64)).iterator())
    return sorted(policy.reasons)


def crop_batch(batch: Any) -> Any:
    """Random, without a seed of each example."""
    return batch + tf.image.random_crop(tf.range(8, dtype=tf.int64), [4])


def drawn(batch: Any) -> Any:
    """Random, by a generator that is a variable."""
    return batch + _create_generator().uniform([4], 0, 9, tf.int64)


def in_python(batch: Any) -> Any:
    """Python, whose state no one knows."""
    return tf.ensure_shape(tf.py_function(lambda value: value, [batch], tf.int64), [4])


def pure(batch: Any) -> Any:
    """Python that promises to have no state."""
    return tf.ensure_shape(
        tf.numpy_function(lambda value: value, [batch], tf.int64, stateful=False), [4]
    )


def stateless(batch: Any, seed: Any) -> Any:
    """Random, by the seed of each example, one by one."""
    return batch + tf.map_fn(
        lambda row: tf.random.stateless_uniform([], row, 0, 9, tf.int64),
        seed,
        fn_output_signature=tf.int64,
    )


def _parse_then_call(function: Any) -> Any:
    if function is stateless:
        return lambda text, seed: function(_parse_numbers(text), seed)
    return lambda text: function(_parse_numbers(text))


@functools.cache  # not when the module is imported: TensorFlow's devices could not be set any more
def _create_generator() -> tf.random.Generator:
    return tf.random.Generator.from_seed(1)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            crop_batch,
            (
                r"crop_batch \(test_batch_function.py:\d+\): RandomUniformInt; .*a second "
                r"parameter named `seed`"
            ),
        ),
        (drawn, r"drawn \(test_batch_function.py:\d+\): \w+"),
        (in_python, r"in_python \(test_batch_function.py:\d+\): EagerPyFunc"),
    ],
)
def test_a_function_that_cannot_be_resumed_is_named(
    function: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    (reason_text,) = _find_reasons(_create_source(function))

    assert re.search(f"the state of transform {reason}", reason_text)
    assert len(caplog.records) == 1

    with pytest.raises(UsageError, match=r"require_exact_resume:.*\n.*transform "):
        _find_reasons(_create_source(function), require_exact=True)


@pytest.mark.parametrize("function", [pure, stateless])
def test_a_function_that_can_be_resumed_is_taken(
    function: Any, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    parsed = TFRecordSource(
        pattern, PARAMS, parse=_parse_then_call(function), batch_transform=lambda batch: batch
    )

    assert _find_reasons(_create_source(function), require_exact=True) == []
    assert _find_reasons(parsed, require_exact=True) == []
    assert caplog.records == []


def test_functions_of_records_that_cannot_be_resumed_are_named(pattern: str) -> None:
    changed = TFRecordSource(pattern, PARAMS, parse=_parse_numbers, batch_transform=crop_batch)
    (reason,) = _find_reasons(changed)

    assert re.search(
        r"the state of batch_transform crop_batch \(test_batch_function.py:\d+\)", reason
    )

    parsed = TFRecordSource(pattern, PARAMS, parse=_parse_then_call(crop_batch))
    for source, role, options in (
        (changed, "batch_transform", {}),
        (parsed, "parse", {"deterministic_ops": True}),
    ):
        with pytest.raises(UsageError, match=rf"require_exact_resume:.*\n.*{role} "):
            _find_reasons(source, require_exact=True, **options)


class _Own:
    """A Source of a user's own class, made of what a function makes of the position."""

    def __init__(self, begin: Any) -> None:
        self._begin = begin

    def at(self, position: int, input_context: Any = None) -> Any:
        return self._begin(position)


def _build_noisy(position: int) -> tf.data.Dataset:
    return (
        tf.data.Dataset.range(10**6)
        .map(lambda x: x + tf.random.uniform([], 0, 5, tf.int64))
        .skip(position)
    )


def test_sources_of_other_classes_raise_no_false_alarm() -> None:
    def generate_batches(position: int) -> tf.data.Dataset:
        numbers = tf.data.Dataset.from_generator(
            lambda: iter(range(position * 4, 10**6)), output_signature=tf.TensorSpec([], tf.int64)
        )
        return numbers.map(
            lambda x: tf.ensure_shape(tf.py_function(lambda y: y, [x], tf.int64), [])
        ).batch(4)

    def batch_by_two(position: int) -> tf.data.Dataset:
        return _create_source(stateless).at(position).unbatch().batch(2)

    assert _find_reasons(_Own(generate_batches), require_exact=True) == []
    assert _find_reasons(_Own(batch_by_two), require_exact=True) == []
    # It reads from its start.
    assert _find_reasons(_Own(_build_noisy), require_exact=True, deterministic_ops=True) == []

    with pytest.raises(UsageError, match=r"the state of map\(\): RandomUniformInt"):
        _find_reasons(_Own(_build_noisy), require_exact=True)

    with pytest.raises(UsageError, match=r"transform crop_batch .*: RandomUniformInt"):
        _find_reasons(
            _Own(lambda position: _create_source(crop_batch).at(position).unbatch()),
            require_exact=True,
        )


def test_records_in_any_order_are_not_resumed_exactly(pattern: str) -> None:
    params = PARAMS.replace(deterministic=False)

    with pytest.raises(UsageError, match=r"map\(\): deterministic=False"):
        _find_reasons(TFRecordSource(pattern, params, parse=_parse_numbers), require_exact=True)

    # Nothing in it is parallel.
    assert _find_reasons(_create_source(None, params), require_exact=True) == []
