"""The door for TF Model Garden: their tasks, experiments, YAML and gin files on our engine.

Names of `official.core` with the signatures that they have there; importing this imports nothing of theirs yet.
"""
