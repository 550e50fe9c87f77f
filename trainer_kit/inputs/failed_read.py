"""Detects failed reads in the saved state of a tf.data iterator.

Only reads files, without TensorFlow.
"""

from __future__ import annotations

import glob
import mmap

# Keys under which tf.data's buffers save the message of a read that failed. After a successful read
# they do not exist.
_FAILURES = (b"error_message", b"_status_msg")


def has_failed_read(prefix: str) -> bool:
    """Whether an iterator that is restored from these files would fail with an old error.

    A pipeline reads ahead: a batch that the run has not asked for may have failed in a buffer
    before the state was saved. The state then contains the error in the place of the batch, and
    each restored iterator raises it again, although its data can be read by now. Files that cannot
    be read count as files without an error, since the restore has its own message for them.

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
        except (OSError, ValueError):
            # ValueError is what mapping an empty file raises.
            continue
    return False
