"""What is checked of a task, a model, their batches and their steps, before training and after a failure."""
