"""Runs: `minbert quickstart`, `train`, `evaluate`, `ensemble`, `compare`, `report`, `errors`, `reproduce`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from minbert.cli.base import (
    DataOption,
    DeviceOption,
    ModelPath,
    PrecisionOption,
    RecipePath,
    SetOption,
    app,
    needs_torch,
)
from minbert.console import (
    ReproductionWatcher,
    RunWatcher,
    err,
    number,
    out,
    print_evaluations,
    print_notes,
    print_results,
)
from minbert.errors import MinbertError, shown

RESULTS, PAGE = Path("results/reproduction"), Path("docs/reproduction.md")


@app.command(rich_help_panel="Training and scoring", epilog="Example: [bold]minbert quickstart[/]")
def quickstart(
    out_dir: Annotated[Path, typer.Option("--out", help="The run's folder.")] = Path("runs/quickstart"),
) -> None:
    """Train three tasks on the embedded sample, show the scores, answer three sentences, write a report."""
    needs_torch("minbert quickstart")
    from minbert.quickstart import quickstart as run_quickstart

    run_quickstart(out_dir)


@app.command(
    rich_help_panel="Training and scoring",
    epilog="Example: [bold]minbert train recipes/sample.toml --set training.epochs=2 --out runs/mine[/]",
)
def train(
    recipe: RecipePath,
    set: SetOption = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="The run's folder; default runs/NAME-seedN.")] = None,
    seed: Annotated[int | None, typer.Option(help="Replaces the recipe's.")] = None,
    encoder: Annotated[str | None, typer.Option("--encoder", "-e", help="Replaces the recipe's.")] = None,
    data: DataOption = None,
    device: DeviceOption = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the run's last checkpoint, or with more epochs.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a run that is there.")] = False,
    copy_results: Annotated[Path | None, typer.Option("--results", help="Also write results.json here.")] = None,
) -> None:
    """Train a recipe: one encoder, its tasks, their files."""
    needs_torch("minbert train")
    from minbert.evaluation.results import write_json
    from minbert.experiment import train as run_training
    from minbert.recipes import read_recipe
    from minbert.training.stopping import asked_to_end

    sets = [*(set or []), *([f"model.encoder={encoder}"] if encoder else [])]
    chosen = read_recipe(recipe, sets=sets, seed=seed)
    try:
        with asked_to_end(), RunWatcher() as watcher:
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


@app.command(rich_help_panel="Training and scoring", epilog="Example: [bold]minbert evaluate runs/sample/model[/]")
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
    from minbert.evaluating import evaluate_model
    from minbert.evaluation.evaluate import overall
    from minbert.evaluation.results import write_json
    from minbert.recipes import read_recipe

    if set and recipe is None:
        raise MinbertError("--set changes a recipe, and none is named; expected MODEL RECIPE --set ...")
    chosen = read_recipe(recipe, sets=set or []) if recipe else None
    with RunWatcher() as watcher:
        found = evaluate_model(model, chosen, data=data, device=device, precision=precision, watcher=watcher)  # type: ignore[arg-type]
    print_evaluations(found)
    rules = overall({name: one.score for name, one in found.items()}, {name: one.task for name, one in found.items()})
    out.print(f"overall: {number(rules['2023'])} (2023 rule)  {number(rules['2024'])} (2024 rule)", highlight=False)
    if output is not None:
        write_json(output, {"overall": rules, "dev": {name: one.summary() for name, one in found.items()}})


@app.command(
    rich_help_panel="Training and scoring",
    epilog="Example: [bold]minbert ensemble runs/both runs/a runs/b/models/step-00000120[/]",
)
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
    from minbert.model.manifest import read_manifest

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


@app.command(rich_help_panel="Training and scoring", epilog="Example: [bold]minbert compare runs/a runs/b[/]")
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


@app.command(
    rich_help_panel="Training and scoring", epilog="Example: [bold]minbert report runs/sample --output report.html[/]"
)
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file.")] = Path("report.html"),
) -> None:
    """One self-contained HTML file: curves, confusion matrices, scatter plots, the worst mistakes, the recipe."""
    from minbert.evaluation.report import write_report

    write_report(runs, output)
    out.print(f"written: {shown(output)}", highlight=False, soft_wrap=True)


@app.command(
    rich_help_panel="Training and scoring",
    epilog="Example: [bold]minbert errors runs/sample --task sts --count 5 --out errors.md[/]",
)
def errors(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    task: Annotated[list[str] | None, typer.Option("--task", "-t", help="Default: all.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Rows of each direction, at most.")] = 10,
    out_file: Annotated[Path | None, typer.Option("--out", help="Also write them here, as Markdown or .json.")] = None,
    texts: Annotated[bool, typer.Option(help="In that file: the sentences, or only their ids.")] = True,
) -> None:
    """Where the wrong answers on dev are, and the worst of them: false positives and negatives, chosen by rules."""
    from minbert.evaluation.mistakes import read_mistakes, tables, write_mistakes

    found = read_mistakes(run, tasks=task, count=count)
    for table in tables(found):
        out.print(table)
    if out_file is not None:
        write_mistakes(found, out_file, texts=texts)
        out.print(f"written: {shown(out_file)}", highlight=False, soft_wrap=True)


@app.command(
    rich_help_panel="Training and scoring",
    epilog="Example: [bold]minbert reproduce hillebrand --encoder minilm --seeds 3 --data data[/]",
)
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
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="Also run what has a result that was made by another recipe or from other files."
        ),
    ] = False,
    only_page: Annotated[bool, typer.Option("--only-page", help="Run nothing, write the page anew.")] = False,
    recipes: Annotated[Path, typer.Option(help="Folder of the papers' recipes.")] = Path("recipes"),
    results: Annotated[Path, typer.Option(help="Folder for one JSON a run.")] = RESULTS,
    runs: Annotated[Path, typer.Option(help="Folder for the runs themselves.")] = Path("runs/reproduction"),
    page: Annotated[
        Path | None, typer.Option(help=f"The page; default {PAGE}, of other --results reproduction.md there.")
    ] = None,
) -> None:
    """Run the rows of the papers that are missing, and write the page with their numbers and ours."""
    from minbert.reproduction.figures import draw_all
    from minbert.reproduction.found import load_results
    from minbert.reproduction.jobs import Settings, check_page, check_ready, plan_jobs
    from minbert.reproduction.page import write_page
    from minbert.reproduction.recipes import choose_rows, find_papers
    from minbert.reproduction.runs import Outcome, run_jobs
    from minbert.training.stopping import asked_to_end

    place = page or (PAGE if results == RESULTS else results / PAGE.name)
    papers = find_papers(recipes)
    check_page(place)
    load_results(papers, results)  # a file that is none is told now, not after hours
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
            replace=replace,
        )
        planned = plan_jobs(papers, rows, seeds=seeds)
        check_ready(planned, settings)
        with asked_to_end(), ReproductionWatcher() as watcher:
            outcome = run_jobs(planned, settings, watcher)
        out.print(
            f"{len(outcome.there)} were there, {len(outcome.done)} run, {len(outcome.failed)} failed, "
            f"{len(outcome.stopped)} stopped on the way, {len(outcome.left)} not begun",
            highlight=False,
        )
        if outcome.stopped or outcome.left:
            out.print("the same command goes on where this one ended")
        others = [job for job, why in outcome.there.items() if why]
        if others:
            why = "; ".join(outcome.there[others[0]][:3])
            out.print(
                f"of those there {len(others)} were made otherwise and stay, such as "
                f"{shown(others[0].result(settings))} ({why}): --replace makes them anew, --results FOLDER keeps both",
                highlight=False,
                soft_wrap=True,
            )
    write_page(papers, results, place, draw=draw_all)
    out.print(f"written: {shown(place)}", highlight=False, soft_wrap=True)
    if outcome.failed or outcome.interrupted:
        raise typer.Exit(130 if outcome.interrupted else 1)
