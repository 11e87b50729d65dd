"""What was run: the results of every row by encoder and seed, and what they say about the papers' findings.

results = load_results(papers, Path("results/reproduction"))
verdicts(papers["hillebrand"], results["minilm"])
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from minbert.config import Recipe
from minbert.errors import MinbertError, shown
from minbert.recipes import read_recipe
from minbert.reproduction.findings import Verdict, judge, scores_of
from minbert.reproduction.jobs import (
    ASIDE,
    Job,
    Settings,
    changes_since,
    key_within,
    longest_part,
    other_members,
    table_of,
    tables_of,
    was_cut,
)
from minbert.reproduction.recipes import LABELS, MEAN, Finding, Paper, Row


@dataclass(frozen=True)
class Found:
    """The results of one row with one encoder, by seed."""

    row: Row
    encoder: str
    by_seed: Mapping[int, Mapping[str, Any]]

    @cached_property
    def scores(self) -> dict[int, dict[str, float]]:
        return {seed: scores_of(one, self.row.reported.rule) for seed, one in self.by_seed.items()}

    def values(self, task: str) -> list[float]:
        return [scores[task] for scores in self.scores.values() if task in scores]

    def one_answer(self, task: str) -> int:
        """With how many seeds a classification task has the same answer almost always."""
        matrices = [one["dev"].get(task, {}).get("confusion", [[0]]) for one in self.by_seed.values()]
        answers = [np.sum(matrix, axis=0) for matrix in matrices]  # a row is a label's, a column an answer's
        return sum(bool(counts.max() >= ALMOST_ALWAYS * counts.sum() > 0) for counts in answers)

    @cached_property
    def shares(self) -> dict[int, float]:
        """Of the steps of a whole run, how many the cap left, or of its stage of which it left least; 1: all."""
        return {
            seed: min(part.get("planned_steps", 1) / part.get("whole_steps", 1) for part in (one, *_stages(one)))
            for seed, one in self.by_seed.items()
        }

    @cached_property
    def sets(self) -> set[tuple[str, ...]]:
        """What was changed on the command line, but for what changes no score on dev."""
        aside = {f"training.{name}" for name in ASIDE}
        given = [one["reproduction"]["set"] for one in self.by_seed.values()]
        return {tuple(setting for setting in one if key_within(setting) not in aside) for one in given}

    def is_changed_by(self, setting: str) -> bool:
        """Is the row's recipe another with it?"""
        try:
            recipe = read_recipe(self.row.path)
            known = table_of(setting) in (None, *tables_of(self.row))
            return known and read_recipe(self.row.path, sets=[setting]) != recipe
        except MinbertError:  # of a version whose recipes said other things
            return True

    @cached_property
    def files(self) -> dict[str, set[str]]:
        """By name, what was in the files that were read; more than one content if not the same for all seeds."""
        found: dict[str, set[str]] = {}
        for one in self.by_seed.values():
            for part in (one, *_stages(one)):
                for note in (note for tasks in part.get("data", {}).values() for note in tasks.values()):
                    for name, digest in note.get("files", {}).items():
                        found.setdefault(name, set()).add(digest)
        return found

    @cached_property
    def shares_trainings(self) -> bool:
        """Do ensembles of two seeds have members of one training? Then these seeds are no samples of their own."""
        trained = [{member["seed"] for member in one.get("members", ())} for one in self.by_seed.values()]
        return sum(map(len, trained)) > len(set().union(*trained))

    @cached_property
    def weights(self) -> set[str]:
        """Of the encoders that the runs began with; older results do not say."""
        return {weights for one in self.by_seed.values() if (weights := one.get("encoder_weights"))}

    @cached_property
    def lacks_pooler(self) -> bool:
        """Did a run begin with a pooler that nobody had trained?"""
        older = self.encoder in ("minilm", "mpnet")  # results that do not say it are of these two, and theirs is none
        return any(one.get("untrained_pooler", older) for one in self.by_seed.values())

    @cached_property
    def caps(self) -> set[int]:
        """Of the runs that a cap shortened; none where all were whole."""
        return {one["reproduction"]["steps_cap"] for one in self.by_seed.values() if was_cut(one)}

    def conditions(self, caps: set[int], idle: set[str]) -> set[str]:
        """What was changed, in words, in a table of such caps: a run that is within the only one needs no words of its own.
        Nor do settings that change none of the table's rows."""
        found = set()
        for one in self.by_seed.values():
            cap = 0
            if was_cut(one):
                cap = one["reproduction"]["steps_cap"]
            elif len(caps) == 1 and longest_part(one) <= max(caps):
                cap = max(caps)
            steps = f"at most {cap:,} steps a run" if cap else "whole runs"
            told = [setting for setting in one["reproduction"]["set"] if setting in self.settings - idle]
            found.add(steps + "".join(f", `{setting}`" for setting in told))
        return found

    @cached_property
    def settings(self) -> set[str]:
        """All of `sets`."""
        return {setting for one in self.sets for setting in one}

    @cached_property
    def is_current(self) -> bool:
        """Was all of it made by the recipe as it is now, and by what its heads are now?"""
        try:
            return not any(changes_since(one, *self._as_now(seed)) for seed, one in self.by_seed.items())
        except MinbertError:
            return False

    @cached_property
    def other_members(self) -> list[str]:
        """Of ensembles whose runs would have other seeds now: of the recipe all the same."""
        if not self.is_current:
            return []
        return [told for seed, one in self.by_seed.items() for told in other_members(one, self._as_now(seed)[0])]

    def _as_now(self, seed: int) -> tuple[Recipe, Settings]:
        """The recipe that would be run now, as that seed was."""
        changed = self.by_seed[seed]["reproduction"]
        settings = Settings(self.encoder, sets=tuple(changed["set"]), steps_cap=changed["steps_cap"])
        return Job(self.row, seed).recipe(settings), settings


