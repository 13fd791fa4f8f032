"""The report in a real browser: light and dark, wide and narrow.

They run wherever Debian's ``chromium`` (``apt-get install -y chromium``), or another Chromium, is installed;
``tests/run.sh`` installs it where it may.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed: apt-get install -y chromium")

FLAGS = (
    *("--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars", "--enable-logging=stderr"),
    *("--disable-gpu", "--disable-quic", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
#: Background, panels, text, labels and first colour of the page, as in its style.
SCHEMES = {
    "light": ("rgb(251, 251, 250)", "rgb(255, 255, 255)", "rgb(29, 33, 39)", "rgb(93, 101, 112)", "rgb(47, 111, 181)"),
    "dark": ("rgb(20, 23, 27)", "rgb(28, 32, 38)", "rgb(228, 231, 235)", "rgb(154, 163, 174)", "rgb(106, 165, 227)"),
}


def browse(page: Path | str, profile: Path, *options: str, quiet: bool = True) -> subprocess.CompletedProcess:
    """The browser on a page or an address; ``quiet``: it has nothing to complain of."""
    done = subprocess.run(
        [
            str(BROWSER),
            *FLAGS,
            f"--user-data-dir={profile}",
            *options,
            page if isinstance(page, str) else page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    # a blocked resource, a script, a style that does not parse
    assert not quiet or "CONSOLE" not in done.stderr, done.stderr
    return done


def with_script(page: str, script: str) -> str:
    """The page with one more script, and without the policy that would stop it."""
    page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    return page.replace("</body>", f"<script>{script}</script></body>")


#: Where the browser put what it shows, and in which colours; the title of the page says it.
LOOKS = """
const seen = (query) => [...document.querySelectorAll(query)].filter(
  n => n.checkVisibility({opacityProperty: true, visibilityProperty: true}) && n.getClientRects().length);
