"""What docs/faq.md#what-is-trusted says: nothing that is read runs, nothing that is shown obeys, nothing is more public than asked."""

from __future__ import annotations

import ast
import csv
import html
import os
import pickle
import re
import shutil
import stat
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.stores import HOSTILE, change_lines, hostile_rows, make_run, write_dataset
from tests.report.test_report import Page
from verl_adaptive.cli import main
from verl_adaptive.stats import Journal, StatsTable, dataset_keys, warm_start

REPO = Path(__file__).resolve().parents[1]
#: Names that end a string, a tag, an attribute, a comment, a style, a statement, a shell word; and an honest one.
NAMES = [
    HOSTILE,
    "</script></style></title><img src=x onerror=alert(1)>",
    "\"' onmouseover=alert(1) style='x:expression(1)'",
    "--><!-- ]]> <![CDATA[",
    "url(javascript:alert(1)); } body { display: none",
    "{{ 7 * 7 }}{% include '/etc/passwd' %}",
    "'; DROP TABLE runs; --",
    "$(touch x) `touch x` ; touch x",
    "\x1b]0;title\x07\x1b[2J\x9b31m\x00\r\x08\u2066\u202e",
    "=cmd|'/c calc'!A1",
    "+1+1",
    "@SUM(1)",
    "-2+3",
    "\tx",
    "gsm8k",
    " =1+1",
    "\n=1+1",
    "\u00a0\u2003+1",
    "\u200b@SUM(1)",
    "\uff1dcmd",
]


# -- the sources ------------------------------------------------------------------------------------------------------

#: Calls that run or unpickle what they are given; a module that may make one, and why.
FORBIDDEN = (
    "eval exec compile __import__ os.system os.popen input "
    "pickle.load pickle.loads pickle.Unpickler cloudpickle.loads marshal.loads shelve.open dill.loads "
    "torch.load yaml.load yaml.unsafe_load yaml.full_load joblib.load pandas.read_pickle pd.read_pickle"
)
ALLOWED = {
    ("verl_cpu/gloo_engine.py", "pickle.loads"): "between the workers of one run, over the run's own sockets",
    (
        "verl_adaptive/integration/selftest/verdicts.py",
        "torch.load",
    ): "the optimizer state that the self-test's own run has just saved",
}


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_no_module_runs_or_unpickles_what_it_reads() -> None:
    found = set()
    for path in sorted([*(REPO / "verl_adaptive").rglob("*.py"), *(REPO / "verl_cpu").rglob("*.py")]):
        name = str(path.relative_to(REPO))
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = _dotted(node.func)
            options = {k.arg: k.value for k in node.keywords}
            if called in FORBIDDEN.split():
                found.add((name, called))
            if called in ("np.load", "numpy.load", "np.lib.format.read_array"):
                pickles = options.get("allow_pickle")
                assert isinstance(pickles, ast.Constant) and pickles.value is False, f"{name}:{node.lineno}"
            assert not (isinstance(options.get("shell"), ast.Constant) and options["shell"].value), (
                f"{name}:{node.lineno}"
            )
    assert found == set(ALLOWED)


# -- files of other people --------------------------------------------------------------------------------------------


class _Bomb:
    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.trap,))


