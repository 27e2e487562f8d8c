// SPDX-License-Identifier: Apache-2.0

// Double of TENT's platform interface.

#ifndef PLATFORM_H
#define PLATFORM_H

#include <memory>
#include <string>
#include <vector>

#include "tent/runtime/topology.h"

namespace mooncake {
namespace tent {

enum MemoryType { MTYPE_UNKNOWN, MTYPE_CPU, MTYPE_CUDA, MTYPE_ROCM, MTYPE_TPU };

class Platform {
   public:
    // One for the process; a CPU platform.
    static Platform& getLoader(std::shared_ptr<Config> conf = nullptr);

    Platform() {}
    virtual ~Platform() {}

    virtual Status probe(std::vector<Topology::NicEntry>& nic_list,
                         std::vector<Topology::MemEntry>& mem_list) = 0;
    virtual Status allocate(void** pptr, size_t size,
                            MemoryOptions& options) = 0;
    virtual Status free(void* ptr, size_t size) = 0;
    virtual Status copy(void* dst, void* src, size_t length) = 0;
    virtual MemoryType getMemoryType(void* addr) = 0;
    virtual const std::vector<RangeLocation> getLocation(
        void* start, size_t len, bool skip_prefault = false) = 0;
    virtual const std::string type() const = 0;
};

}  // namespace tent
}  // namespace mooncake

#endif  // PLATFORM_H
