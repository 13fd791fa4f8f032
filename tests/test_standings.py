"""Where policies end beside GRPO, on curves made by hand, and what the tables say of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
from benchmarks import blocks, pretrained, report, sections, train_torch
from benchmarks.claims import claims
from benchmarks.presets import INGREDIENTS
from benchmarks.runs import Runs
from benchmarks.standings import POOL_NAMES, POOLS, all_standings, grid_runs, less, standings
from verl_adaptive.significance import significant

BUDGET = 1000


RESULTS = Path(report.__file__).parent / "results"


def made(**ends: list[float]) -> Runs:
    """Straight lines from 0 to these final accuracies at the budget, a seed each; names as ``variant__preset``."""
    cells = {}
    for name, finals in ends.items():
        variant, _, preset = name.partition("__")
        for seed, end in enumerate(finals):
            curve = [[BUDGET * k / 10, k, end * k / 10, end * k / 10, 20 * k, 10 * k] for k in range(12)]
            cells[variant, preset.replace("_", "-"), 1e-3, seed] = {"curve": curve}
    presets = list(dict.fromkeys(key[1] for key in cells))
    variants = {key[0] for key in cells}
    return Runs(
        cells,
        ("rollouts", "updates", "held_out", "pool", "tokens_generated", "tokens_trained"),
        dict.fromkeys(variants, BUDGET),
        presets,
        lambda cell: cell.get("start"),
    )


def test_shares_of_grpo_and_the_best_grpo() -> None:
    runs = made(
        base__grpo=[0.5, 0.5, 0.5], base__grpo_4=[0.8, 0.8, 0.8], base__solo=[1.0, 1.0, 0.2], decay__grpo=[0.6] * 3
    )
    found = standings(runs, ("base", "decay"))
    assert set(found) == {"grpo", "grpo-4", "solo", "grpo decay"}
    assert found["solo"].best_grpo == "grpo-4" and len(found["solo"].gains) == 3
    assert found["grpo"].of_grpo == pytest.approx(1.0, abs=0.01)
    # Accuracies are means over the window before: at the budget .95 of the end, so half of that takes half, and a window.
    assert found["solo"].of_grpo == pytest.approx(0.525, abs=0.01)  # the median seed, not the one that fails
    assert found["solo"].trained == pytest.approx(0.5)


def test_runs_from_other_weights_are_not_compared() -> None:
    """Supervised starts of two processors were .008 apart, and the later policies ran on the better one."""
    runs = made(base__grpo=[0.5] * 3, base__grpo_4=[0.8] * 3, base__solo=[0.9] * 3, base__dapo=[0.9] * 3)
    for (_, preset, _, seed), cell in runs.cells.items():
        cell["start"] = "theirs" if preset in ("dapo", "grpo-4") or (preset, seed) == ("solo", 2) else "ours"
    found = standings(runs, ("base",))
    assert set(found) == {"grpo", "solo"} and found["solo"].gains.keys() == {0, 1}
    assert found["solo"].best_grpo == "grpo"  # groups of 4 would have been it
    assert len(runs.less(("base", "dapo", 1e-3), ("base", "grpo-4", 1e-3))) == 3


def test_a_preset_whose_median_seed_never_gets_there_has_none() -> None:
    found = standings(made(base__grpo=[0.5] * 3, base__solo=[0.9, 0.4, 0.4]), ("base",))
    assert found["solo"].of_grpo is None and standings(made(base__solo=[1.0]), ("base",)) == {}


def test_a_share_is_rounded_once() -> None:
    """0.9348 became 0.935, and then 0.94."""
    for thousandths in range(700, 800):
        runs = made(base__grpo=[0.5] * 3, base__solo=[thousandths / 1000] * 3)
        exact = runs.needed(("base", "solo", 1e-3, 0), runs.final(("base", "grpo", 1e-3, 0)) or 0.0)
        if f"{round(exact, 3):.2f}" != f"{exact:.2f}":
            break
    assert sections.share(standings(runs, ("base",))["solo"].of_grpo) == f"{exact:.2f}"


def test_two_epochs_stand_beside_one_epoch_of_the_same_seeds() -> None:
    """Ten seeds of one epoch beside five of two said that two epochs were slower; on the five they were faster."""
    runs = made(base__grpo=[0.5] * 6, base__solo=[0.6] * 3 + [1.0] * 3, epochs2__solo=[0.8] * 3)
    (row,) = [line for line in sections.two_epochs(runs) if line.startswith("| tiny, natural mix")]
    one, two = (float(cell) for cell in (row.split(" | ")[2], row.split(" | ")[4]))
    assert one == pytest.approx(0.84, abs=0.02) and two == pytest.approx(0.64, abs=0.02)


def test_a_rate_that_was_not_chosen_is_said_to_be_alone() -> None:
    """The sparse and the large real pool ran at one; another rate counts from the same seed and start only."""
    runs = made(base__grpo=[0.5] * 3, base__solo=[0.9] * 3, base__greso=[0.6] * 3, base__dapo=[0.4] * 3)
    for variant, preset, lr, seed in list(runs.cells):
        cell = runs.cells[variant, preset, lr, seed]
        if preset in ("grpo", "greso"):
            runs.cells[variant, preset, 3e-3, seed] = {**cell, "start": "another" if preset == "greso" else None}
    found = standings(runs, ("base",))
    assert {name for name, s in found.items() if s.alone} == {"solo", "greso", "dapo"}
    text = "\n".join(sections.accuracy({"tiny/base": found}))
    assert "Without a second learning rate from the same start: `solo`, `greso`, `dapo`." in text
    alone = {name: s for name, s in found.items() if s.alone}
    assert sections.one_rate(alone, list(alone)).endswith(": all.")
    assert sections.one_rate(found, ["grpo"]) == ""


def test_the_versions_are_those_that_the_page_tells() -> None:
    """Rows in one process were of generation rounds, too, and the page spoke of the real pools only."""
    files = {"real": "train_cpu.json", "tiny": "train_torch.json"}
    papers = {"dapo", "greso", "aero", "cero", "pilot_commit", "full", *INGREDIENTS}
    anew = {"aero", "pilot_commit", "pilot_commit-pipelined", "greso-tight"}
    for kind, file in files.items():
        data = json.loads((RESULTS / file).read_text())
        runs = grid_runs(data)
        for pool, variants in POOLS.items():
            if not pool.startswith(kind):
                continue
            for name, standing in standings(runs, variants).items():
                if name not in papers and not name.startswith("oracle"):
                    continue
                cells = [runs.cells[variants[0], name, standing.lr, seed] for seed in standing.gains]
                told = {
                    (data["machines"][c["machine"]] if kind == "tiny" else c)["versions"]["verl-adaptive"]
                    for c in cells
                }
                now = kind == "tiny" and (name in anew or pool == "tiny/zero")
                assert told == {"0.2.0" if now else "0.1.0"}, (pool, name, told)


def test_what_the_pages_say_by_hand_is_what_was_measured() -> None:
    """`solo` beside `full`, groups of 4 beside 8, entropy of the same starts, and two epochs at 5e-4."""
    found = all_standings(report.training_runs(RESULTS))
    both = {pool: made for pool, made in found.items() if {"solo", "full"} <= set(made)}
    gaps = [less(made["solo"], made["full"]) for made in both.values()]
    assert len(gaps) == 5 and sum(map(significant, gaps)) == 3
    assert all(
        np.mean(gap) > 0 and made["solo"].final > made["full"].final
        for gap, made in zip(gaps, both.values(), strict=True)
    )
    alone = ("solo", "reinforce", "spo", "sao", "oracle")  # rollouts by themselves, and a bound
    for pool, made in both.items():
        ends = {name: np.mean(list(s.gains.values())) for name, s in made.items() if not name.startswith(alone)}
        assert (max(ends, key=lambda name: ends[name]) == "full") == pool.endswith("/sparse")
    fours = [list(made["grpo-4"].gains.values()) for made in found.values() if "grpo-4" in made]
    assert sum(significant(gains) and sum(gains) > 0 for gains in fours) == 2
    runs = report.training_runs(RESULTS)["pretrained"]
    for policy in (("128", preset, runs.best_lr("128", preset)) for preset in ("solo", "reinforce")):
        grpo = ("128", "grpo", runs.best_lr("128", "grpo"))
        pairs = [[runs.cells[(*one, seed)] for one in (policy, grpo)] for seed in runs.pairs(policy, grpo)]
        more = [mine["ends"]["entropy"][1] - theirs["ends"]["entropy"][1] for mine, theirs in pairs]
        assert significant(more) and np.mean(more) > 0
    rows = sections.two_epochs(grid_runs(json.loads((RESULTS / "train_torch.json").read_text())))
    shares = [line.split(" | ")[2:5] for line in rows if "| 0.0005 |" in line]
    assert len(shares) == 5 and all(float(two) < float(one) for one, _, two in shares)


def test_the_gain_is_told_by_starting_weights() -> None:
    """Eight seeds in one interval hide that they are of several starts."""
    runs = report.training_runs(RESULTS)
    made = runs["pretrained"]
    solo, grpo = (("128", preset, made.best_lr("128", preset)) for preset in ("solo", "grpo"))
    starts = {made.start(made.cells[(*solo, seed)]) for seed in made.pairs(solo, grpo)}
    text = " ".join(blocks.pretrained_starts(runs))
    assert len(starts) == text.count(" ± ") >= 2


def test_what_thinned_rows_cost_is_told_from_runs_of_the_same_start() -> None:
    """Beside GRPO they ran on other seeds than `solo`: two gains over GRPO say nothing of each other."""
    runs = report.training_runs(RESULTS)
    gains = runs["pretrained"].less(("128", "solo-thin", 1e-5), ("128", "solo", 1e-5))
    assert f"minus that without `thin`: {sections.difference(gains)} ({len(gains)})." in blocks.pretrained_thin(runs)


def test_the_page_of_solo_has_every_pool_but_those_that_ran_on_verl_too() -> None:
    """The pool where REINFORCE is ahead was on no page but RESULTS.md."""
    page = (RESULTS.parents[1] / "docs" / "solo.md").read_text()
    for pool, found in all_standings(report.training_runs(RESULTS)).items():
        assert (f"| {POOL_NAMES[pool]} |" in page) == ("solo" in found and pool not in ("tiny/base", "tiny/sparse")), (
            pool
        )


def test_a_steps_rows_are_of_one_benchmark() -> None:
    """GRPO trained 53 % of one pool's tokens, and thinned rows stood beside it with 61 % of another's, where GRPO trains 40 %."""
    files = ("clock.json", "quickstart.json", "status_messages.json")
    found = [json.loads((RESULTS / name).read_text()) for name in files]
    grpo, thin = (
        sum(r["trained"] for r in rows if r["preset"] == preset and r["n"] == 8)
        / sum(r["generated"] for r in rows if r["preset"] == preset and r["n"] == 8)
        for preset, rows in (("grpo", found[1]["results"]), (blocks.THIN, found[2]["together"]))
    )
    lines = blocks.step_cost(*found, report.training_runs(RESULTS))
    assert any(line.startswith(f"| `+adaptive=grpo` | 1.00 | {grpo:.2f} | 1.00 |") for line in lines)
    assert any(line.startswith(f"| `solo` with `adaptive.advantage.thin=1` | 1.00 | {thin:.2f} |") for line in lines)


def test_pilot_commit_gains_nothing_from_a_rate_above_grpos_best() -> None:
    """docs/papers.md: no reason for it to end below GRPO, and none to raise it."""
    runs = grid_runs(json.loads((RESULTS / "pilots.json").read_text()))
    forms = ("pilot_commit", "pilot_commit-pipelined")
    assert {runs.best_lr("base", preset) for preset in ("grpo", *forms)} == {1e-3}
    for form in forms:
        assert np.mean(runs.less(("base", form, 1e-3), ("base", "grpo", 1e-3))) < 0
        assert np.mean(runs.less(("base", form, 2e-3), ("base", form, 1e-3))) < 0
    assert "raise the learning rate" not in (RESULTS.parents[1] / "docs" / "papers.md").read_text()


def test_seconds_of_a_step_name_their_own_seeds() -> None:
    """Six runs of `dapo` end, and three of them are from a start that GRPO had, too."""
    rows = sections.ends(report.training_runs(RESULTS)["pretrained"])
    (dapo,) = [line for line in rows if line.startswith("| `dapo` |")]
    assert " (6) | " in dapo and dapo.endswith(" (3) |")


def test_what_the_tables_say_of_a_pool() -> None:
    """Seed by seed, against the rival's own seeds; bold only where significant."""
    runs = made(
        base__grpo=[0.50, 0.52, 0.48],
        base__grpo_4=[0.62, 0.60],
        base__reinforce=[0.70, 0.76, 0.65],
        base__solo=[0.72, 0.74, 0.70],
        base__aero=[0.40, 0.64, 0.46],
        base__solo_epoch=[0.62, 0.64, 0.60],
    )
    found = {"tiny/base": standings(runs, ("base",))}
    of = found["tiny/base"]
    assert less(of["solo"], of["grpo-4"]) == pytest.approx([0.095, 0.133], abs=0.002)  # .95 of the ends, two seeds
    text = "\n".join(sections.accuracy(found))
    assert "| `solo` | 3 | 0.001 | 0.71 | **+0.209 ± 0.000** | 1.00 | 0.50 |" in text
    assert "| `aero` | 3 | 0.001 | 1.04 | -0.000 ± 0.26" in text and "`solo-epoch`" not in text
    assert "| `grpo-4` | 2 | 0.001 |" in text and "**+0.1" not in text.partition("`grpo-4`")[2].partition("\n")[0]
    assert "| prompts in epoch order | `solo-epoch` | 3 | **-0.095 ± 0.000** |" in sections.ablations(runs)
    assert "above REINFORCE in none of them." in " ".join(blocks.gain_note({"real/base": of}))
    every = report.training_runs(RESULTS)
    front = blocks.evidence({"real/base": of}, every)
    assert "| real, natural mix, 3 seeds: `solo` | 0.71 | **+0.209 ± 0.000** |" in front
    block = blocks.solo_block({"real/base": of}, every)
    (itself,) = [line for line in front if line.startswith("GRPO itself")]
    assert itself.endswith("at 1.00 to 1.00, by pool.") and f"- {itself}" in block
    assert "| **+0.209 ± 0.000** (3) |" in "\n".join(block)
    for key, cell in runs.cells.items():
        cell["load"] = [0.5, 3.1 if key[3] else 2.5]
    steps = {
        "verl": (2.0, 2.1, 1.9),
        "`aero`": (1.0, 1.05, 0.95),
        "`dapo`": (3.0, 3.3, 2.7),
        "`greso`": (3.0, 3.0, 3.0),
    }
    long = {"load": [2, 4], "rows": [{"arm": arm, "runs": [{"step": s} for s in took]} for arm, took in steps.items()]}
    of_all = claims(dict.fromkeys(("pretrained", "real", "tiny"), runs), long)
    (alone,) = [line for line in of_all if line.startswith("*Step*")]
    assert "of 3 pairs of the two claims in time, 1 had load averages of at most 3" in alone and "of 2 to 4;" in alone
    assert "| `aero` | time of a step saved | 45 % | long answers | 0.50 ± 0.00 (3) | confirmed |" in of_all
    assert of_all[-2].startswith("| `aero` | time") and of_all[-3].endswith(
        "| long answers | 1.00 ± 0.25 (3) | refuted |"
    )
    told = [line for line in of_all if "| tiny, natural mix |" in line]
    (accuracy,) = [line for line in told if line.startswith("| `aero` | accuracy")]
    assert "-0.000 ± 0.26" in accuracy and accuracy.endswith("(3) | undecided |"), accuracy
    (compute,) = [line for line in told if line.startswith("| `aero` | compute")]
    # half of the tokens train: 1 - (2 + 3) / 8
    assert "0.38 ± 0.00" in compute and compute.endswith("(3) | smaller |"), compute


