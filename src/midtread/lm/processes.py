"""Processes: a run on several hosts, or several processes of one.

The same command is started once per process, and JAX finds the others: through Slurm, Open
MPI or Kubernetes, or by three variables that are set by hand:

    JAX_COORDINATOR_ADDRESS=host0:9876  JAX_NUM_PROCESSES=2  JAX_PROCESS_ID=0

Every process reads the same batch and keeps its rows; the first writes the files of the
run and speaks; checkpoints are written by all. When one dies the others cannot go on: they
stop, say so, and the same command resumes from the last checkpoint.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from midtread.lm.usage import require

HEARTBEAT = 20  # seconds without a sign of life after which a process counts as dead
CLUSTERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")  # both count processes
KUBERNETES = "JOB_COMPLETION_INDEX"
BY_HAND = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")

LOST = (
    "another process of this run stopped, so this one stops too. Start all of them again "
    "with the same command: the run goes on from its last checkpoint"
)


def start(environ: Mapping[str, str] | None = None) -> None:
    """Joins the other processes, if there are any."""
    environ = os.environ if environ is None else environ
    given = [name for name in BY_HAND if name in environ]
    clusters = [c for c in CLUSTERS if int(environ.get(c, "1")) > 1]
    if not given and not clusters and KUBERNETES not in environ:
        return
    if jax.distributed.is_initialized():
        return
    options: dict = {}
    if given and not clusters:
        missing = [name for name in BY_HAND if name not in environ]
        require(
            not missing,
            f"{given[0]} is set, but not {', '.join(missing)}: set all three.",
        )
        options = {
            "num_processes": _number(environ, "JAX_NUM_PROCESSES"),
            "process_id": _number(environ, "JAX_PROCESS_ID"),
            "cluster_detection_method": "deactivate",
        }
        require(
            options["process_id"] < options["num_processes"],
            f"JAX_PROCESS_ID={options['process_id']} with JAX_NUM_PROCESSES="
            f"{options['num_processes']}: numbers begin at 0.",
        )
    jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT, **options)


def _number(environ: Mapping[str, str], name: str) -> int:
    """Reads a whole number from a variable of the environment."""
    text = environ[name]
    require(text.isdigit(), f"{name}={text} is not a number.")
    return int(text)


def is_first() -> bool:
    """Returns whether this is the process that writes files and prints."""
    return jax.process_index() == 0


def together(where: str) -> None:
    """Waits until every process has come to this point."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(where)


def agree(number: int) -> int:
    """Returns the number that the first process has."""
    if jax.process_count() == 1:
        return number
    from jax.experimental import multihost_utils

    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


SIGNS = ("gloo", "connection", "heartbeat", "coordination", "unavailable", "peer")


def is_loss_of_another(error: BaseException | None) -> bool:
    """Returns whether an error, or what caused it, is the runtime's about a process that is
    gone."""
    while error is not None and jax.process_count() > 1:
        text = str(error).lower()
        runtime = isinstance(error, jax.errors.JaxRuntimeError)
        if runtime and any(sign in text for sign in SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False


WITNESS = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
if sys.stdin.read() != "done":
    sys.stderr.write(sys.argv[1])
"""


@contextlib.contextmanager
def witness() -> Iterator[None]:
    """Prints a last line even if JAX aborts this process, as it does when another stops
    answering: a second process waits to hear that all went well."""
    if jax.process_count() == 1:
        yield
        return
    last = f"error: this process ended before its time, most likely because {LOST}.\n"
    with subprocess.Popen(
        [sys.executable, "-c", WITNESS, last], stdin=subprocess.PIPE, text=True
    ) as beside:
        try:
            yield
        finally:  # an error prints its own message
            beside.communicate("done")


def leave(code: int) -> None:
    """Ends this process without waiting for the ones that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
