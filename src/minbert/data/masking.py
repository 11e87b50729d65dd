"""Masked-language modelling: which tokens of a text are hidden, and by what (Devlin et al. 2019, arXiv:1810.04805).

    masking = Masking.of(task, tokenizer, seed=1, place=0)
    ids, chosen = masking.hide(tokens.ids, masking.generator(number=3, rows=rows))

Of the tokens that stand for text, `mask_rate` are chosen; of those 80% become the mask, 10% some other token, 10% stay.
The rate is that of a whole batch, exactly, so that batches of as many tokens have as many to guess; Devlin et al. count
text by text. A random token is never a special one. Everything follows from the seed, the number of the pass and the
rows: other masks in each pass, and the same ones when a run is resumed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minbert.data.tokenizer import Tokenizer
from minbert.tasks import Task

MASKS, FIXED = 20, 21  # what a generator is for: masks of a training pass, or those that scores are of
MASKED, RANDOM = 0.8, 0.1  # of the chosen tokens; the rest stays as it is


@dataclass(frozen=True, eq=False)
class Masking:
    """How a task hides tokens."""

    rate: float
    whole_words: bool
    mask_id: int
    special: NDArray[np.bool_]
    """(vocabulary,) Which ids stand for no text; they are never chosen."""
    continues: NDArray[np.bool_]
    """(vocabulary,) Which go on with the word of the token before."""
    seed: int
    place: int
    """Of the task among those of its recipe."""

    @classmethod
    def of(cls, task: Task, tokenizer: Tokenizer, *, seed: int, place: int) -> Masking:
        special, continues = tokenizer.pieces()
        return cls(task.mask_rate, task.whole_words, tokenizer.mask_id, special, continues, seed, place)

    def generator(self, number: int, rows: NDArray[np.integer]) -> np.random.Generator:
        """For the rows of a batch in this pass over the task."""
        digest = hashlib.blake2b(rows.astype("<i8").tobytes(), digest_size=16).digest()  # rows by themselves take long
        return np.random.default_rng([self.seed, MASKS, self.place, number, *np.frombuffer(digest, "<u4").tolist()])

    def fixed(self) -> np.random.Generator:
        """For scores, the same in all runs: two models are asked to guess the same tokens, whatever their seeds."""
        return np.random.default_rng([FIXED])

    def hide(self, ids: NDArray[np.int32], rng: np.random.Generator) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """The ids of whole sequences, end to end, with some of them hidden, and the places of those, in order."""
        chosen = self.choose(ids, rng)
        fate = rng.random(len(chosen))
        hidden = ids.copy()
        hidden[chosen[fate < MASKED]] = self.mask_id
        replaced = chosen[fate >= 1 - RANDOM]
        hidden[replaced] = rng.choice(np.flatnonzero(~self.special), len(replaced))
        return hidden, chosen

    def choose(self, ids: NDArray[np.int32], rng: np.random.Generator) -> NDArray[np.int64]:
        """The places to guess: so many that one more (for whole words, the next one) would be above the rate; one at
        least, where there is any.
        """
        text = ~self.special[ids]
        places = np.flatnonzero(text)
        if not len(places):
            return places
        after_text = np.append(False, text[:-1])
        begins = ~(self.continues[ids] & after_text)[places] if self.whole_words else np.ones(len(places), bool)
        word = np.cumsum(begins) - 1  # of each place
        sizes = np.bincount(word)
        order = rng.permutation(len(sizes))
        wanted = round(self.rate * len(places))
        count = np.searchsorted(np.cumsum(sizes[order]), wanted, side="right")
        taken = np.zeros(len(sizes), bool)
        taken[order[: max(1, count)]] = True
        return places[taken[word]]
