"""What each section of ``RESULTS.md`` and each generated block of the docs says: lines of Markdown from the JSON.

Accuracies come from :mod:`benchmarks.standings`; other measurements are lists of records, shown by one writer
(:class:`Records`) from a table of columns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

import numpy as np

from benchmarks.presets import FULL, INGREDIENTS
from benchmarks.runs import Runs, pm, table
from benchmarks.standings import POOL_NAMES, POOLS, Standing, finals_of, less
from benchmarks.standings import share as share_of
from verl_adaptive.significance import significant

Row = Mapping[str, Any]
Found = Mapping[str, Mapping[str, Standing]]

WITHOUT = {
    "solo-2": "two rollouts a prompt",
    "solo-4": "four rollouts a prompt",
    "solo-epoch": "prompts in epoch order",
    "solo-no_prompt": "no memory of a prompt, only of its source",
    "solo-no_source": "prior from all prompts, not from the data source",
    "reinforce": "no memory: the batch's mean, epoch order",
    "reinforce-spread": "no memory in the baseline: the batch's mean",
    "solo-whiten": "whitened over the batch",
    "solo-thin": "rows thinned without bias, τ = 1",
    "solo-decay.8": "ρ = 0.8 in the baseline",
    "solo-decay.95": "ρ = 0.95 in the baseline",
    "solo-strength2": "κ = 2 in the baseline",
    "solo-strength8": "κ = 8 in the baseline",
    "solo-floor.05": "floor 0.05",
    "solo-floor.2": "floor 0.2",
    "solo-draw_sharp": "κ = 1, ρ = 0.95 in the draw",
    "spo": "SPO's options",
}

#: In the JSON alone: run in generation rounds, which are gone, under names that mean another preset's words today.
IN_ROUNDS = (
    "dapo-sized",
    "greso-gate",
    "greso+keep_all",
    "greso+pilot_commit",
    "greso+rescue+informative",
    "greso+aero",
)
IN_ROUNDS += ("pilot_commit-sized",)

JUDGED = [
    "## How it is judged",
    "",
    "* **Equal generated rollouts.** In a pool every run generates as many rollouts as GRPO, dropped and aborted ones "
    "included, and makes the same number of optimizer updates a step.",
    "* **Held-out accuracy** of prompts that were never trained on. *Pretrained*: SmolLM2-135M on verl and vLLM, 8 sampled "
    "answers to each question. *Real*: a model of 0.12 million parameters on verl and vLLM; *tiny*: the same size in one "
    "process; both by exact pass rates. Accuracies are means over the last tenth of a run.",
    "* **Rollouts to GRPO's accuracy**: where GRPO's final accuracy (groups of 8) of the same seed is first reached, as a share "
    "of the budget; the median over seeds. *never*: the median seed does not reach it.",
    "* **Accuracy difference**: final accuracy minus GRPO's of the same seed; the mean, ± half of its 95 % interval (Student's "
    "t, paired by seed). **Bold: significant**, that is: at least three seeds, and the interval excludes zero.",
    "* **Rollouts a step**: generated, of those that GRPO generates for as many optimizer updates.",
    "* **Tokens trained**: of those that verl's own GRPO trains, which is all that it generates.",
    "* **Learning rate**: each policy at the best of those that it ran at. Rates and options of `solo` were chosen on other "
    "seeds (20 and up, `results/choose_torch.json`) than the tables show.",
    "* **Baselines**: GRPO with groups of 2 and 4 and the same rollouts a step (`grpo-2`, `grpo-4`), of 16 (*halved16*), with a "
    "decayed learning rate (*decay*), with two epochs over each batch (*epochs2*), and REINFORCE with the batch's mean as "
    "baseline (`reinforce`). The best GRPO is the best of group sizes and decay by mean accuracy over the "
    "seeds that all of these have.",
    "* **Pools.** *Natural mix*: all difficulties. *Sparse*: most prompts hopeless or solved. *Large*: twice the prompts. *One "
    "pass*: no prompt is met twice. *Noisy*: one reward in ten is flipped; *offset*: and the second data source's are half a "
    "point higher, the third's one. *128 prompts*: all of them in every step of 128 rollouts. *4,096 rollouts a step*: of 8,192 prompts. "
    "*Nothing right at first*: questions that the starting model answers less than once in 250 tries.",
    "* **Versions.** Most rows of the papers' presets in the real pools were measured with 0.1.0, which generated in rounds; each "
    "cell's JSON names its version. Rows of `solo` and `spo` in the *real* and held-back pools, and those with thinned rows, "
    "were measured before the weight of a data source faded with a prompt's visits. `full` "
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


def counted(standing: Standing | None, empty: str = "") -> str:
    """A policy's difference from GRPO and, in brackets, its seeds."""
    return empty if standing is None else f"{difference(list(standing.gains.values()))} ({len(standing.gains)})"


def accuracy_table(made: Mapping[str, Standing], names: Iterable[str]) -> list[str]:
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
        for name in names
        if (s := made.get(name)) is not None
    ]
    head = ["policy", "seeds", "learning rate", "rollouts to GRPO's accuracy", "accuracy difference"]
    head += ["rollouts a step", "tokens trained"]
    return table(head, rows)


