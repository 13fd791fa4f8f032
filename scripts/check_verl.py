#!/usr/bin/env python3
"""What of verl has moved since the version this package was written for: names, parameters, sources.

  python scripts/check_verl.py                  verl's newest release on PyPI
  python scripts/check_verl.py 0.9.1            that release
  python scripts/check_verl.py path/to/verl     a checkout, an unpacked wheel, a .whl file, or a bare git repository
  python scripts/check_verl.py path/to/verl@REF a commit, branch or tag of a git repository
  python scripts/check_verl.py --record 0.9.1   write what that release is like, for later comparisons

verl is read, never imported: neither it nor its dependencies need to be installed, and none of its code runs. Looked at
are the names of verl_adaptive/integration/compat.py, every name that verl_adaptive/integration imports from verl, and
the functions whose behaviour (not only their name) is relied on.

Dates are said, because verl's version does not tell what is newer: sources of August 2026 that call themselves
0.10.0.dev lack names that 0.9.1 has. The date is the commit's, or that of the files in the wheel.

Status 0: all as recorded. 1: a name is missing, or takes other parameters, and nothing stands in for it; which trainer
modes that concerns is said. 3: all names fit, but the source of some has changed and wants reading. 2: verl could not be
looked at.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import signal
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("verl_sources.json")
INTEGRATION = ROOT / "verl_adaptive" / "integration"
sys.path.insert(0, str(ROOT))

from verl_adaptive.integration.compat import MODES, NAMES  # noqa: E402  (needs the standard library only)

_V1 = "verl.trainer.ppo.v1"
_ENGINES, _SERVERS = "verl.workers.engine", "verl.workers.rollout"
#: Functions that are not called by us but whose behaviour the integration rests on: name → what.
RELIED_ON: dict[str, str] = {
    f"{_V1}.trainer_base.PPOTrainer.fit": "the loop that calls what we override",
    f"{_V1}.trainer_base.PPOTrainer._step_once": "the order of the phases of a step",
    f"{_V1}.trainer_base.PPOTrainer._build_replay_buffer": "how a custom replay buffer is made",
    f"{_V1}.trainer_base.PPOTrainer._compute_metrics": "which rows metrics are about",
    f"{_V1}.agent_loop_tq.AgentLoopWorkerTQ._run_prompt": "__rollout_n__, and the status of a prompt",
    f"{_V1}.agent_loop_tq.AgentLoopWorkerTQ._agent_loop_postprocess": "keys and tags of trajectories",
    f"{_V1}.agent_loop_tq.AgentLoopManagerTQ.generate_sequences": "dispatch without waiting",
    "verl.trainer.main_ppo.TaskRunnerV1.run": "how the trainer is found and started",
    "verl.trainer.main_ppo.run_ppo": "how Ray is started, and with which environment",
    "verl.trainer.ppo.ray_trainer.compute_advantage": "how an advantage estimator is called",
    "verl.trainer.ppo.utils.create_rl_dataset": "rows of the training set",
    "verl.utils.dataset.rl_dataset.RLHFDataset.__getitem__": "what a prompt's row holds",
    "verl.utils.distributed.initialize_global_process_group_ray": "patched on CPU",
    "verl.utils.model.load_valuehead_model": "replaced on CPU",
    f"{_SERVERS}.sglang_rollout.async_sglang_server.SGLangHttpServer.generate": "outlives its cancelled caller",
    f"{_SERVERS}.sglang_rollout.async_sglang_server.SGLangHttpServer.abort_all_requests": "waits for the callers",
    f"{_SERVERS}.vllm_rollout.vllm_async_server.vLLMHttpServer.abort_all_requests": "closes its gate, and drains",
    "verl.workers.utils.losses.ppo_loss": "rows of zero advantage",
    f"{_ENGINES}.fsdp.transformer_impl.FSDPEngine.forward_backward_batch": "loss denominators",
    f"{_ENGINES}.veomni.transformer_impl.VeOmniEngine.forward_backward_batch": "loss denominators",
    f"{_ENGINES}.torchtitan.transformer_impl.TorchTitanEngine.forward_backward_batch": "loss denominators",
    f"{_ENGINES}.torchtitan.transformer_impl.TorchTitanEngineWithLMHead.prepare_model_inputs": "reads loss_mask",
    f"{_ENGINES}.megatron.transformer_impl.MegatronEngine.forward_backward_batch": "loss denominators",
    f"{_ENGINES}.megatron.transformer_impl.MegatronEngine._build_tf_config": "whether routers have losses of their own",
    f"{_ENGINES}.megatron.transformer_impl.MegatronEngineWithLMHead.forward_step": "reads loss_mask",
    f"{_ENGINES}.megatron.transformer_impl.MegatronEngineWithLMHead.postprocess_micro_batch_func": "the loss's scale",
}


class Unreadable(Exception):
    """verl could not be looked at."""


# -- getting verl -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """Where verl's sources are.

    Attributes:
        root: the folder that holds ``verl/``.
        date: what is known of their age: ``2026-08-22, commit 1dda039b9c63``; empty: nothing.
    """

    root: Path
    date: str = ""


def unpacked(what: str | None, scratch: Path) -> Source:
    """Get verl's sources.

    Args:
        what: a version, a path, a path with ``@REF``, or None for the newest release.
        scratch: where to download and unpack.

    Raises:
        Unreadable: no such path, or the download failed.
    """
    if what is not None:
        place, _, ref = what.partition("@")
        path = Path(what) if Path(what).exists() else Path(place)
        if path.is_dir():
            return _folder(path, "" if path == Path(what) else ref, scratch)
        if path.exists():
            return _wheel(path, scratch)
        if not what[:1].isdigit():
            raise Unreadable(f"{what} is neither a version nor there")
    wheels = scratch / "wheel"
    name = "verl" if what is None else f"verl=={what}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(wheels), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise Unreadable(f"{name} cannot be downloaded: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return _wheel(next(wheels.glob("*.whl")), scratch)


def _wheel(path: Path, scratch: Path) -> Source:
    target = scratch / "verl"
    try:
        with zipfile.ZipFile(path) as wheel:
            members = [m for m in wheel.infolist() if m.filename.startswith("verl")]
            members = [m for m in members if m.filename.endswith((".py", "METADATA"))]
            wheel.extractall(target, members)
    except (zipfile.BadZipFile, OSError) as error:
        raise Unreadable(f"{path} is no wheel: {error}") from error
    newest = max((m.date_time for m in members), default=(1980, 1, 1, 0, 0, 0))
    date = "" if newest[0] == 1980 else f"built {newest[0]}-{newest[1]:02}-{newest[2]:02}"  # 1980: zip's zero
    return Source(target, date)


def _git(folder: Path, *words: str) -> str | None:
    """What git says of a repository; None if it is none."""
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else None


def _folder(path: Path, ref: str, scratch: Path) -> Source:
    """A checkout, an unpacked wheel, or a repository without a work tree."""
    for folder in (path, path.parent):
        if not ref and (folder / "verl" / "trainer").is_dir():
            # of a repository of its own, not of one that an environment happens to lie in
            commit = _git(folder, "log", "-1", "--format=%cs, commit %h") if (folder / ".git").exists() else None
            return Source(folder, commit or "")
    commit = _git(path, "log", "-1", "--format=%cs, commit %h", ref or "HEAD", "--")
    if commit is None:
        raise Unreadable(f"{path} holds no verl/trainer" + (f", and no commit {ref}" if ref else ""))
    target, archive = scratch / "verl", scratch / "verl.tar"
    if _git(path, "archive", "--output", str(archive), ref or "HEAD", "verl") is None:
        raise Unreadable(f"{path}: {ref or 'HEAD'} holds no verl")
    with tarfile.open(archive) as packed:
        packed.extraction_filter = getattr(tarfile, "data_filter", None)  # Debian 12's Python has none
        packed.extractall(target)
    return Source(target, commit)


def version_of(root: Path) -> str:
    """verl's version, from its metadata or its ``version`` file."""
    for path in root.glob("verl-*.dist-info/METADATA"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("Version:"):
                return line.partition(":")[2].strip()
    path = root / "verl" / "version" / "version"
    return path.read_text().strip() if path.is_file() else "of unknown version"


# -- reading without importing ----------------------------------------------------------------------------------------

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class Found:
    """A definition: its node, and the text it stands in."""

    node: ast.AST
    text: str

    @property
    def parameters(self) -> list[ast.arg]:
        """Parameters by name; those of a class's ``__init__`` are not looked up here."""
        assert isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef)
        a = self.node.args
        return [*a.posonlyargs, *a.args, *a.kwonlyargs, *(x for x in (a.vararg, a.kwarg) if x is not None)]

    @property
    def required(self) -> set[str]:
        """Parameters without a default."""
        assert isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef)
        a = self.node.args
        positional = [*a.posonlyargs, *a.args]
        given = positional[: len(positional) - len(a.defaults)]
        return {x.arg for x in given} | {x.arg for x, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is None}

    @property
    def digest(self) -> str:
        """Of the source, its docstrings, comments, blank lines and indentation aside."""
        lines = self.text.splitlines()
        skip: set[int] = set()
        for node in ast.walk(self.node):
            body = getattr(node, "body", None)
            if isinstance(node, _Definition) and body and isinstance(body[0], ast.Expr):
                doc = body[0]
                if isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str):
                    skip |= set(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
        assert isinstance(self.node, ast.stmt)
        kept = [
            " ".join(lines[number - 1].split())
            for number in range(self.node.lineno, (self.node.end_lineno or self.node.lineno) + 1)
            if number not in skip
        ]
        text = "\n".join(line for line in kept if line and not line.startswith("#"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass
class Verl:
    """verl's sources.

    Args:
        root: the folder that holds ``verl/``.
    """

    root: Path
    _modules: dict[str, tuple[ast.Module, str] | None] = field(default_factory=dict)

    def module(self, name: str) -> tuple[ast.Module, str] | None:
        """A module's tree and text; None if there is none, or nothing that Python can parse."""
        if name not in self._modules:
            base = self.root.joinpath(*name.split("."))
            path = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
            found = None
            if path is not None:
                text = path.read_text(encoding="utf-8")
                try:
                    found = (ast.parse(text), text)
                except SyntaxError:
                    found = None
            self._modules[name] = found
        return self._modules[name]

    def _is_package(self, name: str) -> bool:
        return self.root.joinpath(*name.split("."), "__init__.py").is_file()

    def find(self, module: str, name: str, depth: int = 0) -> Found | None:
        """A dotted name in a module, through imports and base classes, as long as they stay within verl."""
        loaded = self.module(module)
        if loaded is None or depth > 12:
            return None
        tree, text = loaded
        head, _, rest = name.partition(".")
        for node in _statements(tree.body):
            if isinstance(node, _Definition) and node.name == head:
                return self._inside(module, node, text, rest, depth) if rest else Found(node, text)
            if not rest and head in _assigned(node):
                return Found(node, text)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == head or alias.name == "*":
                        source = self._absolute(module, node)
                        wanted = head if alias.name == "*" else alias.name
                        found = self.find(source, f"{wanted}.{rest}" if rest else wanted, depth + 1)
                        if found is not None:
                            return found
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + self._is_package(module)]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _inside(self, module: str, owner: ast.AST, text: str, name: str, depth: int) -> Found | None:
        """A member of a class, its own or inherited."""
        if not isinstance(owner, ast.ClassDef):
            return None
        for node in _statements(owner.body):
            if isinstance(node, _Definition) and node.name == name:
                return Found(node, text)
            if name in _assigned(node):
                return Found(node, text)
        for base in owner.bases:
            if isinstance(base, ast.Name):
                found = self.find(module, f"{base.id}.{name}", depth + 1)
                if found is not None:
                    return found
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, those under `if`, `try` and `with` included."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(node, _Definition):
                yield from _statements(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _statements(handler.body)


def _assigned(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {t.id for t in targets if isinstance(t, ast.Name)}


# -- what we need -----------------------------------------------------------------------------------------------------


def imported() -> Iterator[tuple[str, str, str]]:
    """``(module, name, our file)`` of everything that the integration imports from verl."""
    for path in sorted(INTEGRATION.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "verl":
                for alias in node.names:
                    yield str(node.module), alias.name, str(path.relative_to(ROOT))


@dataclass
class Outcome:
    """What moved.

    Attributes:
        version: verl's.
        date: of its sources, as far as known.
        modes: trainer modes that have all they need.
        missing: names that are gone, with what needs them.
        parameters: names that take other parameters.
        changed: names whose source is another than the recorded one, with what rests on them.
        instead: what is not there but has something that stands in.
        digests: of everything that was found.
        names: how many were looked at.
    """

    version: str
    date: str = ""
    modes: list[str] = field(default_factory=lambda: list(MODES))
    missing: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    instead: list[str] = field(default_factory=list)
    digests: dict[str, dict[str, object]] = field(default_factory=dict)
    names: int = 0

    @property
    def status(self) -> int:
        return 1 if self.missing or self.parameters else 3 if self.changed else 0


def examine(source: Source, recorded: dict[str, dict[str, object]]) -> Outcome:
    """Look at everything we need of a verl.

    Args:
        source: of verl.
        recorded: name → ``digest`` and ``required`` parameters, of the version this package was written for.
    """
    verl, out = Verl(source.root), Outcome(version_of(source.root), source.date)

    def lack(modes: tuple[str, ...]) -> str:
        out.modes = [mode for mode in out.modes if mode not in modes]
        return "" if modes == MODES else f" in {' and '.join(modes)}"

    def compare(where: str, found: Found, why: str) -> None:
        is_function = isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef)
        required = sorted(found.required) if is_function else []
        out.digests[where] = {"digest": found.digest, "required": required}
        known = recorded.get(where)
        if known is None:
            return
        demanded = [p for p in required if p not in known["required"]]  # type: ignore[operator]
        if demanded:
            out.parameters.append(f"{where} now demands {', '.join(demanded)} ({why})")
            lack(next((n.modes for n in NAMES if n.where == where), MODES))
        elif known["digest"] != found.digest:
            out.changed.append(f"{where} ({why})")

    for item in (name for name in NAMES if name.module.startswith("verl.")):  # TransferQueue has a version of its own
        out.names += 1
        where, why = item.where, item.why or "used by the integration"
        found = verl.find(item.module, item.name)
        if found is None:
            if item.instead:
                out.instead.append(f"{where} is missing: {item.instead}")
            else:
                out.missing.append(f"{where} ({why}){lack(item.modes)}")
            continue
        if item.parameters and isinstance(found.node, ast.FunctionDef | ast.AsyncFunctionDef):
            has = {p.arg for p in found.parameters}
            lost = [p for p in item.parameters if p not in has]
            if lost and item.instead:
                out.instead.append(f"{where} does not take {', '.join(lost)}: {item.instead}")
                continue
            if lost:
                out.parameters.append(f"{where} does not take {', '.join(lost)} ({why}){lack(item.modes)}")
                continue
        if where not in out.digests:
            compare(where, found, why)
    for where, why in RELIED_ON.items():
        if where in out.digests:
            continue
        out.names += 1
        module, name = _split(verl, where)
        found = verl.find(module, name)
        if found is None:
            out.missing.append(f"{where} ({why})")
            lack(MODES)
        else:
            compare(where, found, why)
    seen: set[str] = set()
    for module, name, path in imported():
        where = f"{module}.{name}"
        if where in seen or where in out.digests:
            continue
        seen.add(where)
        out.names += 1
        if verl.find(module, name) is None and verl.module(where) is None:
            out.missing.append(f"{where} (imported by {path})")
            lack(MODES)
    return out


def _split(verl: Verl, where: str) -> tuple[str, str]:
    """The longest module in a dotted name, and the rest."""
    parts = where.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        if verl.module(".".join(parts[:cut])) is not None:
            return ".".join(parts[:cut]), ".".join(parts[cut:])
    return ".".join(parts[:-1]), parts[-1]


def _dated(date: str) -> str:
    return f" ({date})" if date else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verl", nargs="?", help="a version, a path or a path@ref; by default the newest release")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} from this verl")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    args = parser.parse_args(argv)
    record = json.loads(RECORD.read_text()) if RECORD.is_file() and not args.record else {"names": {}}
    with tempfile.TemporaryDirectory(prefix="check-verl-") as scratch:
        try:
            outcome = examine(unpacked(args.verl, Path(scratch)), record["names"])
        except (Unreadable, OSError, subprocess.TimeoutExpired) as error:
            print(f"check_verl: {error}", file=sys.stderr)
            return 2
    if args.record:
        if outcome.missing or outcome.parameters:
            print(f"check_verl: verl {outcome.version} lacks what is needed: {outcome.missing}", file=sys.stderr)
            return 1
        RECORD.write_text(
            json.dumps(
                {"verl": outcome.version, "date": outcome.date, "names": outcome.digests}, indent=1, sort_keys=True
            )
            + "\n"
        )
    if args.json:
        parts = {
            name: getattr(outcome, name)
            for name in ("version", "date", "modes", "names", "missing", "parameters", "changed", "instead")
        }
        recorded = {"recorded": record.get("verl"), "recorded_date": record.get("date")}
        print(json.dumps({**parts, **recorded, "status": outcome.status}, indent=1))
        return outcome.status
    known = f"{record.get('verl', 'nothing recorded')}{_dated(record.get('date', ''))}"
    print(f"verl {outcome.version}{_dated(outcome.date)}, compared with {known}: {outcome.names} names")
    print(f"trainer modes that have what they need: {', '.join(outcome.modes) or 'none'}")
    for title, lines in (
        ("missing", outcome.missing),
        ("other parameters", outcome.parameters),
        ("missing, with something that stands in", outcome.instead),
        ("source changed", outcome.changed),
    ):
        print(f"{len(lines)} {title}")
        for line in lines:
            print(f"  {line}")
    return outcome.status


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `check_verl.py … | head` ends without a traceback
    sys.exit(main())
