"""The files that predictions are written to: numbered parts, and one file at the end."""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer_kit import files
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.serving.export_formats import Arrays, import_runtime

_RECORD = "prediction.json"


class PredictionParts:
    """The numbered parts of a prediction, each written at once, so that a killed one continues.

    Args:
      output: The path of the file at the end. The parts are in the folder `<output>.parts`.
      identity: What the rows depend on, in JSON types. Parts of another identity are refused.

    Raises:
      UsageError: When the folder has parts of another prediction.
    """

    def __init__(self, output: str, identity: Mapping[str, Any]) -> None:
        self.folder = Path(f"{output}.parts")
        record = files.read_json(self.folder / _RECORD)
        if record is None and self.folder.exists():
            # A removal was interrupted.
            self.remove()
        if record is None:
            files.write_json(self.folder / _RECORD, identity)
        elif record != identity:
            names = [name for name in identity if record.get(name) != identity[name]]
            raise UsageError(
                f"{self.folder} has the parts of another prediction: {', '.join(names)} differ;"
                " remove the folder, or give another output"
            )

    def get_path(self, number: int) -> Path:
        """Returns the path of a part."""
        return self.folder / f"part-{number:06}.npz"

    def has_part(self, number: int) -> bool:
        """Whether a part is there, which is whole then."""
        return self.get_path(number).exists()

    def write(self, number: int, columns: Arrays) -> None:
        """Writes a part.

        Raises:
          StorageError: When it cannot be written.
        """
        path = self.get_path(number)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as stream:
                with zipfile.ZipFile(stream, "w") as archive:
                    for name, column in columns.items():
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                            np.lib.format.write_array(entry, column, allow_pickle=False)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error

    def read(self, number: int) -> dict[str, np.ndarray]:
        """Returns the columns of a part."""
        with np.load(self.get_path(number)) as arrays:
            return {name: arrays[name] for name in arrays.files}

    def remove(self) -> None:
        """Removes the folder. The record, without which no part counts, goes first."""
        for path in sorted(self.folder.iterdir(), reverse=True):
            path.unlink()
        self.folder.rmdir()


@dataclass(frozen=True)
class Rows:
    """The rows of all parts.

    Attributes:
      parts: The parts.
      part_count: Their number.
      count: The number of rows.
      dtypes: The dtype of each column over all parts. That of a text has the longest length.
    """

    parts: PredictionParts
    part_count: int
    count: int
    dtypes: Mapping[str, np.dtype[Any]]

    def iterate(self) -> Iterator[dict[str, np.ndarray]]:
        """Yields the columns of each part, in order."""
        for number in range(self.part_count):
            columns = self.parts.read(number)
            yield {name: columns[name].astype(dtype) for name, dtype in self.dtypes.items()}


def write_json_lines(rows: Rows, path: str) -> None:
    """Writes one JSON object in a line. Arrays are nested lists."""
    with open(path, "w", encoding="utf-8") as stream:
        for columns in rows.iterate():
            lists = [_to_list(column) for column in columns.values()]
            for values in zip(*lists, strict=True):
                stream.write(json.dumps(dict(zip(columns, values, strict=True))) + "\n")


def write_csv(rows: Rows, path: str) -> None:
    """Writes a CSV file. A vector has a column for each number, such as `outputs_0`.

    Raises:
      UsageError: When a column has more than one dimension in a row.
    """
    import pandas

    for number, columns in enumerate(rows.iterate()):
        table: dict[str, Any] = {}
        for name, column in columns.items():
            if column.ndim > 2:
                raise UsageError(
                    f"{name} has the shape {list(column.shape[1:])} in a row, and a CSV file has"
                    " numbers; write .jsonl, .parquet or .npz"
                )
            if column.ndim == 1:
                table[name] = _to_list(column)
                continue
            for index in range(column.shape[1]):
                table[f"{name}_{index}"] = column[:, index]
        is_first = number == 0
        mode = "w" if is_first else "a"
        pandas.DataFrame(table).to_csv(path, mode=mode, header=is_first, index=False)


def write_parquet(rows: Rows, path: str) -> None:
    """Writes a Parquet file. Arrays are lists."""
    pyarrow = import_runtime("pyarrow", "parquet")
    parquet = import_runtime("pyarrow.parquet", "parquet")
    with contextlib.ExitStack() as stack:
        writer = None
        for columns in rows.iterate():
            table = pyarrow.table({name: _to_list(value) for name, value in columns.items()})
            if writer is None:
                writer = stack.enter_context(parquet.ParquetWriter(path, table.schema))
            writer.write_table(table)


def write_npz(rows: Rows, path: str) -> None:
    """Writes a .npz file. Each column is one array, written part by part."""
    with zipfile.ZipFile(path, "w", allowZip64=True) as archive:
        for name, dtype in rows.dtypes.items():
            row_shape = rows.parts.read(0)[name].shape[1:]
            header = {
                "descr": np.lib.format.dtype_to_descr(dtype),
                "fortran_order": False,
                "shape": (rows.count, *row_shape),
            }
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array_header_1_0(stream, header)
                for columns in rows.iterate():
                    stream.write(columns[name].tobytes())


WRITERS: Mapping[str, Callable[[Rows, str], None]] = {
    ".jsonl": write_json_lines,
    ".csv": write_csv,
    ".parquet": write_parquet,
    ".npz": write_npz,
}


def check_output(output: str) -> None:
    """Raises UsageError when a path ends with the suffix of no writer."""
    if Path(output).suffix not in WRITERS:
        raise UsageError(f"output: {output} ends with none of {', '.join(WRITERS)}")
    if output.endswith(".parquet"):
        import_runtime("pyarrow.parquet", "parquet")


def merge_parts(parts: PredictionParts, count: int, output: str) -> int:
    """Writes the rows of all parts to one file, in order, and removes the parts.

    Args:
      parts: The parts.
      count: Their number.
      output: The path of the file.

    Returns:
      The number of rows.

    Raises:
      StorageError: When the file cannot be written.
    """
    row_count = 0
    dtypes: dict[str, np.dtype[Any]] = {}
    for number in range(count):
        columns = parts.read(number)
        row_count += len(next(iter(columns.values())))
        for name, column in columns.items():
            dtypes[name] = np.promote_types(dtypes.get(name, column.dtype), column.dtype)

    temporary = parts.folder / "merged.tmp"
    try:
        WRITERS[Path(output).suffix](Rows(parts, count, row_count, dtypes), str(temporary))
        with open(temporary, "rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, output)
        parts.remove()
    except OSError as error:
        raise StorageError(f"{output} cannot be written: {error.strerror or error}") from error
    return row_count


def _to_list(column: np.ndarray) -> list[Any]:
    """Returns the values in types of Python. Bytes become text."""
    if column.dtype.kind == "S":
        return [value.decode("utf-8", "replace") for value in column.tolist()]
    return column.tolist()
