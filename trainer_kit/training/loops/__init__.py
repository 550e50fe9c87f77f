"""Loops of steps, in one call of one TensorFlow function each. Nothing here knows what a step does."""
