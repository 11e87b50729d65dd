"""Downloads against a local server that misbehaves on request, and the unpackers against archives made here."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from minbert.data import unpack as module
from minbert.data.fetch import SOURCES, Fetched, RemoteFile, Source, checksum, fetch
from minbert.data.unpack import subtrees
from minbert.errors import MinbertError

BODY = bytes(range(256)) * 2000
GIT = "git:" + hashlib.sha1(b"blob %d\0" % len(BODY) + BODY).hexdigest()
SHA256 = "sha256:" + hashlib.sha256(BODY).hexdigest()


@dataclass
class Site:
    """What the server serves and how it fails; ``ranges`` records the (Range, status) of every request."""

    files: dict[str, bytes] = field(default_factory=lambda: {"file.bin": BODY})
    etag: str | None = '"one"'
    ranged: bool = True
    heeds_if_range: bool = True
    cuts: list[int] = field(default_factory=list)  # the next bodies end after so many bytes
    statuses: list[int] = field(default_factory=list)  # the next answers are these
    chunked: bool = False  # no Content-Length
    stall: threading.Event | None = None  # send one byte, then nothing until it is set
    requests: list[tuple[str | None, int]] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name, asked = self.path.rpartition("/")[2], self.headers["Range"]
            body, start = state.files.get(name), 0
            status = state.statuses.pop(0) if state.statuses else 200 if body is not None else 404
            current = self.headers["If-Range"] == state.etag or not state.heeds_if_range
            if status == 200 and body is not None and asked and state.ranged and current:
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
                status = 206 if start < len(body) else 416
            state.requests.append((asked, status))
            sent = (body or b"")[start:] if status in (200, 206) else b""
            self.send_response(status)
            if state.chunked:
                self.send_header("Transfer-Encoding", "chunked")
                sent = b"%x\r\n%b\r\n0\r\n\r\n" % (len(sent), sent)
            else:
                self.send_header("Content-Length", str(len(sent)))
            if state.etag:
                self.send_header("ETag", state.etag)
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{start + len(sent) - 1}/{start + len(sent)}")
            self.end_headers()
            if state.stall is not None:
                self.wfile.write(sent[:1])
                self.wfile.flush()
                state.stall.wait(10)
            else:
                self.wfile.write(sent[: state.cuts.pop(0)] if state.cuts else sent)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_port}/mirror"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield state
        if state.stall is not None:
            state.stall.set()
        server.shutdown()
        thread.join()


Get = Callable[..., list[Fetched]]


@pytest.fixture
def get(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Get:
    """Fetch a source of one file, ``sub/file.bin``, from the site, without waiting between the tries."""

    def get(checksum: str | None = GIT, begins: bytes = b"", **options: Any) -> list[Fetched]:
        remote = RemoteFile("https://example.org/far/away/file.bin", "sub/file.bin", checksum, begins)
        monkeypatch.setitem(SOURCES, "one", Source("One file", "Free.", (remote,)))
        settings: dict[str, Any] = {"base_url": site.url, "retries": 2, "timeout": 5.0, "sleep": lambda _: None}
        return fetch("one", tmp_path, **(settings | options))

    return get


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.part*"))


@pytest.mark.parametrize("expected", [GIT, SHA256])
def test_a_whole_download_is_verified_and_then_left_alone(site: Site, get: Get, tmp_path: Path, expected: str) -> None:
    (first,) = get(expected)
    assert first == Fetched(tmp_path / "sub/file.bin", len(BODY), expected, verified=True, already_present=False)
    assert first.path.read_bytes() == BODY
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "checksums.json").exists()

    (second,) = get(expected)
    assert second.already_present
    assert second.verified
    assert site.requests == [(None, 200)]


def test_a_present_file_that_is_not_the_published_one_is_downloaded_again(get: Get, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/file.bin").write_bytes(b"half a copy")
    assert not get()[0].already_present
    assert (tmp_path / "sub/file.bin").read_bytes() == BODY


def test_a_truncated_body_is_resumed_where_it_ended(site: Site, get: Get, tmp_path: Path) -> None:
    site.cuts = [1000, 2000]
    assert get()[0].path.read_bytes() == BODY
    assert site.requests == [(None, 200), ("bytes=1000-", 206), ("bytes=3000-", 206)]
    assert leftovers(tmp_path) == []


def test_a_body_without_a_length_is_known_to_be_truncated_by_its_chunks(site: Site, get: Get) -> None:
    site.chunked, site.ranged, site.cuts = True, False, [1000, len(BODY)]
    assert get(None)[0].checksum == SHA256
    assert len(site.requests) == 3


def test_giving_up_keeps_the_part_and_the_next_call_goes_on(site: Site, get: Get, tmp_path: Path) -> None:
    site.cuts, waits = [1000, 10, 10], list[float]()
    with pytest.raises(MinbertError, match=r"file\.bin: the connection ended after 1,020 of 512,000 .* are kept in"):
        get(sleep=waits.append)
    assert waits == [1.0, 2.0]
    assert not (tmp_path / "sub/file.bin").exists()
    assert (tmp_path / "sub/file.bin.part").read_bytes() == BODY[:1020]

    assert get()[0].path.read_bytes() == BODY
    assert site.requests[-1] == ("bytes=1020-", 206)


@pytest.mark.parametrize("etag", ['"one"', None, 'W/"weak"'])
def test_a_server_that_cannot_resume_makes_us_start_over(site: Site, get: Get, etag: str | None) -> None:
    site.ranged, site.etag, site.cuts = False, etag, [1000]
    assert get()[0].path.read_bytes() == BODY
    # Without a strong validator a Range would be a gamble, so none is sent.
    assert site.requests == [(None, 200), ("bytes=1000-" if etag == '"one"' else None, 200)]


@pytest.mark.parametrize("heeds", [True, False])
def test_a_file_that_changed_in_between_is_not_stitched_together(site: Site, get: Get, heeds: bool) -> None:
    site.cuts, old = [1000], BODY[::-1]
    site.files["file.bin"] = old
    with pytest.raises(MinbertError, match="ended after 1,000"):
        get(retries=0)
    site.files["file.bin"], site.etag, site.heeds_if_range = BODY, '"two"', heeds
    assert get(retries=0)[0].path.read_bytes() == BODY
    assert site.requests[1:] == ([("bytes=1000-", 200)] if heeds else [("bytes=1000-", 206), (None, 200)])


def test_a_part_that_is_already_whole_needs_only_the_check(site: Site, get: Get, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/file.bin.part").write_bytes(BODY)
    (tmp_path / "sub/file.bin.part.json").write_text(json.dumps({"validator": '"one"', "total": len(BODY)}))
    assert get()[0].verified
    assert site.requests == []


def test_a_part_longer_than_the_file_is_thrown_away(site: Site, get: Get, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/file.bin.part").write_bytes(BODY + b"more")
    (tmp_path / "sub/file.bin.part.json").write_text(json.dumps({"validator": '"one"', "total": None}))
    assert get()[0].path.read_bytes() == BODY
    assert [status for _, status in site.requests] == [416, 200]


def test_a_part_with_a_broken_sidecar_is_started_over(site: Site, get: Get, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/file.bin.part").write_bytes(b"xyz")
    (tmp_path / "sub/file.bin.part.json").write_text('{"valid')
    assert get()[0].verified
    assert site.requests == [(None, 200)]


def test_a_corrupted_file_is_not_put_in_place(site: Site, get: Get, tmp_path: Path) -> None:
    site.files["file.bin"] = BODY[:-1] + b"?"
    found = "git:" + hashlib.sha1(b"blob %d\0" % len(BODY) + BODY[:-1] + b"?").hexdigest()
    with pytest.raises(MinbertError) as caught:
        get()
    assert found in str(caught.value)
    assert f"expected {GIT}" in str(caught.value)
    assert not (tmp_path / "sub/file.bin").exists()
    assert leftovers(tmp_path) == []


def test_a_stalling_server_ends_in_an_error_within_seconds(site: Site, get: Get, tmp_path: Path) -> None:
    site.stall = threading.Event()
    began = time.monotonic()
    with pytest.raises(MinbertError, match=r"timed out.*2 times; 2 bytes are kept"):
        get(timeout=0.2, retries=1)
    assert time.monotonic() - began < 3
    assert (tmp_path / "sub/file.bin.part").read_bytes() == BODY[:2]


def test_a_missing_file_is_said_in_one_line_with_its_address_and_not_retried(site: Site, get: Get) -> None:
    del site.files["file.bin"]
    message = re.escape(f"file.bin: there is no such file (HTTP 404) at {site.url}/file.bin")
    with pytest.raises(MinbertError, match=f"^{message}$"):
        get()
    assert len(site.requests) == 1


def test_a_refusal_says_why(site: Site, get: Get) -> None:
    site.statuses = [403]
    with pytest.raises(MinbertError, match=r"the server refuses it: Forbidden \(HTTP 403\)"):
        get()


def test_a_busy_server_is_asked_again(site: Site, get: Get) -> None:
    site.statuses = [503, 429]
    assert get()[0].verified
    site.statuses = [500]
    with pytest.raises(MinbertError, match="the server answered 500"):
        get(SHA256.replace("sha256:", "sha256:0"), retries=0)


def test_nobody_listening_is_an_error_not_a_traceback(get: Get, tmp_path: Path) -> None:
    with pytest.raises(MinbertError, match=r"no answer \(.*refused.*3 times$"):
        get(base_url="http://127.0.0.1:1/")


def test_a_full_disk_keeps_the_part(site: Site, get: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(MinbertError, match="the disk is full; free some space"):
            get()
    assert (tmp_path / "sub/file.bin.part").exists()
    assert not (tmp_path / "sub/file.bin").exists()
    assert get()[0].verified


def test_a_folder_that_cannot_be_made_is_one_line(get: Get, tmp_path: Path) -> None:
    (tmp_path / "sub").write_text("a file where the folder should be")
    with pytest.raises(MinbertError, match="sub"):
        get()


def test_an_unverified_file_is_remembered_and_a_later_change_is_an_error(site: Site, get: Get, tmp_path: Path) -> None:
    screen = Console(file=io.StringIO(), width=40)
    (first,) = get(None, progress=screen)
    assert (first.checksum, first.verified) == (SHA256, False)
    assert isinstance(screen.file, io.StringIO)
    assert f"{SHA256} (unverified: no published checksum)" in screen.file.getvalue()
    assert json.loads((tmp_path / "checksums.json").read_text()) == {"sub/file.bin": SHA256}
    assert get(None)[0].already_present

    first.path.write_bytes(b"edited by hand")
    with pytest.raises(MinbertError, match=f"expected {SHA256}, as remembered"):
        get(None)
    assert first.path.read_bytes() == b"edited by hand"

    first.path.unlink()
    site.files["file.bin"] = b"replaced on the server"
    with pytest.raises(MinbertError, match=f"expected {SHA256}, as remembered .* has changed since the first download"):
        get(None)
    assert not first.path.exists()
    assert leftovers(tmp_path) == []

    (tmp_path / "checksums.json").unlink()
    assert get(None)[0].path.read_bytes() == b"replaced on the server"


def test_a_login_page_is_not_taken_for_data(site: Site, get: Get, tmp_path: Path) -> None:
    site.files["file.bin"] = b"<html>Please log in"
    with pytest.raises(MinbertError, match="begins with b'<h'; expected b'PK'"):
        get(None, b"PK")
    assert list(tmp_path.rglob("file*")) == []
    assert not (tmp_path / "checksums.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"sub/file.bin": 3}'])
def test_a_broken_memory_is_an_error(get: Get, tmp_path: Path, text: str) -> None:
    (tmp_path / "checksums.json").write_text(text)
    with pytest.raises(MinbertError, match=r"checksums\.json: expected a JSON object"):
        get(None)


def test_what_cannot_be_asked_for() -> None:
    with pytest.raises(MinbertError, match=r'no data source "cs224" \(did you mean "cs224n"\?\)'):
        fetch("cs224", Path())
    with pytest.raises(MinbertError, match="expected one that starts with http"):
        fetch("sst", Path(), base_url="file:///etc")


def test_a_terminal_gets_a_bar_and_a_log_file_only_lines(get: Get, tmp_path: Path) -> None:
    terminal, log = io.StringIO(), io.StringIO()
    get(progress=Console(file=terminal, force_terminal=True, width=120))
    get(progress=Console(file=log, width=120))
    assert "file.bin" in terminal.getvalue()
    assert "\x1b[" in terminal.getvalue()
    assert log.getvalue().splitlines()[0] == "One file. Free."
    assert log.getvalue().rstrip().endswith(f"512,000 bytes, {GIT} (verified), already here")
    assert "\x1b[" not in log.getvalue()


def test_the_git_kind_is_what_git_hash_object_prints(tmp_path: Path) -> None:
    (tmp_path / "hello").write_bytes(b"hello\n")
    assert checksum(tmp_path / "hello", "git") == "git:ce013625030ba8dba906f756967f9e9ca394464a"
    (tmp_path / "empty").touch()
    assert checksum(tmp_path / "empty", "git") == "git:e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"


def test_the_table_of_sources() -> None:
    assert list(SOURCES) == ["cs224n", "sst", "quora", "sts", "nli"]
    course = SOURCES["cs224n"].files
    assert len(course) == 12
    assert all(re.fullmatch("git:[0-9a-f]{40}", file.checksum or "") for file in course)
    paths = [file.path for source in SOURCES.values() for file in source.files]
    paths += [path for source in SOURCES.values() for path in source.unpacked]
    assert len(set(paths)) == len(paths)
    assert "never train on it" in SOURCES["sts"].warning
    assert "dev and test split" in SOURCES["quora"].warning


def make_zip(members: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return buffer.getvalue()


def make_tar(members: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


TREES = {
    "trees/train.txt": """(3 (2 It) (4 (3 works) (2 -LRB-)))
