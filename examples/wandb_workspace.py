"""Makes a wandb workspace of what a run says of its rollouts: spending, difficulty, alarms, validation.

    pip install wandb-workspaces
    python examples/wandb_workspace.py ENTITY PROJECT

It is saved beside the project's other views and changes none of them. Every metric is in docs/metrics.md.
"""

from __future__ import annotations

import argparse

import wandb_workspaces.reports.v2 as reports
import wandb_workspaces.workspaces as workspaces

#: By what all methods are compared.
ROLLOUTS = "adaptive/cumulative/rollouts_generated"

#: Section → panel → the axis below and the metrics.
SECTIONS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "Spending": {
        "Rollouts of a step": ("Step", ("adaptive/rollouts/generated_total", "adaptive/rollouts/trained_total")),
        "Left out of training": ("Step", ("adaptive/rollouts/dropped_total",)),
        "Tokens so far": ("Step", ("adaptive/cumulative/tokens_generated", "adaptive/cumulative/tokens_trained")),
        "Seconds of generation": ("Step", ("adaptive/time/generation", "adaptive/time/last_tenth")),
    },
    "Learning": {
        "Reward of all rollouts": (ROLLOUTS, ("adaptive/reward/generated_mean",)),
        "Pass rate by where a prompt began": (
            ROLLOUTS,
            ("adaptive/pass_rate/started_hard", "adaptive/pass_rate/started_middle", "adaptive/pass_rate/started_easy"),
        ),
        "Groups without variance": (
            ROLLOUTS,
            ("adaptive/groups/all_correct_share", "adaptive/groups/all_wrong_share"),
        ),
        "Prompts visited": (ROLLOUTS, ("adaptive/prompts/visited_share",)),
    },
    "Alarms": {
        "Data sources": (
            "Step",
            tuple(f"adaptive/alarm/{name}" for name in ("never_solved", "cut", "jumped", "starved", "all_succeed")),
        ),
        "The run": (
            "Step",
            tuple(
                f"adaptive/alarm/{name}"
                for name in ("validation_falls", "rogue_reward", "dead_share", "duplicate_share", "unused_acc")
            ),
        ),
        "Answers cut at the limit": ("Step", ("adaptive/response_length/generated_clip_ratio",)),
    },
}


def workspace(entity: str, project: str) -> workspaces.Workspace:
    """The workspace, not yet saved."""
    sections = [
        workspaces.Section(
            name=name,
            is_open=True,
            panels=[reports.LinePlot(title=title, x=x, y=list(y)) for title, (x, y) in panels.items()],
        )
        for name, panels in SECTIONS.items()
    ]
    # verl's validation keys have the data sources' names in them, so wandb finds them by itself
    return workspaces.Workspace(
        name="verl-adaptive", entity=entity, project=project, sections=sections, auto_generate_panels=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("entity", help="user or team, as in wandb.ai/ENTITY/PROJECT")
    parser.add_argument("project", help="trainer.project_name of the runs")
    options = parser.parse_args()
    print(workspace(options.entity, options.project).save().url)


if __name__ == "__main__":
    main()