def accuracy(found: Found) -> list[str]:
    """All pools: presets and baselines, then ingredients and ablations of the natural mix in one process."""
    lines = ["## Accuracy at equal rollouts", ""]
    aside = {*IN_ROUNDS, *INGREDIENTS, *WITHOUT} - {"reinforce", "spo", "solo-2", "pilot_commit-pipelined"}
    for pool, made in found.items():
        names = [name for name in made if name.split()[0] not in aside]
        best = f"GRPO ends at {made['grpo'].final:.3f}. Best GRPO: `{made['grpo'].best_grpo}`."
        if greatest := [f"`{s.name}` {s.greatest:.1f}" for s in made.values() if s.greatest]:
            best += f" Greatest |advantage|: {', '.join(greatest)}."
        lines += [
            f"### {POOL_NAMES[pool][0].upper()}{POOL_NAMES[pool][1:]}",
            "",
            best,
            "",
            *accuracy_table(made, names),
        ]
    base = found.get("tiny/base", {})
    if parts := [name for name in base if name in INGREDIENTS and name not in IN_ROUNDS]:
        lines += ["### The papers' ingredients one at a time, in one process", "", *accuracy_table(base, parts)]
    return lines


def ablations(runs: Runs) -> list[str]:
    """What each part and option of `solo` adds, in one process: accuracy minus `solo`'s of the same seed."""
    lr = runs.best_lr("base", "solo")
    if lr is None:
        return []
    rows = []
    for name, title in WITHOUT.items():
        if gains := runs.less(("base", name, lr), ("base", "solo", lr)):
            rows.append([title, f"`{name}`", str(len(gains)), difference(gains)])
    if not rows:
        return []
    return [
        "### `solo` without one of its parts, in one process",
        "",
        f"Learning rate {lr:g}; final accuracy minus that of `solo` of the same seed.",
        "",
        *table(["instead", "name in the results", "seeds", "accuracy difference"], rows),
    ]


def told(runs: Runs) -> list[str]:
    """What an expectation of every prompt is worth on a pool of one pass."""
    rows = []
    for variant, what in (("visible-onepass", "digits, carries and borrows"), ("exact-onepass", "the exact pass rate")):
        for lr in runs.lrs(variant):
            if gains := runs.less((variant, "solo", lr), ("onepass", "solo", lr)):
                rows.append([what, f"{lr:g}", str(len(gains)), difference(gains)])
    if not rows:
        return []
    return [
        "### A prior for prompts never met, one pass",
        "",
        "`solo` with `adaptive.warm_start` and a column `prior` (it counts for four rollouts), in one process: final accuracy minus that",
        "of `solo` without it, of the same seed. *Digits, carries and borrows*: a linear fit to what the question shows, made",
        "with the exact pass rates, which nobody has before a run.",
        "",
        *table(["prior", "learning rate", "seeds", "accuracy difference"], rows),
    ]


def thinned(runs: Runs) -> list[str]:
    """`solo` with thinned rows beside `solo`, pool by pool; one file of runs of one version."""
    rows = []
    for variant in dict.fromkeys(key[0] for key in runs.cells):
        for name in ("solo-thin", "solo-thin1.5"):
            for lr in runs.lrs(variant):
                gains = runs.less((variant, name, lr), (variant, "solo", lr))
                one = [(variant, name, lr, seed) for seed in runs.seeds(variant, name, lr)]
                trained = [runs.spent(key, "tokens_trained") / runs.spent(key, "tokens_generated") for key in one]
                if gains:
                    rows.append([variant, f"`{name}`", str(len(gains)), f"{np.mean(trained):.2f}", difference(gains)])
    return [
        "### `solo` with thinned rows, in one process",
        "",
        "`solo-thin` is `adaptive.advantage.thin=1`, `solo-thin1.5` is 1.5. Share of the generated tokens that train, and final",
        "accuracy minus that of `solo` of the same seed. Learning rate 3e-4.",
        "",
        *table(["pool", "name", "seeds", "tokens trained", "accuracy difference"], rows),
    ]


def two_epochs(runs: Runs) -> list[str]:
    """`solo` with two epochs over each batch, by learning rate, beside one epoch at its best."""
    rows = []
    for pool, (variant, *_) in POOLS.items():
        twice = "-".join(["epochs2", *([] if variant == "base" else [variant])])
        once, grpo = (runs.best_lr(variant, name) for name in ("solo", "grpo"))
        if not pool.startswith("tiny/") or once is None or grpo is None:
            continue
        target = finals_of(runs, variant, "grpo", grpo)
        one = share(share_of(runs, (variant, "solo", once), target))
        for lr in runs.lrs(twice):
            if gains := runs.less((twice, "solo", lr), (variant, "solo", once)):
                two = share(share_of(runs, (twice, "solo", lr), target))
                rows.append([POOL_NAMES[pool], f"{once:g}", one, f"{lr:g}", two, f"{difference(gains)} ({len(gains)})"])
    heads = ["pool", "one epoch at", "rollouts to GRPO's accuracy", "two epochs at", "rollouts to GRPO's accuracy"]
    return [
        "### `solo` with two epochs over each batch, in one process",
        "",
        "By learning rate; accuracy minus that of one epoch at its best rate (seeds).",
        "",
        *table([*heads, "accuracy difference"], rows),
    ]