(2 (2 It) (2 (2 1\\/2) (2 Næs)))
(4 (3 works) (2 -LRB-))
(3 (4 (3 works) (2 -LRB-)) (2 !))
""",
    "trees/dev.txt": "(1 (2 No) (2 .))\n",
    "trees/test.txt": "(1 never read)\n",
    "__MACOSX/trees/._train.txt": "junk",
}


def test_sst_trees_become_phrases_and_are_unpacked_once(site: Site, tmp_path: Path) -> None:
    site.files["trainDevTestTrees_PTB.zip"] = make_zip(TREES)
    results = fetch("sst", tmp_path, base_url=site.url)
    assert [result.path.name for result in results] == [
        "trainDevTestTrees_PTB.zip",
        "phrases-train.tsv",
        "phrases-dev.tsv",
    ]
    assert results[1].path.read_text(encoding="utf-8").splitlines() == [
        "phrase\tlabel\tis_sentence",
        "It\t2\t0",
        "works\t3\t0",
        "(\t2\t0",
        "works (\t4\t1",  # the whole third tree, and a part of the first and last
        "It works (\t3\t1",
        "1/2\t2\t0",
        "Næs\t2\t0",
        "1/2 Næs\t2\t0",
        "It 1/2 Næs\t2\t1",
        "!\t2\t0",
        "works ( !\t3\t1",
    ]
    assert results[2].path.read_text() == "phrase\tlabel\tis_sentence\nNo\t2\t0\n.\t2\t0\nNo .\t1\t1\n"
    assert all(result.already_present for result in fetch("sst", tmp_path, base_url=site.url))


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: os.utime(path, (0, 0))], ids=["missing", "outdated"])
def test_what_is_missing_or_older_than_its_archive_is_unpacked_again(
    site: Site, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    site.files["trainDevTestTrees_PTB.zip"] = make_zip(TREES)
    phrases = fetch("sst", tmp_path, base_url=site.url)[2].path
    whole = phrases.read_bytes()
    spoil(phrases)
    assert [result.already_present for result in fetch("sst", tmp_path, base_url=site.url)] == [True, False, False]
    assert phrases.read_bytes() == whole


@pytest.mark.parametrize("line", ["(2 open", ")", "word", "()", "(2 (3 a) b))"])
def test_a_broken_tree_is_told_with_its_line(site: Site, tmp_path: Path, line: str) -> None:
    site.files["trainDevTestTrees_PTB.zip"] = make_zip(TREES | {"trees/train.txt": f"(2 fine)\n{line}\n"})
    with pytest.raises(MinbertError, match=r"train\.txt:2: expected a bracketed tree"):
        fetch("sst", tmp_path, base_url=site.url)
    assert not (tmp_path / "sst/phrases-train.tsv").exists()


words = st.text("abcé'.-", min_size=1, max_size=5)
trees = st.recursive(
    st.tuples(st.sampled_from("01234"), words),
    lambda children: st.tuples(st.sampled_from("01234"), st.lists(children, min_size=1, max_size=3)),
    max_leaves=12,
)


def draw_tree(tree: Any) -> str:
    label, below = tree
    return f"({label} {below if isinstance(below, str) else ' '.join(map(draw_tree, below))})"


def walk(tree: Any) -> Iterator[tuple[str, str]]:
    """The recursive definition that the loop in ``subtrees`` unrolls; the parent's phrase is the last one."""
    label, below = tree
    if isinstance(below, str):
        yield below, label
        return
    lists = [list(walk(child)) for child in below]
    for rows in lists:
        yield from rows
    yield " ".join(rows[-1][0] for rows in lists), label


