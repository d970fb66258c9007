"""Two Snakemakes in one folder: the second is refused, and the first one goes on. So is a training that one left."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_data import make_small_data

pytestmark = pytest.mark.serial

SMALL = {"global_batch_size": 8}
WAITS = "#!/bin/sh\ntouch started; while ! [ -e go-on ]; do sleep 0.1; done; exit 1\n"
# Trains until the file `go-on` is there, with the lock that `dflop train` holds.
TRAIN = """
import pathlib, sys, time
from dflop.base import UserError
from dflop.train import sole_use
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(parents=True, exist_ok=True)
try:
    with sole_use(out):
        pathlib.Path("started").touch()
        while not pathlib.Path("go-on").exists():
            time.sleep(0.1)
        (out / "summary.json").touch()
except UserError as error:
    sys.exit(f"dflop: {error}")
"""


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)


def test_a_second_snakemake_in_the_folder_of_a_running_one_is_refused(make_checkout):
    checkout = make_checkout()
    path = checkout.path_with_stubs(dflop=WAITS)
    options = ["--cores", "1", "--retries", "0", "--config", "run=a"]
    first = subprocess.Popen(
        ["snakemake", *options],
        cwd=checkout.folder,
        env=os.environ | {"PATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(checkout.folder / "started", first)
        second = checkout.snakemake(*options, PATH=path)
        assert second.returncode == 1
        assert "Directory cannot be locked" in second.stderr
        assert "Traceback" not in second.stderr
        assert first.poll() is None
    finally:
        (checkout.folder / "go-on").touch()
        first.communicate()


def test_a_training_that_a_killed_snakemake_left_keeps_the_next_one_out_until_it_ends(make_checkout):
    checkout = make_checkout()
    (checkout.folder / "data").mkdir()
    make_small_data(checkout.folder / "data", num_records=12)
    config = checkout.write_config("small.yaml", run="a", data={"sources": [{"path": "data/train.json"}]}, train=SMALL)
    (checkout.folder / "train.py").write_text(TRAIN)
    path = checkout.path_with_stubs()
    stub = checkout.folder / "bin/dflop"
    trains = f'[ "$1" = train ] && exec {sys.executable} train.py "$@"'
    stub.write_text(stub.read_text().replace("#!/bin/sh", f"#!/bin/sh\n{trains}", 1))
    options = ["--cores", "1", "--retries", "0", "--configfile", config]
    first = subprocess.Popen(
        ["snakemake", *options],
        cwd=checkout.folder,
        env=os.environ | {"PATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(checkout.folder / "started", first)
        first.kill()
        first.wait()
        assert "Directory cannot be locked" in checkout.snakemake(*options, PATH=path).stderr
        assert checkout.snakemake(*options, "--unlock", PATH=path).returncode == 0
        refused = checkout.snakemake(*options, PATH=path)
        assert refused.returncode == 1
        assert "FAILED train" in refused.stderr
        assert "trains here; wait for its end, or end it (`kill " in refused.stderr
        assert "Traceback" not in refused.stderr
    finally:
        (checkout.folder / "go-on").touch()
        first.communicate()  # the training has this pipe as well
    last = checkout.snakemake(*options, PATH=path)
    assert last.returncode == 0, last.stderr
    assert (checkout.folder / "results/a/report/index.html").exists()