def test_a_best_rate_at_the_end_of_the_grid_is_said() -> None:
    """Below it GRPO may be better: on the second pretrained model it was."""
    runs = report.training_runs(RESULTS)
    assert blocks.pretrained_rate(runs) == []
    cells = runs["pretrained"].cells
    best = runs["pretrained"].best_lr("128", "grpo")
    runs["pretrained"].cells = {
        key: cell for key, cell in cells.items() if key[:2] != ("128", "grpo") or key[2] >= best
    }
    (line,) = blocks.pretrained_rate(runs)
    found = all_standings(runs)
    assert line in blocks.evidence(found, runs) and line in "\n".join(blocks.solo_block(found, runs))
    text = "".join(sections.gemma(made(gemma__grpo=[0.2, 0.4], gemma__solo=[0.3])))
    assert "`grpo` 0.286 at 0.001 (2); `solo` 0.286 at 0.001 (1)." in text, text
    assert text in " ".join(" ".join(blocks.solo_block(found, runs, [text])).split())


def test_verls_own_grpo_is_told_beside_ours_of_the_same_seed() -> None:
    (line, _) = sections.plain(made(**{"128__grpo": [0.5], "128__verl": [0.6]}))
    assert (
        "seed 0: over 12 validations the accuracy of `grpo` minus its own is -0.055 on average, and at most 0.110 in size"
        in line
    )


