// SPDX-License-Identifier: Apache-2.0

// TENT's view of the MemFabric transport; everything behind it is the Rust
// core.

#ifndef TENT_MEMFABRIC_TRANSPORT_H
#define TENT_MEMFABRIC_TRANSPORT_H

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "tent/runtime/control_plane.h"
#include "tent/runtime/transport.h"

namespace mooncake {
namespace tent {

// Moves memory between Ascend NPUs, and hosts, over MemFabric's libmf_smem.so,
// which is opened by install() and not before.
//
// This class translates between TENT's types and the core's, and holds no
// policy. Completion follows the library alone: a task is COMPLETED only when
// the library said that its batch succeeded; a failed one may have written
// parts of its memory; quiesce() that times out proves nothing about memory.
// All methods may be called from any thread, and no exception leaves them.
class MemFabricTransport : public Transport {
   public:
    MemFabricTransport();

    // Takes everything down. What is still outstanding then is leaked on
    // purpose, with one ERROR line, rather than freed under a running transfer.
    // In a child, by fork, of the process that installed it, everything is left
    // as it is: it is the parent's.
    ~MemFabricTransport() override;

    MemFabricTransport(const MemFabricTransport &) = delete;
    MemFabricTransport &operator=(const MemFabricTransport &) = delete;

    Status install(std::string &local_segment_name,
                   std::shared_ptr<ControlService> metadata,
                   std::shared_ptr<Topology> local_topology,
                   std::shared_ptr<Config> conf = nullptr) override;

    // InternalError if work is outstanding after the timeout: nothing was
    // destroyed then, and a later call may succeed.
    Status uninstall() override;

    // Device memory only with a protocol that reaches it; nothing unless
    // installed.
    const Capabilities capabilities() const override;

    Status allocateSubBatch(SubBatchRef &batch, size_t max_size) override;

    Status freeSubBatch(SubBatchRef &batch) override;

    Status submitTransferTasks(
        SubBatchRef batch, const std::vector<Request> &request_list) override;

    Status getTransferStatus(SubBatchRef batch, int task_id,
                             TransferStatus &status) override;

    // True for device memory, which the engine must not touch from the CPU.
    bool warmupMemory(void *addr, size_t length) override;

    Status addMemoryBuffer(BufferDesc &desc,
                           const MemoryOptions &options) override;

    Status addMemoryBuffer(std::vector<BufferDesc> &desc_list,
                           const MemoryOptions &options) override;

    Status removeMemoryBuffer(BufferDesc &desc) override;

    const char *getName() const override { return "memfabric"; }

    // The following two override TENT's where the engine has them and are plain
    // methods where it does not. The build stops at an engine that has them in
    // another form, whose calls would never reach ours. An engine without
    // quiesce() is drained by the destructor, and by the removal of a range
    // that is in use.

    // Refuses submissions for good and polls what is outstanding until it is
    // done, or InternalError after MF_TRANSFER_TIMEOUT.
    Status quiesce();

    // Reads a peer's description ahead of the first transfer.
    Status warmupSegment(SegmentID target_id);

   private:
    [[gnu::cold, gnu::noinline]] Status submitOnAnotherThread(
        SubBatchRef batch, const std::vector<Request> &request_list);

    struct Impl;
    std::unique_ptr<Impl> impl_;
};

namespace memfabric {

// Whether T has a member of that name, whatever it is: if it has, the name is
// ambiguous in a class that inherits another one.
struct QuiesceMember {
    int quiesce;
};
template <typename T>
struct WithQuiesceMember : T, QuiesceMember {};
template <typename T>
concept HasQuiesce = !requires {
    &WithQuiesceMember<T>::quiesce;
};

struct WarmupSegmentMember {
    int warmupSegment;
};
template <typename T>
struct WithWarmupSegmentMember : T, WarmupSegmentMember {};
template <typename T>
concept HasWarmupSegment = !requires {
    &WithWarmupSegmentMember<T>::warmupSegment;
};

// One public method of that name, with the parameters and the result of ours.
// The first requirement is not met by an overloaded one.
template <typename T>
concept QuiesceAsExpected = requires {
    &T::quiesce;
    static_cast<Status (T::*)()>(&T::quiesce);
};
template <typename T>
concept WarmupSegmentAsExpected = requires {
    &T::warmupSegment;
    static_cast<Status (T::*)(SegmentID)>(&T::warmupSegment);
};

// Can be completed only if the engine's method is virtual.
template <typename T, bool = HasQuiesce<T>>
struct QuiesceMustBeVirtual {};
template <typename T>
struct QuiesceMustBeVirtual<T, true> : T {
    Status quiesce() override;
};
template <typename T, bool = HasWarmupSegment<T>>
struct WarmupSegmentMustBeVirtual {};
template <typename T>
struct WarmupSegmentMustBeVirtual<T, true> : T {
    Status warmupSegment(SegmentID target_id) override;
};

}  // namespace memfabric

static_assert(!memfabric::HasQuiesce<Transport> ||
                  memfabric::QuiesceAsExpected<Transport>,
              "Transport::quiesce changed: the engine would never call ours");
static_assert(sizeof(memfabric::QuiesceMustBeVirtual<Transport>) > 0);
static_assert(!memfabric::HasWarmupSegment<Transport> ||
                  memfabric::WarmupSegmentAsExpected<Transport>,
              "Transport::warmupSegment changed: the engine would never call "
              "ours");
static_assert(sizeof(memfabric::WarmupSegmentMustBeVirtual<Transport>) > 0);

}  // namespace tent
}  // namespace mooncake

#endif  // TENT_MEMFABRIC_TRANSPORT_H
