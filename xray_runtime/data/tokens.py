"""The tokens of a dataset: made once per tokenizer, stored beside the dataset, mapped into memory.

Their key (`derived`) digests all inputs: the bytes of the pairs, the tokenizer, the encoding code and its libraries.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa
import xxhash

from xray_runtime.data.batch import PairBatch, TextBatch
from xray_runtime.data.dropped import DroppedRows
from xray_runtime.data.pairs import Example, Pairs, PreferenceExample, without_reasoning
from xray_runtime.data.pictures import PictureTokens
from xray_runtime.data.ragged import Ragged
from xray_runtime.data.text_set import DIGEST
from xray_runtime.data.tokenizer import Tokenizer
from xray_runtime.data.tokenizing import encode_prompts, encode_replies_to
from xray_runtime.kernel.store.derived import Derived
from xray_runtime.kernel.store.identity import digest, file_sha256
from xray_runtime.kernel.store.seal import Seal

ENDING = ".arrow"
SHARD_ROWS = 8192
"""Rows per record batch except the last, and rows per call of the tokenizer."""
ENCODING = (
    "chat_format",
    "control_tokens",
    "conversations",
    "pairs",
    "pictures",
    "reasoning",
    "template_text",
    "tokenizing",
    "tokens",
)
CODE = tuple(str(Path(__file__).with_name(f"{module}.py")) for module in ENCODING)
LIBRARIES = ("jinja2", "tokenizers", "transformers")

IDS = pa.large_list(pa.field("item", pa.int32(), nullable=False))
REPLIES: dict[type[Any], tuple[str, ...]] = {Example: ("input_ids",), PreferenceExample: ("input_ids", "rejected_ids")}
"""Type of a pair → the columns of token ids, each with one of its replies after the prompt."""

Read = Literal["replies", "answers", "prompts"]
Report = Callable[[int, int], None]
"""(tokenized pairs, all pairs)."""


class Tokens:
    """Rows of tokens, one per pair of a dataset's file: columns stay on disk, selected rows are read.

    Columns are `input_ids`, `prompt_lengths` [B] and, for preferences, `rejected_ids`.

    Args:
        seal: the run's key; only tokens with its seal are read.
        report: called while they are made.
        read: which part of each reply follows its prompt: all of it, the answer without reasoning, or none.

    Raises:
        ValueError: it is not a file of such pairs, or is damaged, or the chat template refuses a pair.
    """

    def __init__(
        self,
        pairs: Path,
        of: type[Example] | type[PreferenceExample],
        tokenizer: Tokenizer,
        seal: Seal,
        report: Report = lambda done, total: None,
        read: Read = "replies",
    ) -> None:
        form = f"{of.__name__} {read}"
        shards = stored(
            pairs, form, tokenizer, lambda: _encoded(Pairs(pairs, of), REPLIES[of], tokenizer, report, read), seal
        )
        self._pairs: Any = pairs, of
        self._ids = {name: [TokenColumn(shard.column(name)) for shard in shards] for name in REPLIES[of]}
        self._digests = [shard.column("prompt_digests") for shard in shards]
        self.prompt_lengths = joined([shard.column("prompt_lengths").to_numpy() for shard in shards], np.int64)
        """[B]"""
        self.lengths = {
            name: joined([np.diff(shard.offsets) for shard in columns], np.int64) for name, columns in self._ids.items()
        }
        """Column → lengths of its rows [B]."""
        self.rows = np.arange(len(self.prompt_lengths))
        """Numbers of the rows in the dataset's file."""
        self._dropped: list[tuple[str, int, int]] = []

    def longest(self) -> np.ndarray:
        """Tokens of each row, of its longest column [B]."""
        most: np.ndarray = np.max(list(self.lengths.values()), axis=0)
        return most

    def together(self) -> np.ndarray:
        """Tokens of each row, whose replies share their prompt [B]."""
        whole: np.ndarray = np.sum(list(self.lengths.values()), axis=0)
        return whole - (len(self.lengths) - 1) * self.prompt_lengths

    def id(self, row: int) -> str:
        """The id of a row's pair."""
        return self._id(int(self.rows[row]))

    def _id(self, number: int) -> str:
        path, of = self._pairs
        return str(Pairs(path, of)[number].id)

    def keep(self, fits: np.ndarray, reason: str | None = None) -> int:
        """Leave only the rows where `fits` is true; returns the number of others, which `list_dropped`
        reports if there is a `reason`."""
        if reason is not None:
            others = zip(self.rows[~fits].tolist(), self.longest()[~fits].tolist(), strict=True)
            self._dropped += [(reason, row, tokens) for row, tokens in others]
        self.rows, self.prompt_lengths = self.rows[fits], self.prompt_lengths[fits]
        self.lengths = {name: lengths[fits] for name, lengths in self.lengths.items()}
        return int((~fits).sum())

    @property
    def num_dropped(self) -> int:
        """Number of rows that `keep` left out for a reason."""
        return len(self._dropped)

    def list_dropped(self, rows: DroppedRows) -> None:
        """Report these rows, by the ids of the dataset's pairs, with their tokens."""
        for reason, row, tokens in self._dropped:
            rows.add(reason, {"id": self._id(row), "tokens": tokens})

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def take(self, rows: Sequence[int] | np.ndarray) -> TextBatch:
        """These rows, in that order; token ids as int64."""
        index = np.asarray(rows, dtype=np.int64)
        positions = list(zip(*(part.tolist() for part in np.divmod(self.rows[index], SHARD_ROWS)), strict=True))
        ids = {
            name: Ragged.of(shards[number].row(position) for number, position in positions)
            for name, shards in self._ids.items()
        }
        kind = PairBatch if "rejected_ids" in ids else TextBatch
        return kind.of_columns({**ids, "prompt_lengths": self.prompt_lengths[index]})

    def prompt(self, row: int) -> list[int]:
        """The token ids of a row's prompt."""
        number, position = divmod(int(self.rows[row]), SHARD_ROWS)
        ids: list[int] = self._ids["input_ids"][number].row(position)[: self.prompt_lengths[row]].tolist()
        return ids

    def different_prompts(self, max_prompt: int) -> np.ndarray:
        """The first row of each distinct prompt with at most `max_prompt` tokens."""
        rows = np.flatnonzero(self.prompt_lengths <= max_prompt)
        digests = joined([np.frombuffer(d.buffers()[1], DIGEST, len(d)) for d in self._digests], DIGEST)
        digests = digests[self.rows][rows]
        return rows[np.sort(np.unique(digests, return_index=True)[1])]


