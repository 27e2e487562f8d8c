// SPDX-License-Identifier: Apache-2.0

// Many threads on one transport, as an engine has them, over the emulated
// library, which has threads of its own. Written for the race detector, which
// sees both sides of the bridge (MEMFABRIC_SANITIZE=thread); the clauses that
// races break are checked in any build.
//
// Rounds are run for MEMFABRIC_THREADS_SECONDS, 3 by default.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <iostream>
#include <optional>
#include <random>
#include <thread>

#include "support/fixture.h"

namespace memfabric_test {
namespace {

constexpr int kSubmitters = 3;
constexpr int kPollers = 2;
constexpr size_t kPiece = 64;
// Pieces of each submitter. The last quarter is for sub-batches that are freed
// at once, whose transfers may still be running: nobody compares or fills it.
constexpr size_t kSlots = 32;
constexpr size_t kFirstFreedEarly = kSlots - kSlots / 4;
constexpr size_t kArea = kSlots * kPiece;
constexpr size_t kSharedTasks = 64;

std::chrono::seconds duration() {
    const char* given = std::getenv("MEMFABRIC_THREADS_SECONDS");
    return std::chrono::seconds(given ? std::stoul(given) : 3);
}

// Runs numbered rounds until the time is over, one at least.
void rounds(const std::function<void(unsigned)>& round) {
    const auto end = std::chrono::steady_clock::now() + duration();
    unsigned count = 0;
    do {
        SCOPED_TRACE("round " + std::to_string(++count));
        round(count);
    } while (!testing::Test::HasFailure() &&
             std::chrono::steady_clock::now() < end);
    std::cout << count << " rounds\n";
}

class Random {
   public:
    explicit Random(unsigned seed) : engine_(seed) {}
    size_t below(size_t end) { return engine_() % end; }

   private:
    std::minstd_rand engine_;
};

std::future<void> start(std::function<void()> body) {
    return std::async(std::launch::async, std::move(body));
}

bool says(const Status& status, const char* text) {
    return status.message().find(text) != std::string_view::npos;
}

class ThreadsTest : public EmulatedTest {
   protected:
    ThreadsTest() {
        for (Engine* engine : {&local, &near, &far}) {
            engine->config->set("transports/memfabric/transfer_timeout_ms",
                                60000);
        }
        near.installed();
        far.installed();
        if (!near.add(theirs.at(), theirs.size()).ok() ||
            !far.add(theirs.at(), theirs.size()).ok()) {
            throw std::runtime_error("memory was not registered");
        }
        peers = {local.open(near.name), local.open(far.name)};
    }

    ~ThreadsTest() override { emulator.release(); }

    Transport& transport() { return local.transport(); }

    Request write(SegmentID peer, size_t offset, size_t length) {
        return makeRequest(Request::WRITE, peer, ours.at(offset),
                           theirs.at(offset), length);
    }

    // False once the transport is quiesced; any other refusal is a failure.
    bool submit(SubBatch& batch, const std::vector<Request>& requests) {
        const size_t size = batch.batch->size();
        const Status status = batch.submit(requests);
        if (status.ok()) return true;
        EXPECT_TRUE(says(status, "quiesced")) << status;
        EXPECT_EQ(batch.batch->size(), size) << "C07";
        return false;
    }

    // What a poll says; nothing after a query error, which changes nothing.
    std::optional<TransferStatus> poll(SubBatch& batch, int task) {
        TransferStatus status{};
        const Status polled =
            transport().getTransferStatus(batch.batch, task, status);
        if (polled.ok()) return status;
        EXPECT_TRUE(says(polled, "query of vendor batch")) << polled;
        ++query_errors;
        return std::nullopt;
    }

    TransferStatus end(SubBatch& batch, int task) {
        for (;;) {
            const auto status = poll(batch, task);
            if (status && status->s != TransferStatusEnum::PENDING) {
                return *status;
            }
            std::this_thread::yield();
        }
    }