@given(trees)
def test_subtrees_agree_with_the_recursive_definition(tree: Any) -> None:
    found = list(subtrees(draw_tree(tree)))
    assert [(phrase, label) for phrase, label, _ in found] == list(walk(tree))
    assert [whole for *_, whole in found] == [False] * (len(found) - 1) + [True]


def test_sts_is_unpacked_as_it_is(site: Site, tmp_path: Path) -> None:
    texts = {f"stsbenchmark/sts-{part}.csv": f"main\t{part}\t5.000\tå\tb\n" for part in ("train", "dev", "test")}
    site.files["Stsbenchmark.tar.gz"] = make_tar(texts | {"stsbenchmark/readme.txt": "read me"})
    screen = Console(file=io.StringIO(), width=40)
    fetch("sts", tmp_path, base_url=site.url, progress=screen)
    for name, text in texts.items():
        assert (tmp_path / "sts" / name).read_text(encoding="utf-8") == text
    assert isinstance(screen.file, io.StringIO)
    assert "never train on it" in screen.file.getvalue()


def snli_line(premise: str, hypothesis: str, label: str) -> str:
    return json.dumps({"sentence1": premise, "sentence2": hypothesis, "gold_label": label}) + "\n"


def test_snli_becomes_pairs_and_triplets(site: Site, tmp_path: Path) -> None:
    lines = [
        ("A dog\truns.", "An animal moves.", "entailment"),
        ("A dog\truns.", "It chases a cat.", "neutral"),
        ("A dog\truns.", "It sleeps.", "contradiction"),
        ("A dog\truns.", "Nobody agrees.", "-"),
        ("A man.", "A person.", "entailment"),
    ]
    train = "".join(snli_line(*line) for line in lines)
    site.files["snli_1.0.zip"] = make_zip({"snli_1.0/snli_1.0_train.jsonl": train, "snli_1.0/Icon\r": ""})
    _, pairs, triplets = fetch("nli", tmp_path, base_url=site.url)
    assert pairs.path.read_text().splitlines() == [
        "premise\thypothesis\tlabel\tsource",
        "A dog runs.\tAn animal moves.\tentailment\tsnli_train",
        "A dog runs.\tIt chases a cat.\tneutral\tsnli_train",
        "A dog runs.\tIt sleeps.\tcontradiction\tsnli_train",
        "A man.\tA person.\tentailment\tsnli_train",
    ]
    assert triplets.path.read_text().splitlines() == [
        "premise\tentailment\tcontradiction",
        "A dog runs.\tAn animal moves.\tIt sleeps.",
    ]


