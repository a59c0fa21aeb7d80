"""Run the full tier of checks, which take too long for CI, and write its report: `hatch run full`.

Each stage is one command with a time limit. A stage fails if its command fails or runs out of time, if a test is
skipped for another reason than missing hardware, or if it ran no test. Later stages still run. The report goes
to docs/evidence/ci: `full.json` for programs, `full.md` for readers. `--only NAME` runs some stages and writes no report.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
REPORT_FOLDER = ROOT / "docs/evidence/ci"
LOGS = ROOT / ".hatch/full-logs"
LIMIT_MINUTES = 90
"""Most minutes that all stages may take together."""
HARDWARE_SKIP = re.compile(r"needs \d+ CUDA device\(s\)")
"""The skip reason of a test marked `hardware`, the only skip that this tier accepts."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.15")
"""The Python versions to look for in addition to the running one."""


class Stage(NamedTuple):
    """One command of the tier."""

    name: str
    command: Sequence[str]
    limit_minutes: float
    is_pytest: bool = True
    """True if the command takes `--junitxml=FILE` and the report counts its tests."""


class Result(NamedTuple):
    """The outcome of a stage."""

    name: str
    command: str
    is_passed: bool
    minutes: float
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    problem: str = ""


class Counts(NamedTuple):
    """The tests that one JUnit file records."""

    passed: int
    failed: int
    skip_reasons: list[str]


def hatch(*words: str) -> tuple[str, ...]:
    """Return the command line of hatch with `words`."""
    return (sys.executable, str(ROOT / "tools/hatch.py"), *words)


def stages() -> list[Stage]:
    """Return the stages of the tier, in order; each other Python adds one."""
    workers = ("--numprocesses=logical", "--maxprocesses=8", "--dist=worksteal")
    python = (sys.executable, "-m", "pytest", "-q")
    newest = hatch("run", "newest:python", "-m", "pytest", "-q")
    return [
        Stage("built pages", hatch("run", "docs:pages"), 10, is_pytest=False),
        Stage("newest Triton", (*newest, *workers, "packages/nsa-kernels-triton"), 30),
        Stage("newest Triton compiles", (*newest, *workers, *SLOW_COMPILES), 20),
        Stage("peers", (*newest, "packages/nsa-bench/tests/test_peers.py"), 5),
        Stage("oldest Transformers", (*hatch("run", "oldest:python", "-m", "pytest", "-q"), *workers, *TRANSFORMERS), 20),
        Stage("interpreter without patches", (*python, *workers, "--unpatched-interpreter", *UNPATCHED_SAMPLE), 20),
        *other_pythons(installed_pythons()),
        Stage("slow tier", (*python, *workers, "-m", "slow", "--timeout=1800", "--hypothesis-profile=thorough"), 75),
    ]


SLOW_COMPILES = (
    *("-m", "slow", "--timeout=1800", "-k", "(compile or choice) and not more_cases"),
    "packages/nsa-kernels-triton/tests/test_targets.py",
)
"""Compilation for sm_80, sm_89 and sm_90a; CI has the rest of it."""
TRANSFORMERS = ("packages/nsa-transformers", "packages/nsa-train/tests/checkpoint/test_hugging_face.py")
"""Tests that use Transformers."""
UNPATCHED_SAMPLE = (
    "packages/nsa-kernels-triton/tests/test_ops.py",
    "packages/nsa-kernels-triton/tests/test_choice.py",
)
"""Tests of kernels that also run in the unpatched interpreter of Triton."""


def other_pythons(found: Mapping[str, str]) -> list[Stage]:
    """Return a stage for each Python of `found` (paths by version): it tests nsa-core and the built wheels with it.

    A version between two others, the running one included, runs fewer tests.
    """
    minors = [sys.version_info.minor, *(int(version.removeprefix("3.")) for version in found)]
    made = []
    for version, path in found.items():
        is_between = min(minors) < int(version.removeprefix("3.")) < max(minors)
        command = (sys.executable, str(ROOT / "tools/other_python.py"), path, str(ROOT / ".hatch" / f"python-{version}"))
        made.append(Stage(f"Python {version}", (*command, "--between") if is_between else command, 30))
    return made


