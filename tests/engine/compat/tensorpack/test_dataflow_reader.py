"""Passes over a dataflow: their random numbers, their place and their length."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import numpy as np
import pytest
import trainer_kit.compat.tensorpack.utils.utils as utils

from trainer_kit.compat.tensorpack import (
    DataFlow,
    DataFromList,
    DataFromQueue,
    MapData,
    RepeatedData,
    RNGDataFlow,
)
from trainer_kit.compat.tensorpack.input_source.dataflow_reader import DataflowReader
from trainer_kit.errors import DataError


class Draws(RNGDataFlow):
    """Draws from its own generator and from NumPy's global one."""

    def __iter__(self) -> Iterator[list[float]]:
        for _ in range(3):
            yield [self.rng.uniform(), np.random.uniform()]

    def __len__(self) -> int:
        return 3


def read(reader: DataflowReader, count: int) -> list[list[float]]:
    return [reader.next_components(["own", "shared"]) for _ in range(count)]


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_restored_reader_continues_at_its_place(reads_ahead: bool) -> None:
    whole = DataflowReader(Draws(), is_infinite=True, reads_ahead=reads_ahead)
    stopped = DataflowReader(Draws(), is_infinite=True, reads_ahead=reads_ahead)
    resumed = DataflowReader(Draws(), is_infinite=True, reads_ahead=reads_ahead)

    expected = read(whole, 8)
    begin = read(stopped, 4)
    place = stopped.state()
    resumed.restore(place)
    end = read(resumed, 4)
    for reader in (whole, stopped, resumed):
        reader.restart()

    assert begin + end == expected
    assert place == [1, 1]
    assert expected[0] != expected[3]


def test_other_draws_change_nothing_in_a_pass() -> None:
    first = DataflowReader(Draws(), is_infinite=True, reads_ahead=False)
    second = DataflowReader(Draws(), is_infinite=True, reads_ahead=False)
    other = DataflowReader(Draws(), is_infinite=False, reads_ahead=False)

    expected = read(first, 3)
    mixed = []
    for _ in range(3):
        np.random.uniform(size=5)
        read(other, 1)
        mixed += read(second, 1)

    assert mixed == expected


def test_readers_in_threads_draw_apart() -> None:
    alone = DataflowReader(Draws(), is_infinite=True, reads_ahead=True)
    expected = read(alone, 300)
    alone.restart()
    readers = [DataflowReader(Draws(), is_infinite=True, reads_ahead=True) for _ in range(2)]

    mixed: list[list[list[float]]] = [[], []]
    for _ in range(300):
        for reader, datapoints in zip(readers, mixed, strict=True):
            datapoints += read(reader, 1)
    for reader in readers:
        reader.restart()

    assert mixed == [expected, expected]


def test_fix_rng_seed_changes_the_order_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    orders = []
    for seed in (1, 2, 1):
        monkeypatch.setattr(utils, "_RNG_SEED", seed)
        flow = DataFromList([[number] for number in range(50)])
        reader = DataflowReader(flow, is_infinite=False, reads_ahead=False)
        orders.append([reader.next_components(["number"]) for _ in range(50)])

    assert orders[0] == orders[2] != orders[1]


def test_a_restored_reader_takes_the_next_item_of_a_queue() -> None:
    items: queue.Queue[list[int]] = queue.Queue()
    for number in range(4):
        items.put([number])
    reader = DataflowReader(
        MapData(DataFromQueue(items), lambda item: item), is_infinite=True, reads_ahead=True
    )
    reader.restore([0, 3])

    numbers = [reader.next_components(["number"]) for _ in range(4)]
    # Its thread waits for an item that never comes.
    reader.restart()

    assert numbers == [[0], [1], [2], [3]]


def test_a_missing_component_is_named() -> None:
    reader = DataflowReader(DataFromList([{"x": 1}]), is_infinite=False, reads_ahead=False)

    with pytest.raises(DataError, match="has the components x, and the model also has the input"):
        reader.next_components(["x", "label"])


def test_a_pass_leaves_the_generator_of_numpy_alone() -> None:
    np.random.seed(1)
    expected = np.random.uniform(size=2)
    reader = DataflowReader(Draws(), is_infinite=True, reads_ahead=False)

    np.random.seed(1)
    first = np.random.uniform()
    read(reader, 2)
    second = np.random.uniform()

    assert [first, second] == expected.tolist()


def test_an_endless_repeat_is_read_pass_by_pass() -> None:
    dataflow = RepeatedData(DataFromList([[1, 1], [2, 2]], shuffle=False), -1)
    reader = DataflowReader(dataflow, is_infinite=False, reads_ahead=False)

    read(reader, 5)

    assert reader.state() == [2, 1]


def test_a_wrong_number_of_components_is_explained() -> None:
    reader = DataflowReader(DataFromList([[1]]), is_infinite=True, reads_ahead=False)

    with pytest.raises(DataError, match=r"has 1 components.* has 2 inputs \(own, shared\)"):
        read(reader, 1)


def test_a_pass_of_another_length_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Longer(DataFlow):
        def __iter__(self) -> Iterator[list[int]]:
            yield from [[1, 1], [2, 2]]

        def __len__(self) -> int:
            return 1

    reader = DataflowReader(Longer(), is_infinite=True, reads_ahead=False)

    read(reader, 3)

    assert "Longer.__len__() returns 1, and a pass had 2 datapoints" in caplog.text
