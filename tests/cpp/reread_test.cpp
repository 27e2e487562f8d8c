// SPDX-License-Identifier: Apache-2.0

// What is made of a description that was read again, how often that happens,
// and what many targets in one call cost.

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>

#include "support/fixture.h"
#include "tent_double/cluster.h"
#include "tent_double/faults.h"

namespace memfabric_test {
namespace {

using Clock = std::chrono::steady_clock;
using tent_double::Call;

constexpr size_t kLength = 4096;

class RereadTest : public EmulatedTest {
   protected:
    RereadTest() {
        local.installed();
        remote.installed();
        if (!remote.add(theirs.at(), theirs.size()).ok()) {
            throw std::runtime_error("memory was not registered");
        }
        peer = local.open(remote.name);
        tent_double::reset();
    }

    ~RereadTest() override {
        tent_double::reset();
        tent_double::forgetAll();
    }

    Request to(Memory& memory, size_t length = kLength) {
        return makeRequest(Request::WRITE, peer, ours.at(), memory.at(),
                           length);
    }

    // Has the peer's endpoint marked.
    void failOnce() {
        emulator.script("result=SM_ERROR");
        SubBatch batch(local.transport(), 1);
        ASSERT_TRUE(batch.submit({to(theirs)}).ok());
        EXPECT_EQ(batch.await(0).s, TransferStatusEnum::FAILED);
        emulator.script("");
    }

    // A segment with this description, which nobody has to be asked for.
    SegmentID described(const std::string& name, const std::string& endpoint) {
        SegmentDesc desc{};
        desc.name = name;
        desc.type = SegmentType::Memory;
        desc.rpc_server_addr = name;
        if (!endpoint.empty()) {
            auto& memory = std::get<MemorySegmentDesc>(desc.detail);
            memory.device_attrs[kEndpointKey] = endpoint;
        }
        tent_double::describe(name, desc);
        return local.open(name);
    }

