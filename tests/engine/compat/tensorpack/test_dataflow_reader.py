"""Passes over a dataflow: their random numbers, their place and their length."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from trainer_kit.compat.tensorpack import DataFlow, DataFromList, RepeatedData, RNGDataFlow
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

    assert [own for own, _ in begin + end] == [own for own, _ in expected]
    assert place == [1, 1]
    assert expected[0] != expected[3]
    # Threads that read ahead share the generator of NumPy.
    assert reads_ahead or begin + end == expected


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
