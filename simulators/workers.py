"""Worker processes that simulate: each has a share of the environments of a batch.

maniskill_workers.py and humanoidbench_env.py have a class WorkersEnv, the batch in the process that
trains, and a class Share, the rows of it that a worker simulates. Worker k has a contiguous slice
of the rows. Actions, observations, rewards and flags pass through tensors in shared memory: a step
is one short message to each worker and one back. The workers of a process serve all its batches,
of training and of evaluation.

Workers are spawned. A fork would copy the locks of the threads of torch and of the simulator in
whatever state they are, and CUDA does not survive one.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import itertools
import os
import signal
import sys
import traceback
from multiprocessing import resource_tracker

import torch
import torch.multiprocessing as multiprocessing

SECONDS_TO_STEP = 45  # a step or a reset takes milliseconds; then the worker hangs
SECONDS_TO_MAKE = 600  # to import the simulator and to build the scenes
NOT_FOR_WORKERS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent dies


# === 1. In the process that trains ===
class WorkerLost(RuntimeError):
    """A worker is gone or hangs, and its environments with it: the run cannot go on."""


class Worker:
    """A worker process and the pipe to it."""

    def __init__(self, index, num_workers):
        self.name = f"simulation worker {index + 1} of {num_workers}"
        context = multiprocessing.get_context("spawn")
        self.connection, other_end = context.Pipe()
        arguments = (other_end, index, os.getpid())
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        other_end.close()  # only the worker holds it now, so its death closes the pipe

    def send(self, command, batch, content=None):
        try:
            self.connection.send_bytes(f"{command} {batch}".encode())
            if content is not None:
                self.connection.send(content)
        except OSError:
            raise self.lost() from None

    def answer(self, seconds):
        """-> what the worker answers; a RuntimeError, which is not raised, if it failed"""
        try:
            silent_seconds = 0
            # by the second: while the whole run is suspended, time does not count
            while not self.connection.poll(1):
                silent_seconds += 1
                if silent_seconds >= seconds:
                    raise WorkerLost(f"{self.name} has not answered for {seconds} s")
            kind = self.connection.recv_bytes()
            if kind == b"done":
                return None
            content = self.connection.recv()
        except (EOFError, OSError):
            raise self.lost() from None
        if kind == b"failed":
            sentence, trace = content
            error = RuntimeError(sentence)
            error.add_note(f"{self.name}:\n{trace}")
            return error
        return content

    def lost(self):
        self.process.join(timeout=1)  # the pipe closes a moment before the process is gone
        code = self.process.exitcode
        reason = f"ended with code {code}"
        if code is None:
            reason = "does not answer"
        elif code < 0:
            reason = f"was killed by {signal.Signals(-code).name}"
        return WorkerLost(f"{self.name} {reason}")

    def kill(self):
        """It has nothing to save, and a worker that hangs hears no other signal."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class Pool:
    """The workers of this process. Make it in the main thread: on Linux they die with it."""

    def __init__(self, num_workers):
        self.workers = []
        self.batches = itertools.count()
        self.closed_batches = []
        self.is_alive = True
        atexit.register(self.kill)
        resource_tracker.ensure_running()  # its start would unblock the signals again
        # Ctrl-C reaches a whole process group. Workers inherit that these signals are blocked.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_WORKERS)
        try:
            for i in range(num_workers):
                self.workers.append(Worker(i, num_workers))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def call(self, workers, command, batch, contents=None, seconds=SECONDS_TO_STEP):
        """Let workers do something with a batch, at the same time. -> their answers"""
        contents = contents or [None] * len(workers)
        try:
            for worker, content in zip(workers, contents, strict=True):
                worker.send(command, batch, content)
            answers = [worker.answer(seconds) for worker in workers]
        except BaseException:  # also Ctrl-C: it is not known any more who still has to answer
            self.kill()
            raise
        for answer in answers:
            if isinstance(answer, RuntimeError):
                raise answer
        return answers

    def close_unused(self):
        """Batches that were closed, or that nobody refers to any more."""
        while self.closed_batches:
            self.call(self.workers, "close", self.closed_batches.pop())

    def kill(self):
        self.is_alive = False
        for worker in self.workers:
            worker.kill()
        self.workers = []
        atexit.unregister(self.kill)


pools = {}  # number of workers -> pool


def get_pool(num_workers):
    if num_workers not in pools or not pools[num_workers].is_alive:
        pools[num_workers] = Pool(num_workers)
    return pools[num_workers]


def kill_workers():
    """End all workers of this process; its exit does the same."""
    for pool in pools.values():
        pool.kill()
    pools.clear()


# === 2. In a worker ===
def serve(connection, index, trainer):
    """Do what the trainer asks for until its end of the pipe is closed."""
    end_with(trainer)
    if index > 0:  # the first worker speaks for all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    torch.set_num_threads(1)
    shares = {}  # number of a batch -> what this worker has of it
    with contextlib.suppress(EOFError, OSError):  # the trainer is gone
        while True:
            command, batch = connection.recv_bytes().decode().split()
            has_content = command in ("make", "share", "reset")
            content = connection.recv() if has_content else None
            try:
                answer = obey(shares, command, batch, content)
            except Exception as error:
                sentence = " ".join(str(error).split())
                connection.send_bytes(b"failed")
                connection.send((sentence, traceback.format_exc()))
                continue
            if answer is None:
                connection.send_bytes(b"done")
            else:
                connection.send_bytes(b"answer")
                connection.send(answer)


def end_with(trainer):
    """A worker must not outlive the trainer, not even in the middle of a step."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != trainer:  # it died before that
        os._exit(1)


def obey(shares, command, batch, content):
    if command == "make":
        sys.path[:] = content.pop("path")
        os.chdir(content.pop("folder"))
        module = importlib.import_module(content.pop("module"))
        shares[batch] = module.Share(**content)
        return shares[batch].describe()
    if command == "close":
        shares.pop(batch, None)
        gc.collect()  # an environment refers to itself
        return None
    share = shares[batch]
    if command == "step":
        share.step()
    elif command == "restart":
        share.reset(is_seeded=False, options={})
    elif command == "reset":
        share.reset(**content)
    elif command == "share":
        share.take(**content)
    else:
        raise ValueError(f"unknown command {command}")
    return None
