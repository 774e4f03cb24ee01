"""ManiSkill's state-observation tasks on a CPU: many environments in one process, no Vulkan driver needed.

    envs = maniskill_cpu.make("PickCube-v1", num_envs=64)     # a ManiSkillVectorEnv with torch tensors on the CPU
    python maniskill_cpu.py StackCube-v1                      # how much faster that is than a SyncVectorEnv

ManiSkill simulates one environment on the CPU, or many on a GPU, where row i of every tensor is environment i. Here its
GPU code runs on CPU scenes: each environment has a PhysX scene of its own, and `BatchedSystem` stands in for the GPU's
`PhysxGpuSystem` by copying between those scenes and CPU tensors. Tasks, controllers, rewards and partial resets are
ManiSkill's, and environment i does, to the bit, what ManiSkill's single environment does with the same seed.

Seeding is stricter than on a GPU, where all resets draw from torch's global generator: here each environment has a
stream of its own, like a single one with `enhanced_determinism=True`.

Since this replaces internals, `install` refuses versions it was not tested with; `make` then falls back to separate
environments. Not supported: rendering, `pd_ee_*` control, net (not pairwise) contact forces, external forces, joint
accelerations, and code that looks at the simulation between the substeps of a step.
"""

import statistics
import sys
import time
from functools import cached_property, partial, partialmethod
from importlib.metadata import version
from types import SimpleNamespace

import gymnasium as gym
import mani_skill.envs.sapien_env as sapien_env
import numpy as np
import sapien
import torch
from gymnasium.vector import AutoresetMode
from mani_skill.envs.scene import ManiSkillScene
from mani_skill.envs.tasks.tabletop.push_t import WhiteTableSceneBuilder
from mani_skill.utils.structs.articulation import Articulation
from mani_skill.utils.structs.base import PhysxRigidBodyComponentStruct as Body
from mani_skill.utils.wrappers.flatten import FlattenActionSpaceWrapper
from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper
from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

BACKEND = "physx_cpu_batched"
TESTED = {"mani_skill": "3.0.1", "sapien": "3.0.3"}
STATE_ONLY = dict(obs_mode="state", render_backend="none")


def refusal():
    """One sentence on why the batched backend cannot be used here, or None."""
    found = {name: version(name) for name in TESTED}
    wanted, found = (" and ".join(f"{k} {v}" for k, v in x.items()) for x in (TESTED, found))
    return None if found == wanted else f"Batched CPU simulation needs {wanted}, but {found} are installed."


def install():
    """Add the sim backend "physx_cpu_batched" to ManiSkill and, where there is no render device, do without it."""
    if sentence := refusal():
        raise RuntimeError(sentence)
    do_without_renderer()
    if sapien_env.parse_sim_and_render_backend.__module__ != __name__:
        add_backend()


def make_env(env_id, num_envs, **kwargs):
    """Like gym.make on a GPU: a batch of environments with state observations, without autoreset."""
    kwargs = dict(reward_mode="normalized_dense", control_mode="pd_joint_delta_pos") | STATE_ONLY | kwargs
    if sentence := refusal():
        print(f"{sentence} Falling back to separate environments, which are slower.")
        do_without_renderer()
        return SeparateEnvs(env_id, num_envs, **kwargs)
    install()
    return flatten_actions(gym.make(env_id, num_envs=num_envs, sim_backend=BACKEND, **kwargs))


def make(env_id, num_envs, *, ignore_terminations=False, **kwargs):
    """The same with autoreset; PlugCharger-v1 has reward_mode="sparse" only."""
    env = make_env(env_id, num_envs, **kwargs)
    envs = VectorEnv(env, ignore_terminations=ignore_terminations, record_metrics=True)
    envs.max_episode_steps = kwargs.get("max_episode_steps", gym.spec(env_id).max_episode_steps)  # envs.spec has None
    return envs


class VectorEnv(ManiSkillVectorEnv):
    """As in ManiSkill: same-step autoreset, info["final_observation"], info["final_info"]["episode"].
    PhysX remembers contacts: to repeat a run to the bit in used scenes, reset(seed, options={"reconfigure": True})
    """

    def reset(self, *, seed=None, options=None):
        if seed is not None and np.ndim(seed) == 0:  # else ManiSkill starts env 0's episode k + 1 like env k's first
            seed = np.random.SeedSequence(seed).generate_state(self.num_envs).tolist()
        return super().reset(seed=seed, options=options)

    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        return obs, reward.float(), *rest  # PlugCharger's are booleans


