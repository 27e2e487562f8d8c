// SPDX-License-Identifier: Apache-2.0

// Double of TENT's CPU platform.

#ifndef CUDA_H  // the real header's guard
#define CUDA_H

#include "tent/common/config.h"
#include "tent/runtime/platform.h"

namespace mooncake {
namespace tent {

class CpuPlatform : public Platform {
   public:
    CpuPlatform(std::shared_ptr<Config> config) : conf(std::move(config)) {}
    virtual ~CpuPlatform() {}

    virtual Status probe(std::vector<Topology::NicEntry>& nic_list,
                         std::vector<Topology::MemEntry>& mem_list);
    virtual Status allocate(void** pptr, size_t size, MemoryOptions& options);
    virtual Status free(void* ptr, size_t size);
    virtual Status copy(void* dst, void* src, size_t length);
    virtual MemoryType getMemoryType(void* /*addr*/) { return MTYPE_CPU; }
    // Writes to every page unless told to skip that, as the real one does: it
    // ends the process where the CPU cannot.
    virtual const std::vector<RangeLocation> getLocation(
        void* start, size_t len, bool skip_prefault = false);
    virtual const std::string type() const { return "cpu"; }

   private:
    std::shared_ptr<Config> conf;
};

}  // namespace tent
}  // namespace mooncake

#endif  // CUDA_H
