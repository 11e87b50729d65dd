"""Fixtures that many tests share: where real encoders and real data lie, or why they do not."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from minbert.encoders import home
from minbert.training.stopping import ENDING

IDS = {"minilm": "minilm", "mpnet": "mpnet", "gte-small": "thenlper/gte-small"}  # as `minbert encoders get` takes them


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked gpu runs where there is one."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def encoder_folder() -> Callable[[str], Path]:
    """`encoder_folder("minilm")` is the folder of a real encoder; a test that needs one that is not here skips."""

    encoders = home() / "encoders"  # now: a test may give itself another home

    def find(name: str) -> Path:
        places = [encoders / IDS[name].replace("/", "--"), Path.home() / ".cache" / "minbert-weights" / name]
        for folder in places:
            if (folder / "config.json").exists():
                return folder
        pytest.skip(f"the encoder {name} is not on this machine: minbert encoders get {IDS[name]}")

    return find


@pytest.fixture(scope="session")
def minilm(encoder_folder: Callable[[str], Path]) -> Path:
    return encoder_folder("minilm")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole encoder in miniature with fixed random weights. Copy it before changing it."""
    import torch

    from minbert.model.encoder import Encoder, EncoderConfig
    from minbert.model.pretrained import save_encoder

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = ["a", "bird", "cat", "dog", "ran", "sat", "sang", "the", "and", "then", "##s", ".", "hello", "world"]
    folder = tmp_path_factory.mktemp("encoders") / "tiny"
    shape = {"width": 16, "layers": 2, "heads": 4, "feed_forward": 24, "positions": 32}
    generator = torch.Generator().manual_seed(0)
    encoder = Encoder(EncoderConfig(vocab_size=len(special + words), **shape), generator=generator)
    with torch.no_grad():
        for weight in encoder.parameters():  # no bias at 0 and no norm at 1, which would hide that one was forgotten
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.3)
    save_encoder(encoder, folder)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in special + words), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real datasets, which are not part of the project."""
    folder = Path(os.environ.get("SHARED", "../shared")) / "data"
    if not (folder / "cs224n").is_dir():
        pytest.skip(f"no real datasets at {folder}: set SHARED to the folder that holds data/cs224n")
    return folder


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT small enough to train in a second: 2 layers of 32, a vocabulary of the embedded sample's words."""
    import torch

    from minbert.config import SAMPLE
    from minbert.model.encoder import Encoder, EncoderConfig
    from minbert.model.pretrained import save_encoder

    folder = tmp_path_factory.mktemp("encoders") / "tiny"
    files = [path for path in sorted(SAMPLE.glob("*.tsv")) if not path.name.startswith("abbreviations")]
    words = re.findall(r"[a-z]+|[^\sa-z]", " ".join(path.read_text().lower() for path in files))
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(set(words))]
    config = EncoderConfig(vocab_size=len(vocabulary), width=32, layers=2, heads=4, feed_forward=64, positions=128)
    save_encoder(Encoder(config, generator=torch.Generator().manual_seed(1)), folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded sample cut down: 24 rows of each task to train on, 12 for dev."""
    from minbert.config import SAMPLE

    folder = tmp_path_factory.mktemp("small-data")
    for path in SAMPLE.glob("*.tsv"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / path.name).write_text("".join(lines[: 1 + (24 if "train" in path.name else 12)]), encoding="utf-8")
    return folder


@pytest.fixture
def ctrl_c_is_heard() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which ignores it, or under nohup, which ignores the end of
    the terminal; and nobody keeps it for themselves."""
    usual = {signal.SIGINT: signal.default_int_handler, **dict.fromkeys(ENDING, signal.SIG_DFL)}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    assert {number: signal.getsignal(number) for number in usual} == usual
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """On a busy machine two threads that wait for each other make small tensors a hundred times slower."""
    import torch

    torch.set_num_threads(1)
