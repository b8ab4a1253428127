"""Documents as token rows of one length: whole documents, several to a row, and what of them is learned."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer

from bench.demo.model import Packing
from bench.demo.tokenizer import END_OF_TEXT, IM_END, IM_START, SPECIAL_TOKENS

ROW = 2048


@dataclass
class Rows:
    """tokens [R, ROW + 1]; places count from 0 in every document; learned marks tokens that are targets."""

    tokens: torch.Tensor
    places: torch.Tensor
    learned: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: str) -> "Rows":
        return Rows(self.tokens.to(device), self.places.to(device), self.learned.to(device))

    def batch(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Packing]:
        """Inputs, targets (-100 where nothing is learned) and the packing of the inputs."""
        tokens = self.tokens[rows].long()
        targets = tokens[:, 1:].where(self.learned[rows, 1:], -100)
        return tokens[:, :-1], targets, Packing(self.places[rows, :-1].long())


def entries_as_text(entries: Sequence[str]) -> list[str]:
    """A plain document stands between two end-of-text tokens."""
    return [f"{SPECIAL_TOKENS[END_OF_TEXT]}{text}{SPECIAL_TOKENS[END_OF_TEXT]}" for text in entries]


def pack(tokenizer: Tokenizer, texts: Sequence[str]) -> Rows:
    """Rows of the documents in their order; one that is longer than a row is cut."""
    documents = [
        np.asarray(ids[:ROW], dtype=np.int16)
        for at in range(0, len(texts), 50_000)
        for ids in (encoding.ids for encoding in tokenizer.encode_batch_fast(list(texts[at : at + 50_000])))
    ]
    starts, used, rows = [], 0, 0
    for document in documents:
        if used + len(document) > ROW + 1:
            rows, used = rows + 1, 0
        starts.append(rows * (ROW + 1) + used)
        used += len(document)
    size = (rows + 1) * (ROW + 1)
    tokens = np.full(size, END_OF_TEXT, dtype=np.int16)
    learned = np.zeros(size, dtype=bool)
    begin = np.zeros(size, dtype=np.int64)
    flat = np.concatenate(documents)
    lengths = np.array([len(document) for document in documents])
    places = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    where = np.repeat(np.array(starts), lengths) + places
    tokens[where] = flat
    learned[where] = _learned(tokenizer, flat) & (places > 0)
    begin[where] = np.repeat(np.array(starts), lengths)
    filled = np.zeros(size, dtype=bool)
    filled[where] = True
    index = np.arange(size)
    ends = np.zeros(size, dtype=np.int64)
    first_gap = ~filled & (np.roll(filled, 1) | (index % (ROW + 1) == 0))
    ends[first_gap] = index[first_gap]
    begin = np.where(filled, begin, np.maximum.accumulate(ends))
    shape = (rows + 1, ROW + 1)
    return Rows(
        torch.from_numpy(tokens.reshape(shape)),
        torch.from_numpy((index - begin).astype(np.int16).reshape(shape)),
        torch.from_numpy(learned.reshape(shape)),
    )


def _learned(tokenizer: Tokenizer, flat: np.ndarray) -> np.ndarray:
    """Everything of plain documents; of conversations the model's own turns with their end."""
    index = np.arange(len(flat))
    mark = np.isin(flat, (IM_START, END_OF_TEXT))
    last = np.maximum.accumulate(np.where(mark, index, 0))
    role = flat[np.minimum(last + 1, len(flat) - 1)]
    assistant, user, system = (tokenizer.encode(name).ids[0] for name in ("assistant", "user", "system"))
    assert assistant not in (user, system)
    ended = np.maximum.accumulate(np.where(flat == IM_END, index, 0))
    in_turn = (flat[last] == IM_START) & (role == assistant) & (last < index) & ((ended <= last) | (ended == index))
    plain = (flat[last] == END_OF_TEXT) & ~(flat == IM_START)
    return in_turn | plain
