"""The verbs of `trainer-kit doctor`."""
