"""dflop, imported once. `served/dflop`, which Snakemake's jobs find in the place of the command, has a fork of this
process do what the command would: most commands take longer to be imported than to run.

Ranks that a command starts are processes of their own, with a Python of their own. Jobs run the real command in
`test_other_users.py` and on a Slurm.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys

# What imports torch is imported by the few commands that need it.
_PRELOADED = ("cli", "costs.fit", "report", "schedule.scheduler", "search", "shapes", "store", "train.launch")


def run(request: dict, descriptors: list[int]) -> None:
    """Become the command; does not return."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["dflop", *request["arguments"]]
    importlib.import_module("dflop.cli").main()
    sys.exit()


def answer(connection: socket.socket) -> None:
    """Run what is asked for and say its exit code. It is killed where nobody waits for it any more."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(b"".join(iter(lambda: connection.recv(1 << 16), b"")))
    if not (command := os.fork()):
        connection.close()
        run(request, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(command)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(connection, select.POLLERR)
    if ended not in dict(poll.poll()):
        os.kill(command, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    connection.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def serve(path: str) -> None:
    for name in _PRELOADED:
        importlib.import_module(f"dflop.{name}")
    gc.collect()
    gc.freeze()  # forks copy none of its pages
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        print("ready", flush=True)
        running = set()
        while True:
            ours, _ = listener.accept()
            running = {other for other in running if os.waitpid(other, os.WNOHANG) == (0, 0)}
            if answering := os.fork():
                running.add(answering)
                ours.close()
            else:
                listener.close()
                answer(ours)


if __name__ == "__main__":
    serve(sys.argv[1])
