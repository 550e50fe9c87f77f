"""Detects failed reads in the saved state of a tf.data iterator. Reads files only; no TensorFlow."""

from __future__ import annotations

import glob
import mmap

# Keys under which tf.data's buffers save the message of a read that failed; there is none for a
# read that did not.
_FAILURES = (b"error_message", b"_status_msg")


def has_failed_read(prefix: str) -> bool:
    """Whether an iterator that is restored from these files would fail, although its data can be read by now.

    A pipeline reads ahead: a batch that the run has not asked for may have failed in a buffer
    before the state was saved. The state then holds the error in the place of the batch, and each
    restored iterator raises it again. Files that cannot be read hold none: the restore has its own
    message for them.

    Args:
      prefix: The path that the names of the files begin with.
    """
    for path in glob.glob(f"{glob.escape(prefix)}.data-*"):
        try:
            with (
                open(path, "rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
            ):
                if any(content.find(key) >= 0 for key in _FAILURES):
                    return True
        except (OSError, ValueError):  # an empty file cannot be mapped
            continue
    return False