def by_rate(runs: Runs, variant: str) -> list[str]:
    """Accuracy at the end for each learning rate, over seeds: how much a policy depends on the choice of one."""
    rates = runs.lrs(variant)
    rows = []
    for name in runs.measured(variant):
        found = [[runs.final((variant, name, lr, seed)) for seed in runs.seeds(variant, name, lr)] for lr in rates]
        rows.append([f"`{name}`", *(f"{pm(values)} ({len(values)})" for values in found)])
    return table(["policy", *(f"{lr:g}" for lr in rates)], rows)


def ends(runs: Runs, variant: str, names: Sequence[str]) -> list[str]:
    """pass@8, entropy and length of held-out answers at the end of a pool's runs."""
    rows = []
    for name in names:
        lr = runs.best_lr(variant, name)
        cells = [runs.cells[variant, name, lr, s] for s in runs.seeds(variant, name, lr)] if lr is not None else []
        if kept := [cell["ends"] for cell in cells if cell.get("ends")]:
            rows.append([f"`{name}`", str(len(kept)), *(pm([e[w][1] for e in kept], "{:.2f}") for w in ENDS)])
    return table(["policy", "seeds", *ENDS.values()], rows) if rows else []


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
        title: its heading.
        about: a paragraph, from the data.
        rows: the records, from the data.
        columns: heading → a record's cell.
    """

    title: str
    about: Callable[[Row], str]
    rows: Callable[[Row], Iterable[Row]]
    columns: Mapping[str, Callable[[Row], str]]

    def lines(self, data: Row) -> list[str]:
        """The section."""
        rows = [[cell(row) for cell in self.columns.values()] for row in self.rows(data)]
        return [f"## {self.title}", "", self.about(data), "", *table(list(self.columns), rows)]


def number(name: str, form: str = "{:.2f}") -> Callable[[Row], str]:
    """A column of one number."""
    return lambda row: "–" if row.get(name) is None else form.format(row[name])


def code(name: str) -> Callable[[Row], str]:
    """A column of a name."""
    return lambda row: f"`{row[name]}`"


def _clock_rows(data: Row) -> Iterable[Row]:
    """Policies of the model."""
    grpo = data["policies"]["grpo"]
    for policy, e in data["policies"].items():
        learns = data["learning"].get("mixed", {}).get(policy) or {}
        name = "verl's `filter_groups`" if policy == "verl_filter_groups" else f"`{policy}`"
        yield {**e, "policy": name, "of": e["begun"] / grpo["begun"], "to_grpo": learns.get("to_grpo")}


def _learning_seeds(data: Row) -> int:
    """Seeds of the pool that learns, which every policy has."""
    (seeds,) = {learns["seeds"] for learns in data["learning"]["mixed"].values() if learns}
    return int(seeds)


def _long_rows(data: Row) -> Iterable[Row]:
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
            "step": statistics.mean(r["step"] for r in runs),
        }


def _step_rows(data: Row) -> Iterable[Row]:
    for mode, found in data["modes"].items():
        for arm in found["pairs"][0]:
            ratio = {w: pm([p[arm][w] / p["verl"][w] for p in found["pairs"]], "{:.2f}") for w in ("step", "rest")}
            yield {"mode": mode, "arm": arm, "pairs": len(found["pairs"]), **ratio}


def _driver_seconds(row: Row) -> float:
    return float(row["own"] + row["verl"] + row["queue"])


def _noise_seeds(data: Row) -> int:
    """Seeds, the same of every row."""
    return len({row["seed"] for row in data["rows"]})


def _noise_rows(data: Row) -> Iterable[Row]:
    """An estimator on a ground: noise scales over seeds at each step."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for row in data["rows"]:
        at = found.setdefault((row["ground"], row["estimator"]), {})
        at.setdefault(row["step"], []).append(float("inf") if row["rollouts"] is None else row["rollouts"])
    for (ground, estimator), steps in found.items():
        told = [f"{statistics.median(v):,.0f} ({min(v):,.0f} to {max(v):,.0f})" for v in steps.values()]
        name = f"`{estimator}`" if " " not in estimator else estimator
        yield {"ground": ground, "estimator": name, **dict(zip(("start", "third", "end"), told, strict=True))}


def _line_rows(data: Row) -> Iterable[Row]:
    for preset, counts in data["counts"].items():
        yield {"preset": preset, **counts}


