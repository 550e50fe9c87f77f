"""The files that predictions are written to: numbered parts, and one file at the end."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer_kit import files
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.serving.export_formats import Arrays, import_runtime


class PredictionParts:
    """The numbered parts of a prediction, each written at once, so that a killed one continues.

    Args:
      output: The path of the file at the end.
      identity: What the rows depend on, in JSON types. Its hash is in the name of the folder,
        `<output>.parts-<hash>`, so another prediction has other parts.
    """

    def __init__(self, output: str, identity: Mapping[str, Any]) -> None:
        text = json.dumps(identity, sort_keys=True)
        checksum = zlib.crc32(text.encode())
        self.output = Path(output)
        self.folder = Path(f"{output}.parts-{checksum:08x}")

    def _get_path(self, number: int) -> Path:
        return self.folder / f"part-{number:06}.npz"

    def has_part(self, number: int) -> bool:
        """Whether a part exists. A part that exists is complete."""
        return self._get_path(number).exists()

    def write(self, number: int, columns: Arrays) -> None:
        """Writes a part.

        Raises:
          StorageError: When it cannot be written.
        """
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for name, column in columns.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, column, allow_pickle=False)
        files.write_bytes(self._get_path(number), content.getvalue())

    def read(self, count: int, names: Sequence[str] | None = None) -> Iterator[Arrays]:
        """Yields the columns of each of the first parts, or those of some names."""
        for number in range(count):
            with np.load(self._get_path(number)) as arrays:
                yield {name: arrays[name] for name in names or arrays.files}

    def merge(self, count: int) -> None:
        """Writes the rows of the first parts to the output, in order, and removes the folder.

        Raises:
          StorageError: When the file cannot be written.
        """
        temporary = self.folder / "merged.tmp"
        try:
            WRITERS[self.output.suffix](self, count, temporary)
            files.flush_tree(self.folder)
            os.replace(temporary, self.output)
            shutil.rmtree(self.folder)
        except OSError as error:
            reason = error.strerror or error
            raise StorageError(f"{self.output} cannot be written: {reason}") from error


def write_json_lines(parts: PredictionParts, count: int, path: Path) -> None:
    """Writes one JSON object in a line. Arrays are nested lists."""
    with open(path, "w", encoding="utf-8") as stream:
        for columns in parts.read(count):
            lists = [to_list(column) for column in columns.values()]
            for values in zip(*lists, strict=True):
                row = dict(zip(columns, values, strict=True))
                line = json.dumps(row)
                stream.write(f"{line}\n")


def write_csv(parts: PredictionParts, count: int, path: Path) -> None:
    """Writes a CSV file. An array has a column for each number, such as `outputs_0`.

    Raises:
      UsageError: When two columns would have one name.
    """
    import pandas

    with open(path, "w", encoding="utf-8", newline="") as stream:
        for number, columns in enumerate(parts.read(count)):
            frames = []
            for name, column in columns.items():
                values = to_list(column.reshape(len(column), -1))
                frame = pandas.DataFrame(values).add_prefix(f"{name}_")
                if column.ndim == 1:
                    frame.columns = [name]
                frames.append(frame)
            table = pandas.concat(frames, axis=1)
            duplicates = table.columns[table.columns.duplicated()]
            if len(duplicates):
                raise UsageError(f"output: two columns are called {duplicates[0]!r}; rename one")
            table.to_csv(stream, header=number == 0, index=False)


def write_parquet(parts: PredictionParts, count: int, path: Path) -> None:
    """Writes a Parquet file. Arrays are lists."""
    pyarrow = import_runtime("pyarrow", "parquet")
    parquet = import_runtime("pyarrow.parquet", "parquet")
    writer = None
    with contextlib.ExitStack() as stack:
        for columns in parts.read(count):
            lists = {name: to_list(value) for name, value in columns.items()}
            table = pyarrow.table(lists)
            writer = writer or stack.enter_context(parquet.ParquetWriter(path, table.schema))
            writer.write_table(table)


def write_npz(parts: PredictionParts, count: int, path: Path) -> None:
    """Writes a .npz file. Each column is one array, written part by part."""
    row_count = 0
    dtypes: dict[str, np.dtype[Any]] = {}
    for columns in parts.read(count):
        row_count += len(next(iter(columns.values())))
        for name, column in columns.items():
            # The texts of a part have the length of its longest one.
            dtype = dtypes.get(name, column.dtype)
            dtypes[name] = np.promote_types(dtype, column.dtype)

    with zipfile.ZipFile(path, "w") as archive:
        for name, dtype in dtypes.items():
            header = {
                "descr": np.lib.format.dtype_to_descr(dtype),
                "fortran_order": False,
                "shape": (row_count, *columns[name].shape[1:]),
            }
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array_header_1_0(stream, header)
                for part in parts.read(count, [name]):
                    stream.write(part[name].astype(dtype).tobytes())


WRITERS: Mapping[str, Callable[[PredictionParts, int, Path], None]] = {
    ".jsonl": write_json_lines,
    ".csv": write_csv,
    ".parquet": write_parquet,
    ".npz": write_npz,
}


def check_output(output: str) -> None:
    """Raises UsageError unless a path ends with the suffix of a writer, and is no folder."""
    if Path(output).suffix not in WRITERS or Path(output).is_dir():
        raise UsageError(f"output: {output} is no file that ends with {', '.join(WRITERS)}")
    if output.endswith(".parquet"):
        import_runtime("pyarrow.parquet", "parquet")


def to_list(column: np.ndarray) -> list[Any]:
    """Returns the values in types of Python. Bytes become text."""
    if column.dtype.kind == "S":
        column = np.char.decode(column, "utf-8", "replace")
    return column.tolist()
