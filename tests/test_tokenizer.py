"""The tokenizer against transformers' own, on text that breaks tokenizers; and what it says when given nonsense."""

# ruff: noqa: RUF001 (letters that look like others are what we test)

from __future__ import annotations

import copy
import json
import pickle
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.processors import BertProcessing
from transformers import AutoTokenizer, BertTokenizerFast

from minbert.data import tokenizer as module
from minbert.data.tokenizer import Tokenizer, Tokens, Truncation
from minbert.errors import MinbertError

EncoderFolder = Callable[[str], Path]
ENCODERS = ["minilm", "gte-small", "mpnet"]

HARD = [
    "A plain sentence, with punctuation!",
    "",
    " ",
    " \t\r\n\u00a0\u3000 ",
    "tabs\tand\nnew\r\nlines\u2028and\u2029separators\x0b\x0c\x85end",
    "emoji 😀😀 and flags 🇨🇭, skin 👍🏽, keycap 1️⃣",
    "ZWJ 👩‍👩‍👧‍👦 👩🏾‍🚀 🏳️‍🌈",
    "日本語のテキスト、中文文本。한국어 텍스트 𠀀𪚥",
    "ภาษาไทยไม่มีช่องว่าง",
    "اللغة العربية مُشَكَّلَة ٠١٢٣",
    "עִבְרִית हिन्दी বাংলা Ελληνικά Ѐѝ",
    "précomposé naïve Ångström Ǖ",
    "combining e\u0301 n\u0303 a\u0308\u0304 Z\u0351\u036b\u0343a\u0300\u0316lgo",
    "İstanbul ıi ß ẞ ﬁ ŉ ǰ",
    "control \x00\x01\x07\x1b[0m\x7f\x9f\ufffd\ufffe\uffff end",
    "zero\u200bwidth\u200cjoin\u200der\ufeffbom\u2060soft\u00adhyphen \u202eright to left\u202c",
    "full width ＡＢＣ１２３！？ superscript x² ½ Ⅷ ℌ",
    "maths 𝕬𝖇𝖈 𝒳 ∑∫√ private \ue000\U000f0000 unassigned \u0378",
    "[CLS] in [SEP] the [MASK] text [PAD] and [UNK] [sep][SEP]x[SEP]",
    "<s> in </s> the <mask> text <pad> and <unk> <UNK>  <mask>x</s></s>",
    "##ing ##s # ## un##able",
    "w" * 10_000,
    "é" * 100 + " " + "é" * 101 + " " + "ab" * 50,
    "don't... U.S.A. e-mail@example.com http://x.y/z?a=b&c=d $1,234.56 50%",
]
LONG = ["word " * 700, "supercalifragilistic, " * 40, "日本" * 300, "a b c " * 6 + "😀" * 20, "[SEP] </s> " * 60]
TEXTS = HARD + LONG
WORDS = [
    "the",
    "cat",
    "sat",
    "mat",
    "un",
    "##able",
    "##s",
    "##ed",
    "able",
    "cafe",
    "café",
    ".",
    ",",
    "!",
    "日",
    "本",
    "[",
    "]",
]
LETTERS = [prefix + letter for letter in "abcdeéfghijklmnopqrstuvwxyzACT" for prefix in ("", "##")]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *LETTERS]


@cache
def both(folder: Path) -> tuple[Tokenizer, Any]:
    """Ours, and the authority."""
    return Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)


