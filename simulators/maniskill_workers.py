"""Worker processes for simulators/maniskill_cpu.py: each simulates a share of the environments.

    from simulators import maniskill_cpu
    envs = maniskill_cpu.make("PickCube-v1", num_envs=64, num_workers=4)
    python -m simulators.maniskill_workers StackCube-v1    # steps per second with 0, 2, ... workers

SAPIEN keeps Python's lock while it simulates, so a second core needs a second process. Worker k
owns a contiguous slice of the rows of a batch and runs maniskill_cpu.py on it. Actions,
observations, rewards and flags pass through tensors in shared memory: a step is one short message
to each worker and one back. The workers of a process serve all its batches, of training and of
evaluation.

Environment i does, to the bit, what it does in one process. It starts with its own seed and draws
from its own stream, and no row depends on another one. Two things are outside of this promise:
a task of your own that draws from torch's global generator during a step, and entries of `info`
that are not one value per environment, which are left out.

Workers are spawned. A fork would copy the locks of torch's and SAPIEN's threads in whatever state
they are, and CUDA does not survive one.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import itertools
import logging
import os
import signal
import statistics
import sys
import time
import traceback
import warnings
import weakref
from multiprocessing import resource_tracker

import gymnasium as gym
import numpy as np
import torch
import torch.multiprocessing as multiprocessing

SECONDS_TO_STEP = 45  # a step or a reset takes milliseconds; then the worker hangs
SECONDS_TO_MAKE = 600  # to import ManiSkill and to build the scenes
FIRST_SEED = 2022  # ManiSkill builds environment i of a batch with the seed 2022 + i
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


def seeds_of_rows(seed, num_envs):
    """One seed per environment; from a single number ManiSkill makes the others like this."""
    seeds = np.atleast_1d(seed).tolist()
    if len(seeds) == 1 and num_envs > 1:
        seeds += np.random.RandomState(seeds[0]).randint(2**31, size=num_envs - 1).tolist()
    return seeds


class WorkersEnv(gym.Env):
    """A batch that workers simulate, with the interface of ManiSkill's batched environments.

    A reset of some environments returns the rows of the others as the last step showed them.
    """

    device = torch.device("cpu")
    reconfiguration_freq = 0

    def __init__(self, env_id, num_envs, num_workers, env_module, **kwargs):
        self.num_envs = num_envs
        self.pool = get_pool(num_workers)
        self.pool.close_unused()
        self.batch = next(self.pool.batches)
        self.workers = []
        self.slices = []  # of the rows, one per worker
        contents = []
        for k, worker in enumerate(self.pool.workers):
            start = num_envs * k // num_workers
            stop = num_envs * (k + 1) // num_workers
            if start == stop:  # fewer environments than workers
                continue
            self.workers.append(worker)
            self.slices.append(slice(start, stop))
            contents.append(
                {
                    "env_id": env_id,
                    "env_module": env_module,
                    "rows": range(start, stop),
                    "kwargs": kwargs,
                    "path": sys.path,
                    "folder": os.getcwd(),
                    "torch_seed": torch.initial_seed(),
                }
            )
        # closes it in the workers before they make the next one
        self.finalizer = weakref.finalize(self, self.pool.closed_batches.append, self.batch)
        answers = self.call("make", contents, SECONDS_TO_MAKE)
        example = answers[0]
        self.single_observation_space = example["observation_space"]
        self.single_action_space = example["action_space"]
        self.observation_space = gym.vector.utils.batch_space(
            self.single_observation_space, num_envs
        )
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.info = {}
        for name, (dtype, shape) in example["info"].items():
            self.info[name] = torch.zeros(num_envs, *shape, dtype=dtype)
        self.tensors = {
            "action": torch.zeros(self.action_space.shape),
            "obs": torch.zeros(num_envs, *self.single_observation_space.shape),
            "reward": torch.zeros(num_envs),
            "terminated": torch.zeros(num_envs, dtype=torch.bool),
            "truncated": torch.zeros(num_envs, dtype=torch.bool),
            "restart": torch.zeros(num_envs, dtype=torch.bool),
            "seed": torch.zeros(num_envs, dtype=torch.int64),
        }
        for tensor in (*self.tensors.values(), *self.info.values()):
            tensor.share_memory_()
        self.call("share", [{"tensors": self.tensors, "info": self.info}] * len(self.workers))

    def call(self, command, contents=None, seconds=SECONDS_TO_STEP):
        return self.pool.call(self.workers, command, self.batch, contents, seconds)

    def shown_info(self):
        """A copy: the tensors of earlier steps must not change."""
        info = {name: values.clone() for name, values in self.info.items()}
        self.elapsed_steps = info["elapsed_steps"]
        return info

    def step(self, action):
        self.tensors["action"].copy_(torch.as_tensor(action))
        self.call("step")
        obs = self.tensors["obs"].clone()
        reward = self.tensors["reward"].clone()
        terminated = self.tensors["terminated"].clone()
        truncated = self.tensors["truncated"].clone()
        return obs, reward, terminated, truncated, self.shown_info()

    def reset(self, *, seed=None, options=None):
        options = dict(options or {})
        restart = self.tensors["restart"]
        restart.zero_()
        restart[options.pop("env_idx", slice(None))] = True
        if seed is None and not options:  # an episode ended: as fast as a step
            affected = []
            for worker, rows in zip(self.workers, self.slices, strict=True):
                if restart[rows].any():
                    affected.append(worker)
            self.pool.call(affected, "restart", self.batch)
        else:
            is_seeded = seed is not None
            if is_seeded:
                self.tensors["seed"].copy_(torch.tensor(seeds_of_rows(seed, self.num_envs)))
            contents = [{"is_seeded": is_seeded, "options": options}] * len(self.workers)
            # with a new scene or without, which may take long
            self.call("reset", contents, SECONDS_TO_MAKE if options else SECONDS_TO_STEP)
        info = self.shown_info()
        info["reconfigure"] = options.get("reconfigure", False)
        return self.tensors["obs"].clone(), info

    def close(self):
        self.finalizer()


# === 2. In a worker ===
def serve(connection, index, trainer):
    """Do what the trainer asks for until its end of the pipe is closed."""
    end_with(trainer)
    if index > 0:  # the first worker speaks for all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    warnings.filterwarnings("ignore", "Failed to find system libvulkan")  # nothing is rendered
    logging.getLogger("mani_skill").setLevel("ERROR")  # its hints are for authors of tasks
    torch.set_num_threads(1)
    shares = {}  # number of a batch -> what this worker has of it
    with contextlib.suppress(EOFError, OSError):  # the trainer is gone
        while True:
            command, batch = connection.recv_bytes().decode().split()
            has_content = command in ("make", "share", "reset")
            content = connection.recv() if has_content else None
            try:
                answer = obey(shares, command, batch, content, index)
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


def obey(shares, command, batch, content, index):
    if command == "make":
        torch.manual_seed(content.pop("torch_seed") + index)
        shares[batch] = Share(**content)
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
    else:
        share.take(**content)
    return None


class Share:
    """The rows of a batch that this worker simulates."""

    def __init__(self, env_id, env_module, rows, kwargs, path, folder):
        sys.path[:] = path
        os.chdir(folder)
        from simulators import maniskill_cpu

        if env_module:
            importlib.import_module(env_module)
        self.rows = rows
        self.env = maniskill_cpu.make_env(env_id, len(rows), **kwargs)
        is_batched = not isinstance(self.env.unwrapped, maniskill_cpu.SeparateEnvs)
        seeds = [FIRST_SEED + row if is_batched else FIRST_SEED for row in rows]
        # the scenes of later rows were built with the seeds of the first ones
        options = {"reconfigure": is_batched and rows.start > 0}
        self.obs, self.info = self.env.reset(seed=seeds, options=options)

    def describe(self):
        """What the trainer must know to make the tensors."""
        info = {}
        for name, values in self.info.items():
            if torch.is_tensor(values) and values.shape[:1] == (len(self.rows),):
                info[name] = (values.dtype, values.shape[1:])
        return {
            "observation_space": self.env.get_wrapper_attr("single_observation_space"),
            "action_space": self.env.get_wrapper_attr("single_action_space"),
            "info": info,
        }

    def take(self, tensors, info):
        """Keep the own rows of the tensors in shared memory."""
        rows = slice(self.rows.start, self.rows.stop)
        self.tensors = {name: values[rows] for name, values in tensors.items()}
        self.shared_info = {name: values[rows] for name, values in info.items()}
        self.show(self.obs, self.info)

    def show(self, obs, info):
        self.tensors["obs"].copy_(obs)
        for name, shared in self.shared_info.items():
            shared.copy_(info[name])

    def step(self):
        action = self.tensors["action"].clone()
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.tensors["reward"].copy_(reward)
        self.tensors["terminated"].copy_(terminated)
        self.tensors["truncated"].copy_(truncated)
        self.show(obs, info)

    def reset(self, is_seeded, options):
        seed = self.tensors["seed"].tolist() if is_seeded else None
        env_idx = self.tensors["restart"].nonzero()[:, 0]
        self.show(*self.env.reset(seed=seed, options=options | {"env_idx": env_idx}))


# === 3. How fast it is here ===
def compare_speed(env_id, num_envs=64, rounds=5, steps=25):
    """Steps per second of wall time with 0, 2, 4 ... workers, which take turns."""
    from simulators import maniskill_cpu

    torch.set_num_threads(1)
    most_workers = min(os.cpu_count(), num_envs)
    batches = {}
    for num_workers in range(0, most_workers + 1, 2):
        batches[num_workers] = maniskill_cpu.make(env_id, num_envs, num_workers=num_workers)
        batches[num_workers].reset(seed=0)
    speeds = {num_workers: [] for num_workers in batches}
    actions = [batches[0].action_space.sample() for _ in range(steps)]
    for _ in range(rounds):
        for num_workers, batch in batches.items():
            started = time.perf_counter()
            for action in actions:
                batch.step(action)
            seconds = time.perf_counter() - started
            speeds[num_workers].append(steps * num_envs / seconds)
    print(f"{env_id}, {num_envs} environments, medians of {rounds} rounds:")
    in_process = statistics.median(speeds[0])
    for num_workers, measured in speeds.items():
        speed = statistics.median(measured)
        where = f"{num_workers} workers" if num_workers else "in process"
        print(f"  {where:<12}{speed:>9,.0f} steps/s{speed / in_process:>7.2f}x")


if __name__ == "__main__":
    compare_speed(sys.argv[1] if len(sys.argv) > 1 else "StackCube-v1")
