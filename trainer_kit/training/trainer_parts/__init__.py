"""The parts that a Trainer is made of."""