#: File in ``results/`` → its section; sections of one file stand together.
RECORDS: Mapping[str, Sequence[Records]] = {
    "clock.json": [
        Records(
            "Generation time, simulated",
            lambda d: (
                f"`{d['command']}`: the package's engine in a queueing model ({d['blocks']['model']['about']}); generation "
                "only. Ratios to GRPO of the same seeds. *Time to where GRPO's pool ends*: on the pool `mixed`, which learns; "
                f"{_learning_seeds(d)} seeds. [The model and its columns](../docs/simulate.md#the-clock)."
            ),
            _clock_rows,
            {
                "policy": lambda r: r["policy"],
                "seeds": number("seeds", "{:d}"),
                "rollouts": number("of"),
                "time": number("time"),
                "time per informative group": number("time_per_informative"),
                "time to where GRPO's pool ends": number("to_grpo"),
            },
        )
    ],
    "gradient_noise.json": [
        Records(
            "Gradient noise",
            lambda d: (
                "`python -m benchmarks.gradient_noise`: at how many rollouts a step the noise of the gradient is as large as the "
                f"gradient, before the first update of a GRPO run of {d['steps'][-1]} steps, before update "
                f"{d['steps'][1]} and at its end; tiny model, prompts drawn evenly, median over {_noise_seeds(d)} seeds (least to most). "
                "*Exact pass rate*: what no memory can know better."
            ),
            _noise_rows,
            {
                "pool": lambda r: POOL_NAMES[f"tiny/{r['ground']}"].removeprefix("tiny, "),
                "estimator": lambda r: r["estimator"],
                "at the start": lambda r: r["start"],
                "a third of the run": lambda r: r["third"],
                "at the end": lambda r: r["end"],
            },
        )
    ],
    "step_time.json": [
        Records(
            "A step beside verl's",
            lambda d: (
                "`python -m benchmarks.step_time`: plain GRPO on the CPU platform in pairs of runs; ratio to verl's trainer. "
                "*Same rows*: zero-advantage rows train too. verl's sync trainer polls every 2 s, hence the column without generation."
            ),
            _step_rows,
            {
                "mode": code("mode"),
                "trainer": lambda r: r["arm"],
                "pairs": number("pairs", "{:d}"),
                "step": lambda r: r["step"],
                "without generation": lambda r: r["rest"],
            },
        )
    ],
    "long_answers.json": [
        Records(
            "Long answers on the real pipeline",
            lambda d: (
                f"`{d['command']}`, {on_machine(d)}: answers with a long tail, a model that stands still. "
                "Ratios to verl's own trainer without a filter, of the same repeat."
            ),
            _long_rows,
            {
                "trainer": lambda r: r["arm"],
                "rollouts a step": lambda r: r["rollouts"],
                "generation time": lambda r: r["gen"],
                "time per informative group": lambda r: r["apiece"],
                "slots idle": number("idle", "{:.0%}"),
                "step, s": number("step", "{:.1f}"),
            },
        )
    ],
    "driver.json": [
        Records(
            "The driver",
            lambda d: (
                f"`python -m benchmarks.driver`: processor seconds of verl's driver for one step beside generation and "
                f"training, {on_machine(d)}. *Wait*: what the step waits for after its last answer."
            ),
            lambda d: [row for row in d["rows"] if row["preset"] not in ("full", *IN_ROUNDS)],
            {
                "preset": code("preset"),
                "rollouts a batch": number("rollouts", "{:,}"),
                "generated": number("generated", "{:,}"),
                "seconds": lambda r: f"{_driver_seconds(r):.2f}",
                "of these ours": number("own"),
                "wait, s": number("after_last"),
            },
        ),
        Records(
            "The head of a step",
            lambda d: (
                "`python -m benchmarks.driver --head`: processor seconds before the first request of a step of one rollout a prompt, "
                "median of three in turn; rows built by us and by verl's `get_tensordict`, then a share for each of sixteen workers, "
                "pickled."
            ),
            lambda d: d["heads"],
            {
                "rollouts": number("rollouts", "{:,}"),
                "rows built by": lambda r: {"ours": "us", "verl": "verl"}[r["built_by"]],
                "rows": number("rows"),
                "shares": number("shares"),
                "pickle": number("pickle"),
            },
        ),
    ],
    "example_lines.json": [
        Records(
            "verl's example command lines",
            lambda d: (
                f"`{d['command']}`: what `doctor` says of the {len(d['lines'])} lines that verl's example scripts run, with the "
                "preset added. Reasons are in the JSON."
            ),
            _line_rows,
            {
                "preset": code("preset"),
                "accepted": number("priced", "{:d}"),
                "refused by us": number("refused", "{:d}"),
                "refused by verl": number("verl refuses", "{:d}"),
                "other programs": number("another program", "{:d}"),
                "crashed": lambda r: str(r.get("crashed", 0)),
            },
        )
    ],
    "length_cap.json": [
        Records(
            "Length limits from memory, simulated",
            lambda d: (
                f"`{d['command']}`: a limit of 1.25 times the 0.99 quantile of the lengths of successes, in the clock's model with a "
                "cap of 32,768 tokens; ratios to the same rollouts without it. Not built: where lengths spread as in the clock "
                "(σ 0.9) it saves next to nothing, and where it saves, a smaller `data.max_response_length` does, too."
            ),
            lambda d: d["rows"],
            {
                "σ of lengths": number("sigma", "{:g}"),
                "failures longer, times": number("longer", "{:d}"),
                "answers at the cap": number("at_cap", "{:.0%}"),
                "limit, tokens": number("limit", "{:,}"),
                "tokens generated": number("tokens"),
                "generation time": number("seconds"),
                "right answers": number("right", "{:.3f}"),
            },
        )
    ],
    "roulette.json": [
        Records(
            "Roulette on length, simulated",
            lambda d: (
                f"`{d['command']}`: beyond a marker, the median of the lengths of successes, an answer goes on with probability 0.5 "
                "and weighs twice as much then, which leaves the expected update as it is; one rollout a prompt, drawn as by `solo`. "
                "*Noise* is the mean square of what the rollouts weigh. Ratios to the same rollouts without it; tokens × noise below "
                "1 would pay. Not built: it never is, nor with a probability of 0.25 or a marker of 0.9 (in the JSON)."
            ),
            lambda d: [row for row in d["rows"] if row["rho"] == row["quantile"] == 0.5],
            {
                "σ of lengths": number("sigma", "{:g}"),
                "failures longer, times": number("longer", "{:d}"),
                "tokens": number("tokens"),
                "generation time": number("seconds"),
                "noise": number("noise"),
                "tokens × noise": number("tokens_noise"),
            },
        )
    ],
    "store.json": [
        Records(
            "The journal",
            lambda d: (
                f"`{d['command']}`, {d['prompts']:,} prompts, {on_machine(d)}: Arrow files, and SQLite as of commit ff7a59c, in one "
                "run. *Commit* is what training waits for; but for the row *on the disk*, both are written to memory, so that the "
                "disk is in no figure. Steps of 8 groups are very small ones: Arrow files take more room there, and more time to "
                "read whole."
            ),
            lambda d: d["rows"],
            {
                "steps": lambda r: r["shape"],
                "what": lambda r: r["what"],
                "Arrow": number("now", "{:.3g}"),
                "SQLite": number("former", "{:.3g}"),
                "ratio": lambda r: "–" if r.get("former") is None else f"{r['now'] / r['former']:.2f}",
            },
        )
    ],
    "decisions.json": [
        Records(
            "Decisions",
            lambda d: f"`{d['command']}`: milliseconds of processor time, {on_machine(d)}.",
            lambda d: d["benchmarks"],
            {
                "decision": lambda r: r["name"],
                "known prompts": number("prompts", "{:,}"),
                "median, ms": number("ms"),
                "worst, ms": number("worst"),
            },
        )
    ],
}


