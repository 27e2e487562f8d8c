// SPDX-License-Identifier: Apache-2.0

// What only the doubles of TENT can do on demand: throw, refuse, answer
// nonsense, and count.

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <random>

#include "support/fixture.h"
#include "tent/platform/npu.h"
#include "tent_double/cluster.h"
#include "tent_double/faults.h"

namespace memfabric_test {
namespace {

using tent_double::Call;

constexpr size_t kLength = 4096;

class DoubleTest : public EmulatedTest {
   protected:
    ~DoubleTest() override {
        tent_double::reset();
        tent_double::forgetAll();
    }

    Request to(SegmentID target) {
        return makeRequest(Request::WRITE, target, ours.at(), theirs.at(),
                           kLength);
    }

    // Either can be the target of transfers to `theirs`.
    void installBoth(Engine& one, Engine& other) {
        for (Engine* engine : {&one, &other}) {
            engine->installed();
            ASSERT_TRUE(engine->add(theirs.at(), theirs.size()).ok());
        }
    }

    Memory ours{kLength, 1};
    Memory theirs{kLength, 2};
};

// What a TENT call may throw: exceptions, and what is none.
std::vector<std::exception_ptr> exceptions() {
    return {std::make_exception_ptr(std::runtime_error("scripted exception")),
            std::make_exception_ptr(42)};
}

TEST_F(DoubleTest, ExceptionFromAnyCallOfInstallIsAnErrorAndNothingIsLeft) {
    for (Call call : {Call::kConfigGet, Call::kGetLocal, Call::kUpdateLocal,
                      Call::kSynchronizeLocal}) {
        for (const auto& exception : exceptions()) {
            // Each of the times that install makes this call.
            for (uint64_t n = 1;; ++n) {
                SCOPED_TRACE(std::string(nameOf(call)) + " " +
                             std::to_string(n));
                Engine engine;
                tent_double::reset();
                tent_double::throwAt(call, n, exception);
                const Status status = engine.install();
                if (tent_double::count(call) < n) {
                    EXPECT_GT(n, 1u) << "install never makes this call";
                    EXPECT_TRUE(status.ok()) << status;
                    break;
                }
                tent_double::reset();
                EXPECT_TRUE(status.IsInternalError()) << status;
                EXPECT_TRUE(status.message().starts_with("memfabric "))
                    << "does not say whose it is: " << status;
                EXPECT_EQ(engine.endpoint(), "(none)");
                EXPECT_EQ(emulator.count("handles"), 0u);
                const Status again = engine.install();
                EXPECT_TRUE(again.ok()) << again;
            }
        }
    }
}

TEST_F(DoubleTest, RefusedPublicationFailsTheInstallAndUndoesIt) {
    for (Call call : {Call::kUpdateLocal, Call::kSynchronizeLocal}) {
        Engine engine;
        tent_double::failAt(call, 1, Status::MetadataError("store is down"));
        const Status status = engine.install();
        EXPECT_FALSE(status.ok());
        EXPECT_NE(status.message().find("store is down"),
                  std::string_view::npos)
            << status;
        EXPECT_EQ(engine.endpoint(), "(none)") << "still advertised";
        EXPECT_EQ(emulator.count("handles"), 0u);
        EXPECT_FALSE(engine.transport().capabilities().dram_to_dram);
        tent_double::reset();
        EXPECT_TRUE(engine.install().ok());
    }
}

TEST_F(DoubleTest, PublishingIsOneUpdateAndOneSynchronisation) {
    Engine engine;
    tent_double::reset();
    engine.installed();
    EXPECT_EQ(tent_double::count(Call::kUpdateLocal), 1u);
    EXPECT_EQ(tent_double::count(Call::kSynchronizeLocal), 1u);
    EXPECT_TRUE(engine.transport().uninstall().ok());
    EXPECT_EQ(tent_double::count(Call::kUpdateLocal), 2u);
    EXPECT_EQ(tent_double::count(Call::kSynchronizeLocal), 2u);
}

TEST_F(DoubleTest, ExceptionFromAnyCallOfUninstallStillTakesTheLibraryDown) {
    for (Call call :
         {Call::kGetLocal, Call::kUpdateLocal, Call::kSynchronizeLocal}) {
        for (const auto& exception : exceptions()) {
            SCOPED_TRACE(nameOf(call));
            Engine engine;
            engine.installed();
            tent_double::throwAt(call, 1, exception);
            const Status status = engine.transport().uninstall();
            tent_double::reset();
            EXPECT_TRUE(status.IsInternalError()) << status;
            EXPECT_EQ(emulator.count("handles"), 0u);
        }
    }
}

TEST_F(DoubleTest, ExceptionInTheDestructorStaysThere) {
    for (Call call :
         {Call::kGetLocal, Call::kUpdateLocal, Call::kSynchronizeLocal}) {
        for (const auto& exception : exceptions()) {
            Engine engine;
            engine.installed();
            tent_double::throwAt(call, 1, exception);
            engine.destroyTransport();
            tent_double::reset();
            EXPECT_EQ(emulator.count("handles"), 0u);
        }
    }
}

TEST_F(DoubleTest, ExceptionWhileResolvingFailsThatPeersTasksOnly) {
    Engine good;
    Engine local;
    ASSERT_NO_FATAL_FAILURE(installBoth(good, local));
    const SegmentID peer = local.open(good.name);
    for (Call call : {Call::kWithCachedSegment, Call::kGetRemoteCached}) {
        for (const auto& exception : exceptions()) {
            SCOPED_TRACE(nameOf(call));
            SubBatch batch(local.transport(), 3);
            tent_double::throwAt(call, 1, exception);
            const Status status =
                batch.submit({to(peer), to(LOCAL_SEGMENT_ID)});
            tent_double::reset();
            ASSERT_TRUE(status.ok()) << status;
            EXPECT_EQ(batch.await(0).s, TransferStatusEnum::FAILED);
            EXPECT_EQ(batch.await(1).s, TransferStatusEnum::COMPLETED);
            ASSERT_TRUE(batch.submit({to(peer)}).ok());
            EXPECT_EQ(batch.await(2).s, TransferStatusEnum::COMPLETED);
        }
    }
}

TEST_F(DoubleTest, ExceptionWhileDroppingAStaleDescriptionFailsTheTask) {
    for (const auto& exception : exceptions()) {
        Engine good;
        Engine local;
        ASSERT_NO_FATAL_FAILURE(installBoth(good, local));
        const SegmentID peer = local.open(good.name);
        emulator.script("result=SM_ERROR");
        SubBatch batch(local.transport(), 3);
        ASSERT_TRUE(batch.submit({to(peer)}).ok());
        EXPECT_EQ(batch.await(0).s, TransferStatusEnum::FAILED);
        emulator.script("");
        tent_double::reset();
        tent_double::throwAt(Call::kInvalidateRemote, 1, exception);
        ASSERT_TRUE(batch.submit({to(peer)}).ok());
        EXPECT_EQ(tent_double::count(Call::kInvalidateRemote), 1u)
            << "a failed batch drops the cached description";
        tent_double::reset();
        EXPECT_EQ(batch.await(1).s, TransferStatusEnum::FAILED);
        ASSERT_TRUE(batch.submit({to(peer)}).ok());
        EXPECT_EQ(batch.await(2).s, TransferStatusEnum::COMPLETED);
    }
}

TEST_F(DoubleTest, EachDistinctTargetOfACallIsResolvedOnce) {
    Engine first;
    Engine second;
    Engine local;
    first.installed();
    second.installed();
    local.installed();
    const SegmentID a = local.open(first.name);
    const SegmentID b = local.open(second.name);
    ASSERT_TRUE(first.add(theirs.at(), theirs.size()).ok());
    Memory other(kLength, 3);
    ASSERT_TRUE(second.add(other.at(), other.size()).ok());
    auto to_second =
        makeRequest(Request::READ, b, ours.at(), other.at(), kLength);
    SubBatch batch(local.transport(), 6);
    tent_double::reset();
    ASSERT_TRUE(batch.submit({to(a), to_second, to(a), to_second, to(a)}).ok());
    EXPECT_EQ(tent_double::count(Call::kWithCachedSegment), 2u);
    EXPECT_EQ(tent_double::fetches(first.name), 1u);
    for (int task = 0; task < 5; ++task) {
        EXPECT_EQ(batch.await(task).s, TransferStatusEnum::COMPLETED);
    }
    // A healthy peer's description stays cached.
    ASSERT_TRUE(batch.submit({to(a)}).ok());
    EXPECT_EQ(batch.await(5).s, TransferStatusEnum::COMPLETED);
    EXPECT_EQ(tent_double::fetches(first.name), 1u);
    EXPECT_EQ(tent_double::count(Call::kInvalidateRemote), 0u);
}

TEST_F(DoubleTest, MissingEndpointIsLookedForOnceMoreAndNotAgain) {
    Engine without;
    Engine local;
    local.installed();
    const SegmentID target = local.open(without.name);
    SubBatch batch(local.transport(), 1);
    ASSERT_TRUE(batch.submit({to(target)}).ok());
    EXPECT_EQ(batch.await(0).s, TransferStatusEnum::FAILED);
    EXPECT_EQ(tent_double::fetches(without.name), 2u);
}

TEST_F(DoubleTest, NonsenseFromAPeerIsAFailedTask) {
    Engine local;
    local.installed();
    for (const char* text :
         {"", "{", "null", "[]", "{\"type\":\"memory\"}", "\"\\ud800\"",
          R"({"name":"p","type":"memory","machine_id":"","rpc_server_addr":"",)"
          R"("detail":{"device_attrs":{"memfabric_unique_id":7},)"
          R"("buffers":[],"devices":[]}})"}) {
        tent_double::answer("nonsense", text);
        ASSERT_TRUE(
            local.segments().invalidateAllCacheForRemote("nonsense").ok());
        SubBatch batch(local.transport(), 1);
        const Status status = batch.submit({to(local.open("nonsense"))});
        EXPECT_TRUE(status.ok()) << text << ": " << status;
        EXPECT_EQ(batch.await(0).s, TransferStatusEnum::FAILED) << text;
    }
    EXPECT_EQ(emulator.count("submit"), 0u);
}

TEST_F(DoubleTest, EndpointsThatCannotBeUsedFailWithoutAVendorCall) {
    Engine local;
    local.installed();
    SegmentDesc segment{};
    segment.name = "peer";
    segment.type = SegmentType::Memory;
    auto& attrs = std::get<MemorySegmentDesc>(segment.detail).device_attrs;
    for (const std::string& endpoint :
         {std::string("10.0.0.9"), std::string("10.0.0.9:"),
          std::string("10.0.0.9:0"), std::string("10.0.0.9:99999"),
          std::string("somewhere:1"), std::string("[::1:5"), std::string(" "),
          std::string("10.0.0.9:1\n"), std::string(100, '1') + ":1"}) {
        attrs[kEndpointKey] = endpoint;
        tent_double::describe("peer", segment);
        ASSERT_TRUE(local.segments().invalidateAllCacheForRemote("peer").ok());
        SubBatch batch(local.transport(), 1);
        ASSERT_TRUE(batch.submit({to(local.open("peer"))}).ok());
        EXPECT_EQ(batch.await(0).s, TransferStatusEnum::FAILED) << endpoint;
    }
    EXPECT_EQ(emulator.count("submit"), 0u);
}

// Hostile descriptions

// Makes descriptions out of a good one.
class Mutator {
   public:
    Mutator(std::string good, std::string endpoint, unsigned seed)
        : good_(std::move(good)),
          endpoint_(std::move(endpoint)),
          random_(seed) {}

