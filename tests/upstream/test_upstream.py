"""Every patch of ``upstream/`` applies to the installed verl after those before it (in the matrix also alone), and its tests
pass then.

Without the patch each of them has a test that fails. The installed files are never written to: a copy of verl is a folder
of links, the patched files aside.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.programs import ran
from verl_adaptive.integration.compat import SUPPORTED

SPEC = importlib.util.find_spec("verl")  # not importorskip: importing verl here would take longer than a job
if SPEC is None or not SPEC.submodule_search_locations:
    pytest.skip("needs verl", allow_module_level=True)

ROOT = Path(__file__).parents[2]
UPSTREAM = ROOT / "upstream"
PATCHES = sorted(p.parent.name for p in UPSTREAM.glob("*/change.patch"))
INSTALLED = Path(SPEC.submodule_search_locations[0])
#: Tests of ours that need no Ray, run with verl's patched hooks in the place of ours.
OURS = [str(ROOT / "tests/integration" / name) for name in ("test_rows.py", "test_identity.py")]
REPLACED = "tests.upstream.replaced"
ENVIRONMENT = {
    "VERL_USE_EXTERNAL_PLUGINS": "none",  # these are verl's tests: verl as its own developers run it
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONPATH": str(ROOT),
}

pytestmark = pytest.mark.timeout(1200)  # the first one waits for all jobs, on a machine that may have other work


def changed(patch: str) -> list[str]:
    """Files below ``verl`` that a patch changes."""
    text = (UPSTREAM / patch / "change.patch").read_text()
    return re.findall(r"^\+\+\+ b/verl/(.+)$", text, re.MULTILINE)


def copy(folder: Path, patches: list[str]) -> Path:
    """A copy of the installed verl with these patches applied; links, but for the changed files and their folders."""
    files = {Path(name) for patch in patches for name in changed(patch)}
    own = {parent for file in files for parent in file.parents}
    for directory in sorted(own):
        target = folder / "verl" / directory
        target.mkdir(parents=True)
        for entry in (INSTALLED / directory).iterdir():
            relative = directory / entry.name
            if relative in files:
                shutil.copy(entry, target)
            elif relative not in own and entry.name != "__pycache__":
                (target / entry.name).symlink_to(entry)
        (target / "__pycache__").mkdir()  # or every job would compile its neighbours again
        changed_here = {file.stem for file in files if file.parent == directory}
        for compiled in (INSTALLED / directory / "__pycache__").glob("*.pyc"):
            if compiled.name.partition(".")[0] not in changed_here:
                (target / "__pycache__" / compiled.name).symlink_to(compiled)
    for patch in patches:
        command = ["git", "apply", "--verbose", str(UPSTREAM / patch / "change.patch")]
        # Outside of any repository; git would otherwise take paths to be relative to that one's root.
        done = ran(*command, cwd=folder, GIT_CEILING_DIRECTORIES=str(folder.parent))
        assert done.returncode == 0, f"{patch} does not apply to verl {SUPPORTED}:\n{done.stderr}"
    return folder


@pytest.fixture(scope="module")
def outcome(below_verl, tmp_path_factory) -> Callable[[str], dict[str, list[str]]]:
    """A job's test files → what came of their tests; jobs are ``none``, ``all`` and each patch alone."""
    folder = tmp_path_factory.mktemp("upstream")
    tests = {patch: [str(p) for p in (UPSTREAM / patch).glob("test_*_on_cpu.py")] for patch in PATCHES}
    every = [test for patch in PATCHES for test in tests[patch]]
    jobs = {patch: ([patch], tests[patch]) for patch in PATCHES}
    jobs |= {"all": (PATCHES, [*every, *OURS, "-p", REPLACED]), "none": ([], every)}

    @functools.cache
    def run(name: str) -> dict[str, list[str]]:
        patches, words = jobs[name]
        tree, report = copy(folder / name, patches), folder / f"{name}.xml"
        done = below_verl(
            *("-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ROOT, "--import-mode=importlib", "--tb=short"),
            *("-p", "no:cacheprovider", "-p", "no:asyncio", "-W", "ignore", f"--junitxml={report}"),
            *("--basetemp", folder / f"{name}.temporary", *words),
            cwd=folder,
            **ENVIRONMENT | {"PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"},
        )
        assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
        return _read(report)

    return run


def _read(report: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error")]
        words = "passed" if not bad else f"{case.get('name')}: {bad[0].get('message')}"
        found.setdefault(case.get("classname").rsplit(".", 1)[-1], []).append(words)
    return found


def _not_passed(found: dict[str, list[str]]) -> list[str]:
    return [words for all_words in found.values() for words in all_words if words != "passed"]


@pytest.mark.matrix
@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_alone_applies_and_passes_its_tests(outcome, patch):
    assert outcome(patch), "no tests"
    assert _not_passed(outcome(patch)) == []


@pytest.mark.parametrize("patch", PATCHES)
def test_without_the_patch_its_tests_fail(outcome, patch):
    (module,) = [p.stem for p in (UPSTREAM / patch).glob("test_*_on_cpu.py")]
    assert set(outcome("none").get(module, ["not imported"])) != {"passed"}


def test_all_patches_together_pass_their_tests_and_ours(outcome):
    assert _not_passed(outcome("all")) == []
    assert len(outcome("all")) == len(PATCHES) + len(OURS)


@pytest.mark.matrix
def test_our_abort_works_with_verls_own_client(tmp_path):
    """:mod:`tests.integration.test_abort`, on real Ray actors, without :class:`CancellingClient`."""
    tree = copy(tmp_path / "tree", ["10-abort-prompts"])
    variables = ENVIRONMENT | {"PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", REPLACED, "--basetemp", tmp_path / "t"]
    done = ran(*command, "tests/integration/test_abort.py", cwd=ROOT, **variables)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_changes_neither_licences_nor_whole_files(patch):
    text = (UPSTREAM / patch / "change.patch").read_text()
    lines = [line for line in text.splitlines() if re.match(r"[-+](?![-+]{2} )", line)]
    assert not [line for line in lines if "Copyright" in line or "License" in line]
    assert "new file mode" not in text and len(lines) < 120
    assert all(len(line) <= 121 for line in lines if line.startswith("+"))  # verl's line length, and the plus


#: Of verl's ``.github/PULL_REQUEST_TEMPLATE.md``.
SECTIONS = [
    *("What does this PR do?", "Checklist Before Starting", "Test"),
    *("API and Usage Example", "Design & Code Changes", "Checklist Before Submitting"),
]


def test_the_index_names_every_patch():
    index = (UPSTREAM / "README.md").read_text()
    assert re.findall(r"^\| \[(\d\d-[\w-]+)\]\(\1/\) \|", index, re.MULTILINE) == PATCHES


@pytest.mark.parametrize("patch", PATCHES)
def test_a_description_has_the_title_and_the_sections(patch):
    title, *rest = (UPSTREAM / patch / "README.md").read_text().splitlines()
    assert re.fullmatch(r"# \[[a-z_]+(, [a-z_]+)*\] (feat|fix|refactor): .+", title)  # as verl's checks ask for
    assert [line.removeprefix("### ") for line in rest if line.startswith("### ")] == SECTIONS
    assert not re.search(r"\b(we|our|ours|us)\b", " ".join(rest))  # it is verl's to read
    assert "@" not in "\n".join(rest)  # a place that was to be filled in


@pytest.mark.parametrize("patch", PATCHES)
def test_what_is_said_to_be_deleted_exists(patch):
    """Each line of the section names a file and a function of ours, which are there as long as the patch is not."""
    section = (UPSTREAM / "ours.md").read_text().split(f"## {patch}\n")[1].split("\n## ")[0]
    named = re.findall(r"`((?:verl_adaptive|hydra_configs|tests)/[\w/.]+)(?:::([\w.]+))?`", section)
    assert named or "Nothing" in section
    for path, name in named:
        source = (ROOT / path).read_text()
        assert not name or re.search(rf"(def |class |^){re.escape(name.rsplit('.', 1)[-1])}\b", source, re.MULTILINE), (
            name
        )
