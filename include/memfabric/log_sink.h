// SPDX-License-Identifier: Apache-2.0

// Where the core's log events go: one function of the program that links it.

#ifndef MEMFABRIC_LOG_SINK_H
#define MEMFABRIC_LOG_SINK_H

#include <cstdint>

#include "rust/cxx.h"

namespace mooncake::tent::memfabric {

// Writes one event. `severity` is 0 (info), 1 (warning) or 2 (error), as glog
// numbers them; `file` and `line` are where the event is in the core. Called
// from any thread, also from the vendor library's own ones.
using LogSink = void (*)(int32_t severity, rust::Str file, uint32_t line,
                         rust::Str message);

// Sets the sink; null, as at the start, drops every event. From the process's
// exit on events go to stderr, for the sink's logger may be gone.
void setLogSink(LogSink sink) noexcept;

// Called by the core.
void writeLog(int32_t severity, rust::Str file, uint32_t line,
              rust::Str message) noexcept;

}  // namespace mooncake::tent::memfabric

#endif  // MEMFABRIC_LOG_SINK_H
