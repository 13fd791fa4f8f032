"""README and docs: links lead somewhere, commands parse and compose, code runs, names and defaults exist."""

from __future__ import annotations

import configparser
import dataclasses
import doctest
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

import verl_adaptive
from tests.cli.lines import MINIMAL, composed, parsed
from tests.cli.stores import make_run
from tests.programs import ran
from verl_adaptive import policy
from verl_adaptive.cli import COMMANDS, main
from verl_adaptive.commands.cost import Cost
from verl_adaptive.commands.parts import describe
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.errors import ConfigError
from verl_adaptive.policy import PARTS, build_policy

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(p.relative_to(ROOT)) for p in PAGES]


def slug(heading: str) -> str:
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, code) of every fenced block in a language, its indentation taken off."""
    out = []
    for page in PAGES:
        for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```", page.read_text(), flags=re.M | re.S):
            if match[2] == language:
                code = "\n".join(line.removeprefix(match[1]) for line in match[3].splitlines())
                out.append((str(page.relative_to(ROOT)), code + "\n"))
    return out


# -- links and wording --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name) -> None:
    page = ROOT / name
    links = re.findall(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)", page.read_text())
    for link in links:
        if link.startswith(("https://arxiv.org/abs/", "https://github.com/")):
            continue
        assert "://" not in link, link
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and target.is_relative_to(ROOT), link
        if anchor:
            anchors = {slug(h) for h in re.findall(r"^#+ (.*)$", target.read_text(), flags=re.M)}
            assert anchor in anchors, (link, sorted(anchors))


def test_every_page_can_be_reached_from_the_readme() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen:
            continue
        seen.add(page)
        for link in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text()):
            if "://" not in link:
                todo.append((page.parent / link).resolve())
    assert {p for p in PAGES if p.name != "options.md"} <= seen and ROOT / "docs" / "options.md" in seen


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert [p.name for p in (ROOT / "docs").glob("*.md") if p.name != "README.md" and f"({p.name}" not in index] == []


@pytest.mark.parametrize("name", NAMES)
def test_lines_are_short_and_paths_are_nobodys(name) -> None:
    text = (ROOT / name).read_text()
    assert not re.search(r"/(work|root|tmp|home)/", text)
    if name != "docs/options.md":  # a table that a command writes
        long = [line for line in text.splitlines() if len(line) > 130 and not line.startswith("|") and "](" not in line]
        assert not long


def tables(text: str) -> list[list[list[str]]]:
    """The cells of every table, code blocks left out; a bar in a cell is written ``\\|``."""
    found: list[list[list[str]]] = [[]]
    for line in re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S).splitlines():
        if line.lstrip().startswith("|"):
            found[-1].append(re.split(r"(?<!\\)\|", line.strip()[1:-1]))
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


@pytest.mark.parametrize("name", [*NAMES, "benchmarks/RESULTS.md", "upstream/README.md"])
def test_tables_are_tables(name) -> None:
    """An empty line cuts a table in two, and the rest of it is shown as bars and text."""
    for table in tables((ROOT / name).read_text()):
        assert len(table) > 2 and all(re.fullmatch(r" *:?-+:? *", cell) for cell in table[1]), table[0]
        assert {len(row) for row in table} == {len(table[1])}, table[0]


# -- commands -----------------------------------------------------------------------------------------------


def shell_lines() -> list[tuple[str, str]]:
    out = []
    for page, code in blocks("bash"):
        joined = re.sub(r"\\\n\s*", " ", code)
        out += [(page, line) for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return out


#: What a line of a page's shell may begin with; the pages have some of each but the last two.
KINDS = (
    *("python -m verl.trainer.main_ppo", "verl-adaptive", "bash", "python examples/", "pip install"),
    *("python scripts/", "git clone"),
)


def kind(line: str) -> str:
    return next((start for start in KINDS if line.startswith(start)), "?")


def lines_of(*kinds: str) -> list[str]:
    return sorted({line for _, line in shell_lines() if kind(line) in kinds})


def test_there_are_commands_of_every_kind() -> None:
    assert {kind(line) for _, line in shell_lines()} - {*KINDS[5:]} == {*KINDS[:5]}


def words_of(line: str) -> list[str]:
    return shlex.split(line.replace("<your overrides>", " ".join(MINIMAL)), comments=True)


@pytest.mark.parametrize("line", lines_of("python -m verl.trainer.main_ppo"))
def test_training_commands_compose_and_validate(line, monkeypatch) -> None:
    if "adaptive/sampler=cero" in line or "adaptive=cero" in line:
        assert "adaptive.refill=false" in line or "+adaptive=cero" in line
    composed(words_of(line))


@pytest.mark.parametrize("line", lines_of("verl-adaptive"))
def test_our_commands_parse(line) -> None:
    words = words_of(line)[1:]
    assert words[0] in COMMANDS
    parsed(words)


@pytest.mark.parametrize("line", lines_of("bash", "python examples/", "python scripts/"))
def test_scripts_exist(line) -> None:
    words = words_of(line)
    script = ROOT / words[1]
    assert script.is_file(), script
    if script.suffix == ".py":
        options = [w for w in words[2:] if w.startswith("--")]
        assert all(f'"{option}"' in script.read_text() for option in options)


def test_extras_exist() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(setup["options.extras_require"])
    text = "\n".join(p.read_text() for p in PAGES)
    assert set(re.findall(r"verl-adaptive\[(\w+)\]", text)) <= extras
    listed = re.search(r"Extras: (.*?)\n\n", (ROOT / "docs" / "install.md").read_text(), flags=re.S)[1]
    assert set(re.findall(r"`(\w+)`", listed)) <= extras


# -- names and values ---------------------------------------------------------------------------------------


def test_every_option_that_is_named_exists() -> None:
    known = {"adaptive.name", *(f"adaptive.{role}.name" for role in PARTS), *(f"adaptive.{role}" for role in PARTS)}
    for field in dataclasses.fields(AdaptiveConfig):
        known.add(f"adaptive.{field.name}")
        default = getattr(AdaptiveConfig(), field.name)
        if dataclasses.is_dataclass(default):
            known |= {f"adaptive.{field.name}.{f.name}" for f in dataclasses.fields(default)}
    for role, parts in describe().items():
        for part in parts.values() if role in PARTS else ():
            known |= {f"adaptive.{role}.{option}" for option in part["options"]}
    for page in PAGES:
        if page.name == "custom_parts.md":
            continue
        for name in re.findall(r"\badaptive\.[a-z_]+(?:\.[a-z_0-9]+)*", page.read_text()):
            assert name in known, (page.name, name)
    for page in PAGES:
        for role, name in re.findall(r"adaptive/(sampler|allocator|filter|advantage)=(\w+)", page.read_text()):
            assert name in (*describe()[role], "custom") or page.name == "custom_parts.md", (page.name, name)


def test_the_options_page_is_what_its_script_writes() -> None:
    written = ran(sys.executable, ROOT / "scripts" / "options.py").stdout
    assert (ROOT / "docs" / "options.md").read_text() == written, "python scripts/options.py > docs/options.md"
    assert "|  |" not in written  # every option is described


def test_the_presets_table_is_complete() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| \[`\+adaptive=(\w+)`\]\(docs/\w+\.md[#\w]*\): [^|]{20,} \|", readme, flags=re.M)
    assert sorted(rows) == sorted(describe()["presets"])


def test_the_commands_table_is_complete() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert set(re.findall(r"^\| `verl-adaptive ([\w-]+)` \|", page, flags=re.M)) == set(COMMANDS)


def test_the_readme_is_read_in_two_minutes() -> None:
    text = (ROOT / "README.md").read_text()
    prose = re.sub(r"```.*?```|\]\([^)]*\)|<!--.*?-->", " ", text, flags=re.S)
    assert len(re.findall(r"[\w'+=.-]*[A-Za-z][\w'+=.-]*", prose)) <= 900
    assert max(line.count("|") - 1 for line in text.splitlines() if line.startswith("|")) <= 4


def test_files_that_are_named_with_a_version_are_of_this_one() -> None:
    version = re.search(r"^version = (.*)$", (ROOT / "setup.cfg").read_text(), flags=re.M)[1]
    named = {v for page in PAGES for v in re.findall(r"verl_adaptive-([\d.]+\w*)(?:-py3|\.tar)", page.read_text())}
    assert named == {version}


def test_nothing_claims_an_index_that_the_package_is_not_on() -> None:
    for page in (*PAGES, *(ROOT / "verl_adaptive").rglob("*.py"), *(ROOT / "examples").rglob("*.*")):
        if page.suffix == ".pyc":
            continue
        text = re.sub(r"\s*\n[#\s]*", " ", page.read_text())  # a comment's line may end in the middle of it
        assert not re.search(r"pip install (-\S+ )*[\"']?verl-adaptive", text), page.name


def test_the_json_of_stats_and_doctor_is_described(tmp_path, capsys) -> None:
    """Every key that is printed is on the page, and the page names no other."""
    page = (ROOT / "docs" / "commands.md").read_text()
    make_run(tmp_path, steps=2)
    assert main(["stats", str(tmp_path), "--json", "--where", "visits > 0"]) == 0
    printed = set(json.loads(capsys.readouterr().out))
    paragraph = re.search(r"`--json` prints one object: `store`.*?\n\n", page, flags=re.S)[0].split("What is not")[0]
    named = set(re.findall(r"`(\w+)`", paragraph)) - {"journal", "snapshot", "results", "bins"}
    assert printed == named
    inspect = pytest.importorskip("verl_adaptive.integration.inspect")
    plan = re.search(r"^\| `plan` \|.*$", page, flags=re.M)[0].split("else ")[1]
    seen = inspect.foresee(*composed([*MINIMAL, "+adaptive=grpo"]))
    assert set(seen.as_dict()) == set(re.findall(r"`(\w+)`", plan))
    cost = re.search(r"^\| `plan.cost` \|.*$", page, flags=re.M)[0].split("|")[2]
    assert [f.name for f in dataclasses.fields(Cost)] == re.findall(r"`(\w+)`", cost)


def test_the_combinations_are_as_described() -> None:
    text = (ROOT / "docs" / "choosing.md").read_text()
    refused = set(re.findall(r"`sampler=(\w+)` with `allocator=(\w+)` is refused", text))
    assert refused and "Every sampler works with every allocator, filter and advantage, with these exceptions" in text

    def works(sampler: str, allocator: str, filter: str, advantage: str) -> bool:
        parts = {"sampler": sampler, "allocator": allocator, "filter": filter, "advantage": advantage}
        config = AdaptiveConfig(**{r: {"name": n} for r, n in parts.items()}, refill=sampler != "cero")
        try:
            build_policy(config)
        except ConfigError:
            return False
        return True

    for parts in itertools.product(*(PARTS[role] for role in ("sampler", "allocator", "filter", "advantage"))):
        sampler, allocator, filter, _ = parts
        wanted = (sampler, allocator) not in refused and (filter != "band" or allocator == "pilot_commit")
        assert works(*parts) == wanted, parts


# -- code ---------------------------------------------------------------------------------------------------


def test_python_blocks_run(tmp_path, monkeypatch) -> None:
    make_run(tmp_path / "checkpoints" / "project" / "experiment", steps=12)
    monkeypatch.chdir(tmp_path)
    ran = 0
    for page, code in blocks("python"):
        if page != "docs/custom_parts.md":
            exec(compile(code, page, "exec"), {"__name__": "__main__"})
            ran += 1
    assert ran


def _with_examples() -> list[str]:
    paths = [path for folder in ("verl_adaptive", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    return [path.relative_to(ROOT).as_posix() for path in paths if re.search(r"^ *>>> ", path.read_text(), re.M)]


@pytest.mark.parametrize("path", sorted(_with_examples()))
def test_the_examples_of_a_docstring_are_so(path) -> None:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert not doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE).failed


PARTS_PAGE = "docs/custom_parts.md"


@pytest.fixture(scope="module")
def teaching(tmp_path_factory) -> Path:
    """The page's package as files; its entry points are not installed."""
    site = tmp_path_factory.mktemp("site")
    for page, code in (*blocks("python"), *blocks("ini")):
        if page == PARTS_PAGE:
            path = site / re.match(r"# (\S+)", code)[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
    (site / "teaching" / "__init__.py").touch()
    assert {p.relative_to(site).as_posix() for p in site.rglob("*.*")} == {
        *(f"teaching/{name}.py" for name in ("__init__", "sampler", "allocator", "filter", "advantage")),
        *("tests/test_parts.py", "tests/test_groups.py", "setup.cfg"),
    }
    return site


def parts_commands() -> list[list[str]]:
    """The page's command lines: named by path, by entry point, and by a preset's file."""
    page = (ROOT / PARTS_PAGE).read_text()
    found = [m[1].replace("\\\n", " ") for m in re.finditer(r"```text\n(.*?)```", page, flags=re.S)]
    commands = [words_of(text) for text in found if "main_ppo" in text]
    assert len(commands) == 3
    return commands


@pytest.mark.timeout(1200)  # four conformance suites; a busy machine takes minutes for them
def test_the_parts_of_the_page_keep_what_the_roles_promise(teaching) -> None:
    path = os.pathsep.join([str(teaching), str(ROOT)])
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    done = ran(*words, cwd=teaching, PYTHONPATH=path, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[2-9]\d passed", done.stdout) and "failed" not in done.stdout


def test_the_page_names_what_its_parts_are_written_with() -> None:
    words = re.search(r"from verl_adaptive import (.*)", (ROOT / PARTS_PAGE).read_text())[1].split(", ")
    assert set(words) <= set(verl_adaptive.__all__) and {"Sampler", "Column", "check"} <= set(words)


def test_what_the_page_says_of_groups_is_there() -> None:
    """It named an array that had gone."""
    table = (ROOT / PARTS_PAGE).read_text().partition("### `Groups`")[2].partition("```")[0]
    names = [
        re.match(r"\w+", name)[0]
        for row in re.findall(r"^\| (`.*?`) \|", table, re.M)
        for name in re.findall(r"`(.*?)`", row)
    ]
    assert len(names) > 15 and not [name for name in names if not hasattr(verl_adaptive.Groups.empty(), name)]


@pytest.fixture
def said_in(monkeypatch, capsys, not_simulated):
    """What a command prints, with a folder on the path as a program's own is; the page's modules are gone afterwards."""

    def said(site: Path, *words: str) -> str:
        monkeypatch.syspath_prepend(site)
        monkeypatch.chdir(site)
        policy._third_party.cache_clear()
        monkeypatch.delenv("VERL_PLATFORM", raising=False)
        capsys.readouterr()
        status = main(list(words))
        out, err = capsys.readouterr()
        assert status == 0, out + err
        return out

    known = set(sys.modules)
    yield said
    policy._third_party.cache_clear()
    for name in {name for name in set(sys.modules) - known if name.partition(".")[0] in ("teaching", "sampler")}:
        del sys.modules[name]


def test_a_part_of_the_page_can_be_named_by_its_path(teaching, said_in) -> None:
    pytest.importorskip("verl")
    said = said_in(teaching, "doctor", "--", *parts_commands()[0])
    assert "sampler=resting (steps=3), allocator=fixed" in said


def test_an_entry_point_is_all_that_the_parts_of_the_page_need(teaching, tmp_path, said_in) -> None:
    """Installed as a wheel's metadata would be, in a folder on the path."""
    pytest.importorskip("verl")
    entries = re.findall(r"^    (\w+\.\w+ = \S+)$", (teaching / "setup.cfg").read_text(), flags=re.M)
    assert len(entries) == 4
    site = tmp_path / "site"
    shutil.copytree(teaching, site)
    info = site / "teaching-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: teaching\nVersion: 1\n")
    (info / "entry_points.txt").write_text("\n".join(["[verl_adaptive.policies]", *entries, ""]))
    said = said_in(site, "doctor", "--", *parts_commands()[1])
    assert "sampler=resting (steps=3), allocator=halves, filter=concise, advantage=ranked" in " ".join(said.split())
    assert "adaptive.filter.longest" in said_in(site, "parts", "concise")
    (preset,) = [code for page, code in blocks("yaml") if page == PARTS_PAGE]
    (site / "conf" / "adaptive").mkdir(parents=True)
    (site / "conf" / "adaptive" / "mine.yaml").write_text(preset)
    said = " ".join(said_in(site, "doctor", "--", *parts_commands()[2]).split())
    assert "mine: sampler=resting (steps=3), allocator=fixed, filter=informative, advantage=ranked" in said


def test_the_recipes_table_is_complete() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text()
    rows = re.findall(r"^\| \[`(\S+\.sh)`\]\(../examples/(\S+)\) \|", page, flags=re.M)
    assert all(shown == linked for shown, linked in rows)
    assert {name for name, _ in rows} == {p.name for p in (ROOT / "examples").glob("*.sh")} - {
        "quickstart_cpu.sh",
        "pretrained_cpu.sh",
        "gpu_first_hour.sh",
    }


def test_the_progress_line_of_the_readme_is_what_is_printed() -> None:
    report = pytest.importorskip("verl_adaptive.integration.step_metrics")
    example = re.search(r"'(step 12/1001.*?)'", " ".join(report.progress_line.__doc__.replace("\\\n", "").split()))[1]
    assert example in (ROOT / "README.md").read_text()


def test_the_figures_of_large_stores_are_the_measured_ones() -> None:
    took = json.loads((ROOT / "benchmarks" / "results" / "commands.json").read_text())["sizes"]["1000000"]["commands"]
    page = (ROOT / "docs" / "commands.md").read_text().split("## Large stores")[1].split("\n## ")[0]
    journal, snapshot, report = (
        round(took[n]["cpu s"]) for n in ("stats, journal", "stats, snapshot", "report, journal")
    )
    said = f"`stats` took {journal} s of a journal and {snapshot} s of a snapshot, and the report {report} s"
    assert said in " ".join(page.split())
    (most,) = re.findall(r"less than ([\d.]+) GB", page)
    assert max(one["MB"] for one in took.values()) < 1000 * float(most)


def test_the_completion_completes_every_command() -> None:
    (line,) = re.findall(
        r'^complete .* -W "(.*)" \\\n +verl-adaptive$', (ROOT / "docs" / "commands.md").read_text(), flags=re.M
    )
    assert line.split() == list(COMMANDS)


def test_the_site_builds_and_holds_the_results(tmp_path) -> None:
    """Every page is in its menu, and every link and anchor of a page leads somewhere on it."""
    words = (sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site")
    done = ran(*words, cwd=ROOT, NO_MKDOCS_2_WARNING="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Accuracy at equal rollouts" in (tmp_path / "site" / "benchmarks" / "RESULTS" / "index.html").read_text()
    assert "RESULTS" in (tmp_path / "site" / "search" / "search_index.json").read_text()
