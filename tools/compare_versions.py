"""Time attention of versions of the packages in turn, on one GPU: `python tools/compare_versions.py OLD=DIR[:DIR] NEW=DIR[:DIR]`.

DIR has nsa-core and nsa-kernels-triton: `pip install --no-deps --target DIR ./packages/nsa-core ./packages/nsa-kernels-triton`, or
sources. The first version is the base: a ratio below 1 is faster. One process per version calls `nsa_attention` with the same inputs:
bf16, batch 1, default geometry, random selection. The versions alternate from round to round: A B, B A, A B, ... CUDA events time each
call, after a write of 256 MiB. After about 5 ms of calls the GPU rests as long as they took (`--idle 1`): without rests it reaches its
power limit, and its clock changes. `--profile` lists the time and launches of each kernel instead. `--json FILE` is written after each
round.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

import nsa_core

PACKAGES = ("nsa_core", "nsa_kernels_triton")
DIRECTIONS = ("forward", "both")
"""Without gradients; forward, then the gradients of all operands."""
FLUSH_BYTES = 256 * 2**20
TOGETHER_MS = 5.0
"""Calls that together take about this long share a rest."""
ROUND_MS, MIN_CALLS, MAX_CALLS = 300.0, 3, 30
WARM_UPS, PROFILED_CALLS = 3, 10
CLOCK_HZ = 2e9
"""At least the clock of the GPU."""

Row = dict[str, Any]
Workers = dict[str, "subprocess.Popen[str]"]


class Bench:
    """The calls of the version that this process imports. Its public methods are the commands of the parent."""

    def __init__(self, device: str, idle: float) -> None:
        self._device, self._idle, self._is_gpu = device, idle, device == "cuda"
        self._synchronize = torch.cuda.synchronize if self._is_gpu else torch.cpu.synchronize
        self._flushed = torch.empty(FLUSH_BYTES if self._is_gpu else 0, dtype=torch.int8, device=device)
        # this backend alone is registered, so no other serves a call
        fused = tuple(x for x in nsa_core.load_plugins().registry().backends if (x.operation, x.name) == ("nsa", "triton"))
        if not fused:
            sys.exit("no installed plug-in has backend triton of operation nsa; install nsa-kernels-triton")
        # a CPU runs it in Triton's interpreter, and only if it is named
        self._options: Any = {
            "geometry": nsa_core.BlockGeometry(),
            "backend": "auto" if self._is_gpu else "triton",
            "registry": nsa_core.BackendRegistry(fused),
        }
        self._operands: tuple[Tensor, ...] = ()
        self._dout: Tensor | None = None

    def describe(self) -> Row:
        """Return the versions of nsa-core, torch and Triton. Exit if the packages are not those of this process's path."""
        import triton

        path = os.environ["PYTHONPATH"]
        for package in PACKAGES:
            file = str(sys.modules[package].__file__)
            if not any(Path(file).resolve().is_relative_to(Path(folder).resolve()) for folder in path.split(os.pathsep)):
                sys.exit(f"{file} was imported, which is not below {path}")
        return {"nsa_core": nsa_core.__version__, "torch": torch.__version__, "triton": triton.__version__}

    def load(self, sizes: Sequence[int], directions: Sequence[str]) -> None:
        """Free the last case, make the tensors of one of these `sizes`, and call it in each direction."""
        self._operands, self._dout = (), None
        gc.collect()
        if self._is_gpu:
            torch.cuda.empty_cache()
        heads, groups, dim_k, dim_v, tokens, blocks = sizes
        like: Any = {"dtype": torch.bfloat16, "device": self._device, "generator": torch.Generator(self._device).manual_seed(0)}
        stores = [torch.randn(1, rows, groups, dim, **like) for rows in (blocks, tokens, tokens) for dim in (dim_k, dim_v)]
        q, gates = torch.randn(1, tokens, heads, dim_k, **like), torch.rand(1, tokens, heads, 3, **like)
        self._operands = tuple(x.requires_grad_() for x in (q, *stores, gates))
        self._dout = torch.randn(1, tokens, heads, dim_v, **like)
        for direction in directions:
            self._call(direction)
        # another version is timed next
        self._synchronize()

    def time(self, direction: str) -> Row:
        """Return the median and the minimum of a round of calls in milliseconds."""
        # the first call warms up, and its time says how many fit
        (first_ms,), launch_s = self._times_ms(direction, 1, 0.0)
        count, times = max(1, round(TOGETHER_MS / first_ms)), list[float]()
        while len(times) < min(MAX_CALLS, max(MIN_CALLS, ROUND_MS / first_ms)):
            times += self._times_ms(direction, count, count * launch_s)[0]
        return {"median_ms": median(times), "min_ms": min(times), "calls": len(times)}

    def profile(self, direction: str) -> Row:
        """Return microseconds and launches per call by the kernel's name; on a CPU by that of torch's operators."""
        for _ in range(WARM_UPS):
            self._times_ms(direction, 1, 0.0)
        kind = self._device.upper()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA if self._is_gpu else ProfilerActivity.CPU]) as profiler:
            for _ in range(PROFILED_CALLS):
                began = time.perf_counter()
                self._call(direction)
                self._synchronize()
                time.sleep(self._idle * (time.perf_counter() - began))
        kernels: dict[str, tuple[float, int]] = {}
        for event in profiler.events():
            if event.device_type.name == kind and event.name != "Context Sync":
                us, launches = kernels.get(event.name, (0.0, 0))
                kernels[event.name] = us + event.time_range.elapsed_us(), launches + 1
        return {name: (us / PROFILED_CALLS, launches / PROFILED_CALLS) for name, (us, launches) in kernels.items()}

    def _times_ms(self, direction: str, count: int, lead_s: float) -> tuple[list[float], float]:
        """Return the times of `count` calls, after which the GPU rests, and the seconds in which the host launches one.

        The GPU begins `lead_s` after the host, so that it does not wait for launches.
        """
        if self._is_gpu:
            torch.cuda._sleep(int(lead_s * CLOCK_HZ))
        spans, began = [], time.perf_counter()
        for _ in range(count):
            self._flushed.zero_()
            first = self._stamp()
            self._call(direction)
            spans.append((first, self._stamp()))
        launch_s = (time.perf_counter() - began) / count
        self._synchronize()
        times = [first.elapsed_time(last) if self._is_gpu else 1e3 * (last - first) for first, last in spans]
        time.sleep(self._idle * sum(times) / 1e3)
        return times, launch_s

    def _stamp(self) -> Any:
        """Return an event of the GPU, or the time on a CPU."""
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _call(self, direction: str) -> object:
        with torch.set_grad_enabled(direction == "both"):
            out = nsa_core.nsa_attention(*self._operands, **self._options)
        return out if direction == "forward" else torch.autograd.grad(out, self._operands, self._dout)