@pytest.mark.parametrize("bad", ["{", '{"sentence1": "a"}\n', snli_line("a", "b", "maybe")])
def test_a_broken_snli_line_leaves_no_output(site: Site, tmp_path: Path, bad: str) -> None:
    site.files["snli_1.0.zip"] = make_zip({"snli_1.0_train.jsonl": snli_line("a", "b", "neutral") + bad})
    with pytest.raises(MinbertError, match=r"snli_1\.0\.zip: cannot be unpacked"):
        fetch("nli", tmp_path, base_url=site.url)
    assert list(tmp_path.rglob("*.tsv*")) == []


@pytest.mark.parametrize("path", ["../evil.txt", "/tmp/evil.txt", "a/../../evil.txt", "..\\evil.txt", "C:\\evil.txt"])
@pytest.mark.parametrize("name", ["sst", "sts"])
def test_an_archive_with_a_path_out_of_it_is_refused(site: Site, tmp_path: Path, name: str, path: str) -> None:
    site.files["trainDevTestTrees_PTB.zip"] = make_zip(TREES | {path: "evil"})
    site.files["Stsbenchmark.tar.gz"] = make_tar({"sts-train.csv": "", "sts-dev.csv": "", path: "evil"})
    folder = tmp_path / "below" / "data"
    with pytest.raises(MinbertError, match=r"refused: the path .* leads out of the archive"):
        fetch(name, folder, base_url=site.url)
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} == {
        "checksums.json",
        Path(SOURCES[name].files[0].path).name,
    }