# -- blocks of the README and the docs ------------------------------------------------------------------------------


#: Pools that nothing was chosen on, whose settings are those of few users.
HELD_BACK = ("tiny/offsets", "tiny/pool128", "tiny/batch512")


def _shown(pool: str) -> bool:
    """Not the pools of the tiny model that the real pipeline has, too."""
    return not pool.startswith("tiny/") or pool in ("tiny/onepass", "tiny/noise", *HELD_BACK)


def evidence(found: Found) -> list[str]:
    """The README's table: pool and method, rollouts to GRPO's accuracy, accuracy difference."""
    rows = []
    for pool, made in found.items():
        if not _shown(pool) or pool == "tiny/offsets":
            continue
        best = made["grpo"].best_grpo
        for name in ("solo",) if pool in HELD_BACK else dict.fromkeys(("solo", "reinforce", best)):
            if name != "grpo" and (s := made.get(name)) is not None:
                seeds = f", {len(s.gains)} seed{'s' * (len(s.gains) > 1)}"
                rows.append(
                    [f"{POOL_NAMES[pool]}{seeds}: `{name}`", share(s.of_grpo), difference(list(s.gains.values()))]
                )
    return table(["pool and method", "rollouts to GRPO's accuracy", "accuracy difference"], rows)


#: Preset → its page, and what it does.
PRESETS = {
    "grpo": ("choosing.md#grpo", "plain GRPO; rows of zero advantage do not train: the same gradient"),
    "solo": (
        "solo.md",
        "one rollout per prompt, n times as many prompts; the baseline is each prompt's running mean reward",
    ),
    "greso": ("papers.md#greso", "skips prompts whose own history says that they are uninformative"),
    "aero": ("papers.md#aero", "explores with half a group, rescues all-wrong prompts, thins redundant rollouts"),
    "cero": ("papers.md#cero", "picks prompts from the whole data set under a budget for the whole run"),
    "pilot_commit": ("papers.md#pilot_commit", "a few pilots of many prompts, full groups only where they are mixed"),
    "dapo": ("choosing.md#dapo", "baseline: drops zero-variance groups and draws prompts until the batch is full"),
    "spo": ("solo.md#spo", "baseline: SPO as published, as far as possible"),
    "sao": ("solo.md#sao", "one rollout per prompt and a critic: SAO, as far as verl has it"),
}


def cost(clock: Row, long: Row | None) -> list[str]:
    """Cost of a step, of plain GRPO's: rollouts and generation time as measured on long answers, and the time that the model gives."""
    measured = {row["arm"].strip("`"): row for row in (_long_rows(long) if long else ())}
    rows = []
    for preset, (page, about) in PRESETS.items():
        entry, found = clock["policies"].get(preset), measured.get(preset)
        told = ["–", "–"] if found is None else [found[name].split(" ±")[0] for name in ("rollouts", "gen")]
        rows.append([f"[`+adaptive={preset}`](docs/{page}): {about}", *told, f"{entry['time']:.2f}" if entry else "–"])
    heads = ["rollouts a step, measured", "generation time, measured", "generation time, simulated"]
    return table(["preset", *heads], rows)


