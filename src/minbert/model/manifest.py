"""What a model folder says of itself, its minbert.json: tasks, decisions, scores, where it came from. No torch.

manifest = read_manifest(Path("runs/sample/model"))
manifest.tasks, manifest.decisions["sst"].temperature
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minbert import __version__
from minbert.atomic import settle, write_text
from minbert.config import ModelConfig
from minbert.errors import MinbertError, shown
from minbert.model.answers import Decision
from minbert.recipes import parse_recipe, revisions
from minbert.tasks import REVISIONS, Task

if TYPE_CHECKING:
    from minbert.model.encoder import Pooling

FORMAT = 1
MANIFEST = "minbert.json"


@dataclass(frozen=True)
class Manifest:
    """What a model folder says of itself."""

    tasks: tuple[Task, ...]
    model: ModelConfig
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    """Temperature and threshold of each task, chosen on dev."""
    scores: Mapping[str, Any] = field(default_factory=dict)
    """Dev scores with intervals."""
    recipe: str = ""
    """The recipe's name."""
    data: str = ""
    """Where the recipe said its files are; "embedded" is the sample inside the package."""
    version: str = __version__
    members: tuple[str, ...] = ()
    """Of an ensemble: the folders of its models, below its own. `tasks` and `model` are then those of the first."""

    @property
    def poolings(self) -> dict[str, Pooling]:
        """How each task's sequences become vectors."""
        own = self.model.pooling
        return {task.name: "tokens" if task.is_masked else task.pooling or own for task in self.tasks}


def update_manifest(folder: Path, manifest: Manifest) -> None:
    write_text(folder / MANIFEST, to_json(manifest))


def read_manifest(folder: Path) -> Manifest:
    settle(folder)
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        inner = folder / "model"
        hint = f" (did you mean {shown(inner)}?)" if (inner / MANIFEST).exists() else ""
        raise MinbertError(f"{shown(path)}: no such file{hint}; expected a model folder, such as RUN/model") from None
    except (ValueError, OSError) as error:
        raise MinbertError(f"{shown(path)}: not readable JSON ({error})") from None
    manifest = from_plain(raw, path)
    _check_revisions(manifest, raw.get("revisions", {}), path)
    return manifest


def _check_revisions(manifest: Manifest, known: Mapping[str, int], path: Path) -> None:
    """A common layer that is first in each branch is before the difference of two orders; once it was behind it. Exports
    compute as they did when they were written, whatever we do now."""
    shared = manifest.model.common_tasks or [task.name for task in manifest.tasks]
    inside = [task.head for task in manifest.tasks if manifest.model.common_layer and task.name in shared]
    heads = sorted({"dph", "dpha"} & {*inside})
    if heads and known.get("common layer", 1) < REVISIONS["common layer"]:
        raise MinbertError(
            f"{shown(path)}: a common layer behind {' and '.join(heads)}, as an earlier minbert "
            "had it; expected it before: minbert train RECIPE makes a new model"
        )


def from_plain(raw: Any, path: Path) -> Manifest:
    """The manifest that `as_plain` wrote into a file."""
    if not isinstance(raw, dict):
        raise MinbertError(f"{shown(path)}: a {type(raw).__name__}; expected an object")
    version = raw.get("format")
    if version != FORMAT:
        newer = isinstance(version, int) and version > FORMAT
        hint = "pip install -U minbert" if newer else "minbert train RECIPE makes a new one"
        raise MinbertError(f"{shown(path)}: format {version!r}; this minbert reads format {FORMAT}: {hint}")
    try:
        recipe = parse_recipe({"tasks": raw["tasks"], "model": raw["model"]}, shown(path))
        decisions = {name: Decision(**decision) for name, decision in raw["decisions"].items()}
        members = tuple(_within(name, path) for name in raw.get("members", ()))
        return Manifest(
            recipe.tasks, recipe.model, decisions, raw["scores"], raw["recipe"], raw["data"], raw["version"], members
        )
    except KeyError as error:
        raise MinbertError(f"{shown(path)}: no {error}; expected what save_model writes") from None
    except (TypeError, AttributeError) as error:
        raise MinbertError(f"{shown(path)}: {error}; expected what save_model writes") from None


def _within(name: Any, path: Path) -> str:
    """A member's folder, which lies below the ensemble's."""
    if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise MinbertError(f"{shown(path)}: members holds {name!r}; expected folders below, such as members/1")
    return name


def as_plain(manifest: Manifest) -> dict[str, Any]:
    """What minbert.json holds."""

    def row(table: Any, *leave: str) -> dict[str, Any]:
        return {key: value for key, value in asdict(table).items() if value is not None and key not in leave}

    content = {
        "format": FORMAT,
        "version": manifest.version,
        "recipe": manifest.recipe,
        "data": manifest.data,
        "tasks": {task.name: row(task, "name") for task in manifest.tasks},
        "model": row(manifest.model),
        "revisions": revisions(manifest),
        "decisions": {name: asdict(decision) for name, decision in manifest.decisions.items()},
        "scores": manifest.scores,
    }
    if manifest.members:
        content["members"] = list(manifest.members)
    return content


def to_json(manifest: Manifest) -> str:
    return json.dumps(as_plain(manifest), indent=2, ensure_ascii=False) + "\n"


def check_members(manifests: Sequence[Manifest], names: Sequence[str] | None = None) -> None:
    """Models can be an ensemble if their tasks ask the same of the same texts; all the rest may differ."""
    names = names or [f"member {number}" for number in range(1, len(manifests) + 1)]
    if not manifests:
        raise MinbertError("an ensemble of no models; expected one or more")
    known = {task.name: task for task in manifests[0].tasks}
    for task in known.values():
        if not task.has_label:
            raise MinbertError(
                f"{names[0]}: {task.name} is a {task.kind} task, which has no answers to take the mean of"
            )
    for manifest, name in zip(manifests[1:], names[1:], strict=True):
        found = {task.name: task for task in manifest.tasks}
        if set(found) != set(known):
            raise MinbertError(
                f"{name} has the tasks {', '.join(sorted(found))}; expected those of {names[0]}: {', '.join(sorted(known))}"
            )
        for task in found.values():
            expected, given = _asked(known[task.name]), _asked(task)
            for what, value in given.items():
                if value != expected[what]:
                    raise MinbertError(
                        f"{name}: the {what} of {task.name} is {value}; expected {expected[what]}, as {names[0]} has it"
                    )


def _asked(task: Task) -> dict[str, str]:
    """What a task asks of its texts, whatever model answers."""
    return {
        "kind": task.kind,
        "list of classes": ", ".join(task.classes),
        "scale": "" if task.is_classification else f"{task.low} to {task.high}",
        "normalise": str(task.normalise).lower(),
    }
