"""Public data, downloaded once and checked: ``minbert data fetch cs224n|sst|quora|sts|nli``.

A source is a row of ``SOURCES``, at the end. Its files arrive in ``NAME.part``, go on from there after an interruption,
and take their name only when they are whole and their checksum is right. Where nobody publishes a checksum, the first
download is reported as unverified and remembered in ``checksums.json``, so that a later change is noticed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import HTTPError
from urllib.request import OpenerDirector, Request, build_opener

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from minbert.atomic import sync, written
from minbert.data.unpack import unpack, unpack_nli, unpack_sst, unpack_sts
from minbert.errors import MinbertError, shown, suggest

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

CHUNK = 1 << 18


@dataclass(frozen=True)
class RemoteFile:
    url: str
    path: str  # below the data folder
    checksum: str | None = None  # "git:..." or "sha256:..."
    begins: bytes = b""  # how the file must start: tells it from a login page when no checksum is known


@dataclass(frozen=True)
class Source:
    title: str
    licence: str
    files: tuple[RemoteFile, ...]
    warning: str = ""
    unpack: Callable[[Path, list[Path]], None] | None = None  # (the one archive, where each of ``unpacked`` goes)
    unpacked: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fetched:
    path: Path
    bytes: int
    checksum: str
    verified: bool  # against a published checksum; of an unpacked file: its archive was
    already_present: bool

    def __str__(self) -> str:
        known = "verified" if self.verified else "unverified: no published checksum"
        here = ", already here" if self.already_present else ""
        return f"{shown(self.path)}: {self.bytes:,} bytes, {self.checksum} ({known}){here}"


def fetch(
    name: str,
    folder: Path,
    *,
    base_url: str | None = None,
    progress: Console | None = None,
    opener: OpenerDirector | None = None,
    timeout: float = 20.0,
    retries: int = 4,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Fetched]:
    """Bring the files of one source into ``folder``, unpacked; those already there and right are left alone.

    ``base_url`` is a mirror's folder: it takes the place of each address up to the file's name. ``timeout`` bounds, in
    seconds, the connection and every wait for more bytes. ``progress`` is the console to tell what is happening.
    """
    if name not in SOURCES:
        raise MinbertError(f'no data source "{name}"{suggest(name, SOURCES)}; expected one of {", ".join(SOURCES)}')
    if base_url is not None and not base_url.startswith(("http://", "https://")):
        raise MinbertError(f'the base address is "{base_url}"; expected one that starts with http:// or https://')
    source, results = SOURCES[name], list[Fetched]()

    def say(line: object) -> None:
        if progress is not None:
            progress.print(str(line), markup=False, highlight=False, soft_wrap=True)

    say(f"{source.title}. {source.licence}" + (source.warning and f" Warning: {source.warning}"))
    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    hidden = progress is None or not progress.is_terminal
    label = TextColumn("{task.description}", markup=False)
    try:
        with Progress(label, *columns, console=progress, transient=True, disable=hidden) as bars:
            downloader = Downloader(bars, opener or build_opener(), timeout, retries, sleep)
            for remote in source.files:
                url = f"{base_url.rstrip('/')}/{remote.url.rpartition('/')[2]}" if base_url else remote.url
                results.append(obtain(remote, url, folder, downloader))
                say(results[-1])
        if source.unpack is not None:
            archive, targets = results[0], [folder / path for path in source.unpacked]
            present = unpack(archive.path, targets, source.unpack)
            for target in targets:
                size = target.stat().st_size
                results.append(Fetched(target, size, checksum(target), archive.verified, present))
                say(results[-1])
    except OSError as error:
        where, why = shown(Path(error.filename or folder)), error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = "the disk is full; free some space and run the same command again: it goes on from what is there"
        raise MinbertError(f"{where}: {why}") from error
    return results


def obtain(remote: RemoteFile, url: str, folder: Path, downloader: Downloader) -> Fetched:
    """One file: left alone when it is there and right, otherwise downloaded, checked and put in place."""
    target, memory = folder / remote.path, folder / "checksums.json"
    part, remembered, found = target.with_name(target.name + ".part"), recall_checksums(memory), None
    try:
        found = check(target, remote, remembered, shown(target)) if target.exists() else None
    except MinbertError:
        if remote.checksum is None:  # otherwise it is not the published file: download that
            raise
    present = found is not None
    if found is None:
        part.parent.mkdir(parents=True, exist_ok=True)
        downloader.download(url, part)
        try:
            found = check(part, remote, remembered, url)
        except MinbertError:
            Partial(part).forget()  # whole, but not what it should be: nothing to go on from
            raise
        part.replace(target)
        sync(target.parent)
        Partial(part).forget()
    if remote.checksum is None and remote.path not in remembered:
        with written(memory) as file:
            file.write(json.dumps({**remembered, remote.path: found}, indent=2, sort_keys=True).encode() + b"\n")
    return Fetched(target, target.stat().st_size, found, remote.checksum is not None, present)


# Downloading


class NetworkError(Exception):
    """The network let us down in a way that may pass: try again from where we are."""


@dataclass(frozen=True)
class Partial:
    """What is known of the bytes in ``NAME.part``, kept beside it in ``NAME.part.json``."""

    part: Path
    validator: str | None = None  # the server's name for this version of the file; without one there is no resuming
    total: int | None = None

    @property
    def sidecar(self) -> Path:
        return self.part.with_name(self.part.name + ".json")

    @property
    def size(self) -> int:
        return self.part.stat().st_size if self.validator and self.part.exists() else 0

    def recall(self) -> Partial:
        try:
            return Partial(self.part, **json.loads(self.sidecar.read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return self

    def remember(self) -> None:
        self.sidecar.write_text(json.dumps({"validator": self.validator, "total": self.total}), encoding="utf-8")

    def forget(self) -> None:
        self.part.unlink(missing_ok=True)
        self.sidecar.unlink(missing_ok=True)


@dataclass(frozen=True)
class Downloader:
    bars: Progress
    opener: OpenerDirector
    timeout: float
    retries: int
    sleep: Callable[[float], None]

    def download(self, url: str, part: Path) -> None:
        """Fill ``part`` with everything at ``url``; on giving up, it keeps what has come for the next time."""
        bar, reason = self.bars.add_task(part.stem, total=None), NetworkError()
        for attempt in range(self.retries + 1):
            if attempt:
                self.sleep(min(2.0 ** (attempt - 1), 30.0))
            try:
                self.go_on(url, part, lambda done, total: self.bars.update(bar, completed=done, total=total))
                return self.bars.remove_task(bar)
            except NetworkError as error:
                reason = error
        size = Partial(part).recall().size
        kept = f"; {size:,} bytes are kept in {shown(part)}: run the same command again to go on" if size else ""
        raise MinbertError(f"{part.stem}: {reason} at {url}, {self.retries + 1} times{kept}") from reason

    def go_on(self, url: str, part: Path, report: Callable[[int, int | None], None]) -> None:
        """One try: append what is missing, or start over where the server cannot or must not continue."""
        partial = Partial(part).recall()
        done = partial.size
        if done and done == partial.total:  # whole: the last run ended between the download and the check
            return
        with self.request(url, done, partial.validator) as response:
            done = done if response.status == 206 else 0
            total = None if response.length is None else done + response.length
            with part.open("ab" if done else "wb") as file:  # emptied before the new validator is written down
                Partial(part, validator(response), total).remember()
                report(done, total)
                while chunk := read_some(response):
                    done += file.write(chunk)
                    report(done, total)
                file.flush()
                os.fsync(file.fileno())
        if total is not None and done < total:
            raise NetworkError(f"the connection ended after {done:,} of {total:,} bytes")

    def request(self, url: str, done: int, known: str | None) -> HTTPResponse:
        """Ask for the bytes from ``done`` on, or for all of them when the file there is no longer the ``known`` one."""
        headers = {"User-Agent": "minbert"}
        if done and known:
            headers |= {"Range": f"bytes={done}-", "If-Range": known}
        try:
            response: HTTPResponse = self.opener.open(Request(url, headers=headers), timeout=self.timeout)
        except HTTPError as error:
            error.close()
            if error.code == 416 and done:
                return self.request(url, 0, None)
            if error.code >= 500 or error.code in (408, 429):
                raise NetworkError(f"the server answered {error.code} {error.reason}") from error
            why = "there is no such file" if error.code in (404, 410) else f"the server refuses it: {error.reason}"
            raise MinbertError(f"{url.rpartition('/')[2]}: {why} (HTTP {error.code}) at {url}") from error
        except (OSError, HTTPException) as error:
            raise NetworkError(f"no answer ({getattr(error, 'reason', None) or error})") from error
        if done and response.status == 206:  # some servers honour Range and ignore If-Range
            starts = response.headers.get("Content-Range", "").startswith(f"bytes {done}-")
            if not starts or validator(response) not in (None, known):
                response.close()
                return self.request(url, 0, None)
        return response


def validator(response: HTTPResponse) -> str | None:
    """The strong ETag, else the date: what If-Range may carry (RFC 9110 forbids weak ETags there)."""
    etag: str | None = response.headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")


def read_some(response: HTTPResponse) -> bytes:
    try:
        return response.read1(CHUNK)  # what has come, so that a stall loses nothing already received
    except (OSError, HTTPException) as error:
        raise NetworkError(f"the connection broke off ({error})") from error


# Checking


def checksum(path: Path, kind: str = "sha256") -> str:
    """``kind:value``; the ``git`` kind is what ``git hash-object`` prints, a SHA-1 of a header and the bytes."""
    digest = hashlib.sha256()
    if kind == "git":
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return f"{kind}:{digest.hexdigest()}"


def check(path: Path, remote: RemoteFile, remembered: dict[str, str], address: str) -> str:
    """The checksum of ``path``, once it is known to be the published one, or the one of the first download."""
    with path.open("rb") as file:
        begins = file.read(len(remote.begins))
    if begins != remote.begins:
        raise MinbertError(f"{remote.path}: {address} begins with {begins!r}; expected {remote.begins!r}")
    expected = remote.checksum or remembered.get(remote.path)
    found = checksum(path, expected.partition(":")[0] if expected else "sha256")
    if expected not in (None, found):
        message = f"{remote.path}: the checksum of {address} is {found}; expected {expected}"
        if remote.checksum is None:
            message += ", as remembered in checksums.json: it has changed since the first download (to accept it, "
            message += "delete the file and its entry there)"
        raise MinbertError(message)
    return found


def recall_checksums(memory: Path) -> dict[str, str]:
    try:
        known = json.loads(memory.read_bytes()) if memory.exists() else {}
        return {path: value.strip() for path, value in known.items()}
    except (ValueError, AttributeError) as error:
        raise MinbertError(f'{shown(memory)}: expected a JSON object of "file": "sha256:..."; {error}') from error


# The sources

STANFORD = "https://nlp.stanford.edu"
COURSE = "https://raw.githubusercontent.com/gpoesia/minbert-default-final-project/main/data"
COURSE_BLOBS = {
    "quora-train.csv": "a3b5546f6a0e65b60a328a5d294d1038f5bed1da",
    "quora-dev.csv": "de7cfa32428fd470b93f778fccc45a619e01336f",
    "quora-test-student.csv": "f257ef00558555afb50819578a58205732b16354",
    "ids-sst-train.csv": "9cb7333cb1dae49c2bd2a4b56a24882a6e8704b5",
    "ids-sst-dev.csv": "3171aa629a340809d2db4a50df8f6e5ec9420ab0",
    "ids-sst-test-student.csv": "bbd2313758825f86e24416d6aad64cd93370cf7a",
    "sts-train.csv": "12b17760e7795fee35aeeabc290d5651de02622a",
    "sts-dev.csv": "9392860e584717976b8d817cc40c9e6ceeec27e0",
    "sts-test-student.csv": "25f0cf8fafdd1f82b9e2bb460c708af34341ce60",
    "ids-cfimdb-train.csv": "cd57bcbd2f7214ea6dd1783d3e885d324b1f478d",
    "ids-cfimdb-dev.csv": "8a0f5dcf3d40189b96c801a12cd79bf8003e61de",
    "ids-cfimdb-test-student.csv": "1e789c709b3ca0511f027a309b6d8bd21cde41b2",
}


def unverified(url: str, subfolder: str, begins: bytes) -> tuple[RemoteFile]:
    return (RemoteFile(url, f"{subfolder}/{url.rpartition('/')[2]}", begins=begins),)


SOURCES = {
    "cs224n": Source(
        "The CS 224N default project's own files: SST-5, CFIMDB, STS and Quora, in the course's split",
        "Licence: research use, the Quora pairs non-commercial.",
        tuple(RemoteFile(f"{COURSE}/{name}", f"cs224n/{name}", f"git:{blob}") for name, blob in COURSE_BLOBS.items()),
    ),
    "sst": Source(
        "Stanford Sentiment Treebank: every labelled phrase of the train and dev trees",
        "Licence: research use.",
        unverified(f"{STANFORD}/sentiment/trainDevTestTrees_PTB.zip", "sst", b"PK"),
        unpack=unpack_sst,
        unpacked=("sst/phrases-train.tsv", "sst/phrases-dev.tsv"),
    ),
    "quora": Source(
        "Quora question pairs, as first released",
        "Licence: non-commercial research use.",
        unverified("http://qim.fs.quoracdn.net/quora_duplicate_questions.tsv", "quora", b"id\tqid1\tqid2\t"),
        warning="these pairs overlap the course's dev and test split: leave those out before you train on them.",
    ),
    "sts": Source(
        "STS benchmark, in the official split",
        "Licence: CC BY-SA.",
        unverified("http://ixa2.si.ehu.eus/stswiki/images/4/48/Stsbenchmark.tar.gz", "sts", b"\x1f\x8b"),
        warning="the course re-split it, so its train file holds the course's dev and test pairs: never train on it.",
        unpack=unpack_sts,
        unpacked=tuple(f"sts/stsbenchmark/sts-{part}.csv" for part in ("train", "dev", "test")),
    ),
    "nli": Source(
        "SNLI 1.0: premise, hypothesis, label; and (premise, entailment, contradiction)",
        "Licence: CC BY-SA 4.0.",
        unverified(f"{STANFORD}/projects/snli/snli_1.0.zip", "nli", b"PK"),
        unpack=unpack_nli,
        unpacked=("nli/nli-pairs.tsv", "nli/nli-triplets.tsv"),
    ),
}