def installed_pythons() -> dict[str, str]:
    """Return the paths of the supported Pythons on this machine, by version, without the running version: PATH first, then pyenv."""
    found = {}
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in PYTHONS:
        candidates = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python{version}")))]
        usable = [path for path in candidates if path and runs(path, version)]
        if version != running and usable:
            found[version] = usable[0]
    return found


def runs(python: str, version: str) -> bool:
    """Return whether `python` starts and is of `version`; a shim of pyenv may name a missing Python."""
    done = subprocess.run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, check=False)
    return done.stdout.strip() == version


def run_stage(stage: Stage, minutes_left: float) -> Result:
    """Run `stage`, show its output and keep it under .hatch/full-logs; return its outcome."""
    name = re.sub(r"\W+", "-", stage.name.lower())
    junit, log = LOGS / f"{name}.xml", LOGS / f"{name}.log"
    LOGS.mkdir(parents=True, exist_ok=True)
    junit.unlink(missing_ok=True)
    limit = min(stage.limit_minutes, minutes_left)
    words = [*stage.command, *([f"--junitxml={junit}"] if stage.is_pytest else [])]
    command = readable(stage.command)
    print(f"\n== {stage.name} (at most {limit:.0f} minutes): {command}", flush=True)
    if limit <= 0:
        return Result(stage.name, command, is_passed=False, minutes=0.0, problem=f"no time was left of {LIMIT_MINUTES} minutes")
    start = time.monotonic()
    code = run_logged(words, log, limit)
    minutes = (time.monotonic() - start) / 60
    problems = []
    if code is None:
        problems.append(f"stopped after {limit:.0f} minutes")
    elif code != 0:
        problems.append(f"exit code {code}")
    counts = Counts(0, 0, [])
    if stage.is_pytest:
        counts = read_counts(junit)
        problems += problems_of(counts)
    passed, failed, skipped = counts.passed, counts.failed, len(counts.skip_reasons)
    return Result(stage.name, command, not problems, round(minutes, 1), passed, failed, skipped, "; ".join(problems))


def run_logged(command: Sequence[str], log: Path, limit_minutes: float) -> int | None:
    """Run `command` with its output on the terminal and in `log`; return its exit code, None if the limit ended it."""
    # a separate session, so that the limit ends workers too
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    tee = subprocess.Popen(["tee", str(log)], stdin=process.stdout)
    try:
        return process.wait(limit_minutes * 60)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        tee.wait()


def read_counts(junit: Path) -> Counts:
    """Return the tests that the JUnit file `junit` records; empty if it is missing, as after a time limit."""
    if not junit.is_file():
        return Counts(0, 0, [])
    passed, failed, reasons = 0, 0, []
    # trusted: pytest of this checkout wrote it
    for case in ET.parse(junit).getroot().iter("testcase"):
        if (skip := case.find("skipped")) is not None:
            reasons.append(skip.get("message", ""))
        elif case.find("failure") is not None or case.find("error") is not None:
            failed += 1
        else:
            passed += 1
    return Counts(passed, failed, reasons)


def problems_of(counts: Counts) -> list[str]:
    """Return why `counts` do not pass: failures, no test at all, or skips without missing hardware."""
    problems = [f"{counts.failed} failed"] if counts.failed else []
    if not counts.passed:
        problems.append("no test passed")
    if refused := sorted({reason for reason in counts.skip_reasons if not HARDWARE_SKIP.search(reason)}):
        problems.append("skipped without need: " + " | ".join(refused))
    return problems


def readable(command: Iterable[str]) -> str:
    """Return `command` as typed at the root of this checkout; a program elsewhere is shown by its name."""

    def shown(word: str) -> str:
        if word == sys.executable:
            return "python"
        path = Path(word)
        if not path.is_absolute():
            return word
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name

    return " ".join(map(shown, command)).replace("python tools/hatch.py", "hatch")