class TokenColumn:
    """A column of token ids in one record batch, as arrays over the map."""

    def __init__(self, column: pa.Array) -> None:
        self.offsets, self.values = column.offsets.to_numpy(), column.values.to_numpy()

    def row(self, position: int) -> np.ndarray:
        tokens: np.ndarray = self.values[self.offsets[position] : self.offsets[position + 1]]
        return tokens


def joined(parts: list[np.ndarray], dtype: Any) -> np.ndarray:
    array: np.ndarray = np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
    return array


def stored(
    pairs: Path, form: str, tokenizer: Tokenizer, make: Callable[[], Iterator[pa.RecordBatch]], seal: Seal
) -> list[pa.RecordBatch]:
    """The mapped record batches of a dataset's file for a tokenizer; they are made if missing.

    Args:
        form: name of the form that `make` yields; the digest of `CODE` covers the rest.
        make: yields at least one batch.
    """

    def write(path: Path) -> None:
        batches = make()
        first = next(batches)
        with pa.ipc.new_file(str(path), first.schema) as file:
            for batch in chain([first], batches):
                file.write_batch(batch)

    path = Derived(pairs.parent, seal).make(f"{_key(pairs, form, tokenizer)}{ENDING}", write)
    file = pa.ipc.open_file(pa.memory_map(str(path)))
    return [file.get_batch(number) for number in range(file.num_record_batches)]


