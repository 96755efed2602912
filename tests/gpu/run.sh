#!/usr/bin/env bash
# Runs all tests and benchmarks on a machine with a GPU, from binaries that collect.sh built and without cargo:
#
#   tests/gpu/run.sh FOLDER > figures.jsonl
#
# Prints one JSON object per line: one for each fact about the driver, each step and each measurement. The output of the
# steps goes to FOLDER/log (or PINPOOL_GPU_LOG), and a table of all steps to FOLDER/log/table.md. The exit status is 0
# only if every step succeeded; a missing requirement of a step is a failure too. A run takes at most ten minutes. After
# an interruption, the next run skips the steps that succeeded, unless PINPOOL_GPU_AGAIN=1.
#
# | variable | default | meaning |
# | --- | --- | --- |
# | PINPOOL_GPU_EXCEPT | | backends that this machine need not have: vmm, or vmm,register |
# | PINPOOL_GPU_STEPS | facts c run run_torch wheel allocator libraries shared suite torch copy stall pin load hit peers | the steps, in this order |
# | PINPOOL_GPU_THREADS | 1 4 8 16 | threads of `pinpool-bench hit` |
# | PINPOOL_GPU_SUITE_SECONDS | 150 | the longest that the suite may take over one backend |
# | PINPOOL_GPU_SUITE | | only tests of the suite whose names contain one of these words |
# | PINPOOL_GPU_SECONDS | 2 | length of each measurement |
# | PINPOOL_GPU_SIZES | those of `pinpool-bench copy` | sizes that are copied |
# | PINPOOL_GPU_PIN | 1GiB | bytes pinned by `pinpool-bench pin` |
# | PINPOOL_GPU_FILES | 10000 | files of the synthetic data set |
# | PINPOOL_GPU_TREE | Python's library, else /usr/share | a real tree to load |
# | PINPOOL_GPU_BUDGET | 570 | seconds in all |
set -uo pipefail
bin=$(realpath "${1:?usage: run.sh FOLDER}")
log=${PINPOOL_GPU_LOG:-$bin/log}
mkdir -p "$log"

steps=${PINPOOL_GPU_STEPS:-facts c run run_torch wheel allocator libraries shared suite torch copy stall pin load hit peers}
seconds=${PINPOOL_GPU_SECONDS:-2}
ends=$((SECONDS + ${PINPOOL_GPU_BUDGET:-570}))
failed=0
export PINPOOL_REQUIRE_GPU=1 PINPOOL_GPU_EXCEPT=${PINPOOL_GPU_EXCEPT:-}

# The backends that this machine must have.
backends=()
for backend in vmm register cuda; do
    case ",$PINPOOL_GPU_EXCEPT," in *",$backend,"*) ;; *) backends+=("$backend") ;; esac
done

# quoted TEXT: prints TEXT as a JSON string
quoted() { printf '"%s"' "$(printf %s "$1" | tr '\n\t' '  ' | sed 's/[\\"]/\\&/g')"; }

# step NAME LIMIT COMMAND...: runs COMMAND for at most LIMIT seconds within the budget; its output goes to the log
step() {
    local name=$1 limit=$2 left=$((ends - SECONDS)) begun=$SECONDS status outcome
    shift 2
    if [ "${PINPOOL_GPU_AGAIN:-0}" != 1 ] && [ -s "$log/$name.ok" ]; then
        cat "$log/$name.ok"
        row "$name" "ok, earlier" 0
        return 0
    fi
    if [ "$left" -le 0 ]; then
        printf '{"step":"%s","outcome":"no time left"}\n' "$name"
        row "$name" "no time left" 0
        failed=1
        return 1
    fi
    timeout --kill-after=5 "$((limit < left ? limit : left))" "$@" >"$log/$name.out" 2>"$log/$name.err" </dev/null
    status=$?
    # 77: the machine lacks something that the step needs, so the step tested nothing.
    case $status in 0) outcome=ok ;; 77) outcome=missing failed=1 ;; 124 | 137) outcome="timed out" ;; *) outcome=failed failed=1 ;; esac
    [ "$outcome" = "timed out" ] && failed=1
    printf '{"step":"%s","outcome":"%s","status":%d,"seconds":%d' "$name" "$outcome" "$status" "$((SECONDS - begun))"
    [ "$status" -eq 0 ] || printf ',"why":%s' "$(quoted "$(why "$name" "$status")")"
    printf '}\n'
    row "$name" "$outcome" "$((SECONDS - begun))"
    [ "$status" -ne 0 ] || printf '{"step":"%s","outcome":"ok","seconds":%d,"earlier":true}\n' "$name" "$((SECONDS - begun))" >"$log/$name.ok"
    return "$status"
}

