// SPDX-License-Identifier: Apache-2.0

// The transport as an engine uses it, through TENT's interface, over the
// emulated library. A name that begins with C and a number is a clause of the
// completion contract in the documentation.

#include <gtest/gtest.h>
#include <glog/logging.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cinttypes>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <future>
#include <memory>
#include <set>
#include <sstream>
#include <thread>

#include "memfabric/log_sink.h"
#include "support/fixture.h"
#include "support/process.h"

namespace memfabric_test {
namespace {

constexpr size_t kLength = 1 << 16;

void expectPending(const TransferStatus& status) {
    EXPECT_EQ(status.s, TransferStatusEnum::PENDING);
    EXPECT_EQ(status.transferred_bytes, 0u);
}

void expectFailed(const TransferStatus& status) {
    EXPECT_EQ(status.s, TransferStatusEnum::FAILED);
    EXPECT_EQ(status.transferred_bytes, 0u);
}

void expectCompleted(const TransferStatus& status, size_t length) {
    EXPECT_EQ(status.s, TransferStatusEnum::COMPLETED);
    EXPECT_EQ(status.transferred_bytes, length);
}

// Two engines of one process, with registered memory on both sides.
class TransferTest : public EmulatedTest {
   protected:
    TransferTest() {
        local.config->set("transports/memfabric/transfer_timeout_ms", 100);
        local.installed();
        remote.installed();
        if (!local.add(ours.at(), ours.size()).ok() ||
            !remote.add(theirs.at(), theirs.size()).ok()) {
            throw std::runtime_error("memory was not registered");
        }
        peer = local.open(remote.name);
        emulator.reset();
    }

    ~TransferTest() override { emulator.release(); }

    Request piece(Request::OpCode opcode, size_t offset, size_t length) {
        return makeRequest(opcode, peer, ours.at(offset), theirs.at(offset),
                           length);
    }

    // `count` writes of 64 bytes each, which stay within the memory.
    std::vector<Request> writes(size_t count) {
        std::vector<Request> requests;
        for (size_t i = 0; i < count; ++i) {
            requests.push_back(piece(Request::WRITE, i * 64, 64));
        }
        return requests;
    }

    Transport& transport() { return local.transport(); }

    // With a timeout that is not meant to pass.
    void reinstallPatiently() {
        local.config->set("transports/memfabric/transfer_timeout_ms", 60000);
        if (!transport().uninstall().ok() ||
            !local.installed().add(ours.at(), ours.size()).ok()) {
            throw std::runtime_error("not installed again");
        }
        emulator.reset();
    }

