"""ManiSkill's state-observation tasks on a CPU: many environments in one process, without Vulkan.

    from simulators import maniskill_cpu
    envs = maniskill_cpu.make("PickCube-v1", num_envs=64)   # a ManiSkillVectorEnv on the CPU
    python -m simulators.maniskill_cpu StackCube-v1         # how much faster that is

ManiSkill simulates one environment on the CPU, or many on a GPU, where row i of every tensor is
environment i. Here its GPU code runs on CPU scenes: each environment has a PhysX scene of its own,
and `BatchedSystem` stands in for the GPU's `PhysxGpuSystem` by copying between those scenes and
CPU tensors. Tasks, controllers, rewards and partial resets are ManiSkill's, and environment i
does, to the bit, what ManiSkill's single environment does with the same seed.

One process uses one core. With num_workers=W the environments are shared among W processes, see
maniskill_workers.py, and each still does the same.

Seeding is stricter than on a GPU, where all resets draw from torch's global generator. Here each
environment has a stream of its own, like a single one with `enhanced_determinism=True`.

This replaces internals, so `install` refuses versions that it was not tested with, and `make`
then falls back to separate environments. Not supported: rendering, `pd_ee_*` control, net (not
pairwise) contact forces, external forces, joint accelerations, and code that looks at the
simulation between the substeps of a step.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version

import simulators.without_opencv  # noqa: F401

# isort: split
import gymnasium as gym
import mani_skill.envs.sapien_env as sapien_env
import numpy as np
import sapien
import torch
from gymnasium.vector import AutoresetMode
from mani_skill.envs.scene import ManiSkillScene
from mani_skill.envs.tasks.tabletop.push_t import WhiteTableSceneBuilder
from mani_skill.utils.scene_builder.table import TableSceneBuilder
from mani_skill.utils.structs.articulation import Articulation
from mani_skill.utils.structs.articulation_joint import ArticulationJoint
from mani_skill.utils.structs.base import PhysxRigidBodyComponentStruct
from mani_skill.utils.structs.pose import Pose
from mani_skill.utils.wrappers.flatten import FlattenActionSpaceWrapper
from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper
from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

BACKEND = "physx_cpu_batched"
TESTED_VERSIONS = {"mani_skill": "3.0.1", "sapien": "3.0.3"}
STATE_ONLY = {"obs_mode": "state", "render_backend": "none"}

# Columns of a rigid body's row in the tensor that ManiSkill reads and writes.
POSITION = slice(0, 3)
QUATERNION = slice(3, 7)
VELOCITY = slice(7, 10)
ANGULAR_VELOCITY = slice(10, 13)
BODY_SIZE = 13


# === 1. What a script calls ===
def refusal():
    """One sentence on why the batched backend cannot be used here, or None."""
    found_versions = {package: version(package) for package in TESTED_VERSIONS}
    if found_versions == TESTED_VERSIONS:
        return None
    wanted = " and ".join(f"{package} {number}" for package, number in TESTED_VERSIONS.items())
    found = " and ".join(f"{package} {number}" for package, number in found_versions.items())
    return f"Batched CPU simulation needs {wanted}, but {found} are installed."


def install():
    """Add the sim backend "physx_cpu_batched" to ManiSkill; calling it again changes nothing."""
    sentence = refusal()
    if sentence:
        raise RuntimeError(sentence)
    do_without_renderer()
    sapien_env.parse_sim_and_render_backend = parse_sim_and_render_backend
    sapien_env.BaseEnv._setup_scene = setup_scene
    PhysxRigidBodyComponentStruct._body_data_index = property(body_data_index)
    PhysxRigidBodyComponentStruct._body_data = property(body_data)
    replace_data_index(Articulation, articulation_data_index)
    replace_data_index(ArticulationJoint, joint_data_index)


def replace_data_index(struct_class, function):
    cached_index = cached_property(function)
    cached_index.__set_name__(struct_class, "_data_index")  # a class body does this by itself
    struct_class._data_index = cached_index


def make_env(env_id, num_envs, *, num_workers=0, env_module="", **kwargs):
    """Like gym.make on a GPU: a batch of environments with state observations, no autoreset.

    num_workers: processes that simulate it, see maniskill_workers.py; 0 or 1 is this process.
    env_module: what the workers import first, if it registers env_id.
    """
    defaults = {"reward_mode": "normalized_dense", "control_mode": "pd_joint_delta_pos"}
    kwargs = defaults | STATE_ONLY | kwargs
    if num_workers > 1:
        from simulators.maniskill_workers import WorkersEnv

        return WorkersEnv(env_id, num_envs, num_workers, env_module, **kwargs)
    sentence = refusal()
    if sentence:
        print(f"{sentence} Falling back to separate environments, which are slower.")
        do_without_renderer()
        return SeparateEnvs(env_id, num_envs, **kwargs)
    install()
    return flatten_actions(gym.make(env_id, num_envs=num_envs, sim_backend=BACKEND, **kwargs))


def make(env_id, num_envs, *, ignore_terminations=False, **kwargs):
    """The same with autoreset; PlugCharger-v1 has reward_mode="sparse" only."""
    env = make_env(env_id, num_envs, **kwargs)
    envs = VectorEnv(env, ignore_terminations=ignore_terminations, record_metrics=True)
    default_limit = gym.spec(env_id).max_episode_steps
    envs.max_episode_steps = kwargs.get("max_episode_steps", default_limit)  # envs.spec has None
    return envs


class VectorEnv(ManiSkillVectorEnv):
    """As in ManiSkill: same-step autoreset, info["final_observation"], info["final_info"].

    PhysX remembers contacts: to repeat a run to the bit in used scenes, call
    reset(seed, options={"reconfigure": True}).
    """

    def reset(self, *, seed=None, options=None):
        if seed is not None and np.ndim(seed) == 0:
            # from one number ManiSkill would start env 0's episode k + 1 like env k's first
            seed = np.random.SeedSequence(seed).generate_state(self.num_envs).tolist()
        return super().reset(seed=seed, options=options)

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        return obs, reward.float(), terminated, truncated, info  # PlugCharger's are booleans


def flatten_actions(env):
    """Tasks with two robots have a dict of actions: make it one vector."""
    if isinstance(env.action_space, gym.spaces.Dict):
        return FlattenActionSpaceWrapper(env)
    return env


# === 2. Without a Vulkan driver ===
class NoMaterial:
    """In the place of a render material or texture: accepts whatever is set and does nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("set_"):
            return accept_and_ignore
        raise AttributeError(name)


