"""MuJoCo Playground's tasks on MJX, under the contract of the *_continuous.py scripts (see VecEnv there).

    python trudi_continuous.py --backend playground --env-id CheetahRun     # JAX and torch on the same GPU, or on a CPU
    python playground_env.py CheetahRun                                     # what this adapter costs

The simulator is one compiled function of all envs: step, keep the true final observation, start anew, with a fresh
random state, whatever ended. Tensors pass between torch and JAX by dlpack: no copy, no transfer, and the host never
waits. Every step writes new buffers, so what the rollout keeps is never overwritten. A restart costs as much as some
steps and is computed for all envs, so it is skipped in the steps in which no episode ends.

These are other simulations than EnvPool's and dm_control's tasks of the same names: other observations, other contacts.
"""

import functools
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or JAX takes three quarters of the GPU's memory
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "trudi-mjx"))  # of compiled simulators

import jax
import jax.numpy as jnp
import numpy as np
import torch
from mujoco_playground import registry
from mujoco_playground._src import mjx_env

DMC = set(registry.dm_control_suite.ALL_ENVS)
TASKS = {env_id: "DMC" if env_id in DMC else "other" for env_id in registry.ALL_ENVS}  # id -> suite of the scripts
TASKS |= {f"{robot}Joystick{ground}Terrain": "humanoid" for robot in ("G1", "T1") for ground in ("Flat", "Rough")}


def stop(sentence):
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def load(env_id, on_cpu, overrides):
    """-> env, its config. All but the DMC robots come from MuJoCo Menagerie, which Playground fetches when missing."""
    if folder := os.environ.get("MENAGERIE_PATH"):
        mjx_env.MENAGERIE_PATH = type(mjx_env.MENAGERIE_PATH)(folder)
    missing = env_id not in DMC and not mjx_env.MENAGERIE_PATH.exists()
    if missing:
        print(f"{env_id} needs MuJoCo Menagerie, which git now fetches from GitHub into")
        print(f"{mjx_env.MENAGERIE_PATH}; to use a copy of your own, set MENAGERIE_PATH to its folder", flush=True)
    config = registry.get_default_config(env_id)
    if on_cpu and "impl" in config:
        config.impl = "jax"  # the default, Warp, needs a GPU
    try:
        return registry.load(env_id, config=config, config_overrides=dict(overrides) or None), config
    except Exception as e:
        if not missing:
            raise
        same = f"without a network try --backend envpool --env-id {env_id}-v1, which brings its assets along"
        stop(f"MuJoCo Menagerie is missing and could not be fetched ({type(e).__name__}); {same}")


def flatten(obs):  # of one env, array or dict -> (O,), privileged observations last
    if not hasattr(obs, "keys"):
        return obs.astype(jnp.float32)
    names = sorted(obs.keys(), key=lambda name: (name == "privileged_state", name))
    return jnp.concatenate([obs[name].reshape(-1) for name in names]).astype(jnp.float32)


@jax.jit
def first_keys(seed, past):  # past (E,): resets that a resumed run has behind it
    keys = jax.random.split(jax.random.PRNGKey(seed), len(past))
    return jax.vmap(lambda key, n: jax.lax.fori_loop(0, n, lambda _, k: jax.random.split(k)[0], key))(keys, past)


@functools.cache
def build(env_id, num_envs, place, overrides):
    """Compile the simulator for so many envs, once per process. -> env, episode length, begin, advance"""
    env, config = load(env_id, place.platform == "cpu", overrides)
    length, repeat = config.episode_length // config.action_repeat, config.action_repeat

    @jax.jit  # so that it is traced once
    def begin(carry):  # a new episode in every env: carry has its key and its counts, and gets all the rest
        later, now = jnp.moveaxis(jax.vmap(jax.random.split)(carry["key"]), 1, 0)
        state, zeros = jax.vmap(env.reset)(now), jnp.zeros(num_envs, jnp.int32)
        obs = jnp.nan_to_num(jax.vmap(flatten)(state.obs))  # a broken start shows at its first step, and is restarted
        fresh = dict(state=state, obs=obs, key=later, clock=zeros, limit=zeros + length, returns=zeros * 0.0)
        return fresh | dict(resets=carry["resets"] + 1, nonfinite=carry["nonfinite"])

    def restart(carry, ended):
        def choose(new, old):
            return jnp.where(ended.reshape(-1, *[1] * (old.ndim - 1)), new.astype(old.dtype), old)

        return jax.tree.map(choose, begin(carry), carry)

    def advance(carry, action):  # -> carry, (reward, terminated, truncated, final_obs, valid, stats)
        state, reward = carry["state"], jnp.zeros(num_envs)
        for _ in range(repeat):
            state = jax.vmap(env.step)(state, jnp.clip(action, -1, 1))
            reward = reward + state.reward
        obs = jax.vmap(flatten)(state.obs)
        bad = ~(jnp.isfinite(obs).all(1) & jnp.isfinite(reward))
        obs, reward = jnp.where(bad[:, None], carry["obs"], obs), jnp.where(bad, 0, reward)
        clock, returns = carry["clock"] + 1, carry["returns"] + reward
        terminated = (state.done > 0) & ~bad
        whole = (terminated | (clock >= length)) & ~bad  # it ended by itself
        ended = whole | bad | (clock >= carry["limit"])
        success = state.metrics.get("success", jnp.full(num_envs, jnp.nan))
        stats = jnp.stack([jnp.where(whole, jnp.arange(num_envs), -1), returns, clock, success], 1)
        state = jax.tree.map(lambda new, old: new.astype(old.dtype), state, carry["state"])
        carry = carry | dict(state=state, obs=obs, clock=clock, returns=returns, nonfinite=carry["nonfinite"] + bad)
        carry = jax.lax.cond(ended.any(), restart, lambda carry, _: carry, carry, ended)
        return carry, (reward, terminated, ended & ~terminated, obs, ~bad, stats)

    started = time.perf_counter()
    print(f"compiling the simulator of {num_envs} envs, about a minute the first time ...", flush=True)
    counts = jax.ShapeDtypeStruct((num_envs,), jnp.int32)
    start = dict(key=jax.ShapeDtypeStruct((num_envs, 2), jnp.uint32), resets=counts, nonfinite=counts)
    action = jax.ShapeDtypeStruct((num_envs, env.action_size), jnp.float32)
    with jax.default_device(place):
        compiled = begin.lower(start).compile()
        compiled = compiled, jax.jit(advance).lower(jax.eval_shape(begin, start), action).compile()
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    return env, length, *compiled


