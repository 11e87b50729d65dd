"""Figures of results/bench for the docs: docs/images/bench-*.svg. What was not measured is not drawn.

python -m bench.plots
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.settings import OUT
from bench.summary import load

IMAGES = Path(__file__).parent.parent / "docs" / "images"
OURS, PEER = "#1b6ca8", "#c9a227"
DEVICES = ("cuda", "cpu")
LABELS = {"cuda": "GPU", "cpu": "CPU"}

Axes = Any
Content = Mapping[str, Any]


def training(folder: Path) -> Callable[[Any], None] | None:
    """Examples/s of ours and the peers, a group of bars for each device and model."""
    groups = []
    for device in DEVICES:
        content = load(folder, f"train-{device}")
        for name, found in (content or {}).get("models", {}).items():
            groups.append((f"{name}, {LABELS[device]}, against\na Hugging Face loop", found))
        pairs = load(folder, f"pairs-{device}")
        for name, found in (pairs or {}).get("models", {}).items():
            groups.append((f"{name}, {LABELS[device]}, pairs, against\nsentence-transformers' trainer", found))
    if not groups:
        return None

    def draw(figure: Any) -> None:
        for place, (label, found) in enumerate(groups):
            axes = figure.add_subplot(-(-len(groups) // 3), 3, place + 1)
            for spot, (who, colour) in enumerate((("ours", OURS), ("peer", PEER))):
                _bar(axes, spot, found[who]["examples_per_second"], colour)
            axes.set_xticks([0, 1], ["minbert", "peer"])
            axes.set_title(f"{label}\n{found['ratio']['median']:.2f}x", fontsize=9)
            axes.set_ylabel("" if place % 3 else "examples/s, 64 texts a step")

    return draw


def scaling(folder: Path) -> Callable[[Any], None] | None:
    """Time of a step, and share of the matrix rate, by texts a step."""
    return _by_batch(
        folder,
        ("step_milliseconds", "ms a step", True, 1.0),
        ("flops_utilisation", "% of the measured matrix rate", False, 100.0),
    )


def memory(folder: Path) -> Callable[[Any], None] | None:
    content = load(folder, "scaling-cuda")
    if content is None:
        return None
    lines = [
        (f"{name}, {label}", colour, style, [(int(n), found[who]["peak_memory"]["allocated"] / 2**20) for n, found in model["batches"].items()])
        for (name, model), style in zip(content["models"].items(), ("-", "--"), strict=False)
        for who, label, colour in (("ours", "minbert", OURS), ("peer", "Hugging Face loop", PEER))
    ]  # fmt: skip

    def draw(figure: Any) -> None:
        axes = figure.add_subplot(1, 1, 1)
        for label, colour, style, points in lines:
            axes.plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=3, label=label)
        _logarithmic(axes, "texts a step", "peak MiB on the GPU")

    return draw


def tasks(folder: Path) -> Callable[[Any], None] | None:
    found = {device: load(folder, f"tasks-{device}") for device in DEVICES}
    if not any(found.values()):
        return None

    def draw(figure: Any) -> None:
        measured = {device: content for device, content in found.items() if content}
        for place, (device, content) in enumerate(measured.items()):
            axes = figure.add_subplot(1, len(measured), place + 1)
            _line(axes, {int(n): row["step_milliseconds"] for n, row in content["tasks"].items()}, OURS, "minbert")
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(map(int, content["tasks"])), list(content["tasks"]))
            axes.set_ylim(bottom=0)
            axes.set_xlabel("tasks in a step of 64 texts")
            axes.set_ylabel("ms a step")
            axes.set_title(f"minilm, {LABELS[device]}", fontsize=9)

    return draw


def encode(folder: Path) -> Callable[[Any], None] | None:
    found = {name: load(folder, name) for name in ("encode-cuda", "encode")}
    measured = {name: content for name, content in found.items() if content and content.get("ways")}
    if not measured:
        return None

    def draw(figure: Any) -> None:
        for place, (name, content) in enumerate(measured.items()):
            axes = figure.add_subplot(1, len(measured), place + 1)
            ways = content["ways"]
            for spot, (way, row) in enumerate(ways.items()):
                _bar(axes, spot, row["sentences_per_second"], OURS if way.startswith("minbert") else PEER, across=True)
            axes.set_yticks(range(len(ways)), list(ways), fontsize=8)
            axes.invert_yaxis()
            axes.set_xlabel("sentences/s")
            axes.set_title("GPU" if name.endswith("cuda") else "CPU", fontsize=9)

    return draw


def curves(folder: Path) -> Callable[[Any], None] | None:
    content = load(folder, "curves-cuda") or load(folder, "curves-cpu")
    if content is None:
        return None

    def draw(figure: Any) -> None:
        for place, (name, found) in enumerate(content["curves"].items()):
            axes = figure.add_subplot(1, 2, place + 1)
            steps = range(content["window"], content["window"] + len(found["plain"]))
            axes.plot(steps, found["plain"], color=PEER, linewidth=2.5, label="plain")
            axes.plot(steps, found["fast"], color=OURS, linewidth=1, label="fast")
            axes.set_xlabel("step")
            axes.set_ylabel(f"loss, mean of {content['window']} steps")
            axes.set_title(name, fontsize=9)
            axes.legend(frameon=False, fontsize=8)

    return draw


def _by_batch(folder: Path, *panels: tuple[str, str, bool, float]) -> Callable[[Any], None] | None:
    found = {device: load(folder, f"scaling-{device}") for device in DEVICES}
    content = found["cuda"] or found["cpu"]
    if content is None:
        return None

    def draw(figure: Any) -> None:
        for place, (key, label, logarithmic, factor) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), place + 1)
            for (name, model), style in zip(content["models"].items(), ("-", "--"), strict=False):
                for who, title, colour in (("ours", "minbert", OURS), ("peer", "Hugging Face loop", PEER)):
                    rows = {int(n): row[who][key] for n, row in model["batches"].items()}
                    _line(axes, rows, colour, f"{name}, {title}", style, factor)
            _logarithmic(axes, "texts a step", label, vertical=logarithmic)

    return draw


def _bar(axes: Axes, place: int, found: Content, colour: str, *, across: bool = False) -> None:
    reach = [[found["median"] - found["min"]], [found["max"] - found["median"]]]
    (axes.barh if across else axes.bar)(
        place, found["median"], color=colour, **{"xerr" if across else "yerr": reach}, error_kw={"linewidth": 1}
    )


def _line(
    axes: Axes, rows: Mapping[int, Content], colour: str, label: str, style: str = "-", factor: float = 1.0
) -> None:
    places = list(rows)
    axes.plot(
        places,
        [factor * row["median"] for row in rows.values()],
        style,
        color=colour,
        marker="o",
        markersize=3,
        label=label,
    )
    low, high = ([factor * row[key] for row in rows.values()] for key in ("min", "max"))
    axes.fill_between(places, low, high, color=colour, alpha=0.2, linewidth=0)


def _logarithmic(axes: Axes, across: str, up: str, *, vertical: bool = True) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted({int(x) for line in axes.lines for x in line.get_xdata()})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    if vertical:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.legend(frameon=False, fontsize=7)


FIGURES: dict[str, tuple[Callable[[Path], Callable[[Any], None] | None], tuple[float, float]]] = {
    "training": (training, (9, 6.0)),
    "scaling": (scaling, (9, 3.4)),
    "memory": (memory, (5.5, 3.4)),
    "tasks": (tasks, (7, 3.0)),
    "encode": (encode, (9, 3.4)),
    "curves": (curves, (9, 3.2)),
}


def draw_all(results: Path, images: Path) -> list[str]:
    """Every figure that there are results for; returns their names."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # The same results give the same bytes, and letters stay letters
    matplotlib.rcParams.update({"svg.hashsalt": "minbert", "svg.fonttype": "none", "font.size": 9})
    drawn = []
    images.mkdir(parents=True, exist_ok=True)
    for name, (prepare, size) in FIGURES.items():
        draw = prepare(results)
        if draw is None:
            continue
        figure = pyplot.figure(figsize=size, layout="constrained", facecolor="white")
        draw(figure)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="both", color="#e5e5e5", linewidth=0.6)
            axes.set_axisbelow(True)
        figure.savefig(images / f"bench-{name}.svg", metadata={"Date": None})
        pyplot.close(figure)
        drawn.append(name)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=OUT)
    parser.add_argument("--images", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    print("drawn: " + (", ".join(draw_all(arguments.results, arguments.images)) or "nothing, no results"))


if __name__ == "__main__":
    main()
