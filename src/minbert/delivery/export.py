"""A trained model in the forms that others load: ONNX, torch.export, sentence-transformers, transformers.

    export_model(predictor, "onnx", Path("export"), rows=rows)

Every form is compared with the model itself, on real sentences, before its folder appears; one that is off is refused.
`minbert.exporting` finds the model, its data and its recipe; here is what is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from minbert import __version__
from minbert.atomic import atomic_folder
from minbert.data.inputs import tokenize_view
from minbert.delivery.card import Card, write_card
from minbert.delivery.exported import FORMAT, MANIFEST, MODEL, OnnxModel
from minbert.delivery.onnx_encoder import calibration_tokens
from minbert.delivery.onnx_names import EMBEDDING, KNOWN, output_name
from minbert.delivery.predictor import Predictor
from minbert.delivery.torch_backend import TorchBackend
from minbert.errors import MinbertError, require, shown
from minbert.model.answers import Decision
from minbert.model.manifest import as_plain
from minbert.tasks import CONTRASTIVE, Task

if TYPE_CHECKING:
    import tokenizers
    from numpy.typing import NDArray

Form = Literal["onnx", "onnx-int8", "sentence-transformers", "transformers", "torch"]
FORMS: tuple[Form, ...] = get_args(Form)
EXACT = 1e-4  # the largest difference of an output, or of a large one in proportion
BATCH = 16  # rows of a batch of the comparison

Rows = Sequence[tuple[str, str]]
"""Texts in pairs; a task of one text reads the first."""
Measure = Callable[[Predictor], Mapping[str, Mapping[str, Any]]]
"""A predictor whose encoder is int8 to what each task lost on dev."""


@dataclass(frozen=True)
class Exported:
    """What was written, and how near it is."""

    folder: Path
    form: Form
    files: tuple[str, ...]
    differences: Mapping[str, float] = field(default_factory=dict)
    """The largest difference from the model's own outputs, by output."""
    losses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of int8, by task: the metric, its value in fp32 and in int8, and the difference with its interval."""
    notes: tuple[str, ...] = ()
    """What the form cannot hold."""


def export_model(
    predictor: Predictor,
    form: Form,
    out: Path,
    *,
    rows: Rows,
    card: Card | None = None,
    measure: Measure | None = None,
    encoder_files: Mapping[str, str] | None = None,
) -> Exported:
    """Write the folder in one step.

    Args:
        predictor: the model, on the CPU, in torch and fp32.
        form: see FORMS.
        out: the folder; one of that name is replaced.
        rows: real sentences, to compare with.
        card: what README.md says of data and scores.
        measure: for onnx-int8, which has no fp32 outputs to be compared with.
        encoder_files: `weight_files` of the model's encoder, by which an export to ONNX says whose vectors it gives.
    """
    if form not in FORMS:
        raise MinbertError(f'the form is "{form}"; expected one of: {", ".join(FORMS)}')
    if not rows:
        raise MinbertError("no sentences to compare with; expected at least one")
    write_onnx = partial(_write_onnx, int8=form == "onnx-int8", measure=measure, encoder_files=encoder_files or {})
    writers: dict[Form, Callable[[Predictor, Path, Rows], _Done]] = {
        "onnx": write_onnx,
        "onnx-int8": write_onnx,
        "torch": _write_torch,
        "sentence-transformers": _write_sentence_transformers,
        "transformers": _write_transformers,
    }
    with atomic_folder(out) as new:
        done = writers[form](predictor, new, rows)
        write_card(new, form, predictor.manifest, card or Card(), done.losses, done.notes)
        files = tuple(sorted(path.relative_to(new).as_posix() for path in new.rglob("*") if path.is_file()))
    return Exported(out, form, files, done.differences, done.losses, done.notes)


@dataclass(frozen=True)
class _Done:
    differences: Mapping[str, float] = field(default_factory=dict)
    losses: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


# --- one file with every head -----------------------------------------------------------------------------------------


def _write_onnx(
    predictor: Predictor,
    folder: Path,
    rows: Rows,
    *,
    int8: bool,
    measure: Measure | None,
    encoder_files: Mapping[str, str],
) -> _Done:
    require("onnx", "export", "minbert export --to onnx")
    from minbert.delivery.onnx_heads import build_multitask

    calibration = calibration_tokens(predictor.tokenizer, predictor.max_tokens) if int8 else None
    graph = build_multitask(
        predictor.model,
        pooling=predictor.manifest.model.pooling,
        precision="int8" if int8 else "fp32",
        calibration=calibration,
    )
    (folder / MODEL).write_bytes(graph.SerializeToString())
    tokenizer = _write_tokenizer(predictor, folder)
    manifest = {**describe(predictor, "int8" if int8 else "fp32"), "encoder": dict(encoder_files)}
    model = OnnxModel(folder / MODEL, manifest, optimize=True)
    losses: Mapping[str, Mapping[str, Any]] = {}
    if int8:  # the encoder is only near, but the heads must say of its vectors what torch's say
        vectors = _vectors(predictor, rows)
        differences = compare(model.answer(vectors), predictor.backend.answer(vectors), folder)
        if measure is not None:  # as minbert runs it; heads in torch, whose vectors contrastive tasks are judged by
            backend = TorchBackend(predictor.model, OnnxModel(folder / MODEL, manifest))
            losses = measure(Predictor(backend, predictor.tokenizer, predictor.manifest))
        manifest["int8"] = losses
    else:
        differences = compare(_by_batches(tokenizer, rows, model.run, manifest), _expected(predictor, rows), folder)
    manifest["compared"] = {"rows": len(rows), "largest_difference": max(differences.values())}
    _write_json(folder / MANIFEST, manifest)
    return _Done(differences, losses, _left_out(predictor))


def describe(predictor: Predictor, precision: str) -> dict[str, Any]:
    """manifest.json: everything that a script without minbert needs to ask the file, and minbert to load it."""

    about, model = predictor.manifest, predictor.model
    own = about.model.pooling
    tasks = {}
    for task in predictor.tasks.values():
        if task.is_masked:
            continue
        decision = about.decisions.get(task.name, Decision())
        tasks[task.name] = {
            "kind": task.kind,
            "output": output_name(task),
            "outputs": task.outputs,
            "reads": list(task.answer_views),
            "pooling": model.poolings[task.name],
            "head": task.head,
            "loss": task.loss,
            "normalise": task.normalise,
            **_how_to_answer(task, decision),
        }
    hows = dict.fromkeys([own, *(task["pooling"] for task in tasks.values())])
    suffixes = {how: "" if how == own else f"_{how}" for how in hows}
    return {
        "format": FORMAT,
        "version": __version__,
        "precision": precision,
        "width": model.encoder.config.width,
        "max_tokens": predictor.max_tokens,
        "pad_id": predictor.tokenizer.pad_id,
        "pooling": own,
        "inputs": {
            "input_ids": "(sequences, tokens) int64, of tokenizer.json, which cuts at max_tokens and pads",
            "attention_mask": "(sequences, tokens) int64, 1 at real tokens",
            "token_type_ids": "(sequences, tokens) int64, 1 for the second text of a pair read as one input",
            "pairs": "(pairs, 2) int64, for tasks that read two sequences: which two of the batch; may be left out",
            "known": "(vectors, width) float32, vectors of an earlier run, numbered on from the batch's; may be left out",
        },
        "views": {
            "first": "encode(text)",
            "second": "encode(text2)",
            "joint": "encode(text, text2)",
            "reversed": "encode(text2, text)",
        },
        "embeddings": {
            how: {"output": EMBEDDING + suffix, "known": KNOWN + suffix} for how, suffix in suffixes.items()
        },
        "tasks": tasks,
        "scores": about.scores.get("dev", {}),
        "model": as_plain(about),
    }


def _how_to_answer(task: Task, decision: Decision) -> dict[str, Any]:
    """What is to be done with a head's numbers, and with what."""
    if task.is_classification:
        each = "softmax(output / temperature)" if task.outputs > 1 else "sigmoid(output / temperature), of class 1"
        rule = "class 1 from the threshold on" if len(task.classes) == 2 else "the most probable"
        found: dict[str, Any] = {"classes": list(task.classes), "temperature": decision.temperature}
        if len(task.classes) == 2:
            found["threshold"] = decision.threshold
        return {**found, "probabilities": each, "answer": rule}
    scale = {"low": task.low, "high": task.high}
    if task.has_sigmoid:
        return {**scale, "answer": "low + (high - low) * sigmoid(output)"}
    if task.loss == "cosent" or task.loss in CONTRASTIVE:
        return {"answer": "output; only its order means something"}
    return {**scale, "answer": "output, cut to low and high"}


