// SPDX-License-Identifier: Apache-2.0

// What the shim and the core cost beside the least that TENT's interface
// allows, over a vendor library that costs nothing. Everything that is printed
// is a ratio of two times of this run, measured in turn, so that what else the
// machine does hits both; absolute times only show the scale.
//
//   memfabric_bench                 the ratios
//   memfabric_bench --instructions  for instructions.sh, under callgrind

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <thread>

#include "fixture.h"
#include "null_smem.h"

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#endif

namespace memfabric_bench {

namespace {

using Clock = std::chrono::steady_clock;

// Short rounds, so that most of them are not interrupted; many of them, so that
// those that are do not reach the median.
constexpr size_t kRounds = 1001;
constexpr size_t kRequestsPerRound = 1024;

double median(std::vector<double> values) {
    const auto middle = values.begin() + values.size() / 2;
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

template <typename Body>
double nanoseconds(size_t repetitions, Body &body) {
    const auto begun = Clock::now();
    for (size_t i = 0; i < repetitions; ++i) body();
    return std::chrono::duration<double, std::nano>(Clock::now() - begun)
        .count();
}

struct Comparison {
    double first_ns;   // median
    double second_ns;  // median
    double ratio;      // median of second / first, round by round
};

// Runs the two in turn; which one is first changes from round to round.
template <typename First, typename Second>
Comparison compare(size_t first_repetitions, First first,
                   size_t second_repetitions, Second second,
                   size_t rounds = kRounds) {
    for (int i = 0; i < 3; ++i) {
        first();
        second();
    }
    std::vector<double> firsts, seconds, ratios;
    for (size_t round = 0; round < rounds; ++round) {
        double a = 0;
        double b = 0;
        if (round % 2 == 0) {
            a = nanoseconds(first_repetitions, first);
            b = nanoseconds(second_repetitions, second);
        } else {
            b = nanoseconds(second_repetitions, second);
            a = nanoseconds(first_repetitions, first);
        }
        firsts.push_back(a);
        seconds.push_back(b);
        ratios.push_back(b / a);
    }
    return {median(firsts), median(seconds), median(ratios)};
}

size_t repetitions(const Case &shape) {
    return std::max<size_t>(1, kRequestsPerRound / shape.requests);
}

// A ratio beside its target, where there is one.
void print(const std::string &what, double ratio, double target) {
    std::printf("%-44s %6.2f", what.c_str(), ratio);
    if (target > 0) {
        std::printf("  <= %.2f  %s", target, ratio <= target ? "" : "missed");
    }
    std::printf("\n");
}

double target(const Case &shape) {
    if (shape.requests == 1) return 5;
    if (shape.requests == 128) return 1.6;
    return shape.requests >= 1024 ? 1.5 : 0;
}

void againstTheBaseline(Fixture &fixture) {
    std::printf(
        "allocate + submit + poll each task + free, shim / baseline\n"
        "%-44s %6s\n",
        "", "ratio");
    for (const auto &shape : allCases()) {
        const auto requests = makeRequests(shape);
        const auto baseline = fixture.baseline(shape);
        const size_t count = repetitions(shape);
        const auto result = compare(
            count, [&] { cycle(*baseline, requests); }, count,
            [&] { cycle(fixture.shim(), requests); });
        print(shape.name(), result.ratio, target(shape));
        const double per_round = static_cast<double>(count * shape.requests);
        std::printf("%-44s %6.1f ns/request against %.1f\n", "",
                    result.second_ns / per_round, result.first_ns / per_round);
    }
}

// The shim's time per request in one case over that in another.
void amongCases(Fixture &fixture) {
    struct Pair {
        Case first, second;
        double target;
    };
    const Pair pairs[] = {
        {{128, 1, true}, {8192, 1, true}, 1.2},
        {{128, kPeers, false}, {8192, kPeers, false}, 1.2},
        {{128, 1, true}, {128, kPeers, true}, 1.5},
        {{1024, 1, true}, {1024, kPeers, true}, 1.5},
        {{8192, 1, true}, {8192, kPeers, true}, 1.5},
    };
    std::printf("\nthe shim's time per request, one case / another\n");
    for (const auto &[first, second, target] : pairs) {
        const auto first_requests = makeRequests(first);
        const auto second_requests = makeRequests(second);
        // As many requests on both sides.
        const size_t most = std::max(first.requests, second.requests);
        const auto result = compare(
            most / first.requests,
            [&] { cycle(fixture.shim(), first_requests); },
            most / second.requests,
            [&] { cycle(fixture.shim(), second_requests); });
        print(second.name(), result.ratio, target);
        std::printf("  / %s\n", first.name().c_str());
    }
}

// Hands sub-batches from the thread that submits to the one that polls. A slot
// is the poller's while it is not null.
class Ring {
   public:
    void put(Transport::SubBatchRef batch) {
        auto &slot = slots_[written_++ % kSlots];
        while (slot.load(std::memory_order_acquire) != nullptr) pause();
        slot.store(batch, std::memory_order_release);
    }

    Transport::SubBatchRef take() {
        auto &slot = slots_[read_++ % kSlots];
        Transport::SubBatchRef batch = nullptr;
        while ((batch = slot.load(std::memory_order_acquire)) == nullptr) {
            pause();
        }
        slot.store(nullptr, std::memory_order_release);
        return batch;
    }

   private:
    static constexpr size_t kSlots = 16;

    // The other thread may be waiting for this processor.
    static void pause() { std::this_thread::yield(); }

    std::atomic<Transport::SubBatchRef> slots_[kSlots] = {};
    alignas(64) size_t written_ = 0;
    alignas(64) size_t read_ = 0;
};

// One thread that submits and one that polls, over one thread that does both in
// turn.
void contention(Fixture &fixture) {
    constexpr size_t kBatches = 64;
    constexpr size_t kContentionRounds = 301;
    std::printf("\none thread submits and one polls / one does both in turn\n");
    for (const Case &shape :
         {Case{128, 1, true}, Case{128, kPeers, true}, Case{1024, 1, true}}) {
        const auto requests = makeRequests(shape);
        auto &transport = fixture.shim();
        Ring ring;
        std::atomic<size_t> asked{0};
        std::atomic<size_t> polled{0};
        std::atomic<bool> stop{false};
        std::thread poller([&] {
            for (size_t done = 0; !stop;) {
                if (done == asked) {
                    std::this_thread::yield();
                    continue;
                }
                pollAndFree(transport, ring.take(), shape.requests);
                polled = ++done;
            }
        });
        const auto together = [&] {
            const size_t target = asked + kBatches;
            asked = target;
            for (size_t i = 0; i < kBatches; ++i) {
                Transport::SubBatchRef batch = nullptr;
                (void)transport.allocateSubBatch(batch, requests.size());
                (void)transport.submitTransferTasks(batch, requests);
                ring.put(batch);
            }
            while (polled != target) std::this_thread::yield();
        };
        const auto in_turn = [&] {
            for (size_t i = 0; i < kBatches; ++i) cycle(transport, requests);
        };
        const auto result = compare(1, in_turn, 1, together, kContentionRounds);
        stop = true;
        poller.join();
        // A loss of 25 % of what gets done takes 1 / 0.75 of the time.
        print(shape.name(), result.ratio, 1 / 0.75);
    }
}

// Counts, which must be exact: one batch_copy for each peer and opcode, and one
// query for each of them, whatever the number of tasks.
void vendorCalls(Fixture &fixture) {
    for (const auto &shape : allCases()) {
        const auto requests = makeRequests(shape);
        const auto before = null_smem_calls;
        cycle(fixture.shim(), requests);
        const size_t groups = shape.peers * (shape.one_opcode ? 1 : 2);
        const size_t expected =
            shape.requests < groups ? shape.requests : groups;
        if (null_smem_calls.copies - before.copies != expected ||
            null_smem_calls.queries - before.queries != expected ||
            null_smem_calls.pieces - before.pieces != shape.requests) {
            throw std::runtime_error("wrong number of vendor calls for " +
                                     shape.name());
        }
    }
    std::printf(
        "one batch_copy and one query for each peer and opcode in every "
        "case\n\n");
}

#ifdef CALLGRIND_DUMP_STATS_AT

template <typename Body>
void count(const std::string &side, const Case &shape, Body body) {
    const size_t cycles = std::max<size_t>(2, 1024 / shape.requests);
    for (int i = 0; i < 3; ++i) body();
    CALLGRIND_ZERO_STATS;
    for (size_t i = 0; i < cycles; ++i) body();
    // instructions.sh divides by the first number.
    const std::string name = std::to_string(cycles * shape.requests) + " " +
                             side + ": " + shape.name();
    CALLGRIND_DUMP_STATS_AT(name.c_str());
}

void countInstructions(Fixture &fixture) {
    for (const auto &shape : allCases()) {
        const auto requests = makeRequests(shape);
        const auto baseline = fixture.baseline(shape);
        count("baseline", shape, [&] { cycle(*baseline, requests); });
        count("shim", shape, [&] { cycle(fixture.shim(), requests); });
        count("metadata", shape, [&] { fixture.lookUp(shape.peers); });
    }
}

#else

void countInstructions(Fixture &) {
    throw std::runtime_error("was built without valgrind/callgrind.h");
}

#endif

int run(int argc, char **argv) {
    Fixture fixture;
    if (argc == 2 && std::strcmp(argv[1], "--instructions") == 0) {
        countInstructions(fixture);
        return 0;
    }
    if (argc != 1) {
        std::fprintf(stderr, "usage: %s [--instructions]\n", argv[0]);
        return 2;
    }
    vendorCalls(fixture);
    againstTheBaseline(fixture);
    amongCases(fixture);
    contention(fixture);
    return 0;
}

}  // namespace

}  // namespace memfabric_bench

int main(int argc, char **argv) {
    try {
        return memfabric_bench::run(argc, argv);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "memfabric_bench: %s\n", error.what());
        return 1;
    }
}