@pytest.mark.parametrize("name", ["sst", "sts"])
def test_an_archive_that_unpacks_to_too_much_is_refused(
    site: Site, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNPACKED_LIMIT", 100_000)
    site.files["trainDevTestTrees_PTB.zip"] = make_zip(TREES | {"zeros": "0" * 1_000_000})
    site.files["Stsbenchmark.tar.gz"] = make_tar({"sts-train.csv": "0" * 1_000_000})
    with pytest.raises(MinbertError, match="refused: it unpacks to more than 100,000 bytes"):
        fetch(name, tmp_path, base_url=site.url)


@pytest.mark.parametrize(
    ("name", "file", "body"),
    [
        ("sst", "trainDevTestTrees_PTB.zip", b"PK and nothing more"),
        ("sst", "trainDevTestTrees_PTB.zip", make_zip(TREES).replace(b"trees/dev", b"trees/dex")),
        ("sts", "Stsbenchmark.tar.gz", make_tar({"sts-train.csv": "text " * 9999})[:90]),
        ("sts", "Stsbenchmark.tar.gz", make_tar({"readme.txt": "no data"})),
    ],
    ids=["not a zip", "a member missing", "cut off", "no data inside"],
)
def test_a_damaged_archive_is_one_line(site: Site, tmp_path: Path, name: str, file: str, body: bytes) -> None:
    site.files[file] = body
    with pytest.raises(MinbertError, match=f"^[^\n]*{file}: [^\n]*$"):
        fetch(name, tmp_path, base_url=site.url)


def test_a_link_in_a_tar_does_not_reach_outside(site: Site, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        link = tarfile.TarInfo("stsbenchmark/sts-train.csv")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        archive.addfile(link)
    site.files["Stsbenchmark.tar.gz"] = buffer.getvalue()
    with pytest.raises(MinbertError, match="cannot be unpacked"):
        fetch("sts", tmp_path / "data", base_url=site.url)
