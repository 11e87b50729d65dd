"""What a trained model is for: `minbert predict`, `try`, `serve`, `export`, `submit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from minbert.cli.base import (
    DataOption,
    DeviceOption,
    ModelPath,
    PrecisionOption,
    app,
    needs_torch,
    open_predictor,
    prepare_torch,
)
from minbert.console import (
    AnswerTable,
    RunWatcher,
    err,
    out,
    print_export,
    progress_bar,
)
from minbert.errors import require, shown


@app.command(
    rich_help_panel="Using a model",
    epilog="Example: [bold]minbert predict runs/sample/model --input reviews.csv --output answers.csv[/]",
)
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
    from minbert.delivery.files import predict_file

    predictor = open_predictor("minbert predict", model, device, precision)
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


@app.command("try", rich_help_panel="Using a model", epilog="Example: [bold]minbert try runs/sample/model[/]")
def try_command(model: ModelPath, device: DeviceOption = "cpu", precision: PrecisionOption = "fp32") -> None:
    """Type a text, or two, and see what the model says, and which words mattered."""
    from minbert.trying import try_model

    with err.status(f"loading {shown(model)}"):
        predictor = open_predictor("minbert try", model, device, precision)
    try_model(predictor, title=shown(model))


@app.command(
    rich_help_panel="Using a model", epilog="Example: [bold]minbert serve runs/sample/model --precision int8[/]"
)
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
    prepare_torch("minbert serve of a model that is not exported to onnx", model)
    for module in ("fastapi", "uvicorn"):
        require(module, "serve", "minbert serve")
    from minbert.delivery.server import ServeSettings
    from minbert.delivery.server import serve as run_server
    from minbert.delivery.service import Limits

    limits = Limits(max_body, max_texts, max_tokens, queue, timeout, budget, wait / 1000, batching)
    told = f"serving {shown(model)} on http://{host}:{port} (the page; /docs: the interface)"
    err.print(told, highlight=False, soft_wrap=True)
    run_server(ServeSettings(model, host, port, workers, precision, device, api_keys, index, drain, limits))


@app.command(
    rich_help_panel="Using a model",
    epilog="Example: [bold]minbert export runs/sample/model --to onnx --out sample-onnx[/]",
)
def export(
    model: ModelPath,
    to: Annotated[str, typer.Option("--to", help="onnx, onnx-int8, sentence-transformers, transformers or torch.")],
    out_dir: Annotated[Path, typer.Option("--out", help="The new folder.")],
    data: DataOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an export that is there.")] = False,
    measured: Annotated[
        int, typer.Option("--measured", min=0, help="Dev rows of each task that int8 is measured on. 0: all.")
    ] = 2000,
    tolerance: Annotated[
        float, typer.Option(min=0, help="Of a metric, that int8 may cost; more is not written.")
    ] = 0.02,
) -> None:
    """Write a model in a form that others load, compared with the model itself before it appears."""
    needs_torch("minbert export")
    from minbert.exporting import export as write_export

    with RunWatcher() as watcher:
        found = write_export(
            model,
            to=to,
            out=out_dir,
            data=data,
            overwrite=overwrite,
            measured=measured,
            tolerance=tolerance,
            watcher=watcher,
        )
    print_export(found)


@app.command(
    rich_help_panel="Using a model", epilog="Example: [bold]minbert submit runs/multitask/model --data data[/]"
)
def submit(
    model: ModelPath,
    data: DataOption = None,
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the six files.")] = Path("predictions"),
    device: DeviceOption = "auto",
) -> None:
    """Write the CS224N course's six prediction files, in its exact format."""
    import os

    from minbert.delivery.submit import submit as write_submission

    predictor = open_predictor("minbert submit", model, device)
    for found in write_submission(predictor, Path(data or os.environ.get("MINBERT_DATA") or "data"), out_dir):
        if found.missing:
            err.print(f"[yellow]not written:[/] {shown(found.path)}: {escape(found.missing)}", soft_wrap=True)
        else:
            skipped = f", {found.skipped} rows skipped" if found.skipped else ""
            out.print(f"{shown(found.path)}: {found.rows:,} rows{skipped}", highlight=False, soft_wrap=True)
