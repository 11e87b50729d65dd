"""README.md of an export, the model's card: data and licences, scores, limits, the recipe, how to load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minbert.config import EMBEDDED
from minbert.tasks import BUILT_IN, Task

if TYPE_CHECKING:
    from minbert.model.manifest import Manifest

DATA = {
    "sst": (
        "Stanford Sentiment Treebank: sentences of film reviews, five classes",
        "no licence stated by its authors; made from Rotten Tomatoes reviews, used for research",
    ),
    "cfimdb": (
        "CFIMDB: film reviews and their counterfactual revisions, as the CS224N course hands them out",
        "research use; the reviews are IMDb's",
    ),
    "quora": (
        "Quora question pairs: questions of quora.com, duplicate or not",
        "Quora's terms: non-commercial research",
    ),
    "sts": (
        "Semantic textual similarity (SemEval 2012 to 2017): sentence pairs with a score from 0 to 5",
        "CC BY-SA 4.0 for most parts; the sources' own terms for the rest",
    ),
}
"""What the built-in tasks were trained on, and under which terms."""
OWN = "a sample written for this project", "Apache-2.0, as minbert"
UNKNOWN = "files of whoever trained it: {files}", "not known to minbert; ask whoever trained it"
SEEN = ("all-minilm", "all-mpnet")
"""Encoders that have met Quora questions, by a part of their names; `minilm` and `mpnet` are two of them."""


@dataclass(frozen=True)
class Card:
    """What the model's folder does not say of itself."""

    name: str = "model"
    recipe: str = ""
    """The resolved recipe, as TOML."""


def write_card(
    folder: Path,
    form: str,
    manifest: Manifest,
    card: Card,
    losses: Mapping[str, Mapping[str, Any]],
    notes: Sequence[str],
) -> None:
    (folder / "README.md").write_text(render(form, manifest, card, losses, notes), encoding="utf-8")