# why NAME STATUS: prints the log lines that say why a step failed, or the last lines
why() {
    [ "$2" -ne 77 ] && grep -hE 'panicked|result: FAILED|no (backend|usable GPU)|^pinpool:|hangs|Error' "$log/$1.out" "$log/$1.err" | head -n 12 | grep . && return
    tail -qn 1 "$log/$1.out" "$log/$1.err"
}

# row NAME OUTCOME SECONDS: adds a row to the table
row() { printf '| %s | %s | %d |\n' "$1" "$2" "$3" >>"$log/rows"; }

# missing NAME WHY: records a step that cannot run here
missing() {
    printf '{"step":"%s","outcome":"missing","why":%s}\n' "$1" "$(quoted "$2")"
    row "$1" "missing: $2" 0
    failed=1
}

# lines NAME: prints the JSON objects in the output of a step; the harness may have printed text before them on a line
lines() { grep -ohE '\{"(fact|figure)":.*\}$' "$log/$1.out"; }

# figure NAME LIMIT PROGRAM ARGUMENTS...: runs PROGRAM as a step and prints its result, which is one JSON object
figure() {
    local name=$1 limit=$2 program=$3
    shift 3
    step "$name" "$limit" "$bin/$program" "$@" --json || true
    [ -s "$log/$name.out" ] && printf '{"figure":"%s","command":%s,"result":%s}\n' "$name" "$(quoted "$program $*")" "$(cat "$log/$name.out")"
}

# Unpacks the wheel for the python3 of this machine, which provides torch and numpy, and may have no pip.
wheel() {
    command -v python3 >/dev/null || { echo "no python3" >&2; return 77; }
    [ -d "$log/site" ] || python3 -m zipfile -e "$bin"/pinpool-*.whl "$log/site"
    export PYTHONPATH=$log/site
}

# A program with 24 allocations, served by a pool.
served() {
    rm -f "$log/run.log"
    "$bin/pinpool" run --stats --log "$log/run.log" -- "$bin/steps" query steps || return
    grep -q "^requests: served=24 " "$log/run.log" || { echo "run.log does not have 24 allocations served" >&2; return 1; }
}
export -f wheel served
export bin log

: >"$log/rows"
of_each=()
for backend in "${backends[@]}"; do of_each+=(--backend "$backend"); done

