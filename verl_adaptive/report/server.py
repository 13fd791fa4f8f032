"""The report as a small web server: read-only, for one machine, over all runs of a folder.

Everybody on the machine can reach the port, so it answers those alone who have its token: in the address that they open
first, in the cookie that they get for it, or as ``Authorization: Bearer``. It listens on loopback unless asked otherwise, and
a browser is answered only under a name that nobody else's domain can be pointed at (DNS rebinding): an IP address,
``localhost``, or a name that was given.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any
from urllib.parse import parse_qs, quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from verl_adaptive.errors import AdaptiveError
from verl_adaptive.report.accounts import ledgers_of, plan_of
from verl_adaptive.report.figures import spark
from verl_adaptive.report.learning_curve import headline
from verl_adaptive.report.templates import Live, fill, policy_of
from verl_adaptive.stats import Run, find_runs
from verl_adaptive.text import clean

#: Seconds between two looks of a page for news.
EVERY = 10


class AccessGuard(BaseHTTPMiddleware):
    """Refuses strangers, other names and other methods, and gives every answer its security headers.

    Args:
        app: what is guarded.
        names: host names that are answered beside IP addresses and ``localhost``.
        token: who has it is answered; empty: everybody is.
    """

    def __init__(self, app: ASGIApp, names: tuple[str, ...] = (), token: str = "") -> None:
        super().__init__(app)
        # What a browser keeps is not the token: cookies have letters that they cannot hold, and go to every port of a host.
        self._token, self._kept = token, hashlib.sha256(token.encode()).hexdigest()
        self.names = frozenset(name.lower() for name in (*names, "localhost"))
        self._headers = {
            "content-security-policy": f"{policy_of(True)}; frame-ancestors 'none'",
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-resource-policy": "same-origin",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-store",
        }

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        answer = self._refusal(request) or await call_next(request)
        answer.headers.update(self._headers)
        return answer

    def _refusal(self, request: Request) -> Response | None:
        """The answer in place of the application's: a refusal, or, to a token in the address, a cookie and a redirect."""
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not self.allows(hosts[0]):
            return PlainTextResponse("this name is not answered here; see serve --name\n", 403)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("read-only\n", 405, {"allow": "GET, HEAD"})
        if not self._token:
            return None
        # Cookies know no ports: under one name the second of two servers would shut the first one's readers out.
        port = hosts[0].rpartition(":")[2]
        name = f"verl-adaptive-{port if port.isdecimal() else 80}"
        address = parse_qs(request.scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if _same(address, self._token):
            # Away from the address, where a history, a bookmark or a picture of the screen would keep it.
            answer = RedirectResponse(quote(f"/{request.scope['path'].lstrip('/')}"), 303)
            answer.set_cookie(name, self._kept, httponly=True, samesite="lax")
            return answer
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if _same(bearer, self._token) or _same(request.cookies.get(name, ""), self._kept):
            return None
        why = "open the address that verl-adaptive serve has printed: it ends with ?token=…\n"
        return PlainTextResponse(why, 401, {"www-authenticate": "Bearer"})

    def allows(self, host: str) -> bool:
        """Whether a Host header is one that nobody else's domain can have."""
        name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        if name.lower().rstrip(".") in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _same(given: str, expected: str) -> bool:
    """Compare in a time that does not depend on where the two differ."""
    return hmac.compare_digest(given.encode(), expected.encode())


def state_of(run: Run) -> dict[str, Any]:
    """What is new of a run by now, quickly.

    Returns:
        ``version`` (changes with every step and validation), ``step``, ``generated``, ``plan`` or ``budget`` (the steps or the
        rollouts that are planned: whichever ends the run, as it goes now), ``validation``, ``best`` and ``curve``
        (of the mean over sources), ``updated`` (seconds since 1970, or None), ``running`` and ``done``.
    """
    run = run.again()
    newest, validations = run.newest(), run.validations()
    step = wall = generated = None
    planned: dict[str, float] = {}
    attempt, pace = 0, 0.0
    if newest:
        attempt, step, wall = (newest[-1][name] for name in ("attempt", "step", "wall_time"))
        if newest[0]["attempt"] == attempt:  # a pause between attempts is no pace
            pace = max(0.0, wall - newest[0]["wall_time"])
        _, ledger = ledgers_of(newest[-1]["ledger"])
        generated = None if ledger is None else ledger.rollouts.generated
        planned = plan_of(newest[-1]["scalars"])
    # the further one along is the one that ends the run
    done = {"steps": step or 0, "rollouts": generated or 0}
    along = {name: done[name] / planned[name] for name in planned}
    by_rollouts = along.get("rollouts", 0.0) > along.get("steps", 0.0)
    curve = next(iter(headline(validations)[-1:]), None)
    times = [w for w in (wall, validations[-1]["wall_time"] if validations else None) if w is not None]
    updated = max(times, default=None)
    return {
        "version": f"{attempt}.{step}.{len(validations)}",
        "step": step,
        "plan": int(planned["steps"]) if "steps" in planned and not by_rollouts else None,
        "budget": int(planned["rollouts"]) if by_rollouts else None,
        "generated": generated,
        "validation": None if curve is None else float(curve.values[-1]),
        "best": None if curve is None else float(curve.values.max()),
        "curve": [] if curve is None else curve.values[-200:].tolist(),
        "updated": updated,
        "done": max(along.values(), default=0.0) >= 1,
        "running": updated is not None and time.time() - updated < max(180.0, 5 * pace),
    }


@dataclass
class _Page:
    version: str
    text: str
    made: float
    took: float


@dataclass
class Site:
    """What the server knows.

    Attributes:
        source: a folder, or a pattern.
        render: makes a run's page; slow.
        compare: makes a page of several runs.
    """

    source: str
    render: Callable[[Run, Live], str]
    compare: Callable[[list[Run]], str]
    _found: tuple[float, list[Run], list[str]] | None = None
    _pages: dict[str, _Page] = field(default_factory=dict)
    _making: dict[str, asyncio.Task[_Page]] = field(default_factory=dict)
    _missing: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)  # page made at a time: the machine has training to do

    def runs(self) -> tuple[list[Run], list[str]]:
        """The runs there are now, or were a moment ago: a folder may be large, and far away."""
        if self._found is None or time.monotonic() - self._found[0] > 0.5 * EVERY:
            self._found = (time.monotonic(), *find_runs(self.source))
        return list(self._found[1]), list(self._found[2])

    def find(self, id: str) -> Run | None:
        """A run by its id; nothing else that a browser asks for is ever opened."""
        return next((run for run in self.runs()[0] if run.id == id), None)

    def missing(self, run: Run, version: str) -> list[str]:
        """What the run's journal lacks, in words; read when the run has a new version, for it takes all of its steps."""
        if self._missing.get(run.id, ("", []))[0] != version:
            self._missing[run.id] = version, run.missing()
        return self._missing[run.id][1]

    def _is_new(self, run: Run) -> str | None:
        """The version of the page to make now; None while the one that is there will do.

        A page that took long to make is shown for some time, however fast the run goes on.
        """
        page = self._pages.get(run.id)
        if page is not None and time.monotonic() - page.made < max(0.5 * EVERY, 5 * page.took):
            return None
        version = str(state_of(run)["version"])
        return None if page is not None and page.version == version else version

    async def ready(self, run: Run) -> _Page | None:
        """The run's current page. If there is news, a newer one is made in the background."""
        version = await run_in_threadpool(self._is_new, run)
        if version is not None and run.id not in self._making:
            task = asyncio.create_task(self._make(run, version))
            task.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # raised where the page is awaited
            self._making[run.id] = task
        return self._pages.get(run.id)

    async def page(self, run: Run) -> str:
        """The run's page; only the first one of a run has to be waited for."""
        page = await self.ready(run)
        if page is None:
            page = await asyncio.shield(self._making[run.id])
        return page.text

    async def _make(self, run: Run, version: str) -> _Page:
        try:
            async with self._one:
                began = time.monotonic()
                live = Live(f"/run/{run.id}/version", version, EVERY)
                text = await run_in_threadpool(self.render, run, live)
                page = self._pages[run.id] = _Page(version, text, time.monotonic(), time.monotonic() - began)
                return page
        finally:
            del self._making[run.id]


