"""train_loop: a training loop by hand on the engine."""
