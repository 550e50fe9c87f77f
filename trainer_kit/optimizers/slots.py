"""A base of optimizers that trainer_kit writes itself: for each trained variable some slots of the same shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import keras

from trainer_kit.distribution.keras_internals import variable_index


class SlotOptimizer(keras.optimizers.Optimizer):
    """An optimizer with named slots, which begin at 0.

    Attributes:
      slot_names: The names of the slots of a variable.
      argument_names: The names of the arguments of the subclass, which are attributes too, for `get_config`.
    """

    slot_names: ClassVar[tuple[str, ...]] = ()
    argument_names: ClassVar[tuple[str, ...]] = ()

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the slots for `variables`; called in strategy scope."""
        if self.built:
            return
        super().build(variables)
        self.slots = [list(slots) for slots in self.add_optimizer_variables(variables, list(self.slot_names))]

    def slots_of(self, variable: Any) -> list[Any]:
        """Returns the slots of a variable, in the order of `slot_names`; also inside `update_step`, on a replica."""
        index = variable_index(self, variable)
        return [slots[index] for slots in self.slots]

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), **{name: getattr(self, name) for name in self.argument_names}}
