"""Data whose batches can be read from any position on: arrays, TFRecord files, and users' own."""
