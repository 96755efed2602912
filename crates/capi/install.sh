#!/bin/sh
# Builds pinpool for C and C++ and installs it:
#
#   crates/capi/install.sh PREFIX        PREFIX/include/pinpool.h and .hpp, PREFIX/lib/libpinpool.so and .a, pkgconfig/pinpool.pc,
#                                         cmake/pinpool/pinpoolConfig.cmake
#
# DESTDIR is put before PREFIX, for packages. PINPOOL_LIBRARY_DIR names a folder that has the libraries already.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 PREFIX" >&2; exit 2; }
prefix=$1
case $prefix in /*) ;; *) echo "$0: PREFIX must be an absolute path: $prefix" >&2; exit 2 ;; esac
here=$(cd "$(dirname "$0")" && pwd)
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$here/../../Cargo.toml" | head -n 1)
[ -n "$version" ] || { echo "$0: no version in $here/../../Cargo.toml" >&2; exit 1; }
name=libpinpool.so.${version%%.*}

built=${PINPOOL_LIBRARY_DIR:-}
if [ -z "$built" ]; then
    export CARGO_PROFILE_RELEASE_DEBUG=false CARGO_PROFILE_RELEASE_STRIP=debuginfo
    (cd "$here/../.." && cargo build --release --locked -p pinpool-capi)
    built=$(cd "$here/../.." && cd "${CARGO_TARGET_DIR:-target}" && pwd)/release
fi

to=${DESTDIR:-}$prefix
mkdir -p "$to/include" "$to/lib/pkgconfig" "$to/lib/cmake/pinpool"
install -m 644 "$here/include/pinpool.h" "$here/include/pinpool.hpp" "$to/include/"
install -m 755 "$built/libpinpool_c.so" "$to/lib/libpinpool.so.$version"
ln -sf "libpinpool.so.$version" "$to/lib/$name"
ln -sf "$name" "$to/lib/libpinpool.so"
install -m 644 "$built/libpinpool_c.a" "$to/lib/libpinpool.a"
cat > "$to/lib/pkgconfig/pinpool.pc" <<END
prefix=$prefix
includedir=\${prefix}/include
libdir=\${prefix}/lib

Name: pinpool
Description: A pool of pinned host memory for CUDA transfers
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -lpinpool
Libs.private: -lgcc_s -lutil -lrt -lpthread -lm -ldl
END
cat > "$to/lib/cmake/pinpool/pinpoolConfig.cmake" <<END
# find_package(pinpool CONFIG REQUIRED): pinpool::pinpool, the shared library, and pinpool::static.
get_filename_component(_pinpool_prefix "\${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET pinpool::pinpool)
    add_library(pinpool::pinpool SHARED IMPORTED)
    set_target_properties(pinpool::pinpool PROPERTIES
        IMPORTED_LOCATION "\${_pinpool_prefix}/lib/$name"
        IMPORTED_SONAME "$name"
        INTERFACE_INCLUDE_DIRECTORIES "\${_pinpool_prefix}/include")
    add_library(pinpool::static STATIC IMPORTED)
    set_target_properties(pinpool::static PROPERTIES
        IMPORTED_LOCATION "\${_pinpool_prefix}/lib/libpinpool.a"
        IMPORTED_LINK_INTERFACE_LANGUAGES C
        INTERFACE_INCLUDE_DIRECTORIES "\${_pinpool_prefix}/include"
        INTERFACE_LINK_LIBRARIES "gcc_s;util;rt;pthread;m;dl")
endif()
unset(_pinpool_prefix)
END
cat > "$to/lib/cmake/pinpool/pinpoolConfigVersion.cmake" <<END
# As pinpool.h promises: a later version serves programs of an earlier version with the same first number.
set(PACKAGE_VERSION "$version")
if(PACKAGE_FIND_VERSION VERSION_GREATER PACKAGE_VERSION OR NOT PACKAGE_FIND_VERSION MATCHES "^${version%%.*}([.]|\$)")
    set(PACKAGE_VERSION_COMPATIBLE FALSE)
else()
    set(PACKAGE_VERSION_COMPATIBLE TRUE)
    if(PACKAGE_FIND_VERSION VERSION_EQUAL PACKAGE_VERSION)
        set(PACKAGE_VERSION_EXACT TRUE)
    endif()
endif()
END
echo "installed pinpool $version in $prefix"
[ -n "${DESTDIR:-}" ] || case $prefix in /usr | /usr/local) echo "run ldconfig, so that programs find libpinpool.so" ;;
*) echo "programs find libpinpool.so by LD_LIBRARY_PATH=$prefix/lib, or linked with -Wl,-rpath,$prefix/lib" ;; esac
