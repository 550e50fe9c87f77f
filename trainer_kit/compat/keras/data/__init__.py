"""The data of the door to Keras: whatever `Model.fit` takes, with a position."""
