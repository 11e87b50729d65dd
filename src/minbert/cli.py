"""The `minbert` command: parse, call, print. Every command's work is in the module it imports.

minbert --help
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from minbert import __version__
from minbert.console import (
    AnswerTable,
    ReproductionWatcher,
    RunWatcher,
    err,
    number,
    out,
    print_evaluations,
    print_export,
    print_matches,
    print_notes,
    print_results,
    progress_bar,
)
from minbert.errors import MinbertError, require, shown

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
encoders_app = typer.Typer(help="The pretrained encoders on this machine, and how to get more.")
data_app = typer.Typer(help="Check, count and download datasets.", no_args_is_help=True)
app.add_typer(encoders_app, name="encoders")
app.add_typer(data_app, name="data")
search_app = typer.Typer(
    help="Nearest sentences: an index of a file's sentences, and questions to it.", no_args_is_help=True
)
app.add_typer(search_app, name="search")

RecipePath = Annotated[Path, typer.Argument(help="A recipe, such as recipes/sample.toml.")]
ModelPath = Annotated[Path, typer.Argument(help="A model folder, such as runs/sample/model.")]
DataOption = Annotated[str | None, typer.Option("--data", help="Where the files lie; default MINBERT_DATA.")]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
PrecisionOption = Annotated[
    str, typer.Option("--precision", help="fp32; int8, faster, on a CPU; tf32, bf16 or fp16 on a GPU.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Change a setting: training.epochs=3. May be given often.")
]


def main() -> None:
    """The entry point: an error of the input is one line and exit code 2; --debug shows where it arose."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    try:
        app(arguments, prog_name="minbert")
    except MinbertError as error:
        if debug:
            raise
        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except BrokenPipeError:  # the reader of a pipe has had enough
        sys.stderr.close()
        sys.exit(0)


def needs_torch(feature: str) -> None:
    """Say how to install what a command needs, before it imports it."""
    for module in ("torch", "safetensors"):
        require(module, "train", feature)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"minbert {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: [bold]minbert quickstart[/]")
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """One encoder that understands sentences for many tasks at once."""


# --- encoders and vectors -------------------------------------------------------------------------------------------


@encoders_app.callback(invoke_without_command=True, epilog="Example: [bold]minbert encoders[/]")
def encoders(context: typer.Context) -> None:
    """What is there, its size, layers and origin, and how to get more."""
    if context.invoked_subcommand is not None:
        return
    from minbert.encoders import PUBLISHED, home, list_encoders

    found = list_encoders()
    table = Table("name", "kind", "layers", "width", "parameters", "size", "came from", title=str(home() / "encoders"))
    for info in found:
        size = f"{info.bytes / 1e6:.0f} MB"
        million = f"{info.parameters / 1e6:.1f}M" if info.parameters else "?"
        table.add_row(info.name, info.kind, str(info.layers), str(info.width), million, size, info.origin)
    if found:
        out.print(table)
    else:
        out.print(f"No encoders in {home() / 'encoders'} yet.")
    more = {f"get {name}": published.about for name, published in PUBLISHED.items()}
    more |= {"get google-bert/bert-base-uncased": "any BERT or MPNet of the hub", "get FOLDER": "Hugging Face layout"}
    out.print("To get more:")
    for command, about in more.items():
        out.print(f"  minbert encoders {command:36}{about}", highlight=False, soft_wrap=True)


@encoders_app.command("get", epilog="Example: [bold]minbert encoders get minilm[/]")
def encoders_get(
    name: Annotated[
        str, typer.Argument(help="minilm, mpnet, a hub id, or a folder in Hugging Face layout.")
    ] = "minilm",
    force: Annotated[bool, typer.Option("--force", help="Get it again although it is there.")] = False,
) -> None:
    """Put an encoder into the cache (MINBERT_HOME, default ~/.cache/minbert)."""
    from minbert.encoders import describe, get_encoder

    with err.status(f"getting {name}"):
        info = describe(get_encoder(name, force=force))
    out.print(
        f"{info.name}: {info.kind}, {info.layers} layers, {info.parameters / 1e6:.1f}M parameters", highlight=False
    )
    out.print(str(info.folder), soft_wrap=True, highlight=False)


