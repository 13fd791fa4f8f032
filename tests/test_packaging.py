"""What `pip install` puts in place: files, entry points, Hydra's search path; and what importing the package pulls in."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.programs import ran

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("verl_adaptive", "verl_cpu", "hydra_configs", "hydra_plugins")
VERSION = re.search(r"^version = (.*)$", (ROOT / "setup.cfg").read_text(), flags=re.M)[1]
HEAVY = ("verl", "torch", "ray", "transfer_queue", "vllm", "transformers")

pytestmark = pytest.mark.skipif(not (ROOT / "setup.cfg").exists(), reason="runs in a source tree")


def call(*command: object, cwd: Path, **env: str) -> str:
    done = ran(*command, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files_of(tree: Path) -> set[str]:
    """Every file of the packages, as the wheel should name it."""
    files = {p.relative_to(tree).as_posix() for package in PACKAGES for p in (tree / package).rglob("*") if p.is_file()}
    assert len(files) > 50
    return files


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A clean copy of the sources, so that building leaves nothing behind in the checkout."""
    tree = tmp_path_factory.mktemp("source") / "verl-adaptive"
    tree.mkdir()
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "build", "dist")
    for item in ROOT.iterdir():
        if item.is_dir() and not item.name.startswith(".") and not item.name.endswith(".egg-info"):
            shutil.copytree(item, tree / item.name, ignore=skip)
        elif item.is_file() and not item.name.startswith("."):
            shutil.copy(item, tree)
    return tree


def build(kind: str, tree: Path, out: Path) -> Path:
    """Call the build backend as pip does, without isolation: no network."""
    out.mkdir(exist_ok=True)
    call(sys.executable, "-c", f"import setuptools.build_meta as b; b.build_{kind}({str(out)!r})", cwd=tree)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory) -> Path:
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


def packed(wheel: Path, name: str) -> str:
    """A file of the wheel's ``.dist-info``."""
    with zipfile.ZipFile(wheel) as file:
        (text,) = [file.read(n).decode() for n in file.namelist() if ".dist-info/" in n and n.endswith(f"/{name}")]
    return text


def test_wheel_holds_the_packages_and_nothing_else(tree, wheel) -> None:
    assert contents(wheel) == files_of(tree)
    assert "verl_adaptive/py.typed" in contents(wheel)
    assert "hydra_configs/verl_adaptive/adaptive/greso.yaml" in contents(wheel)


