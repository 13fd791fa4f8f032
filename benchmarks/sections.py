"""What each section of ``RESULTS.md`` says: lines of Markdown from the JSON.

Accuracies come from :mod:`benchmarks.standings`; other measurements are lists of records, shown by one writer
(:class:`Records`) from a table of columns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.presets import FULL, INGREDIENTS, SOLO_PARTS
from benchmarks.runs import Runs, pm, table
from benchmarks.standings import POOL_NAMES, POOLS, Standing, finals_of
from benchmarks.standings import share as share_of
from verl_adaptive.significance import LEAST_SEEDS, significant

Row = Mapping[str, Any]
Found = Mapping[str, Mapping[str, Standing]]

#: Presets that ran at the learning rate of `solo`, and what each has instead.
WITHOUT = {
    "solo-2": "two rollouts a prompt",
    "solo-epoch": "prompts in epoch order",
    "solo-no_prompt": "no memory of a prompt, only of its source",
    "solo-no_source": "prior from all prompts, not from the data source",
    "reinforce": "no memory: the batch's mean, epoch order",
    "spo": "SPO's options",
}

JUDGED = [
    "## How it is judged",
    "",
    "* **Equal generated rollouts.** In a pool every run generates as many rollouts as GRPO, dropped and aborted ones "
    "included, and makes the same number of optimizer updates a step (*epochs2*: twice as many).",
    "* **Held-out accuracy** of prompts that were never trained on. *Pretrained*: SmolLM2-135M on verl and vLLM, 8 sampled "
    "answers to each question. *Real*: a model of 0.12 million parameters on verl and vLLM; *tiny*: the same size in one "
    "process; both by exact pass rates. Accuracies are means over the last tenth of a run.",
    "* **Rollouts to GRPO's accuracy**: where GRPO's final accuracy (groups of 8) of the same seed is first reached, as a share "
    "of the budget; the median over seeds. *never*: the median seed does not reach it.",
    "* **Accuracy difference**: final accuracy minus GRPO's of the same seed; the mean, ± half of its 95 % interval (Student's "
    "t, paired by seed). **Bold: significant**, that is: at least three seeds, and the interval excludes zero. Only runs from "
    "the same starting weights are compared: supervised training gives other starting weights on another processor. A policy "
    "that shares none with GRPO's runs is not in the table.",
    "* **Rollouts a step**: generated, as a share of those that GRPO generates for the same number of optimizer updates.",
    "* **Tokens trained**: as a share of those that verl's own GRPO trains, which are all that it generates.",
    "* **Learning rate**: each policy's best. Each rate is compared with the one that has the most runs, over the seeds and "
    "starting weights that both have. Each pool names the policies "
    "without a second one; on the pretrained model these have the best of 128 rollouts a step, and half of it with two "
    "epochs. A policy is in a table once it has three seeds at its best rate. Options of `solo` were chosen on other seeds (20 and up, `results/choose_torch.json`).",
    "* **Baselines**: GRPO with groups of 2 and 4 and the same rollouts a step (`grpo-2`, `grpo-4`), of 16 (*halved16*), with a "
    "decayed learning rate (*decay*), with two epochs over each batch (*epochs2*), and REINFORCE with the batch's mean as "
    "baseline (`reinforce`). The best GRPO is the best of group sizes and decay, by mean accuracy over "
    "the seeds that they share.",
    "* **Pools.** *Natural mix*: all difficulties. *Sparse*: most prompts hopeless or solved. *Large*: twice the prompts. *One "
    "pass*: no prompt is met twice. *Noisy*: one reward in ten is flipped. *Offset*: also, rewards of the second data "
    "source are 0.5 higher, of the third 1 higher. *128 prompts*: all of them in every step of 128 rollouts. *4,096 rollouts a "
    "step*: from 8,192 prompts. *Other tasks*: ten more data sets of reasoning-gym, "
    "taken by a rule (`pretrained_model.py`); seed 2 was trained in float32, on a processor without AVX-512. "
    "*Nothing right at first*: questions that the starting model answers less than once in 250 tries.",
    "* **Versions.** Rows of the papers' presets, of `full`, of ingredients and of `oracle` in the *real* and *tiny* pools were "
    "measured with 0.1.0, which generated in rounds (`dapo`: as many prompts as were missing). Measured since, in one process: "
    "`aero`, both forms of `pilot_commit`, `greso-tight` and *nothing right at first*. Each cell's JSON names its version. "
    "Rows of `solo` and `spo` in the *real* pools, *offset*, *128 prompts* and *4,096 rollouts a step*, and those with thinned "
    "rows, were measured before the weight of a data source faded with a prompt's visits. Commands that are gone are in the "
    "[last section](#studies-whose-code-has-left-the-tree). `full` "
    f"is short for `+adaptive={' '.join(FULL['full'])}`. `oracle` sees exact pass rates: a bound, not a method.",
    "",
]


def share(value: float | None) -> str:
    """Rollouts to a target."""
    return "never" if value is None else f"{value:.2f}"


def difference(values: Sequence[float]) -> str:
    """Mean ± half width, bold where significant."""
    text = pm(values, "{:+.3f}")
    return f"**{text}**" if values and significant(values) else text


def counted(standing: Standing | None) -> str:
    """A policy's difference from GRPO and, in brackets, its seeds."""
    return "–" if standing is None else f"{difference(list(standing.gains.values()))} ({len(standing.gains)})"


