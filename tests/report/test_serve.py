"""``verl-adaptive serve``: a real server over loopback, and whom it answers."""

from __future__ import annotations

import asyncio
import functools
import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.cli.stores import HOSTILE, change_lines, make_run, without_steps
from tests.programs import interrupted, program
from tests.report.test_report import Page
from tests.stats.test_journal import attempt
from verl_adaptive.groups import Groups
from verl_adaptive.report.server import AccessGuard, Site, _index, state_of
from verl_adaptive.stats import Journal, find_runs, reader
from verl_adaptive.stats.journal import attempts_in
from verl_adaptive.stats.keys import keys_array


class Answer(NamedTuple):
    status: int
    text: str
    headers: dict[str, str]


class Served:
    """A running server and its folder."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.process = program("serve", folder, "--port", 0, *options)
        said = ""
        while "http://" not in said:
            line = self.process.stderr.readline()
            assert line, f"the server did not start: {said}"
            said += line
        self.said = said
        self.host, self.port, token = re.search(r"http://([^/]+):(\d+)/(?:\?token=(\S+))?", said).groups()
        self.token = token or ""

    def get(self, path: str, host: str | None = None, method: str = "GET", **headers: str) -> Answer:
        """An answer to somebody who has the token, unless ``headers`` or the path say what to send in its place."""
        connection = http.client.HTTPConnection("127.0.0.1", int(self.port), timeout=120)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", f"127.0.0.1:{self.port}" if host is None else host)
        if not headers and "token=" not in path:
            headers = {"Authorization": f"Bearer {self.token}"}
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        out = Answer(response.status, response.read().decode(), {k.lower(): v for k, v in response.getheaders()})
        connection.close()
        return out


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    make_run(folder / "a" / "one", steps=12, run_id=f"p/{HOSTILE}"[:60], snapshot=False, validate=lambda s: s / 100)
    whole = {"validate": lambda s: s / 50, "plan": {"adaptive/plan/steps": 6}}
    make_run(folder / "b", steps=6, run_id="p/two", snapshot=False, **whole)
    ends = {"adaptive/plan/steps": 50, "adaptive/plan/rollouts": 5000}
    shared = {"journal": folder / "shared" / "p" / "three", "plan": ends}
    make_run(folder / "b2", steps=3, run_id="p/three", snapshot=False, **shared)
    (folder / "broken" / "attempt-0").mkdir(parents=True)
    (folder / "broken" / "attempt-0" / "attempt.json").write_text("no attempt")
    (folder / "no-run").mkdir()
    os.mkfifo(folder / "no-run" / "steps.jsonl")  # a pipe: opening it waits for somebody to write
    (folder / "pipe" / "attempt-0").mkdir(parents=True)
    os.mkfifo(folder / "pipe" / "attempt-0" / "attempt.json")
    server = Served(folder)
    try:
        yield server
    finally:
        assert interrupted(server.process)[0] == 0


def runs(served: Served) -> dict[str, str]:
    """Name → path of every run on the index."""
    text = served.get("/").text
    return {name: path for path, name in re.findall(r'<a href="(/run/[0-9a-f]{16})">([^<]*)</a>', text)}


def test_the_index_has_every_run(served) -> None:
    answer = served.get("/")
    assert answer.status == 200 and answer.headers["content-type"].startswith("text/html")
    page = Page(answer.text)
    assert len(runs(served)) == 3 and {"p/two", "p/three"} <= set(runs(served))
    assert "<script>alert" not in answer.text and "script" in page.tags
    assert " of 5,000</td>" in answer.text and " of 50</td>" not in answer.text
    assert "0.100" in answer.text and "no-run" not in answer.text
    assert "is damaged" in answer.text and "not a regular file" in answer.text  # said, not silently left out


def test_a_runs_page_is_the_report(served) -> None:
    answer = served.get(runs(served)["p/two"])
    assert answer.status == 200
    Page(answer.text)
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", answer.text)
    assert headings[:3] == ["Learning", "What to look at today", "Where every rollout went"]
    assert 'data-watch="/run/' in answer.text and "All runs" in answer.text


def test_ticked_runs_are_compared(served) -> None:
    """A finished run is done, a validated one has its curve in the index; two of them have a page."""
    index = served.get("/").text
    ids = [path.rpartition("/")[2] for name, path in runs(served).items() if name != "p/three"]
    assert index.count('class="spark"') == 2 and index.count(">done<") == 1 and len(ids) == 2
    assert all(f'class="tick" id="tick-{one}"' in index for one in ids)
    page = served.get(f"/compare?run={ids[0]}&run={ids[1]}").text
    assert "final value" in page and page.count("<polyline") == 2
    assert served.get(f"/compare?run={ids[0]}&run=x").status == 404


def test_every_answer_is_guarded(served) -> None:
    for path in ("/", "/version", "/nothing", runs(served)["p/two"]):
        headers = served.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers


OWN = ("localhost", "LOCALHOST:9", "127.0.0.1", "[::1]:8765", "10.0.0.7:80", "localhost.")
OTHERS = ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "", "[::1", "user@evil")


@pytest.mark.parametrize("host", [*OWN, *OTHERS])
def test_own_names_are_answered_and_others_refused(served, host) -> None:
    answer = served.get("/", host=host)
    assert (answer.status, "p/two" in answer.text) == ((200, True) if host in OWN else (403, False))


def test_who_has_no_token_reads_nothing(served) -> None:
    assert len(served.token) >= 32
    bad = (
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {served.token[:-1]}"},
        {"Cookie": "a=b"},
        {"Cookie": f"verl-adaptive-{served.port}={served.token}"},
        {"Cookie": f"verl-adaptive-{served.port}="},
    )
    for path in ("/", "/version", runs(served)["p/two"], f"{runs(served)['p/two']}/version", "/nothing"):
        for headers in bad:
            answer = served.get(path, **headers)
            assert answer.status == 401 and "p/two" not in answer.text and "set-cookie" not in answer.headers
            assert answer.headers["content-security-policy"] and served.token not in answer.text
    for query in ("?token=", "?token=x", f"?token=x&token={served.token}", "?token=%ff%00", f"?Token={served.token}"):
        assert served.get(f"/{query}", Cookie="a=b").status == 401


def test_the_printed_address_gives_a_cookie_and_leaves_the_token_behind(served) -> None:
    path = runs(served)["p/two"]
    answer = served.get(f"{path}?token={served.token}")
    assert (answer.status, answer.headers["location"]) == (303, path)
    cookie, *attributes = answer.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=lax", "Path=/"} <= set(attributes)
    assert served.token not in cookie and cookie.startswith(f"verl-adaptive-{served.port}=")
    assert served.get(path, Cookie=f"other=1; {cookie}").status == 200
    assert served.get(f"{path}?token=of-an-earlier-server", Cookie=cookie).status == 200
    # behind a forwarded port the browser keeps it under that one, beside the cookies of other servers
    answer = served.get(f"/?token={served.token}", host="localhost:9999")
    assert answer.headers["set-cookie"].startswith("verl-adaptive-9999=")
    assert served.get("/", host="localhost:9999", Cookie=cookie).status == 401
    # nobody is led away
    answer = served.get(f"//evil.example/%5c?token={served.token}")
    assert answer.headers["location"] == "/evil.example/%5C"


def test_it_is_read_only_and_opens_nothing_else(served) -> None:
    before = {path: path.read_bytes() for path in served.folder.rglob("*.arrows")}
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert served.get("/", method=method).status == 405
    runs_that_are_none = ("/run/0000000000000000", "/run/..%2f..%2fetc%2fpasswd", "/run/%2Fetc%2Fpasswd")
    for path in (*runs_that_are_none, "/etc/passwd", "/../x", "/docs"):
        assert served.get(path).status == 404
    assert served.get("/", method="HEAD").status == 200
    assert {path: path.read_bytes() for path in served.folder.rglob("*.arrows")} == before


def test_news_changes_the_version_and_then_the_page(tmp_path) -> None:
    """Of a server that was given a token."""
    make_run(tmp_path / "run", steps=5, run_id="p/e", snapshot=False)
    own = "a token & of my own"
    server = Served(tmp_path, "--token", own, "--host", "localhost")
    try:
        assert server.token == "a%20token%20%26%20of%20my%20own" and server.get("/", Cookie="a=b").status == 401
        assert server.get(f"/?token={server.token}").status == 303
        server.token = own
        (path,) = runs(server).values()
        page = server.get(path).text
        first, index = server.get(f"{path}/version").text, server.get("/version").text
        assert f'data-version="{first}"' in page and "steps 1 to 5" in page
        with Journal(tmp_path / "run" / "adaptive", {"run": "p/e"}) as journal:
            journal.begin(5, parent=attempts_in(journal.folder)[-1]["id"])
            journal.commit_validation(5, {"val-core/math/acc/mean@1": 0.875})
        assert server.get("/version").text != index
        deadline = 200
        while server.get(f"{path}/version").text == first and deadline:
            deadline -= 1
            time.sleep(0.5)
        page = server.get(path).text
        assert "0.875" in page and f'data-version="{first}"' not in page
    finally:
        assert interrupted(server.process)[0] == 0


def test_listening_beyond_this_machine_is_asked_for(tmp_path, refusal, monkeypatch) -> None:
    serve = functools.partial(refusal, "serve", tmp_path, status=2)
    for host in ("0.0.0.0", "::", "192.168.1.5", "gpu7.lab"):
        assert "--allow-remote" in serve("--host", host)
        assert "Leave --token out" in serve("--host", host, "--allow-remote", "--token", "")
    for token in ("short", "é" * 20, "a\n" * 20):
        assert "--token: at least 16" in serve("--token", token)
        monkeypatch.setenv("VERL_ADAPTIVE_TOKEN", token)
        assert "VERL_ADAPTIVE_TOKEN: at least 16" in serve()
    monkeypatch.delenv("VERL_ADAPTIVE_TOKEN")
    assert "does not exist" in refusal("serve", "/no/where")
    assert "--port" in serve("--port", "70000")


def test_files_that_no_page_could_have_are_refused_at_the_start(tmp_path, refusal) -> None:
    (tmp_path / "data.parquet").touch()
    for words, says in (
        (("--data", "/no/such.parquet"), "/no/such.parquet is not a file"),
        (("--data", tmp_path / "data.parquet", "--rollouts", "/no/such"), "/no/such is not a folder"),
    ):
        assert says in refusal("serve", tmp_path, *words)


def test_a_given_name_is_answered() -> None:
    guard = AccessGuard(None, ("gpu7.lab",))  # type: ignore[arg-type]
    assert guard.allows("gpu7.lab:8765") and guard.allows("GPU7.lab") and not guard.allows("gpu8.lab")


def test_a_port_that_is_taken_is_one_line(served, tmp_path, refusal) -> None:
    assert "--port 0" in refusal("serve", tmp_path, "--port", served.port)


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_its_libraries_it_says_what_to_install(tmp_path, monkeypatch, refusal, missing) -> None:
    for name in [m for m in sys.modules if m.split(".")[0] == missing or m == "verl_adaptive.report.server"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "verl_adaptive.report.page", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    err = refusal("serve", tmp_path)
    assert "pip install '.[ui]'" in err and ".whl[ui]'" in err and "verl-adaptive[" not in err


def test_runs_behind_links_are_found_once(tmp_path) -> None:
    """A run keeps its own path beside a link to it, and links that lead in circles end."""
    far, near = tmp_path / "scratch" / "far", tmp_path / "checkpoints"
    near.mkdir()
    for folder in (far, near / "p" / "e" / "mine"):
        make_run(folder, prompts=8, steps=1, run_id=folder.name, snapshot=False)
    (near / "all").symlink_to(far.parent)
    (near / "latest").symlink_to(near / "p" / "e" / "mine")
    (near / "again").symlink_to(near)
    (far / "up").symlink_to(tmp_path)
    (near / "itself").symlink_to(near / "itself")
    (near / "gone").symlink_to(tmp_path / "gone")
    make_run(far / "global_step_1", prompts=8, steps=1, run_id="not a run of its own", snapshot=False)
    (near / "newest").symlink_to(far / "global_step_1")
    found, trouble = find_runs(str(near))
    assert [(run.name, run.source) for run in found] == [
        ("mine", str(near / "p" / "e" / "mine")),
        ("far", str(near / "all" / "far")),
    ]
    assert trouble == []


def test_a_page_that_is_ready_waits_for_nobody(tmp_path) -> None:
    """Pages waited 4.8 s behind another run's; one that is there is shown while its successor is made."""
    for name in ("a", "b"):
        make_run(tmp_path / name, prompts=8, steps=1, run_id=name, snapshot=False)
    going, made = threading.Event(), []

    def render(run, live) -> str:
        made.append(run.name)
        assert len(made) < 2 or going.wait(60)
        return f"{run.name} at {live.version}"

    async def visit() -> None:
        site = Site(str(tmp_path), render, str)
        a, b = site.runs()[0]
        first = await site.page(a)
        slow = asyncio.create_task(site.page(b))
        while len(made) < 2:
            await asyncio.sleep(0.01)
        with Journal(tmp_path / "a" / "adaptive") as journal:
            journal.begin(1, parent=attempts_in(journal.folder)[-1]["id"])
            journal.commit_validation(1, {"val-core/math/acc/mean@1": 0.5})
        site._pages[a.id].made -= 1000
        assert await asyncio.wait_for(site.page(a), 5) == first  # its successor is begun, behind b's page
        assert not slow.done()
        going.set()
        assert (await slow).startswith("b at")
        while await site.page(a) == first:
            await asyncio.sleep(0.01)

    asyncio.run(visit())


