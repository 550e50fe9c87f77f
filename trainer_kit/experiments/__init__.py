"""The experiments that come with trainer_kit. `trainer-kit list` shows them."""
