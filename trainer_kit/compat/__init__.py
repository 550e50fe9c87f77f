"""The doors: thin translations of other frameworks onto the one engine."""
