"""fit: `Model.fit` on the engine."""
