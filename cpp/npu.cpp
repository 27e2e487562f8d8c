// SPDX-License-Identifier: Apache-2.0

#include "tent/platform/npu.h"

#include <cstdint>
#include <string_view>

#include "memfabric-transport/src/bridge.rs.h"

namespace mooncake {
namespace tent {

namespace {

int deviceOf(void *addr) {
    return memfabric::deviceOf(reinterpret_cast<size_t>(addr));
}

}  // namespace

Status NpuPlatform::copy(void *dst, void *src, size_t length) {
    if (length == 0 || (deviceOf(dst) < 0 && deviceOf(src) < 0)) {
        return CpuPlatform::copy(dst, src, length);
    }
    const auto outcome = memfabric::copyDeviceMemory(
        reinterpret_cast<size_t>(dst), reinterpret_cast<size_t>(src), length);
    if (outcome.code == 0) return Status::OK();
    return Status::InternalError(
        std::string_view(outcome.message.data(), outcome.message.size()));
}

MemoryType NpuPlatform::getMemoryType(void *addr) {
    return deviceOf(addr) >= 0 ? MTYPE_CUDA : CpuPlatform::getMemoryType(addr);
}

const std::vector<RangeLocation> NpuPlatform::getLocation(void *start,
                                                          size_t len,
                                                          bool skip_prefault) {
    const int device = deviceOf(start);
    if (device < 0) return CpuPlatform::getLocation(start, len, skip_prefault);
    return {{reinterpret_cast<uint64_t>(start), len,
             "npu:" + std::to_string(device)}};
}

}  // namespace tent
}  // namespace mooncake
