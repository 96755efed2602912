#!/usr/bin/env bash
# Builds what run.sh needs into one folder, which can be carried to a machine without cargo:
#   tests/gpu/collect.sh FOLDER
# The tool (pinpool), its instruments (pinpool-bench), the suite (gpu), the library that beside_torch.py loads, and the scripts. PROFILE=dev builds faster, for a try on the driver double.
set -euo pipefail
folder=$(realpath -m "${1:?usage: collect.sh FOLDER}")
cd "$(dirname "$0")/../.."
profile=${PROFILE:-release}

# The path of the one test binary of this name, from cargo's own report.
suite() {
    cargo test -p pinpool --no-run --all-features --profile "$profile" --test gpu --message-format=json |
        sed -n 's/.*"executable":"\([^"]*\/gpu-[^"]*\)".*/\1/p' | tail -n 1
}

mkdir -p "$folder"
cargo build --profile "$profile" -p pinpool-cli -p pinpool-bench
cargo build -p pinpool --all-features --profile "$profile" --example in_process
built=target/release
[ "$profile" = dev ] && built=target/debug
install -m 755 "$built/pinpool" "$built/pinpool-bench" "$folder"
install -m 755 "$(suite)" "$folder/gpu"
install -m 755 "$built/examples/libin_process.so" "$folder/libin_process.so"
strip "$folder/pinpool" "$folder/pinpool-bench" "$folder/gpu"
install -m 644 tests/gpu/beside_torch.py "$folder/beside_torch.py"
install -m 755 tests/gpu/run.sh "$folder/run.sh"
install -m 644 tests/gpu/peers.py "$folder/peers.py"
ls -l "$folder"