    Memory ours{kLength, 1};
    Memory theirs{kLength, 2};
    Engine remote;
    Engine local;
    SegmentID peer = 0;
};

TEST_F(RereadTest, A13OldAddressIsNotSentToWhatTheNewDescriptionNames) {
    Memory other(kLength, 3);
    failOnce();
    ASSERT_TRUE(remote.remove(theirs.at(), theirs.size()).ok());
    ASSERT_TRUE(remote.add(other.at(), other.size()).ok());
    const uint64_t submits = emulator.count("submit");
    LogCapture log;
    SubBatch batch(local.transport(), 6);
    ASSERT_TRUE(batch
                    .submit({to(theirs), to(other), to(theirs, 1),
                             to(other, kLength / 2), to(theirs, 0),
                             to(other, kLength + 1)})
                    .ok());
    EXPECT_EQ(tent_double::count(Call::kInvalidateRemote), 1u);
    for (const int task : {0, 2, 5}) {
        EXPECT_EQ(batch.await(task).s, TransferStatusEnum::FAILED) << task;
    }
    for (const int task : {1, 3, 4}) {
        EXPECT_EQ(batch.await(task).s, TransferStatusEnum::COMPLETED) << task;
    }
    EXPECT_EQ(emulator.count("submit"), submits + 1)
        << "they are one group, without those that failed";
    EXPECT_EQ(log.count({"peer cannot be reached", remote.name,
                         "no registered memory"}),
              1u)
        << log.text();
    EXPECT_TRUE(theirs.holds(2)) << "written to, though it is not registered";
    EXPECT_TRUE(other.holds(1));
}

TEST_F(RereadTest, A13AddressIsLookedUpWhenTheEndpointAppeared) {
    Engine late;
    const SegmentID target = local.open(late.name);
    SegmentDescRef cached;
    ASSERT_TRUE(local.segments().getRemoteCached(cached, target).ok());
    late.installed();
    Memory registered(kLength, 3);
    ASSERT_TRUE(late.add(registered.at(), registered.size()).ok());
    SubBatch batch(local.transport(), 2);
    const auto write = [&](Memory& memory) {
        return makeRequest(Request::WRITE, target, ours.at(), memory.at(),
                           kLength);
    };
    ASSERT_TRUE(batch.submit({write(theirs), write(registered)}).ok());
    EXPECT_EQ(batch.await(0).s, TransferStatusEnum::FAILED);
    EXPECT_EQ(batch.await(1).s, TransferStatusEnum::COMPLETED);
}

TEST_F(RereadTest, B05APeerWithoutMemfabricIsReadOnceASecond) {
    const SegmentID target = described("10.9.9.9:1", "");
    const auto begun = Clock::now();
    for (int i = 0; i < 1000; ++i) {
        SubBatch batch(local.transport(), 1);
        ASSERT_TRUE(batch
                        .submit({makeRequest(Request::WRITE, target, ours.at(),
                                             theirs.at(), 64)})
                        .ok());
        EXPECT_EQ(batch.await(0).s, TransferStatusEnum::FAILED);
    }
    const auto seconds =
        std::chrono::ceil<std::chrono::seconds>(Clock::now() - begun).count();
    EXPECT_LE(tent_double::fetches("10.9.9.9:1"),
              1 + static_cast<uint64_t>(seconds));
}

TEST_F(RereadTest, B05RefusedSubmissionsReadThePeerOnceASecond) {
    emulator.script("submit=SM_ERROR");
    const auto begun = Clock::now();
    for (int i = 0; i < 1000; ++i) {
        SubBatch batch(local.transport(), 1);
        ASSERT_TRUE(batch.submit({to(theirs)}).ok());
        EXPECT_EQ(batch.await(0).s, TransferStatusEnum::FAILED);
    }
    const auto seconds =
        std::chrono::ceil<std::chrono::seconds>(Clock::now() - begun).count();
    const uint64_t reads = tent_double::count(Call::kInvalidateRemote);
    EXPECT_GE(reads, 1u);
    EXPECT_LE(reads, static_cast<uint64_t>(seconds));
    // The last mark is served when its second has passed.
    emulator.script("");
    until([&] {
        SubBatch batch(local.transport(), 1);
        EXPECT_TRUE(batch.submit({to(theirs)}).ok());
        EXPECT_EQ(batch.await(0).s, TransferStatusEnum::COMPLETED);
        return tent_double::count(Call::kInvalidateRemote) > reads;
    });
}

// A call to many targets costs little more than to read their descriptions one
// by one, which is linear. All have the same endpoint and nothing is moved.
TEST_F(RereadTest, B04ManyTargetsOfACallAreFoundAtOnce) {
    std::vector<Request> list;
    for (int i = 0; i < 8000; ++i) {
        const SegmentID target =
            described("peer-" + std::to_string(i), remote.endpoint());
        list.push_back(
            makeRequest(Request::WRITE, target, ours.at(), theirs.at(), 0));
    }
    const auto best = [](const std::function<void()>& body) {
        auto shortest = Clock::duration::max();
        for (int i = 0; i < 7; ++i) {
            const auto begun = Clock::now();
            body();
            shortest = std::min(shortest, Clock::now() - begun);
        }
        return std::chrono::duration<double, std::milli>(shortest).count();
    };
    const double reading = best([&] {
        for (const auto& request : list) {
            EXPECT_TRUE(local.shim().warmupSegment(request.target_id).ok());
        }
    });
    const double submitting = best([&] {
        SubBatch batch(local.transport(), list.size());
        EXPECT_TRUE(batch.submit(list).ok());
    });
    std::cout << reading << " ms, then " << submitting << " ms\n";
    EXPECT_LT(submitting, 6 * reading);
}

TEST_F(RereadTest, ManyTargetsOfACallKeepTheirRequests) {
    std::vector<SegmentID> targets;
    for (int i = 0; i < 100; ++i) {
        targets.push_back(
            i % 3 == 0
                ? described("peer-" + std::to_string(i), remote.endpoint())
                : described("without-" + std::to_string(i), ""));
    }
    std::vector<Request> list;
    for (size_t i = 0; i < 1000; ++i) {
        list.push_back(makeRequest(Request::WRITE, targets[i * 37 % 100],
                                   ours.at(i), theirs.at(i), 1));
    }
    for (int round = 0; round < 2; ++round) {
        SubBatch batch(local.transport(), list.size());
        ASSERT_TRUE(batch.submit(list).ok());
        for (size_t i = 0; i < list.size(); ++i) {
            EXPECT_EQ(batch.await(static_cast<int>(i)).s,
                      i * 37 % 100 % 3 == 0 ? TransferStatusEnum::COMPLETED
                                            : TransferStatusEnum::FAILED)
                << i;
        }
    }
}

TEST_F(RereadTest, B09MemoryOfAHugeCallIsGivenBack) {
    const auto used = [] {
        const auto info = mallinfo2();
        return info.uordblks + info.hblkhd;
    };
    SubBatch batch(local.transport(), 1);
    const std::vector<Request> list(300'000, to(theirs));
    const size_t before = used();
    // Over capacity: the core keeps nothing of it.
    EXPECT_FALSE(batch.submit(list).ok());
    EXPECT_LT(used(), before + (1 << 20));
    ASSERT_TRUE(batch.submit({to(theirs)}).ok());
    EXPECT_EQ(batch.await(0).s, TransferStatusEnum::COMPLETED);
}

}  // namespace
}  // namespace memfabric_test
