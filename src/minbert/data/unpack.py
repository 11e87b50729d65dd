"""Archives to our own files: the trees of SST to phrases, the lines of SNLI to pairs and triplets, STS as it is.

An archive comes from elsewhere, so it is looked at before it is read: no path that leads out of it, no more bytes than
a dataset has. What we make of it is written under names of our own, and appears whole or not at all.
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
import zipfile
import zlib
from contextlib import contextmanager
from itertools import groupby, product
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING

from minbert.atomic import written
from minbert.errors import MinbertError, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

UNPACKED_LIMIT = 2 << 30  # bytes an archive may declare in all; SNLI, the largest of ours, is about 1 GB
DAMAGED = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, RuntimeError, ValueError, LookupError)


def unpack(archive: Path, targets: list[Path], make: Callable[[Path, list[Path]], None]) -> bool:
    """``make`` the files from the archive when one is missing or, as make would, when one is older than it.

    Returns:
        Whether they were already there.
    """
    arrived = archive.stat().st_mtime_ns
    if all(target.exists() and target.stat().st_mtime_ns >= arrived for target in targets):
        return True
    try:
        make(archive, targets)
    except DAMAGED as error:
        why = " ".join(f"{type(error).__name__} {error}".split())
        raise MinbertError(f"{shown(archive)}: cannot be unpacked ({why})") from error
    return False


@contextmanager
def open_member(archive: Path, name: str) -> Iterator[IO[bytes]]:
    """The file called ``name``, in whichever folder of a zip or tar archive, as a stream."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            sizes = ((member.filename, member.file_size) for member in zipped.infolist())
            with zipped.open(find_member(archive, sizes, name)) as stream:
                yield stream
    else:
        with tarfile.open(archive) as tarred:
            sizes = ((member.name, member.size) for member in tarred)
            extracted = tarred.extractfile(find_member(archive, sizes, name))
            if extracted is None:
                raise MinbertError(f'{shown(archive)}: "{name}" is not a plain file')
            with extracted:
                yield extracted


def find_member(archive: Path, sizes: Iterable[tuple[str, int]], name: str) -> str:
    """The path of ``name`` in an archive that passes inspection: no path out of it, no more bytes than the limit.

    We write to names of our own and read no more than a member declares, so neither could do harm; but whoever packs
    such an archive should not be trusted with the rest of it.
    """
    wanted, total = None, 0
    for path, size in sizes:
        pure = PurePosixPath(path.replace("\\", "/"))
        if pure.is_absolute() or ".." in pure.parts or ":" in path:
            raise MinbertError(f"{shown(archive)}: refused: the path {path!r} leads out of the archive")
        total += size
        if total > UNPACKED_LIMIT:
            raise MinbertError(f"{shown(archive)}: refused: it unpacks to more than {UNPACKED_LIMIT:,} bytes")
        wanted = path if pure.name == name else wanted
    if wanted is None:
        raise MinbertError(f'{shown(archive)}: found no "{name}" in it')
    return wanted


def row(*cells: str) -> bytes:
    """A line of our TSV files, which know no quoting: every run of white space in a cell becomes one blank."""
    return "\t".join(" ".join(cell.split()) for cell in cells).encode() + b"\n"


def subtrees(tree: str) -> Iterator[tuple[str, str, bool]]:
    """(phrase, label, is it the whole tree) of a line like ``(3 (2 It) (4 works))``, children before parents."""
    escapes = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "-LCB-": "{", "-RCB-": "}"}
    nodes: list[list[str]] = []  # of the brackets still open: the label, then the words so far
    for token in re.findall(r"[()]|[^()\s]+", tree):
        if token == "(":
            nodes.append([])
        elif token == ")":
            label, *words = nodes.pop()
            yield " ".join(words), label, not nodes
            if nodes:
                nodes[-1] += words
        else:
            nodes[-1].append(escapes.get(token, token.replace("\\/", "/").replace("\\*", "*")))
    if nodes:
        raise ValueError(f"found {len(nodes)} open brackets at the end")


def unpack_sst(archive: Path, targets: list[Path]) -> None:
    for name, target in zip(("train.txt", "dev.txt"), targets, strict=True):
        phrases: dict[tuple[str, str], bool] = {}  # a phrase that is also a whole tree somewhere counts as a sentence
        with open_member(archive, name) as trees:
            for number, line in enumerate(trees, 1):
                try:
                    for phrase, label, whole in subtrees(line.decode()):
                        phrases[phrase, label] = whole or phrases.get((phrase, label), False)
                except (ValueError, IndexError) as error:
                    raise ValueError(f"{name}:{number}: expected a bracketed tree; {error}") from error
        with written(target) as file:
            file.write(row("phrase", "label", "is_sentence"))
            file.writelines(row(phrase, label, str(int(whole))) for (phrase, label), whole in phrases.items())


def unpack_sts(archive: Path, targets: list[Path]) -> None:
    for target in targets:
        with open_member(archive, target.name) as member, written(target) as file:
            shutil.copyfileobj(member, file)


def snli_rows(lines: Iterable[bytes]) -> Iterator[tuple[str, str, str]]:
    for line in lines:
        example = json.loads(line)
        if example["gold_label"] != "-":  # the annotators did not agree
            yield example["sentence1"], example["sentence2"], example["gold_label"]


def unpack_nli(archive: Path, targets: list[Path]) -> None:
    """Line by line, for the file is half a gigabyte; the hypotheses of one premise stand together in it."""
    with (
        open_member(archive, "snli_1.0_train.jsonl") as lines,
        written(targets[0]) as pairs,
        written(targets[1]) as triplets,
    ):
        pairs.write(row("premise", "hypothesis", "label", "source"))
        triplets.write(row("premise", "entailment", "contradiction"))
        for premise, group in groupby(snli_rows(lines), key=itemgetter(0)):
            hypotheses: dict[str, list[str]] = {"entailment": [], "neutral": [], "contradiction": []}
            for _, hypothesis, label in group:
                hypotheses[label].append(hypothesis)
                pairs.write(row(premise, hypothesis, label, "snli_train"))
            for pair in product(hypotheses["entailment"][:3], hypotheses["contradiction"][:3]):
                triplets.write(row(premise, *pair))
