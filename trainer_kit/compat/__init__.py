"""Compatibility layers: thin translations of other frameworks onto trainer_kit's engine."""
