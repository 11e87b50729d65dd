"""The application, what its commands share, and the entry point."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from minbert import __version__
from minbert.console import err
from minbert.errors import MinbertError, require

if TYPE_CHECKING:
    from minbert.delivery.predictor import Predictor

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
encoders_app = typer.Typer(help="The pretrained encoders on this machine, and how to get more.")
data_app = typer.Typer(help="Check, count and download datasets.", no_args_is_help=True)
app.add_typer(encoders_app, name="encoders", rich_help_panel="Vectors")
app.add_typer(data_app, name="data", rich_help_panel="Data and machine")
search_app = typer.Typer(
    help="Nearest sentences: an index of a file's sentences, and questions to it.", no_args_is_help=True
)
app.add_typer(search_app, name="search", rich_help_panel="Vectors")

RecipePath = Annotated[Path, typer.Argument(help="A recipe, such as recipes/sample.toml.")]
ModelPath = Annotated[Path, typer.Argument(help="A model folder, such as runs/sample/model, or an ONNX export.")]
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


def prepare_torch(feature: str, model: str | Path) -> None:
    """What a model needs that is not exported: torch, with no more threads than there are cores for us."""
    from minbert.delivery.exported import is_export

    if is_export(Path(model)):
        return
    needs_torch(feature)
    from minbert.machine import set_threads

    set_threads()


def open_predictor(feature: str, model: Path, device: str, precision: str = "fp32") -> Predictor:
    prepare_torch(f"{feature} of a model that is not exported to onnx", model)
    from minbert.delivery.predictor import Predictor

    return Predictor.load(model, device=device, precision=precision)  # type: ignore[arg-type]


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