#: Situation, what to take, and the pool and policy that measure it.
SITUATIONS: Sequence[tuple[str, str, str, str]] = (
    ("verifiable rewards, a pretrained model", "[`solo`](solo.md)", "pretrained/128", "solo"),
    ("prompts of all difficulties, met more than once", "[`solo`](solo.md)", "real/base", "solo"),
    ("a larger pool", "[`solo`](solo.md)", "real/large", "solo"),
    ("most prompts solved or hopeless", "[`solo`](solo.md)", "real/sparse", "solo"),
    ("groups of 8 must stay, most prompts solved or hopeless", "[`full`](#full)", "real/sparse", "full"),
    (
        "more prompts than rollouts: none is met twice",
        "[`solo`](solo.md) with fine data sources",
        "tiny/onepass",
        "solo",
    ),
    ("rewards that err at random, one in ten", "[`solo`](solo.md)", "tiny/noise", "solo"),
    ("the same, on another level in each data source", "[`solo`](solo.md)", "tiny/offsets", "solo"),
    ("all prompts in every step", "[`grpo`](#grpo); the figures are `solo`'s", "tiny/pool128", "solo"),
    ("thousands of rollouts a step", "[`solo`](solo.md): less to gain", "tiny/batch512", "solo"),
)
UNMEASURED = (
    ("rewards that are mostly noise", "[`grpo`](#grpo)"),
    (
        "prompts much longer than responses",
        "[`solo`](solo.md) with `adaptive.allocator.n=4`: prefill is shared in a group",
    ),
    ("a judge that changes, a reward that drifts", "[`grpo`](#grpo) or [`dapo`](#dapo)"),
    (
        "training is the bottleneck",
        "[`grpo`](#grpo): the same gradient from fewer tokens; or `solo` with `adaptive.advantage.thin=1`",
    ),
    ("a critic", "[`sao`](solo.md#sao)"),
    ("an estimator of your own", "[`dapo`](#dapo) with `adaptive/sampler=mixed`"),
    ("a comparison with a paper", "the paper's preset, as published"),
)


def choosing(found: Found) -> list[str]:
    """A line a situation: what to take, and what was measured of it and of REINFORCE."""
    rows = []
    for situation, take, pool, name in SITUATIONS:
        made = found.get(pool, {})
        standing, beside = made.get(name), made.get("reinforce")
        told = ["–" if standing is None else share(standing.of_grpo), counted(standing, "–"), counted(beside, "–")]
        rows.append([situation, take, *told])
    heads = ["situation", "take", "rollouts to GRPO's accuracy", "accuracy difference (seeds)", "REINFORCE's (seeds)"]
    first, _, *rest = table(heads, rows)
    reasoned = ["Not measured; by what each method needs:", "", "| situation | take |", "|:--|:--|"]
    reasoned += [f"| {situation} | {take} |" for situation, take in UNMEASURED]
    return [first, "|:--|:--|--:|--:|--:|", *rest, *reasoned]


#: The columns of docs/solo.md, and their titles. GRPO with a decayed learning rate is in RESULTS.md alone.
BESIDE = {
    "solo": "`solo`",
    "reinforce": "REINFORCE, no memory",
    "grpo-2": "GRPO, groups of 2",
    "grpo-4": "GRPO, groups of 4",
    "solo epochs2": "`solo`, two epochs a batch",
}


def solo_block(found: Found) -> list[str]:
    """`solo` beside the fair baselines: a row a pool."""
    pools = {pool: made for pool, made in found.items() if "solo" in made and _shown(pool)}
    columns = [name for name in BESIDE if any(name in made for made in pools.values())]
    heads = ["pool", *(BESIDE[name] for name in columns)]
    to_target, to_grpo = [], []
    for pool, made in pools.items():
        row = [made.get(name) for name in columns]
        to_target.append([POOL_NAMES[pool], *("–" if s is None else share(s.of_grpo) for s in row)])
        to_grpo.append([POOL_NAMES[pool], *(counted(s, "–") for s in row)])
    return [
        "Rollouts to GRPO's final accuracy (groups of 8), as a share of the budget:",
        "",
        *table(heads, to_target),
        "Final accuracy minus GRPO's (seeds in brackets, of both tables; bold: significant;",
        "[how it is judged](../benchmarks/RESULTS.md#how-it-is-judged)):",
        "",
        *table(heads, to_grpo),
    ]


def gain_note(found: Found) -> list[str]:
    """How much of `solo`'s gain REINFORCE has."""
    shares = []
    for pool, made in found.items():
        if {"solo", "reinforce"} <= set(made) and _shown(pool) and significant(list(made["solo"].gains.values())):
            solo, reinforce = made["solo"].gains, made["reinforce"].gains
            both = set(solo) & set(reinforce)
            shares.append(sum(reinforce[seed] for seed in both) / sum(solo[seed] for seed in both))
    if not shares:
        return []
    text = (
        "Most of the gain is one rollout for each of more prompts: less noise in the gradient. REINFORCE with one rollout a "
        "prompt and the batch's mean as baseline, without any memory, has "
        f"{min(shares):.0%} to {max(shares):.0%} of `solo`'s gain in final accuracy over the {len(shares)} pools below where that gain is significant "
        f"(median {statistics.median(shares):.0%}; the seeds that both have)."
    )
    return wrap(text, 118, break_on_hyphens=False)