def _key(pairs: Path, form: str, tokenizer: Tokenizer) -> str:
    """A digest of all inputs of the tokens."""
    with tempfile.TemporaryDirectory() as directory:
        # Saved again, so that the digest does not depend on the checkpoint that it was read from.
        tokenizer.save_pretrained(directory)
        files = {path.name: file_sha256(path) for path in sorted(Path(directory).rglob("*")) if path.is_file()}
    code = [file_sha256(Path(file)) for file in CODE]
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    pictures = PictureTokens.of(tokenizer)
    rule = [] if pictures is None else [pictures.rule]
    return digest([file_sha256(pairs), form, files, code, versions, *rule])[:32]


def _encoded(
    pairs: Pairs[Any], names: tuple[str, ...], tokenizer: Tokenizer, report: Report, read: Read
) -> Iterator[pa.RecordBatch]:
    schema = pa.schema(
        [pa.field(name, IDS, nullable=False) for name in names]
        + [pa.field("prompt_lengths", pa.int32(), nullable=False)]
        + [pa.field("prompt_digests", pa.binary(DIGEST.itemsize), nullable=False)]
    )
    done = 0
    for part in in_shards(pairs):
        report(done, len(pairs))
        encoded = by_pair(part, lambda pair: pair.id, lambda some: _in_tokens(some, tokenizer, read))
        prompts = [prompt for prompt, _ in encoded]
        columns: dict[str, list[Any]] = {
            name: [prompt + replies[number] for prompt, replies in encoded] for number, name in enumerate(names)
        }
        columns["prompt_lengths"] = list(map(len, prompts))
        columns["prompt_digests"] = [xxhash.xxh3_128_digest(np.array(ids, np.int32).tobytes()) for ids in prompts]
        yield pa.RecordBatch.from_pydict(columns, schema=schema)
        done += len(part)
    report(done, len(pairs))


def _in_tokens(
    pairs: Sequence[Example | PreferenceExample], tokenizer: Tokenizer, read: Read
) -> list[tuple[list[int], list[list[int]]]]:
    """(prompt, each reply behind it) of each pair."""
    prompts = encode_prompts(tokenizer, [pair.prompt for pair in pairs])
    if read == "prompts":
        return [(prompt, [[] for _ in REPLIES[type(pair)]]) for prompt, pair in zip(prompts, pairs, strict=True)]
    messages: list[Sequence[dict[str, Any]]] = [
        [pair.reply] if isinstance(pair, Example) else pair.replies for pair in pairs
    ]
    if read == "answers":
        messages = [[without_reasoning(reply) for reply in own] for own in messages]
    given = [(pair.prompt, reply) for pair, own in zip(pairs, messages, strict=True) for reply in own]
    replies = iter(encode_replies_to(tokenizer, given))
    return [(prompt, [next(replies) for _ in own]) for prompt, own in zip(prompts, messages, strict=True)]


T = TypeVar("T")
U = TypeVar("U")


def in_shards(rows: Iterable[T]) -> Iterator[list[T]]:
    """Lists of `SHARD_ROWS` rows, the last one shorter; one empty list if there are no rows."""
    walk = iter(rows)
    part = list(islice(walk, SHARD_ROWS))
    yield part
    while part := list(islice(walk, SHARD_ROWS)):
        yield part


def by_pair(rows: Sequence[T], name: Callable[[T], str], encode: Callable[[Sequence[T]], list[U]]) -> list[U]:
    """`encode(rows)`. Raises its ValueError with the name of the first row that it refuses."""
    try:
        return encode(rows)
    except ValueError:
        for row in rows:
            try:
                encode([row])
            except ValueError as error:
                raise ValueError(f"row {name(row)}: {error}") from error
        raise
