"""hatch.toml: environments that share a virtual environment have equal dependencies."""

import tomllib

from tools.hatch import ROOT


def resolved_environments():
    """Return every environment's settings by name; all but `hatch-test` and detached ones inherit those of `default`."""
    environments = tomllib.loads((ROOT / "hatch.toml").read_text(encoding="utf-8"))["envs"]
    alone = {name for name, settings in environments.items() if name == "hatch-test" or settings.get("detached")}
    return {name: settings if name in alone else environments["default"] | settings for name, settings in environments.items()}


def test_whichever_environment_makes_the_shared_directory_installs_what_the_others_need():
    environments = resolved_environments()
    shared = {name: settings for name, settings in environments.items() if settings["path"] == ".hatch/nsa"}
    assert {"default", "train", "bench", "hatch-test"} <= set(shared)
    for key in ("installer", "skip-install", "workspace", "dependencies", "env-vars"):
        assert all(settings[key] == environments["default"][key] for settings in shared.values()), key
