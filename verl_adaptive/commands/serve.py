"""Show the report live in a browser, for all runs of a folder. Read-only; on this machine alone by default.

examples:
  verl-adaptive serve checkpoints
  verl-adaptive serve checkpoints --port 8080 --data train.parquet
  verl-adaptive serve "runs/*/grpo"
  ssh -L 8765:127.0.0.1:8765 gpu-node, then verl-adaptive serve checkpoints there and the address that it prints here

Pages refresh themselves and keep the place. The printed address ends with a token: without it, other users of
this machine cannot read the pages. A --host other than loopback needs --allow-remote, since nothing is encrypted.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import secrets
import socket
import threading
from typing import Any
from urllib.parse import quote

from verl_adaptive.commands.arguments import add_store_options, identity_from
from verl_adaptive.commands.output import note
from verl_adaptive.commands.report import add_page_options, collected_of, rollouts_of
from verl_adaptive.errors import AdaptiveError, UsageError, lacks_extra
from verl_adaptive.report.page import render
from verl_adaptive.report.templates import Live
from verl_adaptive.stats import Run, open_run
from verl_adaptive.stats.files import open_parquet
from verl_adaptive.text import counted

#: A token of one's own, out of sight of the machine's list of processes.
_VARIABLE = "VERL_ADAPTIVE_TOKEN"
#: Its least length.
_LEAST = 16
#: Seconds that pages which are being made have when the server is ended.
_PATIENCE = 3.0


def _port(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not 0 <= value < 65536:
        raise argparse.ArgumentTypeError(f"{value} is no port: 1 to 65535, or 0 for any that is free")
    return value


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", metavar="DIR", help='a folder with runs below it, or a pattern: "runs/*"')
    parser.add_argument("--port", metavar="N", type=_port, default=8765, help="port; 0: any free one (default 8765)")
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1", help="address to listen on (default 127.0.0.1)"
    )
    parser.add_argument(
        "--allow-remote", action="store_true", help="with --host: other machines may read, without encryption"
    )
    parser.add_argument(
        "--token",
        metavar="TEXT",
        help=f"what readers must know (default: {_VARIABLE} in the environment, else a new one each time); "
        "'': nothing, every user of this machine may read",
    )
    parser.add_argument(
        "--name",
        metavar="HOST",
        action="append",
        default=[],
        help="host name that browsers use, beside localhost and IP addresses: --name gpu7.lab (may be repeated)",
    )
    add_page_options(parser)
    add_store_options(parser)


def run(args: argparse.Namespace) -> int:
    if not _is_loopback(args.host) and not args.allow_remote:
        raise UsageError(
            f"--host {args.host}: other machines could reach this address, and nothing is encrypted, the token included. "
            "Forward the port with ssh -L instead, or add --allow-remote"
        )
    given, token = "--token", args.token
    if token is None:
        given, token = _VARIABLE, os.environ.get(_VARIABLE) or secrets.token_urlsafe(32)
    if token and (len(token) < _LEAST or not token.isascii() or not token.isprintable()):
        none = ", or '' for none" if given == "--token" else ""
        raise UsageError(f"{given}: at least {_LEAST} letters, digits or signs of ASCII{none}")
    if not _is_loopback(args.host) and not token:
        raise UsageError(
            f"--host {args.host} --token '': everybody who can reach this address could read the runs. Leave --token out, or "
            "listen on 127.0.0.1"
        )
    try:
        import uvicorn

        from verl_adaptive.commands.compare import page_of_runs
        from verl_adaptive.report.server import Site, application
    except ModuleNotFoundError as error:
        raise lacks_extra("serve", error, "ui") from None
    rollouts_of(args.rollouts, args.data, {})  # refused now rather than on every page
    if args.data is not None:
        open_parquet(args.data).close()
    site = Site(args.store, lambda run, live: _render(args, run, live), page_of_runs)
    found, trouble = site.runs()
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family)
    except OSError as error:
        hint = "; --port 0 takes any free one" if error.errno == 98 else ""
        raise AdaptiveError(f"cannot listen on {args.host} port {args.port}: {error}{hint}") from None
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    for text in trouble:
        note(text)
    key = f"?token={quote(token, safe='')}" if token else ""
    note(f"{counted(len(found), 'run')} at http://{shown}:{port}/{key} (Ctrl-C ends it)")
    if not token:
        note("every user of this machine can read this: there is no token")
    if not _is_loopback(args.host):
        note("other machines can reach this, and nothing is encrypted: who listens on the way has the token, too")
    config = uvicorn.Config(
        application(site, tuple(args.name), token),
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
    )
    server = uvicorn.Server(config)
    handle_exit = server.handle_exit

    def end(*signal: Any) -> None:
        handle_exit(*signal)
        # A page that waits for a disk which does not answer cannot be cancelled.
        timer = threading.Timer(_PATIENCE, os._exit, (0,))
        timer.daemon = True
        timer.start()

    server.handle_exit = end  # type: ignore[assignment]
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:  # how it is meant to end
        pass
    finally:
        listener.close()
    return 0


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _render(args: argparse.Namespace, run: Run, live: Live) -> str:
    return render(collected_of(args, open_run(run.where, identity=identity_from(args))), live=live)
