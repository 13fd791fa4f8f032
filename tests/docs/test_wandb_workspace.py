"""The ready wandb workspace: real panels, of metrics that there are. Saving it needs wandb's server."""

from __future__ import annotations

import json
import re
from pathlib import Path

from examples.wandb_workspace import SECTIONS, workspace

ROOT = Path(__file__).parents[2]


def test_every_metric_is_documented():
    known = set(re.findall(r"^\| `(adaptive/[^`]+)`", (ROOT / "docs" / "metrics.md").read_text(), re.M))
    named = {name for panels in SECTIONS.values() for x, y in panels.values() for name in (x, *y)} - {"Step"}
    assert len(named) > 15 and not named - known
    assert {name for name in known if "/alarm/" in name} <= named  # one that is missing is raised, and nobody sees it


def test_what_would_be_saved_has_every_panel():
    made = workspace("somebody", "project")._to_model()
    bank = json.loads(made.spec.model_dump_json(by_alias=True))["section"]["panelBankConfig"]
    titles = {s["name"]: [p["config"]["chartTitle"] for p in s["panels"]] for s in bank["sections"]}
    assert titles == {name: list(panels) for name, panels in SECTIONS.items()}
