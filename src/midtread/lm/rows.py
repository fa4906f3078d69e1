"""Rows: what a model is fed, T tokens at a time.

A row is a window of tokens of documents strung together. Every token knows its document
(`segments`, from 1 in each row; 0 is padding) and its place in the row's part of it
(`positions`), and `mask` says which targets count: those of the same document.

    tokens      a b | c d e      |: a document ends, with its end mark
    inputs      a b c d
    targets     b c d e
    segments    1 1 2 2
    positions   0 1 0 1
    mask        1 0 1 1
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

HELD_OUT = 20  # the last of every so many documents is held out, to judge a run by
Batch = dict[str, np.ndarray]  # inputs, targets, positions, segments, mask: [B, T]


def row(tokens: np.ndarray, positions, segments, length: int) -> Batch:
    """Returns a row of up to `length` + 1 tokens, padded."""
    inside = (segments[1:] == segments[:-1]) & (segments[1:] > 0)
    pad = lambda a: np.pad(a, (0, length - len(a))).astype(np.int32)
    return {
        "inputs": pad(tokens[:-1]),
        "targets": pad(tokens[1:]),
        "positions": pad(positions[:-1]),
        "segments": pad(segments[:-1]),
        "mask": pad(inside),
    }


def stack(rows: Sequence[Batch]) -> Batch:
    """Returns rows as one batch."""
    return {k: np.stack([r[k] for r in rows]) for k in rows[0]}


class Rows:
    """Rows of one split, by number: a source for grain, or for anyone."""

    def __init__(
        self, tokens: np.ndarray, starts: np.ndarray, length: int, packed: bool
    ):
        """Takes the `tokens` of all documents, which begin at `starts`."""
        self.tokens, self.starts, self.length = tokens, starts, length
        if packed:
            first = np.arange(max((len(tokens) - 1) // length, 0)) * length
            self.spans = np.stack([first, first + length + 1], 1)
        else:
            ends = np.append(starts[1:], len(tokens))
            cuts = [np.arange(a, b - 1, length) for a, b in zip(starts, ends)]
            spans = [
                np.stack([c, np.minimum(c + length + 1, b)], 1)
                for c, b in zip(cuts, ends)
            ]
            self.spans = np.concatenate(spans) if spans else np.zeros((0, 2), int)

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, number: Any) -> Batch:
        start, stop = self.spans[int(number)]
        numbers = np.arange(start, stop)
        document = np.searchsorted(self.starts, numbers, side="right") - 1
        positions = numbers - np.maximum(self.starts[document], start)
        segments = document - document[0] + 1
        tokens = self.tokens[start:stop]
        return row(tokens, positions, segments, self.length)
