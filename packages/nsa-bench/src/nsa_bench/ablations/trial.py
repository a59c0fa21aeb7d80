"""One trial, in a process of its own: `python -m nsa_bench.ablations.trial RECIPE OUT` trains and then judges the model."""

import json
import sys
from pathlib import Path

from nsa_train.cli import run_command
from nsa_train.files import written_whole
from nsa_train.run_dir import RunDirectory

JUDGED = "held_out.json"
"""In the run's directory: what `held_out.judge_run` found. The last file that a trial writes."""


def run_trial(recipe: Path, out: Path) -> int:
    """Train `recipe` into `out`, or go on with it, and judge it on its held-out rows; return the exit code of `nsa-train`."""
    code = run_command(["run", str(recipe), "--out", str(out), "--resume", "auto"])
    if code != 0 or not RunDirectory(out).metrics.is_file():
        return code
    from nsa_bench.ablations.held_out import as_json, judge_run
    from nsa_train.parallel.world import local_device
    from nsa_train.settings.recipe import load_config

    config = load_config(str(recipe))
    found = judge_run(RunDirectory(out), config, local_device(config.train.device, 0))
    with written_whole(out / JUDGED) as aside:
        aside.write_text(json.dumps({"by_position": as_json(found)}, allow_nan=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(run_trial(Path(sys.argv[1]), Path(sys.argv[2])))
