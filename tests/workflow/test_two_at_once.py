"""Two Snakemakes in one folder: the second is refused, and the first one goes on."""

import os
import subprocess
import time

import pytest

pytestmark = pytest.mark.serial

WAITS = "#!/bin/sh\ntouch started; while ! [ -e go-on ]; do sleep 0.1; done; exit 1\n"


def test_a_second_snakemake_in_the_folder_of_a_running_one_is_refused(make_checkout):
    checkout = make_checkout()
    path = checkout.path_with_stubs(dflop=WAITS)
    command = ["snakemake", "--cores", "1", "--retries", "0", "--config", "run=a"]
    first = subprocess.Popen(
        command, cwd=checkout.folder, env=os.environ | {"PATH": path}, stderr=subprocess.PIPE, text=True
    )
    try:
        while not (checkout.folder / "started").exists():
            assert first.poll() is None, first.communicate()
            time.sleep(0.1)
        second = checkout.run(*command, PATH=path)
        assert second.returncode == 1
        assert "Directory cannot be locked" in second.stderr
        assert "Traceback" not in second.stderr
        assert first.poll() is None
    finally:
        (checkout.folder / "go-on").touch()
        first.communicate()
