"""Datasets and this machine: `minbert data`, `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from minbert.cli.base import DataOption, RecipePath, SetOption, app, data_app
from minbert.console import err, out


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


@app.command(rich_help_panel="Data and machine", epilog="Example: [bold]minbert doctor[/]")
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
