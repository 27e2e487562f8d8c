// SPDX-License-Identifier: Apache-2.0

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "tent/platform/cpu.h"
#include "tent_double/faults.h"

namespace mooncake {
namespace tent {

using tent_double::Call;

Platform& Platform::getLoader(std::shared_ptr<Config> conf) {
    static CpuPlatform platform(std::move(conf));
    return platform;
}

Status CpuPlatform::probe(std::vector<Topology::NicEntry>& /*nic_list*/,
                          std::vector<Topology::MemEntry>& mem_list) {
    mem_list.push_back({"cpu:0", "", Topology::MEM_HOST, 0, {}});
    return Status::OK();
}

Status CpuPlatform::allocate(void** pptr, size_t size,
                             MemoryOptions& /*options*/) {
    CHECK_STATUS(tent_double::pass(Call::kAllocate));
    *pptr = std::malloc(size);
    return *pptr ? Status::OK() : Status::InternalError("out of memory");
}

Status CpuPlatform::free(void* ptr, size_t /*size*/) {
    std::free(ptr);
    return Status::OK();
}

Status CpuPlatform::copy(void* dst, void* src, size_t length) {
    CHECK_STATUS(tent_double::pass(Call::kCopy));
    std::memcpy(dst, src, length);
    return Status::OK();
}

const std::vector<RangeLocation> CpuPlatform::getLocation(void* start,
                                                          size_t len,
                                                          bool skip_prefault) {
    tent_double::passOrThrow(Call::kGetLocation);
    auto address = reinterpret_cast<uint64_t>(start);
    if (skip_prefault) return {{address, len, kWildcardLocation}};
    auto page_size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    for (size_t offset = 0; offset < len; offset += page_size) {
        // What is there must survive, and the write must not be optimised out.
        auto* byte = static_cast<volatile char*>(start) + offset;
        *byte = *byte;
    }
    return {{address, len, "cpu:0"}};
}

}  // namespace tent
}  // namespace mooncake