def accept_and_ignore(*args, **kwargs):
    pass


def has_render_device():
    """Try it: sapien.Device.can_render() says False even where rendering works."""
    try:
        material = sapien.render.RenderMaterial()
    except RuntimeError:
        return False
    return not isinstance(material, NoMaterial)


def do_without_renderer():
    """Let tasks be built where no render device is present."""
    if not has_render_device():
        replace_render_class("RenderMaterial")
        replace_render_class("RenderTexture2D")
    WhiteTableSceneBuilder.build = build_white_table


def replace_render_class(name):
    """Tasks and the URDF loader create materials, which takes a device, even if nothing renders."""
    render_class = getattr(sapien.pysapien.render, name)
    for module_name, module in list(sys.modules.items()):
        is_affected = module_name.startswith(("sapien", "mani_skill"))
        if is_affected and vars(module).get(name) is render_class:  # it imported the class itself
            setattr(module, name, NoMaterial)


original_build_white_table = WhiteTableSceneBuilder.build


def build_white_table(builder):
    """PushT paints its table, which has no visual shapes without a renderer."""
    if builder.scene.can_render():
        original_build_white_table(builder)
    else:
        TableSceneBuilder.build(builder)


# === 3. The batched simulation ===
class Buffer:
    """A tensor that ManiSkill reads and writes, and what was last exchanged with the scenes."""

    def __init__(self, num_rows, num_columns):
        self.array = np.zeros((num_rows, num_columns), np.float32)
        self.exchanged = np.zeros((num_rows, num_columns), np.float32)
        self.tensor = torch.from_numpy(self.array)  # the same memory

    def torch(self):
        return self.tensor

    def fill(self, rows, values):
        """Write values that come from the scenes."""
        self.array[rows] = values
        self.exchanged[rows] = values

    def take_changed(self, rows):
        """Which of these rows ManiSkill wrote since the last exchange, as positions in `rows`.

        Only these are applied, which keeps a partial reset out of the other scenes.
        """
        new_values = self.array[rows]
        changed = (new_values != self.exchanged[rows]).any(axis=1)
        self.exchanged[rows] = new_values
        return np.flatnonzero(changed).tolist()


