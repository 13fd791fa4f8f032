"""The reference of all options: ``python scripts/options.py > docs/options.md``."""

from __future__ import annotations

from typing import Any

from verl_adaptive.commands.parts import describe, options_of_config, shown
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.policy import PARTS


def page() -> str:
    """``docs/options.md``."""
    found = describe()
    shared = {name: value for name, value in options_of_config(AdaptiveConfig).items() if name not in (*PARTS, "name")}
    lines = [
        "# Options",
        "",
        "Written by `python scripts/options.py > docs/options.md`; do not edit. Values in Hydra's syntax; an unknown "
        "key or a value out of range is an error before anything starts.",
        "",
        "## Every preset",
        "",
        *_table("adaptive", shared),
    ]
    for role in PARTS:
        for name, item in found[role].items():
            lines += ["", f"## adaptive/{role}={name}", "", item["about"].replace("``", "`"), ""]
            kind = "value" if "of" in item else "default"
            if "of" in item:
                lines += [f"`adaptive/{role}={item['of']}`, with these values:", ""]
            lines += _table(f"adaptive.{role}", item["options"], kind) if item["options"] else ["No options."]
    return "\n".join(lines) + "\n"


def _table(prefix: str, options: dict[str, dict[str, Any]], kind: str = "default") -> list[str]:
    rows = [
        f"| `{prefix}.{name}` | `{shown(o['default'])}` | {o['values']} | {o['about'].replace('|', chr(92) + '|')} |"
        for name, o in options.items()
    ]
    return [f"| option | {kind} | values | |", "|---|---|---|---|", *rows]


if __name__ == "__main__":
    print(page(), end="")
