"""docs/metrics.md names every metric that is emitted, and what verl makes of its name."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest

from tests.world import POLICIES, Arrivals, make_async_engine, make_engine, run_step
from verl_adaptive.config import AlarmConfig
from verl_adaptive.engine import AsyncEngine, AsyncFacts
from verl_adaptive.policy import PARTS, find_part
from verl_adaptive.report.judge import Judge

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"
TOGETHER = {"sum": "sum", "mean": "weighted_avg", "max": "max", "min": "min"}

#: Engines that between them emit everything.
RUNS = {
    **POLICIES,
    "band_of_rates": {"filter": {"name": "informative", "low": 0.3, "high": 0.7}},
    "pipelined": {
        "sampler": "retire",
        "allocator": {"name": "pilot_commit", "form": "pipelined", "max_age": 1},
        "filter": "band",
    },
    "reinforce_ada": {"allocator": "reinforce_ada"},
    "solo": {"sampler": "spread", "advantage": "memory"},
}


def table_rows() -> dict[str, tuple[str, str]]:
    """Documented name → (unit, together)."""
    rows = {}
    for line in DOC.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith("`adaptive/"):
            name = cells[0].strip("`")
            assert name not in rows, f"{name} is documented twice"
            rows[name] = (cells[1], cells[2])
    return rows


def reasons() -> set[str]:
    section = DOC.read_text().split("## Reasons")[1]
    return set(re.findall(r"^\| `(\w+)` \|", section, flags=re.M))


def documented(name: str) -> str | None:
    """The entry of the table that an emitted name falls under."""
    rows = table_rows()
    if name in rows:
        return name
    for entry in rows:
        pattern = re.escape(entry).replace("<reason>", f"({'|'.join(reasons())})")
        pattern = pattern.replace("<source>", ".+")
        if re.fullmatch(pattern, name):
            return entry
    return None


@pytest.fixture(scope="module")
def emitted() -> dict[str, float]:
    """Every metric name of every run above, with a value."""
    report = pytest.importorskip("verl_adaptive.integration.step_metrics")
    layout = pytest.importorskip("verl_adaptive.integration.layout")
    out: dict[str, float] = {}
    facts = {"batch": 8, "n": 16, "M": 200, "p": np.linspace(0, 1, 200) ** 0.5}
    made = [make_engine(**options, **facts) for options in RUNS.values()]
    made.append(make_async_engine(filter="informative", **facts, async_facts=AsyncFacts(warmup=12, threshold=2)))
    for engine, world in made:
        world.failure = 0.05
        arrivals = Arrivals(world)
        for step in range(1, 8):
            result = arrivals.step(engine, step) if isinstance(engine, AsyncEngine) else run_step(engine, world, step)
            groups = np.repeat(np.arange(4), 4)
            plan = layout.plan(
                groups,
                np.full(16, 9),
                np.full(16, 5),
                np.ones(16, dtype=bool),
                ranks=1,
                updates=2,
                partition=lambda cost, k: [list(range(len(cost)))],
            )
            out.update(report.step_metrics(engine, result, [plan], updates=plan.updates))
            groups = result.groups
            judge = Judge(AlarmConfig(), ["maths"], np.array([200]))
            counts = (np.zeros(len(groups), dtype=np.int64), groups.n, groups.successes, 1.0 * groups.n)
            judge.step(1, *counts, groups.sum(groups.reward), groups.sum(groups.reward**2))
            out.update(judge.metrics())
    times = pytest.importorskip("verl_adaptive.integration.timings")
    return out | times.Timings(slots=8).metrics()


def test_every_emitted_name_is_documented(emitted) -> None:
    assert not sorted(name for name in emitted if documented(name) is None)


def test_every_documented_name_is_emitted(emitted) -> None:
    used = {documented(name) for name in emitted}
    assert not sorted(set(table_rows()) - used)


def test_verl_puts_each_together_as_documented(emitted) -> None:
    utils = pytest.importorskip("verl.trainer.ppo.v1.utils")
    rule = utils.MetricsAggregator()._get_aggregation_type
    wrong = {n: rule(n) for n in emitted if rule(n) != TOGETHER[table_rows()[documented(n)][1]]}
    assert not wrong


def test_counters_say_so_and_nothing_else_does(emitted) -> None:
    for name in emitted:
        counter = name.endswith("_total") or "_total/" in name
        bare = name.replace("_total", "")
        assert counter == ("total" in name), name
        assert "sum" not in bare and "min" not in bare, name
        assert "max" not in bare or bare.endswith("_max"), name
        if counter:
            assert float(emitted[name]).is_integer() and emitted[name] >= 0, name


def test_reasons_are_those_of_the_filters_and_the_engine() -> None:
    own = {reason for name in PARTS["filter"] for reason in find_part("filter", name).reasons}
    rejected = {find_part("filter", name).rollout_reason for name in PARTS["filter"]}
    engines = "zero_advantage failed lost aborted expired incomplete stale gone none_left"
    assert reasons() == own | rejected | set(engines.split())


def test_what_becomes_of_verls_counts_is_said() -> None:
    """The plugin has the place of verl's buffer, so that its counts of dropped groups were missing, and nothing said so."""
    utils = pytest.importorskip("verl.trainer.ppo.v1.utils")
    ray_trainer = pytest.importorskip("verl.trainer.ppo.ray_trainer")
    names = [name for name in utils.MetricsAggregator().aggregation_rules["sum"] if name.startswith("training/")]
    names += ray_trainer.compute_spec_decode_metrics([2], [1], [1])
    said = re.findall(r"`([\w/*]+)`", DOC.read_text().split("## verl's own curves")[1].split("\n## ")[0])
    assert len(names) > 4 and not [name for name in names if not any(fnmatch(name, pattern) for pattern in said)]