@app.command(epilog="Example: [bold]minbert embed --input sentences.txt --output vectors.npy[/]")
def embed(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts; without them --input or standard input.")] = None,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="A file with one text a line.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A .npy, .jsonl or .parquet file; default: JSONL to the screen."),
    ] = None,
    encoder: Annotated[str, typer.Option("--encoder", "-e", help="A cached name, a hub id, or a folder.")] = "minilm",
    pooling: Annotated[str, typer.Option(help="mean, cls, pooler or max.")] = "mean",
    max_tokens: Annotated[int | None, typer.Option(help="Cut texts after so many tokens.")] = None,
    device: DeviceOption = "cpu",
    precision: PrecisionOption = "fp32",
) -> None:
    """Texts to vectors, sorted by length, with a progress bar and the rate."""
    where = _device_for("minbert embed", device, precision)
    from minbert.data.tokenizer import Truncation
    from minbert.delivery.embedder import Embedder
    from minbert.delivery.vectors import open_vectors

    embedder = Embedder.load(
        encoder,
        pooling=pooling,  # type: ignore[arg-type]
        device=where,
        max_tokens=max_tokens,
        precision=precision,  # type: ignore[arg-type]
    )
    total = len(texts) if texts else _count_lines(input) if input else None
    truncated, done, started = Truncation(), 0, time.perf_counter()
    with open_vectors(output, embedder.width) as write, progress_bar("embedding", total) as advance:
        for window, vectors, cut in embedder.stream(texts or _lines(input), progress=advance):
            write(window, vectors)
            truncated, done = truncated + cut, done + len(window)
    seconds = time.perf_counter() - started
    err.print(f"{done} texts in {seconds:.1f} s, {done / seconds:.0f} texts/s", highlight=False)
    if truncated.texts:
        err.print(str(truncated), highlight=False)
    if output:
        err.print(f"written: {shown(output)}", highlight=False)


def _device_for(feature: str, device: str, precision: str) -> str:
    """The device that embeds; int8 is of the CPU, and needs no torch once its file is built."""
    if precision == "int8":
        return "cpu" if device == "auto" else device
    needs_torch(feature)
    from minbert.experiment import choose_device
    from minbert.machine import set_threads

    set_threads()
    return str(choose_device(device))


def _lines(path: Path | None) -> Iterator[str]:
    """Texts of a file or of standard input, one a line."""
    if path is None and sys.stdin.isatty():
        raise MinbertError("no texts: expected arguments, --input FILE, or lines on standard input")
    where = "standard input" if path is None else shown(path)
    try:
        with nullcontext(sys.stdin) if path is None else path.open(encoding="utf-8") as file:
            yield from (line.rstrip("\r\n") for line in file)
    except UnicodeDecodeError as error:
        raise MinbertError(f"{where}: not UTF-8 at byte {error.start}; expected UTF-8 text") from None
    except OSError as error:
        raise MinbertError(f"{where}: {error.strerror}; expected UTF-8 text") from None


def _count_lines(path: Path) -> int | None:
    """None where counting would use up what it counts: a pipe can be read only once."""
    return None if path.is_fifo() else sum(1 for _ in _lines(path))


# --- nearest sentences ----------------------------------------------------------------------------------------------


