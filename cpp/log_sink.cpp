// SPDX-License-Identifier: Apache-2.0

#include "memfabric/log_sink.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

namespace mooncake::tent::memfabric {

namespace {

// Constant-initialised and trivially destroyed: an event may come from a thread
// of the vendor's at any time until the process is gone.
constinit std::atomic<LogSink> log_sink{nullptr};
constinit std::atomic<uint32_t> writers{0};
constinit std::atomic<bool> exiting{false};

// Takes the host's logger away before its own static objects are destroyed, and
// waits for those who are in it.
struct Exit {
    ~Exit() {
        exiting = true;
        log_sink = nullptr;
        // One who calls exit() in the logger is waited for in vain.
        const auto patience =
            std::chrono::steady_clock::now() + std::chrono::seconds(1);
        while (writers != 0 && std::chrono::steady_clock::now() < patience) {
            std::this_thread::yield();
        }
    }
};

}  // namespace

void setLogSink(LogSink sink) noexcept {
    // Made after the logger's static objects and so destroyed before them.
    static const Exit at_exit;
    if (!exiting) log_sink = sink;
}

void writeLog(int32_t severity, rust::Str file, uint32_t line,
              rust::Str message) noexcept {
    // Sequentially consistent, as in `Exit`: either it sees this writer, or the
    // writer sees that there is no logger any more.
    ++writers;
    if (LogSink sink = log_sink.load()) {
        try {
            sink(severity, file, line, message);
        } catch (...) {
            // An event that cannot be written must not end the process.
        }
    } else if (exiting) {
        std::fprintf(stderr, "%.*s\n", static_cast<int>(message.size()),
                     message.data());
    }
    --writers;
}

}  // namespace mooncake::tent::memfabric
