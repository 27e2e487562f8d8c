// SPDX-License-Identifier: Apache-2.0

// The test program, which is also each of the other processes that its tests
// start.

#include <glog/logging.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "support/process.h"

int main(int argc, char** argv) {
    int exit_status = 0;
    if (memfabric_test::runRole(argc, argv, &exit_status)) return exit_status;
    // Before any thread: what the caller's shell sets must not decide.
    for (const char* variable :
         {"MF_PROTOCOL", "MF_TRANSFER_TIMEOUT", "MF_EMULATOR",
          "MF_EMULATOR_DEVICE", "GLOG_minloglevel"}) {
        unsetenv(variable);
    }
    FLAGS_minloglevel = google::INFO;
    testing::InitGoogleTest(&argc, argv);
    return RUN_ALL_TESTS();
}