@search_app.command("build", epilog="Example: [bold]minbert search build sentences.txt --model minilm --out index[/]")
def search_build(
    file: Annotated[Path, typer.Argument(help="A .txt with one sentence a line, or CSV, TSV, JSONL or Parquet.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="A model folder, or an encoder: a cached name, hub id or folder.")
    ] = "minilm",
    out_dir: Annotated[Path, typer.Option("--out", help="The index's folder.")] = Path("index"),
    column: Annotated[str, typer.Option(help="With the sentences; default text, sentence, or the only one.")] = "",
    pooling: Annotated[str | None, typer.Option(help="mean, cls, pooler or max; default the model's own.")] = None,
    numbers: Annotated[str, typer.Option(help="float32, or float16: half the room.")] = "float32",
    index: Annotated[
        str, typer.Option("--index", help="exact; hnsw: a graph, faster for millions, which may miss some.")
    ] = "exact",
    keep_duplicates: Annotated[bool, typer.Option("--keep-duplicates", help="Keep equal sentences.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an index that is there.")] = False,
    device: DeviceOption = "cpu",
    precision: PrecisionOption = "fp32",
) -> None:
    """Embed a file's sentences and write an index of them."""
    from minbert.delivery.search import SearchIndex, SentenceEncoder, read_sentences

    where = _device_for("minbert search", device, precision)
    encoder = SentenceEncoder.load(model, pooling=pooling, precision=precision, device=where)  # type: ignore[arg-type]
    total = _count_lines(file) if file.suffix.lower() == ".txt" else None
    started = time.perf_counter()
    with progress_bar("embedding", total) as advance:
        found = SearchIndex.build(
            out_dir,
            read_sentences(file, column),
            encoder,
            numbers=numbers,  # type: ignore[arg-type]
            kind=index,  # type: ignore[arg-type]
            keep_duplicates=keep_duplicates,
            overwrite=overwrite,
            progress=advance,
        ).manifest
    seconds = time.perf_counter() - started
    err.print(
        f"{found.count:,} sentences in {seconds:.1f} s; left out: {found.empty:,} empty, {found.duplicates:,} duplicates",
        highlight=False,
    )
    if found.truncated:
        err.print(f"{found.truncated:,} sentences have more tokens than the model reads: cut", highlight=False)
    if found.recall is not None:
        err.print(f"the graph finds {found.recall:.1%} of the ten nearest", highlight=False)
    out.print(f"index: {shown(out_dir)}", highlight=False, soft_wrap=True)


@search_app.command("query", epilog='Example: [bold]minbert search query index "How old is it?" --count 5[/]')
def search_query(
    index: Annotated[Path, typer.Argument(help="A folder of minbert search build.")],
    texts: Annotated[
        list[str] | None, typer.Argument(help="Questions; without them --input or standard input.")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Sentences for each question.")] = 10,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="A file with one question a line.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Where the index's model is now; default where it was.")
    ] = None,
    device: DeviceOption = "cpu",
    precision: Annotated[str | None, typer.Option(help="Default that of the index.")] = None,
) -> None:
    """The nearest sentences of each question: a table for a person, JSON lines for a pipe."""
    from minbert.delivery.search import QUESTIONS, SearchIndex, SentenceEncoder

    found = SearchIndex.load(index)
    origin = found.manifest.origin
    chosen = precision or origin.precision
    encoder = SentenceEncoder.load(
        model or origin.model,
        pooling=origin.pooling,
        precision=chosen,  # type: ignore[arg-type]
        device=_device_for("minbert search", device, chosen),
    )
    lines, asked = (line for line in texts or _lines(input) if line.strip()), 0
    while window := list(islice(lines, QUESTIONS)):
        print_matches(window, found.query(window, count, encoder=encoder))
        asked += len(window)
    if not asked:
        raise MinbertError("no questions, or only empty ones; expected arguments, --input FILE, or lines")


# --- training and what follows --------------------------------------------------------------------------------------


@app.command(epilog="Example: [bold]minbert train recipes/sample.toml --set training.epochs=2 --out runs/mine[/]")
def train(
    recipe: RecipePath,
    set: SetOption = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="The run's folder; default runs/NAME-seedN.")] = None,
    seed: Annotated[int | None, typer.Option(help="Replaces the recipe's.")] = None,
    encoder: Annotated[str | None, typer.Option("--encoder", "-e", help="Replaces the recipe's.")] = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's last checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that is there.")] = False,
    copy_results: Annotated[Path | None, typer.Option("--results", help="Also write results.json here.")] = None,
) -> None:
    """Train a recipe: one encoder, its tasks, their files."""
    needs_torch("minbert train")
    from minbert.evaluation.results import write_json
    from minbert.experiment import train as run_training
    from minbert.recipes import read_recipe

    sets = [*(set or []), *([f"model.encoder={encoder}"] if encoder else [])]
    chosen = read_recipe(recipe, sets=sets, seed=seed)
    try:
        with RunWatcher() as watcher:
            run = run_training(
                chosen, out=out_dir, data=data, device=device, resume=resume, overwrite=overwrite, watcher=watcher
            )
    except KeyboardInterrupt:
        err.print("stopped; the same command with --resume goes on from the last checkpoint")
        raise typer.Exit(130) from None
    print_notes(run.results["data"])
    print_results(run.results)
    if copy_results is not None:
        copy_results.parent.mkdir(parents=True, exist_ok=True)
        write_json(copy_results, run.results)
    out.print(f"model: {shown(run.model)}", highlight=False, soft_wrap=True)


