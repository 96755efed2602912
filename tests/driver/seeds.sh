#!/bin/sh
# Runs seeds of tests/driver/seeds.rs in parts of 200, a process each, several at once, and stops at the first part that fails.
#
#     tests/driver/seeds.sh SEEDS [PROCESSES [FIRST]]
#
# A seed mostly waits for streams, so run four processes for each core. A process needs 0.5 GB of memory.
set -eu
cd "$(dirname "$0")/../.."
seeds=${1:?how many seeds} processes=${2:-8} first=${3:-0} part=200
program=$(cargo test --release --all-features --test driver --no-run 2>&1 | sed -n 's/.*Executable .*(\(.*\))$/\1/p')
test -x "$program" || { echo "the test does not build" >&2; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
begun=$(date +%s)
# A part that hangs counts as failed. After a status of 255, xargs starts no further parts.
each='
    last=$(($1 + $3)); test $last -le $4 || last=$4
    export DRIVER_FIRST=$1 DRIVER_SEEDS=$(($last - $1))
    if timeout 300 "$2" --exact seeds::every_seed_runs_without_wrong_bytes_hangs_or_driver_misuse >"$5/$1" 2>&1 &&
        grep -q "1 passed" "$5/$1"; then
        echo $DRIVER_SEEDS >"$5/$1.passed"
    else
        echo "the part of seed $1 failed:"; tail -n 40 "$5/$1"; exit 255
    fi'
status=0
seq "$first" $part $((first + seeds - 1)) |
    xargs -P "$processes" -I{} sh -c "$each" part {} "$program" $part $((first + seeds)) "$folder" || status=1
passed=$(cat "$folder"/*.passed 2>/dev/null | awk '{ sum += $1 } END { print sum + 0 }')
echo "$passed of $seeds seeds from $first passed in $(($(date +%s) - begun)) s, $processes processes, failures: $status"
exit $status