    std::string next() {
        json description = json::parse(good_);
        for (size_t i = 0; i <= below(3); ++i) change(description);
        std::string text = description.dump();
        if (below(4) == 0) damage(text);
        return text;
    }

   private:
    size_t below(size_t end) { return random_() % end; }

    // Any JSON value, or an endpoint that is none. Never one that could be
    // reached.
    json value() {
        switch (below(15)) {
            case 0:
                return nullptr;
            case 1:
                return json::array({endpoint_});
            case 2:
                return json{{"endpoint", endpoint_}};
            case 3:
                return static_cast<int64_t>(random_()) - (1 << 30);
            case 4:
                return 1e300;
            case 5:
                return true;
            case 6:
                return "";
            case 7:
                return endpoint_ + std::string(1, '\0');
            case 8:
                return std::string(1, '\0') + endpoint_;
            case 9:
                return endpoint_ + "\nERROR forged\x1b[31m";
            case 10:
                return std::string(size_t{1} << (10 + below(11)), '9');
            case 11:
                return "[::1:5";
            case 12:
                return "no-such-host:1";
            case 13:
                return " " + endpoint_;
            default:
                return "\xc3\xa9\xe2\x80\xae\xf0\x9f\xa6\x80";
        }
    }

    void change(json& description) {
        json& detail = description["detail"];
        json& attrs = detail["device_attrs"];
        // An earlier change may have made it anything.
        if (!attrs.is_object()) attrs = json::object();
        switch (below(9)) {
            case 0:
                attrs.erase(kEndpointKey);
                return;
            case 1:
            case 2:
                attrs[kEndpointKey] = value();
                return;
            case 3:
                attrs = below(2) == 0 ? value() : json{{"other", value()}};
                return;
            case 4: {
                // Another build's numbers of transports, and no numbers.
                json buffer = detail["buffers"][0];
                buffer["transports"] = {-1, 99, INT32_MAX, int64_t{1} << 40};
                buffer["transport_attrs"] = {{77, "x"}, {-3, endpoint_}};
                if (below(2) == 0) buffer["transports"].push_back(value());
                detail["buffers"].push_back(buffer);
                return;
            }
            case 5: {
                constexpr std::array kTypes = {"file", "memory", "disk", ""};
                description["type"] = kTypes[below(kTypes.size())];
                return;
            }
            case 6: {
                constexpr std::array kKeys = {"name", "type", "machine_id",
                                              "rpc_server_addr", "detail"};
                const char* key = kKeys[below(kKeys.size())];
                if (below(3) == 0) {
                    description.erase(key);
                } else {
                    description[key] = value();
                }
                // So that a later change has something to change.
                if (!description["detail"].is_object()) {
                    description["detail"] = json{{"device_attrs", value()}};
                }
                return;
            }
            case 7:
                detail["topology"] = value();
                detail["transport_attrs"] = {{1, 2}};
                return;
            default:
                description["name"] = value();
        }
    }

