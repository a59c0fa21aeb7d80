"""The built wheels as a user installs them: each package complete, its version, its entry points and its commands."""

import json
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} exited {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def project(package):
    return tomllib.loads((package / "pyproject.toml").read_text())["project"]


def module_of(package):
    return package.name.replace("-", "_")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """Build every package once; give the wheels by package name."""
    folder = tmp_path_factory.mktemp("dist")
    for package in PACKAGES:
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=package, check=True, capture_output=True
        )
    return {package.name: next(folder.glob(f"{module_of(package)}-*.whl")) for package in PACKAGES}


@pytest.fixture(scope="session")
def clean(wheels, tmp_path_factory):
    """Make an environment of the wheels, without anything else of this tree; return its directory of commands.

    The dependencies come from a path in which Python follows no `.pth` file, so that the editable installs
    of the running environment are invisible.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", *wheels.values())
    library = next(folder.glob("lib/python*/site-packages"))
    (library / "lent.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin"


@pytest.fixture(scope="session")
def installed(clean):
    """Return the report of tools/check_installed.py in the clean environment."""
    return json.loads(run(clean / "python", ROOT / "tools" / "check_installed.py"))


@each_package
def test_a_wheel_imports_from_where_it_was_installed(package, clean, installed):
    assert Path(installed[package.name]["location"]).is_relative_to(clean.parent)


@each_package
def test_a_version_is_the_one_that_about_states(package, installed):
    about = (package / "src" / module_of(package) / "__about__.py").read_text()
    assert f'__version__ = "{installed[package.name]["version"]}"' in about


@each_package
def test_every_declared_entry_point_loads(package, installed):
    declared = project(package)
    groups = {"console_scripts": declared.get("scripts", {}), **declared.get("entry-points", {})}
    expected = {f"{group}: {name}" for group, names in groups.items() for name in names}
    assert set(installed[package.name]["entry_points"]) == expected


@each_package
def test_a_wheel_holds_every_file_of_its_source(package, wheels):
    source = package / "src"
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert f"{module_of(package)}/py.typed" in files
    assert files <= set(zipfile.ZipFile(wheels[package.name]).namelist())


@each_package
def test_a_wheel_holds_the_licence_of_the_tree(package, wheels):
    archive = zipfile.ZipFile(wheels[package.name])
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
    assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


@each_package
def test_a_dependent_caps_every_package_of_this_tree(package):
    extras = project(package).get("optional-dependencies", {}).values()
    ours = [line for lines in (project(package)["dependencies"], *extras) for line in lines if line.startswith("nsa-")]
    assert all("<" in line for line in ours)


def test_the_recipes_travel_in_the_wheel(wheels):
    files = zipfile.ZipFile(wheels["nsa-train"]).namelist()
    assert {"nsa_train/recipes/demo.toml", "nsa_train/recipes/showcase.toml"} <= set(files)


def test_the_trainer_is_an_extra_of_the_bench(wheels):
    archive = zipfile.ZipFile(wheels["nsa-bench"])
    metadata = archive.read(next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))).decode()
    assert [line for line in metadata.splitlines() if "nsa-train" in line and line.startswith("Requires")] == [
        "Requires-Dist: nsa-train<0.2,>=0.1; extra == 'train'"
    ]


@pytest.mark.parametrize("command", ["nsa-train", "nsa-bench"])
def test_a_command_starts_and_names_its_verbs(command, clean):
    assert {"nsa-train": "sample", "nsa-bench": "backends"}[command] in run(clean / command, "--help")
