"""Text to token ids: the WordPiece that BERT and MPNet were trained with, and a count of every token cut away."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import tokenizers
from tokenizers import AddedToken, Encoding, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece

from minbert.errors import MinbertError, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

CHUNK = 4096  # texts handed to the library at once: its encodings take some 150 bytes for each token
POSITIONS = 512  # of every published BERT, for a folder in which no file says it


@dataclass(frozen=True)
class Truncation:
    """What did not fit: how many texts were cut (a pair counts as one) and how many tokens that lost."""

    texts: int = 0
    tokens: int = 0

    def __add__(self, other: Truncation) -> Truncation:
        return Truncation(self.texts + other.texts, self.tokens + other.tokens)

    def __str__(self) -> str:
        return f"texts truncated: {self.texts:,}, tokens lost: {self.tokens:,}"


@dataclass(frozen=True, eq=False)
class Tokens:
    """Token sequences of different lengths, laid end to end; padding is for whoever makes the batches."""

    ids: NDArray[np.int32]  # (tokens,)
    segments: NDArray[np.uint8]  # (tokens,) 1 for the second text of a pair; always 0 for MPNet, which has no segments
    offsets: NDArray[np.int64]  # (sequences + 1,) sequence i is ids[offsets[i]:offsets[i + 1]]
    truncation: Truncation = Truncation()
    weights: NDArray[np.float32] | None = None  # (tokens,) for pooling "weighted": of each token's part of speech

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)

    def lengths_at(self, rows: NDArray[np.integer]) -> NDArray[np.int64]:
        """Of some sequences only: a step takes a few out of very many."""
        return self.offsets[rows + 1] - self.offsets[rows]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.uint8]]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: SupportsIndex) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        row = range(len(self))[index]  # from the end when negative; an IndexError when there is none
        span = slice(self.offsets[row], self.offsets[row + 1])
        return self.ids[span], self.segments[span]

    def take(self, rows: Sequence[int] | NDArray[Any]) -> Tokens:
        """The sequences at ``rows`` (indices or a mask), in that order; ``truncation`` stays that of the whole set."""
        chosen = np.arange(len(self))[np.asarray(rows) if len(rows) else slice(0)]
        lengths = self.lengths_at(chosen)
        source = np.repeat(self.offsets[chosen], lengths) + ranges(lengths)
        weights = None if self.weights is None else self.weights[source]
        return Tokens(self.ids[source], self.segments[source], _offsets(lengths), self.truncation, weights)

    @classmethod
    def join(cls, parts: Iterable[Tokens]) -> Tokens:
        """All sequences of ``parts``, one part after the other."""
        found = list(parts)
        weights = [part.weights for part in found if part.weights is not None]
        parts = [Tokens(np.empty(0, np.int32), np.empty(0, np.uint8), np.zeros(1, np.int64)), *found]
        return cls(
            np.concatenate([part.ids for part in parts]),
            np.concatenate([part.segments for part in parts]),
            _offsets(np.concatenate([part.lengths for part in parts])),
            sum((part.truncation for part in parts), Truncation()),
            np.concatenate(weights) if weights and len(weights) == len(found) else None,
        )


# How a family of encoders writes the five tokens that stand for no text.
BERT = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
MPNET = {"pad": "<pad>", "unk": "[UNK]", "cls": "<s>", "sep": "</s>", "mask": "<mask>"}


class Tokenizer:
    """Turns texts, or pairs of texts, into :class:`Tokens`.

    Nothing changes after construction, so one object serves any number of threads; it can be pickled and copied.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, special: dict[str, str], *, positions: int, max_tokens: int | None = None
    ) -> None:
        self._backend = backend
        self._special = special
        self.positions = positions  # the most tokens that the encoder can take
        self.max_tokens = self._limit(positions if max_tokens is None else max_tokens, paired=False)
        vocabulary = backend.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1  # embedding rows: more than words if a word is listed twice
        self.pad_id, self.cls_id, self.sep_id, self.mask_id = (
            vocabulary[special[role]] for role in ("pad", "cls", "sep", "mask")
        )

    @classmethod
    def load(cls, folder: Path, *, max_tokens: int | None = None) -> Tokenizer:
        """Read tokenizer.json, or else vocab.txt; config.json beside it says how many positions the encoder has."""
        file = next((folder / name for name in ("tokenizer.json", "vocab.txt") if (folder / name).is_file()), None)
        if file is None:
            found = "no tokenizer.json and no vocab.txt" if folder.is_dir() else "not a folder"
            raise MinbertError(f"{shown(folder)}: {found}; expected a folder with one of tokenizer.json and vocab.txt")
        config, settings = _read_json(folder / "config.json"), _read_json(folder / "tokenizer_config.json")
        try:
            backend = (
                tokenizers.Tokenizer.from_buffer(file.read_bytes())
                if file.name == "tokenizer.json"
                else tokenizers.Tokenizer(WordPiece.from_file(str(file)))
            )
        except Exception as error:  # the library raises no narrower class
            raise MinbertError(f"{shown(file)}: {error}; expected a tokenizer that can be read") from error
        backend.no_padding()
        backend.no_truncation()

        vocabulary = backend.get_vocab()
        mpnet = config.get("model_type", "mpnet" if "<s>" in vocabulary else "bert") == "mpnet"
        special = _special_tokens(MPNET if mpnet else BERT, settings)
        if missing := [token for token in special.values() if token not in vocabulary]:
            raise MinbertError(f"{shown(file)}: no {' '.join(missing)}; expected all of {' '.join(special.values())}")
        if file.name == "vocab.txt":
            _set_up_wordpiece(backend, special, settings)
        if backend.post_processor is None:
            backend.post_processor = _template(special, vocabulary, mpnet)

        # Without config.json, tokenizer_config.json may know; transformers writes 1e30 there for "no idea".
        positions = config.get("max_position_embeddings", min(settings.get("model_max_length") or POSITIONS, POSITIONS))
        if not isinstance(positions, int):
            where = shown(folder / "config.json")
            raise MinbertError(f"{where}: max_position_embeddings is {json.dumps(positions)}; expected a whole number")
        if mpnet and "max_position_embeddings" in config:
            positions -= vocabulary[special["pad"]] + 1  # MPNet counts positions from the one after the padding's id
        return cls(backend, special, positions=positions, max_tokens=max_tokens)

    @property
    def rules(self) -> str:
        """Everything that decides the tokens of a text, but for how many there may be: equal rules, equal tokens."""
        return self._backend.to_str()

    @property
    def mask_token(self) -> str:
        """What stands for a hidden token in a text: [MASK], or MPNet's <mask>."""
        return self._special["mask"]

    def save(self, folder: Path) -> None:
        """Write what :meth:`load` and ``transformers.AutoTokenizer`` read."""
        folder.mkdir(parents=True, exist_ok=True)
        segments = ["token_type_ids"] if any(self._backend.encode("", "").type_ids) else []
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is; BertTokenizer rebuilds it
            "model_input_names": ["input_ids", *segments, "attention_mask"],
            "model_max_length": self.positions,
            **{f"{role}_token": token for role, token in self._special.items()},
        }
        (folder / "tokenizer.json").write_text(self._backend.to_str(pretty=True), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    def encode(
        self,
        texts: Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        max_tokens: int | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> Tokens:
        """Tokens of each text, or of each text with its partner in ``pairs``, cut to ``max_tokens``.

        ``weights`` by part of speech give each token one, which pooling "weighted" needs.
        """
        limit = self._limit(self.max_tokens if max_tokens is None else max_tokens, paired=pairs is not None)
        return Tokens.join(self._encode(columns, limit, weights) for columns in _chunks(texts, pairs))

    def count(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> NDArray[np.int64]:
        """How many tokens :meth:`encode` would give for each row, the special ones included, if it cut nothing."""
        counts = [len(encoding) for columns in _chunks(texts, pairs) for encoding in self._encodings(columns)]
        return np.array(counts, np.int64)

    def words(self, ids: Iterable[int]) -> list[str]:
        """The token that each id stands for."""
        words = []
        for i in map(int, ids):
            word = self._backend.id_to_token(i) if i >= 0 else None
            if word is None:
                raise MinbertError(f"token id is {i}; expected one of the vocabulary, 0 to {self.vocab_size - 1}")
            words.append(word)
        return words

    def pieces(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Of each id: does it stand for no text, and does it go on with the word before it, as "##s" does?"""
        special, continues = np.zeros(self.vocab_size, bool), np.zeros(self.vocab_size, bool)
        for word, number in self._backend.get_vocab().items():
            continues[number] = word.startswith("##") and len(word) > 2
        for word in (*self._special.values(), "<unk>"):
            if (found := self._backend.token_to_id(word)) is not None:
                special[found] = True
        return special, continues

    def _encodings(self, columns: list[list[str]], *, places: bool = False) -> list[Encoding]:
        """With `places`, each token knows where in its text it stands; that takes a little longer."""
        columns = [_encodable(column) for column in columns]
        encode = self._backend.encode_batch if places else self._backend.encode_batch_fast
        return encode(list(zip(*columns, strict=True)) if len(columns) == 2 else columns[0])

    def _encode(self, columns: list[list[str]], limit: int, weights: Mapping[str, float] | None = None) -> Tokens:
        encodings = self._encodings(columns, places=weights is not None)
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        offsets = _offsets(lengths)
        total = int(offsets[-1])
        ids = np.fromiter(chain.from_iterable(encoding.ids for encoding in encodings), np.int32, total)
        segments = np.zeros(total, np.uint8)
        if len(columns) == 2:
            segments[:] = np.fromiter(chain.from_iterable(encoding.type_ids for encoding in encodings), np.uint8, total)
        weighed = None if weights is None else _weigh(encodings, columns, weights)
        long = np.flatnonzero(lengths > limit)
        if len(long) == 0:
            return Tokens(ids, segments, offsets, weights=weighed)
        keep = np.ones(total, bool)
        for row in long:
            keep[offsets[row] : offsets[row + 1]] = _fit(encodings[row], limit)
        kept = np.minimum(lengths, limit)
        cut = Truncation(len(long), int((lengths - kept).sum()))
        weighed = None if weighed is None else weighed[keep]
        return Tokens(ids[keep], segments[keep], _offsets(kept), cut, weighed)

    def _limit(self, max_tokens: int, paired: bool) -> int:
        least = self._backend.num_special_tokens_to_add(paired) + (2 if paired else 1)  # a token of each text
        if not least <= max_tokens <= self.positions:
            what = "pairs" if paired else "texts"
            raise MinbertError(f"max_tokens is {max_tokens}; this encoder takes {least} to {self.positions} for {what}")
        return max_tokens


def _chunks(texts: Sequence[str], pairs: Sequence[str] | None) -> Iterator[list[list[str]]]:
    """One column or two, a chunk of rows at a time."""
    columns = [_strings(texts, "texts")] + ([] if pairs is None else [_strings(pairs, "pairs")])
    if len(columns[0]) != len(columns[-1]):
        raise MinbertError(f"{len(columns[0])} texts and {len(columns[-1])} pairs; expected as many of each")
    for start in range(0, len(columns[0]), CHUNK):
        yield [column[start : start + CHUNK] for column in columns]


def _strings(values: Sequence[str], name: str) -> list[str]:
    if isinstance(values, str):
        raise MinbertError(f"{name} is one string; expected a list of strings")
    strings = list(values)
    for i, value in enumerate(strings):
        if not isinstance(value, str):
            raise MinbertError(f"{name}[{i}] is {value!r:.60} ({type(value).__name__}); expected a string")
    return strings


def _encodable(texts: list[str]) -> list[str]:
    """Surrogates have no UTF-8: halves that belong together are joined, others become U+FFFD, which BERT drops."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
    return texts


def _weigh(encodings: list[Encoding], columns: list[list[str]], weights: Mapping[str, float]) -> NDArray[np.float32]:
    """Each token has the weight of its word's part of speech; a special one that of "other"."""
    from minbert.data.parts_of_speech import parts_of

    texts = [_encodable(column) for column in columns]
    found: list[float] = []
    for row, encoding in enumerate(encodings):
        owners = list(zip(encoding.sequence_ids, encoding.word_ids, strict=True))  # (None, None) of a special token
        spans: dict[tuple[int | None, int | None], list[int]] = {}
        for owner, (start, end) in zip(owners, encoding.offsets, strict=True):
            spans.setdefault(owner, [start, end])[1] = end
        of_word: dict[tuple[int | None, int | None], str] = {}
        for column in range(len(texts)):
            words = [owner for owner in spans if owner[0] == column]
            said = [texts[column][row][slice(*spans[owner])] for owner in words]
            of_word |= dict(zip(words, parts_of(said), strict=True))
        found += [weights.get(of_word.get(owner, "other"), 1.0) for owner in owners]
    return np.array(found, np.float32)


def _fit(encoding: Encoding, limit: int) -> NDArray[np.bool_]:
    """Which of the tokens stay: the special ones and, as "longest_first" has it, most of the shorter text.

    The library can truncate by itself, but as a setting of the object, which threads would fight over, and it keeps
    what it cuts, each piece of one text with each of the other: 8,000 words a text, cut to 64, took 11 s and 3.6 GB.
    """
    owner = np.array(encoding.sequence_ids, float)  # (tokens,) 0 first text, 1 second text, nan special token
    keep: NDArray[np.bool_] = np.isnan(owner)
    first, second = np.flatnonzero(owner == 0), np.flatnonzero(owner == 1)
    room = limit - int(keep.sum())
    shorter = min(len(first), len(second), room // 2)
    of_first = shorter if len(first) <= len(second) else room - shorter
    keep[first[:of_first]] = True
    keep[second[: room - of_first]] = True
    return keep


def ranges(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... up to each length, one range after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])


def _read_json(file: Path) -> dict[str, Any]:
    """The object in an optional file; empty when there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:  # also bytes that are no text
        raise MinbertError(f"{shown(file)}: {error}; expected a JSON object") from error
    if not isinstance(value, dict):
        raise MinbertError(f"{shown(file)}: found a JSON {type(value).__name__}; expected a JSON object")
    return value


def _special_tokens(family: dict[str, str], settings: dict[str, Any]) -> dict[str, str]:
    """The family's names, or others where tokenizer_config.json has them: "[CLS]" or {"content": "[CLS]", ...}."""
    said = {role: settings.get(f"{role}_token") or token for role, token in family.items()}
    return {role: token["content"] if isinstance(token, dict) else token for role, token in said.items()}


def _set_up_wordpiece(backend: tokenizers.Tokenizer, special: dict[str, str], settings: dict[str, Any]) -> None:
    """What vocab.txt leaves unsaid, as BertTokenizer and MPNetTokenizer of transformers have it."""
    backend.model.unk_token = special["unk"]
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),  # None: as lowercase
        lowercase=settings.get("do_lower_case", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##")
    # MPNet's <mask> takes the space before it. Its published tokenizer.json also knows <unk>, which transformers
    # forgets when it reads vocab.txt; we follow the file, so that both ways to load agree.
    backend.add_special_tokens([AddedToken(token, lstrip=token == "<mask>") for token in special.values()])
    if special["cls"] == "<s>" and backend.token_to_id("<unk>") is not None:
        backend.add_special_tokens([AddedToken("<unk>", normalized=True)])


def _template(special: dict[str, str], vocabulary: dict[str, int], mpnet: bool) -> Any:
    """[CLS] A [SEP] B [SEP], or MPNet's <s> A </s> </s> B </s>."""
    first, last = ((special[role], vocabulary[special[role]]) for role in ("cls", "sep"))
    if mpnet:
        return processors.RobertaProcessing(last, first, trim_offsets=True, add_prefix_space=False)
    single = f"{first[0]}:0 $A:0 {last[0]}:0"
    return processors.TemplateProcessing(single=single, pair=f"{single} $B:1 {last[0]}:1", special_tokens=[first, last])