    // Text that is no longer what the dump was; the endpoint stays whole, so
    // that nobody is called who is not meant to be.
    void damage(std::string& text) {
        const size_t endpoint = text.find(endpoint_);
        const size_t at = below(text.size());
        if (endpoint != std::string::npos && at + 1 >= endpoint &&
            at <= endpoint + endpoint_.size()) {
            return;
        }
        switch (below(5)) {
            case 0:
                text.resize(at);
                return;
            case 1:
                text[at] = static_cast<char>(random_());  // not UTF-8, mostly
                return;
            case 2:
                text.insert(at, "\xff\xfe");
                return;
            case 3:
                text.insert(at, std::string(10000, '['));
                return;
            default:
                text += text;
        }
    }

    const std::string good_;
    const std::string endpoint_;
    std::minstd_rand random_;
};

// Whether the description is one by which the peer can be reached.
bool leadsTo(const std::string& text, const std::string& endpoint) {
    try {
        const auto segment = json::parse(text).get<SegmentDesc>();
        return segment.type == SegmentType::Memory &&
               endpointIn(segment) == endpoint;
    } catch (const std::exception&) {
        return false;
    }
}

// More of them with MEMFABRIC_FUZZ_CASES.
TEST_F(DoubleTest, HostileDescriptionsFailTheirOwnTasksAndNothingElse) {
    Engine good;
    Engine local;
    ASSERT_NO_FATAL_FAILURE(installBoth(good, local));
    const SegmentID peer = local.open(good.name);
    const SegmentID hostile = local.open("hostile");
    const auto description = good.segments().getLocal();
    SegmentDesc with_buffer = *description;
    auto& memory = std::get<MemorySegmentDesc>(with_buffer.detail);
    memory.buffers.emplace_back();
    memory.buffers[0].addr = reinterpret_cast<uint64_t>(theirs.at());
    memory.buffers[0].length = kLength;
    memory.buffers[0].transports = {MEMFABRIC};
    memory.buffers[0].transport_attrs[MEMFABRIC] = good.endpoint();
    Mutator mutator(json(with_buffer).dump(), good.endpoint(), 5);

    const char* given = std::getenv("MEMFABRIC_FUZZ_CASES");
    const size_t cases = given ? std::stoul(given) : 300;
    size_t reached = 0;
    size_t told = 0;
    for (size_t i = 0; i < cases && !HasFailure(); ++i) {
        const std::string text = mutator.next();
        SCOPED_TRACE("case " + std::to_string(i) + ": " +
                     testing::PrintToString(text.substr(0, 2000)));
        const bool usable = leadsTo(text, good.endpoint());
        reached += usable ? 1 : 0;
        tent_double::answer("hostile", text);
        ASSERT_TRUE(local.segments().invalidateAllCacheForRemote("").ok());
        emulator.reset();
        LogCapture log;
        SubBatch batch(local.transport(), 3);
        const Status status =
            batch.submit({to(peer), to(hostile), to(LOCAL_SEGMENT_ID)});
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_EQ(batch.await(0).s, TransferStatusEnum::COMPLETED);
        EXPECT_EQ(batch.await(2).s, TransferStatusEnum::COMPLETED);
        const auto polled = batch.await(1);
        if (usable) {
            EXPECT_EQ(polled.s, TransferStatusEnum::COMPLETED);
            continue;
        }
        EXPECT_EQ(polled.s, TransferStatusEnum::FAILED);
        EXPECT_EQ(polled.transferred_bytes, 0u);
        EXPECT_EQ(emulator.count("submit"), 2u)
            << "a call for a peer like that";
        // Once a second for a peer.
        const size_t lines = log.count({"peer cannot be reached"});
        EXPECT_LE(lines, 1u) << log.text();
        told += lines;
        for (const auto& line : log.lines()) {
            EXPECT_LT(line.message.size(), 4096u);
            for (const char byte : line.message) {
                EXPECT_FALSE(static_cast<unsigned char>(byte) < ' ')
                    << "byte " << int{byte} << " in a line of the log";
            }
        }
    }
    EXPECT_GT(told, 0u);
    EXPECT_GT(reached, cases / 20) << "hardly anything was a good description";
    EXPECT_LT(reached, cases - cases / 2) << "hardly anything was hostile";
}

TEST_F(DoubleTest, ConfigurationUnderASlashedKeyIsRead) {
    Engine engine;
    ASSERT_TRUE(
        engine.config->load(R"({"transports/memfabric/protocol":"host_rdma"})")
            .ok());
    EXPECT_TRUE(engine.install().ok());
}

TEST_F(DoubleTest, PlatformWithoutDeviceMemoryIsTheCpuPlatform) {
    NpuPlatform platform(nullptr);
    EXPECT_EQ(platform.type(), "cpu");
    EXPECT_EQ(platform.getMemoryType(ours.at()), MTYPE_CPU);
    EXPECT_EQ(platform.getLocation(ours.at(), kLength).at(0).location, "cpu:0");
    EXPECT_TRUE(platform.copy(theirs.at(), ours.at(), kLength).ok());
    EXPECT_TRUE(theirs.holds(1));
    EXPECT_EQ(tent_double::count(Call::kCopy), 1u);
}

TEST_F(DoubleTest, PlatformKnowsDeviceMemoryAndNeverTouchesIt) {
    auto& ascend = AscendEmulator::get();
    ascend.setDevice(2);
    void* device = ascend.allocate(kLength, 2);
    ASSERT_NE(device, nullptr);
    NpuPlatform platform(nullptr);
    EXPECT_EQ(platform.getMemoryType(device), MTYPE_CUDA);
    const auto locations = platform.getLocation(device, kLength);
    ASSERT_EQ(locations.size(), 1u);
    EXPECT_EQ(locations[0].location, "npu:2");
    EXPECT_EQ(locations[0].start, reinterpret_cast<uint64_t>(device));
    EXPECT_EQ(locations[0].len, kLength);

    EXPECT_TRUE(platform.copy(device, ours.at(), kLength).ok());
    EXPECT_EQ(std::memcmp(ascend.alias(device), ours.at(), kLength), 0);
    EXPECT_TRUE(platform.copy(theirs.at(), device, kLength).ok());
    EXPECT_TRUE(theirs.holds(1));
    EXPECT_TRUE(platform.copy(device, ours.at(), 0).ok());
    const Status overrun = platform.copy(device, ours.at(), 2 * kLength);
    EXPECT_TRUE(overrun.IsInternalError()) << overrun;
    ascend.free(device);
    ascend.setDevice(-1);
}

}  // namespace
}  // namespace memfabric_test