def flatten_actions(env):  # two robots have a dict of actions
    return FlattenActionSpaceWrapper(env) if isinstance(env.action_space, gym.spaces.Dict) else env


# -- Without a Vulkan driver -------------------------------------------------------------------------------------------


class NoMaterial:
    """In the place of a render material or texture: accepts whatever is set and does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def has_render_device():
    try:  # sapien.Device.can_render() says False even where rendering works
        return not isinstance(sapien.render.RenderMaterial(), NoMaterial)
    except RuntimeError:
        return False


def do_without_renderer():
    """Tasks and the URDF loader create materials, which takes a device, even with render_backend="none"."""
    if not has_render_device():
        for name in ("RenderMaterial", "RenderTexture2D"):
            real = getattr(sapien.pysapien.render, name)
            for path, module in list(sys.modules.items()):  # modules that imported the class hold it themselves
                if path.startswith(("sapien", "mani_skill")) and vars(module).get(name) is real:
                    setattr(module, name, NoMaterial)
    paint = WhiteTableSceneBuilder.build  # PushT paints its table, which has no visual shapes without a renderer
    plain = super(WhiteTableSceneBuilder, WhiteTableSceneBuilder).build
    if paint.__module__ != __name__:
        WhiteTableSceneBuilder.build = lambda self: (paint if self.scene.can_render() else plain)(self)


# -- The batched simulation --------------------------------------------------------------------------------------------


class Buffer:
    """A tensor that ManiSkill reads and writes, and what it held when it was last exchanged with the scenes."""

    def __init__(self, *shape):
        self.array, self.exchanged = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        self.tensor = torch.from_numpy(self.array)  # the same memory

    def torch(self):
        return self.tensor

    def fill(self, rows, values):
        self.array[rows] = self.exchanged[rows] = values

    def take_changed(self, among=slice(None)):
        """Rows that ManiSkill wrote since; applying only these keeps a partial reset out of the other scenes."""
        changed = (self.array[among] != self.exchanged[among]).any(1)
        self.exchanged[among] = self.array[among]
        return np.flatnonzero(changed).tolist()


class BatchedSystem:
    """What ManiSkill uses of PhysxGpuSystem, under the same names, on top of several PhysxCpuSystems."""

    def __init__(self, systems):
        self.systems, self.timestep, self.pending, self.contacts = systems, systems[0].timestep, 0, None

    def step(self):
        self.pending += 1  # until data is exchanged, so that each scene takes all its substeps while in the CPU's cache

    def run(self):
        if self.pending:
            for system in self.systems:
                for _ in range(self.pending):
                    system.step()
            self.pending, self.contacts = 0, None

    def gpu_init(self):
        self.bodies = [body for system in self.systems for body in system.rigid_dynamic_components]
        self.links = [link for system in self.systems for link in system.articulation_link_components]
        self.articulations = [link.articulation for link in self.links if link.is_root]
        self.rows = {body._physx_pointer: i for i, body in enumerate(self.bodies + self.links)}
        self.root_rows = [i for i, link in enumerate(self.links, len(self.bodies)) if link.is_root]
        self.cuda_rigid_body_data = Buffer(len(self.rows), 13)  # position, quaternion, velocity, angular velocity
        self.stale = np.zeros(len(self.rows), bool)  # links that were not read since the last fetch
        dofs = np.array([a.dof for a in self.articulations], int)
        self.has_joint = np.arange(max(dofs, default=0)) < dofs[:, None]  # (articulations, most joints of any)
        for name in ("qpos", "qvel", "qf", "target_qpos", "target_qvel"):
            setattr(self, f"cuda_articulation_{name}", Buffer(*self.has_joint.shape))
        joints = [joint for a in self.articulations for joint in a.active_joints]
        self.cuda_articulation_target_qpos.array[self.has_joint] = [joint.drive_target[0] for joint in joints]
        self.target_setters = {
            "target_qpos": [joint.set_drive_target for joint in joints],
            "target_qvel": [joint.set_drive_velocity_target for joint in joints],
        }
        # A scene's pack() holds 13 numbers per body, then per articulation 13 of its root, qpos, qvel, 2 per target.
        end = 13 * len(self.bodies) // len(self.systems)
        self.body_columns = np.arange(end).reshape(-1, 13)[:, [4, 5, 6, 0, 1, 2, 3, *range(7, 13)]].ravel()  # q first
        self.qpos_columns, self.qvel_columns = [], []
        for dof in dofs[: len(dofs) // len(self.systems)]:
            self.qpos_columns += range(end + 13, end + 13 + dof)
            self.qvel_columns += range(end + 13 + dof, end + 13 + 2 * dof)
            end += 13 + 4 * dof
        if {len(system.pack()) for system in self.systems} != {4 * end}:
            raise RuntimeError("Batched CPU simulation needs the same bodies and joints in every environment.")
        self.fetch()

    def body_index(self, struct):
        """Rows of an actor or link, which ManiSkill asks for at every access: time to read the links that are stale."""
        if struct._body_data_index_internal is None:
            struct._body_data_index_internal = torch.tensor([self.rows[b._physx_pointer] for b in struct._bodies])
        rows = struct._body_data_index_internal.numpy()
        stale = rows[self.stale[rows]]
        if stale.size:
            self.read_links(stale)
        return struct._body_data_index_internal

    def articulation_index(self, struct):
        rows = [self.root_rows.index(self.rows[a.root._physx_pointer]) for a in struct._objs]
        return torch.tensor(rows, dtype=torch.int32)

    # From the scenes to the tensors

    def fetch(self):
        self.run()
        packed = np.frombuffer(b"".join([s.pack() for s in self.systems]), np.float32).reshape(len(self.systems), -1)
        self.cuda_rigid_body_data.fill(slice(len(self.bodies)), packed[:, self.body_columns].reshape(-1, 13))
        self.cuda_articulation_qpos.fill(self.has_joint, packed[:, self.qpos_columns].ravel())
        self.cuda_articulation_qvel.fill(self.has_joint, packed[:, self.qvel_columns].ravel())
        self.stale[len(self.bodies) :] = True  # links are slow to read, and few are ever asked for

    gpu_fetch_rigid_dynamic_data = gpu_fetch_articulation_link_pose = gpu_fetch_articulation_link_velocity = fetch
    gpu_fetch_articulation_qpos = gpu_fetch_articulation_qvel = fetch

    def read_links(self, rows):
        self.run()
        parts = []
        for i in rows:
            link = self.links[i - len(self.bodies)]
            pose = link.entity_pose
            parts += pose.p, pose.q, link.linear_velocity, link.angular_velocity
        self.cuda_rigid_body_data.fill(rows, np.concatenate(parts).reshape(-1, 13))
        self.stale[rows] = False

    def gpu_create_contact_pair_impulse_query(self, pairs):
        rows = {}  # PhysX reports two bodies in either order
        for i, (a, b) in enumerate([(a._physx_pointer, b._physx_pointer) for a, b in pairs]):
            rows[a, b], rows[b, a] = (i, 1), (i, -1)
        return SimpleNamespace(cuda_impulses=Buffer(len(pairs), 3), rows=rows)

    def gpu_query_contact_pair_impulses(self, query):
        self.run()
        if self.contacts is None:  # collected once for all queries of a step
            contacts = [contact for system in self.systems for contact in system.get_contacts()]
            self.contacts = [(tuple([body._physx_pointer for body in c.bodies]), c) for c in contacts]
        impulses = np.zeros(query.cuda_impulses.array.shape)
        for pair, contact in self.contacts:
            if pair in query.rows:
                i, sign = query.rows[pair]
                impulses[i] += sign * np.sum([point.impulse for point in contact.points], axis=0)
        query.cuda_impulses.array[:] = impulses

    # From the tensors to the scenes

    def gpu_apply_rigid_dynamic_data(self):
        self.run()
        for i in self.cuda_rigid_body_data.take_changed(slice(len(self.bodies))):
            body, row = self.bodies[i], self.cuda_rigid_body_data.array[i]
            body.entity.pose = sapien.Pose(row[:3], row[3:7])
            if not body.kinematic:
                body.linear_velocity, body.angular_velocity = row[7:10], row[10:]

    def apply_roots(self):
        self.run()
        for i in self.cuda_rigid_body_data.take_changed(self.root_rows):
            articulation, row = self.articulations[i], self.cuda_rigid_body_data.array[self.root_rows[i]]
            articulation.set_root_pose(sapien.Pose(row[:3], row[3:7]))
            articulation.set_root_linear_velocity(row[7:10])
            articulation.set_root_angular_velocity(row[10:])

    gpu_apply_articulation_root_pose = gpu_apply_articulation_root_velocity = apply_roots

    def apply_joints(self, name):
        self.run()
        data = getattr(self, f"cuda_articulation_{name}")
        for i in data.take_changed():
            setattr(self.articulations[i], name, data.array[i, self.has_joint[i]])

    gpu_apply_articulation_qpos = partialmethod(apply_joints, "qpos")
    gpu_apply_articulation_qvel = partialmethod(apply_joints, "qvel")
    gpu_apply_articulation_qf = partialmethod(apply_joints, "qf")

    def apply_targets(self, name):  # changed or not: it keeps robots awake, as in ManiSkill's single environment
        self.run()
        targets = getattr(self, f"cuda_articulation_{name}").array[self.has_joint]
        if not np.isfinite(targets).all():  # ManiSkill checks the actions of a single environment only
            raise ValueError("Actions must be finite.")
        for set_target, target in zip(self.target_setters[name], targets.tolist(), strict=True):
            set_target(target)

    gpu_apply_articulation_target_position = partialmethod(apply_targets, "target_qpos")
    gpu_apply_articulation_target_velocity = partialmethod(apply_targets, "target_qvel")

    def gpu_update_articulation_kinematics(self):
        pass  # CPU scenes do it whenever joints are set


class BatchedScene(ManiSkillScene):
    def __init__(self, scenes, **kwargs):
        super().__init__(scenes, **kwargs)
        self.px, self.gpu_sim_enabled = BatchedSystem([scene.physx_system for scene in scenes]), True

    def create_actor_builder(self):  # on a GPU one ground plane serves all environments, here each needs its own
        return super().create_actor_builder().set_allow_overlapping_plane_collisions(True)

    def _gpu_apply_all(self):  # but the targets, which no reset of a single environment sets either
        self.px.gpu_apply_rigid_dynamic_data()
        for name in ("qpos", "qvel", "qf"):
            self.px.apply_joints(name)
        self.px.apply_roots()
        self._needs_fetch = True

    def _gpu_fetch_all(self):
        self.px.fetch()
        self._needs_fetch = False


def initialize_one_by_one(env, env_idx, options):
    """Each environment starts its episode from its own seed, as a single one would, and leaves the others alone."""
    before, others = dict(vars(env)), ~env.scene._reset_mask
    for i in env_idx.tolist():
        env.scene._reset_mask[:] = torch.arange(env.num_envs) == i
        env._episode_rng = env._batched_episode_rng[i]
        torch.manual_seed(int(env._episode_seed[i]))  # reset() restores the global generator afterwards
        type(env)._initialize_episode(env, torch.tensor([i]), options)
    for name, new in vars(env).items():  # TwoRobotPickCube replaces left_init_qpos, part of its reward, in all rows
        old = before.get(name)
        if torch.is_tensor(new) and torch.is_tensor(old) and new is not old and len(new) == len(old) == env.num_envs:
            new[others] = old[others]


def add_backend():
    parse, setup_scene = sapien_env.parse_sim_and_render_backend, sapien_env.BaseEnv._setup_scene
    body_index, articulation_index = vars(Body)["_body_data_index"].func, vars(Articulation)["_data_index"].func

    def parse_sim_and_render_backend(sim_backend, render_backend):
        if sim_backend != BACKEND:
            return parse(sim_backend, render_backend)
        if render_backend != "none":
            raise ValueError(f'sim_backend="{BACKEND}" cannot render: pass render_backend="none".')
        info = parse("physx_cpu", "none")
        info.sim_device, info.sim_backend = SimpleNamespace(is_cuda=lambda: True), BACKEND  # takes the batched code
        return info

    def _setup_scene(self):
        if self.backend.sim_backend != BACKEND:
            return setup_scene(self)
        self._set_scene_config()
        systems = [sapien.physx.PhysxCpuSystem() for _ in range(self.num_envs)]
        for system in systems:
            system.timestep = 1 / self._sim_freq
        scenes = [sapien.Scene([system]) for system in systems]
        self.scene = BatchedScene(scenes, sim_config=self.sim_config, device=self.device, backend=self.backend)
        self._enhanced_determinism = True  # every reset takes the episode's seed from the environment's own stream
        self._initialize_episode = partial(initialize_one_by_one, self)

    def choose(ours, theirs):  # bodies in CPU scenes do not know their rows
        return lambda struct: ours(struct.px, struct) if isinstance(struct.px, BatchedSystem) else theirs(struct)

    Body._body_data_index = property(choose(BatchedSystem.body_index, body_index))
    Body._body_data = property(lambda struct: struct.px.cuda_rigid_body_data.torch())
    Articulation._data_index = cached_property(choose(BatchedSystem.articulation_index, articulation_index))
    Articulation._data_index.__set_name__(Articulation, "_data_index")
    sapien_env.parse_sim_and_render_backend = parse_sim_and_render_backend
    sapien_env.BaseEnv._setup_scene = _setup_scene


# -- Separate environments: the fallback, and what the speed is compared with ------------------------------------------


def sync_vector_env(env_id, num_envs, autoreset_mode, **kwargs):
    def make_one():
        flat = flatten_actions(gym.make(env_id, sim_backend="physx_cpu", **kwargs))
        env = CPUGymWrapper(flat)
        env.action_space = flat.get_wrapper_attr("single_action_space")  # where the wrapper shows the dict
        return env

    return gym.vector.SyncVectorEnv([make_one] * num_envs, autoreset_mode=autoreset_mode)


class SeparateEnvs(gym.Env):
    """ManiSkill's single CPU environments, side by side, with the interface of its batched ones."""

    device, reconfiguration_freq = torch.device("cpu"), 0

    def __init__(self, env_id, num_envs, **kwargs):
        kwargs = dict(enhanced_determinism=True) | kwargs
        self.envs = sync_vector_env(env_id, num_envs, AutoresetMode.DISABLED, **kwargs)
        self.num_envs, self.info = num_envs, {}
        for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
            setattr(self, name, getattr(self.envs, name))

    def to_torch(self, obs, info, mask):  # mask: the environments that `info` tells about
        for name in info.keys() - {"reconfigure"} - {n for n in info if n.startswith("_")}:
            new = torch.from_numpy(np.stack(list(info[name][mask])))
            new = new if new.dtype == torch.bool else new.float() if new.is_floating_point() else new.int()
            self.info[name] = self.info[name].clone() if name in self.info else new.clone()
            self.info[name][torch.from_numpy(mask)] = new
        self.elapsed_steps = self.info["elapsed_steps"]
        return torch.from_numpy(obs.copy()), dict(self.info)

    def reset(self, *, seed=None, options=None):
        options, mask = dict(options or {}), np.zeros(self.num_envs, bool)
        mask[options.pop("env_idx", slice(None))] = True
        return self.to_torch(*self.envs.reset(seed=seed, options=options | dict(reset_mask=mask)), mask)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.envs.step(np.asarray(action))
        obs, info = self.to_torch(obs, info, np.ones(self.num_envs, bool))
        return obs, torch.from_numpy(reward).float(), torch.tensor(terminated), torch.tensor(truncated), info

    def close(self):
        self.envs.close()