def compare(
    found: Mapping[str, NDArray[np.float32]], expected: Mapping[str, NDArray[np.float32]], where: Path
) -> dict[str, float]:
    """The largest difference of each output, in proportion where numbers are large; too large a one is an error."""
    differences = {}
    for name, wanted in expected.items():
        if name not in found or found[name].shape != wanted.shape:
            shape = found[name].shape if name in found else "nothing"
            raise MinbertError(f"the export gives {shape} for {name}; expected {wanted.shape}: not written")
        off = np.abs(found[name].astype(np.float64) - wanted) / np.maximum(1.0, np.abs(wanted))
        differences[name] = float(off.max(initial=0.0))
        if not differences[name] <= EXACT:  # nor is a NaN
            raise MinbertError(
                f"the export of {name} differs from the model by {differences[name]:.2g} on real sentences; "
                f"expected at most {EXACT:g}: {shown(where.parent)}: not written"
            )
    return differences


def _expected(predictor: Predictor, rows: Rows) -> dict[str, NDArray[np.float32]]:
    """The model's own outputs and vectors, by the names that an export has for them."""
    first, second = (list(column) for column in zip(*rows, strict=True))
    tasks = [task.name for task in predictor.tasks.values() if not task.is_masked]
    found = predictor.outputs(first, second, tasks) if tasks else {}
    named = {output_name(predictor.tasks[name]): outputs for name, outputs in found.items()}
    return {**named, EMBEDDING: predictor.embed(first)}


