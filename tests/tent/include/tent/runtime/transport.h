// SPDX-License-Identifier: Apache-2.0

// Double of TENT's Transport, in two generations: with
// TENT_DOUBLE_GENERATION_B it has the virtuals that came later; with
// TENT_DOUBLE_QUIESCE and TENT_DOUBLE_WARMUP_SEGMENT, declarations, two of them
// in another form.

#ifndef TRANSPORT_V1_H_
#define TRANSPORT_V1_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tent/common/status.h"
#include "tent/common/types.h"
#include "tent/runtime/control_plane.h"
#include "tent/runtime/platform.h"

namespace mooncake {
namespace tent {

struct Capabilities {
    bool dram_to_dram = false;
    bool dram_to_gpu = false;
    bool gpu_to_dram = false;
    bool gpu_to_gpu = false;
    bool dram_to_file = false;
    bool gpu_to_file = false;
};

class Transport {
   public:
    struct SubBatch {
        SubBatch() : device_mask(~0ULL) {}
        virtual ~SubBatch() {}
        virtual size_t size() const = 0;
        void notifyProgress() {
            if (notify_progress) notify_progress(progress_batch_id);
        }

        uint64_t device_mask;
        std::string qp_pool;
        BatchID progress_batch_id{0};
        std::function<void(BatchID)> notify_progress;
    };

    using SubBatchRef = SubBatch*;

    Transport() = default;
    virtual ~Transport() = default;

    virtual Status install(std::string& /*local_segment_name*/,
                           std::shared_ptr<ControlService> /*metadata*/,
                           std::shared_ptr<Topology> /*local_topology*/,
                           std::shared_ptr<Config> /*conf*/ = nullptr) {
        return Status::OK();
    }
    virtual Status uninstall() { return Status::OK(); }
    virtual const Capabilities capabilities() const { return caps; }

    virtual Status allocateSubBatch(SubBatchRef& /*batch*/,
                                    size_t /*max_size*/) {
        return missing("allocateSubBatch");
    }
    virtual Status freeSubBatch(SubBatchRef& /*batch*/) {
        return missing("freeSubBatch");
    }
    virtual Status submitTransferTasks(
        SubBatchRef /*batch*/, const std::vector<Request>& /*request_list*/) {
        return missing("submitTransferTasks");
    }
    virtual Status getTransferStatus(SubBatchRef /*batch*/, int /*task_id*/,
                                     TransferStatus& /*status*/) {
        return missing("getTransferStatus");
    }
    virtual bool supportsCancellation() const { return false; }
    virtual Status cancelTransferTask(SubBatchRef /*batch*/, int /*task_id*/) {
        return missing("cancelTransferTask");
    }

    virtual Status allocateLocalMemory(void** addr, size_t size,
                                       MemoryOptions& options) {
        return Platform::getLoader().allocate(addr, size, options);
    }
    virtual Status freeLocalMemory(void* addr, size_t size) {
        return Platform::getLoader().free(addr, size);
    }
    virtual bool warmupMemory(void* /*addr*/, size_t /*length*/) {
        return false;
    }
    virtual Status addMemoryBuffer(BufferDesc& /*desc*/,
                                   const MemoryOptions& /*options*/) {
        return missing("addMemoryBuffer");
    }
    virtual Status addMemoryBuffer(std::vector<BufferDesc>& desc_list,
                                   const MemoryOptions& options) {
        for (auto& desc : desc_list) {
            CHECK_STATUS(addMemoryBuffer(desc, options));
        }
        return Status::OK();
    }
    virtual Status removeMemoryBuffer(BufferDesc& /*desc*/) {
        return missing("removeMemoryBuffer");
    }

    virtual bool supportNotification() const { return false; }
    virtual Status sendNotification(SegmentID /*target_id*/,
                                    const Notification& /*notify*/) {
        return missing("sendNotification");
    }
    virtual Status receiveNotification(
        std::vector<Notification>& /*notify_list*/) {
        return missing("receiveNotification");
    }

    virtual const char* getName() const { return "<generic>"; }
    virtual double getEstimatedBandwidth() const { return -1.0; }
    virtual Status getNicLoadStats(std::vector<NicLoadStats>&) const {
        return Status::OK();
    }

#ifdef TENT_DOUBLE_GENERATION_B
#ifdef TENT_DOUBLE_QUIESCE
    TENT_DOUBLE_QUIESCE
    TENT_DOUBLE_WARMUP_SEGMENT
#else
    virtual Status quiesce() { return Status::OK(); }
    virtual Status warmupSegment(SegmentID /*target_id*/) {
        return missing("warmupSegment");
    }
#endif
    virtual bool tracksLocalBuffer(const BufferDesc& /*desc*/) const {
        return false;
    }
    virtual Status retryTransferTask(SubBatchRef /*batch*/, int /*task_id*/,
                                     const Request& /*request*/) {
        return missing("retryTransferTask");
    }
#endif

   protected:
    Capabilities caps;

   private:
    static Status missing(const std::string& method) {
        return Status::NotImplemented(method + " is not implemented");
    }
};

}  // namespace tent
}  // namespace mooncake

#endif  // TRANSPORT_V1_H_