def test_what_is_new_is_read_without_the_whole_journal(tmp_path, monkeypatch) -> None:
    """Equal to what all of the steps say, across a resume."""
    make_run(tmp_path, steps=9, run_id="p/e", snapshot=False, plan={"adaptive/plan/steps": 50})
    size = (tmp_path / "adaptive" / "attempt-0" / "steps.jsonl").stat().st_size
    monkeypatch.setattr(reader, "_TAIL", size // 2)
    assert [line["step"] for line in find_runs(str(tmp_path))[0][0].newest(2)] == [8, 9]
    attempt(tmp_path / "adaptive", after=4, of=-1)
    (run,), trouble = find_runs(str(tmp_path))
    every = run.steps.to_pylist()
    for count in (1, 2, 3, 9):
        assert [line["step"] for line in run.newest(count)] == [row["step"] for row in every][-count:]
    state = state_of(run)
    assert (state["step"], state["plan"], trouble) == (4, 50, []) and not state["running"] and not state["done"]


@pytest.mark.parametrize(
    ("rollouts", "plan", "budget", "done"), [(100, None, 100, True), (1000, None, 1000, False), (1e6, 50, None, False)]
)
def test_the_index_says_what_ends_a_run(rollouts, plan, budget, done, tmp_path) -> None:
    """Half of its rollouts spent, a run was at "step 6 of 48", though it would end with the twelfth."""
    ends = {"adaptive/plan/steps": 50, "adaptive/plan/rollouts": rollouts}
    make_run(tmp_path, steps=3, snapshot=False, plan=ends)
    (run,), _ = find_runs(str(tmp_path))
    state = state_of(run)
    assert (state["plan"], state["budget"], state["done"]) == (plan, budget, done)
    assert (state["generated"] >= rollouts) == done


def test_a_time_that_is_none_hides_one_run_alone(tmp_path) -> None:
    """The index of all runs was an error of the server."""
    for name in "ab":
        make_run(tmp_path / name, steps=3, run_id=f"p/{name}", snapshot=False)
    steps = tmp_path / "b" / "adaptive" / "attempt-0" / "steps.jsonl"
    change_lines(steps, lambda line: {**line, "wall_time": 1e20})
    rows, trouble, _ = _index(Site(str(tmp_path), str, str))
    assert [row["name"] for row in rows] == ["p/a"] and [str(steps) in text for text in trouble] == [True]


def test_the_index_names_what_a_journal_lacks(tmp_path) -> None:
    make_run(tmp_path, steps=4, run_id="p/a", snapshot=False)
    assert _index(Site(str(tmp_path), str, str))[1] == []
    without_steps(tmp_path, 2, 2)
    site = Site(str(tmp_path), str, str)
    rows, (text,), _ = _index(site)
    assert [row["step"] for row in rows] == [4] and text.startswith("p/a: the journal lacks step 2: ")
    assert _index(site)[1] == [text]  # without reading all of it again


def test_a_pause_between_attempts_is_no_pace(tmp_path) -> None:
    """A run that was resumed after eight hours, and ended after one step, was called running for two days."""
    now = time.time()
    for step, when in ((1, now - 30_000), (2, now - 1_000)):
        with Journal(tmp_path / "adaptive") as journal:
            journal.begin(step - 1)
            journal.commit_step(step, Groups.empty(), keys_array([]), [], sources=[], wall_time=when)
    (run,), _ = find_runs(str(tmp_path))
    state = state_of(run)
    assert (state["step"], state["running"]) == (2, False)


HANGS = """
import sys, time
from verl_adaptive.cli import main
from verl_adaptive.commands import serve
serve._render = lambda *_: time.sleep(600)
main(["serve", sys.argv[1], "--port", "0", "--token", ""])
"""


def test_one_interrupt_ends_it_though_a_page_hangs(tmp_path) -> None:
    """A page that waits for a disk which does not answer kept the process for good."""
    make_run(tmp_path / "run", steps=2)
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = re.search(r"http://\S+/", process.stderr.readline())[0]
            assert urllib.request.urlopen(address, timeout=60).status == 200  # an empty token is none
            (run,) = find_runs(str(tmp_path))[0]
            with pytest.raises(TimeoutError):
                urllib.request.urlopen(f"{address}run/{run.id}", timeout=2)
            process.send_signal(signal.SIGINT)
            process.wait(60)
            assert "every user of this machine can read this" in process.stderr.read()
        finally:
            process.kill()
