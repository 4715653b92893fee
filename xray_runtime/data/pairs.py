"""The two record types of X-ray's datasets, and their files, which may be larger than memory.

A prompt is a list of messages, `{"role": "system" | "user" | "assistant" | "tool", "content": str}`, and ends with one
of the user or a tool. Assistant messages may have `tool_calls` and `reasoning_content`, tool messages `name` and
`tool_call_id`; the first message of a prompt may have `tools`, the JSON schemas of the available tools. A user's
message may have `pictures` (`data.pictures`). Texts are never changed.

A file is an uncompressed Arrow IPC file (Feather): `pandas.read_feather(path)` shows it, and so does
`datasets.load_dataset("arrow", data_files=path)`. Its record batches have `BATCH_ROWS` rows each, except the last,
so that row i is found without an index. Equal data give equal bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from xray_runtime.data.pictures import shown_text
from xray_runtime.data.reasoning import KEY, split_reasoning, with_reasoning

Messages = list[dict[str, Any]]

TRAIN, HELDOUT = "train.arrow", "heldout.arrow"
"""The two sides of a dataset."""
VALIDATION = "validation.arrow"
"""An optional third side, to choose checkpoints; no training or reported result uses it."""

BATCH_ROWS = 256


class Example(NamedTuple):
    """A prompt and a human reply, or a prompt alone."""

    id: str
    conversation: str
    prompt: Messages
    response: str
    """Empty without `tool_calls` and `reasoning_content`: the row is a prompt without a reply."""
    tool_calls: list[dict[str, Any]] | None = None
    """Tool calls of the reply."""
    columns: str = "{}"
    """Further columns of its record, as a JSON object, for rewards."""
    reasoning_content: str | None = None
    """The assistant's reasoning before the reply."""

    @property
    def has_reply(self) -> bool:
        """Whether there is a reply to learn from."""
        return bool(self.response or self.tool_calls or self.reasoning_content)

    @property
    def reply(self) -> dict[str, Any]:
        """The reply as a message."""
        return reply_message(self.response, self.tool_calls, self.reasoning_content)

    @property
    def text(self) -> str:
        """The whole reply for display, with its reasoning, and with calls as JSON."""
        return message_text(self.response, self.tool_calls, self.reasoning_content)


class PreferenceExample(NamedTuple):
    """A prompt and two replies, one preferred."""

    id: str
    prompt: Messages
    chosen: str
    rejected: str
    chosen_tool_calls: list[dict[str, Any]] | None = None
    """Tool calls of the chosen reply."""
    rejected_tool_calls: list[dict[str, Any]] | None = None
    chosen_reasoning_content: str | None = None
    rejected_reasoning_content: str | None = None

    @property
    def replies(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The chosen and the rejected reply as messages."""
        return (
            reply_message(self.chosen, self.chosen_tool_calls, self.chosen_reasoning_content),
            reply_message(self.rejected, self.rejected_tool_calls, self.rejected_reasoning_content),
        )

    @property
    def texts(self) -> tuple[str, str]:
        """The chosen and the rejected reply for display, with reasoning, and with calls as JSON."""
        return (
            message_text(self.chosen, self.chosen_tool_calls, self.chosen_reasoning_content),
            message_text(self.rejected, self.rejected_tool_calls, self.rejected_reasoning_content),
        )

    @property
    def record(self) -> dict[str, Any]:
        """The pair as a record of users' data."""
        prompt = [{key: value for key, value in message.items() if key != "tools"} for message in self.prompt]
        chosen, rejected = self.replies
        tools = self.prompt[0].get("tools") if self.prompt else None
        return {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]} | ({"tools": tools} if tools else {})


P = TypeVar("P", Example, PreferenceExample)

# 64-bit offsets, so that texts of any length fit a batch.
TEXT = pa.large_string()
REQUIRED = ("role", "content")
PARTS = (*REQUIRED, "name", "tool_call_id", "reasoning_content", "tool_calls", "tools", "pictures")
MESSAGE = pa.struct([pa.field(part, TEXT, nullable=part not in REQUIRED) for part in PARTS])
AS_JSON = ("tool_calls", "tools", "pictures", "chosen_tool_calls", "rejected_tool_calls")
"""Fields without a fixed schema, stored as JSON."""
OPTIONAL = (*AS_JSON, "reasoning_content", "chosen_reasoning_content", "rejected_reasoning_content")
PROMPT = pa.large_list(pa.field("item", MESSAGE, nullable=False))
SCHEMAS = {
    of: pa.schema(
        [pa.field(name, PROMPT if name == "prompt" else TEXT, nullable=name in OPTIONAL) for name in of._fields]
    )
    for of in (Example, PreferenceExample)
}


