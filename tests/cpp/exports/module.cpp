// SPDX-License-Identifier: Apache-2.0

// A shared object that contains the transport, as a Python module of TENT does.

#include <memory>

#include "tent/platform/npu.h"
#include "tent/transport/memfabric/memfabric_transport.h"

__attribute__((visibility("default"))) mooncake::tent::Transport*
memfabricExportsProbe() {
    return std::make_unique<mooncake::tent::MemFabricTransport>().release();
}

__attribute__((visibility("default"))) mooncake::tent::Platform*
memfabricExportsPlatform() {
    return std::make_unique<mooncake::tent::NpuPlatform>(nullptr).release();
}
