"""The presets, the parts of each role, and their options with defaults.

examples:
  verl-adaptive parts              everything, a line each
  verl-adaptive parts sampler      one role, with options
  verl-adaptive parts greso        whatever has this name, with options
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.resources import files
from typing import Any, Literal, get_args, get_origin, get_type_hints

from verl_adaptive.commands.arguments import add_json_option
from verl_adaptive.commands.output import console, print_json, table
from verl_adaptive.errors import UsageError, nearest
from verl_adaptive.policy import PARTS, available, find_part

_FOLDER = files("hydra_configs.verl_adaptive.adaptive")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="?",
        help="a role, a part or a preset: sampler, greso, pilot_commit (default: everything)",
    )
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    found = describe()
    everything = [*PARTS, *found["presets"], *(name for role in PARTS for name in found[role])]
    name = args.name
    if name is not None and name not in everything:
        hint = nearest(name, everything, "`verl-adaptive parts` lists what there is")
        raise UsageError(f"nothing is named {name!r}; {hint}")
    if name in PARTS:
        found = {name: found[name]}
    elif name is not None:
        found = {section: {k: v for k, v in items.items() if k == name} for section, items in found.items()}
        found = {section: items for section, items in found.items() if items}
    if args.json:
        print_json(found)
    else:
        _print(found, options=name is not None)
    return 0


def describe() -> dict[str, dict[str, Any]]:
    """Presets and parts of this environment, third parties' included.

    Returns:
        ``presets`` and the four roles → name → ``about``, and of a part ``options`` (name → default, values, about) and
        ``from`` (the class). A part with options set, such as ``mopps_by_source``, has ``of`` (the part) and those options.
    """
    out: dict[str, dict[str, Any]] = {"presets": _presets()}
    for role in PARTS:
        out[role] = {}
        for name in available(role):
            try:
                part = find_part(role, name)
                out[role][name] = {
                    "about": _first_sentence(part),
                    "from": f"{part.__module__}.{part.__qualname__}",
                    "options": options_of_config(part.Config),
                }
            except Exception as error:
                out[role][name] = {"about": f"cannot be loaded: {error}", "from": None, "options": {}}
        out[role] |= _settings(role, out[role])
        out[role] = dict(sorted(out[role].items()))
    return out


def _settings(role: str, parts: dict[str, Any]) -> dict[str, Any]:
    """Files of a role that are another part with some options set; their ``options`` are those alone."""
    from verl_adaptive.config import flat

    out = {}
    for name, about, content in _files(_FOLDER.joinpath(role)):
        of = next(item for item in content.pop("defaults") if item != "_self_")
        options = parts[of]["options"]  # none if that part cannot be loaded
        changed = {
            key: {"values": "", "about": "", **options.get(key, {}), "default": v} for key, v in flat(content).items()
        }
        out[name] = {"about": about, "of": of, "from": parts[of]["from"], "options": changed}
    return out


def _presets() -> dict[str, Any]:
    out = {}
    for name, about, content in _files(_FOLDER):
        chosen = [item for item in content.get("defaults", []) if isinstance(item, dict)]
        parts = {key.split("@")[0]: value for item in chosen for key, value in item.items()}
        out[name] = {"about": about, "parts": parts}
    return out


def _files(folder: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, first sentence of the comment, and content of a folder's YAML files."""
    import yaml

    for file in sorted(folder.iterdir(), key=lambda f: f.name) if folder.is_dir() else ():
        if file.name.endswith(".yaml"):
            text = file.read_text(encoding="utf-8")
            comment = [
                line.lstrip("# ") for line in text.splitlines() if line.startswith("#") and "@package" not in line
            ]
            yield file.name.removesuffix(".yaml"), _sentence(" ".join(" ".join(comment).split())), yaml.safe_load(text)


def _sentence(text: str) -> str:
    return re.split(r"(?<=[a-z\d)\]])\. (?=[A-Z+])", text, maxsplit=1)[0].rstrip(".") + "." if text else ""


def _first_sentence(part: type) -> str:
    """The class's own first sentence; of a class without one, its module's title."""
    own = part.__doc__ or sys.modules[part.__module__].__doc__ or ""
    return _plain_words(_sentence(" ".join(inspect.cleandoc(own).split("\n\n")[0].split())))


def options_of_config(config: Any) -> dict[str, dict[str, Any]]:
    """Options with their defaults and what the docstring says of each."""
    return dict(_walk(config(), ""))


def _walk(made: Any, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    about = _attributes(inspect.getdoc(type(made)) or "")
    hints = get_type_hints(type(made), include_extras=True)
    for field in fields(made):
        value = getattr(made, field.name)
        if is_dataclass(value):
            yield from _walk(value, f"{prefix}{field.name}.")
            continue
        told = {"values": _values(hints[field.name]), "about": about.get(field.name, "")}
        yield prefix + field.name, {"default": value, **told}


def _values(hint: Any) -> str:
    """What an option takes, for people."""
    from verl_adaptive.config import alternatives_of, ranged

    alternatives, null = alternatives_of(hint)
    out = []
    for base, within in map(ranged, alternatives):
        if get_origin(base) is Literal:
            name = ", ".join(map(str, get_args(base)))
        elif get_origin(base) is list:
            name = f"list: {_values(get_args(base)[0])}"
        else:
            name = _KINDS.get(base, "as described")
        out.append(f"{name} {within}" if within is not None and str(within) != "finite" else name)
    return "; ".join([*out, *(["null"] if null else [])])


_KINDS = {bool: "true, false", int: "whole number", float: "number", str: "text"}


def _attributes(doc: str) -> dict[str, str]:
    """The texts of an ``Attributes:`` section by name; ``a, b: text`` serves both."""
    body = re.split(r"^Attributes:\s*$", doc, maxsplit=1, flags=re.M)
    if len(body) < 2:
        return {}
    out: dict[str, str] = {}
    names: list[str] = []
    for line in body[1].splitlines():
        start = re.match(r"^    (\w[\w, ]*): (.*)$", line)
        if start:
            names = [name.strip() for name in start[1].split(",")]
            out.update(dict.fromkeys(names, start[2].strip()))
        elif line.startswith("     ") and names:
            out.update({name: f"{out[name]} {line.strip()}" for name in names})
        elif line.strip():
            break
    return {name: _plain_words(text) for name, text in out.items()}


def _plain_words(text: str) -> str:
    """A docstring's marks, as Markdown's."""
    return re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text).replace("``", "`")


def _print(found: dict[str, dict[str, Any]], options: bool) -> None:
    out = console()
    for section, items in found.items():
        if section == "presets":
            rows = [
                (f"+adaptive={name}", item["about"], " ".join(f"{r}={p}" for r, p in item["parts"].items()))
                for name, item in items.items()
            ]
            out.print(table([("preset", "left"), ("", "left"), ("parts", "left")], rows))
            continue
        listed = [(f"adaptive/{section}={name}", item["about"].replace("``", "")) for name, item in items.items()]
        out.print(table([(section, "left"), ("", "left")], listed))
        for name, item in items.items() if options else ():
            if item["options"]:
                lines = [
                    (f"adaptive.{section}.{key}", shown(option["default"]), option["about"])
                    for key, option in item["options"].items()
                ]
                kind = "value" if "of" in item else "default"
                out.print(table([(f"{name}: option", "left"), (kind, "left"), ("", "left")], lines))
                if "of" in item:
                    out.print(f"Its other options are those of adaptive/{section}={item['of']}.\n")
            else:
                out.print(f"{name} has no options.\n")


def shown(value: Any) -> str:
    """A value in Hydra's syntax."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
