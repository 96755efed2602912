#!/bin/sh
# Builds pinpool for C and C++ and installs it:
#
#   crates/capi/install.sh PREFIX        PREFIX/include/pinpool.h and .hpp, PREFIX/lib/libpinpool.so and .a, pkgconfig/pinpool.pc
#
# DESTDIR is put before PREFIX, for packages. PINPOOL_BUILT_IN names a folder that has the libraries already.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 PREFIX" >&2; exit 2; }
prefix=$1
case $prefix in /*) ;; *) echo "$0: PREFIX is an absolute path: $prefix" >&2; exit 2 ;; esac
here=$(cd "$(dirname "$0")" && pwd)
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$here/Cargo.toml" | head -n 1)
name=libpinpool.so.${version%%.*}

built=${PINPOOL_BUILT_IN:-}
if [ -z "$built" ]; then
    export CARGO_PROFILE_RELEASE_DEBUG=false CARGO_PROFILE_RELEASE_STRIP=debuginfo
    (cd "$here/../.." && cargo build --release --locked -p pinpool-capi)
    built=${CARGO_TARGET_DIR:-$here/../../target}/release
fi

to=${DESTDIR:-}$prefix
mkdir -p "$to/include" "$to/lib/pkgconfig"
install -m 644 "$here/../../include/pinpool.h" "$here/../../include/pinpool.hpp" "$to/include/"
install -m 755 "$built/libpinpool_c.so" "$to/lib/libpinpool.so.$version"
ln -sf "libpinpool.so.$version" "$to/lib/$name"
ln -sf "$name" "$to/lib/libpinpool.so"
install -m 644 "$built/libpinpool_c.a" "$to/lib/libpinpool.a"
cat > "$to/lib/pkgconfig/pinpool.pc" <<END
prefix=$prefix
includedir=\${prefix}/include
libdir=\${prefix}/lib

Name: pinpool
Description: A pool of page-locked host memory for programs that feed GPUs
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -lpinpool
Libs.private: -lgcc_s -lutil -lrt -lpthread -lm -ldl
END
echo "installed pinpool $version in $prefix"