def _vectors(predictor: Predictor, rows: Rows) -> dict[str, list[NDArray[np.float32]]]:
    """What each task's head reads, of the torch encoder, so that nothing but the heads is compared."""
    first, second = (list(column) for column in zip(*rows, strict=True))
    found = {}
    for task in predictor.tasks.values():
        if not task.is_masked:
            how = predictor.poolings[task.name]
            views = [
                tokenize_view(view, predictor.tokenizer, first, second, predictor.max_tokens)
                for view in task.answer_views
            ]
            found[task.name] = [predictor.backend.encode(view, [how])[how] for view in views]
    return found


Run = Callable[[Sequence[Any], "NDArray[np.int64] | None"], Mapping[str, "NDArray[np.float32]"]]


def _by_batches(
    tokenizer: tokenizers.Tokenizer, rows: Rows, run: Run, manifest: Mapping[str, Any]
) -> dict[str, NDArray[np.float32]]:
    """A file's outputs for some rows, asked for as its manifest says, a few rows at a time."""
    make: dict[str, Callable[[tuple[str, str]], Any]] = {
        "first": lambda row: row[0],
        "second": lambda row: row[1],
        "joint": lambda row: (row[0], row[1]),
        "reversed": lambda row: (row[1], row[0]),
    }
    found: dict[str, list[NDArray[np.float32]]] = {EMBEDDING: []}
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        count = len(part)
        said = run(tokenizer.encode_batch([make["first"](row) for row in part]), None)
        found[EMBEDDING].append(said[EMBEDDING])
        for task in manifest["tasks"].values():
            views = [make[view] for view in task["reads"]]
            encodings = tokenizer.encode_batch([view(row) for view in views for row in part])
            pairs = np.stack([np.arange(count), np.arange(count) + count], axis=1) if len(views) == 2 else None
            found.setdefault(task["output"], []).append(run(encodings, pairs)[task["output"]])
    return {name: np.concatenate(parts) for name, parts in found.items()}


def _write_tokenizer(predictor: Predictor, folder: Path) -> tokenizers.Tokenizer:
    """tokenizer.json that cuts and pads by itself."""
    import tokenizers

    own = predictor.tokenizer
    own.save(folder)
    backend = tokenizers.Tokenizer.from_str(own.rules)
    backend.enable_truncation(predictor.max_tokens)
    backend.enable_padding(pad_id=own.pad_id, pad_token=own.words([own.pad_id])[0])
    backend.save(str(folder / "tokenizer.json"))
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def _left_out(predictor: Predictor) -> tuple[str, ...]:
    return tuple(
        f"{task.name} is a masked task, which trains the encoder and answers nothing: its layer is left out"
        for task in predictor.tasks.values()
        if task.is_masked
    )


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- torch, and the folders of other libraries ------------------------------------------------------------------------


def _write_torch(predictor: Predictor, folder: Path, rows: Rows) -> _Done:
    from minbert.delivery.torch_program import run_program, write_program

    write_program(predictor.model, predictor.manifest.model.pooling, folder / "model.pt2")
    tokenizer = _write_tokenizer(predictor, folder)
    manifest = describe(predictor, "fp32")
    for table in (manifest["inputs"], *manifest["embeddings"].values()):
        del table["known"]  # which only the ONNX file has
    run = run_program(folder / "model.pt2")
    found = _by_batches(tokenizer, rows, run, manifest)
    differences = compare(found, _expected(predictor, rows), folder)
    manifest["compared"] = {"rows": len(rows), "largest_difference": max(differences.values())}
    _write_json(folder / MANIFEST, manifest)
    return _Done(differences, notes=_left_out(predictor))


def _write_transformers(predictor: Predictor, folder: Path, rows: Rows) -> _Done:
    from minbert.delivery.hugging_face import check_classifiers, write_classifiers, write_encoder

    write_encoder(predictor, folder)
    written, notes = write_classifiers(predictor, folder)
    differences = check_classifiers(predictor, folder, written, rows)
    return _Done(differences, notes=(*notes, *_left_out(predictor)))


def _write_sentence_transformers(predictor: Predictor, folder: Path, rows: Rows) -> _Done:
    from minbert.delivery.hugging_face import check_sentence_transformers, write_sentence_transformers

    write_sentence_transformers(predictor, folder)
    first, second = zip(*rows, strict=True)
    differences = check_sentence_transformers(predictor, folder, [*first, *second])
    return _Done(differences, notes=("the heads are not in this form: it gives the encoder's vectors",))
