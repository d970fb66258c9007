"""A private Slurm of virtual nodes on loopback, from Debian's packages, in a folder of its own.

Nothing outside of the folder is read or written, and what is stopped is what was started. Every setting is there
because something fails without it.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
_PROGRAMS = ("slurmctld", "slurmd", "squeue", "munged")
_WRAPPED = ("srun", "sbatch", "squeue", "sinfo", "scontrol", "scancel", "sacct", "sacctmgr")

_CONF = """\
ClusterName=mini
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/run/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
MinJobAge=300
MailProg=/bin/true
DefMemPerCPU=100
KillWait=5
SlurmdParameters=config_overrides
PartitionName=main Nodes=node[1-{num_nodes}] Default=YES MaxTime=INFINITE State=UP
"""


def what_is_missing() -> list[str]:
    """Programs of Slurm that are not installed."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    return [name for name in _PROGRAMS if not shutil.which(name, path=path)]


class MiniSlurm:
    """`num_nodes` nodes of `num_cpus` CPUs, running while the object is used as a context."""

    def __init__(self, folder: Path, *, num_nodes: int = 2, num_cpus: int = 4) -> None:
        self._folder, self._num_nodes = folder, num_nodes
        self._started: list[subprocess.Popen] = []
        for name in ("state", "log", "run", "bin", *(f"spool/node{n + 1}" for n in range(num_nodes))):
            (folder / name).mkdir(parents=True)
        for path in (folder, *folder.iterdir()):
            path.chmod(0o755)  # munged takes no socket below a folder that others cannot enter
        port = _free_port()
        conf = _CONF.format(
            host=socket.gethostname().split(".")[0],
            port=port,
            user=_name_of_user(),
            folder=folder,
            num_nodes=num_nodes,
        )
        for number in range(1, num_nodes + 1):
            conf += (
                f"NodeName=node{number} NodeHostname=node{number} NodeAddr=127.0.0.1 Port={_free_port()} "
                f"CPUs={num_cpus} RealMemory=8000\n"
            )
        (folder / "slurm.conf").write_text(conf)
        (folder / "plugstack.conf").touch()
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        # Jobs' steps drop SLURM_CONF before they call srun.
        for name in _WRAPPED:
            wrapper = folder / "bin" / name
            wrapper.write_text(f'#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec /usr/bin/{name} "$@"\n')
            wrapper.chmod(0o755)

    @property
    def path(self) -> str:
        """A PATH whose Slurm commands are this cluster's."""
        return f"{self._folder}/bin:{os.environ['PATH']}"

    def __enter__(self) -> "MiniSlurm":
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def ask(self, *command: str) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, env=os.environ | {"PATH": self.path}
        )
        return done.stdout

    def ended_jobs(self) -> list[dict[str, str]]:
        """What Slurm wrote of each job that ended: JobId, Name, JobState, StartTime, EndTime, NodeList …"""
        path = self._folder / "log/jobcomp.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]

    def _start(self) -> None:
        key = self._folder / "run/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        run = self._folder / "run"
        self._run(
            "munged",
            *("-F", "--force", f"--key-file={key}", f"--socket={run}/munge.socket", f"--pid-file={run}/munged.pid"),
            *(f"--log-file={run}/munged.log", f"--seed-file={run}/seed"),
        )
        _wait_until((run / "munge.socket").exists, 60, self._said)
        self._run("slurmctld", "-D")
        for number in range(1, self._num_nodes + 1):
            self._run("slurmd", "-D", "-N", f"node{number}")
        _wait_until(
            lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == str(self._num_nodes), 60, self._said
        )

    def _run(self, program: str, *arguments: str) -> None:
        environment = os.environ | {"SLURM_CONF": str(self._folder / "slurm.conf")}
        environment["PATH"] += ":/usr/sbin:/sbin"
        with (self._folder / f"log/{program}{len(self._started)}.out").open("w") as out:
            self._started.append(
                subprocess.Popen([program, *arguments], stdout=out, stderr=out, env=environment, start_new_session=True)
            )

    def _stop(self) -> None:
        # Jobs' own processes end with the jobs, not with slurmd.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self.ask("scancel", f"--user={_name_of_user()}")
            _wait_until(lambda: not self.ask("squeue", "-h").strip(), 15, str, fails=False)
        for process in reversed(self._started):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)

    def _said(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-2000:]}"
            for path in sorted((self._folder / "log").iterdir())
        )


def _wait_until(is_so, seconds: float, said, *, fails: bool = True) -> None:
    """Look again until it is so, at most so long; `said` is for the error's text."""
    last = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > last:
            if fails:
                raise TimeoutError(f"not after {seconds:.0f} s:\n{said()}")
            return
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _name_of_user() -> str:
    return subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
