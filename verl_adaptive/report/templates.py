"""The package's templates: everything escaped, nothing undefined. A page needs no network; its style and its script are allowed
by their hashes, nothing else is."""

from __future__ import annotations

import base64
import functools
import hashlib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from verl_adaptive import __version__
from verl_adaptive.text import cell, clean, counted, number, share, short, span, step_range


@dataclass(frozen=True)
class Live:
    """What a served page knows of its server.

    Attributes:
        watch: where the script asks for news.
        version: what the page shows.
        every: seconds between two questions.
    """

    watch: str
    version: str
    every: int


@functools.cache
def _asset(name: str) -> str:
    return files("verl_adaptive.report").joinpath(name).read_text(encoding="utf-8")


def policy_of(live: bool) -> str:
    """The Content-Security-Policy: nothing but the page's own style and script; a served page may ask its server."""

    def digest(name: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(_asset(name).encode()).digest()).decode() + "'"

    parts = ["default-src 'none'", f"style-src {digest('report.css')}", f"script-src {digest('report.js')}"]
    if live:
        parts.append("connect-src 'self'")
    return "; ".join([*parts, "base-uri 'none'", "form-action 'none'"])


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for_people = (cell, clean, counted, number, share, short, span, step_range)
    made.filters |= {write.__name__: write for write in for_people} | {"plain": _plain, "safe_text": _safe_text}
    made.globals |= {
        "style": Markup(_asset("report.css")),
        "script": Markup(_asset("report.js")),
        "policy_of": policy_of,
        "package": __version__,
        "live": None,
    }
    return made


def fill(template: str, **values: Any) -> Markup:
    """A template with these values; it is compiled once. ``live`` is for a page that a server shows and refreshes."""
    return Markup(_environment().get_template(template).render(**values))


def _safe_text(value: object, limit: int = 600) -> str:
    """Somebody's text: escapes for what a browser would obey (bidirectional overrides), line breaks kept."""
    lines = str(value)[: 8 * limit].replace("\r\n", "\n").split("\n")
    return "\n".join(clean(line) for line in lines)[:limit]


def _plain(value: Any) -> str:
    """A value to sort by."""
    return "" if value is None or value != value else str(value)
