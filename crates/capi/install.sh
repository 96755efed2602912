#!/bin/sh
# Builds pinpool for C and C++ and installs it:
#
#   crates/capi/install.sh PREFIX        PREFIX/include/pinpool.h and .hpp, PREFIX/lib/libpinpool.so and .a, pkgconfig/pinpool.pc,
#                                         cmake/pinpool/pinpoolConfig.cmake, PREFIX/share/doc/pinpool/ with the licenses
#
# LIBDIR replaces `lib`, for example lib64 or lib/x86_64-linux-gnu. DESTDIR is put before PREFIX, for packages. PINPOOL_LIBRARY_DIR
# names a folder that has the libraries already. The installed folder may be moved, unless PREFIX is /usr or /usr/local.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 PREFIX" >&2; exit 2; }
prefix=${1%/}
case $1 in /*) ;; *) echo "$0: PREFIX must be an absolute path: $prefix" >&2; exit 2 ;; esac
libdir=${LIBDIR:-lib}
case $libdir in /* | .* | */.*) echo "$0: LIBDIR must be a folder below PREFIX: $libdir" >&2; exit 2 ;; esac
to_prefix=$(echo "$libdir" | sed 's|[^/][^/]*|..|g')
# pkg-config must recognize the folders that compilers search anyway.
case $prefix in /usr | /usr/local) pc_prefix=$prefix ;; *) pc_prefix=\${pcfiledir}/../$to_prefix ;; esac
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/Cargo.toml" | head -n 1)
[ -n "$version" ] || { echo "$0: no version in $root/Cargo.toml" >&2; exit 1; }
name=libpinpool.so.${version%%.*}

built=${PINPOOL_LIBRARY_DIR:-}
if [ -z "$built" ]; then
    export CARGO_PROFILE_RELEASE_DEBUG=false CARGO_PROFILE_RELEASE_STRIP=debuginfo
    target=${CARGO_TARGET_DIR:-target} # The option overrides other settings of this folder.
    (cd "$root" && cargo build --release --locked -p pinpool-capi --target-dir "$target")
    built=$(cd "$root" && cd "$target" && pwd)/release
fi

to=${DESTDIR:-}$prefix
lib=$to/$libdir
mkdir -p "$to/include" "$to/share/doc/pinpool" "$lib/pkgconfig" "$lib/cmake/pinpool"
install -m 644 "$root/LICENSE-MIT" "$root/LICENSE-APACHE" "$to/share/doc/pinpool/"
install -m 644 "$here/include/pinpool.h" "$here/include/pinpool.hpp" "$to/include/"
install -m 755 "$built/libpinpool_c.so" "$lib/libpinpool.so.$version"
ln -sf "libpinpool.so.$version" "$lib/$name"
ln -sf "$name" "$lib/libpinpool.so"
install -m 644 "$built/libpinpool_c.a" "$lib/libpinpool.a"
cat > "$lib/pkgconfig/pinpool.pc" <<END
prefix=$pc_prefix
includedir=\${prefix}/include
libdir=\${prefix}/$libdir

Name: pinpool
Description: A pool of pinned host memory for CUDA transfers
Version: $version
Cflags: -I\${includedir}
Libs: -L\${libdir} -lpinpool
Libs.private: -lgcc_s -lutil -lrt -lpthread -lm -ldl
END
cat > "$lib/cmake/pinpool/pinpoolConfig.cmake" <<END
# find_package(pinpool CONFIG REQUIRED): pinpool::pinpool, the shared library, and pinpool::pinpool_static.
get_filename_component(_pinpool_prefix "\${CMAKE_CURRENT_LIST_DIR}/../../$to_prefix" ABSOLUTE)
if(NOT TARGET pinpool::pinpool)
    add_library(pinpool::pinpool SHARED IMPORTED)
    set_target_properties(pinpool::pinpool PROPERTIES
        IMPORTED_LOCATION "\${_pinpool_prefix}/$libdir/$name"
        IMPORTED_SONAME "$name"
        INTERFACE_INCLUDE_DIRECTORIES "\${_pinpool_prefix}/include")
    add_library(pinpool::pinpool_static STATIC IMPORTED)
    set_target_properties(pinpool::pinpool_static PROPERTIES
        IMPORTED_LOCATION "\${_pinpool_prefix}/$libdir/libpinpool.a"
        IMPORTED_LINK_INTERFACE_LANGUAGES C
        INTERFACE_INCLUDE_DIRECTORIES "\${_pinpool_prefix}/include"
        INTERFACE_LINK_LIBRARIES "gcc_s;util;rt;pthread;m;dl")
endif()
unset(_pinpool_prefix)
END
cat > "$lib/cmake/pinpool/pinpoolConfigVersion.cmake" <<END
# As pinpool.h promises: a later version serves programs of an earlier version with the same major version.
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
*) echo "programs find libpinpool.so by LD_LIBRARY_PATH=$prefix/$libdir, or linked with -Wl,-rpath,$prefix/$libdir" ;; esac
