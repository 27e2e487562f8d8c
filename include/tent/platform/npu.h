// SPDX-License-Identifier: Apache-2.0

// Host memory of a machine with Ascend NPUs, for a TENT built without CANN.

#ifndef TENT_PLATFORM_NPU_H
#define TENT_PLATFORM_NPU_H

#include <memory>
#include <string>
#include <vector>

#include "tent/common/config.h"
#include "tent/platform/cpu.h"
#include "tent/runtime/platform.h"

namespace mooncake {
namespace tent {

// CpuPlatform takes every pointer for host memory: it probes a registered range
// by touching it and copies with memcpy, and both end the process where the
// memory is a device's. This platform asks CANN, opened at run time, and leaves
// everything else to CpuPlatform. Without libascendcl.so it is CpuPlatform.
class NpuPlatform : public CpuPlatform {
   public:
    explicit NpuPlatform(std::shared_ptr<Config> config)
        : CpuPlatform(std::move(config)) {}

    ~NpuPlatform() override = default;

    // aclrtMemcpy if a side is device memory.
    Status copy(void *dst, void *src, size_t length) override;

    // MTYPE_CUDA for device memory, which is what TENT calls it.
    MemoryType getMemoryType(void *addr) override;

    // "npu:<device>" for device memory, which is never touched.
    const std::vector<RangeLocation> getLocation(
        void *start, size_t len, bool skip_prefault = false) override;

    // type() stays "cpu": with another name TENT's TCP transport would claim
    // device memory, and copy it with errors ignored.
};

}  // namespace tent
}  // namespace mooncake

#endif  // TENT_PLATFORM_NPU_H
