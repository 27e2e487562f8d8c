#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs what the tests need (Debian 12, as root) and runs all of them.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${MEMFABRIC_TEST_BUILD:-build}
mkdir -p "$build"
build=$(cd "$build" && pwd)

packages=(g++ cmake ninja-build libgtest-dev libgoogle-glog-dev
    nlohmann-json3-dev clang-format valgrind iproute2)
missing=()
for package in "${packages[@]}"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null |
        grep -q 'install ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
    if [[ $(id -u) != 0 ]]; then
        echo "run.sh: as root it installs these, or do so yourself: ${missing[*]}" >&2
        exit 2
    fi
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -qy \
        --no-install-recommends "${missing[@]}"
fi

step() { printf '\n== %s\n' "$*"; }

step 'The published library'
wheel=$build/published
if [[ ! -e $wheel/memfabric_hybrid/lib/libmf_smem.so ]] &&
    python3 -m pip download -q --no-deps --only-binary :all: \
        --python-version 3.11 --platform manylinux_2_28_x86_64 \
        -d "$wheel" memfabric-hybrid==1.3.0; then
    python3 -m zipfile -e "$wheel"/memfabric_hybrid-1.3.0-*.whl "$wheel"
fi
if [[ -e $wheel/memfabric_hybrid/lib/libmf_smem.so ]]; then
    export MEMFABRIC_PUBLISHED_LIBRARY=$wheel/memfabric_hybrid/lib/libmf_smem.so
    echo "memfabric-hybrid 1.3.0 is at hand"
    unshare --mount --net true || unshare --user --mount --net true ||
        echo 'skipped, but for its refusal: no private mounts and network here'
else
    echo 'skipped: the package registry does not answer with memfabric-hybrid 1.3.0'
fi

step 'Formatting, lints, documentation'
cargo fmt --all --check
[[ -z $(git ls-files '*.rs' '*.cpp' '*.h' '*.c' '*.sh' '*.cmake' '*CMakeLists.txt' |
    xargs grep -L SPDX-License-Identifier) ]]
git ls-files '*.h' '*.cpp' '*.c' | xargs clang-format --dry-run --Werror
cargo clippy --locked --workspace --all-targets -- -D warnings
RUSTDOCFLAGS='-D warnings' cargo doc --locked --workspace --no-deps
[[ $(cargo tree --locked -p memfabric-transport -e normal --depth 1 --prefix none |
    tail -n +2 | cut -d ' ' -f 1 | sort | xargs) == \
    'cxx libloading parking_lot thiserror tracing' ]]

step 'The core and the command'
cargo test --locked --workspace --no-fail-fast 2>&1 | tee "$build/cargo-test.log"

step 'The core under memcheck'
# Left out are two that move a million pieces, and one with more threads than it
# allows.
memcheck='valgrind -q --error-exitcode=9 --leak-check=full'
memcheck+=' --show-leak-kinds=definite --errors-for-leak-kinds=definite'
cargo test --locked --no-fail-fast \
    --config "target.'cfg(all())'.runner = '$memcheck'" \
    --test contract --test install --test transfer --test teardown --test cases \
    --test queue -- --test-threads=1 --skip case_31_memory --skip c08_a_large \
    --skip workers_are_bounded 2>&1 |
    tee "$build/memcheck.log"

step 'The orders of the paths without a lock'
RUSTFLAGS='--cfg loom' CARGO_TARGET_DIR=$build/loom cargo test --locked \
    --release -p memfabric-transport --lib memory_order 2>&1 |
    tee "$build/loom.log"
if rustup component add miri rust-src --toolchain nightly; then
    CARGO_TARGET_DIR=$build/miri MIRIFLAGS='-Zmiri-disable-isolation' \
        cargo +nightly miri test --locked -p memfabric-transport --lib -- \
        memory_order 2>&1 | tee "$build/miri.log"
else
    echo 'skipped Miri: it cannot be had for a nightly Rust' | tee "$build/miri.log"
fi

step 'The shim, against both generations of TENT'
cmake -S . -B "$build/cmake" -G Ninja -DMEMFABRIC_VALGRIND=ON \
    -DMEMFABRIC_BUILD_BENCHMARKS=ON
cmake --build "$build/cmake"
ctest --test-dir "$build/cmake" --output-on-failure --no-tests=error 2>&1 |
    tee "$build/ctest.log"

step 'The shim, the core and a library with threads under one race detector'
rust_src() {
    [[ -e $(rustup run nightly rustc --print sysroot)/lib/rustlib/src/rust/library/Cargo.lock ]]
}
if ! rustup run nightly rustc --version >/dev/null 2>&1; then
    echo 'skipped: there is no nightly Rust (rustup toolchain install nightly --component rust-src)'
elif ! rust_src && ! rustup component add rust-src --toolchain nightly; then
    echo "skipped: there are no sources of the nightly Rust's standard library"
else
    cmake -S . -B "$build/tsan" -G Ninja -DMEMFABRIC_SANITIZE=thread
    cmake --build "$build/tsan" --target tent_memfabric_transport_test
    ctest --test-dir "$build/tsan" -R '^tent_memfabric_transport_test$' \
        --output-on-failure --no-tests=error 2>&1 | tee "$build/tsan.log"
fi

step 'Everything for aarch64, and what an emulated processor can run of it'
bash tests/aarch64.sh

step 'Results'
for log in cargo-test memcheck loom miri aarch64; do
    echo "$log:"
    grep -E '^test result|^     Running|^   Doc-tests|^skipped|tests passed|tests failed' \
        "$build/$log.log"
done
echo 'ctest:'
grep -E 'tests passed|tests failed' "$build/ctest.log"
