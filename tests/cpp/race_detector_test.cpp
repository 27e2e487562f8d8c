// SPDX-License-Identifier: Apache-2.0

// That the race detector is live: it sees races in the shim, in the core and
// in the library. Built with MEMFABRIC_SANITIZE=thread only.

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <map>
#include <thread>

#include "memfabric-transport/src/bridge.rs.h"
#include "support/fixture.h"
#include "support/process.h"

namespace memfabric_test {
namespace {

// Of these two, none is before the other.
template <typename First, typename Second>
void atOnce(First first, Second second) {
    std::thread one(first);
    std::thread other(second);
    one.join();
    other.join();
}

// Role: a race that a report must come of.
int race(const std::vector<std::string>& arguments) {
    const std::string& where = arguments.at(0);
    if (where == "none") {
        std::atomic<int> value{0};
        atOnce([&] { value = 1; }, [&] { value = 2; });
    } else if (where == "shim") {
        int value = 0;
        atOnce([&] { value = 1; }, [&] { value = 2; });
    } else if (where == "core") {
        const auto core = mooncake::tent::memfabric::newTransport();
        std::array<mooncake::tent::memfabric::Region, 1> regions{{{1, 2}}};
        atOnce([&] { regions[0].length = 3; },
               [&] {
                   (void)core->registerMemory({regions.data(), regions.size()});
               });
    } else if (where == "library") {
        Engine engine;
        engine.installed();
        Memory ours(64, 1);
        Memory theirs(64, 2);
        if (!engine.add(theirs.at(), theirs.size()).ok()) return 1;
        SubBatch batch(engine.transport(), 1);
        const auto request = makeRequest(Request::WRITE, LOCAL_SEGMENT_ID,
                                         ours.at(), theirs.at(), 64);
        // By a thread that has no lock in common with the library's.
        atOnce([&] { ours.fill(3); },
               [&] {
                   if (batch.submit({request}).ok()) (void)batch.await(0);
               });
    }
    return 0;
}

const bool kRaceRole = addRole("race", race);

TEST(RaceDetectorTest, SeesEachPart) {
    const std::map<std::string, std::string> frames = {
        {"shim", "race_detector_test.cpp"},
        {"core", "src/bridge.rs"},
        {"library", "tests/emulator/src/"}};
    for (const auto& [where, frame] : frames) {
        Process process("race", {where});
        EXPECT_NE(process.wait(), 0) << where;
        const std::string log = process.log();
        const size_t report = log.find("ThreadSanitizer: data race");
        ASSERT_NE(report, std::string::npos) << where << ": " << log;
        EXPECT_NE(log.find(frame, report), std::string::npos) << log;
    }
    Process process("race", {"none"});
    EXPECT_EQ(process.wait(), 0) << process.log();
}

}  // namespace
}  // namespace memfabric_test
