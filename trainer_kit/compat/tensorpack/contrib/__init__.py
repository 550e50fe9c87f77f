"""`tensorpack.contrib`, which has models of Keras only."""
