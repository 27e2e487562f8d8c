// SPDX-License-Identifier: Apache-2.0

// Double of TENT's segment manager.
//
// The local description is copy-on-write: a snapshot, once handed out, never
// changes. Descriptions of peers are fetched on first use and cached per
// thread.

#ifndef SEGMENT_MANAGER_H
#define SEGMENT_MANAGER_H

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <type_traits>
#include <unordered_map>

#include "tent/runtime/segment.h"
#include "tent_double/faults.h"

namespace mooncake {
namespace tent {

class SegmentManager {
   public:
    SegmentManager();
    SegmentManager(const SegmentManager&) = delete;
    SegmentManager& operator=(const SegmentManager&) = delete;

    // Contacts nobody.
    Status openRemote(SegmentID& handle, const std::string& segment_name);
    Status closeRemote(SegmentID handle);

    Status getRemoteCached(SegmentDesc*& desc, SegmentID handle);
    Status getRemoteCached(SegmentDescRef& desc, SegmentID handle);

    // Drops the calling thread's copy.
    Status invalidateRemote(SegmentID handle);
    // Drops every copy of every peer, whatever the name.
    Status invalidateAllCacheForRemote(const std::string& segment_name);

    template <typename Func>
    Status withCachedSegment(SegmentID segment_id, Func operation) {
        SegmentDescRef pin;
        return withCachedSegment(segment_id, pin, operation);
    }

    // Runs `operation` again on a freshly fetched description if it answers
    // NeedsRefreshCache; the second such answer becomes InvalidEntry.
    template <typename Func>
    Status withCachedSegment(SegmentID segment_id, SegmentDescRef& pin,
                             Func operation) {
        static_assert(
            std::is_same_v<std::invoke_result_t<Func&, SegmentDesc*>, Status>,
            "operation must return Status");
        CHECK_STATUS(tent_double::pass(tent_double::Call::kWithCachedSegment));
        if (segment_id == LOCAL_SEGMENT_ID) {
            pin = getLocal();
            return operation(pin.get());
        }
        CHECK_STATUS(getRemoteCached(pin, segment_id));
        Status answer = operation(pin.get());
        if (!answer.IsNeedsRefreshCache()) return answer;
        CHECK_STATUS(invalidateRemote(segment_id));
        CHECK_STATUS(getRemoteCached(pin, segment_id));
        answer = operation(pin.get());
        if (!answer.IsNeedsRefreshCache()) return answer;
        return Status::InvalidEntry("still invalid after a refetch: " +
                                    std::string(answer.message()));
    }

    // The current snapshot. Not to be written to, although its type allows it.
    SegmentDescRef getLocal();

    // Publishes what `mutator` makes of a copy, if it answers OK. It must not
    // call updateLocal itself.
    Status updateLocal(const std::function<Status(SegmentDesc&)>& mutator);

    Status synchronizeLocal();

    // What a peer gets; throws if the description cannot be JSON.
    std::shared_ptr<const std::string> getLocalDumpedJson();

   private:
    Status fetch(SegmentDescRef& desc, SegmentID handle);

    std::mutex names_mutex_;
    std::unordered_map<SegmentID, std::string> names_;
    SegmentID next_id_ = 1;

    std::atomic<uint64_t> version_{0};
    const uint64_t number_;

    std::mutex update_mutex_;
    std::mutex local_mutex_;
    SegmentDescRef local_;
};

}  // namespace tent
}  // namespace mooncake

#endif  // SEGMENT_MANAGER_H
