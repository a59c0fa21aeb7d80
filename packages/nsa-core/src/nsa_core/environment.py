"""The origin of a result: time, machine, versions and commit; and Ctrl-C while a command loads. Importing this module does not load torch."""

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

OURS = "nsa-"
INTERRUPTED = 130
"""The exit code after Ctrl-C, by convention of shells: 128 plus the number of SIGINT."""


def end_quietly_while_loading(*modules: str) -> None:
    """Let Ctrl-C end this process at once, with exit code 130 and no message, while one of `modules` is imported.

    At other times Ctrl-C raises KeyboardInterrupt, as Python's own handler does, which this call replaces. While torch is imported, C code in torch
    would discard that error.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if any(map(is_loading, modules)):
            os._exit(INTERRUPTED)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)


def is_loading(module: str) -> bool:
    """Return True while `module` is imported."""
    return bool(getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False))


def describe_environment(packages: Iterable[str], folder: Path) -> dict[str, Any]:
    """Return what `nsa-bench env` prints, as JSON values; a value that is not known is None.

    `compute_capability` is text such as "9.0", `gpu` the first device's name, and `cuda` the version for which torch was built. `commit` is
    the commit of `folder`, with `-dirty` if files differ from it. The entry `packages` has the versions of those `packages` that are installed.
    """
    import torch

    has_gpu = torch.cuda.is_available()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(0) if has_gpu else None,
        "num_gpus": torch.cuda.device_count(),
        "compute_capability": dotted(torch.cuda.get_device_capability(0)) if has_gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": torch.version.cuda,
        "commit": commit_of(folder),
        "packages": {name: found for name in packages if (found := version_of(name))},
    }


def dotted(capability: tuple[int, int]) -> str:
    """Return a compute capability as text: "9.0"."""
    return ".".join(map(str, capability))


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed.

    For a package of this project, the version comes from its source, so it is also known in a checkout that is not installed.
    """
    if package.startswith(OURS):
        with suppress(ModuleNotFoundError):
            return str(import_module(f"{package.replace('-', '_')}.__about__").__version__)
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def version_lines(packages: Iterable[str]) -> str:
    """Return the output of a command's `--version`: a line for each of `packages`, in order, then Python and the platform."""
    lines = (f"{name} {version_of(name) or 'not installed'}" for name in packages)
    return "\n".join([*lines, f"Python {platform.python_version()}", platform.platform()])


def commit_of(folder: Path) -> str | None:
    """Return the git commit of `folder`, with `-dirty` if files differ from it.

    None if no file of `folder` is tracked: outside a checkout, or in an environment inside somebody else's.
    """

    def told(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return result.stdout.strip() if result.returncode == 0 else ""

    try:
        return (told("ls-files", "--", ".") and told("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")) or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """Return the processor's name, on Linux from `cpuinfo`, because the platform module does not know it there; None if it is unknown."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or None
