// SPDX-License-Identifier: Apache-2.0

// What the tests with the emulator have in common: it starts afresh, and at the
// end nobody broke the library's contract or left something in it.

#ifndef MEMFABRIC_TESTS_SUPPORT_FIXTURE_H
#define MEMFABRIC_TESTS_SUPPORT_FIXTURE_H

#include <gtest/gtest.h>

#include "support/emulator.h"
#include "support/engine.h"

namespace memfabric_test {

class EmulatedTest : public testing::Test {
   protected:
    EmulatedTest() { emulator.reset(); }

    void TearDown() override {
        // The test's engines, which are members or locals, are gone by now, or
        // have nothing outstanding.
        for (const auto& text : emulator.violations()) {
            ADD_FAILURE() << "the library's contract was broken: " << text;
        }
    }

    Emulator& emulator = Emulator::get();
};

}  // namespace memfabric_test

#endif  // MEMFABRIC_TESTS_SUPPORT_FIXTURE_H