def test_pickles_beside_a_snapshot_are_never_opened(tmp_path, capsys) -> None:
    """A checkpoint also holds files of verl's and TransferQueue's own that are pickles; only a resume reads those."""
    _, rows = make_run(tmp_path / "run", prompts=30, steps=4)
    data = write_dataset(tmp_path / "data.parquet", rows)
    checkpoint, trap = tmp_path / "run" / "global_step_4", tmp_path / "trap"
    bomb = pickle.dumps(_Bomb(trap))
    pickle.loads(bomb)  # it does go off
    assert trap.exists()
    trap.unlink()
    (checkpoint / "adaptive" / "transfer_queue" / "storage_units").mkdir(parents=True)
    for place in ("data.pt", "adaptive/extra.pkl", "adaptive/transfer_queue/controller.pkl"):
        (checkpoint / place).write_bytes(bomb)
    (checkpoint / "adaptive" / "transfer_queue" / "storage_units" / "su_0.pkl").write_bytes(bomb)
    for store in (checkpoint, tmp_path / "run"):
        assert main(["stats", str(store), "--data", str(data)]) == 0
        assert main(["report", str(store), "-o", str(tmp_path / "r.html"), "--data", str(data)]) == 0
        assert main(["export", str(store), str(tmp_path / "x.parquet"), "--overwrite"]) == 0
        assert main(["compare", str(store), str(store)]) == 0
        where = ["--data", str(data), "--where", "visits > 0", "--overwrite"]
        assert main(["export", str(store), str(tmp_path / "kept.parquet"), *where]) == 0
        table = StatsTable()
        table.rows_for(dataset_keys(rows))
        assert warm_start(table, store, discount=0.5).matched > 0
    assert not trap.exists(), capsys.readouterr()


def test_a_schema_cannot_bring_code(tmp_path) -> None:
    """Older pyarrow unpickled a column's type from a file's metadata (CVE-2023-47248)."""
    trap = tmp_path / "trap"
    meta = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(_Bomb(trap))}
    rows = hostile_rows(4)
    table = pa.Table.from_pylist(rows).append_column(pa.field("x", pa.int64(), metadata=meta), pa.array(range(4)))
    table = table.append_column("score", pa.array([1.0] * 4))
    pq.write_table(table, tmp_path / "data.parquet")
    make_run(tmp_path / "run", rows=rows, steps=2)
    where = ["--data", str(tmp_path / "data.parquet"), "--where", "visits >= 0"]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "kept.parquet"), *where]) == 0
    statistics = StatsTable()
    statistics.rows_for(dataset_keys(rows))
    assert warm_start(statistics, tmp_path / "data.parquet", discount=1.0).matched == 4
    assert not trap.exists()


# -- words of other people --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> tuple[Path, Path]:
    """A journal and a data set in which every name and text is one of :data:`NAMES`."""
    folder = tmp_path_factory.mktemp("hostile")
    rows = hostile_rows(45)
    for i, row in enumerate(rows):
        row["data_source"] = NAMES[i % len(NAMES)]
        row["prompt"] = [{"role": "user", "content": f"{NAMES[i % len(NAMES)]} {i}"}]
        row["reward_model"] = {"style": "rule", "ground_truth": NAMES[(i + 1) % len(NAMES)]}
    rows += [{**rows[0], "reward_model": {"style": "rule", "ground_truth": NAMES[7]}}]  # a question with two answers
    make_run(folder / "run", rows=rows, steps=12, run_id=NAMES[1], preset=NAMES[2])
    path = folder / "run" / "adaptive"

    def change(line: dict) -> dict | None:  # names that the engine would not make, but a file may hold
        line["ledger"]["step"]["rollouts"]["dropped"] = {NAMES[4]: 5}
        line["ledger"]["run"]["rollouts"]["dropped"] = {NAMES[1]: 5}
        line["scalars"] = {"adaptive/sampler/p_easy": 0.5, "<b>name</b>": 1.0}
        if line["step"] == 9:
            line["missing"] = NAMES[0]
        return None if line["step"] == 8 else line  # a gap, with a reason

    change_lines(path / "attempt-0" / "steps.jsonl", change)
    return path, write_dataset(folder / "data.parquet", rows)


#: Of a page that is only text and drawings.
TAGS = (
    "html head meta title style body main h1 h2 h3 p div span b small i table tr th td code footer svg text line rect "
    "polygon polyline circle path g a details summary nav label input button thead tbody script"
)