def noise_note(data: Row, found: Found) -> list[str]:
    """From how many rollouts a step on less noise is worth little, and what was measured with many."""
    at: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in data["rows"]:
        of = at.setdefault((row["estimator"], row["step"]), {})
        of.setdefault(row["ground"], []).append(float("inf") if row["rollouts"] is None else row["rollouts"])

    def span(estimator: str, step: int) -> str:
        medians = [statistics.median(values) for values in at[estimator, step].values()]
        return f"{min(medians):,.0f} to {max(medians):,.0f}"

    _, third, end = data["steps"]
    text = (
        f"- In the tiny model's pools the noise of GRPO's gradient equals its signal at {span('grpo', third)} rollouts a step, "
        f"a third into a run, and at {span('grpo', end)} at its end; that of REINFORCE at {span('reinforce', third)} and "
        f"{span('reinforce', end)} ([measured](../benchmarks/RESULTS.md#gradient-noise)). In steps of many more rollouts less "
        "noise is worth less."
    )
    if (large := found.get("tiny/batch512", {}).get("solo")) is not None:
        text += (
            f" With 4,096 rollouts a step `solo` reaches GRPO's accuracy at {share(large.of_grpo)} of the budget, and ends "
            f"{difference(list(large.gains.values()))} above it."
        )
    return wrap(text, 118, subsequent_indent="  ", break_on_hyphens=False)


#: What the estimate for 8 GPUs assumes.
GPUS = 8
PREFILL = 10_000  # prompt tokens a second and GPU: a model of 7 B parameters
SHARES = (0.4, 0.8)  # of generation, in a step of verl's own GRPO


def step_ratio(results: Sequence[Row], preset: str, n: int) -> str:
    """Seconds of a quickstart's training steps, as a ratio to GRPO's of the same seed."""
    seconds = {(r["preset"], r["n"], r["seed"]): r["seconds"] / r["steps"] for r in results}
    return pm(
        [value / seconds["grpo", n, key[2]] for key, value in seconds.items() if key[:2] == (preset, n)], "{:.2f}"
    )


THIN = "solo adaptive.advantage.thin=1"


def step_cost(clock: Row, made: Mapping[str, Standing], quickstart: Row, thinned: Row, thin: Runs | None) -> list[str]:
    """What a step costs beside GRPO's: tokens and seconds measured, and an estimate for several GPUs.

    ``thinned`` is a quickstart with thinned rows, too.
    """
    first, batch = quickstart["results"][0], clock["policies"]["grpo"]["begun"]
    group = first["n"]
    # Siblings are sent to the replica that has least to do, at random as good as: the first on each reads the prompt.
    found = 1 - GPUS * (1 - (1 - 1 / GPUS) ** group) / group
    generation = {}
    for name in ("grpo", "solo"):
        entry = clock["policies"][name]
        read = entry["prefill"] * (1 - (found if name == "grpo" else 0)) / (GPUS * PREFILL)
        generation[name] = entry["seconds"] + read
    decode = generation["solo"] / generation["grpo"]
    per_step = statistics.mean(
        r["seconds"] / r["steps"] for r in quickstart["results"] if (r["preset"], r["n"]) == ("grpo", group)
    )

    def row(name: str, ratio: float, trained: float, measured: str) -> list[str]:
        ends = sorted(share * ratio + (1 - share) * trained for share in SHARES)
        low, high = (f"{end:.2f}" for end in ends)
        return [name, "1.00", f"{trained:.2f}", measured, low if low == high else f"{low} to {high}"]

    rows = [
        row("verl's own GRPO", 1.0, 1.0, ""),
        row("`+adaptive=grpo`", 1.0, made["grpo"].trained, "1.00"),
        row("`+adaptive=solo`", decode, made["solo"].trained, step_ratio(quickstart["results"], "solo", group)),
    ]
    if thin is not None:
        keys = [("base", "solo-thin", 3e-4, seed) for seed in thin.seeds("base", "solo-thin", 3e-4)]
        trained = [thin.spent(key, "tokens_trained") / thin.spent(key, "tokens_generated") for key in keys]
        rows.append(
            row(
                "`solo` with `adaptive.advantage.thin=1`",
                decode,
                statistics.mean(trained),
                step_ratio(thinned["results"], THIN, group),
            )
        )
    heads = ["", "tokens generated", "tokens trained", "step on two CPU cores", "step on 8 GPUs, estimated"]
    ends = {
        (r["preset"], r["seed"]): (r["curve"][-1][1], r["trained"] / r["generated"])
        for r in thinned["results"]
        if r["n"] == group
    }
    rest = [(end - ends["solo", seed][0], trained) for (preset, seed), (end, trained) in ends.items() if preset == THIN]

    def training(preset: str) -> str:
        parts = thinned["training_seconds"]
        return f"{statistics.mean(mine / grpo for mine, grpo in zip(parts[preset], parts['grpo'], strict=True)):.2f}"

    beside = (
        f"Run beside `solo` there, whose step took {step_ratio(thinned['results'], 'solo', group)}, `thin` trained "
        f"{statistics.mean(trained for _, trained in rest):.0%} of the rollouts; final accuracy minus `solo`'s: "
        f"{difference([gap for gap, _ in rest])} ({len(rest)} seeds). Old log-probs and update alone took {training('solo')} and {training(THIN)} "
        "times GRPO's; the rest is generation, which costs by the prompt with a model that small."
    )
    text = (
        f"Tokens are shares of verl's own GRPO's; those of `thin` are from one process. The step on two CPU cores is the "
        f"quickstart's, {first['generated'] / first['steps']:.0f} rollouts, beside that of `+adaptive=grpo`, which takes "
        f"{per_step:.1f} s. {beside} The estimate: generation is {SHARES[0]:.0%} to "
        f"{SHARES[1]:.0%} of GRPO's step and takes what the [clock](simulate.md#the-clock) says ({batch:,.0f} rollouts a step, "
        f"prompts of 512 tokens, read at {PREFILL:,} a second and GPU); the rest follows the tokens that train. verl spreads a "
        f"group over the {GPUS} replicas, so GRPO finds {found:.0%} of its prefixes in the cache, and `solo` reads "
        f"{1 / (1 - found):.1f} times as many prompt tokens, not {group} times."
    )
    return [*table(heads, rows), *wrap(text, 118, break_on_hyphens=False)]


