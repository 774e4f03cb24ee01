"""Runs a named grid of algorithms, environments and seeds.

Finished runs are skipped, interrupted ones are resumed, and failed ones are listed at the end. The
same command again continues the grid. Ctrl-C lets each run save a checkpoint and end.

Each run has a folder, OUT/<algorithm>/<env>_<seed>/, with its output in output.txt. tools/plot.py
reads these folders. OUT/manifest.jsonl keeps commit, versions and machine of each start.

examples:
  ./benchmark.sh laptop --workers 2              # two runs at a time
  ./benchmark.sh laptop --dry-run                # what it would do
  ./benchmark.sh paper-dmc --slurm --submit      # the grid as an array job
  ./benchmark.sh ablation-kl --envs G1JoystickFlatTerrain -- --device cuda
"""

import argparse
import contextlib
import csv
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

EPILOG = """
FLAGS after -- are added to each script's flags. They do not change runs that are finished: use
another --out for other settings. The variable PYTHON names the interpreter (default: python).
"""
ROOT = Path(__file__).resolve().parents[1]
POLL_SECONDS = 0.1  # pause between two looks at the runs under way
PACKAGES = ["torch", "numpy", "gymnasium", "envpool", "mujoco", "mani-skill"]
ARRAY_LIMIT = 1000  # many clusters take no more tasks per array job


# === 1. The grids ===
@dataclass(frozen=True)
class Algorithm:
    label: str  # name of its folder
    script: str
    settings: dict  # its flags: {"kl_bound": 0.2} is --kl-bound 0.2


@dataclass(frozen=True)
class Stage:
    """A part of a grid: each of these algorithms on each of these environments and seeds."""

    labels: list  # of the algorithms
    envs: list
    seeds: list


@dataclass(frozen=True)
class Grid:
    summary: str  # for --help
    envs: list
    seeds: list
    algorithms: list
    settings: dict = field(default_factory=dict)  # flags of all its algorithms
    evaluates: bool = False  # evaluate finished runs of another grid instead of training
    stages: list = field(default_factory=list)  # its parts in their order; []: all at once
    same_time: bool = False  # as many steps as take the time of TruDi's run in another grid


def four_algorithms(kind, settings=None, ppo_settings=None):
    """The algorithms of the paper's main figure. `kind` is how the scripts' names end."""
    settings = settings or {}
    return [
        Algorithm("trudi", f"trudi_{kind}.py", settings),
        Algorithm("reppo", f"reppo_{kind}.py", settings),
        Algorithm("ppo", f"ppo_{kind}.py", ppo_settings or {}),
        Algorithm("dime", f"trudi_{kind}.py", {"trust_region": "none"} | settings),
    ]


def seven_algorithms(kind):
    """All that the paper compares."""
    return four_algorithms(kind) + [
        Algorithm("spo", f"ppo_{kind}.py", {"objective": "spo"}),
        Algorithm("dppo", f"dppo_{kind}.py", {}),
        Algorithm("fpo", f"fpo_{kind}.py", {}),
    ]


def kl_variants():
    variants = []
    for bound in [0.01, 0.1, 0.2, 0.4, 1, 10, 50]:
        settings = {"kl_bound": bound, "kl_bound_end": bound}
        variants.append(Algorithm(f"trudi_kl{bound}", "trudi_continuous.py", settings))
    return variants


def step_variants():
    variants = []
    for steps in [1, 2, 4, 8, 16]:
        variants.append(
            Algorithm(f"trudi_steps{steps}", "trudi_continuous.py", {"diffusion_steps": steps}),
        )
    return variants


def entropy_variants():
    variants = []
    for target in [0, -0.5, -1, -1.665, -2.5]:
        settings = {"entropy_target": target}
        variants.append(Algorithm(f"trudi_entropy{target}", "trudi_continuous.py", settings))
    return variants