def test_sdist_builds_the_same_wheel(tree, wheel, tmp_path) -> None:
    sdist = build("sdist", tree, tmp_path / "sdist")
    with tarfile.open(sdist) as file:
        file.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian 12's Python has none
        file.extractall(tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert {"LICENSE", "setup.cfg", "pyproject.toml", "CHANGELOG.md", "CONTRIBUTING.md"} <= {
        p.name for p in unpacked.iterdir()
    }
    # others can build and test from it
    for folder in ("docs", "examples", "scripts", "tests", "benchmarks", "upstream"):
        missing = {p.relative_to(tree) for p in (tree / folder).rglob("*") if p.is_file()} - {
            p.relative_to(unpacked) for p in (unpacked / folder).rglob("*")
        }
        assert {p for p in missing if not p.name.endswith(("-wal", "-shm"))} == set()
    assert contents(build("wheel", unpacked, tmp_path / "again")) == contents(wheel)


def test_namespace_packages_stay_namespaces() -> None:
    """An ``__init__.py`` there would hide every other Hydra plugin's configs; below, Hydra needs one in every folder."""
    for package in ("hydra_configs", "hydra_plugins"):
        assert not (ROOT / package / "__init__.py").exists()
        folders = {p.parent for suffix in ("*.py", "*.yaml") for p in (ROOT / package).rglob(suffix)}
        assert folders and all((folder / "__init__.py").exists() for folder in folders)


def test_metadata(wheel) -> None:
    metadata, points = packed(wheel, "METADATA"), packed(wheel, "entry_points.txt")
    assert packed(wheel, "LICENSE")
    required = [line.split(": ", 1)[1] for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    always = {r.lower() for r in required if "extra ==" not in r}
    assert not any(r.startswith(HEAVY) for r in always), "installing the plugin must not touch torch or verl"
    assert any(r.startswith("verl") and ">=0.9.0" in r for r in required)
    assert "Requires-Python: >=3.10" in metadata

    parsed = configparser.ConfigParser()
    parsed.optionxform = str  # type: ignore[assignment]
    parsed.read_string(points)
    assert {group: dict(parsed[group]) for group in parsed.sections()} == {
        "verl.plugins": {"adaptive": "verl_adaptive.integration.plugin", "cpu": "verl_cpu.plugin"},
        "hydra.plugins": {
            "verl_adaptive": "hydra_plugins.verl_adaptive.search_path:AdaptiveSearchPath",
            "verl_adaptive_parts": "hydra_plugins.verl_adaptive.search_path:PartsSource",
        },
        "vllm.general_plugins": {"verl_cpu": "verl_cpu.vllm_plugin:register"},
        "console_scripts": {"verl-adaptive": "verl_adaptive.cli:main"},
    }


def test_links_of_the_packages_page_are_made_from_one_address(tree, tmp_path) -> None:
    """An index shows the README and cannot follow paths; without an address a release says that."""
    copy = tmp_path / "tree"
    shutil.copytree(tree, copy)
    program = ROOT / "scripts" / "addresses.py"
    before, config = (copy / "README.md").read_text(), copy / "setup.cfg"
    config.write_text(re.sub(r"^url = .*\n", "", config.read_text(), flags=re.M))
    assert "has no url" in call(sys.executable, program, copy, cwd=tmp_path)
    assert (copy / "README.md").read_text() == before
    config.write_text(config.read_text().replace("[metadata]\n", "[metadata]\nurl = https://example.org/a/b\n"))
    call(sys.executable, program, copy, cwd=tmp_path)
    head, _, page = packed(build("wheel", copy, tmp_path / "out"), "METADATA").partition("\n\n")
    place = f"https://example.org/a/b/blob/v{VERSION}"
    assert f"Project-URL: Documentation, {place}/docs/README.md" in head and "example.org/a/b" in head
    assert (
        f"]({place}/docs/solo.md)" in page and f"](https://example.org/a/b/raw/v{VERSION}/docs/quickstart.svg)" in page
    )
    assert re.findall(r"\]\((?!https://)([^)]*)\)", page) == []
    for path in re.findall(r"\]\(https://example.org/a/b/(?:blob|raw)/v[^/]*/([^)#]*)", page):
        assert (ROOT / path).exists(), path


def test_supported_versions_are_said_once() -> None:
    """What setup.cfg, doctor and the README say of verl, Python and Hydra is what the package checks."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    from verl_adaptive.commands import doctor
    from verl_adaptive.integration import compat

    parsed = configparser.ConfigParser()
    parsed.read(ROOT / "setup.cfg")
    extras = {name: text.split() for name, text in parsed["options.extras_require"].items()}
    assert extras["verl"] == [f"verl{compat.SUPPORTED}"]
    (least,) = [s.version for s in SpecifierSet(compat.SUPPORTED) if s.operator == ">="]
    assert not [s for s in SpecifierSet(compat.SUPPORTED) if s.operator != ">="]  # later ones are judged by their names
    assert f"| verl | {least} or newer |" in (ROOT / "README.md").read_text()
    assert least in compat.TRIED
    tried = (ROOT / "scripts" / "requirements-cpu.txt").read_text().splitlines()
    for pinned in [r for r in [*extras["cpu"], *tried] if re.match(r"verl\b", r)]:
        (exact,) = Requirement(pinned).specifier
        assert SpecifierSet(compat.SUPPORTED).contains(exact.version), pinned

    assert doctor.SUPPORTED_PYTHON.startswith(parsed["options"]["python_requires"] + ",")
    shown = re.findall(r"Python :: (3\.\d+)", parsed["metadata"]["classifiers"])
    assert shown and all(SpecifierSet(doctor.SUPPORTED_PYTHON).contains(f"{v}.0") for v in shown)
    assert f"hydra-core{doctor.OUR_OWN['hydra-core']}" in parsed["options"]["install_requires"].split()


def test_the_search_path_plugin_is_what_hydra_asks_for() -> None:
    """Hydra 1.4 loads one concrete plugin class per entry point."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    from hydra_plugins.verl_adaptive.search_path import AdaptiveSearchPath

    appended = []

    class Recorder(ConfigSearchPath):
        def get_path(self):
            return []

        def append(self, provider, path, anchor=None):
            appended.append((provider, path))

        def prepend(self, provider, path, anchor=None):
            raise AssertionError("the user's own configs come first")

    assert issubclass(AdaptiveSearchPath, SearchPathPlugin)
    AdaptiveSearchPath().manipulate_search_path(Recorder())
    assert appended == [("verl-adaptive", "pkg://hydra_configs.verl_adaptive"), ("verl-adaptive", "verl-adaptive://")]


CHECK_INSTALL = """
import os, sys, warnings
warnings.simplefilter("error")
import verl_adaptive
assert os.path.realpath(verl_adaptive.__file__).startswith(os.path.realpath(sys.argv[1])), verl_adaptive.__file__
assert verl_adaptive.__version__ == "VERSION", verl_adaptive.__version__
from hydra import compose, initialize_config_dir
open("main.yaml", "w").write("trainer: {v1: {trainer_mode: sync, sampler: {custom_sampler: {path: null, name: null}}}}")
with initialize_config_dir(os.getcwd(), version_base=None):
    config = compose("main", overrides=["+adaptive=greso", "adaptive/allocator=pilot_commit", "adaptive.seed=3"])
assert config.trainer.v1.trainer_mode == "sync"
from omegaconf import OmegaConf
from verl_adaptive.config import AdaptiveConfig
from verl_adaptive.policy import build_policy
policy = build_policy(AdaptiveConfig.from_mapping(OmegaConf.to_container(config.adaptive)))
print(policy.sampler.name, policy.allocator.name)
"""


def test_an_editable_install_makes_the_presets_known_to_hydra(tree, tmp_path) -> None:
    """Into a fresh environment that sees this one's dependencies, but not this one's own install of the package."""
    pytest.importorskip("pip")
    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    python = next((tmp_path / "env").glob("[bS]*/python*"))
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "shared.pth").write_text("\n".join(sorted(shared)))  # last on the path; its own .pth files are not run
    home = tmp_path / "checkout"
    shutil.copytree(tree, home)
    call(
        *(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index"),
        *("--ignore-installed", "--no-build-isolation", "-e", home),
        cwd=tmp_path,
        PIP_DISABLE_PIP_VERSION_CHECK="1",
    )
    (tmp_path / "elsewhere").mkdir()
    out = call(python, "-c", CHECK_INSTALL.replace("VERSION", VERSION), home, cwd=tmp_path / "elsewhere", PYTHONPATH="")
    assert out.split() == ["greso", "pilot_commit"]
    assert list((tmp_path / "env").glob("[bS]*/verl-adaptive*"))


def test_the_readme_renders_on_an_index(wheel) -> None:
    pytest.importorskip("twine")
    assert "PASSED" in call(sys.executable, "-m", "twine", "check", "--strict", wheel, cwd=wheel.parent)


def test_the_wheel_in_a_clean_environment(wheel, tmp_path) -> None:
    """Light dependencies only, from the package index; what scripts/release.sh does before a release."""
    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    python = next((tmp_path / "env").glob("[bS]*/python*"))
    if importlib.util.find_spec("uv") is not None:
        install = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", python]
    else:
        install = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
    done = ran(*install, wheel, cwd=tmp_path, timeout=280)
    if done.returncode and re.search(r"connect|resolve host|name resolution|timed out|fetch", done.stderr, flags=re.I):
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    said = call(python, ROOT / "scripts" / "smoke.py", "--version", VERSION, cwd=tmp_path, PYTHONPATH="")
    assert said.count("ok  ") >= 11 and "doctor says that verl is missing" in said


def test_the_release_is_described(wheel) -> None:
    """The newest heading of the changelog is this version's, and the metadata is whole."""
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {VERSION} (" in (ROOT / "CHANGELOG.md").read_text()
    head, _, description = packed(wheel, "METADATA").partition("\n\n")
    for field in ("Author", "Summary", "License-Expression", "License-File", "Keywords", "Requires-Python"):
        assert re.search(rf"^{field}: \S", head, flags=re.M) or field == "License-Expression", field
    assert f"Version: {VERSION}\n" in head and len(description) > 2000
    assert (
        "Description-Content-Type: text/markdown" in head and "Classifier: Operating System :: POSIX :: Linux" in head
    )


def test_the_release_script_uploads_nothing() -> None:
    script = (ROOT / "scripts" / "release.sh").read_text()
    uploads = [
        line for line in script.splitlines() if "upload" in line and not line.lstrip().startswith(("#", "say", "echo"))
    ]
    assert uploads == [] and os.access(ROOT / "scripts" / "release.sh", os.X_OK)


IMPORT_ALL = """
import importlib, pkgutil, sys
import verl_adaptive
heavy = sys.argv[1].split(",")
assert not set(heavy) & set(sys.modules), "import verl_adaptive"
for module in pkgutil.walk_packages(verl_adaptive.__path__, "verl_adaptive."):
    if module.name.startswith("verl_adaptive.integration") or module.name.endswith("__main__"):
        continue
    importlib.import_module(module.name)
    loaded = set(heavy) & set(sys.modules)
    assert not loaded, f"{module.name} pulled in {loaded}"
    print(module.name)
"""


def test_nothing_outside_the_integration_imports_verl_or_torch() -> None:
    modules = call(sys.executable, "-c", IMPORT_ALL, ",".join(HEAVY), cwd=ROOT).split()
    assert {"verl_adaptive.engine", "verl_adaptive.samplers.greso", "verl_adaptive.config"} <= set(modules)


LINT = "import sys; sys.path.insert(0, '.'); from importlinter.cli import lint_imports; "
LINT += "sys.exit(1 - lint_imports(cache_dir=None))"


def test_import_contracts_would_notice(tmp_path) -> None:
    """``tests/run.sh`` and ``.ci/run`` check the tree itself."""
    pytest.importorskip("importlinter")
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    shutil.copytree(ROOT / "verl_adaptive", tmp_path / "verl_adaptive", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "verl_cpu", tmp_path / "verl_cpu", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    folder = tmp_path / "verl_adaptive" / "allocators"
    (folder / "heavy.py").write_text("import torch\n")
    (folder / "above.py").write_text("import verl_adaptive.filters.band\n")
    (tmp_path / "verl_cpu" / "ours.py").write_text("import verl_adaptive.errors\n")
    with (tmp_path / "verl_adaptive" / "integration" / "trainer.py").open("a") as trainer:
        trainer.write("import verl_adaptive.simulate\n")
    said = call(sys.executable, "-c", LINT, cwd=tmp_path)
    assert "0 kept, 5 broken" in said, said
