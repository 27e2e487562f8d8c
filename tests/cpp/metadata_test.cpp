// SPDX-License-Identifier: Apache-2.0

// Peers as their descriptions show them: what is missing or wrong there fails
// the tasks for that peer, and nothing else.

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>

#include "support/fixture.h"

namespace memfabric_test {
namespace {

constexpr size_t kLength = 4096;

class MetadataTest : public EmulatedTest {
   protected:
    MetadataTest() {
        local.installed();
        good.installed();
        if (!good.add(theirs.at(), theirs.size()).ok()) {
            throw std::runtime_error("memory was not registered");
        }
        emulator.reset();
    }

    Request to(SegmentID target) {
        return makeRequest(Request::WRITE, target, ours.at(), theirs.at(),
                           kLength);
    }

    // The outcome of one task for that target.
    TransferStatusEnum outcomeOf(SegmentID target) {
        SubBatch batch(local.transport(), 1);
        const Status status = batch.submit({to(target)});
        EXPECT_TRUE(status.ok()) << status;
        return batch.await(0).s;
    }

    Memory ours{kLength, 1};
    Memory theirs{kLength, 2};
    Engine good;
    Engine local;
};

TEST_F(MetadataTest, OnlyTheTasksOfPeersWithoutAnEndpointFail) {
    Engine without;
    Engine empty;
    empty.advertise("x");
    ASSERT_TRUE(empty.segments()
                    .updateLocal([](SegmentDesc& segment) {
                        std::get<MemorySegmentDesc>(segment.detail)
                            .device_attrs[kEndpointKey] = "";
                        return Status::OK();
                    })
                    .ok());
    Engine without_port;
    without_port.advertise("10.0.0.9");
    const auto file = std::filesystem::temp_directory_path() /
                      ("memfabric-test-" + std::to_string(getpid()));
    std::ofstream(file) << "data";

    const std::vector<SegmentID> targets = {
        local.open(good.name), local.open(without.name), local.open(empty.name),
        local.open(without_port.name), local.open("file://" + file.string())};
    std::vector<json> before;
    std::vector<SegmentDescRef> descriptions;
    std::vector<Request> requests;
    for (SegmentID target : targets) {
        SegmentDescRef description;
        ASSERT_TRUE(local.segments().getRemoteCached(description, target).ok());
        before.push_back(*description);
        descriptions.push_back(description);
        requests.push_back(to(target));
    }

    LogCapture log;
    SubBatch batch(local.transport(), targets.size());
    const Status status = batch.submit(requests);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(batch.await(0).s, TransferStatusEnum::COMPLETED);
    for (int task = 1; task < 5; ++task) {
        const auto polled = batch.poll(task);
        EXPECT_EQ(polled.s, TransferStatusEnum::FAILED) << task;
        EXPECT_EQ(polled.transferred_bytes, 0u);
    }
    EXPECT_EQ(emulator.count("submit"), 1u)
        << "a vendor call for a peer without an endpoint";
    EXPECT_GE(log.count({without.name, kEndpointKey}), 1u) << log.text();
    EXPECT_GE(log.count({empty.name, kEndpointKey}), 1u) << log.text();
    EXPECT_GE(log.count({without_port.name, "10.0.0.9"}), 1u) << log.text();
    EXPECT_GE(log.count({file.string()}), 1u) << log.text();
    for (size_t i = 0; i < descriptions.size(); ++i) {
        EXPECT_EQ(json(*descriptions[i]), before[i])
            << "a description was written to";
    }
    EXPECT_TRUE(theirs.holds(1));
    std::filesystem::remove(file);
}

// Any bytes, and what is nearly an endpoint; the same in each run.
std::string hostile(std::minstd_rand& random) {
    const auto below = [&](size_t end) { return random() % end; };
    const std::vector<std::string> whole = {
        std::string(1 << 20, '9'),
        std::string("127.0.0.1:9\0", 12),
        std::string("\0", 1),
        "{\"ip\":\"127.0.0.1\",\"port\":9}",
        "[\"127.0.0.1:9\"]",
        "127.0.0.1:0",
        "127.0.0.1:65536",
        "localhost:9",
        "[fe80::1%eth0]:9",
        " 127.0.0.1:9",
        "127.0.0.1:9 ",
        "0x7f000001:9",
        "\xff\xfe\xed",
    };
    if (below(3) == 0) return whole[below(whole.size())];
    std::string text = below(2) == 0 ? "127.0.0.1:9999" : "[::1]:9999";
    // One byte more than a valid one keeps it from being one.
    text.insert(below(text.size() + 1), 1, "x \n:[]%\x80"[below(8)]);
    for (size_t more = below(4); more > 0; --more) {
        text[below(text.size())] = static_cast<char>(below(256));
    }
    return text;
}

TEST_F(MetadataTest, WhatAHostilePeerPublishesFailsItsTasksAlone) {
    Engine peer;
    const SegmentID good_id = local.open(good.name);
    const SegmentID peer_id = local.open(peer.name);
    std::minstd_rand random(1);
    LogCapture log;
    for (int round = 0; round < 200; ++round) {
        const std::string endpoint = hostile(random);
        const auto number = [&] {
            return static_cast<TransportType>(static_cast<int>(random() % 99) -
                                              9);
        };
        ASSERT_TRUE(
            peer.segments()
                .updateLocal([&](SegmentDesc& segment) {
                    auto& detail = std::get<MemorySegmentDesc>(segment.detail);
                    detail.device_attrs = {{kEndpointKey, endpoint},
                                           {endpoint.substr(0, 9), endpoint}};
                    BufferDesc buffer{};
                    buffer.addr = random();
                    buffer.length = uint64_t{random()} << 32;
                    buffer.location = endpoint.substr(0, 5);
                    buffer.transports = {number(), number()};
                    buffer.transport_attrs[number()] = endpoint.substr(0, 5);
                    detail.buffers = {buffer};
                    return Status::OK();
                })
                .ok());
        ASSERT_TRUE(
            local.segments().invalidateAllCacheForRemote(peer.name).ok());
        const uint64_t submits = emulator.count("submit");
        theirs.fill(2);
        SubBatch batch(local.transport(), 3);
        const Status status =
            batch.submit({to(good_id), to(peer_id), to(good_id)});
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_EQ(batch.await(0).s, TransferStatusEnum::COMPLETED) << round;
        EXPECT_EQ(batch.await(2).s, TransferStatusEnum::COMPLETED) << round;
        EXPECT_EQ(batch.poll(1).s, TransferStatusEnum::FAILED)
            << "round " << round << ", '" << endpoint.substr(0, 99) << "'";
        EXPECT_EQ(emulator.count("submit"), submits + 1) << round;
        EXPECT_TRUE(theirs.holds(1)) << round;
    }
    // What is no text never leaves the peer; the rest is told as it is, once a
    // second.
    EXPECT_GE(log.count({peer.name, kEndpointKey}), 1u) << log.text();
}

TEST_F(MetadataTest, UnreachablePeerIsAFailedTask) {
    std::string gone;
    {
        Engine engine;
        gone = engine.name;
    }
    LogCapture log;
    EXPECT_EQ(outcomeOf(local.open(gone)), TransferStatusEnum::FAILED);
    EXPECT_GE(log.count({"segment"}), 1u) << log.text();
}

TEST_F(MetadataTest, UnknownSegmentIsAFailedTask) {
    EXPECT_EQ(outcomeOf(987654), TransferStatusEnum::FAILED);
}

TEST_F(MetadataTest, EndpointThatAppearsAfterTheFirstLookIsFound) {
    Engine late;
    const SegmentID target = local.open(late.name);
    SegmentDescRef cached;
    ASSERT_TRUE(local.segments().getRemoteCached(cached, target).ok());
    EXPECT_EQ(endpointIn(*cached), "(none)");
    late.installed();
    Memory memory(kLength, 3);
    ASSERT_TRUE(late.add(memory.at(), memory.size()).ok());
    SubBatch batch(local.transport(), 1);
    ASSERT_TRUE(batch
                    .submit({makeRequest(Request::WRITE, target, ours.at(),
                                         memory.at(), kLength)})
                    .ok());
    EXPECT_EQ(batch.await(0).s, TransferStatusEnum::COMPLETED);
}

TEST_F(MetadataTest, PeerThatRestartedOnANewPortIsFoundAfterOneFailure) {
    const SegmentID target = local.open(good.name);
    EXPECT_EQ(outcomeOf(target), TransferStatusEnum::COMPLETED);
    const std::string old_endpoint = good.endpoint();
    good.destroyTransport();
    good.newTransport();
    good.installed();
    ASSERT_NE(good.endpoint(), old_endpoint);
    ASSERT_TRUE(good.add(theirs.at(), theirs.size()).ok());
    // What is cached here is the old endpoint, for an hour, unless the
    // library's peer-down callback was faster.
    (void)outcomeOf(target);
    theirs.fill(2);
    EXPECT_EQ(outcomeOf(target), TransferStatusEnum::COMPLETED)
        << "the cached description of a restarted peer was used again";
    EXPECT_TRUE(theirs.holds(1));
}

TEST_F(MetadataTest, LocalSegmentIsATargetLikeAnyOther) {
    Memory target(kLength, 5);
    ASSERT_TRUE(local.add(target.at(), target.size()).ok());
    SubBatch batch(local.transport(), 1);
    ASSERT_TRUE(batch
                    .submit({makeRequest(Request::WRITE, LOCAL_SEGMENT_ID,
                                         ours.at(), target.at(), kLength)})
                    .ok());
    EXPECT_EQ(batch.await(0).s, TransferStatusEnum::COMPLETED);
    EXPECT_TRUE(target.holds(1));
}

TEST_F(MetadataTest, WarmupReadsAPeersDescriptionAheadOfTheFirstTransfer) {
    EXPECT_TRUE(local.shim().warmupSegment(local.open(good.name)).ok());
    Engine without;
    EXPECT_FALSE(local.shim().warmupSegment(local.open(without.name)).ok());
    MemFabricTransport bare;
    EXPECT_TRUE(bare.warmupSegment(1).IsInternalError());
}

TEST_F(MetadataTest, Ipv6PeersMoveData) {
    std::unique_ptr<Engine> first;
    std::unique_ptr<Engine> second;
    try {
        first = std::make_unique<Engine>(true);
        second = std::make_unique<Engine>(true);
    } catch (const std::exception& error) {
        GTEST_SKIP() << "::1 is not available here: " << error.what();
    }
    first->installed();
    second->installed();
    Memory memory(kLength, 3);
    ASSERT_TRUE(second->add(memory.at(), memory.size()).ok());
    SubBatch batch(first->transport(), 1);
    ASSERT_TRUE(
        batch
            .submit({makeRequest(Request::WRITE, first->open(second->name),
                                 ours.at(), memory.at(), kLength)})
            .ok());
    EXPECT_EQ(batch.await(0).s, TransferStatusEnum::COMPLETED);
    EXPECT_TRUE(memory.holds(1));
}

}  // namespace
}  // namespace memfabric_test
