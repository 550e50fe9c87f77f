"""Verbs that show many runs side by side."""
