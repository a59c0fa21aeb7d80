"""Run the pinned hatch, installing it under `.hatch/tool` first: `python3 tools/hatch.py run train:demo`.

Needs only Python 3.11: hatch is installed in a separate directory (`pip install --target`), which PEP 668 allows and
which needs no virtual environment. If Python has no pip, as on a bare Debian, a pinned pip wheel is fetched.
"""

from __future__ import annotations

import configparser
import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import ssl
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

HATCH = "hatch==1.18.2"
PIP_WHEEL = "pip-26.3-py3-none-any.whl"
PIP_SHA256 = "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"
PYPI = "https://pypi.org/simple"
MINIMUM_PYTHON = (3, 11)

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module('hatch', run_name='__main__', alter_sys=True)"


class SetUpError(Exception):
    """hatch cannot be installed; the message says what to do."""


def wanted_stamp() -> str:
    """Return the stamp of a usable install: the pin, and the Python for which its compiled parts were built."""
    return f"{HATCH} on {sys.implementation.cache_tag} {sysconfig.get_platform()}"


def is_installed(tool: Path) -> bool:
    """Return whether `tool` holds a complete install of the pinned hatch for this Python."""
    stamp = tool / "stamp"
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted_stamp()


def install(tool: Path) -> None:
    """Replace the content of `tool` by the pinned hatch; the stamp comes last, so that an interrupted install is redone."""
    print(f"Installing {HATCH} into {tool}", file=sys.stderr, flush=True)
    shutil.rmtree(tool, ignore_errors=True)
    tool.mkdir(parents=True)
    command = [*pip_command(tool), "install", "--target", str(tool / "site"), HATCH]
    # a user-wide pip setting that demands a virtual environment or a user install contradicts --target
    settings = {"PIP_REQUIRE_VIRTUALENV": "0", "PIP_USER": "0", "PIP_ROOT_USER_ACTION": "ignore", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if subprocess.call(command, env={**os.environ, **settings}) != 0:
        raise SetUpError(f"pip could not install {HATCH} (its message is above); check the network or PIP_INDEX_URL and run this again")
    (tool / "stamp").write_text(wanted_stamp(), encoding="utf-8")


def pip_command(tool: Path) -> list[str]:
    """Return the start of a pip command line: this Python's own pip, else the pinned wheel fetched into `tool`."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    wheel = tool / PIP_WHEEL
    wheel.write_bytes(fetch_pip(package_index()))
    # a wheel is a zip file, and Python runs a package inside one
    return [sys.executable, str(wheel / "pip")]


def package_index() -> str:
    """Return the package index that pip is set to use: PIP_INDEX_URL, else `index-url` of a pip.conf, else PyPI."""
    config = configparser.RawConfigParser()
    config_home = Path(os.environ.get("XDG_CONFIG_HOME", Path.home() / ".config"))
    with contextlib.suppress(configparser.Error):
        config.read(
            ["/etc/pip.conf", Path.home() / ".pip/pip.conf", config_home / "pip/pip.conf", os.environ.get("PIP_CONFIG_FILE", os.devnull)]
        )
    return os.environ.get("PIP_INDEX_URL") or str(config.get("global", "index-url", fallback=PYPI))


def fetch_pip(index: str) -> bytes:
    """Return the pinned pip wheel as `index` serves it.

    Raises: SetUpError if the index cannot be reached, does not list the wheel, or serves other bytes than the pinned digest.
    """
    page_url = f"{index.rstrip('/')}/pip/"
    try:
        link = find_link(download(page_url).decode(), PIP_WHEEL)
        wheel = download(urllib.parse.urljoin(page_url, link)) if link else b""
    except (urllib.error.URLError, OSError) as error:
        raise SetUpError(
            f"this Python has no pip, and {page_url} could not be read ({error}); install one, for example: apt install python3-pip"
        ) from error
    if not link:
        raise SetUpError(
            f"this Python has no pip, and {page_url} does not list {PIP_WHEEL}; install one, for example: apt install python3-pip"
        )
    found = hashlib.sha256(wheel).hexdigest()
    if found != PIP_SHA256:
        raise SetUpError(
            f"{PIP_WHEEL} from {page_url} has sha256 {found}, expected {PIP_SHA256}; set PIP_INDEX_URL to an index that you trust"
        )
    return wheel


def download(url: str) -> bytes:
    """Return the body at `url`, without checking the certificate.

    A bare Debian has no certificate store. The pinned digest verifies this download, and pip, which has its own
    certificates, checks all later ones.
    """
    context = ssl._create_unverified_context()
    with urllib.request.urlopen(url, timeout=60, context=context) as response:
        return bytes(response.read())


def find_link(page: str, name: str) -> str | None:
    """Return the address of file `name` on a PEP 503 index page, relative or absolute, or None if it is not listed."""
    match = re.search(rf'href="([^"#]*\b{re.escape(name)})[#"]', page)
    return match.group(1) if match else None


def run_hatch(tool: Path, arguments: list[str]) -> int:
    """Run the hatch in `tool` instead of this process (on Windows: below it) and return its exit code."""
    # hatch's spinner would hide pip's progress bars
    os.environ.setdefault("HATCH_INTERACTIVE", "false")
    # -P keeps the working directory and tools/ off the path, where this file would shadow the real hatch
    command = [sys.executable, "-P", "-c", LAUNCH, str(tool / "site"), *arguments]
    if os.name != "nt":
        os.execv(sys.executable, command)
    return subprocess.call(command)


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Install the pinned hatch if it is missing, then run it with `arguments` and return its exit code."""
    if sys.version_info < MINIMUM_PYTHON:
        print("hatch.py needs Python 3.11 or newer; this is " + sys.version.split()[0], file=sys.stderr)
        return 1
    tool = root / ".hatch" / "tool"
    if not is_installed(tool):
        try:
            install(tool)
        except SetUpError as error:
            print(f"hatch.py: {error}", file=sys.stderr)
            return 1
    return run_hatch(tool, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