    void expectEnded(const TransferStatus& status, size_t length) {
        if (status.s == TransferStatusEnum::COMPLETED) {
            EXPECT_EQ(status.transferred_bytes, length);
            ++completed;
        } else {
            EXPECT_EQ(status.s, TransferStatusEnum::FAILED);
            EXPECT_EQ(status.transferred_bytes, 0u);
            ++failed;
        }
    }

    // One thread's own sub-batches, each submitted to in two calls, then polled
    // to its end or freed at once.
    void submitAndPoll(int number, unsigned seed) {
        Random random(seed);
        const size_t area = static_cast<size_t>(number) * kArea;
        for (uint8_t turn = 1;; ++turn) {
            const bool free_early = random.below(4) == 0;
            const size_t first = free_early ? kFirstFreedEarly : 0;
            const size_t count = 1 + random.below(kSlots / 4);
            std::vector<Request> requests;
            for (size_t slot = first; slot < first + count; ++slot) {
                const size_t offset = area + slot * kPiece;
                if (!free_early) std::memset(ours.at(offset), turn, kPiece);
                requests.push_back(
                    write(peers[random.below(peers.size())], offset, kPiece));
            }
            SubBatch batch(transport(), count);
            const auto cut = requests.begin() +
                             static_cast<std::ptrdiff_t>(random.below(count));
            const bool all = submit(batch, {requests.begin(), cut}) &&
                             submit(batch, {cut, requests.end()});
            if (free_early) {
                ++freed_early;
                batch.free();
                if (!all) return;
                continue;
            }
            for (size_t task = 0; task < batch.batch->size(); ++task) {
                const auto status = end(batch, static_cast<int>(task));
                expectEnded(status, kPiece);
                if (status.s != TransferStatusEnum::COMPLETED) continue;
                EXPECT_EQ(std::memcmp(theirs.at(area + task * kPiece),
                                      ours.at(area + task * kPiece), kPiece),
                          0)
                    << "COMPLETED before its bytes had arrived";
            }
            if (!all) return;
        }
    }

    // Task n of the shared sub-batch has this length.
    static size_t sharedLength(size_t task) { return 1 + task % kPiece; }

    // Appends to a sub-batch that others poll meanwhile.
    void append(SubBatch& shared, unsigned seed) {
        Random random(seed);
        constexpr size_t kOffset = kSubmitters * kArea;
        for (size_t task = 0; task < kSharedTasks;) {
            std::vector<Request> requests;
            const size_t room = kSharedTasks - task;
            const size_t count = std::min(1 + random.below(4), room);
            for (size_t i = 0; i < count; ++i) {
                requests.push_back(
                    write(peers[0], kOffset, sharedLength(task + i)));
            }
            if (!submit(shared, requests)) return;
            task += count;
            EXPECT_EQ(shared.batch->size(), task);
        }
    }

    void pollShared(SubBatch& shared, unsigned seed) {
        Random random(seed);
        std::array<std::optional<TransferStatusEnum>, kSharedTasks> ended;
        while (!over) {
            std::this_thread::yield();
            const size_t size = shared.batch->size();
            if (size == 0) continue;
            const size_t task = random.below(size);
            const auto status = poll(shared, static_cast<int>(task));
            if (!status) continue;
            auto& before = ended[task];
            if (before) {
                EXPECT_EQ(status->s, *before)
                    << "the answer of task " << task << " changed";
            } else if (status->s != TransferStatusEnum::PENDING) {
                expectEnded(*status, sharedLength(task));
                before = status->s;
            }
        }
    }

    // Registers and removes the memory that the others submit from.
    void registerAndRemove() {
        while (!over) {
            EXPECT_TRUE(local.add(ours.at(), ours.size()).ok());
            std::this_thread::yield();
            const Status status = local.remove(ours.at(), ours.size());
            // It may stay registered, where new batches kept coming.
            if (!status.ok()) {
                EXPECT_TRUE(says(status, "must not be freed yet")) << status;
            }
            ++removed;
        }
    }