@app.command(epilog="Example: [bold]minbert evaluate runs/sample/model[/]")
def evaluate(
    model: ModelPath,
    recipe: Annotated[Path | None, typer.Argument(help="Other files for the same tasks.")] = None,
    set: SetOption = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "fp32",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the figures here, as JSON.")] = None,
) -> None:
    """Score a model on dev: every metric with a bootstrap 95% interval."""
    needs_torch("minbert evaluate")
    from minbert.evaluation.evaluate import overall
    from minbert.evaluation.results import write_json
    from minbert.experiment import evaluate_model
    from minbert.recipes import read_recipe

    chosen = read_recipe(recipe, sets=set or []) if recipe else None
    with RunWatcher() as watcher:
        found = evaluate_model(model, chosen, data=data, device=device, precision=precision, watcher=watcher)  # type: ignore[arg-type]
    print_evaluations(found)
    rules = overall({name: one.score for name, one in found.items()}, {name: one.task for name, one in found.items()})
    out.print(f"overall: {number(rules['2023'])} (2023 rule)  {number(rules['2024'])} (2024 rule)", highlight=False)
    if output is not None:
        write_json(output, {"overall": rules, "dev": {name: one.summary() for name, one in found.items()}})


@app.command(epilog="Example: [bold]minbert predict runs/sample/model --input reviews.csv --output answers.csv[/]")
def predict(
    model: ModelPath,
    input: Annotated[
        Path | None, typer.Option("--input", "-i", help="CSV, TSV, JSONL or Parquet; default stdin.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Likewise; default stdout.")] = None,
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="Default: all that fit the columns.")] = None,
    text: Annotated[str, typer.Option(help="Column with the text, if not named as in training.")] = "",
    text2: Annotated[str, typer.Option(help="Column with the second text of a pair.")] = "",
    format: Annotated[
        str, typer.Option(help="Of stdin and stdout: jsonl, csv or tsv; default jsonl, and on a terminal a table.")
    ] = "",
    device: DeviceOption = "cpu",
    precision: PrecisionOption = "fp32",
) -> None:
    """Answer every row of a file: all columns stay, each task adds its answer.

    On a terminal few rows are a table; a pipe gets JSON lines.
    """
    needs_torch("minbert predict")
    from minbert.delivery.files import predict_file
    from minbert.delivery.predictor import Predictor
    from minbert.experiment import choose_device
    from minbert.machine import set_threads

    set_threads()
    predictor = Predictor.load(model, device=str(choose_device(device)), precision=precision)  # type: ignore[arg-type]
    seen = output is None and not format and out.is_terminal
    with AnswerTable() as table, progress_bar("predicting", None) as advance:
        report = predict_file(
            predictor,
            input,
            output,
            tasks=task,
            text=text,
            text2=text2,
            kind=format,
            write=table.write if seen else None,
            progress=advance,
        )
    err.print(f"{report.rows:,} rows answered for {', '.join(report.tasks)}", highlight=False)
    if report.unanswered:
        err.print(f"{report.unanswered:,} rows have an empty text: kept, without an answer", highlight=False)


@app.command("try", epilog="Example: [bold]minbert try runs/sample/model[/]")
def try_command(model: ModelPath, device: DeviceOption = "cpu", precision: PrecisionOption = "fp32") -> None:
    """Type a text, or two, and see what the model says, and which words mattered."""
    needs_torch("minbert try")
    from minbert.delivery.predictor import Predictor
    from minbert.experiment import choose_device
    from minbert.machine import set_threads
    from minbert.trying import try_model

    set_threads()
    with err.status(f"loading {shown(model)}"):
        predictor = Predictor.load(model, device=str(choose_device(device)), precision=precision)  # type: ignore[arg-type]
    try_model(predictor, title=shown(model))


