"""Folders that transformers and sentence-transformers load as they are.

transformers: the encoder at the top, for AutoModel; and in classifiers/TASK/ a whole model for
AutoModelForSequenceClassification, of each task that its architecture can hold exactly: a linear head over the first token
through a layer with tanh, which is BERT's pooler, or our common layer.

sentence-transformers: the encoder and its pooling, as modules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from minbert.delivery.predictor import Predictor
from minbert.errors import MinbertError
from minbert.model.answers import Decision
from minbert.model.heads import Linear
from minbert.model.pretrained import save_encoder
from minbert.tasks import Task

POOLING_MODES = {"cls": "cls_token", "pooler": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}


def write_encoder(predictor: Predictor, folder: Path) -> None:
    """config.json, model.safetensors and the tokenizer, which cuts where the model does."""
    save_encoder(predictor.model.encoder, folder)
    predictor.tokenizer.save(folder)
    path = folder / "tokenizer_config.json"
    _write(path, json.loads(path.read_text(encoding="utf-8")) | {"model_max_length": predictor.max_tokens})


# --- transformers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Classifier:
    """A task as transformers' classification models have it."""

    task: Task
    dense: tuple[Tensor, Tensor]
    """Weight and bias of the layer before the tanh."""
    out: tuple[Tensor, Tensor]
    """Of the layer after it, divided by the temperature."""


def as_classifier(predictor: Predictor, task: Task) -> Classifier | str:
    """The task's layers, or why there is no such model."""
    model, head = predictor.model, predictor.model.heads[task.name]
    how, common = model.poolings[task.name], task.name in model.common_tasks
    if task.head != "linear" or len(task.answer_views) != 1 or task.is_masked:
        return f'its head is "{task.head}" over {len(task.answer_views)} views; a linear one over one is possible'
    if task.has_sigmoid:
        return "its score is a sigmoid laid over the scale, which transformers does not know"
    if how == "cls" and common:
        layer = cast("nn.Linear", cast("nn.Sequential", model.common)[0])
    elif how == "pooler" and not common:
        layer = model.encoder.pooler.dense
    else:
        between = "a common layer" if common else "no layer with tanh"
        return f'its pooling is "{how}" with {between} before the head; transformers has the first token through one'
    decision = predictor.manifest.decisions.get(task.name, Decision())
    out = cast("Linear", head).out
    weight, bias = (value.detach() / decision.temperature for value in (out.weight, out.bias))
    if task.is_classification and task.outputs == 1:  # one logit against 0
        weight, bias = torch.cat([torch.zeros_like(weight), weight]), torch.cat([torch.zeros_like(bias), bias])
    return Classifier(task, (layer.weight.detach(), layer.bias.detach()), (weight, bias))