def _stages(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The results of a run's stages."""
    return list(results.get("stages", {}).values())


ALMOST_ALWAYS = 0.975
"""The part of the dev rows from which on one class is a model's only answer."""
UNEVEN = 1.25
"""How many times as large a part of its steps one row may have than another that it is compared with."""

NEEDED = (
    *("dev", "overall.2023", "overall.2024", "data", "recipe", "seconds"),
    *("environment.device_name", "environment.commit", "reproduction.set", "reproduction.steps_cap"),
)
"""What every result has."""

Results = dict[str, dict[str, Found]]
"""By encoder and row."""


def load_results(papers: Mapping[str, Paper], folder: Path) -> Results:
    """Everything that was run, the encoder with most of it first."""
    found: Results = {}
    for place in sorted(folder.iterdir()) if folder.is_dir() else []:
        rows: dict[str, Found] = {}
        for row in (row for paper in papers.values() for row in paper.rows.values()):
            paths = {path.stem.removeprefix("seed"): path for path in (place / row.paper / row.name).glob("seed*.json")}
            by_seed = {int(seed): _read(path) for seed, path in paths.items() if seed.isdecimal()}
            if by_seed:
                rows[row.key] = Found(row, place.name, dict(sorted(by_seed.items())))
        if rows:
            found[place.name] = rows
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise MinbertError(
            f"{shown(path)}: not JSON ({error}); expected what minbert reproduce wrote, or no file"
        ) from None
    missing = [key for key in NEEDED if not _has(found, key.split("."))]
    if missing:
        raise MinbertError(f"{shown(path)}: no {', '.join(missing)}; expected what minbert reproduce wrote, or no file")
    return found


def _has(found: Any, path: Sequence[str]) -> bool:
    return not path or (isinstance(found, dict) and path[0] in found and _has(found[path[0]], path[1:]))


def tasks_of(paper: Paper, found: Mapping[str, Found]) -> list[str]:
    """The columns: the tasks that the paper or our runs have scores of, and the mean."""
    theirs = {task for row in paper.rows.values() for task in row.reported.dev}
    ours = {task for row in found.values() for scores in row.scores.values() for task in scores}
    return [task for task in LABELS if task in theirs | ours | {MEAN}]


def verdicts(paper: Paper, found: Mapping[str, Found]) -> list[Verdict]:
    """What the runs say about each finding. Runs under different conditions are not compared."""
    judged = []
    for finding in paper.claims.findings:
        better, worse = (found.get(f"{paper.name}/{row}") for row in (finding.better, finding.worse))
        if better is None or worse is None or not _alike(better, worse):
            judged.append(judge(finding, {}, {}))
        else:
            hindrance = _hindrance(finding, better, worse)
            judged.append(judge(finding, better.scores, worse.scores, hindrance=hindrance))
    return judged


def _alike(one: Found, other: Found) -> bool:
    """Were they run with the same settings, files and encoder, as their recipes are now? What older ones came to decides
    nothing."""
    if (
        not (one.is_current and other.is_current)
        or len(one.caps | other.caps) > 1
        or len(one.weights | other.weights) > 1
    ):
        return False
    if any(len(one.files.get(name, set()) | other.files.get(name, set())) > 1 for name in {*one.files, *other.files}):
        return False
    every = one.settings | other.settings
    return not any(
        found.is_changed_by(setting)
        for found in (one, other)
        for own in found.sets
        for setting in every.difference(own)
    )


def _hindrance(finding: Finding, one: Found, other: Found) -> str:
    """Why two rows say nothing about a claim though both were run alike."""
    if finding.needs_pooler and (one.lacks_pooler or other.lacks_pooler):
        return "the encoder lacks a trained pooler"
    dependent = [f"`{found.row.name}`" for found in (one, other) if found.shares_trainings]
    return f"seeds of {' and of '.join(dependent)} share trainings" if dependent else _cut_unevenly(one, other)


def _cut_unevenly(one: Found, other: Found) -> str:
    """What a cap left of two rows with the seed where that differs most; nothing where it is about the same part of both."""
    shared = [(share, other.shares[seed]) for seed, share in one.shares.items() if seed in other.shares]
    left = max(shared, key=lambda pair: max(pair) / min(pair), default=(1.0, 1.0))
    if max(left) <= UNEVEN * min(left):
        return ""
    return f"the cap left {left[0]:.0%} of `{one.row.name}` and {left[1]:.0%} of `{other.row.name}`"


def gains(row: Found, base: Found | None) -> list[float]:
    """How far a row's overall lies above that of the one it was built on, for each seed that both have; empty where they
    cannot be compared. Both are counted by the row's own rule, which may not be that of the other one's paper."""
    if base is None or not _alike(row, base) or _cut_unevenly(row, base):
        return []
    pairs = [(one, base.by_seed[seed]) for seed, one in row.by_seed.items() if seed in base.by_seed]
    scores = [[scores_of(one, row.row.reported.rule) for one in pair] for pair in pairs]
    return [ours[MEAN] - before[MEAN] for ours, before in scores if ours.keys() == before.keys()]