class PackColumns:
    """Which float32 numbers of a scene's pack() ManiSkill reads.

    For each body, pack() holds its quaternion (4), position (3), velocity (3) and angular velocity
    (3). For each articulation it then holds the same 13 numbers of its root link and, joint by
    joint, all qpos, all qvel and two targets per joint.
    """

    def __init__(self, num_bodies, joint_counts):
        bodies = []
        qpos = []
        qvel = []
        start = 0
        for _ in range(num_bodies):
            quaternion = range(start, start + 4)
            position = range(start + 4, start + 7)
            velocities = range(start + 7, start + 13)
            bodies += [*position, *quaternion, *velocities]  # a row of ManiSkill's tensor
            start += BODY_SIZE
        for num_joints in joint_counts:
            start += BODY_SIZE  # the root is read with the other links
            qpos += range(start, start + num_joints)
            start += num_joints
            qvel += range(start, start + num_joints)
            start += num_joints
            start += 2 * num_joints  # ManiSkill knows the targets that it set
        self.bodies = np.array(bodies, int)
        self.qpos = np.array(qpos, int)
        self.qvel = np.array(qvel, int)
        self.size = start


@dataclass
class ContactPairQuery:
    """Asks for the impulses between pairs of bodies."""

    cuda_impulses: Buffer  # a row per pair
    signed_rows: dict  # (pointer of a body, pointer of another) -> row, sign of the impulse