def compare_speed(env_id, num_envs=64, num_separate=16, rounds=5, steps=25):
    """Steps per second of CPU time, which other processes disturb less than wall time, in alternating rounds."""
    torch.set_num_threads(1)
    kwargs = dict(reward_mode="sparse" if env_id == "PlugCharger-v1" else "normalized_dense")
    started = time.perf_counter()
    batch = make(env_id, num_envs, **kwargs)
    print(f"created {num_envs} environments in {time.perf_counter() - started:.1f} s")
    kwargs |= dict(control_mode="pd_joint_delta_pos") | STATE_ONLY
    speeds = {batch: [], sync_vector_env(env_id, num_separate, AutoresetMode.SAME_STEP, **kwargs): []}
    for envs in speeds:
        envs.reset(seed=0)
    for _ in range(rounds):
        for envs, speed in speeds.items():
            actions = [envs.action_space.sample() for _ in range(steps)]
            started = time.process_time()
            for action in actions:
                envs.step(action)
            speed.append(steps * envs.num_envs / (time.process_time() - started))
    fast, slow = map(statistics.median, speeds.values())
    print(f"{env_id}: {fast:.0f} steps per CPU second in a batch of {num_envs}, {slow:.0f} in a SyncVectorEnv of")
    print(f"{num_separate}, that is {fast / slow:.2f} times as many (medians of {rounds} rounds)")


if __name__ == "__main__":
    compare_speed(*sys.argv[1:] or ["StackCube-v1"])
