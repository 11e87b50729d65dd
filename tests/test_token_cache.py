"""The token cache: the same tokens as without it, whatever lies on the disk and whoever else writes there."""

from __future__ import annotations

import copy
import errno
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minbert import evaluating, experiment
from minbert.config import data_folder
from minbert.data import cache as cache_module
from minbert.data.batches import pad
from minbert.data.cache import FORMAT, LIMIT, TokenCache, _key
from minbert.data.inputs import tokenize_view
from minbert.data.tokenizer import Tokenizer, Tokens
from minbert.errors import MinbertError
from minbert.preparing import Unwatched, prepare
from tests.runs import small_recipe

TEXTS = ["the cat sat.", "hello world", "a dog ran and then the bird sang.", "", "hello", "nobody knows this"]
PAIRS = ["a bird", "", "the dog sat", "hello", "cats and dogs", "the world"]
FILES = ("ids.npy", "segments.npy", "offsets.npy", "meta.json")
WORDS = st.sampled_from(["the", "cat", "sat", "world", "unknown", ".", "\ud83d", "é", "\0", " "])
ROWS = st.lists(st.lists(WORDS, max_size=40).map(" ".join) | st.text(max_size=12), max_size=6)
IN_ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return Tokenizer.load(tiny_folder)


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    return TokenCache(tmp_path / "tokens", smallest=0, warn=pytest.fail)