@app.command(epilog="Example: [bold]minbert serve runs/sample/model --precision int8[/]")
def serve(
    model: ModelPath,
    host: Annotated[str, typer.Option(help="0.0.0.0: reachable from outside.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with the model.")] = 1,
    device: DeviceOption = "cpu",
    precision: PrecisionOption = "fp32",
    api_keys: Annotated[
        Path | None, typer.Option("--api-keys", help="A file with a key a line; also: MINBERT_API_KEYS.")
    ] = None,
    index: Annotated[
        Path | None, typer.Option("--index", help="A folder of minbert search build, of the same model.")
    ] = None,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request.")] = 1 << 20,
    max_texts: Annotated[int, typer.Option(min=1, help="Texts and pairs of a request.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=0, help="Of a text; the rest is cut. 0: the model's own.")] = 0,
    queue: Annotated[int, typer.Option(min=1, help="Texts that may wait; more: 503.")] = 2048,
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take; then: 504.")] = 30.0,
    budget: Annotated[int, typer.Option(min=1, help="Tokens of a batch, about.")] = 4096,
    wait: Annotated[float, typer.Option(help="Milliseconds that a batch waits for more under load.")] = 2.0,
    batching: Annotated[bool, typer.Option(help="Answer many requests together.")] = True,
    drain: Annotated[float, typer.Option(help="Seconds of /readyz saying no before the end.")] = 0.0,
) -> None:
    """Serve a model over HTTP: a page to try it, predictions, embeddings and similarities; see /docs of the server."""
    needs_torch("minbert serve")
    for module in ("fastapi", "uvicorn"):
        require(module, "serve", "minbert serve")
    from minbert.delivery.server import ServeSettings
    from minbert.delivery.server import serve as run_server
    from minbert.delivery.service import Limits
    from minbert.experiment import choose_device

    limits = Limits(max_body, max_texts, max_tokens, queue, timeout, budget, wait / 1000, batching)
    where = str(choose_device(device))
    err.print(
        f"serving {shown(model)} on http://{host}:{port} (the page; /docs: the interface)",
        highlight=False,
        soft_wrap=True,
    )
    run_server(ServeSettings(model, host, port, workers, precision, where, api_keys, index, drain, limits))


@app.command(epilog="Example: [bold]minbert submit runs/multitask/model --data data[/]")
def submit(
    model: ModelPath,
    data: DataOption = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the six files.")] = Path("predictions"),
    device: DeviceOption = "auto",
) -> None:
    """Write the CS224N course's six prediction files, in its exact format."""
    needs_torch("minbert submit")
    import os

    from minbert.delivery.predictor import Predictor
    from minbert.delivery.submit import submit as write_submission
    from minbert.experiment import choose_device
    from minbert.machine import set_threads

    set_threads()
    predictor = Predictor.load(model, device=str(choose_device(device)))
    for found in write_submission(predictor, Path(data or os.environ.get("MINBERT_DATA") or "data"), out_dir):
        if found.missing:
            err.print(f"[yellow]not written:[/] {shown(found.path)}: {escape(found.missing)}", soft_wrap=True)
        else:
            skipped = f", {found.skipped} rows skipped" if found.skipped else ""
            out.print(f"{shown(found.path)}: {found.rows:,} rows{skipped}", highlight=False, soft_wrap=True)


@app.command(epilog="Example: [bold]minbert ensemble runs/both runs/a runs/b/models/step-00000120[/]")
def ensemble(
    out_dir: Annotated[Path, typer.Argument(metavar="OUT", help="The new model folder.")],
    models: Annotated[list[Path], typer.Argument(metavar="MODEL...", help="Model folders, or folders of runs.")],
    tune: Annotated[
        bool, typer.Option("--tune", help="Choose the ensemble's temperatures and thresholds on dev.")
    ] = False,
    data: DataOption = None,
    device: DeviceOption = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model folder that is there.")] = False,
) -> None:
    """Several models as one: a model folder whose answers are the mean of theirs."""
    needs_torch("minbert ensemble")
    from minbert.ensembles import ensemble as write_ensemble
    from minbert.model.saved import read_manifest

    with RunWatcher() as watcher:
        folder = write_ensemble(
            out_dir, models, tune=tune, data=data, device=device, overwrite=overwrite, watcher=watcher
        )
    found = read_manifest(folder)
    for name, decision in found.decisions.items():
        if found.scores["dev"][name].get("classes"):
            threshold = (
                f", threshold {decision.threshold:.2f}" if len(found.scores["dev"][name]["classes"]) == 2 else ""
            )
            out.print(f"{name}: temperature {decision.temperature:.2f}{threshold}, chosen on dev", highlight=False)
    out.print(f"ensemble of {len(found.members)} models: {shown(folder)}", highlight=False, soft_wrap=True)


@app.command(epilog="Example: [bold]minbert export runs/sample/model --to onnx --out sample-onnx[/]")
def export(
    model: ModelPath,
    to: Annotated[str, typer.Option("--to", help="onnx, onnx-int8, sentence-transformers, transformers or torch.")],
    out_dir: Annotated[Path, typer.Option("--out", help="The new folder.")],
    data: DataOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
) -> None:
    """Write a model in a form that others load, compared with the model itself before it appears."""
    needs_torch("minbert export")
    from minbert.exporting import export as write_export

    with RunWatcher() as watcher:
        found = write_export(model, to=to, out=out_dir, data=data, overwrite=overwrite, watcher=watcher)
    print_export(found)


@app.command(epilog="Example: [bold]minbert compare runs/a runs/b[/]")
def compare(
    run_a: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    run_b: Annotated[Path, typer.Argument(help="Another, scored on the same dev rows.")],
    samples: Annotated[int, typer.Option(help="Resamples of the bootstrap.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 1,
) -> None:
    """Is run B different from run A? A paired bootstrap over the dev rows of each task."""
    import numpy as np

    from minbert.evaluation.results import compare_runs

    table = Table("task", "B - A", "95% interval", "p", "B better in", title=f"{shown(run_b)} against {shown(run_a)}")
    for name, found in compare_runs(run_a, run_b, rng=np.random.default_rng(seed), samples=samples).items():
        difference = found.difference
        table.add_row(
            name,
            f"{difference.value:+.4f}",
            f"{difference.low:+.4f} to {difference.high:+.4f}",
            f"{found.p_value:.4f}",
            f"{found.wins:.1%} of resamples",
        )
    out.print(table)


@app.command(epilog="Example: [bold]minbert report runs/sample --output report.html[/]")
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file.")] = Path("report.html"),
) -> None:
    """One self-contained HTML file: curves, confusion matrices, scatter plots, the worst mistakes, the recipe."""
    from minbert.evaluation.report import write_report

    write_report(runs, output)
    out.print(f"written: {shown(output)}", highlight=False, soft_wrap=True)


@app.command(epilog="Example: [bold]minbert errors runs/sample --task sts --count 5 --out errors.md[/]")
def errors(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="Default: all.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Rows of each direction, at most.")] = 10,
    out_file: Annotated[Path | None, typer.Option("--out", help="Also write them here, as Markdown.")] = None,
) -> None:
    """The worst wrong answers on dev: false positives and negatives, chosen by a rule, with what was expected."""
    from minbert.evaluation.mistakes import read_mistakes, tables, write_markdown

    found = read_mistakes(run, tasks=task, count=count)
    for table in tables(found):
        out.print(table)
    if out_file is not None:
        write_markdown(found, out_file)
        out.print(f"written: {shown(out_file)}", highlight=False, soft_wrap=True)


@app.command(epilog="Example: [bold]minbert reproduce hillebrand --encoder minilm --seeds 3 --data data[/]")
def reproduce(
    targets: Annotated[list[str] | None, typer.Argument(help="PAPER or PAPER/ROW; default all.")] = None,
    encoder: Annotated[str, typer.Option("--encoder", "-e", help="Replaces bert-base-uncased.")] = "minilm",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each row, with the seeds 1, 2, ...")] = 1,
    budget: Annotated[
        float | None, typer.Option(min=0, help="Minutes; then what runs is stopped, to go on next time.")
    ] = None,
    decisive: Annotated[
        bool, typer.Option("--decisive", help="Only each paper's best row and the rows that its findings compare.")
    ] = False,
    steps_cap: Annotated[
        int, typer.Option("--steps-cap", min=0, help="At most so many steps a run, thinned evenly; recorded.")
    ] = 0,
    set: SetOption = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    jobs: Annotated[int, typer.Option(min=1, help="Runs side by side, a process each.")] = 1,
    keep_models: Annotated[
        bool, typer.Option("--keep-models", help="Do not remove the models of finished runs.")
    ] = False,
    only_page: Annotated[bool, typer.Option("--only-page", help="Run nothing, write the page anew.")] = False,
    recipes: Annotated[Path, typer.Option(help="Folder of the papers' recipes.")] = Path("recipes"),
    results: Annotated[Path, typer.Option(help="Folder for one JSON a run.")] = Path("results/reproduction"),
    runs: Annotated[Path, typer.Option(help="Folder for the runs themselves.")] = Path("runs/reproduction"),
    page: Annotated[Path, typer.Option(help="The page.")] = Path("docs/reproduction.md"),
) -> None:
    """Run the rows of the papers that are missing, and write the page with their numbers and ours."""
    from minbert.reproduction.figures import draw_all
    from minbert.reproduction.page import write_page
    from minbert.reproduction.recipes import choose_rows, find_papers
    from minbert.reproduction.runs import Outcome, Settings, plan_jobs, run_jobs

    papers = find_papers(recipes)
    rows = choose_rows(papers, targets or [])
    if decisive:
        rows = [row for row in rows if papers[row.paper].rank(row.name) < 2]
    outcome = Outcome()
    if not only_page:
        needs_torch("minbert reproduce")
        settings = Settings(
            encoder=encoder,
            results=results,
            runs=runs,
            data=data,
            device=device,
            jobs=jobs,
            sets=tuple(set or ()),
            steps_cap=steps_cap,
            budget=float("inf") if budget is None else budget * 60,
            keep_models=keep_models,
        )
        planned = plan_jobs(papers, rows, seeds=seeds)
        with ReproductionWatcher() as watcher:
            outcome = run_jobs(planned, settings, watcher)
        before = len(planned) - sum(map(len, (outcome.done, outcome.failed, outcome.stopped, outcome.left)))
        out.print(
            f"{before} were there, {len(outcome.done)} run, {len(outcome.failed)} failed, "
            f"{len(outcome.stopped)} stopped on the way, {len(outcome.left)} not begun",
            highlight=False,
        )
    write_page(papers, results, page, draw=draw_all)
    out.print(f"written: {shown(page)}", highlight=False, soft_wrap=True)
    if outcome.failed or outcome.interrupted:
        raise typer.Exit(130 if outcome.interrupted else 1)


# --- data -----------------------------------------------------------------------------------------------------------


@data_app.command("check", epilog="Example: [bold]minbert data check recipes/multitask.toml --data data[/]")
def data_check(recipe: RecipePath, set: SetOption = None, data: DataOption = None) -> None:
    """Every problem, duplicate, train/dev leak, the class balance and the lengths, before any training."""
    if not _describe_data(recipe, set, data, stats=False):
        raise typer.Exit(1)


@data_app.command("stats", epilog="Example: [bold]minbert data stats recipes/multitask.toml --data data[/]")
def data_stats(recipe: RecipePath, set: SetOption = None, data: DataOption = None) -> None:
    """Counts, class balance and lengths."""
    _describe_data(recipe, set, data, stats=True)


def _describe_data(recipe: Path, set: list[str] | None, data: str | None, *, stats: bool) -> bool:
    from minbert.config import data_folder
    from minbert.data.check import check_data, render, token_counter
    from minbert.recipes import read_recipe

    chosen = read_recipe(recipe, sets=set or [])
    count, ok = token_counter(chosen.model.encoder), True
    for part in (*chosen.stages, chosen):
        found = check_data(part, data_folder(chosen, data), count_tokens=count)
        render(found, out, stats=stats)
        ok = ok and found.ok
    return ok


@data_app.command("fetch", epilog="Example: [bold]minbert data fetch cs224n --data data[/]")
def data_fetch(
    name: Annotated[str, typer.Argument(help="cs224n, sst, quora, sts or nli.")],
    data: Annotated[Path, typer.Option("--data", help="Folder to put it in.")] = Path("data"),
    mirror: Annotated[str | None, typer.Option(help="Another address that holds the same files.")] = None,
) -> None:
    """Download a dataset, with progress, resume and checksums."""
    from minbert.data.fetch import fetch

    fetch(name, data, base_url=mirror, progress=err)


@app.command(epilog="Example: [bold]minbert doctor[/]")
def doctor(
    clear_cache: Annotated[
        bool, typer.Option("--clear-cache", help="Remove the tokens that are kept on disk.")
    ] = False,
) -> None:
    """What this machine offers: cores, threads, GPUs, the precisions that work, and what the caches hold."""
    from minbert.doctor import examine

    if clear_cache:
        from minbert.data.cache import TokenCache
        from minbert.encoders import home

        cache = TokenCache(home() / "tokens")
        out.print(f"{cache.clear() / 2**20:,.0f} MiB of tokens removed from {cache.folder}", highlight=False)
        return
    table = Table("", "", show_header=False)
    with err.status("examining this machine"):
        for finding in examine():
            table.add_row(finding.what, escape(finding.found), style=None if finding.good else "yellow")
    out.print(table)


@app.command(epilog="Example: [bold]minbert quickstart[/]")
def quickstart(
    out_dir: Annotated[Path, typer.Option("--out", help="The run's folder.")] = Path("runs/quickstart"),
) -> None:
    """Train three tasks on the embedded sample, show the scores, answer three sentences, write a report."""
    needs_torch("minbert quickstart")
    from minbert.quickstart import quickstart as run_quickstart

    run_quickstart(out_dir)