def critic_block(found: Found) -> list[str]:
    """`sao` beside `solo`, REINFORCE and GRPO in one process."""
    made = found["tiny/base"]
    sao, rows = made["sao"], []
    for name in ("solo", "reinforce", "sao", "grpo-4", "grpo"):
        if (s := made.get(name)) is not None:
            gains = less(sao, s)
            beside = "" if s is sao else f"{difference(gains)} ({len(gains)})"
            rows.append([f"`{name}`", f"{share(s.of_grpo)} ({len(s.gains)})", beside])
    heads = ["policy", "rollouts to GRPO's accuracy (seeds)", "accuracy of `sao` minus this one's (seeds)"]
    return table(heads, rows)


def forms_block(held_back: Runs) -> list[str]:
    """Pilot-Commit's two forms beside GRPO in one process, on seeds that nothing was chosen on."""
    rows = []
    for lr in held_back.lrs("base"):
        keys = [("base", preset, lr) for preset in ("grpo", "pilot_commit-pipelined", "pilot_commit")]
        seeds = held_back.seeds(*keys[0])
        grpo, pipelined, on_policy = (np.array([held_back.final((*key, s)) for s in seeds]) for key in keys)
        gains = (pipelined - grpo, on_policy - grpo, pipelined - on_policy)
        rows.append([f"{lr:g}", str(len(seeds)), f"{grpo.mean():.3f}", *(difference(list(gain)) for gain in gains)])
    updates = {preset: [] for preset in ("grpo", "pilot_commit-pipelined", "pilot_commit")}
    for key in held_back.cells:
        updates[key[1]].append(held_back.curve(key, "updates")[-1])
    grpo, pipelined, on_policy = (round(float(np.mean(counts))) for counts in updates.values())
    found = table(
        (
            "learning rate",
            "seeds",
            "GRPO",
            "`pipelined` minus GRPO",
            "on-policy minus GRPO",
            "`pipelined` minus on-policy",
        ),
        rows,
    )
    said = f"Optimizer updates, on average: GRPO {grpo}, `pipelined` {pipelined}, on-policy {on_policy}."
    return [*found, said]


def async_table(data: Row) -> list[str]:
    """Generation time one batch ahead, beside ``sync``: simulated, as ratios to GRPO's in ``sync``."""
    rows = []
    for policy, entry in data["asynchronous"].get("one batch ahead", {}).items():
        if entry is not None:
            there = data["policies"].get(policy)
            rows.append(
                [
                    f"`{policy}`",
                    "–" if there is None else f"{there['time']:.2f}",
                    f"{entry['time']:.2f}",
                    f"{entry['age']:.1f}",
                ]
            )
    return table(["policy", "`sync`", "one batch ahead", "age of a trained group, updates"], rows)


def driver_note(data: Row) -> list[str]:
    """What a prompt for each rollout costs the driver, as one of the limits of `solo`."""
    rows = {(row["preset"], row["rollouts"]): row for row in data["rows"]}
    sizes = sorted(size for preset, size in rows if preset == "solo" and ("grpo", size) in rows)
    said = "; ".join(
        f"at {size:,} rollouts a step {_driver_seconds(rows['solo', size]):.1f} s of processor time, where GRPO takes "
        f"{_driver_seconds(rows['grpo', size]):.1f} s"
        for size in sizes
    )
    text = f"- The driver's work grows with prompts: {said} ([measured](../benchmarks/RESULTS.md#the-driver))."
    return wrap(text, 118, subsequent_indent="  ", break_on_hyphens=False) if sizes else []