    // Makes every thread read the peers' descriptions anew, now and then.
    void dropDescriptions() {
        while (!over) {
            EXPECT_TRUE(
                local.segments().invalidateAllCacheForRemote(near.name).ok());
            const uint64_t begin = emulator.count("submit");
            while (!over && emulator.count("submit") < begin + 20) {
                std::this_thread::yield();
            }
        }
    }

    Memory ours{kSubmitters * kArea + kPiece, 1};
    Memory theirs{kSubmitters * kArea + kPiece, 2};
    Engine near;
    Engine far;
    Engine local;
    std::vector<SegmentID> peers;

    std::atomic<bool> over{false};
    std::atomic<uint64_t> completed{0};
    std::atomic<uint64_t> failed{0};
    std::atomic<uint64_t> freed_early{0};
    std::atomic<uint64_t> query_errors{0};
    std::atomic<uint64_t> removed{0};
};

// The flag orders nothing: what the other thread reads is ordered behind its
// writing by the shim's counter alone, which the race detector checks.
TEST_F(ThreadsTest, C04LengthThatTheShimKeepsIsOrderedBehindItsCounter) {
    local.installed();
    SubBatch batch(transport(), 1);
    std::atomic<bool> polled{false};
    auto other = start([&] {
        while (!polled.load(std::memory_order_relaxed)) {
            std::this_thread::yield();
        }
        expectEnded(end(batch, 0), kPiece);
    });
    EXPECT_TRUE(submit(batch, {write(peers[0], 0, kPiece)}));
    expectEnded(end(batch, 0), kPiece);
    polled.store(true, std::memory_order_relaxed);
    other.get();
    EXPECT_EQ(completed, 2u);
    batch.free();
}

TEST_F(ThreadsTest, C15EveryThreadOfAnEngineMeetsOnOneTransport) {
    uint64_t peer_downs = 0;
    rounds([&](unsigned seed) {
        local.installed();
        emulator.reset();
        // Of two rounds, one goes well, for the answers of a sub-batch that is
        // wholly completed come another way.
        std::string script = "late_args; delay=300us@%3; pending=2@%2";
        if (seed % 2 == 1) {
            script +=
                "; submit=-2014@%17; result=-1@%13; query=-2013@%19"
                "; peer_down_thread_query=10.0.0.3:3@%11"
                "; peer_down_thread_submit=10.0.0.4:4@%9"
                "; peer_down_deregister=10.0.0.5:5@%2"
                "; peer_down_batch_register=10.0.0.6:6@%2"
                "; peer_down_query=" +
                far.endpoint() + "@%7; peer_down_submit=" + near.endpoint() +
                "@%5";
        }
        emulator.script(script);
        over = false;
        SubBatch shared(transport(), kSharedTasks);
        std::vector<std::future<void>> threads;
        for (int i = 0; i < kSubmitters; ++i) {
            threads.push_back(
                start([=, this] { submitAndPoll(i, 31 * seed + i); }));
        }
        threads.push_back(start([&] { append(shared, 17 * seed); }));
        for (int i = 0; i < kPollers; ++i) {
            threads.push_back(
                start([=, this, &shared] { pollShared(shared, seed + i); }));
        }
        threads.push_back(start([&] { registerAndRemove(); }));
        threads.push_back(start([&] { dropDescriptions(); }));

        const uint64_t enough = 10 + Random(seed << 8).below(150);
        until([&] { return emulator.count("submit") >= enough; });
        const Status quiesced = local.shim().quiesce();
        const uint64_t submits = emulator.count("submit");
        const uint64_t queries = emulator.count("query");
        EXPECT_TRUE(quiesced.ok()) << quiesced;
        EXPECT_EQ(emulator.count("outstanding"), 0u);
        over = true;
        for (auto& thread : threads) thread.get();

        for (size_t task = 0; task < shared.batch->size(); ++task) {
            const auto status = shared.poll(static_cast<int>(task));
            EXPECT_NE(status.s, TransferStatusEnum::PENDING)
                << "quiesce left task " << task;
        }
        shared.free();
        EXPECT_EQ(emulator.count("submit"), submits)
            << "a submission began after quiesce had returned";
        EXPECT_EQ(emulator.count("query"), queries)
            << "a query began after quiesce had returned";
        if (seed % 4 < 2) {
            EXPECT_TRUE(transport().uninstall().ok());
        } else {
            local.destroyTransport();
            local.newTransport();
        }
        EXPECT_EQ(emulator.count("outstanding"), 0u);
        EXPECT_EQ(emulator.count("unfinished"), 0u);
        EXPECT_EQ(emulator.count("handles"), 2u) << "near's and far's";
        EXPECT_EQ(emulator.count("regions"), 2u) << "near's and far's";
        for (const auto& text : emulator.violations()) {
            ADD_FAILURE() << "the library's contract was broken: " << text;
        }
        peer_downs += emulator.count("peer_downs");
    });
    emulator.script("");
    std::cout << completed << " tasks completed, " << failed << " failed, "
              << freed_early << " sub-batches freed early, " << query_errors
              << " query errors, " << removed << " removals, " << peer_downs
              << " peers down inside calls\n";
    EXPECT_GT(completed, 0u);
    EXPECT_GT(failed, 0u);
    EXPECT_GT(freed_early, 0u);
    EXPECT_GT(removed, 0u);
    EXPECT_GT(peer_downs, 0u);
}

TEST_F(ThreadsTest, C09NoVendorCallBeginsAfterQuiesceInManyShortLives) {
    rounds([&](unsigned seed) {
        local.installed();
        emulator.reset();
        std::vector<std::future<void>> threads;
        for (int i = 0; i < kSubmitters; ++i) {
            threads.push_back(start([=, this] {
                bool accepted = true;
                while (accepted) {
                    SubBatch batch(transport(), 1);
                    accepted =
                        submit(batch, {write(peers[0], i * kArea, kPiece)});
                    // Its result may be some polls away.
                    if (accepted) (void)poll(batch, 0);
                }
            }));
        }
        until([&] { return emulator.count("submit") >= seed % 8; });
        const Status quiesced = local.shim().quiesce();
        const uint64_t submits = emulator.count("submit");
        const uint64_t queries = emulator.count("query");
        EXPECT_TRUE(quiesced.ok()) << quiesced;
        EXPECT_EQ(emulator.count("outstanding"), 0u);
        for (auto& thread : threads) thread.get();
        EXPECT_EQ(emulator.count("submit"), submits);
        EXPECT_EQ(emulator.count("query"), queries);
        EXPECT_TRUE(transport().uninstall().ok());
    });
}

// The race detector is the judge.
TEST_F(ThreadsTest, A15EveryMethodMayMeetUninstallAndInstall) {
    local.installed();
    std::atomic<bool> over{false};
    std::atomic<uint64_t> used{0};
    const auto use = [&] {
        while (!over) {
            SubBatch batch(transport(), 1);
            // Nothing moves: a task without bytes is completed at once.
            const Status submitted = batch.submit({write(peers[0], 0, 0)});
            if (submitted.ok()) ++used;
            (void)local.shim().warmupSegment(LOCAL_SEGMENT_ID);
            (void)local.shim().warmupSegment(peers[1]);
            const auto capabilities = transport().capabilities();
            EXPECT_FALSE(capabilities.gpu_to_gpu);
        }
    };
    auto first = start(use);
    auto second = start(use);
    rounds([&](unsigned) {
        EXPECT_TRUE(transport().uninstall().ok());
        auto rival = start([&] { (void)local.install(); });
        (void)local.install();
        rival.get();
        EXPECT_TRUE(transport().capabilities().dram_to_dram);
        EXPECT_NE(local.endpoint(), "(none)");
    });
    over = true;
    first.get();
    second.get();
    EXPECT_GT(used, 0u);
}

}  // namespace
}  // namespace memfabric_test
