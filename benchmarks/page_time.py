"""The parts of ``RESULTS.md`` about seconds of the driver, of decisions beside an earlier version, of long answers."""

from __future__ import annotations

import statistics
from textwrap import wrap
from typing import Any

from benchmarks.runs import pm, table

__all__ = ["beside_page", "driver_note", "driver_page", "long_page", "on_machine", "prompt_page"]


def on_machine(data: dict[str, Any]) -> str:
    """The machine, and its load: of the whole, before and after, or the least and the greatest of its rows."""
    m, load = data["machine"], data.get("load")
    if load is None:
        each = [row["load"] for row in data["rows"]]
        said = f"{min(each):g} to {max(each):g}"
    elif isinstance(load, list):
        said = " before and ".join(f"{value:g}" for value in load) + " after" * (len(load) > 1)
    else:
        said = f"{load:g}"
    return f"on {m['cpu']} ({m['cores']} cores, load average {said})"


#: Rollouts of a large step, and seconds of the driver that they may take.
LARGE = 65_536
AIM = 2.0


def _quick(row: dict[str, Any]) -> bool:
    """Whether a large step is within the goal; what was generated beyond a batch has seconds of its own."""
    return _each(row) * row["generated"] <= AIM * max(1.0, row["generated"] / LARGE)


def _each(row: dict[str, Any]) -> float:
    """Processor seconds of the driver for each rollout that is generated."""
    return sum(row[whose] for whose in ("own", "verl", "queue")) / row["generated"]


def driver_page(data: dict[str, Any]) -> list[str]:
    """Processor seconds of the driver, by preset and size of the batch."""
    goal = [
        [f"`{row['preset']}`" for row in data["rows"] if row["rollouts"] == LARGE and _quick(row) is met]
        for met in (True, False)
    ]
    rows = [
        [
            f"`{row['preset']}`",
            f"{row['rollouts']:,}",
            f"{row['generated']:,}",
            f"{row['parts'].get('decide', 0.0):.2f}",
            f"{row['own']:.2f}",
            f"{row['verl']:.2f}",
            f"{row['queue']:.2f}",
            f"{1e3 * _each(row):.3f}",
            f"{row['after_last']:.2f}",
        ]
        for row in data["rows"]
    ]
    return [
        "## The driver",
        "",
        f"`python -m benchmarks.driver`: processor seconds of verl's driver for a step of ours, beside generation and training, "
        f"{on_machine(data)}; TransferQueue with verl's own settings, answers of {data['tokens']} tokens that come in "
        f"{data['waves']} waves. *Decisions*: the engine's. *Ours*: requests, looks, decisions, the batch, its layout, the "
        "journal; *verl*: its own functions, which its trainer calls for the same prompts and rows, too (prompts are read and "
        "put into a batch, rows are balanced over ranks); *queue*: inside TransferQueue's calls. *A rollout*: all three, for each "
        "that was generated: who drops groups generates more than a batch. *After the last answer*: what "
        "of all this a step waits for; the rest passes while rollouts are under way.",
        "",
        *(
            [
                f"The goal was {AIM:g} s for a batch of {LARGE:,} rollouts, or for as many generated where those are more. Met: "
                f"{', '.join(goal[0]) or 'by none'}; missed: {', '.join(goal[1]) or 'by none'}. What is left grows with requests "
                "and not with rollouts: a group that is topped up is two or more of them, and `solo` asks for each rollout by "
                "itself.",
                "",
            ]
            if any(goal)
            else []
        ),
        *table(
            [
                "policy",
                "rollouts of a batch",
                "generated",
                "decisions, s",
                "ours, s",
                "verl, s",
                "queue, s",
                "a rollout, ms",
                "after the last answer, s",
            ],
            rows,
        ),
    ]


def driver_note(data: dict[str, Any]) -> list[str]:
    """What a prompt for each rollout costs the driver, as one of the limits of `solo`; nothing where that was not measured."""
    rows = {(row["preset"], row["rollouts"]): row for row in data["rows"]}
    sizes = sorted(size for preset, size in rows if preset == "solo" and ("grpo", size) in rows)
    if not sizes:
        return []

    def seconds(preset: str, size: int) -> str:
        row = rows[preset, size]
        return f"{_each(row) * row['generated']:.1f}"

    said = "- The driver's work grows with prompts, too: " + "; ".join(
        f"at {size:,} rollouts {seconds('solo', size)} s of processor time in a step, {rows['solo', size]['after_last']:.1f} of "
        f"them after the last answer, where GRPO with groups of {data['groups_of']} takes {seconds('grpo', size)}"
        for size in sizes
    )
    return wrap(
        f"{said} ([measured](../benchmarks/RESULTS.md#the-driver)).",
        118,
        subsequent_indent="  ",
        break_on_hyphens=False,
    )


