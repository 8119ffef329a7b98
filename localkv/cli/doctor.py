"""``localkv doctor``: what is here, what is missing, and the command that brings it."""

from __future__ import annotations

import platform
from typing import Any

import click

from localkv import __version__
from localkv.cli.options import json_option


@click.command("doctor", epilog="Example: localkv doctor")
@json_option
def command(as_json: bool) -> None:
    """Check this machine: Python, engine, GPU, memory limits, disk, servers.

    It says what is missing, what that costs, and the command that gets it. Nothing is changed.
    Exit code 0 when a sweep can run (a CPU is enough), 1 otherwise.
    """
    from localkv.cli.doctor_checks import FAIL
    from localkv.cli.terminal import print_json, show, width

    checks, engine = examine()
    able = all(check.status != FAIL for check in checks)
    if as_json:
        found = [check.to_dict() for check in checks]
        print_json(
            {"schema": 1, "localkv": __version__, "can_sweep": able, "engine": engine}
            | {"checks": found}
        )
    else:
        show(page(checks, able, width()), {r"^FAIL": "bold red", r"^ok": "green"})
    if not able:
        raise SystemExit(1)


def examine() -> tuple[list[Any], dict[str, Any]]:
    """Return every check, and what the engine says of itself."""
    from localkv.cli import doctor_checks as checks
    from localkv.cli import doctor_places as places
    from localkv.engines.info import ask_engine
    from localkv.probes.gpu import gpu_summary, pci_gpus

    answer = ask_engine()
    found = [
        checks.check_python(),
        checks.check_packages(),
        *checks.check_engine(answer),
        checks.check_gpu(gpu_summary(), answer, pci_gpus()),
        places.check_memory(),
        places.check_cache(),
        places.check_reports(),
        *places.check_servers(),
    ]
    return found, dict(answer.info)


def page(checks: list[Any], able: bool, most: int) -> list[str]:
    """Return the lines of the page, at most ``most`` columns wide but for commands to paste."""
    from localkv.cli.doctor_checks import FAIL
    from localkv.cli.terminal import wrap
    from localkv.report.escape import escape_terminal as safe

    lines = [f"localkv {__version__} on {platform.system()} {platform.machine()}", ""]
    for check in checks:
        start = f"{check.status:<5} {check.name:<13} "
        lines += wrap(safe(check.found, 2000), most, start, " " * len(start))
        if check.cost:
            lines += wrap(f"costs: {safe(check.cost, 2000)}", most, " " * len(start))
        # A command is pasted as one line, however long it is.
        lines += [f"{' ' * len(start)}fix: {safe(line, 4000)}" for line in check.fix]
    broken = ", ".join(check.name for check in checks if check.status == FAIL)
    verdict = "A sweep can run: localkv sweep" if able else f"No sweep can run: see {broken}"
    return [*lines, "", verdict]
