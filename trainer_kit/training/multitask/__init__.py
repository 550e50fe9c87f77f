"""Several tasks that share a model: the model, the task that consists of tasks, and its trainer."""
