#!/usr/bin/env bash
# Builds what run.sh needs into one folder, which can be carried to a machine without cargo:
#   tests/gpu/collect.sh FOLDER
# Includes each interface that README.md names: the tool (pinpool), the benchmarks (pinpool-bench), the test suite (gpu),
# the library that with_torch.py loads, the C library with a program in C and one in C++, `pinpool run` with one
# program, the wheel, and the scripts. A missing file is an error. PROFILE=dev builds faster, for a trial run on the mock driver.
set -euo pipefail
folder=$(realpath -m "${1:?usage: collect.sh FOLDER}")
cd "$(dirname "$0")/../.."
profile=${PROFILE:-release}
export CARGO_TARGET_DIR=$(realpath -m "${CARGO_TARGET_DIR:-target}")

# Prints the path of the test binary with this name, from cargo's own report.
suite() {
    cargo test -p pinpool --no-run --all-features --profile "$profile" --test gpu --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\/gpu-[^"]*\)".*/\1/p' | tail -n 1
}

mkdir -p "$folder"
# Removes the results of an earlier collection, so that run.sh repeats all steps.
rm -rf "$folder"/pinpool-*.whl "$folder/log/site" "$folder"/log/*.ok
cargo build --profile "$profile" -p pinpool-cli -p pinpool-bench -p pinpool-preload -p pinpool-capi
cargo build -p in_process --profile "$profile"
built=$CARGO_TARGET_DIR/release
[ "$profile" = dev ] && built=$CARGO_TARGET_DIR/debug
install -m 755 "$built/pinpool" "$built/pinpool-bench" "$folder"
install -m 755 "$(suite)" "$folder/gpu"
install -m 755 "$built/libin_process.so" "$folder/libin_process.so"
install -m 755 "$built/libpinpool_preload.so" "$folder/libpinpool_preload.so"
# Named as programs look for it at run time.
install -m 755 "$built/libpinpool_c.so" "$folder/libpinpool.so.0"
strip "$folder/pinpool" "$folder/pinpool-bench" "$folder/gpu" "$folder/libpinpool_preload.so" "$folder/libpinpool.so.0"

# Programs that use the C library and the C++ classes, and one in C that does not know pinpool.
# A stub replaces the driver while the first two are linked.
stub=$(mktemp -d)
cc -O1 -Icrates/capi/include -c crates/capi/examples/copy_batches.c -o "$stub/copy_batches.o"
c++ -std=c++17 -O1 -Icrates/capi/include -c crates/capi/tests/programs/streams.cpp -o "$stub/streams.o"
nm -u "$stub"/*.o | sed -n 's/.* \(cu[A-Z].*\)/\1/p' | sort -u | sed 's/.*/void &(void) {}/' >"$stub/driver.c"
cc -shared -Wl,-soname,libcuda.so.1 -o "$stub/libcuda.so.1" "$stub/driver.c"
for program in copy_batches streams; do
    c++ -static-libstdc++ -static-libgcc -o "$folder/$program" "$stub/$program.o" "$folder/libpinpool.so.0" \
        "$stub/libcuda.so.1" -lpthread '-Wl,-rpath,$ORIGIN'
done
rm -r "$stub"
cc -O1 -o "$folder/steps" crates/preload/tests/programs/steps.c -ldl -lpthread

# The wheel is for the interpreter of this machine. The allocator for torch is compiled on the machine that has torch.
MATURIN_PEP517_ARGS="--profile $profile --locked" python3 -m pip wheel -q --no-deps -w "$folder" ./python
install -m 644 tests/gpu/with_torch.py "$folder/with_torch.py"
install -m 755 tests/gpu/run.sh "$folder/run.sh"
install -m 644 tests/gpu/peers.py "$folder/peers.py"
install -m 644 tests/gpu/torch_allocator.py "$folder/torch_allocator.py"
install -m 644 tests/gpu/libraries.py "$folder/libraries.py"
install -m 644 tests/gpu/pinned_copies.py "$folder/pinned_copies.py"
install -m 644 python/examples/workers.py "$folder/workers.py"
ls -l "$folder"

# The files that the steps of run.sh need.
for file in gpu pinpool pinpool-bench libin_process.so libpinpool.so.0 copy_batches streams libpinpool_preload.so steps "pinpool-*.whl" torch_allocator.py libraries.py pinned_copies.py workers.py with_torch.py peers.py; do
    compgen -G "$folder/$file" >/dev/null || { echo "$folder has no $file" >&2; exit 1; }
done