class BatchedSystem:
    """What ManiSkill uses of PhysxGpuSystem, under the same names, on several PhysxCpuSystems.

    Rows of rigid bodies are first all bodies, scene by scene, then all links of articulations.
    """

    def __init__(self, systems):
        self.systems = systems
        self.timestep = systems[0].timestep
        self.pending_substeps = 0
        self.contacts = None  # of all scenes, once a query has asked for them

    def step(self):
        """Put the substep off until data is exchanged.

        Each scene then takes all its substeps at once, while it is in the CPU's cache.
        """
        self.pending_substeps += 1

    def run_pending_substeps(self):
        if self.pending_substeps == 0:
            return
        for system in self.systems:
            for _ in range(self.pending_substeps):
                system.step()
        self.pending_substeps = 0
        self.contacts = None

    def gpu_init(self):
        """Number the bodies, links and articulations, and create the tensors."""
        self.bodies = []
        self.links = []
        for system in self.systems:
            self.bodies += system.rigid_dynamic_components
            self.links += system.articulation_link_components
        self.num_bodies = len(self.bodies)
        self.row_of_body = {}  # pointer of a body or link -> its row
        for row, body in enumerate(self.bodies + self.links):
            self.row_of_body[body._physx_pointer] = row
        self.articulations = []
        self.root_rows = []  # row of each articulation's root link
        for row, link in enumerate(self.links, start=self.num_bodies):
            if link.is_root:
                self.articulations.append(link.articulation)
                self.root_rows.append(row)
        self.joints = []
        for articulation in self.articulations:
            self.joints += articulation.active_joints

        num_rows = len(self.row_of_body)
        self.cuda_rigid_body_data = Buffer(num_rows, BODY_SIZE)
        self.is_stale = np.zeros(num_rows, bool)  # links that were not read since the last fetch
        joint_counts = np.array([articulation.dof for articulation in self.articulations], int)
        most_joints = max(joint_counts, default=0)
        # (articulations, most joints of any): where a joint's number stands in the next tensors
        self.has_joint = np.arange(most_joints) < joint_counts[:, None]
        self.cuda_articulation_qpos = Buffer(*self.has_joint.shape)
        self.cuda_articulation_qvel = Buffer(*self.has_joint.shape)
        self.cuda_articulation_qf = Buffer(*self.has_joint.shape)
        self.cuda_articulation_target_qpos = Buffer(*self.has_joint.shape)
        self.cuda_articulation_target_qvel = Buffer(*self.has_joint.shape)
        first_targets = [joint.drive_target[0] for joint in self.joints]
        self.cuda_articulation_target_qpos.array[self.has_joint] = first_targets

        num_scenes = len(self.systems)
        joint_counts_of_a_scene = joint_counts[: len(joint_counts) // num_scenes]
        self.columns = PackColumns(self.num_bodies // num_scenes, joint_counts_of_a_scene)
        for system in self.systems:
            if len(system.pack()) != self.columns.size * np.float32().itemsize:
                raise RuntimeError(
                    "Batched CPU simulation needs the same bodies and joints in every environment."
                )
        self.fetch()

    def body_index(self, struct):
        """Rows of an actor or link. ManiSkill asks at every access, so stale links are read now."""
        if struct._body_data_index_internal is None:
            rows = [self.row_of_body[body._physx_pointer] for body in struct._bodies]
            struct._body_data_index_internal = torch.tensor(rows)
        rows = struct._body_data_index_internal.numpy()
        stale_rows = rows[self.is_stale[rows]]
        if stale_rows.size > 0:
            self.read_links(stale_rows)
        return struct._body_data_index_internal

    def articulation_index(self, articulations):
        """Their rows in the tensors of joints."""
        rows = []
        for articulation in articulations:
            root_row = self.row_of_body[articulation.root._physx_pointer]
            rows.append(self.root_rows.index(root_row))
        return torch.tensor(rows, dtype=torch.int32)

    # from the scenes to the tensors

    def fetch(self):
        """Read bodies and joints; links are slow to read and few are asked for, so not yet."""
        self.run_pending_substeps()
        packed = b"".join([system.pack() for system in self.systems])
        packed = np.frombuffer(packed, np.float32).reshape(len(self.systems), -1)
        body_values = packed[:, self.columns.bodies].reshape(-1, BODY_SIZE)
        self.cuda_rigid_body_data.fill(slice(self.num_bodies), body_values)
        self.cuda_articulation_qpos.fill(self.has_joint, packed[:, self.columns.qpos].ravel())
        self.cuda_articulation_qvel.fill(self.has_joint, packed[:, self.columns.qvel].ravel())
        self.is_stale[self.num_bodies :] = True

    def gpu_fetch_rigid_dynamic_data(self):
        self.fetch()

    def gpu_fetch_articulation_link_pose(self):
        self.fetch()

    def gpu_fetch_articulation_link_velocity(self):
        self.fetch()

    def gpu_fetch_articulation_qpos(self):
        self.fetch()

    def gpu_fetch_articulation_qvel(self):
        self.fetch()

    def read_links(self, rows):
        self.run_pending_substeps()
        parts = []
        for row in rows:
            link = self.links[row - self.num_bodies]
            pose = link.entity_pose
            parts.append(pose.p)
            parts.append(pose.q)
            parts.append(link.linear_velocity)
            parts.append(link.angular_velocity)
        self.cuda_rigid_body_data.fill(rows, np.concatenate(parts).reshape(-1, BODY_SIZE))
        self.is_stale[rows] = False

    def gpu_create_contact_pair_impulse_query(self, pairs):
        """PhysX reports two bodies in either order, so each pair is noted in both."""
        signed_rows = {}
        for row, (body, other) in enumerate(pairs):
            signed_rows[body._physx_pointer, other._physx_pointer] = (row, 1)
            signed_rows[other._physx_pointer, body._physx_pointer] = (row, -1)
        return ContactPairQuery(Buffer(len(pairs), 3), signed_rows)

    def gpu_query_contact_pair_impulses(self, query):
        self.run_pending_substeps()
        if self.contacts is None:  # collected once for all queries of a step
            self.contacts = []
            for system in self.systems:
                for contact in system.get_contacts():
                    pair = tuple([body._physx_pointer for body in contact.bodies])
                    self.contacts.append((pair, contact))
        impulses = np.zeros(query.cuda_impulses.array.shape)
        for pair, contact in self.contacts:
            if pair in query.signed_rows:
                row, sign = query.signed_rows[pair]
                impulses[row] += sign * np.sum([point.impulse for point in contact.points], axis=0)
        query.cuda_impulses.array[:] = impulses

    # from the tensors to the scenes

    def gpu_apply_rigid_dynamic_data(self):
        self.run_pending_substeps()
        for row in self.cuda_rigid_body_data.take_changed(slice(self.num_bodies)):
            body = self.bodies[row]
            values = self.cuda_rigid_body_data.array[row]
            body.entity.pose = sapien.Pose(values[POSITION], values[QUATERNION])
            if not body.kinematic:
                body.linear_velocity = values[VELOCITY]
                body.angular_velocity = values[ANGULAR_VELOCITY]

    def apply_roots(self):
        self.run_pending_substeps()
        for i in self.cuda_rigid_body_data.take_changed(self.root_rows):
            articulation = self.articulations[i]
            values = self.cuda_rigid_body_data.array[self.root_rows[i]]
            articulation.set_root_pose(sapien.Pose(values[POSITION], values[QUATERNION]))
            articulation.set_root_linear_velocity(values[VELOCITY])
            articulation.set_root_angular_velocity(values[ANGULAR_VELOCITY])

    def gpu_apply_articulation_root_pose(self):
        self.apply_roots()

    def gpu_apply_articulation_root_velocity(self):
        self.apply_roots()

    def changed_articulations(self, buffer):
        """Articulations whose row ManiSkill wrote, each with the values of its joints."""
        self.run_pending_substeps()
        changed = []
        for row in buffer.take_changed(slice(None)):
            changed.append((self.articulations[row], buffer.array[row, self.has_joint[row]]))
        return changed

    def gpu_apply_articulation_qpos(self):
        for articulation, values in self.changed_articulations(self.cuda_articulation_qpos):
            articulation.qpos = values

    def gpu_apply_articulation_qvel(self):
        for articulation, values in self.changed_articulations(self.cuda_articulation_qvel):
            articulation.qvel = values

    def gpu_apply_articulation_qf(self):
        for articulation, values in self.changed_articulations(self.cuda_articulation_qf):
            articulation.qf = values

    def targets_of_joints(self, buffer):
        """All of them: a target that is set again keeps a robot awake, as in a single env."""
        self.run_pending_substeps()
        targets = buffer.array[self.has_joint]
        if not np.isfinite(targets).all():  # ManiSkill checks the actions of a single env only
            raise ValueError("Actions must be finite.")
        return zip(self.joints, targets.tolist(), strict=True)

    def gpu_apply_articulation_target_position(self):
        for joint, target in self.targets_of_joints(self.cuda_articulation_target_qpos):
            joint.set_drive_target(target)

    def gpu_apply_articulation_target_velocity(self):
        for joint, target in self.targets_of_joints(self.cuda_articulation_target_qvel):
            joint.set_drive_velocity_target(target)

    def gpu_update_articulation_kinematics(self):
        """Nothing to do: CPU scenes update them whenever joints are set."""


class BatchedScene(ManiSkillScene):
    """ManiSkill's scene of several environments, with a BatchedSystem instead of the GPU's."""

    def __init__(self, scenes, **kwargs):
        super().__init__(scenes, **kwargs)
        self.px = BatchedSystem([scene.physx_system for scene in scenes])
        self.gpu_sim_enabled = True

    def create_actor_builder(self):
        """On a GPU one ground plane serves all environments; here each needs its own."""
        return super().create_actor_builder().set_allow_overlapping_plane_collisions(True)

    def _gpu_apply_all(self):
        """Leave out the joints' targets, which no reset of a single environment sets either."""
        self.px.gpu_apply_rigid_dynamic_data()
        self.px.gpu_apply_articulation_qpos()
        self.px.gpu_apply_articulation_qvel()
        self.px.gpu_apply_articulation_qf()
        self.px.apply_roots()
        self._needs_fetch = True

    def _gpu_fetch_all(self):
        """Fetch once what ManiSkill would fetch in several calls."""
        self.px.fetch()
        self._needs_fetch = False


# === 4. The functions that replace ManiSkill's; other backends get the original ones ===
original_parse_sim_and_render_backend = sapien_env.parse_sim_and_render_backend
original_setup_scene = sapien_env.BaseEnv._setup_scene
original_body_data_index = vars(PhysxRigidBodyComponentStruct)["_body_data_index"].func
original_body_data = vars(PhysxRigidBodyComponentStruct)["_body_data"].fget
original_articulation_data_index = vars(Articulation)["_data_index"].func
original_joint_data_index = vars(ArticulationJoint)["_data_index"].func


class BatchedDevice:
    """In the place of a simulation device: "CUDA" is how ManiSkill chooses its batched code."""

    def is_cuda(self):
        return True


def parse_sim_and_render_backend(sim_backend, render_backend):
    """ManiSkill's refuses a backend that it does not know."""
    if sim_backend != BACKEND:
        return original_parse_sim_and_render_backend(sim_backend, render_backend)
    if render_backend != "none":
        raise ValueError(f'sim_backend="{BACKEND}" cannot render: pass render_backend="none".')
    backend_info = original_parse_sim_and_render_backend("physx_cpu", "none")
    backend_info.sim_device = BatchedDevice()
    backend_info.sim_backend = BACKEND
    return backend_info


def setup_scene(env):
    """ManiSkill's would create one GPU system for all scenes; each gets a CPU system instead."""
    if env.backend.sim_backend != BACKEND:
        original_setup_scene(env)
        return
    env._set_scene_config()
    scenes = []
    for _ in range(env.num_envs):
        system = sapien.physx.PhysxCpuSystem()
        system.timestep = 1 / env._sim_freq
        scenes.append(sapien.Scene([system]))
    env.scene = BatchedScene(
        scenes, sim_config=env.sim_config, device=env.device, backend=env.backend
    )
    env._enhanced_determinism = True  # a reset takes its seed from the environment's own stream
    env._initialize_episode = partial(initialize_one_by_one, env)


def initialize_one_by_one(env, env_idx, options):
    """ManiSkill's would draw one random state for all environments that start together.

    Here each starts from its own seed, as a single one would, and leaves the others alone.
    """
    attributes_before = dict(vars(env))
    not_starting = ~env.scene._reset_mask
    for i in env_idx.tolist():
        env.scene._reset_mask[:] = torch.arange(env.num_envs) == i
        env._episode_rng = env._batched_episode_rng[i]
        # as torch.manual_seed, which loses a millisecond on GPUs; reset() restores the generator
        torch.default_generator.manual_seed(int(env._episode_seed[i]))
        type(env)._initialize_episode(env, torch.tensor([i]), options)
    # TwoRobotPickCube replaces left_init_qpos, a part of its reward, in all rows, and PlugCharger
    # computes goal_pose again from where the receptacle is by now
    for name, new in vars(env).items():
        old = attributes_before.get(name)
        if new is old:
            continue
        if isinstance(new, Pose) and isinstance(old, Pose):
            new = new.raw_pose
            old = old.raw_pose
        if not torch.is_tensor(new) or not torch.is_tensor(old):
            continue
        if new.shape[:1] == old.shape[:1] == (env.num_envs,):
            new[not_starting] = old[not_starting]


def body_data_index(struct):
    """ManiSkill's asks the bodies for their rows on the GPU, which bodies in CPU scenes lack."""
    if isinstance(struct.px, BatchedSystem):
        return struct.px.body_index(struct)
    return original_body_data_index(struct)


def body_data(struct):
    """ManiSkill's takes the tensor's name from the type of the system, which is not the GPU's."""
    if isinstance(struct.px, BatchedSystem):
        return struct.px.cuda_rigid_body_data.torch()
    return original_body_data(struct)


def articulation_data_index(struct):
    """ManiSkill's asks for rows on the GPU, as with bodies."""
    if isinstance(struct.px, BatchedSystem):
        return struct.px.articulation_index(struct._objs)
    return original_articulation_data_index(struct)


def joint_data_index(joint):
    """The same for a single joint, such as the hinge of MS-CartpoleBalance-v1."""
    if isinstance(joint.px, BatchedSystem):
        return joint.px.articulation_index(joint._physx_articulations)
    return original_joint_data_index(joint)


# === 5. Separate environments: the fallback, and what the speed is compared with ===
def sync_vector_env(env_id, num_envs, autoreset_mode, **kwargs):
    def make_one():
        flat_env = flatten_actions(gym.make(env_id, sim_backend="physx_cpu", **kwargs))
        env = CPUGymWrapper(flat_env)
        # two robots: the wrapper shows the dict of actions
        env.action_space = flat_env.get_wrapper_attr("single_action_space")
        return env

    return gym.vector.SyncVectorEnv([make_one] * num_envs, autoreset_mode=autoreset_mode)


class SeparateEnvs(gym.Env):
    """ManiSkill's single CPU environments, side by side, with the interface of its batched ones."""

    device = torch.device("cpu")
    reconfiguration_freq = 0

    def __init__(self, env_id, num_envs, **kwargs):
        kwargs = {"enhanced_determinism": True} | kwargs
        self.envs = sync_vector_env(env_id, num_envs, AutoresetMode.DISABLED, **kwargs)
        self.num_envs = num_envs
        self.info = {}
        self.observation_space = self.envs.observation_space
        self.action_space = self.envs.action_space
        self.single_observation_space = self.envs.single_observation_space
        self.single_action_space = self.envs.single_action_space

    def to_torch(self, obs, info, mask):
        """mask: the environments that `info` tells about; the others keep their last values."""
        torch_mask = torch.from_numpy(mask)
        for name in info:
            if name == "reconfigure" or name.startswith("_"):
                continue
            new = torch.from_numpy(np.stack(list(info[name][mask])))
            if new.is_floating_point():
                new = new.float()
            elif new.dtype != torch.bool:
                new = new.int()
            # a copy: the tensors of earlier steps must not change
            values = self.info.get(name, new).clone()
            values[torch_mask] = new
            self.info[name] = values
        self.elapsed_steps = self.info["elapsed_steps"]
        return torch.from_numpy(obs.copy()), dict(self.info)

    def reset(self, *, seed=None, options=None):
        options = dict(options or {})
        env_idx = options.pop("env_idx", slice(None))
        mask = np.zeros(self.num_envs, bool)
        mask[env_idx] = True
        options["reset_mask"] = mask
        obs, info = self.envs.reset(seed=seed, options=options)
        return self.to_torch(obs, info, mask)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.envs.step(np.asarray(action))
        obs, info = self.to_torch(obs, info, np.ones(self.num_envs, bool))
        reward = torch.from_numpy(reward).float()
        return obs, reward, torch.tensor(terminated), torch.tensor(truncated), info

    def close(self):
        self.envs.close()


def compare_speed(env_id, num_envs=64, num_separate=16, rounds=5, steps=25):
    """Steps per second of CPU time, which other processes disturb less than wall time.

    The batch and the separate environments take turns.
    """
    torch.set_num_threads(1)
    reward_mode = "sparse" if env_id == "PlugCharger-v1" else "normalized_dense"
    started = time.perf_counter()
    batch = make(env_id, num_envs, reward_mode=reward_mode)
    print(f"created {num_envs} environments in {time.perf_counter() - started:.1f} s")
    separate = sync_vector_env(
        env_id,
        num_separate,
        AutoresetMode.SAME_STEP,
        reward_mode=reward_mode,
        control_mode="pd_joint_delta_pos",
        **STATE_ONLY,
    )
    batch.reset(seed=0)
    separate.reset(seed=0)
    batch_speeds = []
    separate_speeds = []
    for _ in range(rounds):
        batch_speeds.append(steps_per_cpu_second(batch, steps))
        separate_speeds.append(steps_per_cpu_second(separate, steps))
    batch_speed = statistics.median(batch_speeds)
    separate_speed = statistics.median(separate_speeds)
    print(
        f"{env_id}: {batch_speed:.0f} steps per CPU second in a batch of {num_envs}, "
        f"{separate_speed:.0f} in a SyncVectorEnv of\n{num_separate}, that is "
        f"{batch_speed / separate_speed:.2f} times as many (medians of {rounds} rounds)"
    )


def steps_per_cpu_second(envs, steps):
    actions = [envs.action_space.sample() for _ in range(steps)]
    started = time.process_time()
    for action in actions:
        envs.step(action)
    return steps * envs.num_envs / (time.process_time() - started)


if __name__ == "__main__":
    compare_speed(sys.argv[1] if len(sys.argv) > 1 else "StackCube-v1")