class PairsWriter(AbstractContextManager["PairsWriter[P]"], Generic[P]):
    """Writes a file of pairs with at most one batch in memory. Use it in a `with` block."""

    def __init__(self, path: Path, of: type[P]) -> None:
        self.count = 0
        self._schema = SCHEMAS[of]
        self._waiting: list[P] = []
        self._file = pa.ipc.new_file(str(path), self._schema)

    def append(self, pair: P) -> None:
        self._waiting.append(pair)
        self.count += 1
        if len(self._waiting) == BATCH_ROWS:
            self._write()

    def _write(self) -> None:
        columns = [self._column(name) for name in self._schema.names]
        self._file.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        self._waiting = []

    def _column(self, name: str) -> pa.Array:
        values: list[Any] = [getattr(pair, name) for pair in self._waiting]
        if name != "prompt":
            return pa.array(_written(name, values), TEXT)
        messages = [message for prompt in values for message in prompt]
        parts = [pa.array(_written(part, [m.get(part) for m in messages]), TEXT) for part in MESSAGE.names]
        offsets = np.cumsum([0, *map(len, values)], dtype=np.int64)
        return pa.LargeListArray.from_arrays(offsets, pa.StructArray.from_arrays(parts, fields=list(MESSAGE)), PROMPT)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None and self._waiting:
            self._write()
        self._file.close()


def write_pairs(path: Path, of: type[P], pairs: Iterable[P]) -> int:
    """Write a file of pairs; returns their number."""
    with PairsWriter(path, of) as writer:
        for pair in pairs:
            writer.append(pair)
    return writer.count


class Pairs(Sequence[P]):
    """The pairs of a file, read on demand with one batch in memory.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not a file of such pairs, or is damaged; also later, when reading reaches the damage.
    """

    def __init__(self, path: Path, of: type[P]) -> None:
        self._path = path
        self._of: type[P] = of
        # Plain reads instead of a memory map, so that the process's memory stays small.
        source = pa.OSFile(str(path))
        try:
            self._file = pa.ipc.open_file(source)
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(str(error)) from error
        if self._file.schema != SCHEMAS[of]:
            raise self._damaged(f"its columns are {', '.join(self._file.schema.names)}")
        self._num_batches = self._file.num_record_batches
        rest = self._read(self._num_batches - 1).num_rows if self._num_batches else 0
        self._len = BATCH_ROWS * (self._num_batches - 1) + rest if self._num_batches else 0

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[i] for i in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"{self._path}: there is no row {row}")
        number, offset = divmod(row % len(self), BATCH_ROWS)
        return self._decoded(self._read(number).slice(offset, 1))[0]

    def __iter__(self) -> Iterator[P]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[list[P]]:
        """All pairs in order, `BATCH_ROWS` at a time."""
        for number in range(self._num_batches):
            yield self._decoded(self._read(number))

    def prompt_texts(self) -> Iterator[str]:
        """`prompt_text` of every row, in order."""
        for number in range(self._num_batches):
            for prompt in self._read(number).column("prompt").to_pylist():
                yield prompt_text(list(map(_read_back, prompt)))

    def _read(self, number: int) -> pa.RecordBatch:
        try:
            batch = self._file.get_batch(number)
            # The file is not trusted: offsets out of bounds would read beyond its end.
            batch.validate(full=True)
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise self._damaged(str(error)) from error
        if not 0 < batch.num_rows <= BATCH_ROWS or (batch.num_rows < BATCH_ROWS and number < self._num_batches - 1):
            raise self._damaged(f"batch {number} has {batch.num_rows} rows")
        return batch

    def _decoded(self, batch: pa.RecordBatch) -> list[P]:
        try:
            rows = [_read_back(row) for row in batch.to_pylist()]
            return [self._of(**(row | {"prompt": list(map(_read_back, row["prompt"]))})) for row in rows]
        except (json.JSONDecodeError, RecursionError) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, reason: str) -> ValueError:
        return ValueError(f"{self._path}: not a file of {self._of.__name__}s, or damaged ({' '.join(reason.split())})")


def pairs_of(path: Path) -> Pairs[Example] | Pairs[PreferenceExample]:
    """The pairs of a file of either type. Raises ValueError as `Pairs`."""
    try:
        return Pairs(path, Example)
    except ValueError:
        return Pairs(path, PreferenceExample)


def _written(name: str, values: list[Any]) -> list[Any]:
    if name not in AS_JSON:
        return values
    return [None if value is None else _json(value) for value in values]


def _read_back(row: dict[str, Any]) -> dict[str, Any]:
    """A message or a row without its nulls."""
    return {name: json.loads(value) if name in AS_JSON else value for name, value in row.items() if value is not None}


def _json(value: Any) -> str:
    """JSON text. orjson would refuse integers above 2^64, and read them as floats."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def reply_message(
    text: str, tool_calls: list[dict[str, Any]] | None = None, reasoning: str | None = None
) -> dict[str, Any]:
    """An assistant's message in X-ray's form."""
    more = {"tool_calls": tool_calls, KEY: reasoning}
    return {"role": "assistant", "content": text} | {name: value for name, value in more.items() if value}


def without_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """An assistant's message without its reasoning, also where that is a block in its text."""
    return {k: v for k, v in message.items() if k != KEY} | {"content": split_reasoning(message["content"])[1]}


def message_text(content: str, tool_calls: list[dict[str, Any]] | None = None, reasoning: str | None = None) -> str:
    """A message's text, with its reasoning, and with calls as JSON."""
    answer = [content] if content or not tool_calls else []
    calls = [_json(tool_calls)] if tool_calls else []
    return with_reasoning(reasoning, "\n".join([*answer, *calls]))


def prompt_text(prompt: Messages) -> str:
    """A prompt's text without roles: for display, and as the key that identifies equal prompts."""
    return "\n".join(message_text(shown_text(message), message.get("tool_calls")) for message in prompt)
