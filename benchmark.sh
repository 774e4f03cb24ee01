#!/usr/bin/env bash
# Runs a named grid of (algorithm, env, seed). What is finished is skipped, what was interrupted goes on, what fails is
# listed at the end. Each run has a folder, OUT/<algorithm>/<env>_<seed>/, which plot.py reads.
#
#   ./benchmark.sh laptop --workers 2              # two runs at a time; the same command again goes on
#   ./benchmark.sh laptop --dry-run                # what it would do
#   ./benchmark.sh paper-dmc --slurm --submit      # the same grid as an array job; without --submit it is printed
#   ./benchmark.sh ablation-kl --envs G1JoystickFlatTerrain -- --device cuda --total-timesteps 50000000
#
# Grids:
#   smoke                 every algorithm on two envs for a moment: does it run at all (minutes)
#   laptop                6 DMC tasks x 3 seeds x 1M steps on a CPU (two cores, overnight)
#   paper-dmc             the paper's 20 DMC tasks x 10 seeds x 50M steps on CUDA, by MuJoCo Playground
#   paper-humanoid        G1 and T1, flat and rough, by MuJoCo Playground
#   paper-maniskill       the paper's 13 ManiSkill tasks
#   paper-humanoidbench   the paper's 30 HumanoidBench tasks by Gymnasium; they need a virtual environment of their own
#   ablation-kl           TruDi with --kl-bound 0.01 to 50      (the paper's is on IsaacLab; here 3 DMC tasks on a CPU)
#   ablation-steps        TruDi with --diffusion-steps 1 to 32  (the same tasks)
#   ablation-sampler      TruDi's finished runs of --from, evaluated with other samplers
#
# Options:
#   --workers N      runs at a time (default 1; an array job without it: as many as the cluster gives)
#   --out DIR        folder of the results (default results/<grid>)
#   --envs, --seeds  other envs or seeds than the grid's, as "a b" or a,b
#   --only LABELS    only these of the grid's algorithms, such as trudi,dime
#   --from DIR       ablation-sampler: results to evaluate (default results/laptop)
#   --task I         only the I-th run, from 0; what the array job calls
#   --dry-run        print the commands, run nothing
#   --slurm          print an array job; SBATCH_PARTITION, SBATCH_TIMELIMIT, ... apply when it is submitted
#   --submit         with --slurm: hand it to sbatch
#   -- FLAGS         more flags for each script. They do not touch finished runs: take another --out for other settings
# Environment: PYTHON, the interpreter (default python).

root=$(dirname "$0") python=${PYTHON:-python}
smoke="CheetahRun-v1 Pendulum-v1"
laptop="CartpoleSwingup-v1 CheetahRun-v1 WalkerWalk-v1 FingerSpin-v1 HopperStand-v1 ReacherHard-v1"
dmc="AcrobotSwingup AcrobotSwingupSparse BallInCup CartpoleBalance CartpoleBalanceSparse CartpoleSwingup
  CartpoleSwingupSparse CheetahRun FingerSpin FingerTurnEasy FingerTurnHard FishSwim HopperHop HopperStand PendulumSwingup
  ReacherEasy ReacherHard WalkerRun WalkerStand WalkerWalk"
humanoid="G1JoystickFlatTerrain G1JoystickRoughTerrain T1JoystickFlatTerrain T1JoystickRoughTerrain"
maniskill="PickCube-v1 StackCube-v1 PokeCube-v1 PullCube-v1 PushCube-v1 RollBall-v1 LiftPegUpright-v1 PlaceSphere-v1
  PlugCharger-v1 PushT-v1 PullCubeTool-v1 TwoRobotPickCube-v1 TwoRobotStackCube-v1"
humanoidbench=$(printf "humanoid_bench:h1hand-%s-v0 " walk run stand crawl hurdle stair slide maze pole balance_simple \
  balance_hard sit_simple sit_hard push reach truck package cabinet door window room kitchen basketball \
  bookshelf_simple bookshelf_hard cube spoon powerlift insert_normal insert_small)

die() {
  echo "error: $1" >&2
  exit 2
}

help() {
  sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
  exit
}

[[ -n ${1-} ]] || die "name a grid; ./benchmark.sh --help lists them"
[[ ! $1 =~ ^(-h|--help)$ ]] || help
grid=$1 workers="" out=$root/results/$1 from=$root/results/laptop envs="" seeds="" only="" task="" mode=run submit=""
shift
while (($#)); do
  case $1 in
  --workers | --out | --envs | --seeds | --only | --from | --task)
    [[ -n ${2-} ]] || die "$1 needs a value"
    declare "${1#--}=$2"
    shift
    ;;
  --dry-run | --slurm) mode=${1#--} ;;
  --submit) submit=yes ;;
  --help | -h) help ;;
  --) shift && extra=("$@") && break ;;
  *) die "unknown option $1; ./benchmark.sh --help lists them" ;;
  esac
  shift
done
[[ ${workers:-1} =~ ^[1-9][0-9]*$ ]] || die "--workers must be a positive number, not $workers"
[[ -z $submit || $mode == slurm ]] || die "--submit goes with --slurm"

