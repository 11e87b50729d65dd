"""Tables of speed from results/bench, for bench.numbers. What was not measured says so, with the command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import summary
from bench.plots import IMAGES, LABELS

BENCH = Path(__file__).parent.parent / "results" / "bench"
DEVICES = ("cuda", "cpu")
Content = Mapping[str, Any]


def found(name: str) -> Content | None:
    return summary.load(BENCH, name)


def value(row: Content, digits: int = 0) -> str:
    """`median (min to max)`."""
    middle, low, high = (f"{row[key]:,.{digits}f}" for key in ("median", "min", "max"))
    return f"{middle} ({low} to {high})"


def times(row: Content) -> str:
    """A ratio, `**10.2x** (9.8 to 10.4)`."""
    return f"**{row['median']:.2f}x** ({row['min']:.2f} to {row['max']:.2f})"


def missing(command: str) -> str:
    return f"Not measured yet: `{command}`.\n"


def image(name: str, text: str) -> list[str]:
    """The figure, where it was drawn."""
    return ["", f"![{text}](images/bench-{name}.svg)"] if (IMAGES / f"bench-{name}.svg").exists() else []


def where(content: Content) -> str:
    """Device, versions and repeats under a table."""
    environment = content["environment"]
    device = environment["device_name"]
    threads = f", {environment['threads']} threads" if environment["device"] == "cpu" else ""
    peers = ", ".join(f"{name} {version}" for name, version in environment["peers"].items() if version)
    return f"{device}{threads}; torch {environment['torch']}, {peers}; commit {environment['commit']}"


def timing(content: Content) -> str:
    plan = content["timing"]
    runs = f"{plan['repeats']} runs in turns, each " if plan["repeats"] > 1 else ""
    return f"{runs}{plan['rounds']} rounds of {plan['steps']} steps after {plan['warm_up']} to warm up"


def goals() -> str:
    lines = ["| figure | ours | peer | found | goal | |", "|---|---|---|---|---|---|"]
    for entry in summary.summarise(BENCH):
        goal = f"{entry['target']:.0%}" if entry["target_of"] == "ours" else f"{entry['target']:g}x"
        if entry["ours"] is None:
            lines.append(f"| {entry['figure']} | | | {entry['note']} | {goal} | |")
            continue
        share = entry["target_of"] == "ours"
        cells = [f"{entry[who]:.1%}" if share else f"{entry[who]:,.0f}" for who in ("ours", "peer")]
        reached = cells[0] if share else f"{entry['ratio']:.2f}x"
        mark = "reached" if entry["reached"] else "open"
        lines.append(f"| {entry['figure']} | {cells[0]} | {cells[1]} | **{reached}** | {goal} | {mark} |")
    return "\n".join([*lines, ""])


def training() -> str:
    """Examples/s on the task mix."""
    lines: list[str] = []
    for device in DEVICES:
        content = found(f"train-{device}")
        if content is None:
            lines += [f"{LABELS[device]}: {missing(f'python -m bench.train --device {device}')}"]
            continue
        lines += [
            f"| {LABELS[device]}, {content['precision']}, 64 texts a step | ours, examples/s | Hugging Face loop | ours / peer |",
            "|---|---|---|---|",
        ]
        for name, row in content["models"].items():
            rates = " | ".join(value(row[who]["examples_per_second"]) for who in ("ours", "peer"))
            weights = "" if row["weights"] != "random" else ", random weights"
            lines.append(f"| {name}{weights} | {rates} | {times(row['ratio'])} |")
        first = next(iter(content["models"].values()))
        notes = {name: row["peer"]["notes"].get("attention") for name, row in content["models"].items()}
        attention = ", ".join(f"{kind} for {name}" for name, kind in notes.items())
        lines += [
            "",
            f"`{content['command']}`; {content['source']}; {timing(first)}; the peer's attention: {attention}.",
            f"{where(content)}.",
            "",
        ]
    return "\n".join([*lines, *image("training", "Training, examples per second"), ""])


def pairs() -> str:
    lines: list[str] = []
    for device in DEVICES:
        content = found(f"pairs-{device}")
        if content is None or not content["models"]:
            why = f" ({content['not_measured']})" if content else ""
            lines += [f"{LABELS[device]}{why}: {missing(f'python -m bench.pairs --device {device}')}"]
            continue
        lines += [
            f"| {LABELS[device]}, {content['precision']}, 32 pairs a step | ours, pairs/s | sentence-transformers | ours / peer |",
            "|---|---|---|---|",
        ]
        for name, row in content["models"].items():
            rates = " | ".join(value(row[who]["examples_per_second"]) for who in ("ours", "peer"))
            lines.append(f"| {name} | {rates} | {times(row['ratio'])} |")
        attention = ", ".join(
            f"{row['peer']['notes']['attention']} for {name}" for name, row in content["models"].items()
        )
        notes = next(iter(content["models"].values()))["peer"]["notes"]
        lines += [
            "",
            f"`{content['command']}`; {content['source']}; {timing(content)}; the peer's attention: {attention}, "
            f"its rows: {notes['rows']}.",
            f"{where(content)}.",
            "",
        ]
    return "\n".join([*lines, ""])


def encoding() -> str:
    lines: list[str] = []
    for device, name in (("cuda", "encode-cuda"), ("cpu", "encode")):
        content = found(name)
        if content is None or not content.get("ways"):
            lines += [f"{LABELS[device]}: {missing(f'python -m bench.encode --device {device}')}"]
            continue
        lines += [f"| {LABELS[device]} | sentences/s |", "|---|---|"]
        lines += [f"| {way} | {value(row['sentences_per_second'])} |" for way, row in content["ways"].items()]
        lines += ["", f"`{content['command']}`.", ""]
    return "\n".join([*lines, *image("encode", "Encoding, sentences per second"), ""])


def int8() -> str:
    content = found("int8-accuracy")
    if content is None:
        return missing("python -m bench.accuracy MODEL --data DIR")
    lines = [f"| dev, {content['model']} | fp32 | int8 | points lost |", "|---|---|---|---|"]
    for task, exact in content["scores"]["fp32"].items():
        low, lost = content["scores"]["int8"][task]["score"], content["points_lost"][task]
        name = f"{task}, {exact['metric']}, {exact['rows']:,} rows"
        lines.append(f"| {name} | {exact['score']:.4f} | {low:.4f} | {lost:+.2f} |")
    return "\n".join([*lines, ""])


def serving() -> str:
    """The server under load, against its goals."""
    content = found("serve")
    if content is None:
        return missing("python -m bench.serve MODEL")
    load, memory, several = content["served"], content["memory"], content["several_tasks"]
    rounds = {key: content[key]["rounds"] for key in ("against_offline", "against_no_batching")}
    spread = {key: f"{min(found):.2f} to {max(found):.2f}" for key, found in rounds.items()}
    lines = [
        f"{content['figure']}, {content['precision']}, {content['model']} of minilm, `--workers {content['workers']}`, the "
        f"median of {content['turns']} turns; {where(content)}; the load generator takes "
        f"{load['generator_cores']:.2f} cores:",
        "",
        "| figure | found | goal |",
        "|---|---|---|",
        f"| requests a second, of the offline predictor's in batches of 64 | **{content['against_offline']['median']:.0%}** "
        f"({spread['against_offline']}) | 70% |",
        f"| of the same server with `--no-batching` | **{content['against_no_batching']['median']:.2f}x** "
        f"({spread['against_no_batching']}) | 1.5x |",
        f"| p99 / p50 | {load['p99_over_p50']:.1f} | at most 10 |",
        f"| one request for {len(several['tasks'])} tasks that read the same, against one task | {several['cost']:.2f}x "
        "| at most 1.15x |",
        f"| from start to ready | {content['ready_seconds']:.1f} s | at most 5 s |",
        f"| memory after {memory['requests']:,} requests | {memory['after'] / 2**20:.0f} MiB, {memory['growth']:+.1%} "
        "| within 5% |",
        f"| largest difference of an answer from the offline predictor's | {content['worst_difference']:.0e} | 1e-4 |",
    ]
    return "\n".join([*lines, ""])


def heads() -> str:
    lines: list[str] = []
    for device in DEVICES:
        content = found(f"heads-{device}")
        if content is None:
            lines += [f"{LABELS[device]}: {missing(f'python -m bench.heads --device {device}')}"]
            continue
        rates = " | ".join(value(content[who]) for who in ("ours", "peer"))
        lines += [
            f"| {LABELS[device]}, three tasks of one text | one encoding, texts/s | three models | ratio |",
            "|---|---|---|---|",
            f"| {content['model']['name']} | {rates} | {times(content['ratio'])} |",
            "",
            f"`{content['command']}`; {content['texts']:,} {content['source']}. {where(content)}.",
            "",
        ]
    return "\n".join([*lines, ""])


def scaling() -> str:
    """Time, utilisation and memory by texts a step."""
    lines: list[str] = []
    for device in DEVICES:
        content = found(f"scaling-{device}")
        if content is None:
            lines += [f"{LABELS[device]}: {missing(f'python -m bench.scaling --device {device}')}"]
            continue
        lines += [
            f"| {LABELS[device]} | texts a step | tokens | ours, ms a step | peer | ours, use | peer | ours, peak MiB | peer |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        for name, model in content["models"].items():
            best = max(model["batches"], key=lambda n: model["batches"][n]["ours"]["flops_utilisation"]["median"])
            for texts, row in model["batches"].items():
                both = [row[who] for who in ("ours", "peer")]
                steps = " | ".join(value(one["step_milliseconds"], 2) for one in both)
                use = " | ".join(f"{one['flops_utilisation']['median']:.1%}" for one in both)
                held = [one["peak_memory"] for one in both]
                memory = " | ".join(f"{one['allocated'] / 2**20:,.0f}" if one else "" for one in held)
                mark = " (best)" if texts == best else ""
                tokens = f"{row['tokens_per_step']:,.0f}"
                lines.append(f"| {name} | {texts}{mark} | {tokens} | {steps} | {use} | {memory} |")
        rate = content["matrix_rate"]
        speed = rate["flops_per_second"]["median"] / 1e12
        sizes = ", ".join(f"{name} {row['bytes'] / 2**20:,.0f} MiB" for name, row in content["models"].items())
        lines += [
            "",
            f"Use = {content['formula']}; the rate of a {rate['size']}^3 product in {rate['precision']} here: "
            f"{speed:,.1f} TFLOP/s. Weights in fp32: {sizes}.",
            f"`{content['command']}`; {content['source']}. {where(content)}.",
            "",
        ]
    figures = [*image("scaling", "Time of a step and use of the matrix rate"), *image("memory", "Peak memory")]
    return "\n".join([*lines, *figures, ""])


def tasks() -> str:
    lines: list[str] = []
    for device in DEVICES:
        content = found(f"tasks-{device}")
        if content is None:
            lines += [f"{LABELS[device]}: {missing(f'python -m bench.scaling --device {device}')}"]
            continue
        lines += [f"| {LABELS[device]}, tasks in a step of 64 texts | ms a step |", "|---|---|"]
        lines += [f"| {number} | {value(row['step_milliseconds'], 2)} |" for number, row in content["tasks"].items()]
        lines += ["", f"`{content['command']}`; {timing(content)}. {where(content)}.", ""]
    return "\n".join([*lines, *image("tasks", "Time of a step by tasks"), ""])


def curves() -> str:
    content = found("curves-cuda") or found("curves-cpu")
    if content is None:
        return missing("python -m bench.curves --device cuda")
    lines = ["| fast against plain | largest difference of a step | mean | mean of the last 100: fast | plain |"]
    lines += ["|---|---|---|---|---|"]
    for name, row in content["curves"].items():
        last = row["last_mean"]
        lines.append(
            f"| {name} | {row['largest_difference']:.4f} | {row['mean_difference']:.5f} | "
            f"{last['fast']:.4f} | {last['plain']:.4f} |"
        )
    note = (
        f"`{content['command']}`; {content['steps']} steps of {content['batch_size']} rows, {content['model']['name']}."
    )
    return "\n".join([*lines, "", note, *image("curves", "Loss of the fast and the plain path"), ""])


def profile() -> str:
    """Before and after: the plain path and the fast one under the profiler."""
    lines: list[str] = []
    for kernels, label in (("plain", "plain path"), ("auto", "fast path")):
        content = found(f"profile-{kernels}-cuda") or found(f"profile-{kernels}-cpu")
        if content is None:
            command = f"python -m bench.profile --kernels {kernels} --device cuda"
            lines += [f"The {label}: {missing(command)}"]
            continue
        busy = "" if content["busy"] is None else f", the GPU at work {content['busy']:.0%} of the time"
        launches = ", ".join(f"{name} {number:,.0f}" for name, number in content["launches_per_step"].items())
        lines += [
            f"The {label}, {content['model']['name']}, a step of 64 texts: {content['step_milliseconds']:.2f} ms{busy}; "
            f"{content['kernels_per_step']:,.0f} kernels taking {content['kernel_milliseconds']:.2f} ms; "
            f"{content['cpu_milliseconds']:.2f} ms of the CPU" + (f"; calls: {launches}." if launches else "."),
            "",
            "| kernel | ms a step | calls a step |" if content["kernels"] else "| operation on the CPU | ms a step | |",
            "|---|---|---|",
        ]
        for row in (content["kernels"] or content["cpu"])[:8]:
            calls = f"{row['calls']:,.0f}" if "calls" in row else ""
            lines.append(f"| `{row['name'].replace('|', '/')}` | {row['milliseconds']:.3f} | {calls} |")
        lines += ["", f"`{content['command']}`. {where(content)}.", ""]
    return "\n".join([*lines, ""])


def speed() -> str:
    """README's table: what was measured, in a few lines."""
    lines = ["| each in one run on the same texts | found | device |", "|---|---|---|"]
    for entry in summary.summarise(BENCH):
        if entry["ours"] is not None:
            reached = f"{entry['ours']:.1%}" if entry["target_of"] == "ours" else f"{entry['ratio']:.2f}x"
            lines.append(f"| {entry['figure']} | **{reached}** | {entry['device']} |")
    encode, optimizer = found("encode"), found("optimizers")
    if optimizer is not None:
        ratio = f"**{optimizer['ratio']:.2f}x**"
        lines.append(f"| AdamW step, minilm's parameters, ours / torch.optim.AdamW(foreach=True) | {ratio} | CPU |")
    if encode is not None:
        same = f"vectors equal within {encode['max_difference']:.0e}"
        lines += ["", f"Encoding: {encode['texts']:,} {encode['source']}; same weights, in fp32 {same}."]
    training = found("train-cuda")
    if training is not None:
        drawn = [name for name, model in training["models"].items() if model["weights"] == "random"]
        lines += [f"Speed does not depend on the weights; those of {', '.join(drawn)} are random."] if drawn else []
    return "\n".join([*lines, "[All benchmarks](docs/benchmarks.md), with spreads, peers' settings and commands.", ""])
