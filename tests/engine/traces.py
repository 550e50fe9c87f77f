"""Reads back what TensorFlow's profiler has written."""

from __future__ import annotations

from pathlib import Path

from tensorflow.tsl.profiler.protobuf import xplane_pb2


def times_traced(folder: Path, op: str) -> int:
    """Returns how often the op of a name was run in the traces of `folder`, without its scopes."""
    count = 0
    for path in folder.glob("plugins/profile/*/*.xplane.pb"):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        for plane in space.planes:
            ids = {
                number
                for number, event in plane.event_metadata.items()
                if event.name.partition(":")[0].rpartition("/")[2] == op
            }
            count += sum(event.metadata_id in ids for line in plane.lines for event in line.events)

    return count
