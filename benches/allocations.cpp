// SPDX-License-Identifier: Apache-2.0

// Counts what one transfer allocates through the shim, in C++ and in Rust, once
// storage is warm: a sub-batch is two objects, everything else is none.

#include <cstddef>
#include <cstdio>
#include <exception>

#include "fixture.h"

// glibc's own, under the names that its malloc.h documents for replacements.
extern "C" {
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *pointer, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
}

namespace {

// This thread's only: what others do is not a transfer's.
thread_local size_t allocations = 0;

}  // namespace

extern "C" {

void *malloc(size_t size) noexcept {
    ++allocations;
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size) noexcept {
    ++allocations;
    return __libc_calloc(count, size);
}

void *realloc(void *pointer, size_t size) noexcept {
    ++allocations;
    return __libc_realloc(pointer, size);
}

void *aligned_alloc(size_t alignment, size_t size) noexcept {
    ++allocations;
    return __libc_memalign(alignment, size);
}

int posix_memalign(void **pointer, size_t alignment, size_t size) noexcept {
    ++allocations;
    *pointer = __libc_memalign(alignment, size);
    return 0;
}

}  // extern "C"

namespace memfabric_bench {

namespace {

struct Counts {
    size_t allocate = 0;
    size_t submit = 0;
    size_t poll = 0;
    size_t free = 0;

    bool operator==(const Counts &) const = default;
};

template <typename Body>
size_t countOf(Body body) {
    const size_t before = allocations;
    body();
    return allocations - before;
}

Counts cycleOf(Transport &transport, const std::vector<Request> &requests) {
    Transport::SubBatchRef batch = nullptr;
    Counts counts;
    counts.allocate = countOf(
        [&] { (void)transport.allocateSubBatch(batch, requests.size()); });
    counts.submit =
        countOf([&] { (void)transport.submitTransferTasks(batch, requests); });
    counts.poll = countOf([&] {
        for (size_t task = 0; task < requests.size(); ++task) {
            TransferStatus status{};
            (void)transport.getTransferStatus(batch, static_cast<int>(task),
                                              status);
        }
    });
    counts.free = countOf([&] { (void)transport.freeSubBatch(batch); });
    return counts;
}

int run() {
    Fixture fixture;
    // The sub-batch that TENT holds, and the core's that it holds.
    const Counts expected{2, 0, 0, 0};
    int failures = 0;
    for (const auto &shape : allCases()) {
        const auto requests = makeRequests(shape);
        cycle(fixture.shim(), requests);
        cycle(fixture.shim(), requests);
        for (int i = 0; i < 3; ++i) {
            const Counts counts = cycleOf(fixture.shim(), requests);
            if (counts == expected) continue;
            std::fprintf(stderr,
                         "%s: allocate %zu, submit %zu, poll %zu, free %zu "
                         "allocations instead of 2, 0, 0, 0\n",
                         shape.name().c_str(), counts.allocate, counts.submit,
                         counts.poll, counts.free);
            ++failures;
        }
    }
    if (failures == 0) {
        std::printf(
            "allocations: 2 to allocate a sub-batch, none to submit, poll and "
            "free, in every case\n");
    }
    return failures == 0 ? 0 : 1;
}

}  // namespace

}  // namespace memfabric_bench

int main() {
    try {
        return memfabric_bench::run();
    } catch (const std::exception &error) {
        std::fprintf(stderr, "memfabric_allocations: %s\n", error.what());
        return 1;
    }
}