def versions() -> dict[str, str]:
    """Return the versions that the stages ran with, by name."""
    query = "import importlib.metadata as m, json, sys; print(json.dumps({name: m.version(name) for name in sys.argv[1:]}))"
    here = json.loads(subprocess.check_output([sys.executable, "-c", query, "torch", "triton", "hypothesis", "pytest"], text=True))
    found = subprocess.run(hatch("env", "find", "newest"), cwd=ROOT, capture_output=True, text=True, check=True)
    newest = Path(found.stdout.splitlines()[-1]) / "bin/python"
    there = json.loads(subprocess.check_output([newest, "-c", query, "triton"], text=True)) if newest.exists() else {}
    return {
        "python": platform.python_version(),
        **here,
        "newest triton": there.get("triton", "not installed"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
    }


def git(*words: str) -> str:
    """Return the output of a git command at the root."""
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()


def report(results: Sequence[Result]) -> dict[str, object]:
    """Return the report of `results` as JSON-able values."""
    changed = [line for line in git("status", "--porcelain").splitlines() if "docs/evidence/ci" not in line]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": git("rev-parse", "HEAD"),
        "is_commit_as_checked_out": not changed,
        "is_passed": all(result.is_passed for result in results),
        "minutes": round(sum(result.minutes for result in results), 1),
        "versions": versions(),
        "stages": [result._asdict() for result in results],
    }


def as_markdown(found: dict[str, object]) -> str:
    """Return the report `found` as a page."""
    results = [Result(**values) for values in found["stages"]]  # type: ignore[attr-defined]
    lines = [
        "# The full tier of checks",
        "",
        f"`hatch run full`, {found['date']}, commit `{str(found['commit'])[:10]}`"
        f"{'' if found['is_commit_as_checked_out'] else ' with changes that are not committed'}: "
        f"**{'passed' if found['is_passed'] else 'failed'}** in {found['minutes']} minutes (at most {LIMIT_MINUTES}).",
        "",
        "| stage | result | passed | failed | skipped | minutes | command |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        outcome = "passed" if result.is_passed else f"failed: {result.problem}"
        counts = f"{result.passed} | {result.failed} | {result.skipped}"
        lines.append(f"| {result.name} | {outcome} | {counts} | {result.minutes} | `{result.command}` |")
    stated = ", ".join(f"{name} {value}" for name, value in found["versions"].items())  # type: ignore[attr-defined]
    return "\n".join([*lines, "", f"Versions: {stated}.", "", "A test is skipped here for missing hardware alone.", ""])


def main(arguments: Sequence[str]) -> int:
    """Run the stages and write the report; exit 1 if one failed."""
    parser = argparse.ArgumentParser(prog="hatch run full", description="Run the full tier of checks.")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this stage alone, and write no report; repeatable")
    wanted = parser.parse_args(arguments).only
    every = stages()
    if unknown := set(wanted) - {stage.name for stage in every}:
        parser.error(f"--only {min(unknown)!r} is no stage; the stages are {', '.join(stage.name for stage in every)}")
    results: list[Result] = []
    for stage in every:
        if not wanted or stage.name in wanted:
            results.append(run_stage(stage, LIMIT_MINUTES - sum(result.minutes for result in results)))
    print()
    for result in results:
        verdict = "ok  " if result.is_passed else "FAIL"
        counts = f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped"
        print(f"{verdict} {result.name}: {counts}, {result.minutes} minutes {result.problem}".rstrip())
    if not wanted:
        found = report(results)
        REPORT_FOLDER.mkdir(parents=True, exist_ok=True)
        (REPORT_FOLDER / "full.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (REPORT_FOLDER / "full.md").write_text(as_markdown(found), encoding="utf-8")
        print(f"report: {REPORT_FOLDER / 'full.md'}")
    return 0 if all(result.is_passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