def test_a_report_of_hostile_names_is_only_text(hostile, tmp_path) -> None:
    journal, data = hostile
    out = tmp_path / "r.html"
    assert main(["report", str(journal), "-o", str(out), "--data", str(data)]) == 0
    text = out.read_text()
    page = Page(text)
    assert page.tags <= set(TAGS.split())
    assert text.count("<script>") == text.count("</script>") == 1  # ours: the policy of the page allows it by its hash
    assert re.search(r"script-src 'sha256-[^']+'", html.unescape(text))
    assert not {
        name for name in page.attributes if name.startswith("on") or name in ("src", "srcdoc", "action", "formaction")
    }
    links, styles = (page.attributes.get(name, set()) for name in ("href", "style"))
    assert all(re.fullmatch(r"#[\w-]+", link) for link in links), links  # to its own parts
    assert not page.odd
    assert all(re.fullmatch(r"background:\s*var\(--[a-z0-9]+\)|[a-z-]+:\s*[\w.%() -]+;?", style) for style in styles)
    assert text.count("<style>") == text.count("</style>") == 1
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    # they are there, as text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text and "{{ 7 * 7 }}" in text


@pytest.mark.parametrize(
    "words", ["stats", "stats --json", "stats --sort source --limit 40", "stats --where visits>=0", "compare"]
)
def test_a_terminal_is_only_written_to(words, hostile, capsys) -> None:
    journal, data = hostile
    command = words.split()
    stores = [str(journal)] * (2 if command == ["compare"] else 1)
    more = ["--data", str(data)] if command[0] == "stats" else []
    assert main([command[0], *stores, *command[1:], *more]) == 0
    said = capsys.readouterr()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", said.out + said.err)


def test_errors_are_one_harmless_line(tmp_path, capsys) -> None:
    for words in (
        ["stats", f"no{HOSTILE}"],
        [HOSTILE],
        ["stats", "x", "--where", HOSTILE],
        ["export", "x", f"y{HOSTILE}"],
    ):
        assert main(words) in (1, 2)
        said = capsys.readouterr()
        assert len(said.err.splitlines()) == 1 and not said.out
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", said.err)


def test_csv_holds_no_formula(hostile, tmp_path, capsys) -> None:
    """Opened in a spreadsheet, no cell is run; the other formats keep every name as it is."""
    journal, _ = hostile
    for what in ("prompts", "observations", "steps"):
        out = tmp_path / f"{what}.csv"
        assert main(["export", str(journal), str(out), "--what", what]) == 0
        with out.open(newline="") as file:
            cells = [cell for row in csv.DictReader(file) for cell in row.values()]
        bare = [(c, "".join(x for x in c if x.isprintable() and not x.isspace())) for c in cells]
        assert cells and not [
            c
            for c, b in bare
            if c[:1] in ("\t", "\r", "\n") or b[:1] in [*"=+@＝＋－＠"] or (b[:1] == "-" and not _number(c))
        ]
    assert main(["export", str(journal), str(tmp_path / "p.parquet")]) == 0
    assert {*NAMES} - {NAMES[8]} <= set(pq.read_table(tmp_path / "p.parquet").column("source").to_pylist())


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# -- who may read ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o077, 0o022])
def test_the_umask_decides_who_may_read(umask, tmp_path) -> None:
    """Everything we write holds what prompts taught: as public as the user's other files, not more."""
    before = os.umask(umask)
    try:
        root = tmp_path / "all"
        _, rows = make_run(root / "run", prompts=20, steps=3)
        data = write_dataset(tmp_path / "data.parquet", rows)
        journal = Journal(root / "run" / "adaptive")
        store = str(root / "run")
        for name in ("x.parquet", "x.csv", "x.jsonl"):
            assert main(["export", store, str(root / name)]) == 0
        assert main(["report", store, "-o", str(root / "r.html")]) == 0
        where = ["--data", str(data), "--where", "visits > 0"]
        assert main(["export", store, str(root / "kept.parquet"), *where]) == 0
        seen = {p: stat.S_IMODE(p.stat().st_mode) for p in [root, *root.rglob("*")]}
        journal.close()
    finally:
        os.umask(before)
    names = {p.name for p in seen}
    assert {"groups.arrows", "steps.jsonl", "writer.lock", "manifest.json", "x.csv", "r.html", "kept.parquet"} <= names
    for path, mode in seen.items():
        assert mode == (0o777 if path.is_dir() else 0o666) & ~umask, (path, oct(mode))
    shutil.rmtree(root)