def section(title: str, about: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A heading, a paragraph and a table."""
    return [title, "", about, "", *table(head, rows)]


def accuracy_table(made: Mapping[str, Standing], names: Sequence[str]) -> list[str]:
    """One pool: a row a policy."""
    rows = [
        [
            f"`{name}`",
            str(len(s.gains)),
            f"{s.lr:g}",
            share(s.of_grpo),
            "" if name == "grpo" else difference(list(s.gains.values())),
            "" if "epochs2" in name else f"{s.step:.2f}",  # two versions counted updates of a second epoch differently
            f"{s.trained:.2f}",
        ]
        for name, s in ((name, made[name]) for name in names)
    ]
    head = ["policy", "seeds", "learning rate", "rollouts to GRPO's accuracy", "accuracy difference"]
    head += ["rollouts a step", "tokens trained"]
    return table(head, rows)


def accuracy(found: Found) -> list[str]:
    """All pools: presets and baselines, then ingredients and ablations of the natural mix in one process."""
    lines = ["## Accuracy at equal rollouts", ""]
    aside = {*INGREDIENTS, *SOLO_PARTS} - {"pilot_commit-pipelined"}
    for pool, made in found.items():
        shown = (
            aside - {"solo-thin"} if pool.startswith("pretrained") else aside
        )  # elsewhere beside `solo`, in a table of its own
        names = [name for name in made if name.split()[0] not in shown]
        best = f"GRPO ends at {made['grpo'].final:.3f}. Best GRPO: `{made['grpo'].best_grpo}`."
        if greatest := [f"`{name}` {made[name].greatest:.1f}" for name in names if made[name].greatest]:
            best += f" Greatest |advantage|: {', '.join(greatest)}."
        lines += [
            f"### {POOL_NAMES[pool][0].upper()}{POOL_NAMES[pool][1:]}",
            "",
            best + one_rate(made, names),
            "",
            *accuracy_table(made, names),
        ]
    base = found["tiny/base"]
    parts = [name for name in base if name in INGREDIENTS]
    lines += ["### The papers' ingredients one at a time, in one process", "", one_rate(base, parts).strip(), ""]
    return [*lines, *accuracy_table(base, parts)]


def one_rate(made: Mapping[str, Standing], names: Sequence[str]) -> str:
    """Which policies' learning rate was not chosen, for the paragraph above a table."""
    alone = [f"`{name}`" for name in names if made[name].alone]
    told = "all" if len(alone) == len(names) else ", ".join(alone)
    return f" Without a second learning rate from the same start: {told}." if alone else ""


def ablations(runs: Runs) -> list[str]:
    """What each part and option of `solo` adds, in one process: accuracy minus `solo`'s of the same seed."""
    rows, lr = [], runs.best_lr("base", "solo")
    for name, title in WITHOUT.items():
        if gains := runs.less(("base", name, lr), ("base", "solo", lr)):
            rows.append([title, f"`{name}`", str(len(gains)), difference(gains)])
    return section(
        "### `solo` without one of its parts, in one process",
        f"Learning rate {lr:g}; final accuracy minus that of `solo` of the same seed.",
        ["instead", "name in the results", "seeds", "accuracy difference"],
        rows,
    )


def told(runs: Runs) -> list[str]:
    """What an expectation of every prompt is worth on a pool of one pass."""
    rows = []
    for variant, what in (("visible-onepass", "digits, carries and borrows"), ("exact-onepass", "the exact pass rate")):
        for lr in runs.lrs(variant):
            if gains := runs.less((variant, "solo", lr), ("onepass", "solo", lr)):
                rows.append([what, f"{lr:g}", str(len(gains)), difference(gains)])
    return section(
        "### A prior for prompts never met, one pass",
        "`solo` with `adaptive.warm_start` and a column `prior` (it counts for four rollouts), in one process: final accuracy minus that\n"
        "of `solo` without it, of the same seed. *Digits, carries and borrows*: a linear fit to what the question shows, made\n"
        "with the exact pass rates, which nobody has before a run.",
        ["prior", "learning rate", "seeds", "accuracy difference"],
        rows,
    )


def thinned_pools(runs: Runs, name: str) -> dict[str, tuple[float, list[float]]]:
    """Pool → share of the generated tokens that train, and accuracy minus that of `solo` of the same seed."""
    found = {}
    for variant in dict.fromkeys(key[0] for key in runs.cells):
        for lr in runs.lrs(variant):
            one = [(variant, name, lr, seed) for seed in runs.seeds(variant, name, lr)]
            trained = [runs.trained(key, key) for key in one]
            if gains := runs.less((variant, name, lr), (variant, "solo", lr)):
                found[variant] = (statistics.mean(trained), gains)
    return found


def _thinned_pool(variant: str) -> str:
    """A pool's name: ``epochs2-sparse`` is the sparse one with two epochs over each batch."""
    pool = variant.removeprefix("epochs2").removeprefix("-") or "base"
    return POOL_NAMES[f"tiny/{pool}"] + ", two epochs" * variant.startswith("epochs2")


def thinned(runs: Runs) -> list[str]:
    """`solo` with thinned rows beside `solo`, pool by pool; one file of runs of one version."""
    rows = [
        [_thinned_pool(pool), f"`{name}`", str(len(gains)), f"{trained:.2f}", difference(gains)]
        for name in ("solo-thin", "solo-thin1.5")
        for pool, (trained, gains) in thinned_pools(runs, name).items()
    ]
    return section(
        "### `solo` with thinned rows, in one process",
        "`solo-thin` is `adaptive.advantage.thin=1`, `solo-thin1.5` is 1.5. Share of the generated tokens that train, and final\n"
        "accuracy minus that of `solo` of the same seed. Learning rate 3e-4.",
        ["pool", "name", "seeds", "tokens trained", "accuracy difference"],
        rows,
    )


def two_epochs(runs: Runs) -> list[str]:
    """`solo` with two epochs over each batch, by learning rate, beside one epoch at its best."""
    rows = []
    for pool, (variant, *_) in POOLS.items():
        twice = "-".join(["epochs2", *([] if variant == "base" else [variant])])
        once, grpo = (runs.best_lr(variant, name) for name in ("solo", "grpo"))
        if not pool.startswith("tiny/") or once is None or grpo is None:
            continue
        finals = finals_of(runs, variant, "grpo", grpo)
        for lr in runs.lrs(twice):
            one, two = (variant, "solo", once), (twice, "solo", lr)
            if gains := runs.less(two, one):
                target = {seed: finals[seed] for seed in runs.pairs(two, one) if seed in finals}
                shares = [share(share_of(runs, cell, target)) for cell in (one, two)]
                told = f"{difference(gains)} ({len(gains)})"
                rows.append([POOL_NAMES[pool], f"{once:g}", shares[0], f"{lr:g}", shares[1], told])
    heads = ["pool", "one epoch at", "rollouts to GRPO's accuracy", "two epochs at", "rollouts to GRPO's accuracy"]
    return section(
        "### `solo` with two epochs over each batch, in one process",
        "By learning rate; accuracy minus that of one epoch at its best rate (seeds).",
        [*heads, "accuracy difference"],
        rows,
    )


def step_ratios(runs: Runs, preset: str) -> dict[str, list[float]]:
    """What a step of the pretrained model takes, as ratios to GRPO's of the same seed and start: tokens generated, tokens
    trained, and the median seconds. None where fewer seeds pair than tell anything."""
    one, other = (("128", name, runs.best_lr("128", name)) for name in (preset, "grpo"))
    seeds = runs.pairs(one, other)
    pairs = [(runs.cells[(*one, s)], runs.cells[(*other, s)]) for s in seeds] if len(seeds) >= LEAST_SEEDS else []
    return {
        "generated": [a["curve"][-1][3] / b["curve"][-1][3] for a, b in pairs],
        "trained": [a["curve"][-1][4] / b["curve"][-1][4] for a, b in pairs],
        "seconds": [a["step_seconds"]["step"] / b["step_seconds"]["step"] for a, b in pairs],
    }


def ends(runs: Runs) -> list[str]:
    """Where the pretrained model's runs end, by learning rate, and what a step took at the best."""
    rows: list[list[str]] = []
    loads: list[float] = []
    rates = runs.lrs("128")
    for name in runs.measured("128"):
        at = {lr: [("128", name, lr, seed) for seed in runs.seeds("128", name, lr)] for lr in rates}
        final = [f"{pm([runs.final(key) for key in keys])} ({len(keys)})" if keys else "–" for keys in at.values()]
        cells = [runs.cells[key] for key in at[runs.best_lr("128", name)]]
        told = [pm([cell["ends"][w][1] for cell in cells], "{:.2f}") for w in ENDS]
        seconds = step_ratios(runs, name)["seconds"]
        took = f"{pm(seconds, '{:.2f}')} ({len(seconds)})" if seconds else "–"
        rows.append([f"`{name}`", *final, *told, took])
        loads += [load for cell in cells for load in cell["load"]]
    heads = ["policy", *(f"accuracy at {lr:g} (seeds)" for lr in rates), *ENDS.values()]
    return section(
        "### Ends of runs, pretrained, 128 rollouts a step",
        "The runs have several sets of starting weights, so rows cannot be compared with one another. Other work ran on the two "
        f"cores, too: load averages of {min(loads):g} to {max(loads):g}.",
        [*heads, "seconds of a step, of `grpo`'s from the same start (seeds)"],
        rows,
    )


def plain(runs: Runs) -> list[str]:
    """verl's own GRPO, which ran without the plugin, beside ``grpo`` of the same seed, rate and start."""
    said = []
    for key in sorted(key for key in runs.cells if key[:2] == ("128", "verl")):
        ours = ("128", "grpo", *key[2:])
        if ours in runs.cells and runs.start(runs.cells[ours]) == runs.start(runs.cells[key]):
            at = runs.curve(key, "rollouts")
            apart = np.interp(at, runs.curve(ours, "rollouts"), runs.curve(ours, "held_out")) - runs.curve(
                key, "held_out"
            )
            said.append(
                f"seed {key[3]}: over {len(at)} validations the accuracy of `grpo` minus its own is {apart.mean():+.3f} on "
                f"average, and at most {np.abs(apart).max():.3f} in size"
            )
    return [f"verl's own GRPO ran without the plugin, too, on the pretrained model ({'; '.join(said)}).", ""]


def by_source(runs: Runs) -> list[str]:
    """Which data sources `solo`'s lead on the pretrained model is of."""
    said = []
    for variant in ("128", "512"):
        solo, grpo = ((variant, preset, runs.best_lr(variant, preset)) for preset in ("solo", "grpo"))
        ends = [
            [
                {name: end for name, (_, end) in runs.cells[(*policy, seed)]["sources"].items()}
                for policy in (solo, grpo)
            ]
            for seed in runs.pairs(solo, grpo)
        ]
        gains = {name: [mine[name] - theirs[name] for mine, theirs in ends] for name in sorted(ends[0][0])}
        told = ", ".join(f"{name} {difference(values)}" for name, values in gains.items())
        said.append(f"with {variant} rollouts a step ({len(ends)} seeds) {told}")
    about = (
        "By data source, of 12 questions and 8 answers to each, `solo` ends above GRPO by (intervals each for itself)"
    )
    return [
        f"{about}: {'; '.join(said)}. Of seven fixed answers none is paid much more often than the commonest right one (`tests/test_pretrained.py`).",
        "",
    ]


def gemma(runs: Runs) -> list[str]:
    """Where the second pretrained model's runs end, by learning rate; also those that are too few for a table."""
    said = []
    for name in runs.measured("gemma"):
        at = {lr: runs.seeds("gemma", name, lr) for lr in runs.lrs("gemma")}
        ends = [
            f"{np.mean([runs.final(('gemma', name, lr, seed)) for seed in seeds]):.3f} at {lr:g} ({len(seeds)})"
            for lr, seeds in at.items()
            if seeds
        ]
        said.append(f"`{name}` {', '.join(ends)}")
    model = "Gemma 3 270M, with 33,186 tokens of its vocabulary (122 million parameters)"
    return [f"Accuracy at the end of runs of {model}, by learning rate (seeds): {'; '.join(said)}.", ""]


ENDS = {"pass@8": "pass@8", "entropy": "entropy, nats a token", "length": "length of an answer"}


def on_machine(data: Row) -> str:
    """The machine and its load."""
    m, load = data["machine"], data.get("load")
    if load is None:
        load = [row["load"] for row in data["rows"]]
        load = [min(load), max(load)]
    said = " to ".join(f"{x:g}" for x in load) if isinstance(load, list) else f"{load:g}"
    return f"on {m['cpu']} ({m['cores']} cores, load average {said})"


@dataclass(frozen=True)
class Records:
    """A section that is one table: a row a record.

    Attributes:
        file: in ``results/``, whose data it shows.
        title: its heading.
        about: a paragraph, from the data.
        rows: the records, from the data.
        head: the columns' headings.
        row: a record's cells, as a format of its values; what it has not is a dash.
    """

    file: str
    title: str
    about: Callable[[Row], str]
    rows: Callable[[Row], Iterable[Row]]
    head: str
    row: str

    def lines(self, data: Row) -> list[str]:
        """The section."""
        rows = [[cell.format_map(_Cells(row)) for cell in self.row.split(" | ")] for row in self.rows(data)]
        return section(f"## {self.title}", self.about(data), self.head.split(" | "), rows)


class _Dash:
    """What is not known."""

    def __format__(self, form: str) -> str:
        return "–"


class _Cells(dict[str, Any]):
    """A record's values, for a format."""

    def __getitem__(self, name: str) -> Any:
        value = self.get(name)
        return _Dash() if value is None else value


def _clock_rows(data: Row) -> Iterable[Row]:
    """Policies of the model."""
    grpo = data["policies"]["grpo"]
    for policy, e in data["policies"].items():
        learns = data["mixed"].get(policy, {})
        name = "verl's `filter_groups`" if policy == "verl_filter_groups" else f"`{policy}`"
        yield {**e, "policy": name, "of": e["begun"] / grpo["begun"], "to_grpo": learns.get("to_grpo")}


def _learning_seeds(data: Row) -> int:
    """Seeds of the pool that learns, which every policy has."""
    (seeds,) = {learns["seeds"] for learns in data["mixed"].values()}
    return int(seeds)


def long_rows(data: Row) -> Iterable[Row]:
    arms = {row["arm"]: row["runs"] for row in data["rows"]}
    whole = data["settings"]["batch"] * data["settings"]["n"]
    for arm, runs in arms.items():
        paired = list(zip(runs, arms["verl"], strict=True))
        sent = [whole if arm == "verl" else r.get("rollouts") for r in runs]
        yield {
            "arm": arm,
            "rollouts": pm([None if x is None else x / whole for x in sent], "{:.2f}"),
            "gen": pm([r["gen"] / b["gen"] for r, b in paired], "{:.2f}"),
            "apiece": pm(
                [(r["gen"] / r["informative"]) / (b["gen"] / b["informative"]) for r, b in paired if r["informative"]],
                "{:.2f}",
            ),
            "idle": statistics.mean(r.get("idle", 0.0) for r in runs),
            "trained": statistics.mean(r["trained"] for r in runs) / whole,
            "step": pm([r["step"] / b["step"] for r, b in paired], "{:.2f}"),
        }


def _step_rows(data: Row) -> Iterable[Row]:
    for mode, found in data["modes"].items():
        for arm in found["pairs"][0]:
            ratio = {w: pm([p[arm][w] / p["verl"][w] for p in found["pairs"]], "{:.2f}") for w in ("step", "rest")}
            yield {"mode": mode, "arm": arm, "pairs": len(found["pairs"]), **ratio}


def driver_seconds(row: Row) -> float:
    """Processor seconds of a step in the driver."""
    return float(row["own"] + row["verl"] + row["queue"])


def _driver_rows(data: Row) -> Iterable[Row]:
    return [{**row, "seconds": driver_seconds(row)} for row in data["rows"]]


def _noise_seeds(data: Row) -> int:
    """Seeds, the same of every row."""
    return len({row["seed"] for row in data["rows"]})


def noise_scales(data: Row) -> dict[tuple[str, str], dict[int, list[float]]]:
    """Of a ground and an estimator: noise scales over seeds at each step."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in data["rows"]:
        at = found.setdefault((row["ground"], row["estimator"]), {})
        at.setdefault(row["step"], []).append(float("inf") if row["rollouts"] is None else row["rollouts"])
    return found


def _noise_rows(data: Row) -> Iterable[Row]:
    for (ground, estimator), steps in noise_scales(data).items():
        told = [f"{statistics.median(v):,.0f} ({min(v):,.0f} to {max(v):,.0f})" for v in steps.values()]
        name = f"`{estimator}`" if " " not in estimator else estimator
        pool = POOL_NAMES[f"tiny/{ground}"].removeprefix("tiny, ")
        yield {"pool": pool, "estimator": name, **dict(zip(("start", "third", "end"), told, strict=True))}


#: In the order of the page.
RECORDS = (
    Records(
        "clock.json",
        "Generation time, simulated",
        lambda d: (
            f"`{d['command']}`: the package's engine in a queueing model ({d['blocks']['model']['about']}); generation "
            "only. Ratios to GRPO of the same seeds. *Time to where GRPO's pool ends*: on the pool `mixed`, which learns; "
            f"{_learning_seeds(d)} seeds. {d['note']} [The model and its columns](../docs/simulate.md#the-clock)."
        ),
        _clock_rows,
        "policy | seeds | rollouts | time | time per informative group | time to where GRPO's pool ends",
        "{policy} | {seeds:d} | {of:.2f} | {time:.2f} | {time_per_informative:.2f} | {to_grpo:.2f}",
    ),
    Records(
        "gradient_noise.json",
        "Gradient noise",
        lambda d: (
            "`python -m benchmarks.gradient_noise`: at how many rollouts a step the noise of the gradient is as large as the "
            f"gradient, before the first update of a GRPO run of {d['steps'][-1]} steps, before update "
            f"{d['steps'][1]} and at its end; tiny model, prompts drawn evenly, median over {_noise_seeds(d)} seeds (least to most). "
            "*Exact pass rate*: a baseline that no memory can improve on."
        ),
        _noise_rows,
        "pool | estimator | at the start | a third of the run | at the end",
        "{pool} | {estimator} | {start} | {third} | {end}",
    ),
    Records(
        "step_time.json",
        "A step beside verl's",
        lambda d: (
            "`python -m benchmarks.step_time`: plain GRPO on the CPU platform in pairs of runs; ratio to verl's trainer. "
            "*Same rows*: zero-advantage rows train too. verl's `sync` trainer polls every 2 s; the last column leaves generation out."
        ),
        _step_rows,
        "mode | trainer | pairs | step | without generation",
        "`{mode}` | {arm} | {pairs:d} | {step} | {rest}",
    ),
    Records(
        "long_answers.json",
        "Long answers on the real pipeline",
        lambda d: (
            f"`{d['command']}`, {on_machine(d)}: answers with a long tail, a model whose weights do not change. "
            "Ratios to verl's own trainer without a filter, of the same repeat."
        ),
        long_rows,
        "trainer | rollouts a step | trained | generation time | time per informative group | slots idle | step",
        "{arm} | {rollouts} | {trained:.2f} | {gen} | {apiece} | {idle:.0%} | {step}",
    ),
    Records(
        "driver.json",
        "The driver",
        lambda d: (
            f"`python -m benchmarks.driver`: processor seconds of verl's driver for one step beside generation and "
            f"training, {on_machine(d)}. *Wait*: what the step waits for after its last answer."
        ),
        _driver_rows,
        "preset | rollouts a batch | generated | seconds | of these ours | wait, s",
        "`{preset}` | {rollouts:,} | {generated:,} | {seconds:.2f} | {own:.2f} | {after_last:.2f}",
    ),
    Records(
        "driver.json",
        "The head of a step",
        lambda d: (
            "`python -m benchmarks.driver --head`: processor seconds before the first request of a step of one rollout a prompt, "
            "median of three repeats. Rows are built by us or by verl's `get_tensordict`, then split among sixteen workers and "
            "pickled."
        ),
        lambda d: [{**row, "by": "us" if row["built_by"] == "ours" else "verl"} for row in d["heads"]],
        "rollouts | rows built by | rows | shares | pickle",
        "{rollouts:,} | {by} | {rows:.2f} | {shares:.2f} | {pickle:.2f}",
    ),
    Records(
        "example_lines.json",
        "verl's example command lines",
        lambda d: (
            f"`{d['command']}`: what `doctor` says of the {len(d['lines'])} lines that verl's example scripts run, with the "
            "preset added. Reasons are in the JSON."
        ),
        lambda d: [{"preset": preset, "crashed": 0, **counts} for preset, counts in d["counts"].items()],
        "preset | accepted | refused by us | refused by verl | other programs | crashed",
        "`{preset}` | {priced:d} | {refused:d} | {verl refuses:d} | {another program:d} | {crashed:d}",
    ),
    Records(
        "length_cap.json",
        "Length limits from memory, simulated",
        lambda d: (
            f"`{d['command']}`: a limit of 1.25 times the 0.99 quantile of the lengths of successes, in the clock's model with a "
            "cap of 32,768 tokens; ratios to the same rollouts without it. Not built: where lengths spread as in the clock "
            "(σ 0.9) it saves next to nothing, and where it saves, a smaller `data.max_response_length` does, too. The "
            "JSON has failures 2 and 4 times longer as well."
        ),
        lambda d: [row for row in d["rows"] if row["longer"] in (1, 8)],
        "σ of lengths | failures longer, times | answers at the cap | limit, tokens | tokens generated | generation time | right answers",
        "{sigma:g} | {longer:d} | {at_cap:.0%} | {limit:,} | {tokens:.2f} | {seconds:.2f} | {right:.3f}",
    ),
    Records(
        "store.json",
        "The journal",
        lambda d: (
            f"`{d['command']}`, {d['prompts']:,} prompts, {on_machine(d)}: Arrow files, and SQLite as of commit ff7a59c, in one "
            "run. *Commit* is what training waits for. Except for the row *on the disk*, both are written to memory, which leaves "
            "the disk out. In very small steps, of 8 groups, Arrow files take more room and more time to read whole."
        ),
        lambda d: [{**r, "of": r["now"] / r["former"] if r.get("former") is not None else None} for r in d["rows"]],
        "steps | what | Arrow | SQLite | ratio",
        "{shape} | {what} | {now:.3g} | {former:.3g} | {of:.2f}",
    ),
    Records(
        "decisions.json",
        "Decisions",
        lambda d: f"`{d['command']}`: milliseconds of processor time, {on_machine(d)}.",
        lambda d: d["benchmarks"],
        "decision | known prompts | median, ms | worst, ms",
        "{name} | {prompts:,} | {ms:.2f} | {worst:.2f}",
    ),
)
