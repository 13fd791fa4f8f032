"""Stores made by the engine in a fake world, as a training run would have written them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.world import World, make_engine, run_step
from verl_adaptive.engine import Engine
from verl_adaptive.stats import StatsTable, dataset_keys, fingerprint, write_snapshot
from verl_adaptive.stats.journal import Journal, sealed, unsealed

#: Terminal control, HTML, rich markup, right-to-left override, Hydra and spreadsheet syntax, and a lone surrogate's cousin.
HOSTILE = "\x1b[31m\x07<script>alert(1)</script>[bold]&amp;\u202e=cmd()${x}\r\nend\x9b2J"


def hostile_rows(count: int) -> list[dict[str, Any]]:
    """Rows in verl's format whose texts try to get out."""
    return [
        {
            "data_source": ("gsm8k", "math", HOSTILE)[i % 3],
            "prompt": [{"role": "user", "content": f"{i}: {HOSTILE}" if i % 7 == 0 else f"What is {i} + {i}?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"index": i, "split": "train", "id": f"row-{i}"},
        }
        for i in range(count)
    ]


def write_dataset(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    """Write rows as Parquet."""
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def make_run(
    folder: Path,
    *,
    prompts: int = 60,
    steps: int = 30,
    run_id: str = "project/experiment",
    preset: str = "greso",
    seed: int = 0,
    batch: int = 8,
    n: int = 8,
    snapshot: bool = True,
    rows: list[dict[str, Any]] | None = None,
    journal: Path | None = None,
    rates: np.ndarray | None = None,
    validate: Callable[[int], float | dict[str, float]] | None = None,
    validated_on: dict[str, int] | None = None,
    plan: dict[str, float] | None = None,
    longest: int | None = None,
    **policy: Any,
) -> tuple[Engine, list[dict[str, Any]]]:
    """Train in the fake world; writes ``folder/adaptive`` (or ``journal``) and ``folder/global_step_<steps>/adaptive``.

    ``rates`` are true pass rates that stay; ``validate`` gives a validation's accuracy every 5 steps (or verl's metrics by
    name, of the prompts ``validated_on``).
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = hostile_rows(prompts) if rows is None else rows
    keys = dataset_keys(rows)
    rng = np.random.default_rng(seed)
    still = rates is not None
    rates = np.clip(rng.normal(0.5, 0.45, len(rows)), 0, 1) if rates is None else rates

    def validated(step: int) -> None:
        if validate is not None and step % 5 == 0:
            value = validate(step)
            metrics = value if isinstance(value, dict) else {"val-core/math/acc/mean@1": value}
            generated = engine.total.rollouts.generated
            when = 1.7e9 + 60.0 * step
            writer.commit_validation(
                step, metrics, generated=generated, prompts=validated_on or {"math": 200}, wall_time=when
            )

    table = StatsTable()
    sources = [row["data_source"] for row in rows]
    table.rows_for(keys, sources=sources)
    options = policy or {"sampler": "greso", "filter": "informative"}
    world = World(rates, seed, failure=0.02)
    engine, world = make_engine(
        **options, batch=batch, n=n, M=len(rows), p=rates, world=world, table=table, keys=keys, seed=seed
    )
    meta = {"run": run_id, "preset": preset, "n": n, "checkpoints": str(folder), "dataset": fingerprint(table.keys)}
    with Journal(journal or folder / "adaptive", meta=meta) as writer:
        writer.begin(0, table.keys, sources)
        validated(0)
        for step in range(1, steps + 1):
            world.p = np.clip(
                rates if still else rates + 0.01 * step * np.sin(np.arange(len(rows)) + step / 3), 0, 1
            )  # it learns, and forgets
            result = run_step(engine, world, step)
            groups = result.groups
            writer.commit_step(
                step,
                groups,
                table.keys[groups.row],
                result.outcome.astype(str),
                {"step": result.ledger.as_dict(), "run": engine.total.as_dict()},
                {**engine.policy.metrics(), **(plan or {})},
                sources=table.source_names(groups.row),
                wall_time=1.7e9 + 60.0 * step,
                longest=longest,
            )
            validated(step)
    if snapshot:
        table.col("retired")[:3] = 1
        write_snapshot(
            folder / f"global_step_{steps}" / "adaptive",
            table,
            {"engine": engine.state_dict(), "rows": {}},
            meta={
                "step": steps,
                "policy": preset,
                "dataset": "d",
                "attempt": writer.id,
            },
        )
    return engine, rows


def change_lines(path: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Rewrite a file of a journal's JSON lines, with checksums that fit; None leaves a line out."""
    found = [change(json.loads(unsealed(line))) for line in path.read_bytes().splitlines()]
    last, lines = ("ledger", "scalars"), []
    for line in found:
        if line is not None:
            said = json.dumps({n: line[n] for n in sorted(line, key=lambda n: last.index(n) if n in last else -1)})
            # as the journal writes them: no blanks before the two accounts
            lines.append(sealed(said.replace(', "ledger": ', ',"ledger":').replace(', "scalars": ', ',"scalars":')))
    path.write_bytes(b"".join(lines))


def without_steps(folder: Path, first: int, last: int) -> None:
    """Take steps out of a run's journal, as if they had never been written."""
    path = folder / "adaptive" / "attempt-0" / "steps.jsonl"
    change_lines(path, lambda line: None if first <= line["step"] <= last else line)


def last_ledger(path: Path) -> dict[str, Any]:
    """The newest step's account of a JSON lines export."""
    return json.loads(path.read_text().splitlines()[-1])["ledger"]
