"""`minbert quickstart`: the whole system on the embedded sample, in a few minutes on two cores."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from minbert.console import RunWatcher, err, out, print_results
from minbert.delivery.predictor import Predictor
from minbert.encoders import find_encoder, get_encoder
from minbert.errors import MinbertError, shown
from minbert.evaluation.report import write_report
from minbert.experiment import train
from minbert.recipes import read_recipe

RECIPE = Path(__file__).parent / "data" / "sample" / "recipe.toml"
SENTENCES = [
    ("What a delightful evening, I loved every minute.", "It was a wonderful night out."),
    ("How do I get ink out of a shirt?", "What removes pen stains from cotton?"),
    ("The worst meal I have ever been served.", "The museum closes at six on Sundays."),
]


def quickstart(folder: Path) -> None:
    """Train, score, predict, report."""
    recipe = read_recipe(RECIPE)
    try:
        find_encoder(recipe.model.encoder)
    except MinbertError:
        with err.status(f"getting the encoder {recipe.model.encoder}"):
            get_encoder(recipe.model.encoder)
    with RunWatcher(out) as watcher:
        run = train(recipe, out=folder, overwrite=True, watcher=watcher)
    print_results(run.results)
    out.print("These scores show that everything works; a sample of this size says nothing about quality.")
    _answer(Predictor.load(run.model))
    report = folder / "report.html"
    write_report([run.folder], report)
    out.print(f"model:  {shown(run.model)}", highlight=False)
    out.print(f"report: {shown(report)}", highlight=False)


def _answer(predictor: Predictor) -> None:
    first, second = ([pair[side] for pair in SENTENCES] for side in (0, 1))
    found = predictor.predict(first, second)
    table = Table("text", "sentiment", "second text", "paraphrase", "similarity", title="three sentences, one model")
    for number, (text, other) in enumerate(SENTENCES):
        feeling, same = found["sentiment"][number], found["paraphrase"][number]
        table.add_row(
            text,
            f"{feeling['label']} ({feeling['probability']:.0%})",
            other,
            f"{same['probabilities']['duplicate']:.0%}",
            f"{found['similarity'][number]['score']:.1f} of 5",
        )
    out.print(table)