def sampler_variants():
    variants = []
    for scale in [0.5, 1.0, 1.5]:
        settings = {"eval_sampler": "ode", "eval_score_scale": scale}
        variants.append(Algorithm(f"trudi_ode{scale}", "trudi_continuous.py", settings))
    variants.append(Algorithm("trudi_sde", "trudi_continuous.py", {"eval_sampler": "sde"}))
    for best_of in [10, 20]:
        settings = {"eval_sampler": "best-of-k", "eval_best_of": best_of}
        variants.append(Algorithm(f"trudi_best{best_of}", "trudi_continuous.py", settings))
    return variants


SIX_TASKS = [
    "CartpoleSwingup-v1",
    "CheetahRun-v1",
    "WalkerWalk-v1",
    "FingerSpin-v1",
    "HopperStand-v1",
    "ReacherHard-v1",
]
DMC_ENVS = [
    "AcrobotSwingup",
    "AcrobotSwingupSparse",
    "BallInCup",
    "CartpoleBalance",
    "CartpoleBalanceSparse",
    "CartpoleSwingup",
    "CartpoleSwingupSparse",
    "CheetahRun",
    "FingerSpin",
    "FingerTurnEasy",
    "FingerTurnHard",
    "FishSwim",
    "HopperHop",
    "HopperStand",
    "PendulumSwingup",
    "ReacherEasy",
    "ReacherHard",
    "WalkerRun",
    "WalkerStand",
    "WalkerWalk",
]
# EnvPool names one of them differently.
TWENTY_TASKS = [f"{env}-v1".replace("BallInCup-", "BallInCupCatch-") for env in DMC_ENVS]
HUMANOID_ENVS = [
    "G1JoystickFlatTerrain",
    "G1JoystickRoughTerrain",
    "T1JoystickFlatTerrain",
    "T1JoystickRoughTerrain",
]
MANISKILL_ENVS = [
    "PickCube-v1",
    "StackCube-v1",
    "PokeCube-v1",
    "PullCube-v1",
    "PushCube-v1",
    "RollBall-v1",
    "LiftPegUpright-v1",
    "PlaceSphere-v1",
    "PlugCharger-v1",
    "PushT-v1",
    "PullCubeTool-v1",
    "TwoRobotPickCube-v1",
    "TwoRobotStackCube-v1",
]
HUMANOIDBENCH_TASKS = [
    "walk",
    "run",
    "stand",
    "crawl",
    "hurdle",
    "stair",
    "slide",
    "maze",
    "pole",
    "balance_simple",
    "balance_hard",
    "sit_simple",
    "sit_hard",
    "push",
    "reach",
    "truck",
    "package",
    "cabinet",
    "door",
    "window",
    "room",
    "kitchen",
    "basketball",
    "bookshelf_simple",
    "bookshelf_hard",
    "cube",
    "spoon",
    "powerlift",
    "insert_normal",
    "insert_small",
]
ISAACLAB_ENVS = [
    "Isaac-Velocity-Flat-G1-v0",
    "Isaac-Velocity-Rough-G1-v0",
    "Isaac-Velocity-Flat-H1-v0",
    "Isaac-Velocity-Rough-H1-v0",
    "Isaac-Repose-Cube-Allegro-Direct-v0",
    "Isaac-Repose-Cube-Shadow-Direct-v0",
]
THREE_SEEDS = [1, 2, 3]
TEN_SEEDS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
CPU = {"device": "cpu", "total_timesteps": 1_000_000}
CUDA = {"device": "cuda", "total_timesteps": 50_000_000}
TWO_DOORS = {"device": "cpu", "total_timesteps": 200_000, "eval_points": 5, "eval_episodes": 200}
HUMANOID_SETTINGS = {
    "gamma": 0.97,
    "vmin": -10,
    "vmax": 10,
    "normalize_reward": False,
    "num_minibatches": 16,
}

