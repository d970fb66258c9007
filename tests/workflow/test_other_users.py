"""The workflow's first rules for users that own little: no root, no home folder."""

import os
import shutil
import subprocess

import pytest
from small_data import make_small_data

pytestmark = pytest.mark.serial

SMALL = {"global_batch_size": 8}
NOBODY = 65534
# Another user's rights, but may read what the user who runs the tests may: Python may lie in that one's home folder.
AS_NOBODY = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
AS_NOBODY += ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
WITHOUT_HOME = ("env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME", "-u", "XDG_CACHE_HOME")


def test_nobody_without_a_home_profiles_a_dataset(make_checkout):
    if not shutil.which("setpriv") or subprocess.run([*AS_NOBODY, "true"], capture_output=True).returncode:
        pytest.skip("nobody here may become another user")
    checkout = make_checkout()
    (checkout.folder / "data").mkdir()
    make_small_data(checkout.folder / "data", num_records=12)
    config = checkout.write_config("small.yaml", run="a", data={"sources": [{"path": "data/train.json"}]}, train=SMALL)
    for folder, _, names in os.walk(checkout.folder):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    command = ("snakemake", "--cores", "1", "--until", "merge_shapes", "--configfile", config)
    done = checkout.run(*AS_NOBODY, *WITHOUT_HOME, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    shapes = checkout.folder / "results/a/shapes.duckdb"
    assert (shapes.stat().st_uid, shapes.stat().st_size > 0) == (NOBODY, True)
