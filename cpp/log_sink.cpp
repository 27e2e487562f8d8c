// SPDX-License-Identifier: Apache-2.0

#include "memfabric/log_sink.h"

#include <atomic>

namespace mooncake::tent::memfabric {

namespace {

// Constant-initialised and trivially destroyed: an event may come from a thread
// of the vendor's at any time until the process is gone.
constinit std::atomic<LogSink> log_sink{nullptr};

}  // namespace

void setLogSink(LogSink sink) noexcept {
    log_sink.store(sink, std::memory_order_release);
}

void writeLog(int32_t severity, rust::Str file, uint32_t line,
              rust::Str message) noexcept {
    if (LogSink sink = log_sink.load(std::memory_order_acquire)) {
        try {
            sink(severity, file, line, message);
        } catch (...) {
            // An event that cannot be written must not end the process.
        }
    }
}

}  // namespace mooncake::tent::memfabric
