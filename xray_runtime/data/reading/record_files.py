"""Records of .jsonl, .json and .parquet files, the first two also compressed (.gz, .zst)."""

from __future__ import annotations

import codecs
import gzip
import io
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from xray_runtime.data.reading.json_values import DECODER, arrow_records, canonical_record, parse_json

Record = dict[str, Any]
COMPRESSIONS = (".gz", ".zst")
FORMATS = (".jsonl", ".json", ".parquet")
NAMED = ".jsonl, .json or .parquet file (.jsonl and .json also with .gz or .zst)"
"""The files that are read, for messages."""
READ_ROWS = 1000
SPACE = " \t\r\n"


class Where(NamedTuple):
    """The position of a record: its source and its line or row there from 1, for messages; and its number from 1 among
    all records, which is the same in every container."""

    source: str
    unit: str
    number: int
    row: int

    def __str__(self) -> str:
        return f"{self.source} {self.unit} {self.number}"


Records = Iterator[tuple[Where, Record]]


def file_format(path: Path) -> str | None:
    """One of `FORMATS`; None if the name ends otherwise."""
    compressed = path.suffix in COMPRESSIONS
    suffix = path.with_suffix("").suffix if compressed else path.suffix
    return suffix if suffix in FORMATS and not (compressed and suffix == ".parquet") else None


def file_records(field: str, path: Path) -> tuple[int, Records]:
    """(number of records, the records) of one file.

    A damaged compressed file is found before its first record is read; a damaged line when it is reached.

    Raises:
        ValueError: one line that names `field`, the file and the line or row.
    """
    try:
        if not path.is_file():
            raise ValueError(f"{field}: {str(path)!r} is not a file")
        if file_format(path) == ".parquet":
            file = pq.ParquetFile(path)
            return file.metadata.num_rows, table_records(field, str(path), file.iter_batches(READ_ROWS))
        if file_format(path) == ".json":
            with _open(path) as begin:
                is_array = begin.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
            if is_array:
                records = list(_array_records(field, path))
                return len(records), iter(records)
        with _open(path) as lines:
            total = sum(not line.isspace() for line in lines)
    # Arrow and gzip have exceptions of their own.
    except (OSError, EOFError, pa.ArrowException) as error:
        raise ValueError(f"{field}: {str(path)!r} cannot be read ({' '.join(str(error).split())})") from error
    return total, _line_records(field, path)


def all_records(field: str, paths: Iterable[Path]) -> tuple[int, Records]:
    """`file_records` of several files, one after the other."""
    read = [file_records(field, path) for path in paths]
    rows = chain.from_iterable(records for _, records in read)
    numbered = ((where._replace(row=n), record) for n, (where, record) in enumerate(rows, start=1))
    return sum(total for total, _ in read), numbered


def table_records(
    field: str, source: str, tables: Iterable[pa.Table | pa.RecordBatch], is_from_json: bool = False
) -> Records:
    """The rows of Arrow tables. `is_from_json`: as in `arrow_records`."""
    number = 0
    try:
        for record in chain.from_iterable(arrow_records(table, is_from_json) for table in tables):
            number += 1
            yield Where(source, "row", number, number), record
    except (ValueError, KeyError, OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{field}: {Where(source, 'row', number + 1, 0)}: cannot be read ({reason})") from error


def _open(path: Path) -> io.BufferedIOBase:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _line_records(field: str, path: Path) -> Records:
    row = 0
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.isspace() or line == codecs.BOM_UTF8:
                continue
            row += 1
            where = Where(str(path), "line", number, row)
            try:
                record = parse_json(line.removeprefix(codecs.BOM_UTF8) if number == 1 else line)
            except ValueError as error:
                raise ValueError(f"{field}: {where}: {error}{_hint(path)}") from error
            yield where, _checked(field, where, record)


def _hint(path: Path) -> str:
    if file_format(path) != ".json":
        return ""
    return "; a .json file must be a list of records, or have one record in each line"


def _array_records(field: str, path: Path) -> Records:
    """The elements of a JSON array, parsed one by one, so that errors name them."""
    row = 0
    with _open(path) as file:
        try:
            text = file.read().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{field}: {str(path)!r} cannot be read (not UTF-8 text: {error})") from error
    index, more = _after(text, text.index("[") + 1), True
    if text[index : index + 1] == "]":
        index, more = index + 1, False
    while more:
        row += 1
        where = Where(str(path), "row", row, row)
        try:
            record, index = DECODER.raw_decode(text, index)
            index = _after(text, index)
            more = text[index : index + 1] == ","
            if not more and text[index : index + 1] != "]":
                raise ValueError("not JSON (a comma or ']' is expected after it)")
        except json.JSONDecodeError as error:
            raise ValueError(f"{field}: {where}: cannot be read: not JSON ({error.msg})") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{field}: {where}: cannot be read: {error}") from error
        index = _after(text, index + 1)
        yield where, _checked(field, where, record)
    if text[index:].strip(SPACE):
        raise ValueError(f"{field}: {str(path)!r} cannot be read (text after the list of records)")


def _after(text: str, index: int) -> int:
    """The first place from `index` on that is no white space."""
    while text[index : index + 1] and text[index] in SPACE:
        index += 1
    return index


def _checked(field: str, where: Where, record: Any) -> Record:
    if not isinstance(record, dict):
        raise ValueError(f"{field}: {where}: {type(record).__name__} found, an object is expected")
    return canonical_record(record)