class VecEnv:
    def __init__(self, backend, env_id, num_envs, seed, device, threads=1, resets=None, stagger=0, **kwargs):
        self.backend, self.num_envs, self.device = backend, num_envs, torch.device(device)
        try:
            place = jax.devices("gpu" if self.device.type == "cuda" else "cpu")[self.device.index or 0]
        except RuntimeError as e:
            stop(f"torch uses CUDA but JAX sees no GPU ({e}): pip install 'jax[cuda12]', or choose --backend envpool")
        env, length, self.begin, self.advance = build(env_id, num_envs, place, tuple(sorted(kwargs.items())))
        sizes = dict(env.observation_size) if hasattr(env.observation_size, "keys") else {"state": env.observation_size}
        self.actor_dim = sum(math.prod(np.atleast_1d(n)) for name, n in sizes.items() if name != "privileged_state")
        self.critic_start = self.actor_dim if "privileged_state" in sizes else 0
        self.action_dim, self.index = env.action_size, torch.arange(num_envs, device=self.device)
        with jax.default_device(place):
            zeros = np.zeros(num_envs, np.int32)
            past = zeros if resets is None or len(resets) != num_envs else np.asarray(resets, np.int32) - 1
            start = jax.device_put(dict(resets=past, nonfinite=zeros), place)
            self.carry = self.begin(start | dict(key=first_keys(seed, start["resets"])))
            if stagger:  # first episodes end apart, or all envs would stay in step
                phase = stagger * (1 + np.arange(num_envs) * (length // stagger) // num_envs)
                self.carry["limit"] = jax.device_put(phase.astype(np.int32), place)
        self.before, self.pending, self.ends = 0, [], []  # before: non-finite steps of the run that this one resumes

    obs = property(lambda self: torch.from_dlpack(self.carry["obs"]))
    resets = property(lambda self: torch.from_dlpack(self.carry["resets"]).cpu())
    episode_length = property(lambda self: torch.from_dlpack(self.carry["clock"]))
    episode_return = property(lambda self: torch.from_dlpack(self.carry["returns"]))

    @property
    def nonfinite(self):
        return self.before + int(torch.from_dlpack(self.carry["nonfinite"]).sum())

    @nonfinite.setter
    def nonfinite(self, count):
        self.before = count

    @property
    def finished(self):  # looks for ends when asked, so that `step` need not wait for the device
        if self.pending:
            rows, self.pending = torch.cat(self.pending), []
            self.ends += [rows[rows[:, 0] >= 0]]
        return self.ends

    def stats(self):  # of the episodes under way -> (E, 4): env, return, length, success
        return torch.stack([self.index, self.episode_return, self.episode_length, self.index * torch.nan], 1)

    def tensor(self, x):
        return torch.as_tensor(x, device=self.device)

    def reset(self):
        self.carry = self.begin({k: self.carry[k] for k in ("key", "resets", "nonfinite")})
        self.pending, self.ends = [], []
        return self.obs

    def step(self, action):
        self.carry, out = self.advance(self.carry, jax.dlpack.from_dlpack(action.detach().contiguous()))
        *result, self.valid, stats = map(torch.from_dlpack, out)
        self.pending.append(stats)
        return self.obs, *result


def bench(env_id, num_envs=128, steps=100, rounds=10, device="cpu"):
    """This adapter against the bare compiled step of the same env, in turns."""
    envs = VecEnv("playground", env_id, num_envs, 1, device, stagger=64)
    actions = torch.rand(steps, num_envs, envs.action_dim, device=device) * 2 - 1
    env = load(env_id, device == "cpu", ())[0]
    step, state = jax.jit(jax.vmap(env.step)), jax.jit(jax.vmap(env.reset))(envs.carry["key"])
    bare_actions = [jax.dlpack.from_dlpack(a) for a in actions]
    state = jax.block_until_ready(step(state, bare_actions[0]))
    seconds = [0.0, 0.0]
    for i in range(rounds * 2):
        began = time.perf_counter()
        for j in range(steps):
            if i % 2:
                state = step(state, bare_actions[j])
            else:
                envs.step(actions[j])
        jax.block_until_ready(state if i % 2 else envs.carry)
        seconds[i % 2] += time.perf_counter() - began
    ours, bare = (num_envs * steps * rounds / x for x in seconds)
    print(f"{env_id}, {num_envs} envs: {ours:,.0f} steps/s, bare compiled step {bare:,.0f}")
    print(f"the adapter adds {bare / ours - 1:.1%}, its restarts included")


if __name__ == "__main__":
    bench(*sys.argv[1:2])
