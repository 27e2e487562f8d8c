#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds everything for aarch64 and runs what an emulated processor (qemu-user)
# can run. Debian 12 on x86-64; as root it installs what is missing. tests/run.sh
# calls it; the counts are in <build folder>/aarch64.log.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${MEMFABRIC_TEST_BUILD:-build}
mkdir -p "$build/aarch64"
build=$(cd "$build" && pwd)
here=$build/aarch64
log=$build/aarch64.log
: >"$log"
# What the caller has is for its own machine.
unset MEMFABRIC_PUBLISHED_LIBRARY
target=aarch64-unknown-linux-gnu

part() { printf '\n-- aarch64: %s (after %d s)\n' "$*" "$SECONDS"; }
skip() { printf 'skipped: %s: %s\n' "$1" "$2" | tee -a "$log"; }

part 'what it needs'
packages=(g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static)
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null |
        grep -q 'install ok installed' || missing+=("$package")
done
sysroot=$here/sysroot
foreign=$(dpkg --print-foreign-architectures)
if ((${#missing[@]})) || [[ ! -e $sysroot/complete && $foreign != *arm64* ]]; then
    if [[ $(id -u) != 0 ]]; then
        echo 'aarch64.sh: as root it installs these, or do so yourself:' \
            "dpkg --add-architecture arm64, apt-get install ${packages[*]}" >&2
        exit 2
    fi
    dpkg --add-architecture arm64
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -qy \
        --no-install-recommends "${packages[@]}"
fi
# The machine's libraries are unpacked and not installed: the development packages
# of glog's dependencies cannot be there for two machines at once.
if [[ ! -e $sysroot/complete ]]; then
    rm -rf "$sysroot" "$here/packages"
    mkdir -p "$sysroot" "$here/packages"
    (
        cd "$here/packages"
        apt-get download -q {libc6,libgcc-s1,libstdc++6,libgtest-dev}:arm64 \
            {libgoogle-glog-dev,libgoogle-glog0v6,libgflags-dev}:arm64 \
            {libgflags2.2,libunwind8,liblzma5}:arm64
    )
    for package in "$here"/packages/*.deb; do
        dpkg -x "$package" "$sysroot"
    done
    touch "$sysroot/complete"
fi
rustup target list --installed | grep -qx "$target" || rustup target add "$target"

# Tests that compile a library do it for the machine that they run on.
mkdir -p "$here/bin"
ln -sfn "$(command -v aarch64-linux-gnu-gcc)" "$here/bin/cc"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export QEMU_LD_PREFIX=$sysroot

# Runs a command where the kernel starts aarch64 programs with qemu: as it is, if
# it does already, or in a user namespace with a binfmt_misc of its own.
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
qemu=$(command -v qemu-aarch64-static)
cat >"$here/enter.sh" <<END
set -euo pipefail
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf %s ':aarch64:M::$magic:$mask:$qemu:F' >/proc/sys/fs/binfmt_misc/register
exec "\$@"
END
echo 'int main(void) { return 0; }' >"$here/probe.c"
aarch64-linux-gnu-gcc -o "$here/probe" "$here/probe.c"
inside=()
runner="env PATH=$here/bin:$PATH"
processes=true
if "$here/probe" 2>/dev/null; then
    echo 'the kernel starts aarch64 programs with qemu'
elif inside=(unshare --user --map-root-user --mount bash "$here/enter.sh") &&
    "${inside[@]}" "$here/probe"; then
    echo 'aarch64 programs are started with qemu in a user namespace'
else
    inside=()
    processes=false
    runner+=" $qemu"
    echo 'aarch64 programs are started with qemu one by one'
fi
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=$runner

part 'lints'
cargo clippy --locked --workspace --all-targets --target "$target" -- -D warnings

part 'the core and the command'
skips=()
left_out() {
    skip "$1" "$2"
    skips+=(--skip "$1")
}
left_out memory_order 'qemu keeps the order of the x86-64 that it runs on'
left_out b01_batches_of_freed 'a count that no machine changes, and slow here'
programs=(contract cases queue model memory teardown)
if $processes; then
    programs+=(loader install transfer)
else
    skip 'loader, install, transfer, replay' 'they start processes'
    for test in a01_an_unproven_peer a01_many_unproven a16_a_child_after_fork \
        a_log_sink_that_panics b09_the_failure_to_start without_a_thread; do
        left_out "$test" 'of queue, starts a process'
    done
fi
skip 'threads, faults' 'threads by the hundred, each emulated'
skip 'doctor, docs, integrate, fuzz_inputs' 'text and files, the same anywhere'
cargo build --locked --workspace --target "$target"
PROPTEST_CASES=${PROPTEST_CASES:-50} "${inside[@]}" cargo test --locked \
    --no-fail-fast --target "$target" --workspace --lib "${programs[@]/#/--test=}" \
    -- "${skips[@]}" 2>&1 | tee -a "$log"

part 'the published library for aarch64'
wheel=$here/published
library=$wheel/memfabric_hybrid/lib/libmf_smem.so
if [[ ! -e $library ]] &&
    python3 -m pip download -q --no-deps --only-binary :all: \
        --python-version 3.11 --platform manylinux_2_28_aarch64 \
        -d "$wheel" memfabric-hybrid==1.3.0; then
    python3 -m zipfile -e "$wheel"/memfabric_hybrid-1.3.0-*.whl "$wheel"
fi
# Those that move bytes; what else is there takes minutes here.
published=(the_library_itself a_trace_is_replayed)
if ! $processes; then
    skip 'published' 'it starts processes'
elif [[ ! -e $library ]]; then
    skip 'published' 'the package registry does not answer with memfabric-hybrid 1.3.0'
else
    skip 'published, but for what moves bytes' 'minutes, each process emulated'
    MEMFABRIC_PUBLISHED_LIBRARY=$library "${inside[@]}" cargo test --locked \
        --no-fail-fast --target "$target" --workspace --test loader --test published -- \
        the_published_library "${published[@]}" --nocapture 2>&1 | tee -a "$log"
fi

part 'replay'
if $processes; then
    "${inside[@]}" "target/$target/debug/memfabric" replay --requests 200
fi

part 'the shim, against both generations of TENT'
export CMAKE_PREFIX_PATH=$sysroot/usr
libraries=$sysroot/usr/lib/aarch64-linux-gnu:$sysroot/lib/aarch64-linux-gnu
export LDFLAGS=-Wl,-rpath-link,$libraries
toolchain=$PWD/cmake/toolchains/aarch64-linux-gnu.cmake
cmake -S . -B "$here/cmake" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$toolchain"
cmake --build "$here/cmake"
skip 'memfabric_engine_variants' 'it compiles, and what it looks for no machine changes'
if $processes; then
    "${inside[@]}" ctest --test-dir "$here/cmake" --output-on-failure \
        --no-tests=error -E engine_variants 2>&1 | tee -a "$log"
else
    skip 'tent_memfabric_transport_test, but for AbiLayoutTest' 'it starts processes'
    for generation in '' _gen_a; do
        "$qemu" "$here/cmake/tests/cpp/tent_memfabric_transport_test$generation" \
            --gtest_filter='AbiLayoutTest.*' 2>&1 | tee -a "$log"
    done
fi

part 'another project that takes the core'
# With what cargo has built of it already.
mkdir -p "$here/consumer"
ln -sfn ../cmake/memfabric-cargo "$here/consumer/memfabric-cargo"
cmake -S examples/cmake -B "$here/consumer" -G Ninja \
    -DCMAKE_TOOLCHAIN_FILE="$toolchain" -DCMAKE_CROSSCOMPILING_EMULATOR="$qemu"
cmake --build "$here/consumer"
ctest --test-dir "$here/consumer" --output-on-failure --no-tests=error 2>&1 |
    tee -a "$log"

part 'done'