labels=() scripts=() flags=()
algorithm() { # label, script, flags
  [[ -z $only || ,${only// /,}, == *,$1,* ]] || return 0
  labels+=("$1") scripts+=("$2") flags+=("${*:3} $common")
}
all() { # the paper's main figure; $1 is how the scripts' names end
  algorithm trudi "trudi_$1.py"
  algorithm reppo "reppo_$1.py"
  algorithm ppo "ppo_$1.py"
  algorithm dime "trudi_$1.py" --trust-region none
}

threads=$(($(nproc) / ${workers:-1}))
cuda="--device cuda --total-timesteps 50000000 --torch-threads $((threads > 0 ? threads : 1))"
cpu="--device cpu --total-timesteps" ten="1 2 3 4 5 6 7 8 9 10"
case $grid in # each line: the grid's envs, seeds, common flags; then its algorithms
smoke) lists=("$smoke" 1) common="$cpu 16384 --eval-points 2 --eval-episodes 2" && all continuous ;;
laptop) lists=("$laptop" "1 2 3") common="$cpu 1000000" && all continuous ;;
paper-dmc) lists=("$dmc" "$ten") common="--backend playground $cuda" && all continuous ;;
paper-humanoid) lists=("$humanoid" "$ten") common="--backend playground $cuda" && all continuous ;;
paper-maniskill) lists=("$maniskill" "$ten") common=$cuda && all maniskill ;;
paper-humanoidbench) lists=("$humanoidbench" "$ten") common=$cuda && all continuous ;;
ablation-kl)
  lists=("CheetahRun-v1 WalkerWalk-v1 FingerSpin-v1" "1 2 3") common="$cpu 1000000"
  for x in 0.01 0.1 0.2 0.4 1 10 50; do algorithm "trudi_kl$x" trudi_continuous.py --kl-bound "$x"; done
  ;;
ablation-steps)
  lists=("CheetahRun-v1 WalkerWalk-v1 FingerSpin-v1" "1 2 3") common="$cpu 1000000"
  for x in 1 4 8 16 32; do algorithm "trudi_steps$x" trudi_continuous.py --diffusion-steps "$x"; done
  ;;
ablation-sampler)
  lists=("$laptop" "1 2 3") common=""
  for x in 0.5 1.0 1.5; do
    algorithm "trudi_ode$x" trudi_continuous.py --eval-sampler ode --eval-score-scale "$x"
  done
  algorithm trudi_sde trudi_continuous.py --eval-sampler sde
  for x in 10 20; do algorithm "trudi_best$x" trudi_continuous.py --eval-sampler best-of-k --eval-best-of "$x"; done
  ;;
