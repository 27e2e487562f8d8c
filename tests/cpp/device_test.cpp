// SPDX-License-Identifier: Apache-2.0

// Whose memory is whose: what CANN says, what it does not say, and when it need
// not be asked.

#include <gtest/gtest.h>

#include <cstring>

#include "support/fixture.h"
#include "tent/platform/npu.h"

namespace memfabric_test {
namespace {

constexpr size_t kLength = 4096;
constexpr char kQuestion[] = "aclrtPointerGetAttributes";
// aclrtMemLocationType.
constexpr uint32_t kHost = 0;
constexpr uint32_t kUnregistered = 2;
constexpr uint32_t kManaged = 3;
constexpr uint32_t kHostNuma = 4;

class DeviceTest : public EmulatedTest {
   protected:
    // Before the first event of the process, the log goes nowhere.
    DeviceTest() { engine.installed(); }

    ~DeviceTest() override {
        ascend.fail(kQuestion, 0);
        ascend.setHostLocation(kUnregistered);
        ascend.setDevice(-1);
    }

    uint64_t questions() { return ascend.count(kQuestion); }

    // How often CANN is asked where that is.
    uint64_t questionsAbout(void* address) {
        const uint64_t before = questions();
        EXPECT_EQ(platform.getMemoryType(address), MTYPE_CPU);
        return questions() - before;
    }

    void useProtocol(const char* protocol) {
        engine.config->set("transports/memfabric/protocol",
                           std::string(protocol));
        ASSERT_TRUE(engine.transport().uninstall().ok());
        engine.installed();
    }

    AscendEmulator& ascend = AscendEmulator::get();
    NpuPlatform platform{nullptr};
    Memory ours{kLength, 1};
    Memory theirs{kLength, 2};
    Engine engine;
};

TEST_F(DeviceTest, A11EachErrorOfCannIsLoggedOnce) {
    LogCapture log;
    // Codes that no other test makes CANN answer.
    for (const int code : {507899, 507901}) {
        ascend.fail(kQuestion, code);
        for (int i = 0; i < 3; ++i) {
            EXPECT_EQ(platform.getMemoryType(ours.at()), MTYPE_CPU);
        }
        EXPECT_EQ(log.count({"aclrtPointerGetAttributes failed",
                             "code=" + std::to_string(code)}),
                  1u)
            << log.text();
    }
}

TEST_F(DeviceTest, A11MemoryOfTheHostIsTheHosts) {
    LogCapture log;
    for (const uint32_t type : {kHost, kUnregistered, kHostNuma}) {
        ascend.setHostLocation(type);
        EXPECT_EQ(platform.getMemoryType(ours.at()), MTYPE_CPU) << type;
        EXPECT_FALSE(engine.transport().warmupMemory(ours.at(), kLength));
    }
    EXPECT_TRUE(log.lines().empty()) << log.text();
}

TEST_F(DeviceTest, A11ManagedMemoryIsLeftToCann) {
    LogCapture log;
    ascend.setHostLocation(kManaged);
    EXPECT_EQ(platform.getMemoryType(ours.at()), MTYPE_CUDA);
    EXPECT_TRUE(engine.transport().warmupMemory(ours.at(), kLength))
        << "touching it moves its pages to the host";
    EXPECT_EQ(platform.getLocation(ours.at(), kLength).at(0).location, "npu:0");
    const uint64_t copies = ascend.count("aclrtMemcpy");
    const Status status = platform.copy(theirs.at(), ours.at(), kLength);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_GT(ascend.count("aclrtMemcpy"), copies);
    EXPECT_TRUE(theirs.holds(1));
    EXPECT_TRUE(log.lines().empty()) << log.text();
}

TEST_F(DeviceTest, A11AnUnknownKindOfMemoryIsTakenForADevices) {
    LogCapture log;
    ascend.setHostLocation(77);
    for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(platform.getMemoryType(ours.at()), MTYPE_CUDA);
    }
    EXPECT_EQ(log.count({"kind of memory is not known", "location=77"}), 1u)
        << log.text();
}

TEST_F(DeviceTest, A11RegisteredHostMemoryIsKnownWithoutAsking) {
    EXPECT_EQ(questionsAbout(ours.at()), 1u);
    ASSERT_TRUE(engine.add(ours.at(), ours.size()).ok());
    EXPECT_EQ(questionsAbout(ours.at()), 0u);
    EXPECT_EQ(questionsAbout(ours.at(kLength - 1)), 0u);
    EXPECT_EQ(questionsAbout(ours.at() + kLength), 1u);
    EXPECT_EQ(questionsAbout(ours.at() - 1), 1u);
    ASSERT_TRUE(engine.remove(ours.at(), ours.size()).ok());
    EXPECT_EQ(questionsAbout(ours.at()), 1u);
}

TEST_F(DeviceTest, A11WhatWasNotRemovedIsAskedAboutAfterTheTransport) {
    for (const bool destroyed : {false, true}) {
        ASSERT_TRUE(engine.add(ours.at(), ours.size()).ok());
        EXPECT_EQ(questionsAbout(ours.at()), 0u);
        if (destroyed) {
            engine.destroyTransport();
        } else {
            ASSERT_TRUE(engine.transport().uninstall().ok());
            engine.installed();
        }
        EXPECT_EQ(questionsAbout(ours.at()), 1u);
    }
}

TEST_F(DeviceTest, A11ARefusedRemovalIsAskedAboutAgain) {
    ASSERT_TRUE(engine.add(ours.at(), ours.size()).ok());
    emulator.script("deregister=SM_ERROR");
    EXPECT_FALSE(engine.remove(ours.at(), ours.size()).ok());
    EXPECT_EQ(questionsAbout(ours.at()), 1u)
        << "the engine takes it for removed, its caller unmaps it";
}

TEST_F(DeviceTest, A11RegisteredDeviceMemoryIsNeverTakenForTheHosts) {
    ascend.setDevice(1);
    useProtocol("device_sdma");
    void* device = ascend.allocate(kLength, 1);
    ASSERT_NE(device, nullptr);
    ASSERT_TRUE(engine.add(device, kLength).ok());
    EXPECT_EQ(platform.getMemoryType(device), MTYPE_CUDA);
    ASSERT_TRUE(engine.remove(device, kLength).ok());
    ascend.free(device);
}

}  // namespace
}  // namespace memfabric_test
