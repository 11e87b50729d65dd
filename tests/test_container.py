"""The container's files, by the rules of hadolint that parsing can check; the rules are tried on bad files too."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from minbert import __version__

ROOT = Path(__file__).parent.parent
GOOD = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def instructions(text: str) -> list[tuple[str, str]]:
    """Names and arguments, continued lines joined, comments left out."""
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [
        (name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines()) if name
    ]


def complaints(text: str) -> list[str]:
    """What hadolint would say, with the numbers of its rules."""
    found: list[str] = []
    steps = instructions(text)
    stages = [rest.split()[2] for name, rest in steps if name == "FROM" and " AS " in rest]
    for name, rest in steps:
        if name == "FROM":
            image = rest.split()[0]
            if image not in stages and (":" not in image or image.endswith(":latest")):
                found.append("DL3006/DL3007: a base image without a version")
        if name == "RUN":
            if "apt-get install" in rest:
                if "--no-install-recommends" not in rest:
                    found.append("DL3015: apt-get without --no-install-recommends")
                if "rm -rf /var/lib/apt/lists" not in rest:
                    found.append("DL3009: the lists of apt stay")
                packages = rest.split("apt-get install")[1].split("&&")[0].split()
                if any("=" not in package for package in packages if not package.startswith("-")):
                    found.append("DL3008: a package of apt without a version")
            if re.search(r"\bapt (install|update)", rest):
                found.append("DL3027: apt instead of apt-get")
            if "pip install" in rest and "--no-cache-dir" not in rest:
                found.append("DL3042: pip with a cache")
            if "pip install" in rest and "--constraint" not in rest and "==" not in rest:
                found.append("DL3013: pip without versions")
            if "sudo" in rest.split():
                found.append("DL3004: sudo")
            if re.match(r"cd\b|.*&& cd ", rest):
                found.append("DL3003: cd instead of WORKDIR")
            if "useradd" in rest and "--no-log-init" not in rest and "-l " not in rest:
                found.append("DL3046: useradd without --no-log-init")
            if "|" in rest.replace("||", "") and not any(
                other == "SHELL" and "pipefail" in more for other, more in steps
            ):
                found.append("DL4006: a pipe without pipefail")
        if name == "ADD":
            found.append("DL3020: ADD instead of COPY")
        if name == "WORKDIR" and not rest.startswith("/"):
            found.append("DL3000: WORKDIR is relative")
        if name in ("CMD", "ENTRYPOINT"):
            try:
                json.loads(rest)
            except ValueError:
                found.append(f"DL3025: {name} is not a JSON list")
    last = steps[max(number for number, (name, _) in enumerate(steps) if name == "FROM") :]
    users = [rest.split(":")[0] for name, rest in last if name == "USER"]
    if not users or users[-1] in ("root", "0"):
        found.append("DL3002: runs as root")
    for once in ("CMD", "ENTRYPOINT", "HEALTHCHECK"):
        if sum(name == once for name, _ in last) != 1:
            found.append(f"DL4003/DL4004/DL3012: not one {once}")
    return found


def test_the_dockerfile_keeps_the_rules() -> None:
    assert complaints(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("FROM python:3.11-slim-bookworm\n", "FROM python:latest\n", "DL3007"),
        ("FROM python:3.11-slim-bookworm\n", "FROM python\n", "DL3006"),
        ("USER 10001:10001\n", "", "DL3002"),
        ("USER 10001:10001\n", "USER 0\n", "DL3002"),
        ("--no-cache-dir ", "", "DL3042"),
        ("--constraint constraints.txt ", "", "DL3013"),
        ("--no-log-init ", "", "DL3046"),
        ("HEALTHCHECK", "# HEALTHCHECK", "HEALTHCHECK"),
        ("COPY src src", "ADD src src", "DL3020"),
        ("WORKDIR /src", "WORKDIR src", "DL3000"),
        ("WORKDIR /src", "RUN apt-get update && apt-get install -y curl=8.0", "DL3015"),
        ("WORKDIR /src", "RUN apt-get install --no-install-recommends curl=8.0", "DL3009"),
        ("WORKDIR /src", "RUN apt-get install --no-install-recommends curl && rm -rf /var/lib/apt/lists/*", "DL3008"),
        ("WORKDIR /src", "RUN cd /src && ls", "DL3003"),
        ("WORKDIR /src", "RUN ls | sort", "DL4006"),
        ('ENTRYPOINT ["minbert"]', "ENTRYPOINT minbert", "DL3025"),
    ],
)
def test_a_dockerfile_that_breaks_a_rule_is_found(old: str, new: str, rule: str) -> None:
    assert old in GOOD
    assert any(rule in complaint for complaint in complaints(GOOD.replace(old, new)))


def test_the_image_serves_the_mounted_model_and_asks_for_its_health_where_it_listens() -> None:
    steps = instructions(GOOD)
    last = dict(steps)
    assert sum(name == "FROM" for name, _ in steps) == 2
    command = json.loads(last["CMD"])
    assert [*json.loads(last["ENTRYPOINT"]), *command[:4]] == ["minbert", "serve", "/model", "--host", "0.0.0.0"]
    port = command[command.index("--port") + 1]
    assert last["EXPOSE"] == port
    assert f"http://127.0.0.1:{port}/healthz" in last["HEALTHCHECK"]
    assert json.loads(last["VOLUME"]) == ["/model"]


def test_everything_that_is_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    copied = [rest.split()[:-1] for name, rest in instructions(GOOD) if name == "COPY" and "--from" not in rest]
    for name in (one for names in copied for one in names):
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, name


def test_what_the_package_is_built_from_is_copied() -> None:
    """hatchling reads these; without one of them the image cannot be built."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    copied = " ".join(rest for name, rest in instructions(GOOD) if name == "COPY")
    for name in (project["readme"], *project["license-files"], "pyproject.toml", "constraints.txt"):
        assert name in copied
    extras = re.search(r"ARG EXTRAS=(\S+)", GOOD)
    assert extras and set(extras[1].split(",")) <= set(project["optional-dependencies"])


def test_compose_mounts_the_model_read_only_and_grants_nothing() -> None:
    (service,) = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    assert any(volume.endswith(":/model:ro") for volume in service["volumes"])
    assert service["cap_drop"] == ["ALL"] and service["read_only"] is True
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["image"] == f"minbert:{__version__}"
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_the_version_in_the_comments_is_ours() -> None:
    assert set(re.findall(r"minbert:(\d[\w.]*)", GOOD)) == {__version__}


def test_no_secret_or_model_is_in_the_build() -> None:
    """Only tracked sources are let through."""
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip(f"git does not list the sources: {tracked.stderr.strip()}")
    assert not [name for name in tracked.stdout.split() if name.endswith((".safetensors", ".bin", ".onnx", ".env"))]
