"""tools/hatch.py: when it installs, with which pip, and what it refuses."""

import importlib.util
import os
import subprocess
import sys
import tomllib
import zipfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from tools import hatch


@pytest.fixture
def tool(tmp_path):
    return tmp_path / ".hatch" / "tool"


@pytest.fixture
def pip_calls(monkeypatch):
    """Stand in for pip: record every command line and succeed."""
    calls = []
    monkeypatch.setattr(subprocess, "call", lambda command, **_: calls.append(command) or 0)
    return calls


@pytest.fixture
def index():
    """Serve `pages` (path to bytes) on this machine's loopback address; yield its address and `pages`."""
    pages = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = pages.get(self.path)
            self.send_response(200 if body is not None else 404)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple", pages
        server.shutdown()


def test_an_install_leaves_a_stamp_and_is_not_repeated(tool, pip_calls):
    assert not hatch.is_installed(tool)
    hatch.install(tool)
    assert hatch.is_installed(tool)
    assert pip_calls[0][-2:] == [str(tool / "site"), hatch.HATCH]


def test_another_pin_is_installed_anew(tool, pip_calls, monkeypatch):
    hatch.install(tool)
    monkeypatch.setattr(hatch, "HATCH", "hatch==99")
    assert not hatch.is_installed(tool)


def test_an_interrupted_install_leaves_no_stamp_and_its_rest_is_removed(tool, pip_calls, monkeypatch):
    def interrupt(command, **_):
        (tool / "site").mkdir()
        (tool / "site" / "half").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "call", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hatch.install(tool)
    assert not hatch.is_installed(tool)
    hatch.install(tool)
    assert not (tool / "site" / "half").exists()


def test_a_failing_pip_is_reported_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(subprocess, "call", lambda *_, **__: 1)
    assert hatch.main(["--version"], root=tmp_path) == 1
    assert "hatch.py: pip could not install hatch==" in capsys.readouterr().err


def test_the_pip_of_this_python_is_used(tool, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert hatch.pip_command(tool) == [sys.executable, "-m", "pip"]


def test_without_pip_the_pinned_wheel_is_fetched_and_run_as_it_is(tool, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(hatch, "fetch_pip", lambda index: b"the wheel")
    tool.mkdir(parents=True)
    assert hatch.pip_command(tool) == [sys.executable, str(tool / hatch.PIP_WHEEL / "pip")]
    assert (tool / hatch.PIP_WHEEL).read_bytes() == b"the wheel"


def test_the_wheel_comes_from_the_address_on_the_index_page(index, monkeypatch):
    address, pages = index
    pages["/simple/pip/"] = f'<a href="pip-1.0-py3-none-any.whl#sha256=0">\n<a href="../../files/{hatch.PIP_WHEEL}#sha256=1">'.encode()
    pages[f"/files/{hatch.PIP_WHEEL}"] = b"abc"
    monkeypatch.setattr(hatch, "PIP_SHA256", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    assert hatch.fetch_pip(address) == b"abc"


def test_other_bytes_than_the_pinned_ones_are_refused(index):
    address, pages = index
    pages["/simple/pip/"] = f'<a href="{hatch.PIP_WHEEL}">'.encode()
    pages[f"/simple/pip/{hatch.PIP_WHEEL}"] = b"something else"
    with pytest.raises(hatch.SetUpError, match="has sha256 .* expected"):
        hatch.fetch_pip(address)


@pytest.mark.parametrize(("page", "message"), [(b"<html></html>", "does not list pip-"), (None, "could not be read")])
def test_an_index_without_the_wheel_ends_in_what_to_install(index, page, message):
    address, pages = index
    if page is not None:
        pages["/simple/pip/"] = page
    with pytest.raises(hatch.SetUpError, match=f"{message}.*apt install python3-pip"):
        hatch.fetch_pip(address)


def test_the_index_is_the_one_that_pip_is_set_to_use(tmp_path, monkeypatch):
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://mirror.example/simple\n")
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    assert hatch.package_index() == "https://mirror.example/simple"
    monkeypatch.setenv("PIP_INDEX_URL", "https://other.example/simple")
    assert hatch.package_index() == "https://other.example/simple"


def test_an_older_python_is_refused_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hatch, "MINIMUM_PYTHON", (99, 0))
    assert hatch.main(["--version"], root=tmp_path) == 1
    assert "needs Python 3.11 or newer" in capsys.readouterr().err


def run_fake_hatch(tool, source, *arguments, **environment):
    """Run tools/hatch.py with `source` instead of hatch."""
    site = tool / "site" / "hatch"
    site.mkdir(parents=True)
    (site / "__main__.py").write_text(source)
    (tool / "stamp").write_text(hatch.wanted_stamp())
    program = "import sys; from pathlib import Path; from tools import hatch; hatch.main(sys.argv[2:], root=Path(sys.argv[1]))"
    command = [sys.executable, "-c", program, str(tool.parent.parent), *arguments]
    environment = {**os.environ, **environment}
    return subprocess.run(command, cwd=hatch.ROOT, env=environment, capture_output=True, text=True, check=False)


def test_arguments_and_exit_code_pass_through(tool):
    done = run_fake_hatch(tool, "import sys\nprint(sys.argv[1:])\nsys.exit(7)\n", "run", "train:demo", "--set", "a=b c")
    assert (done.returncode, done.stdout.strip()) == (7, "['run', 'train:demo', '--set', 'a=b c']")


def test_settings_of_pip_pass_through(tool):
    index = "https://download.pytorch.org/whl/cpu"
    done = run_fake_hatch(tool, "import os\nprint(os.environ['PIP_EXTRA_INDEX_URL'])\n", PIP_EXTRA_INDEX_URL=index)
    assert done.stdout.strip() == index


@pytest.mark.parametrize(("asked", "interactive"), [({}, "false"), ({"HATCH_INTERACTIVE": "true"}, "true")])
def test_the_terminal_is_left_to_pip_unless_the_spinner_is_asked_for(tool, monkeypatch, asked, interactive):
    monkeypatch.delenv("HATCH_INTERACTIVE", raising=False)
    done = run_fake_hatch(tool, "import os\nprint(os.environ['HATCH_INTERACTIVE'])\n", **asked)
    assert done.stdout.strip() == interactive


def test_what_hatch_installs_is_shown(tmp_path):
    if not hatch.is_installed(hatch.ROOT / ".hatch" / "tool"):
        pytest.skip("there is no hatch under .hatch/tool: start the tests with tools/hatch.py")
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "print('it runs')\n")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    verbose = tomllib.loads((hatch.ROOT / "hatch.toml").read_text())["envs"]["default"]["env-vars"]["PIP_VERBOSE"]
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "hatch.toml").write_text(
        f'[envs.default]\ninstaller = "pip"\nskip-install = true\npath = ".venv"\ndependencies = ["tiny @ {wheel.as_uri()}"]\n'
        f'[envs.default.env-vars]\nPIP_VERBOSE = "{verbose}"\n'
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HATCH_", "PIP_"))}
    command = [sys.executable, hatch.ROOT / "tools" / "hatch.py", "run", "python", "-m", "tiny"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "Successfully installed tiny-1.0" in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "it runs"
