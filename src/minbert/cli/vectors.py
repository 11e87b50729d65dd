"""Encoders, vectors and nearest sentences: `minbert encoders`, `embed`, `search`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from minbert.cli.base import DeviceOption, PrecisionOption, app, encoders_app, prepare_torch, search_app
from minbert.console import err, out, print_matches, progress_bar
from minbert.errors import MinbertError, shown


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


@app.command(
    rich_help_panel="Vectors", epilog="Example: [bold]minbert embed --input sentences.txt --output vectors.npy[/]"
)
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
    where = _device_for("minbert embed", encoder, device, precision)
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


def _device_for(feature: str, model: str | Path, device: str, precision: str) -> str:
    """The device that embeds; int8 is of the CPU, and needs no torch once its file is built, nor does an export."""
    from minbert.delivery.exported import is_export

    if precision == "int8" or is_export(Path(model)):
        return "cpu" if device == "auto" else device
    prepare_torch(feature, model)
    from minbert.machine import choose_device

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

    where = _device_for("minbert search", model, device, precision)
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
    from minbert.delivery.exported import is_export
    from minbert.delivery.search import QUESTIONS, SearchIndex, SentenceEncoder

    found = SearchIndex.load(index)
    origin = found.manifest.origin
    place = model or origin.model
    chosen = precision or ("fp32" if is_export(Path(place)) else origin.precision)  # an export runs in its own
    encoder = SentenceEncoder.load(
        place,
        pooling=origin.pooling,
        precision=chosen,  # type: ignore[arg-type]
        device=_device_for("minbert search", place, device, chosen),
    )
    lines, asked = (line for line in texts or _lines(input) if line.strip()), 0
    while window := list(islice(lines, QUESTIONS)):
        print_matches(window, found.query(window, count, encoder=encoder))
        asked += len(window)
    if not asked:
        raise MinbertError("no questions, or only empty ones; expected arguments, --input FILE, or lines")