# What the comparison needs first comes first.
LAPTOP_STAGES = [
    Stage(["trudi", "reppo", "ppo", "dime"], SIX_TASKS, THREE_SEEDS),
    Stage(["trudi", "reppo", "ppo"], TWENTY_TASKS, THREE_SEEDS),
    Stage(["dime"], TWENTY_TASKS, THREE_SEEDS),
    Stage(["fpo", "dppo", "spo"], SIX_TASKS, THREE_SEEDS),
    Stage(["fpo", "dppo", "spo"], TWENTY_TASKS, THREE_SEEDS),
    Stage(["trudi", "reppo", "ppo", "dime", "fpo", "dppo", "spo"], SIX_TASKS, [4, 5]),
]

GRIDS = {
    "smoke": Grid(
        summary="every algorithm on two envs for a moment: does it run at all (minutes)",
        envs=["CheetahRun-v1", "Pendulum-v1"],
        seeds=[1],
        algorithms=seven_algorithms("continuous"),
        settings=CPU | {"total_timesteps": 16_384, "eval_points": 2, "eval_episodes": 2},
    ),
    "laptop": Grid(
        summary="the paper's 20 DMC tasks x 3 seeds (6 tasks: 5) x 1M steps on a CPU (a day)",
        envs=TWENTY_TASKS,
        seeds=[1, 2, 3, 4, 5],
        algorithms=seven_algorithms("continuous"),
        settings=CPU,
        stages=LAPTOP_STAGES,
    ),
    "two-doors": Grid(
        summary="a task with two equally good ways: which algorithms keep both (an hour)",
        envs=["two_doors:TwoDoors-v0"],
        seeds=[1, 2, 3, 4, 5],
        algorithms=seven_algorithms("continuous"),
        settings=TWO_DOORS,
    ),
    "ablation-entropy": Grid(
        summary="the same with other entropy targets of TruDi",
        envs=["two_doors:TwoDoors-v0"],
        seeds=THREE_SEEDS,
        algorithms=entropy_variants(),
        settings=TWO_DOORS,
    ),
    "paper-dmc": Grid(
        summary="the paper's 20 DMC tasks x 10 seeds x 50M steps on CUDA, by MuJoCo Playground",
        envs=DMC_ENVS,
        seeds=TEN_SEEDS,
        algorithms=seven_algorithms("continuous"),
        settings={"backend": "playground"} | CUDA,
    ),
    "paper-humanoid": Grid(
        summary="G1 and T1, flat and rough terrain, by MuJoCo Playground",
        envs=HUMANOID_ENVS,
        seeds=TEN_SEEDS,
        algorithms=four_algorithms(
            "continuous", settings=HUMANOID_SETTINGS, ppo_settings={"gamma": 0.97}
        ),
        settings={"backend": "playground"} | CUDA,
    ),
    "paper-maniskill": Grid(
        summary="the paper's 13 ManiSkill tasks",
        envs=MANISKILL_ENVS,
        seeds=TEN_SEEDS,
        algorithms=four_algorithms("maniskill"),
        settings=CUDA,
    ),
    "paper-humanoidbench": Grid(
        summary="the paper's 30 HumanoidBench tasks (own virtual environment)",
        envs=[f"h1hand-{task}-v0" for task in HUMANOIDBENCH_TASKS],
        seeds=TEN_SEEDS,
        algorithms=seven_algorithms("continuous"),
        settings=CUDA,
    ),
    "paper-isaaclab": Grid(
        summary="the paper's 6 Isaac Lab tasks, 300M steps each (where Isaac Lab is installed)",
        envs=ISAACLAB_ENVS,
        seeds=TEN_SEEDS,
        algorithms=seven_algorithms("continuous"),
        settings={"device": "cuda", "total_timesteps": 300_000_000},
    ),
    "ablation-kl": Grid(
        summary="TruDi with --kl-bound 0.01 to 50 (the paper's is on IsaacLab; here 6 DMC tasks)",
        envs=SIX_TASKS,
        seeds=THREE_SEEDS,
        algorithms=kl_variants(),
        settings=CPU,
    ),
    "ablation-steps": Grid(
        summary="TruDi with --diffusion-steps 1 to 16 (the same tasks)",
        envs=SIX_TASKS,
        seeds=THREE_SEEDS,
        algorithms=step_variants(),
        settings=CPU,
    ),
    "ablation-sampler": Grid(
        summary="TruDi's finished runs of --from, evaluated with other samplers",
        envs=SIX_TASKS,
        seeds=THREE_SEEDS,
        algorithms=sampler_variants(),
        evaluates=True,
    ),
    "ablation-time": Grid(
        summary="REPPO with the time that TruDi's runs of --from took on the same task",
        envs=SIX_TASKS,
        seeds=THREE_SEEDS,
        algorithms=[Algorithm("reppo_matched", "reppo_continuous.py", {})],
        settings=CPU,
        same_time=True,
    ),
}