def assert_same(found: Tokens, expected: Tokens) -> None:
    for name in ("ids", "segments", "offsets"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert found.truncation == expected.truncation


def only_entry(cache: TokenCache) -> Path:
    (entry,) = cache.entries()
    return entry.folder


# --- what comes out -------------------------------------------------------------------------------------------------


@IN_ONE_FOLDER
@given(texts=ROWS, pairs=st.none() | st.randoms(), max_tokens=st.integers(5, 32))
def test_with_and_without_the_cache_the_tokens_are_the_same(
    texts: list[str], pairs: Any, max_tokens: int, cache: TokenCache, tokenizer: Tokenizer
) -> None:
    second = None if pairs is None else pairs.sample(texts, len(texts))
    expected = tokenizer.encode(texts, second, max_tokens=max_tokens)
    before = cache.hits
    for _ in range(2):  # at the latest the second comes from the disk
        assert_same(cache.encode(tokenizer, texts, second, max_tokens=max_tokens), expected)
    assert cache.hits > before


@pytest.mark.parametrize("view", ["first", "second", "joint", "reversed"])
def test_every_view_has_its_own_tokens(view: Any, cache: TokenCache, tokenizer: Tokenizer) -> None:
    for _ in range(2):
        found = tokenize_view(view, tokenizer, TEXTS, PAIRS, 8, cache=cache)
        assert_same(found, tokenize_view(view, tokenizer, TEXTS, PAIRS, 8))
    assert (cache.hits, cache.misses) == (1, 1)


def test_tokens_from_the_disk_work_wherever_tokens_do(cache: TokenCache, tokenizer: Tokenizer) -> None:
    expected = cache.encode(tokenizer, TEXTS, PAIRS, max_tokens=8)
    mapped = cache.encode(tokenizer, TEXTS, PAIRS, max_tokens=8)
    assert cache.hits == 1
    assert type(mapped.ids) is np.ndarray  # no subclass, whose every slice costs time
    assert isinstance(mapped.ids.base, np.memmap)
    rows = np.array([4, 0, 0, 2])
    assert_same(mapped.take(rows), expected.take(rows))
    assert_same(mapped.take([]), expected.take([]))
    assert_same(Tokens.join([mapped, mapped]), Tokens.join([expected, expected]))
    padded, expected_pad = pad(mapped, rows, 0), pad(expected, rows, 0)
    np.testing.assert_array_equal(padded.ids, expected_pad.ids)
    for one, other in zip(mapped, expected, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
    for other in (pickle.loads(pickle.dumps(mapped)), copy.deepcopy(mapped)):
        assert_same(other, expected)


def test_what_is_done_to_mapped_tokens_stays_out_of_the_file(cache: TokenCache, tokenizer: Tokenizer) -> None:
    expected = cache.encode(tokenizer, TEXTS, max_tokens=8)
    cache.encode(tokenizer, TEXTS, max_tokens=8).ids[:] = 0  # as torch.from_numpy wants it: it warns of read-only ones
    assert_same(cache.encode(tokenizer, TEXTS, max_tokens=8), expected)
    assert cache.hits == 2


def test_mapped_tokens_outlive_their_entry(cache: TokenCache, tokenizer: Tokenizer) -> None:
    expected = cache.encode(tokenizer, TEXTS, max_tokens=8)
    mapped = cache.encode(tokenizer, TEXTS, max_tokens=8)
    assert cache.clear() > 0
    assert cache.entries() == []
    assert_same(mapped, expected)


def test_few_texts_are_not_kept(tmp_path: Path, tokenizer: Tokenizer) -> None:
    cache = TokenCache(tmp_path / "tokens", smallest=len(TEXTS) + 1)
    assert_same(cache.encode(tokenizer, TEXTS, max_tokens=8), tokenizer.encode(TEXTS, max_tokens=8))
    assert (cache.hits, cache.misses) == (0, 0)
    assert not cache.folder.exists()


def test_a_mistake_is_the_tokenizers_to_tell_and_nothing_is_kept(cache: TokenCache, tokenizer: Tokenizer) -> None:
    with pytest.raises(MinbertError, match="6 texts and 1 pairs"):
        cache.encode(tokenizer, TEXTS, PAIRS[:1], max_tokens=8)
    with pytest.raises(MinbertError, match="max_tokens is 1"):
        cache.encode(tokenizer, TEXTS, max_tokens=1)
    assert cache.entries() == []


# --- the key --------------------------------------------------------------------------------------------------------


@IN_ONE_FOLDER
@given(one=st.lists(ROWS, min_size=1, max_size=2), other=st.lists(ROWS, min_size=1, max_size=2))
def test_other_texts_have_another_key(one: list[list[str]], other: list[list[str]], tokenizer: Tokenizer) -> None:
    assert (_key(tokenizer, one, 8) == _key(tokenizer, other, 8)) == (one == other)


def test_everything_that_decides_the_tokens_is_in_the_key(
    tokenizer: Tokenizer, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "cased")
    (tmp_path / "cased" / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    tokenizer.save(tmp_path / "saved")
    key = _key(tokenizer, [TEXTS], 8)
    assert key == _key(Tokenizer.load(tiny_folder), [TEXTS], 8)
    assert key == _key(Tokenizer.load(tmp_path / "saved"), [list(TEXTS)], 8)
    others = [
        _key(tokenizer, [TEXTS], 9),
        _key(tokenizer, [TEXTS[::-1]], 8),
        _key(tokenizer, [TEXTS, PAIRS], 8),
        _key(tokenizer, [PAIRS, TEXTS], 8),
        _key(tokenizer, [TEXTS + PAIRS], 8),
        _key(Tokenizer.load(tmp_path / "cased"), [TEXTS], 8),
    ]
    monkeypatch.setattr(cache_module, "FORMAT", FORMAT + 1)
    others.append(_key(tokenizer, [TEXTS], 8))
    monkeypatch.setattr(cache_module.tokenizers, "__version__", "99")
    others.append(_key(tokenizer, [TEXTS], 8))
    assert len({key, *others}) == 1 + len(others)


# --- damage ---------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def make_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [truncate, cut_to_nothing, lengthen, make_a_folder, fill_with_zeros, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_entry_is_made_again(
    name: str, damage: Callable[[Path], None], cache: TokenCache, tokenizer: Tokenizer
) -> None:
    expected = cache.encode(tokenizer, TEXTS, PAIRS, max_tokens=8)
    damage(only_entry(cache) / name)
    for hits in (0, 1):
        assert_same(cache.encode(tokenizer, TEXTS, PAIRS, max_tokens=8), expected)
        assert cache.hits == hits
    assert sorted(path.name for path in cache.folder.iterdir()) == [only_entry(cache).name]


@settings(IN_ONE_FOLDER, max_examples=60)
@given(name=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_single_wrong_bit_never_comes_out(
    name: str, place: float, bit: int, cache: TokenCache, tokenizer: Tokenizer
) -> None:
    expected = tokenizer.encode(TEXTS, PAIRS, max_tokens=8)
    cache.encode(tokenizer, TEXTS, PAIRS, max_tokens=8)
    file = only_entry(cache) / name
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    file.write_bytes(content)
    assert_same(cache.encode(tokenizer, TEXTS, PAIRS, max_tokens=8), expected)


@pytest.mark.parametrize("content", ["[]", "7", "null", '{"truncated": {}}', "[" * 10**5, "{}"])
def test_a_meta_file_that_is_something_else(content: str, cache: TokenCache, tokenizer: Tokenizer) -> None:
    expected = cache.encode(tokenizer, TEXTS, max_tokens=8)
    (only_entry(cache) / "meta.json").write_text(content)
    assert_same(cache.encode(tokenizer, TEXTS, max_tokens=8), expected)
    assert cache.hits == 0


def test_files_of_another_entry(cache: TokenCache, tokenizer: Tokenizer) -> None:
    """Each whole in itself, but not what the meta file speaks of."""
    expected = cache.encode(tokenizer, TEXTS, max_tokens=8)
    mine = only_entry(cache)
    cache.encode(tokenizer, PAIRS, max_tokens=8)
    (other,) = [entry.folder for entry in cache.entries() if entry.folder != mine]
    shutil.copyfile(other / "ids.npy", mine / "ids.npy")
    assert_same(cache.encode(tokenizer, TEXTS, max_tokens=8), expected)


def test_a_file_in_the_entrys_place(cache: TokenCache, tokenizer: Tokenizer) -> None:
    expected = cache.encode(tokenizer, TEXTS, max_tokens=8)
    place = only_entry(cache)
    shutil.rmtree(place)
    place.write_text("in the way")
    for hits in (0, 1):
        assert_same(cache.encode(tokenizer, TEXTS, max_tokens=8), expected)
        assert cache.hits == hits


# --- disks that refuse ----------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_is_told_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "file").write_text("in the way")
    said: list[str] = []
    cache = TokenCache(tmp_path / "file" / "tokens", smallest=0, warn=said.append)
    for texts in (TEXTS, PAIRS, TEXTS):
        assert_same(cache.encode(tokenizer, texts, max_tokens=8), tokenizer.encode(texts, max_tokens=8))
    assert len(said) == 1
    assert "cannot be written" in said[0]
    assert "going on without it" in said[0]
    assert cache.entries() == []
    assert cache.clear() == 0


@pytest.mark.parametrize("at", range(3))
def test_a_full_disk_leaves_nothing_behind(
    at: int, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    cache = TokenCache(tmp_path / "tokens", smallest=0, warn=said.append)
    save, calls = np.save, iter(range(9))

    def fail(file: Path, array: np.ndarray) -> None:
        if next(calls) == at:
            file.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(file, array)

    monkeypatch.setattr(np, "save", fail)
    assert_same(cache.encode(tokenizer, TEXTS, max_tokens=8), tokenizer.encode(TEXTS, max_tokens=8))
    assert "No space left" in said[0]
    assert list(cache.folder.iterdir()) == []


def test_a_cache_that_can_only_be_read_is_used(
    cache: TokenCache, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = cache.encode(tokenizer, TEXTS, max_tokens=8)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "utime", refuse)
    assert_same(cache.encode(tokenizer, TEXTS, max_tokens=8), expected)
    assert cache.hits == 1


# --- size -----------------------------------------------------------------------------------------------------------


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path, tokenizer: Tokenizer) -> None:
    big = TokenCache(tmp_path / "tokens", smallest=0)
    sets = [[f"{text} {number}" for text in TEXTS] for number in range(3)]
    for number, texts in enumerate(sets):
        big.encode(tokenizer, texts, max_tokens=8)
        newest = max(big.entries(), key=lambda entry: entry.used)
        os.utime(newest.folder / "meta.json", (number + 1, number + 1))
    sizes = [entry.bytes for entry in big.entries()]
    big.encode(tokenizer, sets[0], max_tokens=8)  # used again: now the youngest
    assert big.hits == 1
    small = TokenCache(tmp_path / "tokens", smallest=0, limit=sum(sizes) + 100, warn=pytest.fail)
    small.encode(tokenizer, PAIRS, max_tokens=8)
    assert sum(entry.bytes for entry in small.entries()) <= small.limit
    for texts, there in zip([sets[0], sets[2], PAIRS, sets[1]], [True, True, True, False], strict=True):
        before = small.hits
        small.encode(tokenizer, texts, max_tokens=8)
        assert (small.hits > before) == there


def test_a_set_larger_than_the_limit_is_not_kept_and_removes_nothing(
    cache: TokenCache, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    cache.encode(tokenizer, PAIRS[:2], max_tokens=8)
    small = TokenCache(cache.folder, smallest=0, limit=100, warn=pytest.fail)
    assert_same(small.encode(tokenizer, TEXTS, max_tokens=8), tokenizer.encode(TEXTS, max_tokens=8))
    assert len(cache.entries()) == 1


def test_what_a_dead_writer_left_is_swept_and_a_living_one_is_not(cache: TokenCache, tokenizer: Tokenizer) -> None:
    for name, age in ((".new-dead", 2 * cache_module.LEFTOVER), (".new-alive", 60.0)):
        (cache.folder / name).mkdir(parents=True)
        os.utime(cache.folder / name, (time.time() - age,) * 2)
    (cache.folder / "notes.txt").write_text("not ours")
    cache.encode(tokenizer, TEXTS, max_tokens=8)
    cache.clear()
    assert sorted(path.name for path in cache.folder.iterdir()) == [".new-alive", "notes.txt"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("", LIMIT), ("2G", 2 << 30), ("1.5 g", 3 << 29), ("500MB", 500 << 20), ("64 KiB", 64 << 10), ("123", 123)],
)
def test_the_size_is_said_by_the_environment(
    text: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINBERT_HOME", str(tmp_path))
    monkeypatch.setenv("MINBERT_TOKEN_CACHE", text)
    cache = TokenCache.from_environment()
    assert cache is not None
    assert (cache.folder, cache.limit) == (tmp_path / "tokens", size)


@pytest.mark.parametrize("text", ["off", "OFF ", "0"])
def test_the_cache_can_be_off(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINBERT_TOKEN_CACHE", text)
    assert TokenCache.from_environment() is None


@pytest.mark.parametrize("text", ["lots", "-1G", "2 X", "G", "1e9", "nan"])
def test_a_size_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINBERT_TOKEN_CACHE", text)
    with pytest.raises(MinbertError, match=f'MINBERT_TOKEN_CACHE is "{text}"; expected a size such as 2G, or off'):
        TokenCache.from_environment()


# --- several at once ------------------------------------------------------------------------------------------------


def test_writers_readers_and_a_cleaner_at_the_same_time(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Each with a cache of its own on one folder, as processes have it; a file that others map is never written to."""
    expected = [tokenizer.encode(texts, max_tokens=8) for texts in (TEXTS, PAIRS)]

    def work(number: int) -> int:
        cache = TokenCache(tmp_path / "tokens", smallest=0, warn=pytest.fail)
        for turn in range(40):
            for texts, tokens in zip((TEXTS, PAIRS), expected, strict=True):
                assert_same(cache.encode(tokenizer, texts, max_tokens=8), tokens)
            if number == 0 and turn % 5 == 0:
                cache.clear()
        return cache.hits

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) > 0
    assert all(not path.name.startswith(".") for path in (tmp_path / "tokens").iterdir())


def test_processes_that_start_with_the_same_texts(tmp_path: Path, tiny_folder: Path) -> None:
    code = """
import sys
from pathlib import Path
from minbert.data.cache import TokenCache
from minbert.data.tokenizer import Tokenizer
cache = TokenCache(Path(sys.argv[1]), smallest=0, warn=sys.exit)
texts = [f"the cat sat {number}" for number in range(3000)]
print(cache.encode(Tokenizer.load(Path(sys.argv[2])), texts, max_tokens=8).ids.sum())
"""
    command = [sys.executable, "-c", code, str(tmp_path / "tokens"), str(tiny_folder)]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(set(said)) == 1
    assert len(list((tmp_path / "tokens").iterdir())) == 1


# --- in a run -------------------------------------------------------------------------------------------------------


class Listening(Unwatched):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def preparing(self, what: str) -> None:
        self.heard.append(what)

    prepared = preparing


def test_a_second_run_tokenizes_nothing_and_has_the_same_inputs(
    tmp_path: Path, tiny_encoder: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small_recipe(tiny_encoder, tasks={"sts": {"head": "cosine"}})  # which reads each text apart
    tokenizer = Tokenizer.load(tiny_encoder)
    folder = data_folder(recipe, small_data)
    first = prepare(recipe, tokenizer, folder)
    heard = []
    for _ in range(2):
        watcher = Listening()
        cache = TokenCache(tmp_path / "tokens", smallest=0, warn=pytest.fail)
        second = prepare(recipe, tokenizer, folder, cache=cache, watcher=watcher)
        heard.append(watcher.heard)
        assert second.notes() == first.notes()
        for split, tasks in first.inputs.items():
            for name, inputs in tasks.items():
                for one, other in zip(second.inputs[split][name].views, inputs.views, strict=True):
                    assert_same(one, other)
    assert heard[0][:2] == ["reading sst train", "tokenizing sst train, 24 rows"]
    assert heard[0][-1].startswith("108 rows prepared in ")
    assert heard[0][-1].endswith(", 0 of 8 sets of tokens from the cache")
    assert heard[1][-1].endswith(", 8 of 8 sets of tokens from the cache")


def test_training_and_evaluating_use_the_cache(
    tmp_path: Path, tiny_encoder: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[TokenCache] = []

    def own(_warn: object) -> TokenCache:
        made.append(TokenCache(tmp_path / "tokens", smallest=0, warn=pytest.fail))
        return made[-1]

    monkeypatch.setattr(TokenCache, "from_environment", own)
    recipe = small_recipe(tiny_encoder, "sst", training={"epochs": 1, "train_sample": 0})
    runs = [experiment.train(recipe, out=tmp_path / str(number), data=small_data) for number in range(2)]
    assert runs[0].results["dev"] == runs[1].results["dev"]
    assert set(evaluating.evaluate_model(runs[0].model, data=small_data, samples=10)) == {"sst"}
    assert [(cache.hits, cache.misses) for cache in made] == [(0, 2), (2, 0), (1, 0)]