def application(site: Site, names: tuple[str, ...] = (), token: str = "") -> ASGIApp:
    """The server's application; names and token as of :class:`AccessGuard`."""

    async def index(request: Request) -> Response:
        rows, trouble, version = await run_in_threadpool(_index, site)
        live = Live("/version", version, EVERY)
        text = fill("index.html.j2", live=live, rows=rows, trouble=trouble, where=site.source, spark=spark)
        return HTMLResponse(_sendable(text))

    async def index_version(request: Request) -> Response:
        return PlainTextResponse((await run_in_threadpool(_index, site))[2])

    async def asked_for(request: Request) -> Run:
        run = await run_in_threadpool(site.find, request.path_params["id"])
        if run is None:
            raise HTTPException(404, "no such run\n")
        return run

    async def run_page(request: Request) -> Response:
        return HTMLResponse(_sendable(await site.page(await asked_for(request))))

    async def run_version(request: Request) -> Response:
        page = await site.ready(await asked_for(request))
        return PlainTextResponse("" if page is None else page.version)

    async def compared(request: Request) -> Response:
        ids = request.query_params.getlist("run")
        runs = [run for run in (await run_in_threadpool(site.runs))[0] if run.id in ids]
        if len(runs) < 2:
            raise HTTPException(404, "two runs or more are compared\n")
        return HTMLResponse(_sendable(await run_in_threadpool(site.compare, runs)))

    async def failed(request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{clean(str(error))}\n", 503)

    routes = [
        Route("/", index),
        Route("/version", index_version),
        Route("/compare", compared),
        Route("/run/{id:str}", run_page),
        Route("/run/{id:str}/version", run_version),
    ]
    return AccessGuard(Starlette(routes=routes, exception_handlers={AdaptiveError: failed}), names, token)


def _sendable(text: str) -> bytes:
    """UTF-8; a lone surrogate in somebody's text becomes an escape."""
    return text.encode("utf-8", "backslashreplace")


def _index(site: Site) -> tuple[list[dict[str, Any]], list[str], str]:
    """Rows of the index, newest first; what could not be read, or is missing; and the version of it all."""
    runs, trouble = site.runs()
    rows = []
    for run in runs:
        try:
            state = state_of(run)
            trouble += site.missing(run, str(state["version"]))
        except AdaptiveError as error:
            trouble.append(str(error))
            continue
        when = state["updated"]
        said = "-" if when is None else datetime.fromtimestamp(when, timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        about = {
            "id": run.id,
            "name": run.name,
            "preset": str(run.about.get("preset", "-")),
            "where": run.where.removeprefix(f"{site.source.rstrip('/')}/"),
            "when": said,
        }
        rows.append({**state, **about})
    rows.sort(key=lambda row: (-(row["updated"] or 0.0), row["name"], row["id"]))
    return (
        rows,
        trouble,
        "-".join([*(f"{row['id'][:4]}.{row['version']}.{row['running']:d}" for row in rows), str(len(trouble))]),
    )