def render(
    form: str, manifest: Manifest, card: Card, losses: Mapping[str, Mapping[str, Any]], notes: Sequence[str]
) -> str:
    """The whole page, with the table of metadata that model hubs read."""
    parts = [
        _front(form),
        f"# {card.name}",
        f"One encoder ({encoder_name(manifest.model.encoder)}) with a small head for each of: {', '.join(_names(manifest.tasks))}. "
        f"Trained and exported by minbert {manifest.version}, recipe `{manifest.recipe}`.",
        "## How to load it",
        LOADING[form],
        *(["## What this form leaves out", "\n".join(f"- {note}" for note in notes)] if notes else []),
        "## Scores",
        _scores(manifest),
        *(["## What int8 costs", _losses(losses)] if losses else []),
        "## Data",
        _data(manifest),
        "## Limits",
        "\n".join(f"- {line}" for line in known_limits(manifest)),
    ]
    if card.recipe:
        parts += ["## Recipe", f"```toml\n{card.recipe.strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def _front(form: str) -> str:
    library = form if form in ("sentence-transformers", "transformers") else form.split("-")[0]
    tag = {"sentence-transformers": "sentence-similarity", "transformers": "feature-extraction"}.get(form)
    lines = ["language: en", f"library_name: {library}", *([f"pipeline_tag: {tag}"] if tag else []), "tags: [minbert]"]
    return "---\n" + "\n".join(lines) + "\n---"


def encoder_name(name: str) -> str:
    """A folder of someone's machine by its last part."""
    return Path(name).name if Path(name).is_absolute() else name


def _names(tasks: Sequence[Task]) -> list[str]:
    return [f"{task.name} ({task.kind})" for task in tasks]


@dataclass(frozen=True)
class Score:
    """A task's main metric on dev, with its 95% interval; None where it is undefined."""

    task: str
    metric: str
    value: float | None
    low: float | None
    high: float | None
    rows: int


def dev_scores(manifest: Manifest) -> list[Score]:
    """Those that the model's folder holds; none of a model that was never evaluated."""
    found = []
    for name, summary in manifest.scores.get("dev", {}).items():
        main = summary["metrics"][summary["metric"]]
        found.append(Score(name, summary["metric"], main["value"], main["low"], main["high"], summary["rows"]))
    return found


def _scores(manifest: Manifest) -> str:
    rows = [
        f"| {one.task} | {one.metric} | {_number(one.value)} | {_number(one.low)} to {_number(one.high)} | {one.rows} |"
        for one in dev_scores(manifest)
    ]
    if not rows:
        return "None are recorded in this model's folder."
    head = "| task | metric | dev | 95% interval | rows |\n|---|---|---|---|---|\n"
    more = "\n\nThe model, its temperatures and its thresholds were chosen on dev, so these figures flatter a little."
    return head + "\n".join(rows) + more


def _losses(losses: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [
        f"| {name} | {loss['rows']:,} of {loss['of']:,} | {loss['metric']} | {_number(loss['fp32'])} | {_number(loss['int8'])} | {loss['difference']:+.4f} | "
        f"{loss['low']:+.4f} to {loss['high']:+.4f} |"
        for name, loss in losses.items()
    ]
    head = "| task | dev rows | metric | fp32 | int8 | difference | 95% interval |\n|---|---|---|---|---|---|---|\n"
    return head + "\n".join(rows)


def _number(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.4f}"


def _data(manifest: Manifest) -> str:
    rows = [f"| {task} | {about} | {terms} |" for task, about, terms in data_sources(manifest)]
    head = "| task | data | terms |\n|---|---|---|\n"
    return head + "\n".join(rows) + "\n\nTerms of data may bind what is made of it. The encoder has terms of its own."


def data_sources(manifest: Manifest) -> list[tuple[str, str, str]]:
    """Each task's name, its data, and their terms."""
    return [(task.name, *_source(task, manifest.data)) for task in manifest.tasks]


def _source(task: Task, data: str) -> tuple[str, str]:
    """By the files, not by the name alone: someone's own data may be a task named sst."""
    if data == EMBEDDED or (task.train and all(name.startswith("embedded/") for name in task.train)):
        return OWN
    for name, known in BUILT_IN.items():
        if set(task.train) & set(known.train):
            return DATA[name]
    about, terms = UNKNOWN
    return about.format(files=", ".join(task.train) or "none named"), terms


def known_limits(manifest: Manifest) -> list[str]:
    """What a reader should know before trusting an answer."""
    limits = [
        "English only: vocabulary and training data are English.",
        "It knows the kinds of text it was trained on (see Data); others are answered too, less well, and as surely.",
        f"Inputs are cut after {manifest.model.max_tokens} tokens.",
        "Probabilities were calibrated on dev, if at all; on other texts they may not mean what they say.",
        "It repeats what its data say of people and groups. Not for decisions about persons.",
    ]
    encoder = manifest.model.encoder.lower()
    if (encoder in ("minilm", "mpnet") or any(name in encoder for name in SEEN)) and any(
        "quora" in task.name or _is_quora(task) for task in manifest.tasks
    ):
        limits.append(
            "Its encoder is of the all-MiniLM or all-mpnet family, whose training data held Quora questions: scores on "
            "Quora are not those of a model that has never seen them."
        )
    return limits


def _is_quora(task: Task) -> bool:
    return bool(set(task.train) & set(BUILT_IN["quora"].train))


_ONNX = """`model.onnx` holds the encoder, the pooling and all heads; `tokenizer.json` cuts and pads; `manifest.json` says which
sequences each task reads and what its numbers mean.

```python
import numpy as np, onnxruntime, tokenizers

tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
session = onnxruntime.InferenceSession("model.onnx")
batch = tokenizer.encode_batch(["What a lovely day."])
columns = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
feed = {name: np.array([getattr(row, key) for row in batch], np.int64) for name, key in columns.items()}
outputs = dict(zip([output.name for output in session.get_outputs()], session.run(None, feed)))
```

Or `minbert.load(FOLDER).predict(["What a lovely day."])`."""
LOADING = {
    "onnx": _ONNX,
    "onnx-int8": _ONNX,
    "torch": """```python
import torch, tokenizers

tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
model = torch.export.load("model.pt2").module()
batch = tokenizer.encode_batch(["What a lovely day."])
columns = [torch.tensor([getattr(row, name) for row in batch]) for name in ("ids", "attention_mask", "type_ids")]
outputs = model(*columns, torch.zeros(0, 2, dtype=torch.long))  # the last: pairs of sequences that tasks compare
```

`manifest.json` says which sequences each task reads and what its numbers mean.""",
    "sentence-transformers": """```python
from sentence_transformers import SentenceTransformer

vectors = SentenceTransformer("FOLDER").encode(["What a lovely day."])
```""",
    "transformers": """```python
from transformers import AutoModel, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("FOLDER"), AutoModel.from_pretrained("FOLDER")
hidden = model(**tokenizer(["What a lovely day."], return_tensors="pt")).last_hidden_state
```

Where there is a folder `classifiers/TASK`, `AutoModelForSequenceClassification` loads it; the softmax of its logits are the
probabilities, the temperature included.""",
}