*) die "unknown grid $grid; ./benchmark.sh --help lists them" ;;
esac
((${#labels[@]})) || die "--only $only names none of the algorithms of $grid"

runs=() # seeds outermost: an interrupted grid has whole seeds
for seed in $(tr , ' ' <<<"${seeds:-${lists[1]}}"); do
  [[ $seed =~ ^[0-9]+$ ]] || die "--seeds must be numbers, not $seed"
  for env in $(tr , ' ' <<<"${envs:-${lists[0]}}"); do
    for i in "${!labels[@]}"; do runs+=("$i $env $seed"); done
  done
done
total=${#runs[@]}
if [[ -n $task ]]; then
  [[ $task =~ ^[0-9]+$ ]] && ((task < total)) || die "--task must be a number below $total, not $task"
  runs=("${runs[task]}")
fi

if [[ $mode == slurm ]]; then
  ((total <= 1000)) || echo "note: $total tasks; many clusters take 1000 an array at most, so split it by --seeds" >&2
  words=(bash "$(realpath "$0")" "$grid" --out "$(realpath -m "$out")" --from "$(realpath -m "$from")")
  [[ -z $envs ]] || words+=(--envs "$envs")
  [[ -z $seeds ]] || words+=(--seeds "$seeds")
  [[ -z $only ]] || words+=(--only "$only")
  job="#!/usr/bin/env bash
#SBATCH --job-name=$grid
#SBATCH --array=0-$((total - 1))${workers:+%$workers}
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --output=slurm-%A_%a.out"
  [[ $common == *cuda* || " ${extra[*]} " == *" cuda "* ]] && job+=$'\n'"#SBATCH --gres=gpu:1"
  job+=$'\n'"export PYTHON=${python@Q}"
  job+=$'\n'"exec ${words[*]@Q} --task \"\$SLURM_ARRAY_TASK_ID\"${extra[*]:+ -- ${extra[*]@Q}}"
  if [[ $submit ]]; then sbatch <<<"$job"; else echo "$job"; fi
  exit
fi

describe() { # a run -> its parts as global variables, and the command that it needs now, if any
  read -r index env seed <<<"$1"
  label=${labels[index]} script=$root/${scripts[index]}
  name=${env//[^A-Za-z0-9.-]/_}_$seed
  dir=$out/$label/$name state=start
  read -ra given <<<"${flags[index]}"
  local train=("$python" "$script" --env-id "$env" --seed "$seed" "${given[@]}" "${extra[@]}")
  command=("${train[@]}" --run-dir "$dir")
  if [[ -e $dir/eval.json ]]; then
    state=finished command=()
  elif [[ $grid == ablation-sampler ]]; then
    state=evaluate command=("$python" "$script" --evaluate "$dir/source.pt" "${given[@]}" "${extra[@]}")
  elif [[ -e $dir/checkpoint.pt ]]; then
    state=resume command=("${train[@]}" --resume "$dir")
  fi
}

link_source() { # for ablation-sampler: the checkpoint of a finished run, under the name that eval_*.json takes
  local source=$from/trudi/$name
  if [[ ! -e $source/eval.json || ! -e $source/checkpoint.pt ]]; then
    echo "error: $source is not a finished run with a checkpoint"
    return 1
  fi
  ln -sf "$(realpath "$source/checkpoint.pt")" "$dir/source.pt"
  "$python" - "$source/args.json" "$dir/args.json" "${given[@]}" <<'PYTHON'
import json, sys
args, flags = json.load(open(sys.argv[1])), sys.argv[3:]
for flag, value in zip(flags[::2], flags[1::2]):
    key = flag[2:].replace("-", "_")
    args[key] = type(args[key])(value)
json.dump(args, open(sys.argv[2], "w"), indent=1)
PYTHON
}

execute() { # a run, in a subshell of its own; its output goes to a file
  describe "$1"
  [[ $state != finished ]] || return 0
  mkdir -p "$dir"
  local log=$dir/output.txt start=$SECONDS
  exec 9>>"$log"
  local rc=0
  flock -n -E 75 9 || rc=$?
  ((rc != 75)) || { echo "$dir is in use by another process" && return 1; } # which holds the lock for as long as it lives
  ((rc == 0)) || echo "warning: no locks on this file system: start each grid once only"
  echo "$state $label $env seed $seed"
  [[ $state != evaluate ]] || link_source >>"$log" 2>&1 || return 1
  "${command[@]}" >>"$log" 2>&1 &
  trap 'kill -TERM $! 2>/dev/null' TERM # the script saves a checkpoint and ends
  wait $! || wait $! && rc=0 || rc=$?   # a trapped signal ends the first wait
  ((rc == 0)) || echo "$(tail -n 1 "$log") (it ended with code $rc)" >>"$log"
  [[ $state != evaluate || ! -e $dir/eval_source.json ]] || mv "$dir/eval_source.json" "$dir/eval.json"
  [[ -e $dir/eval.json ]] && echo "finished $label $env seed $seed in $((SECONDS - start)) s"
}

if [[ $mode == dry-run ]]; then
  for run in "${runs[@]}"; do
    describe "$run"
    echo "${state} ${label} ${env} ${seed}${command[*]:+: ${command[*]}}"
  done
  exit
fi

mkdir -p "$out" || die "cannot write to $out"
about=$("$python" - "$grid" "$total" "${workers:-1}" "$root" <<'PYTHON'
import importlib.metadata, json, os, platform, re, subprocess, sys, time
grid, total, workers, root = sys.argv[1:]
def output(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
try:
    cpu = re.search(r"model name\s*: (.*)", open("/proc/cpuinfo").read())[1]
except (OSError, TypeError):
    cpu = platform.processor()
packages = "torch numpy gymnasium envpool mujoco mani-skill".split()
installed = {d.name.replace("_", "-"): d.version for d in importlib.metadata.distributions() if d.name}
print(json.dumps(dict(
    grid=grid, runs=int(total), workers=int(workers), started=time.strftime("%Y-%m-%d %H:%M:%S %z"),
    git=output("git", "-C", root, "rev-parse", "HEAD") or None,
    changed_files=output("git", "-C", root, "status", "--porcelain", "--untracked-files=no").splitlines(),
    python=platform.python_version(), versions={k: installed[k] for k in packages if k in installed},
    machine=dict(platform=platform.platform(), cpu=cpu, cores=os.cpu_count(),
                 gpu=output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()),
)))
PYTHON
) || die "$python does not work: set PYTHON to an interpreter that has the requirements"
echo "$about" >>"$out/manifest.jsonl"

stopped=""
set -m # a process group for each run: Ctrl-C reaches this shell only, which passes one signal on to each
trap 'stopped=yes; kill -TERM $(jobs -rp) 2>/dev/null' INT TERM HUP
for run in "${runs[@]}"; do
  while (($(jobs -rp | wc -l) >= ${workers:-1})); do wait -n; done
  [[ -z $stopped ]] || break
  execute "$run" &
done
while [[ $(jobs -rp) ]]; do wait; done

failed=()
for run in "${runs[@]}"; do
  describe "$run"
  [[ $state != finished ]] || continue
  failed+=("$label $env seed $seed: $(tail -n 1 "$dir/output.txt" 2>/dev/null || echo "not started")")
done
echo "$((${#runs[@]} - ${#failed[@]})) of ${#runs[@]} runs of $grid are finished, in $out"
((${#failed[@]})) || exit 0
{
  echo "error: ${#failed[@]} of ${#runs[@]} runs ${stopped:+were stopped or }failed:"
  printf '  %s\n' "${failed[@]}"
} >&2
exit 1