def serve(device: str, idle: str) -> int:
    """Answer commands, a line of JSON each, until stdin ends: a method of Bench and its arguments."""
    answers = os.fdopen(os.dup(1), "w")
    # other output is no answer
    os.dup2(2, 1)
    bench = Bench(device, float(idle))
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        print(json.dumps(getattr(bench, command)(*arguments)), file=answers, flush=True)
    return 0


def start(path: str, device: str, idle: float) -> subprocess.Popen[str]:
    """Return a worker, which imports the packages from `path`."""
    environment = os.environ | {"PYTHONPATH": path} | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    # -P: the folder of this file is not on its path
    command = [sys.executable, "-P", __file__, "--worker", device, str(idle)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(workers: Workers, *command: object) -> Row:
    """Return the workers' answers by name; they compute at the same time. Exit with 1 if one ended."""
    for worker in workers.values():
        # a worker that ended gives no answer
        with suppress(BrokenPipeError):
            print(json.dumps(command), file=worker.stdin, flush=True)
    answers = {name: worker.stdout.readline() for name, worker in workers.items() if worker.stdout}
    if ended := [name for name, line in answers.items() if not line]:
        sys.exit(f"{' and '.join(ended)} ended at {command}; the error is above")
    return {name: json.loads(line) for name, line in answers.items()}


def order(names: Sequence[str], number: int) -> Sequence[str]:
    """Return whose turn it is in round `number`: A B, then B A, and so on."""
    return names if number % 2 == 0 else names[::-1]


def measure(workers: Workers, cases: dict[str, list[int]], options: argparse.Namespace) -> Iterator[Row]:
    """Yield the times of each version's rounds, or its kernels once. Begin no case after `options.seconds`."""
    end = time.monotonic() + options.seconds
    command, num_rounds = ("profile", 1) if options.profile else ("time", options.rounds)
    for number in range(num_rounds):
        for case, sizes in cases.items():
            if time.monotonic() > end:
                return
            ask(workers, "load", sizes, options.directions)
            for direction in options.directions:
                for name in order(list(workers), number):
                    answer = ask({name: workers[name]}, command, direction)[name]
                    yield {"case": case, "direction": direction, "version": name, "round": number, command: answer}


def summarize(rounds: Sequence[Row], base: str) -> list[Row]:
    """Return the ratios to `base` by case, direction and version, then their geometric means by direction and over all.

    `neighbours` is the geometric mean of the ratios of neighbouring rounds, `error` the standard error of its logarithm.
    """
    found: dict[tuple[str, str, str], list[Row]] = {}
    for one in rounds:
        found.setdefault((one["case"], one["direction"], one["version"]), []).append(one["time"])
    rows = list[Row]()
    for (case, direction, version), own in found.items():
        # the last round has not begun in every version, if it was interrupted
        pairs = list(zip(found.get((case, direction, base), []), own, strict=False))
        if version == base or not pairs:
            continue
        ms, base_ms = (median(one["median_ms"] for one in each) for each in (own, found[case, direction, base]))
        least, base_least = (min(one["min_ms"] for one in each) for each in (own, found[case, direction, base]))
        logs = [math.log(new["median_ms"] / old["median_ms"]) for old, new in pairs]
        ratios = {"medians": ms / base_ms, "minima": least / base_least, "neighbours": math.exp(mean(logs))}
        error = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else None
        rows.append(
            {"case": case, "direction": direction, "version": version, "base_ms": base_ms, **ratios, "error": error, "n": len(logs)}
        )
    return rows + list(_geometric_means(rows))


def _geometric_means(rows: Sequence[Row]) -> Iterator[Row]:
    for version in dict.fromkeys(row["version"] for row in rows):
        for direction in (*dict.fromkeys(row["direction"] for row in rows), "all"):
            some = [row for row in rows if row["version"] == version and direction in (row["direction"], "all")]
            if not some:
                # a later version's turn in this direction has not come
                continue
            means = {key: math.exp(mean(math.log(row[key]) for row in some)) for key in ("medians", "minima", "neighbours")}
            error = None if any(row["error"] is None for row in some) else math.hypot(*(row["error"] for row in some)) / len(some)
            yield {"case": "mean", "direction": direction, "version": version, "base_ms": None, **means, "error": error, "n": len(some)}


def kernel_lines(parts: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the cells of a table: microseconds and launches per call of each kernel in each version, the longest kernel first."""
    for key in dict.fromkeys((part["case"], part["direction"]) for part in parts):
        found = {part["version"]: part["profile"] for part in parts if (part["case"], part["direction"]) == key}
        yield [" ".join(key), *found]
        kernels = {name: [each.get(name, [0.0, 0.0]) for each in found.values()] for name in set().union(*found.values())}
        for name, figures in sorted(kernels.items(), key=lambda item: -max(item[1])[0]):
            yield [name[:60], *(f"{us:.1f} ({launches:g})" for us, launches in figures)]


def ratio_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Yield the cells of a table of ratios."""
    yield from (list(row) for row in rows[:1])
    for row in rows:
        yield [f"{value:.4f}" if isinstance(value, float) else "" if value is None else str(value) for value in row.values()]


def parse_cases(text: str) -> dict[str, list[int]]:
    """Return H, G, D_k, D_v, tokens and compressed blocks of each case in "M:8192,S:32k", or of nsa-bench's "targets"."""
    from nsa_bench.attention.targets import RANDOM, TIMES_MS
    from nsa_bench.cases import Case, parse_lengths, parse_shapes

    targets = (f"{name}:{kibi}k" for name, kibi, selection, *_ in TIMES_MS if selection is RANDOM)
    cases = {}
    for word in targets if text == "targets" else text.split(","):
        name, _, length = word.partition(":")
        (shape,), (tokens,) = parse_shapes(name, "--cases"), parse_lengths(length, "--cases")
        sizes = [shape.num_heads, shape.num_kv_heads, shape.head_dim_qk, shape.head_dim_v, tokens]
        cases[f"{name}:{tokens}"] = [*sizes, Case(shape=shape, seq_len=tokens).num_blocks]
    return cases


def parse_version(word: str) -> tuple[str, str]:
    """Return the name and the path of NAME=DIR[:DIR]."""
    name, _, path = word.partition("=")
    for package in PACKAGES:
        if not any(Path(folder, package).is_dir() for folder in path.split(os.pathsep) if folder):
            raise argparse.ArgumentTypeError(f"{word} has no {package}; give the --target of pip install, or folders of sources")
    return name, path


def parse_count(word: str) -> int:
    """Return an integer of at least 1."""
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"{word!r} is not an integer of at least 1; use 12")
    return int(word)


def main(words: Sequence[str] | None = None) -> int:
    """Compare the versions. Exit with 1 if a call fails, and with 2 for a wrong option."""
    from nsa_bench.cases import find_device, parse_names
    from nsa_bench.errors import OptionError
    from nsa_bench.results import describe, write_json

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("versions", nargs="+", type=parse_version, metavar="NAME=DIR[:DIR]")
    parser.add_argument("--cases", default="targets", help='shapes (P, L, M, S or H/G/D_k/D_v) and tokens: "M:8192,S:32k"')
    parser.add_argument("--directions", default=",".join(DIRECTIONS))
    parser.add_argument("--rounds", type=parse_count, default=12, help="rounds of each version, case and direction")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after this many seconds")
    parser.add_argument("--idle", type=float, default=1.0, help="length of a rest, over the time of the calls before it")
    parser.add_argument("--profile", action="store_true", help="list the kernels instead")
    parser.add_argument("--commit", action="append", default=[], metavar="NAME=HASH", help="commit of a version, to record")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: in Triton's interpreter, for tests")
    options = parser.parse_args(words)
    versions: dict[str, Row] = {name: {"path": path, "commit": None} for name, path in options.versions}
    try:
        if len(versions) < max(2, len(options.versions)):
            raise OptionError("a comparison needs two versions of different names; use OLD=DIR NEW=DIR")
        for name, _, commit in (word.partition("=") for word in options.commit):
            if name not in versions:
                raise OptionError(f"--commit={name}={commit} names no version; use {next(iter(versions))}=HASH")
            versions[name]["commit"] = commit
        cases, options.directions = parse_cases(options.cases), parse_names("--directions", options.directions, DIRECTIONS)
        find_device(options.device)
    except OptionError as error:
        parser.error(str(error))
    record: Row = {"environment": describe(), "command": words or sys.argv[1:], "versions": versions, "rounds": [], "ratios": []}
    workers = {name: start(version["path"], options.device, options.idle) for name, version in versions.items()}
    try:
        for name, about in ask(workers, "describe").items():
            versions[name] |= about
        for one in measure(workers, cases, options):
            record["rounds"].append(one)
            record["ratios"] = [] if options.profile else summarize(record["rounds"], next(iter(versions)))
            print(*list(one.values())[: 4 if options.profile else 5], file=sys.stderr)
            if options.json:
                write_json(options.json, record)
    finally:
        for worker in workers.values():
            worker.kill()
            worker.communicate()
    lines = list(kernel_lines(record["rounds"]) if options.profile else ratio_lines(record["ratios"]))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(serve(*sys.argv[2:]) if sys.argv[1:2] == ["--worker"] else main())