def write_folder(folder: Path, vocabulary: Sequence[str] = VOCABULARY, **files: Any) -> Path:
    """A vocab.txt, and JSON files by name: ``write_folder(tmp_path, config={"max_position_embeddings": 8})``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in vocabulary), encoding="utf-8")
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    return folder


def lists(tokens: Tokens) -> tuple[list[list[int]], list[list[int]]]:
    return [ids.tolist() for ids, _ in tokens], [segments.tolist() for _, segments in tokens]


def assert_same(
    ours: Tokenizer, theirs: Any, texts: list[str], pairs: list[str] | None = None, max_tokens: int | None = None
) -> None:
    expected = theirs(
        texts,
        pairs,
        truncation=max_tokens is not None,
        max_length=max_tokens,
        padding=False,
        return_token_type_ids=True,
    )
    tokens = ours.encode(texts, pairs, max_tokens=max_tokens)
    ids, segments = lists(tokens)
    assert ids == expected["input_ids"]
    assert segments == expected["token_type_ids"]
    assert tokens.lengths.tolist() == [sum(mask) for mask in expected["attention_mask"]]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("small")))


@pytest.mark.parity
@pytest.mark.parametrize("name", ENCODERS)
def test_equals_transformers_without_truncation(encoder_folder: EncoderFolder, name: str) -> None:
    ours, theirs = both(encoder_folder(name))
    assert_same(ours, theirs, HARD)
    for shift in (0, 1, 7):
        assert_same(ours, theirs, HARD, HARD[shift:] + HARD[:shift])


@pytest.mark.parity
@pytest.mark.parametrize("max_tokens", [16, 64, 512])
@pytest.mark.parametrize("name", ENCODERS)
def test_equals_transformers_with_truncation(encoder_folder: EncoderFolder, name: str, max_tokens: int) -> None:
    ours, theirs = both(encoder_folder(name))
    assert_same(ours, theirs, [*TEXTS, "very long " * 10_000], max_tokens=max_tokens)
    texts = HARD + LONG[3:] if max_tokens < 64 else TEXTS  # pairs take theirs time by (length / max_tokens) squared
    for shift in (0, 1, 5):
        assert_same(ours, theirs, texts, texts[shift:] + texts[:shift], max_tokens)


@pytest.mark.parity
@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=8), max_tokens=st.integers(6, 24))
def test_equals_transformers_on_drawn_text(
    encoder_folder: EncoderFolder, name: str, rows: list[tuple[str, str]], max_tokens: int
) -> None:
    ours, theirs = both(encoder_folder(name))
    texts, pairs = (list(column) for column in zip(*rows, strict=True))
    assert_same(ours, theirs, texts, max_tokens=max_tokens)
    assert_same(ours, theirs, texts, pairs, max_tokens)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("minilm", (30522, 0, 101, 102, 103, 512)),
        ("gte-small", (30522, 0, 101, 102, 103, 512)),
        ("mpnet", (30527, 1, 0, 2, 30526, 512)),  # 514 positions, the first two of which no token uses
    ],
)
def test_numbers_of_the_encoders(encoder_folder: EncoderFolder, name: str, expected: tuple[int, ...]) -> None:
    one = Tokenizer.load(encoder_folder(name))
    assert (one.vocab_size, one.pad_id, one.cls_id, one.sep_id, one.mask_id, one.max_tokens) == expected


@pytest.mark.parametrize("name", ENCODERS)
def test_vocab_txt_equals_tokenizer_json(encoder_folder: EncoderFolder, name: str, tmp_path: Path) -> None:
    for file in ("vocab.txt", "config.json", "tokenizer_config.json"):
        shutil.copy(encoder_folder(name) / file, tmp_path)
    from_vocabulary, from_json = Tokenizer.load(tmp_path), both(encoder_folder(name))[0]
    assert lists(from_vocabulary.encode(TEXTS, TEXTS[::-1])) == lists(from_json.encode(TEXTS, TEXTS[::-1]))
    assert lists(from_vocabulary.encode(TEXTS)) == lists(from_json.encode(TEXTS))
    assert vars(from_vocabulary).keys() == vars(from_json).keys()
    (tmp_path / "config.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert lists(Tokenizer.load(tmp_path).encode(HARD, HARD)) == lists(from_json.encode(HARD, HARD))


@pytest.mark.parity
@pytest.mark.parametrize("beside_config", [False, True])
@pytest.mark.parametrize("name", ENCODERS)
def test_saved_folder_loads_here_and_in_transformers(
    encoder_folder: EncoderFolder, name: str, beside_config: bool, tmp_path: Path
) -> None:
    ours = both(encoder_folder(name))[0]
    ours.save(tmp_path / "new")
    if beside_config:
        shutil.copy(encoder_folder(name) / "config.json", tmp_path / "new")
    again, theirs = both(tmp_path / "new")
    assert lists(again.encode(TEXTS, TEXTS[::-1])) == lists(ours.encode(TEXTS, TEXTS[::-1]))
    assert_same(ours, theirs, TEXTS, TEXTS[::-1], 64)
    assert_same(ours, theirs, HARD)
    assert (again.positions, theirs.model_max_length) == (512, 512)
    for role in ("pad", "cls", "sep", "mask"):
        assert getattr(theirs, f"{role}_token_id") == getattr(again, f"{role}_id") == getattr(ours, f"{role}_id")
    assert ("token_type_ids" in theirs("a", "b")) == (name != "mpnet")


@pytest.mark.parity
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": False, "strip_accents": True},
        {"strip_accents": False},
        {"tokenize_chinese_chars": False},
    ],
)
def test_settings_beside_vocab_txt(said: dict[str, bool], tmp_path: Path) -> None:
    ours = Tokenizer.load(write_folder(tmp_path, tokenizer_config=said))
    theirs = BertTokenizerFast(str(tmp_path / "vocab.txt"), **said)
    texts = [*HARD, "The Cat SAT, Café cafe\u0301 ACT", "日本x本"]
    assert_same(ours, theirs, texts)
    assert_same(ours, theirs, texts, texts[::-1], 16)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(), max_size=6), st.integers(5, 20))
def test_drawn_text_gives_consistent_tokens(small: Tokenizer, texts: list[str], max_tokens: int) -> None:
    full, cut = small.encode(texts, texts), small.encode(texts, texts, max_tokens=max_tokens)
    assert len(full) == len(cut) == len(texts)
    assert (full.ids.dtype, full.segments.dtype, full.offsets.dtype) == (np.int32, np.uint8, np.int64)
    assert cut.lengths.tolist() == np.minimum(full.lengths, max_tokens).tolist()
    lost = full.lengths - cut.lengths
    assert cut.truncation == Truncation(int((lost > 0).sum()), int(lost.sum()))
    for ids, segments in cut:
        assert ids[0] == small.cls_id
        assert ids[-1] == small.sep_id
        assert segments.tolist() == sorted(segments)


def test_truncation_worked_by_hand(small: Tokenizer) -> None:
    tokens = small.encode(["the cat sat", "the"], ["the cat sat mat the cat", "cat"], max_tokens=8)
    # 5 of the 9 words fit beside [CLS] [SEP] [SEP]: the longer text gives way first, down to 3 and 2.
    assert [small.words(ids) for ids, _ in tokens] == [
        ["[CLS]", "the", "cat", "[SEP]", "the", "cat", "sat", "[SEP]"],
        ["[CLS]", "the", "[SEP]", "cat", "[SEP]"],
    ]
    assert [segments.tolist() for _, segments in tokens] == [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1]]
    assert tokens.truncation == Truncation(texts=1, tokens=4)
    single = small.encode(["the cat sat", "cat unables"], max_tokens=4)
    assert [small.words(ids) for ids, _ in single] == [
        ["[CLS]", "the", "cat", "[SEP]"],
        ["[CLS]", "cat", "un", "[SEP]"],
    ]
    assert single.truncation == Truncation(texts=2, tokens=3)
    assert str(tokens.truncation + single.truncation) == "texts truncated: 3, tokens lost: 7"


def test_long_pairs_take_linear_time(small: Tokenizer) -> None:
    text = "cat " * 5000  # the library's own truncation would make 5000 x 5000 pieces of this pair
    tokens = small.encode([text], [text], max_tokens=5)
    assert small.words(tokens[0][0]) == ["[CLS]", "cat", "[SEP]", "cat", "[SEP]"]
    assert tokens.truncation == Truncation(texts=1, tokens=9998)


def test_chunks_join_seamlessly(small: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = small.encode(TEXTS, TEXTS[::-1], max_tokens=20)
    monkeypatch.setattr(module, "CHUNK", 3)
    chunked = small.encode(TEXTS, TEXTS[::-1], max_tokens=20)
    assert lists(chunked) == lists(whole)
    assert chunked.truncation == whole.truncation


def test_take_orders_and_repeats(small: Tokenizer) -> None:
    tokens = small.encode(["the", "cat sat", "mat the cat", ""], ["cat", "", "the", "sat"])
    for rows in ([2, 0, 0, -1], [], (1,), np.array([3, 2, 1, 0])):
        assert [lists(tokens.take(rows))[0], tokens.take(rows).lengths.tolist()] == [
            [tokens[row][0].tolist() for row in rows],
            [len(tokens[row][0]) for row in rows],
        ]
    assert lists(tokens.take(np.array([False, True, False, True]))) == lists(tokens.take([1, 3]))
    assert lists(tokens.take([2]))[1] == [[0, 0, 0, 0, 0, 1, 1]]
    assert tokens[-1][0].tolist() == tokens[3][0].tolist()
    with pytest.raises(IndexError):
        tokens[4]
    with pytest.raises(IndexError):
        tokens.take([4])


def test_nothing_gives_nothing(small: Tokenizer) -> None:
    for tokens in (small.encode([]), small.encode([], []), Tokens.join([])):
        assert (len(tokens), tokens.offsets.tolist(), list(tokens)) == (0, [0], [])
        assert tokens.ids.dtype == np.int32
        assert tokens.truncation == Truncation()


def test_surrogates_are_repaired(small: Tokenizer) -> None:
    torn = "cat \ud83d\ude00"  # both halves of an emoji, as a careless JSON reader leaves them
    assert lists(small.encode([torn])) == lists(small.encode(["cat 😀"]))
    assert lists(small.encode(["the", "ca\ud800t\udfff"], max_tokens=3)) == lists(small.encode(["the", "cat"]))
    assert lists(small.encode(["cat"], ["\udc80"])) == lists(small.encode(["cat"], [""]))


def test_copies_and_pickles_and_threads_agree(small: Tokenizer) -> None:
    texts = [f"{text} {i}" for i in range(3) for text in TEXTS]
    expected = {limit: lists(small.encode(texts, texts[::-1], max_tokens=limit)) for limit in (7, 16, 64, 512)}
    for twin in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert lists(twin.encode(texts, texts[::-1], max_tokens=16)) == expected[16]
        assert (twin.max_tokens, twin.mask_id, twin.vocab_size) == (small.max_tokens, small.mask_id, small.vocab_size)
    with ThreadPoolExecutor(4) as threads:  # different limits at once: a shared setting would show
        limits = [7, 16, 64, 512] * 3
        found = threads.map(lambda limit: lists(small.encode(texts, texts[::-1], max_tokens=limit)), limits)
        assert all(one == expected[limit] for one, limit in zip(found, limits, strict=True))


def test_padding_and_truncation_of_the_file_are_off(small: Tokenizer, tmp_path: Path) -> None:
    small.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    raw = tokenizers.Tokenizer.from_file(str(file))
    raw.enable_padding(length=20)
    raw.enable_truncation(4)
    raw.save(str(file))
    assert lists(Tokenizer.load(tmp_path).encode(HARD, HARD)) == lists(small.encode(HARD, HARD))


def test_other_post_processors_mark_segments_too(small: Tokenizer, tmp_path: Path) -> None:
    small.save(tmp_path)
    file = tmp_path / "tokenizer.json"
    raw = tokenizers.Tokenizer.from_file(str(file))
    raw.post_processor = BertProcessing(("[SEP]", small.sep_id), ("[CLS]", small.cls_id))
    raw.save(str(file))
    assert lists(Tokenizer.load(tmp_path).encode(HARD, HARD, max_tokens=16)) == lists(
        small.encode(HARD, HARD, max_tokens=16)
    )
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), "post_processor": None}), encoding="utf-8")
    assert lists(Tokenizer.load(tmp_path).encode(HARD, HARD)) == lists(small.encode(HARD, HARD))


def test_special_tokens_may_be_renamed(tmp_path: Path) -> None:
    renamed = ["<cls>" if word == "[CLS]" else word for word in VOCABULARY]
    said = {"cls_token": {"content": "<cls>", "lstrip": False}, "mask_token": None}
    one = Tokenizer.load(write_folder(tmp_path, renamed, tokenizer_config=said))
    assert one.words(one.encode(["the [CLS]"])[0][0]) == ["<cls>", "the", "[", "c", "##l", "##s", "]", "[SEP]"]


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 512),
        ({"config": {"max_position_embeddings": 40}}, 40),
        ({"config": {"max_position_embeddings": 1024}, "tokenizer_config": {"model_max_length": 512}}, 1024),
        ({"tokenizer_config": {"model_max_length": 30}}, 30),
        ({"tokenizer_config": {"model_max_length": int(1e30)}}, 512),
    ],
)
def test_default_limit(files: dict[str, Any], limit: int, tmp_path: Path) -> None:
    assert Tokenizer.load(write_folder(tmp_path, **files)).max_tokens == limit
    lower = Tokenizer.load(tmp_path, max_tokens=9)
    assert lower.encode(["cat " * 50]).lengths.tolist() == [9]
    assert lower.encode(["cat " * 50], max_tokens=12).lengths.tolist() == [12]  # still within the encoder's positions


def test_words_reads_numpy_ids(small: Tokenizer) -> None:
    assert small.words(np.array([2, 5, 3], np.int32)) == ["[CLS]", "the", "[SEP]"]
    assert small.vocab_size == len(VOCABULARY)


@pytest.mark.parametrize(
    ("texts", "pairs", "max_tokens", "message"),
    [
        (["a", None], None, None, r"texts\[1\] is None \(NoneType\); expected a string"),
        (["a", "b"], ["c", float("nan")], None, r"pairs\[1\] is nan \(float\); expected a string"),
        ([b"bytes"], None, None, r"texts\[0\] is b'bytes' \(bytes\); expected a string"),
        ("one text", None, None, "texts is one string; expected a list of strings"),
        (["a"], "b", None, "pairs is one string; expected a list of strings"),
        (["a", "b"], ["c"], None, "2 texts and 1 pairs; expected as many of each"),
        (["a"], None, 2, "max_tokens is 2; this encoder takes 3 to 512 for texts"),
        (["a"], ["b"], 4, "max_tokens is 4; this encoder takes 5 to 512 for pairs"),
        (["a"], None, 513, "max_tokens is 513; this encoder takes 3 to 512 for texts"),
    ],
)
def test_encode_names_what_is_wrong(
    small: Tokenizer, texts: Any, pairs: Any, max_tokens: int | None, message: str
) -> None:
    with pytest.raises(MinbertError, match=f"^{message}$"):
        small.encode(texts, pairs, max_tokens=max_tokens)


def test_mpnet_pairs_need_six_tokens(tmp_path: Path) -> None:
    words = ["<s>", "<pad>", "</s>", "<unk>", *VOCABULARY, "<mask>"]
    one = Tokenizer.load(write_folder(tmp_path, words, config={"model_type": "mpnet", "max_position_embeddings": 22}))
    assert (one.positions, one.pad_id, one.mask_id) == (20, 1, len(words) - 1)
    assert one.words(one.encode(["the cat"], ["sat mat"], max_tokens=6)[0][0]) == [
        "<s>",
        "the",
        "</s>",
        "</s>",
        "sat",
        "</s>",
    ]
    with pytest.raises(MinbertError, match="max_tokens is 5; this encoder takes 6 to 20 for pairs"):
        one.encode(["the"], ["cat"], max_tokens=5)


@pytest.mark.parametrize("i", [-1, len(VOCABULARY)])
def test_words_names_an_unknown_id(small: Tokenizer, i: int) -> None:
    with pytest.raises(MinbertError, match=f"token id is {i}; expected one of the vocabulary, 0 to"):
        small.words([5, i])


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", b"{", r"tokenizer\.json: .*line 1 column 1; expected a tokenizer that can be read"),
        ("tokenizer.json", b"{}", r"tokenizer\.json: .*Model missing.*; expected a tokenizer that can be read"),
        ("vocab.txt", b"\xff\xfe[CLS]", r"vocab\.txt: .*UTF-8; expected a tokenizer that can be read"),
        ("vocab.txt", b"", r"vocab\.txt: no \[PAD\] \[UNK\] \[CLS\] \[SEP\] \[MASK\]; expected all of"),
        ("vocab.txt", b"[PAD]\n[UNK]\n[SEP]\n[MASK]\na", r"vocab\.txt: no \[CLS\]; expected all of \[PAD\]"),
        ("config.json", b'{"model_type": }', r"config\.json: .*line 1 column 16.*; expected a JSON object"),
        ("tokenizer_config.json", b"\xff", r"tokenizer_config\.json: .*; expected a JSON object"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json: found a JSON list; expected a JSON object"),
        (
            "config.json",
            b'{"max_position_embeddings": "512"}',
            r'config\.json: max_position_embeddings is "512"; expected',
        ),
    ],
)
def test_load_names_the_broken_file(file: str, content: bytes, message: str, tmp_path: Path) -> None:
    (write_folder(tmp_path) / file).write_bytes(content)
    with pytest.raises(MinbertError, match=message) as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_load_names_the_missing_files(tmp_path: Path) -> None:
    with pytest.raises(MinbertError, match=r"no tokenizer\.json and no vocab\.txt; expected a folder with one of"):
        Tokenizer.load(tmp_path)
    with pytest.raises(MinbertError, match=r"absent: not a folder; expected a folder with one of"):
        Tokenizer.load(tmp_path / "absent")


@pytest.mark.parametrize("max_tokens", [0, 2, 41])
def test_load_refuses_an_impossible_limit(max_tokens: int, tmp_path: Path) -> None:
    write_folder(tmp_path, config={"max_position_embeddings": 40})
    with pytest.raises(MinbertError, match=f"max_tokens is {max_tokens}; this encoder takes 3 to 40 for texts"):
        Tokenizer.load(tmp_path, max_tokens=max_tokens)