    Memory ours{kLength, 1};
    Memory theirs{kLength, 2};
    Engine remote;
    Engine local;
    SegmentID peer = 0;
};

// A life

TEST_F(EmulatedTest, InstallPublishesTheEndpointAndUninstallTakesItBack) {
    Engine engine;
    EXPECT_EQ(engine.endpoint(), "(none)");
    engine.installed();
    const std::string endpoint = engine.endpoint();
    EXPECT_TRUE(endpoint.starts_with("127.0.0.1:")) << endpoint;
    EXPECT_NE(endpoint, "127.0.0.1:0");
    EXPECT_NE(endpoint, engine.name) << "that is TENT's own server";
    EXPECT_TRUE(engine.transport().uninstall().ok());
    EXPECT_EQ(engine.endpoint(), "(none)");
    EXPECT_EQ(emulator.count("handles"), 0u);
    EXPECT_EQ(emulator.count("uninit"), 0u) << "another copy may use it";
}

TEST_F(EmulatedTest, PublishedSnapshotsAreNeverWrittenTo) {
    Engine engine;
    const auto before = engine.segments().getLocal();
    const json was = *before;
    engine.installed();
    const auto between = engine.segments().getLocal();
    const json with_endpoint = *between;
    EXPECT_TRUE(engine.transport().uninstall().ok());
    EXPECT_EQ(json(*before), was);
    EXPECT_EQ(json(*between), with_endpoint);
}

TEST_F(EmulatedTest, A12OnlyADeviceProtocolClaimsDeviceMemory) {
    Engine engine;
    const auto claims = [&](bool hosts, bool devices) {
        const auto capabilities = engine.transport().capabilities();
        EXPECT_EQ(capabilities.dram_to_dram, hosts);
        EXPECT_EQ(capabilities.dram_to_gpu, devices);
        EXPECT_EQ(capabilities.gpu_to_dram, devices);
        EXPECT_EQ(capabilities.gpu_to_gpu, devices);
        EXPECT_FALSE(capabilities.dram_to_file || capabilities.gpu_to_file);
    };
    claims(false, false);
    auto& ascend = AscendEmulator::get();
    ascend.setDevice(0);
    for (const std::string protocol :
         {"host_rdma", "device_sdma", "device_rdma", "device_urma",
          "device_uboe", "host_rdma"}) {
        SCOPED_TRACE(protocol);
        engine.config->set("transports/memfabric/protocol", protocol);
        engine.installed();
        claims(true, protocol.starts_with("device_"));
        ASSERT_TRUE(engine.transport().uninstall().ok());
        claims(false, false);
    }
    ascend.setDevice(-1);
}

TEST_F(EmulatedTest, NameIsMemfabricWithoutNotificationOrCancellation) {
    Engine engine;
    auto& transport = engine.transport();
    EXPECT_STREQ(transport.getName(), "memfabric");
    EXPECT_STREQ(transportTypeName(MEMFABRIC), "memfabric");
    EXPECT_FALSE(transport.supportNotification());
    EXPECT_FALSE(transport.supportsCancellation());
    EXPECT_TRUE(transport.cancelTransferTask(nullptr, 0).IsNotImplemented());
}

TEST_F(EmulatedTest, UninstallIsSafeWithoutInstallAndTwice) {
    Engine engine;
    EXPECT_TRUE(engine.transport().uninstall().ok());
    engine.installed();
    EXPECT_TRUE(engine.transport().uninstall().ok());
    EXPECT_TRUE(engine.transport().uninstall().ok());
    EXPECT_EQ(emulator.count("destroy"), 1u);
}

TEST_F(EmulatedTest, DestructionAloneTakesEverythingDown) {
    Engine engine;
    engine.installed();
    Memory memory(kLength, 1);
    ASSERT_TRUE(engine.add(memory.at(), memory.size()).ok());
    engine.destroyTransport();
    EXPECT_EQ(engine.endpoint(), "(none)");
    EXPECT_EQ(emulator.count("handles"), 0u);
    EXPECT_EQ(emulator.count("regions"), 0u);
    EXPECT_EQ(emulator.count("uninit"), 0u) << "another copy may use it";
}

TEST_F(EmulatedTest, DestructionIsSafeInEveryHalfBuiltState) {
    { MemFabricTransport never_installed; }
    {
        Engine engine;
        SubBatch without_install(engine.transport(), 4);
    }
    // A failing init is for a process of its own, see install_test.cpp: this
    // one may have initialised the library before.
    for (const char* script :
         {"config_init=-1", "create=null", "get_rpc_port=-1", "port=0"}) {
        emulator.script(script);
        Engine engine;
        EXPECT_FALSE(engine.install().ok()) << script;
        engine.destroyTransport();
        EXPECT_EQ(emulator.count("handles"), 0u) << script;
    }
    emulator.script("");
    Engine engine;
    engine.installed();
    EXPECT_TRUE(engine.transport().uninstall().ok());
    engine.destroyTransport();
}

TEST_F(EmulatedTest, TwoEnginesOfOneProcessLogEachEventOnce) {
    LogCapture log;
    Engine first;
    Engine second;
    first.installed();
    second.installed();
    EXPECT_NE(first.endpoint(), second.endpoint());
    EXPECT_EQ(log.count({first.endpoint()}), 1u) << log.text();
    EXPECT_EQ(log.count({second.endpoint()}), 1u) << log.text();
}

TEST_F(EmulatedTest, OneEngineGoesAndTheOtherStaysUsable) {
    Engine local;
    Engine remote;
    local.installed();
    remote.installed();
    {
        Engine third;
        third.installed();
    }
    EXPECT_EQ(emulator.count("uninit"), 0u)
        << "the library is still in use by two engines";
    Memory ours(kLength, 1);
    Memory theirs(kLength, 2);
    ASSERT_TRUE(remote.add(theirs.at(), theirs.size()).ok());
    SubBatch batch(local.transport(), 1);
    ASSERT_TRUE(
        batch
            .submit({makeRequest(Request::WRITE, local.open(remote.name),
                                 ours.at(), theirs.at(), kLength)})
            .ok());
    expectCompleted(batch.await(0), kLength);
    EXPECT_TRUE(theirs.holds(1));
}

TEST_F(EmulatedTest, LogLinesCarryTheCoresFileAndFollowTheHostsLevel) {
    LogCapture log;
    {
        Engine engine;
        engine.installed();
    }
    const auto lines = log.lines();
    ASSERT_FALSE(lines.empty());
    for (const auto& line : lines) {
        EXPECT_TRUE(line.file.ends_with(".rs")) << line.file;
        EXPECT_GT(line.line, 0);
        EXPECT_EQ(line.severity, google::INFO) << line.message;
    }

    const int level = FLAGS_minloglevel;
    FLAGS_minloglevel = google::ERROR;
    LogCapture quiet;
    {
        Engine engine;
        engine.installed();
        EXPECT_EQ(emulator.count("log_level"), 3u);
    }
    FLAGS_minloglevel = level;
    EXPECT_TRUE(quiet.lines().empty()) << quiet.text();
}

// Role: the other process of a transfer. Tells its segment and its memory, then
// does what each line of input says.
const bool kPeerRole = addRole("peer", [](const std::vector<std::string>&) {
    Engine engine;
    engine.installed();
    Memory memory(kLength, 0);
    if (!engine.add(memory.at(), memory.size()).ok()) return 1;
    std::printf("%s %" PRIuPTR "\n", engine.name.c_str(),
                reinterpret_cast<uintptr_t>(memory.at()));
    std::fflush(stdout);
    char command[16];
    unsigned seed = 0;
    while (std::scanf("%15s %u", command, &seed) == 2) {
        const bool holds = memory.holds(static_cast<uint8_t>(seed));
        if (std::string(command) == "fill") {
            memory.fill(static_cast<uint8_t>(seed));
        }
        std::printf("%s\n", holds ? "holds" : "differs");
        std::fflush(stdout);
    }
    const bool quiet =
        engine.shim().quiesce().ok() && engine.transport().uninstall().ok();
    return quiet && Emulator::get().violations().empty() ? 0 : 1;
});

TEST_F(EmulatedTest, DataMovesBothWaysBetweenTwoProcesses) {
    Process other("peer", {});
    std::istringstream line(other.readLine());
    std::string segment;
    uintptr_t address = 0;
    ASSERT_TRUE(line >> segment >> address) << other.log();
    const auto* theirs = reinterpret_cast<const uint8_t*>(address);

    Engine engine;
    engine.installed();
    Memory ours(kLength, 7);
    ASSERT_TRUE(engine.add(ours.at(), ours.size()).ok());
    const SegmentID target = engine.openOfOtherProcess(segment);
    SubBatch batch(engine.transport(), 4);
    constexpr size_t kHalf = kLength / 2;
    ASSERT_TRUE(batch
                    .submit({makeRequest(Request::WRITE, target, ours.at(),
                                         theirs, kHalf),
                             makeRequest(Request::WRITE, target, ours.at(kHalf),
                                         theirs + kHalf, kHalf)})
                    .ok());
    expectCompleted(batch.await(0), kHalf);
    expectCompleted(batch.await(1), kHalf);
    other.writeLine("check 7");
    EXPECT_EQ(other.readLine(), "holds");

    other.writeLine("fill 8");
    EXPECT_EQ(other.readLine(), "differs");
    ASSERT_TRUE(batch
                    .submit({makeRequest(Request::READ, target, ours.at(),
                                         theirs, kLength)})
                    .ok());
    expectCompleted(batch.await(2), kLength);
    EXPECT_TRUE(ours.holds(8));

    EXPECT_TRUE(engine.shim().quiesce().ok());
    EXPECT_TRUE(engine.transport().uninstall().ok());
    EXPECT_EQ(other.wait(), 0) << other.log();
}

TEST_F(EmulatedTest, TasksOfAKilledPeerFailAndTheTransportGoesOn) {
    Process other("peer", {});
    std::istringstream line(other.readLine());
    std::string segment;
    uintptr_t address = 0;
    ASSERT_TRUE(line >> segment >> address) << other.log();
    const auto* theirs = reinterpret_cast<const uint8_t*>(address);

    Engine engine;
    engine.installed();
    Memory ours(kLength, 7);
    const SegmentID target = engine.openOfOtherProcess(segment);
    SubBatch batch(engine.transport(), 4);
    const auto write =
        makeRequest(Request::WRITE, target, ours.at(), theirs, kLength);
    ASSERT_TRUE(batch.submit({write}).ok());
    expectCompleted(batch.await(0), kLength);
    emulator.script("delay=10s");
    ASSERT_TRUE(batch.submit({write}).ok());
    expectPending(batch.poll(1));
    other.kill();
    EXPECT_EQ(other.wait(), 128 + 9);
    expectFailed(batch.await(1));
    emulator.script("");
    ASSERT_TRUE(batch.submit({write}).ok());
    expectFailed(batch.await(2));
    EXPECT_TRUE(engine.shim().quiesce().ok());
}

// Memory

TEST_F(EmulatedTest, RegisteredBuffersCarryTypeAndEndpoint) {
    Engine engine;
    engine.installed();
    Memory memory(kLength, 1);
    std::vector<BufferDesc> list(2);
    for (size_t i = 0; i < list.size(); ++i) {
        list[i].addr = reinterpret_cast<uint64_t>(memory.at(i * 4096));
        list[i].length = 4096;
        list[i].location = "cpu:0";
    }
    emulator.script("log");
    ASSERT_TRUE(engine.transport().addMemoryBuffer(list, MemoryOptions()).ok());
    for (const auto& desc : list) {
        EXPECT_EQ(desc.transports, std::vector<TransportType>{MEMFABRIC});
        EXPECT_EQ(desc.transport_attrs.at(MEMFABRIC), engine.endpoint());
        EXPECT_EQ(desc.location, "cpu:0");
    }
    EXPECT_EQ(emulator.count("batch_register"), 1u)
        << "a list is one registration";
    EXPECT_EQ(emulator.count("regions"), 2u);

    BufferDesc single = list[0];
    single.addr = reinterpret_cast<uint64_t>(memory.at(2 * 4096));
    single.transports.clear();
    single.transport_attrs.clear();
    ASSERT_TRUE(
        engine.transport().addMemoryBuffer(single, MemoryOptions()).ok());
    EXPECT_EQ(single.transports, std::vector<TransportType>{MEMFABRIC});
}

TEST_F(EmulatedTest, FailedListIsRegisteredAndAdvertisedNotAtAll) {
    Engine engine;
    engine.installed();
    Memory memory(kLength, 1);
    std::vector<BufferDesc> list(3);
    for (size_t i = 0; i < list.size(); ++i) {
        list[i].addr = reinterpret_cast<uint64_t>(memory.at(i * 4096));
        list[i].length = 4096;
        list[i].location = kWildcardLocation;
    }
    emulator.script("region=SM_MALLOC_FAILED@3");
    const Status status =
        engine.transport().addMemoryBuffer(list, MemoryOptions());
    EXPECT_TRUE(status.IsInternalError()) << status;
    EXPECT_NE(status.message().find("SM_MALLOC_FAILED (-2001)"),
              std::string_view::npos)
        << status;
    for (const auto& desc : list) {
        EXPECT_TRUE(desc.transports.empty());
        EXPECT_TRUE(desc.transport_attrs.empty());
    }
    EXPECT_EQ(emulator.count("regions"), 0u);
}

TEST_F(EmulatedTest, EmptyListIsSuccessWithoutAVendorCall) {
    Engine engine;
    engine.installed();
    std::vector<BufferDesc> none;
    EXPECT_TRUE(engine.transport().addMemoryBuffer(none, MemoryOptions()).ok());
    EXPECT_EQ(emulator.count("batch_register"), 0u);
    EXPECT_EQ(emulator.count("register"), 0u);
}

TEST_F(EmulatedTest, RemovingWhatIsNotOursDoesNothing) {
    Engine engine;
    engine.installed();
    Memory memory(kLength, 1);
    EXPECT_TRUE(engine.remove(memory.at(), memory.size()).ok());
    ASSERT_TRUE(engine.add(memory.at(), memory.size()).ok());
    EXPECT_TRUE(engine.remove(memory.at(), memory.size()).ok());
    EXPECT_TRUE(engine.remove(memory.at(), memory.size()).ok());
    EXPECT_EQ(emulator.count("deregister"), 1u);
    EXPECT_EQ(emulator.count("regions"), 0u);
}

TEST_F(EmulatedTest, RemovalLeavesTheTransportsOfTheDescription) {
    Engine engine;
    engine.installed();
    Memory memory(kLength, 1);
    std::vector<BufferDesc> list(1);
    list[0].addr = reinterpret_cast<uint64_t>(memory.at());
    list[0].length = memory.size();
    list[0].location = "cpu:0";
    ASSERT_TRUE(engine.transport().addMemoryBuffer(list, MemoryOptions()).ok());
    list[0].transports.push_back(TCP);
    const auto transports = list[0].transports;
    EXPECT_TRUE(engine.transport().removeMemoryBuffer(list[0]).ok());
    EXPECT_EQ(list[0].transports, transports)
        << "an engine may be iterating them";
}

TEST_F(EmulatedTest, MemoryNeedsAnInstalledTransport) {
    Engine engine;
    Memory memory(kLength, 1);
    const Status status = engine.add(memory.at(), memory.size());
    EXPECT_TRUE(status.IsInternalError()) << status;
    EXPECT_NE(status.message().find("not installed"), std::string_view::npos);
    // Teardown asks every transport for every buffer.
    EXPECT_TRUE(engine.remove(memory.at(), memory.size()).ok());
}

TEST_F(TransferTest, DeviceMemoryIsLabelledAndNeverTouched) {
    auto& ascend = AscendEmulator::get();
    ascend.setDevice(5);
    local.config->set("transports/memfabric/protocol",
                      std::string("device_sdma"));
    reinstallPatiently();
    void* device = ascend.allocate(kLength, 5);
    ASSERT_NE(device, nullptr);
    EXPECT_TRUE(transport().warmupMemory(device, kLength));
    EXPECT_FALSE(transport().warmupMemory(ours.at(), kLength));

    std::vector<BufferDesc> list(2);
    for (auto& desc : list) desc.length = kLength;
    list[0].addr = reinterpret_cast<uint64_t>(device);
    list[0].location = kWildcardLocation;
    list[1].addr = list[0].addr;
    list[1].location = "npu:7";
    for (auto& desc : list) {
        std::vector<BufferDesc> one = {desc};
        ASSERT_TRUE(transport().addMemoryBuffer(one, MemoryOptions()).ok());
        desc = one[0];
    }
    EXPECT_EQ(list[0].location, "npu:5");
    EXPECT_EQ(list[1].location, "npu:7") << "the caller's own label was lost";

    SubBatch batch(transport(), 1);
    ASSERT_TRUE(batch
                    .submit({makeRequest(Request::READ, peer, device,
                                         theirs.at(), kLength)})
                    .ok());
    expectCompleted(batch.await(0), kLength);
    EXPECT_EQ(std::memcmp(ascend.alias(device), theirs.at(), kLength), 0);
    for (auto& desc : list) {
        EXPECT_TRUE(transport().removeMemoryBuffer(desc).ok());
    }
    ascend.free(device);
    ascend.setDevice(-1);
}

TEST_F(TransferTest, RemovalOfABusyRangeWaitsForItsBatch) {
    reinstallPatiently();
    emulator.script("hang");
    SubBatch batch(transport(), 1);
    ASSERT_TRUE(batch.submit({piece(Request::WRITE, 0, kLength)}).ok());
    auto removal = std::async(std::launch::async, [&] {
        return local.remove(ours.at(), ours.size());
    });
    until([&] { return emulator.count("queries_pending") > 0; });
    EXPECT_EQ(emulator.count("deregister"), 0u);
    emulator.release();
    EXPECT_TRUE(removal.get().ok());
    EXPECT_EQ(emulator.count("deregister"), 1u);
    expectCompleted(batch.await(0), kLength);
}

TEST_F(TransferTest, RemovalOfARangeThatStaysBusyIsAnErrorAndKeepsIt) {
    emulator.script("hang");
    SubBatch batch(transport(), 1);
    ASSERT_TRUE(batch.submit({piece(Request::WRITE, 0, kLength)}).ok());
    const Status status = local.remove(ours.at(), ours.size());
    EXPECT_TRUE(status.IsInternalError()) << status;
    EXPECT_EQ(emulator.count("deregister"), 0u);
    emulator.release();
    expectCompleted(batch.await(0), kLength);
    EXPECT_TRUE(local.remove(ours.at(), ours.size()).ok());
}

// Completion

TEST_F(TransferTest, C01PendingAnswersLeaveTasksPendingWithZeroBytes) {
    emulator.script("pending=3");
    SubBatch batch(transport(), 1);
    ASSERT_TRUE(batch.submit({piece(Request::WRITE, 0, kLength)}).ok());
    // Each poll of a single task asks afresh.
    for (int i = 0; i < 3; ++i) expectPending(batch.poll(0));
    EXPECT_EQ(emulator.count("queries_pending"), 3u);
    expectCompleted(batch.await(0), kLength);
}

TEST_F(TransferTest, C02SuccessCompletesEveryTaskWithItsFullLength) {
    SubBatch batch(transport(), 3);
    ASSERT_TRUE(batch
                    .submit({piece(Request::WRITE, 0, 1),
                             piece(Request::WRITE, 4096, 4095),
                             piece(Request::WRITE, 8192, 4096)})
                    .ok());
    expectCompleted(batch.await(0), 1);
    expectCompleted(batch.await(1), 4095);
    expectCompleted(batch.await(2), 4096);
    EXPECT_EQ(std::memcmp(ours.at(4096), theirs.at(4096), 4095), 0);
}

TEST_F(TransferTest, C03AnyOtherResultFailsEveryTaskWithZeroBytes) {
    for (const char* script : {"result=SM_ERROR", "result=1", "partial=1"}) {
        emulator.script(script);
        SubBatch batch(transport(), 2);
        ASSERT_TRUE(batch.submit(writes(2)).ok());
        expectFailed(batch.await(0));
        expectFailed(batch.await(1));
    }
}

TEST_F(TransferTest, C03ResultThatTheLibraryNeverWroteIsAFailure) {
    emulator.script("no_result");
    SubBatch batch(transport(), 1);
    ASSERT_TRUE(batch.submit(writes(1)).ok());
    expectFailed(batch.await(0));
}

TEST_F(TransferTest, C04ResultIsFetchedOnceAndServesAllTasksFromAnyThread) {
    emulator.script("pending=2");
    SubBatch batch(transport(), 4);
    ASSERT_TRUE(batch.submit(writes(4)).ok());
    auto sweep = [&] {
        for (int round = 0; round < 50; ++round) {
            for (int task : {2, 0, 1, 3}) {
                expectCompleted(batch.await(task), 64);
            }
        }
    };
    auto other = std::async(std::launch::async, sweep);
    sweep();
    other.get();
    EXPECT_EQ(emulator.count("results"), 1u);
    EXPECT_EQ(emulator.count("query_errors"), 0u);
}

TEST_F(TransferTest, C05QueryErrorIsReturnedAndTheNextPollAsksAgain) {
    emulator.script("query=SM_NOT_CONNECTED@1; query=SM_ERROR@2");
    SubBatch batch(transport(), 1);
    ASSERT_TRUE(batch.submit(writes(1)).ok());
    for (const char* code : {"SM_NOT_CONNECTED (-2014)", "SM_ERROR (-1)"}) {
        TransferStatus untouched{TransferStatusEnum::CANCELED, 77};
        const Status status =
            transport().getTransferStatus(batch.batch, 0, untouched);
        EXPECT_TRUE(status.IsInternalError()) << status;
        EXPECT_NE(status.message().find(code), std::string_view::npos)
            << status;
        EXPECT_EQ(untouched.s, TransferStatusEnum::CANCELED);
        EXPECT_EQ(untouched.transferred_bytes, 77u);
    }
    expectCompleted(batch.await(0), 64);
}

TEST_F(TransferTest, C06RefusedGroupFailsAtOnceAndTheOtherGroupIsUnaffected) {
    emulator.script("submit=SM_INVALID_PARAM@1");
    LogCapture log;
    SubBatch batch(transport(), 3);
    ASSERT_TRUE(batch
                    .submit({piece(Request::WRITE, 0, 64),
                             piece(Request::READ, 4096, 64),
                             piece(Request::WRITE, 64, 64)})
                    .ok());
    const uint64_t queries = emulator.count("query");
    expectFailed(batch.poll(0));
    expectFailed(batch.poll(2));
    EXPECT_EQ(emulator.count("query"), queries) << "a refused batch was asked";
    expectCompleted(batch.await(1), 64);
    EXPECT_GE(log.count({"SM_INVALID_PARAM (-2000)"}), 1u) << log.text();
    EXPECT_TRUE(local.shim().quiesce().ok()) << "counted as in flight";
}

TEST_F(TransferTest, C07CallRejectedAsAWholeLeavesTheSubBatchAsItWas) {
    SubBatch batch(transport(), 4);
    ASSERT_TRUE(batch.submit(writes(3)).ok());
    EXPECT_EQ(batch.batch->size(), 3u);
    const uint64_t submits = emulator.count("submit");

    const Status over = batch.submit(writes(2));
    EXPECT_TRUE(over.IsTooManyRequests()) << over;
    EXPECT_EQ(batch.batch->size(), 3u);
    EXPECT_EQ(emulator.count("submit"), submits);

    ASSERT_TRUE(batch.submit(writes(1)).ok());
    for (int task = 0; task < 4; ++task) {
        expectCompleted(batch.await(task), 64);
    }

    ASSERT_TRUE(local.shim().quiesce().ok());
    SubBatch another(transport(), 4);
    const Status quiesced = another.submit(writes(1));
    EXPECT_TRUE(quiesced.IsInternalError()) << quiesced;
    EXPECT_NE(quiesced.message().find("quiesced"), std::string_view::npos);
    EXPECT_EQ(another.batch->size(), 0u);

    ASSERT_TRUE(transport().uninstall().ok());
    const Status uninstalled = another.submit(writes(1));
    EXPECT_TRUE(uninstalled.IsInternalError()) << uninstalled;
    EXPECT_EQ(another.batch->size(), 0u);
}

struct ForeignSubBatch : Transport::SubBatch {
    size_t size() const override { return 0; }
};

TEST_F(TransferTest, C07NullAndForeignSubBatchesAreInvalidArgument) {
    SubBatch of_remote(remote.transport(), 1);
    ForeignSubBatch foreign;
    for (Transport::SubBatchRef batch :
         {Transport::SubBatchRef{nullptr}, Transport::SubBatchRef{&foreign},
          of_remote.batch}) {
        TransferStatus status{};
        const Status submitted =
            transport().submitTransferTasks(batch, writes(1));
        EXPECT_TRUE(submitted.IsInvalidArgument()) << submitted;
        const Status polled = transport().getTransferStatus(batch, 0, status);
        EXPECT_TRUE(polled.IsInvalidArgument()) << polled;
    }
    for (Transport::SubBatchRef batch :
         {Transport::SubBatchRef{nullptr}, Transport::SubBatchRef{&foreign}}) {
        const auto given = batch;
        EXPECT_TRUE(transport().freeSubBatch(batch).IsInvalidArgument());
        EXPECT_EQ(batch, given);
    }
    EXPECT_EQ(emulator.count("submit"), 0u);
}

TEST_F(TransferTest, C08RequestsAreGroupedByPeerAndOpcodeInTheirOrder) {
    emulator.script("log");
    SubBatch batch(transport(), 5);
    auto to_self = [&](Request::OpCode opcode, size_t offset) {
        return makeRequest(opcode, LOCAL_SEGMENT_ID, ours.at(offset),
                           ours.at(offset + kLength / 2), 64);
    };
    ASSERT_TRUE(
        batch
            .submit({piece(Request::READ, 0, 64), to_self(Request::WRITE, 64),
                     piece(Request::WRITE, 128, 64),
                     to_self(Request::READ, 192),
                     piece(Request::READ, 256, 64)})
            .ok());
    for (int task = 0; task < 5; ++task) {
        expectCompleted(batch.await(task), 64);
    }
    const auto calls = emulator.calls("smem_trans_batch_copy");
    ASSERT_EQ(calls.size(), 4u);
    auto quoted = [](const std::string& text) { return "\"" + text + "\""; };
    std::set<std::string> kinds;
    for (const auto& call : calls) {
        kinds.insert(field(call, "destUrl") + " " + field(call, "opcode"));
        EXPECT_EQ(field(call, "flags"), "0") << call;
        EXPECT_EQ(field(call, "stream"), "0x0") << call;
    }
    EXPECT_EQ(kinds.size(), 4u) << "two calls for one peer and opcode";
    EXPECT_EQ(field(calls[0], "destUrl"), quoted(remote.endpoint()));
    EXPECT_EQ(field(calls[0], "opcode"), "0");
    std::ostringstream local_addresses;
    std::ostringstream remote_addresses;
    local_addresses << "[" << static_cast<void*>(ours.at(0)) << ","
                    << static_cast<void*>(ours.at(256)) << "]";
    remote_addresses << "[" << static_cast<void*>(theirs.at(0)) << ","
                     << static_cast<void*>(theirs.at(256)) << "]";
    EXPECT_EQ(field(calls[0], "srcList"), local_addresses.str())
        << "srcList has local addresses for both opcodes";
    EXPECT_EQ(field(calls[0], "destList"), remote_addresses.str());
}

TEST_F(TransferTest, C09QuiesceRefusesSubmissionsFromItsFirstMomentOn) {
    emulator.script("hang");
    SubBatch batch(transport(), 8);
    ASSERT_TRUE(batch.submit(writes(1)).ok());
    const uint64_t submits = emulator.count("submit");
    auto quiesce =
        std::async(std::launch::async, [&] { return local.shim().quiesce(); });
    until([&] { return emulator.count("queries_pending") > 0; });
    EXPECT_TRUE(batch.submit(writes(1)).IsInternalError());
    EXPECT_TRUE(quiesce.get().IsInternalError());
    EXPECT_TRUE(batch.submit(writes(1)).IsInternalError())
        << "also after a timeout";
    emulator.release();
    EXPECT_TRUE(local.shim().quiesce().ok());
    EXPECT_TRUE(batch.submit(writes(1)).IsInternalError()) << "for good";
    EXPECT_EQ(emulator.count("submit"), submits);
    EXPECT_EQ(batch.batch->size(), 1u);
}

TEST_F(TransferTest, C10QuiesceWaitsForEveryBatchAndLetsOthersPoll) {
    reinstallPatiently();
    emulator.script("hang");
    SubBatch first(transport(), 1);
    SubBatch second(transport(), 1);
    ASSERT_TRUE(first.submit(writes(1)).ok());
    ASSERT_TRUE(second.submit({piece(Request::READ, 4096, 64)}).ok());
    auto quiesce =
        std::async(std::launch::async, [&] { return local.shim().quiesce(); });
    until([&] { return emulator.count("queries_pending") > 3; });
    expectPending(first.poll(0));
    EXPECT_NE(quiesce.wait_for(std::chrono::seconds(0)),
              std::future_status::ready);
    emulator.release();
    const Status status = quiesce.get();
    EXPECT_TRUE(status.ok()) << status;
    const uint64_t queries = emulator.count("query");
    expectCompleted(first.poll(0), 64);
    expectCompleted(second.poll(0), 64);
    EXPECT_EQ(emulator.count("query"), queries)
        << "quiesce uses the same bookkeeping as a poll";
}

TEST_F(TransferTest, C10QuiesceWithNothingOutstandingIsImmediate) {
    SubBatch batch(transport(), 1);
    ASSERT_TRUE(batch.submit(writes(1)).ok());
    expectCompleted(batch.await(0), 64);
    const uint64_t queries = emulator.count("query");
    EXPECT_TRUE(local.shim().quiesce().ok());
    EXPECT_EQ(emulator.count("query"), queries);
}

TEST_F(TransferTest, C11TimeoutSaysWhatIsOutstandingAndKeepsItPending) {
    emulator.script("hang");
    SubBatch batch(transport(), 3);
    ASSERT_TRUE(batch.submit(writes(2)).ok());
    ASSERT_TRUE(batch.submit({piece(Request::READ, 4096, 64)}).ok());
    const Status status = local.shim().quiesce();
    EXPECT_TRUE(status.IsInternalError()) << status;
    EXPECT_NE(status.message().find("2 vendor batches with 3 tasks"),
              std::string_view::npos)
        << status;
    for (int task = 0; task < 3; ++task) expectPending(batch.poll(task));
    emulator.release();
    for (int task = 0; task < 3; ++task) {
        expectCompleted(batch.await(task), 64);
    }
    EXPECT_TRUE(local.shim().quiesce().ok());
}

TEST_F(TransferTest, C12TimeoutCancelsNothing) {
    emulator.script("hang; log");
    SubBatch batch(transport(), 1);
    ASSERT_TRUE(batch.submit(writes(1)).ok());
    EXPECT_FALSE(local.shim().quiesce().ok());
    for (const auto& call : emulator.calls()) {
        const std::string name = call.substr(0, call.find(' '));
        EXPECT_TRUE(name == "smem_trans_batch_copy" ||
                    name == "smem_trans_batch_status_query")
            << call;
    }
    emulator.release();
    expectCompleted(batch.await(0), 64);
    EXPECT_EQ(std::memcmp(ours.at(), theirs.at(), 64), 0);
}

// Role: goes down with a batch that never ends. valgrind.supp knows it by name.
int goDownWithWorkOutstanding(const std::vector<std::string>&) {
    auto& emulator = Emulator::get();
    Memory ours(kLength, 1);
    Memory theirs(kLength, 2);
    Engine remote;
    Engine local;
    local.config->set("transports/memfabric/transfer_timeout_ms", 50);
    local.installed();
    remote.installed();
    if (!remote.add(theirs.at(), theirs.size()).ok()) return 1;
    emulator.script("hang; late_args");
    {
        SubBatch batch(local.transport(), 2);
        const SegmentID peer = local.open(remote.name);
        if (!batch
                 .submit({makeRequest(Request::WRITE, peer, ours.at(),
                                      theirs.at(), kLength)})
                 .ok()) {
            return 2;
        }
    }
    local.destroyTransport();
    const bool kept = emulator.count("destroy") == 0 &&
                      emulator.count("outstanding") == 1 &&
                      emulator.violations().empty();
    // The library reads the arrays of the freed sub-batch only now.
    emulator.release();
    until([&] { return emulator.count("unfinished") == 0; });
    std::printf("%s %s\n", kept ? "kept" : "destroyed",
                theirs.holds(1) ? "written" : "lost");
    return 0;
}

const bool kLeakRole = addRole("leak", goDownWithWorkOutstanding);

TEST_F(EmulatedTest, C13TeardownWithWorkOutstandingDestroysNothingAndSaysSo) {
    Process process("leak", {}, {{"GLOG_logtostderr", "1"}});
    EXPECT_EQ(process.readLine(), "kept written");
    EXPECT_EQ(process.wait(), 0) << process.log();
    const std::string log = process.log();
    EXPECT_NE(log.find("leaked on purpose"), std::string::npos) << log;
}

// Role: leaves while a thread writes events, as one of a leaked library does.
int leaveWhileEventsAreWritten(const std::vector<std::string>&) {
    // Runs after what the transport does at exit, for it is older.
    std::atexit([] {
        mooncake::tent::memfabric::writeLog(1, "exit.rs", 1, "at the end");
    });
    Engine local;
    local.installed();
    static std::promise<void> first;
    std::thread([] {
        for (bool told = false;; told = true) {
            mooncake::tent::memfabric::writeLog(1, "exit.rs", 1, "on the way");
            if (!told) first.set_value();
            std::this_thread::yield();
        }
    }).detach();
    first.get_future().wait();
    return 0;
}

const bool kExitRole = addRole("exit", leaveWhileEventsAreWritten);

// The race detector's findings end the process with another status.
TEST_F(EmulatedTest, EventsAtTheProcesssExitStayOutOfTheHostsLogger) {
    Process process("exit", {}, {{"GLOG_logtostderr", "1"}});
    EXPECT_EQ(process.readAll(), "");
    EXPECT_EQ(process.wait(), 0) << process.log();
    const std::string log = process.log();
    EXPECT_NE(log.find("exit.rs:1] on the way\n"), std::string::npos) << log;
    EXPECT_NE(log.find("\nat the end\n"), std::string::npos) << log;
}

TEST_F(TransferTest, C14FreedSubBatchLeavesItsVendorBatchesTracked) {
    emulator.script("hang; late_args");
    SubBatch batch(transport(), 2);
    ASSERT_TRUE(batch.submit(writes(2)).ok());
    batch.free();
    EXPECT_EQ(batch.batch, nullptr);
    const Status waiting = local.shim().quiesce();
    EXPECT_TRUE(waiting.IsInternalError()) << waiting;
    EXPECT_NE(waiting.message().find("1 vendor batches with 2 tasks"),
              std::string_view::npos)
        << waiting;
    emulator.release();
    EXPECT_TRUE(local.shim().quiesce().ok());
    EXPECT_EQ(std::memcmp(ours.at(), theirs.at(), 128), 0)
        << "the arrays did not live until the batch was done";
}

TEST_F(TransferTest, C15VendorCallsOfPollsAndSubmissionsNeverOverlap) {
    emulator.script("log; pending=3; slow_query=200us; slow_submit=200us");
    auto work = [&](size_t offset) {
        SubBatch batch(transport(), 32);
        for (int task = 0; task < 32; ++task) {
            ASSERT_TRUE(batch.submit({piece(Request::WRITE, offset, 64)}).ok());
            expectCompleted(batch.await(task), 64);
        }
    };
    auto other = std::async(std::launch::async, work, 4096);
    work(0);
    other.get();
    std::vector<std::pair<uint64_t, uint64_t>> spans;
    std::set<std::string> threads;
    for (const auto& call : emulator.calls()) {
        spans.emplace_back(std::stoull(field(call, "begin")),
                           std::stoull(field(call, "end")));
        threads.insert(field(call, "thread"));
    }
    EXPECT_EQ(threads.size(), 2u) << "nothing could have overlapped";
    std::sort(spans.begin(), spans.end());
    for (size_t i = 1; i < spans.size(); ++i) {
        EXPECT_GE(spans[i].first, spans[i - 1].second);
    }
}

// What TENT expects besides

TEST_F(TransferTest, TasksAreAppendedInRequestOrder) {
    SubBatch batch(transport(), 6);
    size_t expected = 0;
    for (size_t count : {1u, 2u, 3u}) {
        EXPECT_EQ(batch.batch->size(), expected);
        std::vector<Request> requests;
        for (size_t i = 0; i < count; ++i) {
            requests.push_back(piece(Request::WRITE, 0, 10 + expected + i));
        }
        ASSERT_TRUE(batch.submit(requests).ok());
        expected += count;
    }
    for (int task = 0; task < 6; ++task) {
        expectCompleted(batch.await(task), 10 + static_cast<size_t>(task));
    }
}

TEST_F(TransferTest, EmptySubmissionAndEmptySubBatchAreFine) {
    SubBatch none(transport(), 0);
    EXPECT_TRUE(none.submit({}).ok());
    EXPECT_EQ(none.batch->size(), 0u);
    EXPECT_TRUE(none.submit(writes(1)).IsTooManyRequests());
    EXPECT_EQ(emulator.count("submit"), 0u);
}

TEST_F(TransferTest, TaskNumberPastTheEndIsFailedAndANegativeOneAnError) {
    SubBatch batch(transport(), 4);
    ASSERT_TRUE(batch.submit(writes(1)).ok());
    expectFailed(batch.poll(1));
    expectFailed(batch.poll(1000));
    TransferStatus status{};
    EXPECT_TRUE(transport()
                    .getTransferStatus(batch.batch, -1, status)
                    .IsInvalidArgument());
    expectCompleted(batch.await(0), 64);
}

TEST_F(TransferTest, ZeroLengthIsCompletedAndNeverReachesTheLibrary) {
    emulator.script("refuse_zero");
    SubBatch batch(transport(), 3);
    ASSERT_TRUE(
        batch
            .submit({piece(Request::WRITE, 0, 64), piece(Request::WRITE, 64, 0),
                     piece(Request::WRITE, 128, 64)})
            .ok());
    expectCompleted(batch.poll(1), 0);
    expectCompleted(batch.await(0), 64);
    expectCompleted(batch.await(2), 64);
}

TEST_F(TransferTest, TerminalAnswersNeverChange) {
    emulator.script("result=SM_ERROR@1");
    SubBatch batch(transport(), 2);
    ASSERT_TRUE(batch.submit(writes(1)).ok());
    ASSERT_TRUE(batch.submit(writes(1)).ok());
    expectFailed(batch.await(0));
    expectCompleted(batch.await(1), 64);
    emulator.script("query=SM_ERROR");
    for (int i = 0; i < 3; ++i) {
        expectFailed(batch.poll(0));
        expectCompleted(batch.poll(1), 64);
    }
}

TEST_F(TransferTest, AllocationSucceedsOnATransportThatIsNotInstalled) {
    MemFabricTransport bare;
    Transport::SubBatchRef batch = nullptr;
    ASSERT_TRUE(bare.allocateSubBatch(batch, 4).ok());
    EXPECT_TRUE(bare.submitTransferTasks(batch, writes(1)).IsInternalError());
    EXPECT_EQ(batch->size(), 0u);
    EXPECT_TRUE(bare.freeSubBatch(batch).ok());
    EXPECT_EQ(batch, nullptr);
}

TEST_F(TransferTest, ReadsMoveFromTheTargetToTheSource) {
    SubBatch batch(transport(), 1);
    ASSERT_TRUE(batch.submit({piece(Request::READ, 0, kLength)}).ok());
    expectCompleted(batch.await(0), kLength);
    EXPECT_TRUE(ours.holds(2));
    EXPECT_TRUE(theirs.holds(2));
}

TEST_F(TransferTest, SubmitAndPollOfOneSubBatchMayMeet) {
    constexpr int kTasks = 500;
    SubBatch batch(transport(), kTasks);
    std::atomic<bool> submitting{true};
    auto poller = std::async(std::launch::async, [&] {
        while (submitting) {
            const auto size = static_cast<int>(batch.batch->size());
            for (int task = 0; task < size; ++task) {
                const auto status = batch.poll(task);
                EXPECT_NE(status.s, TransferStatusEnum::FAILED);
            }
        }
    });
    for (int task = 0; task < kTasks; ++task) {
        EXPECT_TRUE(batch.submit({piece(Request::WRITE, 0, 64)}).ok());
    }
    submitting = false;
    poller.get();
    for (int task = 0; task < kTasks; ++task) {
        expectCompleted(batch.await(task), 64);
    }
}

TEST_F(TransferTest, PeerDownInsideAVendorCallDeadlocksNothing) {
    emulator.script("peer_down_submit=" + remote.endpoint() +
                    "; peer_down_thread_query=" + remote.endpoint());
    SubBatch batch(transport(), 2);
    ASSERT_TRUE(batch.submit(writes(1)).ok());
    expectCompleted(batch.await(0), 64);
    emulator.script("");
    ASSERT_TRUE(batch.submit(writes(1)).ok());
    expectCompleted(batch.await(1), 64);
}

// A child of the process, by fork

// Whether `body` holds in a child. The child ends by a signal: at an exit, leak
// checkers would miss the threads that it does not have.
bool holdsInChild(const std::function<bool()>& body) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("no pipe");
    const pid_t child = fork();
    if (child < 0) throw std::runtime_error("no child");
    if (child == 0) {
        // It must end, whatever it waits for.
        alarm(60);
        const char answer = body() ? 'y' : 'n';
        if (write(ends[1], &answer, 1) == 1) (void)raise(SIGKILL);
        _exit(1);
    }
    close(ends[1]);
    char answer = 0;
    const bool answered = read(ends[0], &answer, 1) == 1;
    close(ends[0]);
    EXPECT_EQ(waitpid(child, nullptr, 0), child);
    EXPECT_TRUE(answered) << "it died, or hung for a minute";
    return answer == 'y';
}

TEST_F(TransferTest, A16AForkedChildLeavesEverythingAlone) {
    SubBatch batch(transport(), 2);
    ASSERT_TRUE(batch.submit({piece(Request::WRITE, 0, kLength)}).ok());
    expectCompleted(batch.await(0), kLength);
    LogCapture log;
    const auto calls = [&] {
        std::vector<uint64_t> counts;
        for (const char* call : {"destroy", "uninit", "deregister", "query"}) {
            counts.push_back(emulator.count(call));
        }
        return counts;
    };
    EXPECT_TRUE(holdsInChild([&] {
        const size_t lines = log.lines().size();
        const auto before = calls();
        BufferDesc desc{};
        desc.addr = reinterpret_cast<uint64_t>(ours.at());
        desc.length = ours.size();
        const bool well = local.shim().quiesce().ok() &&
                          transport().removeMemoryBuffer(desc).ok() &&
                          transport().uninstall().ok();
        local.destroyTransport();
        return well && calls() == before && emulator.violations().empty() &&
               local.endpoint() != "(none)" && log.lines().size() == lines;
    }));
    theirs.fill(2);
    ASSERT_TRUE(batch.submit({piece(Request::WRITE, 0, kLength)}).ok());
    expectCompleted(batch.await(1), kLength);
    EXPECT_TRUE(theirs.holds(1));
}

TEST_F(EmulatedTest, A16AChildMayInstallItsOwn) {
#ifdef __SANITIZE_THREAD__
    GTEST_SKIP() << "the race detector allows no thread in such a child";
#endif
    Engine engine;
    engine.installed();
    ASSERT_TRUE(engine.transport().uninstall().ok());
    EXPECT_TRUE(holdsInChild([&] {
        const bool installed = engine.install().ok();
        const uint64_t destroyed = emulator.count("destroy");
        engine.destroyTransport();
        return installed && emulator.count("destroy") == destroyed + 1;
    }));
}

// The end of a thread

// Uses the transport when its thread ends, after everything that the transport
// keeps for the thread is gone.
struct AtTheEnd {
    std::function<void()> use;
    ~AtTheEnd() {
        if (use) use();
    }
};

TEST_F(TransferTest, A17ObjectsOfAThreadMayUseTheTransportWhenItEnds) {
    SubBatch batch(transport(), 3);
    Status failed_poll = Status::OK();
    Status submitted = Status::OK();
    std::thread([&] {
        // Made before the transport's, so it ends after them.
        thread_local AtTheEnd last;
        emulator.script("query=SM_ERROR");
        ASSERT_TRUE(batch.submit({piece(Request::WRITE, 0, 64)}).ok());
        TransferStatus polled{};
        EXPECT_FALSE(
            transport().getTransferStatus(batch.batch, 0, polled).ok());
        last.use = [&] {
            TransferStatus late{};
            failed_poll = transport().getTransferStatus(batch.batch, 0, late);
            submitted = batch.submit(
                {piece(Request::WRITE, 64, 64), piece(Request::READ, 128, 64)});
        };
    }).join();
    EXPECT_TRUE(failed_poll.IsInternalError()) << failed_poll;
    EXPECT_TRUE(failed_poll.message().starts_with("memfabric"))
        << "does not say whose it is: " << failed_poll;
    EXPECT_TRUE(submitted.ok()) << submitted;
    emulator.script("");
    for (int task : {0, 1, 2}) expectCompleted(batch.await(task), 64);
}

}  // namespace
}  // namespace memfabric_test