def test_the_pools_are_the_benchmarks() -> None:
    real = json.loads((RESULTS / "train_cpu.json").read_text())["variants"]
    known = {"pretrained": pretrained.VARIANTS, "real": real, "tiny": train_torch.VARIANTS}
    for pool, names in POOLS.items():
        assert set(names) <= set(known[pool.partition("/")[0]]) and pool in POOL_NAMES


def test_a_pretrained_policy_is_compared_at_the_better_of_two_rates_with_three_seeds() -> None:
    """Six runs at one rate showed a lead that was the rate's."""
    lines = (RESULTS / "pretrained.jsonl").read_text().splitlines()
    cells = [cell for cell in map(json.loads, lines) if cell["lr"] == 3e-5 and cell["variant"] == "128"]

    def compared(*more: dict) -> set[str]:
        return {key[1] for key in report.compared([*cells, *more]).cells}

    again = {preset: [{**c, "lr": 1e-5} for c in cells if c["preset"] == preset] for preset in ("grpo", "solo")}
    assert compared() == set() and compared(*again["grpo"]) == {"grpo"} and compared(*again["solo"]) == {"solo"}
    once = again["solo"][0]

    def as_good(times: float) -> dict:
        return {**once, "curve": [[*point[:2], times * point[2], *point[3:]] for point in once["curve"]]}

    assert compared(*again["grpo"], as_good(0.9)) == {"grpo", "solo"}  # the other rate has three
    assert compared(*again["grpo"], as_good(1.1)) == {"grpo"}
    assert compared(*again["grpo"], *again["solo"]) == {"grpo", "solo"}
    runs = report.compared([*cells, *again["grpo"], *again["solo"]])
    (key,) = (k for k in runs.cells if k[1] == "solo" and k[3] == 0 and k[2] == runs.best_lr("128", "solo"))
    assert len(sections.step_ratios(runs, "solo")["seconds"]) == 3
    runs.cells[key] = {**runs.cells[key], "machine": {"cpu": "another"}}
    # seconds of two processors are no ratio, and two seeds tell nothing
    assert sections.step_ratios(runs, "solo")["seconds"] == []
