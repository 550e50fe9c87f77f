"""Checks of tasks, models, batches and steps, before training and after a failure."""
