#!/usr/bin/env bash
# The first half hour on a GPU as three calls of under ten minutes each: bench/gpu/stages.sh 1|2|3 [--dry].
#
# Everything a stage measures is in $OUT (results/gpu-run here, if that is not set) as soon as it is measured:
# stageN.json with its table stageN.md, the journal stageN.jsonl, the output stageN.log; stage 1 leaves calibration.json
# as well. Each step runs under its own timeout, and the next one begins whatever came of it. Needs torch, triton and
# this tree, which need not be installed. Exit status: 2 if anything was wrong, failed or was lost.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1

stage=${1:-}
case "$stage" in 1 | 2 | 3) ;; *) echo "usage: bench/gpu/stages.sh 1|2|3 [--dry]" >&2; exit 64 ;; esac
python=${PYTHON:-python3}
out=${OUT:-results/gpu-run}
mkdir -p "$out"
out=$(cd "$out" && pwd)
json=$out/stage$stage.json
work=${TMPDIR:-/tmp}/attn_pass_stages
mkdir -p "$work"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=$work/inductor TRITON_CACHE_DIR=$work/triton
exec > >(tee -a "$out/stage$stage.log") 2>&1

shards=6
slower=1
how=()
if [ "${2:-}" = --dry ]; then
    shards=2
    slower=5 # a CPU may be busy, and nothing is timed
    how=(--device cpu --dry --quick)
    # Without the second Inductor builds libraries for ten seconds, to learn what this CPU can do.
    export OMP_NUM_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1
fi
eval "$("$python" -m bench.gpu.toolchain)"

worst=0
# step SECONDS PARTS [ARGS...]: one run of the bench, ended a little after its time.
step() {
    local seconds=$(($1 * slower)) parts=$2
    shift 2
    echo "== stage $stage: $parts $* ($seconds s)"
    timeout -k 10 $((seconds + 25)) "$python" -m bench.gpu --only "$parts" --json "$json" --seconds "$seconds" \
        --stall 120 ${how[@]+"${how[@]}"} "$@" > >(tail -n 60) 2>&1
    ended "$parts $*" $?
}

ended() {
    if [ "$2" -ne 0 ]; then echo "== $1 ended with $2"; fi
    if [ "$2" -gt 1 ]; then worst=2; elif [ "$2" -gt "$worst" ]; then worst=$2; fi
}

# background SECONDS PARTS [ARGS...]: a step beside others; its status is that of its subshell, which join collects.
waiting=()
background() {
    (
        worst=0
        step "$@"
        exit "$worst"
    ) &
    waiting+=($!)
}

# sharded SECONDS PARTS: one run as several processes on one device, for what needs no clock.
sharded() {
    local number
    for number in $(seq "$shards"); do background "$1" "$2" --shard "$number/$shards"; done
}

join() {
    local pid
    for pid in ${waiting[@]+"${waiting[@]}"}; do wait "$pid" || ended "a process in the background" $?; done
    waiting=()
}

case "$stage" in
    1)
        step 150 smoke
        sharded 150 correctness
        background 150 rules,probes
        join
        step 150 kernels,decode
        echo "== calibrate"
        if [ ${#how[@]} -eq 0 ]; then
            ATTN_PASS_CACHE_DIR=$work/calibration timeout -k 5 60 "$python" -c 'from attn_pass.cli.main import main; main()' \
                calibrate --seconds 40 --keep-if-busy --json > "$out/calibration.json"
            ended calibrate $?
        fi
        ;;
    2)
        sharded 140 compile
        join
        step 280 floors
        step 90 flex
        ;;
    3)
        step 110 tiles
        step 150 seeds
        step 120 model
        step 80 tuned
        step 60 counters
        ;;
esac

"$python" -m bench.gpu --collect --json "$json" | tail -n 40
ended "stage $stage" "${PIPESTATUS[0]}"
echo "== stage $stage: exit status $worst"
exit "$worst"
