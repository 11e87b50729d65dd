"""The rows of the papers and what the papers claim: recipes/PAPER/ROW.toml and recipes/PAPER/findings.toml.

    papers = find_papers(Path("recipes"))
    papers["hillebrand"].rows["3-cosine-similarity"].reported.dev     # {"sst": 0.518, "quora": 0.799, "sts": 0.592}

A folder without findings.toml is a paper without claims. Files whose names begin with "common" are bases of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from minbert.config import PaperConfig
from minbert.errors import MinbertError, shown, suggest
from minbert.toml_tables import from_table, read_toml

FINDINGS = "findings.toml"
COMMON = "common"
EVERY_TASK, MEAN = "every task", "mean"
LABELS = {"sst": "SST", "quora": "Quora", "sts": "STS", "cfimdb": "CFIMDB", MEAN: "overall"}


@dataclass(frozen=True)
class Finding:
    """A claim of a paper: one row is better than another, or no better, on a task or on the mean."""

    claim: str
    better: str
    worse: str
    on: str
    """A task, "mean" or "every task"."""
    where: str = ""
    """The place in the paper."""
    kind: Literal["better", "no better"] = "better"
    needs_pooler: bool = False
    """It is about what a pretrained pooler has learnt."""


@dataclass(frozen=True)
class Claims:
    """findings.toml."""

    title: str
    best: str
    """The paper's best row."""
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    """Guesses and deviations that concern several rows."""


@dataclass(frozen=True)
class Row:
    """A row of a paper's table."""

    paper: str
    name: str
    path: Path
    is_best: bool = False
    """The paper's best."""

    @property
    def key(self) -> str:
        return f"{self.paper}/{self.name}"

    @property
    def recipes(self) -> Path:
        """The folder of all of them."""
        return self.path.parent.parent

    @cached_property
    def reported(self) -> PaperConfig:
        """What the paper says, from the row's own file alone."""
        found: PaperConfig = from_table(
            PaperConfig, read_toml(self.path).get("paper", {}), f"{shown(self.path)}: paper"
        )
        return found


@dataclass(frozen=True)
class Paper:
    name: str
    """Its folder."""
    claims: Claims
    rows: Mapping[str, Row]

    @property
    def decisive(self) -> set[str]:
        """The rows that findings compare."""
        return {row for finding in self.claims.findings for row in (finding.better, finding.worse)}

    def rank(self, row: str) -> int:
        """How soon to run it: the best row, those that findings need, the others."""
        return 0 if row == self.claims.best else 1 if row in self.decisive else 2


def find_papers(folder: Path) -> dict[str, Paper]:
    """The papers below a folder of recipes, those with claims first."""
    found = [_paper(place) for place in sorted(folder.iterdir()) if place.is_dir()] if folder.is_dir() else []
    papers = [paper for paper in found if paper.rows]
    if not papers:
        raise MinbertError(f"{shown(folder)}: no recipes of papers; expected PAPER/ROW.toml below it")
    return {paper.name: paper for paper in sorted(papers, key=lambda paper: not paper.claims.best)}


def _paper(folder: Path) -> Paper:
    paths = [
        path for path in sorted(folder.glob("*.toml")) if path.name != FINDINGS and not path.name.startswith(COMMON)
    ]
    place = folder / FINDINGS
    claims = from_table(Claims, read_toml(place), shown(place)) if place.exists() else Claims(folder.name, "")
    rows = {path.stem: Row(folder.name, path.stem, path, path.stem == claims.best) for path in paths}
    for used in [claims.best] * bool(claims.best) + [n for one in claims.findings for n in (one.better, one.worse)]:
        if used not in rows:
            raise MinbertError(f'{shown(place)}: no row "{used}"{suggest(used, rows)}; expected a recipe beside it')
    return Paper(folder.name, claims, rows)


def choose_rows(papers: Mapping[str, Paper], targets: Iterable[str]) -> list[Row]:
    """The rows that `PAPER` or `PAPER/ROW` name; all without any."""
    chosen: list[Row] = []
    for target in list(targets) or list(papers):
        name, slash, row = target.strip("/").partition("/")
        if name not in papers:
            raise MinbertError(f'no paper "{name}"{suggest(name, papers)}; expected one of: {", ".join(papers)}')
        rows = papers[name].rows
        if slash and row not in rows:
            raise MinbertError(f'{name} has no row "{row}"{suggest(row, rows)}; expected one of: {", ".join(rows)}')
        chosen += [rows[row]] if slash else rows.values()
    return list(dict.fromkeys(chosen))