def prompt_page(data: dict[str, Any]) -> list[str]:
    """Milliseconds of TransferQueue for each prompt and for each rollout, whatever trains."""
    rows = [
        [name, *(f"{data['median'][of][who]:.2f}" for who in ("worker", "controller", "storage", "wall"))]
        for name, of in (("a prompt, without its rollouts", "prompt"), ("a rollout", "row"))
    ]
    return [
        "## A prompt more in verl's agent loop",
        "",
        f"`{data['command']}`: what the messages of a prompt and the row of a rollout cost, from {data['rollouts']:,} rollouts as "
        f"groups of {data['groups_of'][0]} and of {data['groups_of'][1]} side by side, {on_machine(data)}; medians of "
        f"{len(data['rows'])} repeats, in milliseconds of processor time. The controller serves one request at a time. It "
        "passes while rollouts are under way, and is spread over the agent loop's workers.",
        "",
        *table(["", "worker", "controller", "storage", "passed with one worker"], rows),
    ]


def beside_page(data: dict[str, Any]) -> list[str]:
    """An engine's step beside an earlier version's."""
    s, rows = data["settings"], []
    for row in data["rows"]:
        cells = [f"`{row['preset']}`", f"{1e3 * statistics.median(row['earlier']):.1f}"]
        for name in ("rounds", "in order"):
            ratios = [ours / theirs for ours, theirs in zip(row[name], row["earlier"], strict=True)]
            cells += [f"{1e3 * statistics.median(row[name]):.1f}", pm(ratios, "{:.2f}")]
        rows.append(cells)
    repeats = len(data["rows"][0]["earlier"])
    return [
        "## A step's decisions beside 0.1.0",
        "",
        f"`{data['command']}`: processor milliseconds of the engine for a step of {s['batch'] * s['n']:,} rollouts with "
        f"{s['prompts']:,} prompts known, {repeats} pair{'s' * (repeats > 1)} of processes in turn, {on_machine(data)}. *Rounds*: as "
        f"0.1.0, each round's results together. *In order*: the default now, with results that come back in {s['looks']} "
        "looks.",
        "",
        *table(["policy", "0.1.0, ms", "rounds, ms", "of 0.1.0's", "in order, ms", "of 0.1.0's"], rows),
    ]


def long_page(data: dict[str, Any]) -> list[str]:
    """Seconds of a step where answers have a long tail, on the real pipeline."""
    s, arms = data["settings"], {row["arm"]: row["runs"] for row in data["rows"]}
    base = arms["verl"]
    rows = []
    for arm, runs in arms.items():
        mean = {k: statistics.mean(r.get(k, 0.0) for r in runs) for k in runs[0]}
        gen = [r["gen"] / b["gen"] for r, b in zip(runs, base, strict=True)]
        apiece = [
            (r["gen"] / r["informative"]) / (b["gen"] / b["informative"])
            for r, b in zip(runs, base, strict=True)
            if r["informative"]
        ]
        rows.append(
            [
                arm,
                f"{mean['gen']:.1f}",
                pm(gen, "{:.2f}"),
                f"{mean['informative']:.1f}",
                pm(apiece, "{:.2f}") if apiece else "–",
                f"{mean['rollouts']:.0f}" if "rollouts" in mean else "–",
                f"{mean['aborted_tokens'] / mean['tokens']:.0%}" if mean.get("tokens") else "–",
                f"{mean['idle']:.0%}" if "idle" in mean else "–",
                f"{mean['step']:.1f}",
            ]
        )
    return [
        "## Long answers, on the real pipeline",
        "",
        f"`{data['command']}`: verl's `sync` trainer and ours on real vLLM without a GPU, {on_machine(data)}; "
        f"{s['batch']} groups of {s['n']} over {s['slots']} slots, answers of "
        f"{statistics.mean(r['length'] for r in base):.0f} tokens on average and up to {s['cap']}, a model that stands still, "
        f"{len(base)} repeat{'s' * (len(base) > 1)} of {s['measured']} steps on one start-up. Ours begin with the statistics "
        f"of one pass. verl's trainer looks every {s['poll']:g} s here, as ours, and not every 2 s. Seconds of generation, and "
        "of a step with training; shares are of verl's own trainer's without a filter, in the same repeat.",
        "",
        "These are two cores, on which vLLM, its scheduler and the driver share every second: a decode step costs much more for "
        "each further sequence than on a GPU, so idle slots cost less here and further rollouts more. It shows the "
        "direction; [the model](#seconds-of-generation-in-a-model) has the proportions of a GPU.",
        "",
        *table(
            [
                "trainer",
                "generation, s",
                "of verl's",
                "informative groups",
                "s an informative group, of verl's",
                "rollouts",
                "aborted tokens",
                "slots idle",
                "step, s",
            ],
            rows,
        ),
    ]