def write_classifiers(predictor: Predictor, folder: Path) -> tuple[list[Classifier], tuple[str, ...]]:
    """A folder for each task that can be held; those, and why the others cannot."""
    written: list[Classifier] = []
    notes: list[str] = []
    kind = predictor.model.encoder.config.kind
    for task in predictor.tasks.values():
        found = as_classifier(predictor, task)
        if isinstance(found, str):
            notes.append(f"no AutoModelForSequenceClassification for {task.name}: {found}")
            continue
        place = classifier_folder(folder, task)
        write_encoder(predictor, place)
        inner = {
            f"{kind}.{name}": tensor
            for name, tensor in load_file(place / "model.safetensors").items()
            if not name.startswith("pooler.")
        }
        names = ("bert.pooler.dense", "classifier") if kind == "bert" else ("classifier.dense", "classifier.out_proj")
        for name, (weight, bias) in zip(names, (found.dense, found.out), strict=True):
            inner |= {f"{name}.weight": weight.clone().contiguous(), f"{name}.bias": bias.clone().contiguous()}
        save_file(inner, place / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        labels = task.classes or (task.name,)
        config |= {
            "architectures": ["BertForSequenceClassification" if kind == "bert" else "MPNetForSequenceClassification"],
            "id2label": {str(number): name for number, name in enumerate(labels)},
            "label2id": {name: number for number, name in enumerate(labels)},
            "problem_type": "single_label_classification" if task.is_classification else "regression",
        }
        _write(place / "config.json", config)
        written.append(found)
    return written, tuple(notes)


def classifier_folder(folder: Path, task: Task) -> Path:
    return folder / "classifiers" / task.name


def check_classifiers(
    predictor: Predictor, folder: Path, written: Sequence[Classifier], rows: Sequence[tuple[str, str]]
) -> dict[str, float]:
    """Read everything back with transformers, where it is installed, and compare; see `export.compare`."""
    if find_spec("transformers") is None:
        return {}
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    from minbert.delivery.export import compare

    first = [row[0] for row in rows]
    expected: dict[str, NDArray[np.float32]] = {"embedding": predictor.embed(first, pooling="cls")}
    encoder = AutoModel.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        inputs = tokenizer(first, padding=True, truncation=True, return_tensors="pt")
        found: dict[str, NDArray[np.float32]] = {"embedding": encoder(**inputs).last_hidden_state[:, 0].numpy()}
        for one in written:
            name = one.task.name
            model = AutoModelForSequenceClassification.from_pretrained(classifier_folder(folder, one.task)).eval()
            columns = list(zip(*rows, strict=True)) if one.task.answers_pairs else [first]
            inputs = tokenizer(*map(list, columns), padding=True, truncation=True, return_tensors="pt")
            logits = model(**inputs).logits
            found[name] = (logits.softmax(-1) if one.task.is_classification else logits).numpy()
            if one.task.is_classification:
                answers = predictor.answers(first, [row[1] for row in rows], [name])[name]
                expected[name] = np.asarray(answers.probabilities, np.float32)
            else:
                expected[name] = predictor.outputs(first, [row[1] for row in rows], [name])[name]
    return compare(found, expected, folder)


# --- sentence-transformers --------------------------------------------------------------------------------------------


def write_sentence_transformers(predictor: Predictor, folder: Path) -> None:
    """The encoder, a pooling and, for BERT's pooler, a dense layer: modules that every version of the library knows."""
    how, width = predictor.manifest.model.pooling, predictor.model.encoder.config.width
    if how not in POOLING_MODES:
        raise MinbertError(f'pooling is "{how}"; sentence-transformers has: {", ".join(POOLING_MODES)}')
    write_encoder(predictor, folder)
    kinds = ["Transformer", "Pooling", *(["Dense"] if how == "pooler" else [])]
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{kind}" if number else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, kind in enumerate(kinds)
    ]
    _write(folder / "modules.json", modules)
    _write(folder / "sentence_bert_config.json", {"max_seq_length": predictor.max_tokens, "do_lower_case": False})
    _write(folder / "config_sentence_transformers.json", {"prompts": {}, "similarity_fn_name": "cosine"})
    modes = {f"pooling_mode_{mode}": mode == POOLING_MODES[how] for mode in ("cls_token", "mean_tokens", "max_tokens")}
    modes["pooling_mode_mean_sqrt_len_tokens"] = False
    (folder / "1_Pooling").mkdir()
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **modes})
    if how == "pooler":
        (folder / "2_Dense").mkdir()
        shape = {"in_features": width, "out_features": width, "bias": True}
        _write(folder / "2_Dense" / "config.json", {**shape, "activation_function": "torch.nn.modules.activation.Tanh"})
        dense = predictor.model.encoder.pooler.dense
        tensors = {"linear.weight": dense.weight.detach().contiguous(), "linear.bias": dense.bias.detach().contiguous()}
        save_file(tensors, folder / "2_Dense" / "model.safetensors", metadata={"format": "pt"})


def check_sentence_transformers(predictor: Predictor, folder: Path, texts: Sequence[str]) -> dict[str, float]:
    """Read back with the library, where it is installed, and compared."""
    if find_spec("sentence_transformers") is None:
        return {}
    from sentence_transformers import SentenceTransformer

    from minbert.delivery.export import compare

    model = SentenceTransformer(str(folder), device="cpu")
    found = np.asarray(model.encode(list(texts), show_progress_bar=False), np.float32)
    return compare({"embedding": found}, {"embedding": predictor.embed(list(texts))}, folder)


def _write(path: Path, content: Mapping[str, Any] | list[Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