for name in $steps; do
    case $name in
    facts)
        step facts 120 "$bin/gpu" --exact every_fact_about_the_driver_holds_on_the_device --nocapture
        lines facts
        ;;
    c)
        step c 60 "$bin/copy_batches"
        step cpp 60 "$bin/streams"
        ;;
    run)
        # The same program alone and served has the same output, and all of its allocations come from the pool.
        step run_alone 60 "$bin/steps" query steps
        step run 60 bash -c served
        step run_same 10 cmp "$log/run_alone.out" "$log/run.out"
        step run_reset 60 "$bin/pinpool" run --log "$log/run_reset.log" -- "$bin/steps" query reset
        ;;
    run_torch)
        step run_torch 100 "$bin/pinpool" run --stats --log "$log/run_torch.log" -- python3 "$bin/pinned_copies.py"
        # What the pool has served, with one pin call per size, not per tensor.
        printf '{"figure":"run_torch","served":%s}\n' "$(quoted "$(grep -shE '^(requests|memory):|not served' "$log/run_torch.log" | tail -n 3)")"
        ;;
    wheel) step wheel 120 bash -c 'wheel && python3 -c "import pinpool; b = pinpool.Pool(env=False).get(1 << 20); assert b.is_pinned"' ;;
    allocator)
        step allocator 120 bash -c 'wheel && python3 "$bin/torch_allocator.py"'
        lines allocator
        ;;
    libraries)
        step libraries 200 bash -c 'wheel && python3 "$bin/libraries.py"'
        lines libraries
        ;;
    shared) step shared 120 bash -c 'wheel && python3 "$bin/workers.py"' ;;
    hit)
        for threads in ${PINPOOL_GPU_THREADS:-1 4 8 16}; do
            figure "hit_$threads" 30 pinpool-bench hit --threads "$threads"
        done
        ;;
    suite)
        # shellcheck disable=SC2086 # several words
        for backend in "${backends[@]}"; do
            PINPOOL_GPU_BACKENDS=$backend step "suite_$backend" "${PINPOOL_GPU_SUITE_SECONDS:-150}" \
                "$bin/gpu" --skip every_fact --test-threads=1 ${PINPOOL_GPU_SUITE:-}
            status=$?
            # The last result line belongs to the suite. Tests that run separate processes print theirs earlier.
            result=
            case $status in 0 | 101) result=$(grep '^test result:' "$log/suite_$backend.out" | tail -n 1) ;; esac
            printf '{"figure":"suite_%s","passed":%s,"failed":%s}\n' "$backend" \
                "$(sed -n 's/.* \([0-9]*\) passed.*/\1/p' <<<"$result" | grep . || echo null)" \
                "$(sed -n 's/.* \([0-9]*\) failed.*/\1/p' <<<"$result" | grep . || echo null)"
            grep -hE '^skipped' "$log/suite_$backend.err" | sort | uniq -c | while read -r count words; do
                printf '{"skipped":%s,"tests":%d,"backend":"%s"}\n' "$(quoted "$words")" "$count" "$backend"
            done
        done
        ;;
    torch)
        if command -v python3 >/dev/null; then
            for backend in "${backends[@]}"; do
                PINPOOL_BACKEND=$backend step "torch_$backend" 60 python3 "$bin/with_torch.py" "$bin/libin_process.so"
                lines "torch_$backend"
            done
        else
            missing torch "no python3"
        fi
        ;;
    copy)
        sizes=()
        for size in ${PINPOOL_GPU_SIZES:-}; do sizes+=(--size "$size"); done
        figure copy 90 pinpool-bench copy --seconds "$seconds" "${sizes[@]}" "${of_each[@]}"
        ;;
    stall) figure stall 60 pinpool-bench stall --seconds "$seconds" "${of_each[@]}" ;;
    pin) figure pin 90 pinpool-bench pin --bytes "${PINPOOL_GPU_PIN:-1GiB}" --rounds 2 "${of_each[@]}" ;;
    load)
        # The tree must have no dangling link, because `load` treats it as an error.
        tree=${PINPOOL_GPU_TREE:-$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))' || echo /usr/share)}
        for backend in "${backends[@]}"; do
            figure "load_synthetic_$backend" 60 pinpool load --require-gpu --verify --synthetic "${PINPOOL_GPU_FILES:-10000}" --set "BACKEND=$backend"
            figure "load_tree_$backend" 60 pinpool load --require-gpu --verify --set "BACKEND=$backend" "$tree"
        done
        ;;
    peers)
        if command -v python3 >/dev/null; then
            step peers 60 python3 "$(dirname "$(realpath "$0")")/peers.py"
            lines peers
        else
            missing peers "no python3"
        fi
        ;;
    *)
        printf '{"step":%s,"outcome":"no such step"}\n' "$(quoted "$name")"
        failed=1
        ;;
    esac
done
{ printf '| step | outcome | seconds |\n| --- | --- | --- |\n'; cat "$log/rows"; } >"$log/table.md"
cat "$log/table.md" >&2
printf '{"step":"all","outcome":"%s","seconds":%d}\n' "$([ "$failed" -eq 0 ] && echo ok || echo failed)" "$SECONDS"
exit "$failed"