# === 2. The command line ===
def fail(sentence):
    print(f"error: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def words(text):
    """Words that are separated by spaces or commas."""
    return text.replace(",", " ").split()


def given(text):
    if not text:
        raise argparse.ArgumentTypeError("needs a value")
    return text


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """One sentence, without the usage."""
        message = message.replace("expected one argument", "needs a value")
        fail(re.sub(r"^argument (--[a-z-]+):", r"\1", message))


def make_parser():
    grids = "\n".join(f"  {name:<22}{grid.summary}" for name, grid in GRIDS.items())
    parser = Parser(
        prog="./benchmark.sh",
        usage="./benchmark.sh GRID [options] [-- FLAGS]",
        description=f"{__doc__.strip()}\n\ngrids:\n{grids}",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("grid", nargs="?", metavar="GRID", help="one of the grids above")
    parser.add_argument(
        "--workers",
        type=given,
        metavar="N",
        help="runs at a time (default: 1; in an array job: as many as the cluster gives)",
    )
    parser.add_argument(
        "--out", type=given, metavar="DIR", help="folder of the results (default: results/GRID)"
    )
    parser.add_argument(
        "--envs", type=given, help='other environments than the grid\'s, as "a b" or a,b'
    )
    parser.add_argument("--seeds", type=given, help='other seeds than the grid\'s, as "1 2" or 1,2')
    parser.add_argument(
        "--only",
        type=given,
        metavar="LABELS",
        help="only these of the grid's algorithms, such as trudi,dime",
    )
    parser.add_argument(
        "--from",
        type=given,
        metavar="DIR",
        dest="source",
        help="ablation-sampler, ablation-time: results to evaluate or to match "
        "(default: results/laptop)",
    )
    parser.add_argument(
        "--task",
        type=given,
        metavar="I",
        help="only the I-th run, from 0; array jobs use this",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run nothing")
    parser.add_argument(
        "--prepare",
        action="store_true",
        help="only download what the simulators need; --submit and local runs do so by themselves",
    )
    parser.add_argument(
        "--slurm",
        action="store_true",
        help="print an array job; the variables SBATCH_PARTITION, SBATCH_TIMELIMIT and so on "
        "apply when it is submitted",
    )
    parser.add_argument(
        "--submit", action="store_true", help="with --slurm: submit the job by sbatch"
    )
    return parser


def parse_args(argv):
    """Options, and the flags after `--` as args.extra."""
    extra = []
    if "--" in argv:
        split = argv.index("--")
        extra = argv[split + 1 :]
        argv = argv[:split]
    args, unknown = make_parser().parse_known_args(argv)
    args.extra = extra
    if unknown:
        fail(f"unknown option {unknown[0]}; ./benchmark.sh --help lists them")
    if not args.grid:
        fail("name a grid; ./benchmark.sh --help lists them")
    if args.grid not in GRIDS:
        fail(f"unknown grid {args.grid}; ./benchmark.sh --help lists them")
    if args.workers and not is_number(args.workers, at_least=1):
        fail(f"--workers must be a positive number, not {args.workers}")
    for seed in words(args.seeds or ""):
        if not is_number(seed):
            fail(f"--seeds must be numbers, not {seed}")
    if args.submit and not args.slurm:
        fail("--submit goes with --slurm")
    if args.submit and args.dry_run:
        fail("--submit does not go with --dry-run")
    return args


def is_number(text, at_least=0):
    return re.fullmatch("[0-9]+", text) is not None and int(text) >= at_least


# === 3. The runs of a grid ===
@dataclass(frozen=True)
class Run:
    label: str
    env: str
    seed: int
    folder: Path
    script: Path
    flags: list
    settings: dict  # the flags that the grid sets, as values
    source: Path | None  # folder of the finished run to evaluate; None: train

    def title(self):
        return f"{self.label} {self.env} seed {self.seed}"

    def is_finished(self):
        return (self.folder / "eval.json").exists()

    def state(self):
        """What is to be done: start, resume, evaluate, or nothing if it is finished."""
        if self.is_finished():
            return "finished"
        if self.source:
            return "evaluate"
        if (self.folder / "checkpoint.pt").exists():
            return "resume"
        return "start"

    def policy(self):
        """The file to evaluate. Runs of older scripts have no policy.pt."""
        policy = self.source / "policy.pt"
        return policy if policy.exists() else self.source / "checkpoint.pt"

    def command(self):
        if self.source:
            command = [sys.executable, self.script, "--evaluate", self.policy(), *self.flags]
            command += ["--run-dir", self.folder]
        else:
            command = [sys.executable, self.script, "--env-id", self.env, "--seed", self.seed]
            command += self.flags
            command += ["--resume" if self.state() == "resume" else "--run-dir", self.folder]
        return [str(word) for word in command]


def to_flags(settings):
    """{"kl_bound": 0.2, "track": False} -> ["--kl-bound", "0.2", "--no-track"]"""
    flags = []
    for name, value in settings.items():
        name = name.replace("_", "-")
        if value is True:
            flags.append(f"--{name}")
        elif value is False:
            flags.append(f"--no-{name}")
        else:
            flags += [f"--{name}", str(value)]
    return flags


def number_of_cores():
    """The cores that this process may use; a cluster gives fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def project_folder():
    """Relative where possible: args.json of each run keeps the path of its folder."""
    if ROOT.is_relative_to(Path.cwd()):
        return ROOT.relative_to(Path.cwd())
    return ROOT


def output_folder(args):
    return Path(args.out) if args.out else project_folder() / "results" / args.grid


def source_folder(args):
    return Path(args.source) if args.source else project_folder() / "results/laptop"


def choose_algorithms(args):
    algorithms = GRIDS[args.grid].algorithms
    if args.only:
        algorithms = [item for item in algorithms if item.label in words(args.only)]
    if not algorithms:
        fail(f"--only {args.only} names none of the algorithms of {args.grid}")
    return algorithms


def seconds_per_step(folder, env):
    """The pace of the fastest finished run of an algorithm on a task, or None."""
    paces = []
    for log in folder.glob(f"{env}_*/metrics.csv"):
        if not (log.parent / "eval.json").exists():
            continue
        with log.open() as file:
            rows = list(csv.DictReader(file))
        if rows:
            paces.append(float(rows[-1]["time/elapsed"]) / float(rows[-1]["global_step"]))
    return min(paces, default=None)


def steps_in_the_time_of_trudi(args, env, steps):
    """How many steps REPPO makes on a task while TruDi makes `steps`."""
    source = source_folder(args)
    trudi = seconds_per_step(source / "trudi", env)
    reppo = seconds_per_step(source / "reppo", env)
    if trudi is None or reppo is None:
        fail(f"{args.grid} needs finished runs of trudi and reppo on {env} in {source}")
    return round(steps * trudi / reppo)


def make_run(args, algorithm, env, seed):
    grid = GRIDS[args.grid]
    settings = algorithm.settings | grid.settings
    if grid.same_time:
        steps = settings["total_timesteps"]
        settings["total_timesteps"] = steps_in_the_time_of_trudi(args, env, steps)
    if settings.get("device") == "cuda":
        workers = int(args.workers or 1)
        settings["torch_threads"] = max(number_of_cores() // workers, 1)
    name = f"{re.sub('[^A-Za-z0-9.-]', '_', env)}_{seed}"
    return Run(
        label=algorithm.label,
        env=env,
        seed=seed,
        folder=output_folder(args) / algorithm.label / name,
        script=project_folder() / algorithm.script,
        flags=[*to_flags(settings), *args.extra],
        settings=settings,
        source=source_folder(args) / "trudi" / name if grid.evaluates else None,
    )


def chosen(given, of_stage, of_grid):
    """What the command line names, without what belongs to other stages; otherwise the stage's."""
    if not given:
        return of_stage
    return [item for item in given if item in of_stage or item not in of_grid]


def plan(args):
    """(algorithm, env, seed) of all runs, stage by stage. In a stage seeds are outermost, so an
    interrupted grid has whole seeds."""
    grid = GRIDS[args.grid]
    envs = words(args.envs or "")
    seeds = [int(seed) for seed in words(args.seeds or "")]
    algorithms = {algorithm.label: algorithm for algorithm in choose_algorithms(args)}
    stages = grid.stages or [Stage(list(algorithms), grid.envs, grid.seeds)]
    runs = {}  # a later stage may name a run again
    for stage in stages:
        for seed in chosen(seeds, stage.seeds, grid.seeds):
            for env in chosen(envs, stage.envs, grid.envs):
                for label in stage.labels:
                    if label in algorithms:
                        runs.setdefault((label, env, seed), (algorithms[label], env, seed))
    return list(runs.values())


def make_runs(args):
    return [make_run(args, algorithm, env, seed) for algorithm, env, seed in plan(args)]


# === 4. Running them ===
def say(text):
    """Print. A terminal that was closed must not end the runner before its runs."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


@dataclass
class Job:
    """A run under way."""

    run: Run
    process: subprocess.Popen
    log: IO  # output.txt, which also carries the lock of the folder
    log_start: int  # where the output of this process begins
    started: float
    signals: int = 0  # how many were passed on


def last_line(path, start):
    """The last line of the output from a position on. A progress line ends with \\r."""
    with path.open("rb") as file:
        file.seek(start)
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in re.split("[\r\n]", text) if line.strip()]
    return lines[-1] if lines else "no output"


def lock(log):
    """Whether this process may write to the folder.

    The run inherits the lock, so it holds as long as either of them lives.
    """
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        say("warning: no locks on this file system: start each grid once only")
    return True


def can_be_evaluated(run):
    """Whether its source is a finished run with its files."""
    needed = [run.source / "eval.json", run.source / "args.json", run.policy()]
    return all(path.exists() for path in needed)


def write_evaluated_settings(run):
    """args.json for tools/plot.py: the settings of the finished run with the new sampler."""
    settings = json.loads((run.source / "args.json").read_text())
    (run.folder / "args.json").write_text(json.dumps(settings | run.settings, indent=1))


class Runner:
    """Keeps a number of runs going until all are done, or until a signal arrives."""

    def __init__(self, runs, workers):
        self.runs = runs
        self.workers = workers
        self.jobs = []
        self.failures = {}  # folder -> sentence
        self.signals = 0

    def on_signal(self, number, frame):
        self.signals += 1

    def catch_signals(self):
        for number in [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(number, self.on_signal)

    def start(self, run):
        """Start a run that nobody else works on, if there is anything to do."""
        if run.is_finished():
            return
        run.folder.mkdir(parents=True, exist_ok=True)
        log = (run.folder / "output.txt").open("a")
        if not lock(log):
            self.failures[run.folder] = f"{run.folder} is in use by another process"
            say(self.failures[run.folder])
            log.close()
            return
        state = run.state()
        say(f"{state} {run.title()}")
        if state == "finished":  # by another process, a moment ago
            log.close()
        elif state == "evaluate" and not can_be_evaluated(run):
            sentence = f"error: {run.source} is not a finished run with a checkpoint"
            self.failures[run.folder] = sentence
            log.write(sentence + "\n")
            log.close()
        else:
            self.start_process(run, log)

    def start_process(self, run, log):
        if run.source:
            write_evaluated_settings(run)
        log_start = os.fstat(log.fileno()).st_size
        process = subprocess.Popen(
            run.command(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C in the terminal reaches the runner only
        )
        self.jobs.append(Job(run, process, log, log_start, time.time()))

    def finish(self, job):
        run = job.run
        if run.source:
            written = run.folder / f"eval_{run.policy().stem}.json"
            if written.exists():
                os.replace(written, run.folder / "eval.json")
        if run.is_finished():
            say(f"finished {run.title()} in {time.time() - job.started:.0f} s")
        else:
            code = job.process.returncode
            if code < 0:
                code = 128 - code  # as shells count: 128 + the signal that ended it
            last = last_line(run.folder / "output.txt", job.log_start)
            self.failures[run.folder] = f"{last} (it ended with code {code})"
            job.log.write(f"\nended with code {code}\n")
        job.log.close()

    def look_after_jobs(self):
        """Pass signals on, one TERM for each, and finish what has ended."""
        for job in self.jobs:
            if job.signals < self.signals:
                job.signals += 1
                job.process.terminate()
        ended = [job for job in self.jobs if job.process.poll() is not None]
        for job in ended:
            self.jobs.remove(job)
            self.finish(job)

    def wait_until_fewer_than(self, limit):
        self.look_after_jobs()
        while len(self.jobs) >= limit:
            time.sleep(POLL_SECONDS)
            self.look_after_jobs()

    def run_all(self):
        for run in self.runs:
            self.wait_until_fewer_than(self.workers)
            if self.signals:
                break
            self.start(run)
        self.wait_until_fewer_than(1)

    def report(self, grid, out):
        """Say what is finished and list the rest. -> exit code"""
        unfinished = [run for run in self.runs if not run.is_finished()]
        num_finished = len(self.runs) - len(unfinished)
        say(f"{num_finished} of {len(self.runs)} runs of {grid} are finished, in {out}")
        if not unfinished:
            return 0
        verb = "were stopped or failed" if self.signals else "failed"
        lines = [f"error: {len(unfinished)} of {len(self.runs)} runs {verb}:"]
        for run in unfinished:
            lines.append(f"  {run.title()}: {self.failures.get(run.folder, 'not started')}")
        with contextlib.suppress(OSError):
            print("\n".join(lines), file=sys.stderr, flush=True)
        return 1


# What simulators download when they are first used, without a lock: several runs at once would
# write over each other's files.
FETCH_PHYSX = "from sapien import physx; physx.enable_gpu()"
FETCH_MENAGERIE = "from mujoco_playground._src import mjx_env; mjx_env.ensure_menagerie_exists()"


def downloads(runs):
    """name -> code that fetches it, for what these runs will need"""
    needed = {}
    for run in runs:
        on_gpu = run.settings.get("device") == "cuda" or "cuda" in run.flags
        if run.script.name.endswith("_maniskill.py") and on_gpu:
            needed["PhysX for GPUs"] = FETCH_PHYSX
        is_robot = run.settings.get("backend") == "playground" and run.env not in DMC_ENVS
        if is_robot and "MENAGERIE_PATH" not in os.environ:
            needed["MuJoCo Menagerie"] = FETCH_MENAGERIE
    return needed


def prepare(runs):
    """Fetch it once, before the runs start. A failure is theirs to report, or to overcome."""
    for name, code in downloads(runs).items():
        say(f"prepare {name}, unless it is there already")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines() or ["no output"]
            say(f"warning: {name} could not be prepared: {lines[-1]}")


# === 5. The manifest and array jobs ===
def output_of(*command):
    """What a program prints, or nothing where it is missing."""
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def name_of_cpu():
    with contextlib.suppress(OSError):
        match = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        if match:
            return match[1]
    return platform.processor()


def installed_packages():
    installed = {}
    for package in importlib.metadata.distributions():
        if package.name:
            installed[package.name.replace("_", "-")] = package.version
    return {name: installed[name] for name in PACKAGES if name in installed}


def describe_start(grid, num_runs, workers):
    git = ["git", "-C", str(ROOT)]
    changed = output_of(*git, "status", "--porcelain", "--untracked-files=no")
    gpus = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return {
        "grid": grid,
        "runs": num_runs,
        "workers": workers,
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "git": output_of(*git, "rev-parse", "HEAD") or None,
        "changed_files": changed.splitlines(),
        "python": platform.python_version(),
        "versions": installed_packages(),
        "machine": {
            "platform": platform.platform(),
            "cpu": name_of_cpu(),
            "cores": os.cpu_count(),
            "gpu": gpus.splitlines(),
        },
    }


def quoted(word):
    """A word for the shell, always in single quotes."""
    return "'" + str(word).replace("'", "'\\''") + "'"


def array_job(args, num_runs):
    """Text of a Slurm job whose I-th task is the I-th run."""
    command = ["bash", ROOT / "benchmark.sh", args.grid]
    command += ["--out", output_folder(args).resolve(), "--from", source_folder(args).resolve()]
    if args.envs:
        command += ["--envs", args.envs]
    if args.seeds:
        command += ["--seeds", args.seeds]
    if args.only:
        command += ["--only", args.only]
    call = " ".join(quoted(word) for word in command)
    call = f'exec {call} --task "$SLURM_ARRAY_TASK_ID"'
    if args.extra:
        call += " -- " + " ".join(quoted(word) for word in args.extra)
    at_a_time = f"%{args.workers}" if args.workers else ""
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={args.grid}",
        f"#SBATCH --array=0-{num_runs - 1}{at_a_time}",
        "#SBATCH --cpus-per-task=8",
        "#SBATCH --mem=32G",
        "#SBATCH --time=24:00:00",
        "#SBATCH --signal=B:TERM@300",
        "#SBATCH --output=slurm-%A_%a.out",
    ]
    if GRIDS[args.grid].settings.get("device") == "cuda" or "cuda" in args.extra:
        lines.append("#SBATCH --gres=gpu:1")
    lines += [f"export PYTHON={quoted(sys.executable)}", call]
    return "\n".join(lines) + "\n"


def print_or_submit(args, runs):
    num_runs = len(runs)
    if num_runs > ARRAY_LIMIT:
        note = f"many clusters take {ARRAY_LIMIT} an array at most"
        print(f"note: {num_runs} tasks; {note}, so split it by --seeds", file=sys.stderr)
    job = array_job(args, num_runs)
    if not args.submit:
        print(job, end="")
        return 0
    prepare(runs)
    try:
        return subprocess.run(["sbatch"], input=job, text=True).returncode
    except OSError:
        fail("sbatch is missing: --submit works on a machine of the cluster")


def print_plan(runs):
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    for run in runs:
        line = f"{run.state()} {run.label} {run.env} {run.seed}"
        if not run.is_finished():
            line += f": {shlex.join(run.command())}"
        print(line)


def main(argv=None):
    args = parse_args(sys.argv[1:] if argv is None else argv)
    runs = make_runs(args)
    num_runs = len(runs)
    if args.task:
        if not is_number(args.task) or int(args.task) >= num_runs:
            fail(f"--task must be a number below {num_runs}, not {args.task}")
        runs = [runs[int(args.task)]]
    if args.slurm:
        return print_or_submit(args, make_runs(args))
    if args.dry_run:
        print_plan(runs)
        return 0
    if not args.task:  # a task of an array job comes after --submit
        prepare(runs)
    if args.prepare:
        return 0

    out = output_folder(args)
    workers = int(args.workers or 1)
    manifest = json.dumps(describe_start(args.grid, num_runs, workers))
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / "manifest.jsonl").open("a") as file:
            file.write(manifest + "\n")
    except OSError as error:
        fail(f"cannot write to {out}: {error.strerror}")
    runner = Runner(runs, workers)
    runner.catch_signals()
    runner.run_all()
    return runner.report(args.grid, out)


if __name__ == "__main__":
    sys.exit(main())
