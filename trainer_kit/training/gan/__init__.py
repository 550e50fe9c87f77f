"""Generative adversarial networks: the model of two nets, their losses, and the task that trains them."""
