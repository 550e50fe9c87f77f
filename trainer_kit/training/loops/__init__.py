"""Loops of steps, each run in one call of a tf.function.

This package does not know what a step does.
"""
