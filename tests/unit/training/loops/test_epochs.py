"""Epochs of a run whose batches run over their ends."""

from fractions import Fraction

from trainer_kit.training.loops.intervals import Epochs

EPOCHS = Epochs(Fraction(103, 10))


def test_epoch_e_ends_with_the_step_that_uses_its_last_example() -> None:
    assert [EPOCHS.get_end_step(epoch) for epoch in range(5)] == [0, 11, 21, 31, 42]
    assert [step for step in range(43) if EPOCHS.is_end(step)] == [11, 21, 31, 42]


def test_a_step_knows_its_epoch_and_its_place_in_it() -> None:
    assert [EPOCHS.locate_step(step) for step in (0, 1, 11, 12, 21, 22)] == [
        (1, 0),
        (1, 1),
        (1, 11),
        (2, 1),
        (2, 10),
        (3, 1),
    ]
    assert [EPOCHS.count_completed(step) for step in (0, 10, 11, 20, 21)] == [0, 0, 1, 1, 2]