const box = (node) => node.getBoundingClientRect(), style = (node) => getComputedStyle(node);
const words = seen("svg text").filter(t => t.textContent);
document.title = "looks " + JSON.stringify({
  beyond: document.body.scrollWidth - innerWidth,
  cut: seen(".chart").filter(c => c.scrollWidth > c.clientWidth).length,
  columns: new Set(seen(".grid2 > .panel").map(n => Math.round(box(n).left))).size,
  charts: seen(".chart svg").length, least_chart: Math.min(...seen(".chart svg").map(n => box(n).height)),
  least_word: Math.min(...words.map(t => box(t).height)),
  background: style(document.body).backgroundColor, panels: [...new Set(seen(".panel, .card").map(n => style(n).backgroundColor))],
  ink: [...new Set(seen("h1, h2, h3, td").map(n => style(n).color))], words: [...new Set(words.map(t => style(t).fill))],
  drawn: seen(".chart svg *").flatMap(n => [style(n).fill, style(n).stroke]),
});
"""


@pytest.mark.parametrize(("scheme", "width", "columns"), [("light", 1280, 2), ("light", 500, 1), ("dark", 500, 1)])
def test_it_looks_right(scheme, width, columns, reported, tmp_path) -> None:
    """Wide windows have two columns; on a telephone nothing is cut off and words stay readable."""
    page = tmp_path / "looks.html"
    page.write_text(with_script(reported.html, LOOKS), encoding="utf-8")
    options = ("--blink-settings=preferredColorScheme=0",) if scheme == "dark" else ()
    dom = browse(page, tmp_path / "profile", f"--window-size={width},4000", "--dump-dom", *options).stdout
    found = json.loads(html.unescape(re.search("<title>looks (.*?)</title>", dom)[1]))
    assert found["beyond"] <= 0 and found["cut"] == 0 and found["columns"] == columns
    assert found["charts"] >= 8 and found["least_chart"] > 100 and found["least_word"] >= 9
    background, panel, ink, soft, first = SCHEMES[scheme]
    assert (found["background"], found["panels"], found["ink"]) == (background, [panel], [ink])
    assert set(found["words"]) == {ink, soft} and found["drawn"].count(first) > 10


def test_the_browser_runs_the_pages_own_script_alone(reported, tmp_path) -> None:
    dom = browse(reported.path, tmp_path / "profile", "--dump-dom").stdout
    assert dom.count("<script") == 1 and "alert(1)" in dom and "</html>" in dom
    assert dom.count("<svg") == reported.html.count("<svg")
    assert 'class="scripted"' in dom and 'class="cross"' in dom
    # whoever gets a script or an event handler past the escaping is stopped by the policy
    evil = reported.html.replace("</h1>", "</h1><script>document.title='evil'</script><b onclick=1>x</b>", 1)
    page = tmp_path / "evil.html"
    page.write_text(evil, encoding="utf-8")
    done = browse(page, tmp_path / "evil", "--dump-dom", quiet=False)
    assert "<title>evil" not in done.stdout and "Content Security Policy" in done.stderr


#: Runs in the page after its own script; what it finds out ends in the title.
ACTS = """
const $ = (q) => document.querySelector(q), said = [];
const move = (node, x) => {
  const box = node.getBoundingClientRect();
  node.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + x * box.width, clientY: box.top + 20, bubbles: true}));
};
move($(".view svg[data-hover]"), 0.9);
said.push(!$("#tip").hidden && $("#tip").textContent.includes("rollouts generated"));
const table = $("#list-2"), head = [...table.tHead.rows[0].cells].find(c => c.textContent === "rollouts");
const column = () => [...table.tBodies[0].rows].map(r => +r.cells[head.cellIndex].dataset.value);
head.click(); said.push(column().every((v, i, a) => !i || a[i - 1] >= v));
head.click(); said.push(column().every((v, i, a) => !i || a[i - 1] <= v));
const find = $("#find-2"), before = table.tBodies[0].rows.length;
const key = table.tBodies[0].rows[0].querySelector("code").textContent;
find.value = key; find.dispatchEvent(new Event("input"));
const left = [...table.tBodies[0].rows].filter(r => !r.hidden);
said.push(left.length === 1 && before > 5 && left[0].textContent.includes(key));
$("label[for=by-steps]").click();
said.push(getComputedStyle($(".by-steps")).display === "grid" && getComputedStyle($(".by-rollouts")).display === "none");
// a value that is not there is an empty cell of the CSV, not a dash that is taken for a formula
const cell = left[0].cells[head.cellIndex], saved = [];
cell.dataset.value = "";
cell.textContent = "-";
left[0].cells[head.cellIndex + 1].dataset.value = "＝1+1";  // spreadsheets take the full-width sign for the plain one
window.Blob = class { constructor(parts) { saved.push(...parts); } };
URL.createObjectURL = () => "#";
HTMLAnchorElement.prototype.click = () => {};
$(".csv[data-table=list-2]").click();
said.push(saved.length === 2 && saved[1].split(",")[head.cellIndex] === '""');
said.push(saved[1].split(",")[head.cellIndex + 1] === `"'＝1+1"`);
document.title = "acts " + said.join(" ");
"""


def test_tooltips_sorting_searching_and_views(reported, tmp_path) -> None:
    probe = tmp_path / "acts.html"
    probe.write_text(with_script(reported.html, ACTS), encoding="utf-8")
    dom = browse(probe, tmp_path / "profile", "--window-size=1280,3000", "--dump-dom").stdout
    assert "<title>acts true true true true true true true</title>" in dom


#: A reader at work: picks a view, sorts and searches a list, opens its commands, scrolls; and looks again after the news.
READER = """
const $ = (q) => document.querySelector(q);
$("label[for=by-steps]").click();
const head = () => [...$("#list-2").tHead.rows[0].cells].find(c => c.textContent === "rollouts");
head().click(); head().click();
const key = $("#list-2").tBodies[0].rows[0].querySelector("code").textContent;
$("#find-2").value = key; $("#find-2").dispatchEvent(new Event("input")); $("#find-2").focus();
$("#do-2").open = true;
scrollTo(0, 900);
const wait = setInterval(() => {
  if (!$("h1").textContent.includes("SECOND")) return;
  clearInterval(wait);
  setTimeout(() => {
    const shown = [...$("#list-2").tBodies[0].rows].filter(r => !r.hidden);
    const said = [$("#by-steps").checked, head().getAttribute("aria-sort") === "ascending", $("#find-2").value === key,
      shown.length === 1, $("#do-2").open, Math.abs(scrollY - 900) < 3, document.activeElement.id === "find-2",
      document.querySelectorAll("svg .cross").length === document.querySelectorAll("svg[data-hover]").length,
      document.querySelectorAll("script").length >= 1 && $("nav .state").textContent === "live"];
    document.title = "kept " + said.join(" ");
  }, 50);
}, 50);
"""


def test_news_come_without_losing_the_place(reported, tmp_path) -> None:
    """A real server, a real browser: the page takes the news and leaves everything that the reader did as it was."""
    pytest.importorskip("starlette")
    uvicorn = pytest.importorskip("uvicorn")
    from verl_adaptive.report.collect import collect
    from verl_adaptive.report.page import render
    from verl_adaptive.report.server import Site, application
    from verl_adaptive.report.templates import Live
    from verl_adaptive.stats import open_run

    opened = open_run(reported.folder)
    collected, made = collect(opened), []

    def page(run, live: Live) -> str:
        made.append(run)
        first = len(made) == 1
        own = Live(live.watch, live.version, every=1)
        collected.facts["run"] = "FIRST" if first else "SECOND"
        return with_script(render(collected, live=own), READER)

    site = Site(str(reported.folder), page, str)
    application_ = application(site).app  # without the guard's policy, which would stop the reader's script
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application_, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        (run,) = site.runs()[0]
        # one page, news at the first look for them, and none after that
        site._is_new = lambda run: ("old", "new", None)[min(len(made), 2)]  # type: ignore[method-assign]
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/run/{run.id}"
        options = ("--window-size=1280,900", "--virtual-time-budget=200000", "--dump-dom")
        done = browse(url, tmp_path / "profile", *options, quiet=False)
        assert "<title>kept " + " ".join(["true"] * 9) in done.stdout, re.search("<title>.*?</title>", done.stdout)
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
