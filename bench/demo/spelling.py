"""Which tokens may follow so that a text has no word beside those of a vocabulary."""

import re
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from bench.demo.tokenizer import END_OF_TEXT, IM_END, SPECIAL_TOKENS


class Speller:
    """Numbers the beginnings of words that it meets; each has the set of tokens that may follow it.

    Words are those of ``corpus.words_of``: runs of letters, without case.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: set[str]) -> None:
        self.words = sorted(vocabulary)
        beginnings = {word[:size] for word in vocabulary for size in range(len(word) + 1)}
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in range(tokenizer.get_vocab_size())]
        for token in (END_OF_TEXT, IM_END):
            texts[token] = " "  # an end ends a word
        pieces = [re.split(r"[^a-z]+", text.lower()) for text in texts]
        self.first = [piece[0] for piece in pieces]
        self.last = [piece[-1] if len(piece) > 1 else None for piece in pieces]
        self.heads = {head: at for at, head in enumerate(sorted(set(self.first)))}
        self.head_of = np.array([self.heads[head] for head in self.first])
        self.breaks = np.array([last is not None for last in self.last])
        self.fits = np.array(
            [
                text not in SPECIAL_TOKENS
                and all(word in vocabulary for word in piece[1:-1])
                and (len(piece) == 1 or piece[-1] in beginnings)
                for text, piece in zip(texts, pieces, strict=True)
            ]
        )
        self.numbers: dict[str, int] = {}
        self.masks: list[np.ndarray] = []

    def number(self, begun: str) -> int:
        """The row in ``masks`` of the beginning of a word, "" between words."""
        if begun not in self.numbers:
            self.numbers[begun] = len(self.masks)
            self.masks.append(self._allowed(begun))
        return self.numbers[begun]

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The row in ``masks`` for each token up to the first one that leaves the vocabulary."""
        begun, rows = "", []
        for token in tokens:
            rows.append(self.number(begun))
            if not self.masks[rows[-1]][token]:
                break
            last = self.last[token]
            begun = begun + self.first[token] if last is None else last
        return rows

    def _allowed(self, begun: str) -> np.ndarray:
        goes_on, whole = np.zeros((2, len(self.heads)), dtype=bool)
        goes_on[self.heads[""]] = whole[self.heads[""]] = not begun
        for word in self.words[
            bisect_left(self.words, begun) : bisect_left(self.words, begun + "{")
        ]:  # "{" follows "z"
            rest = word[len(begun) :]
            for size in range(1, len(rest) + 1):
                if (head := self.heads.get(rest[:size])) is not None:
                    goes_on[head] = True
            if (head := self.heads.get(rest)) is not None:
                whole[head] = True
        return np.where(self.breaks, whole[self.head_of], goes_on[self.head_of]) & self.fits
