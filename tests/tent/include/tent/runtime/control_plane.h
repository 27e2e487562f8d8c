// SPDX-License-Identifier: Apache-2.0

// Double of TENT's control service: local metadata, and a server that gives it
// to peers.

#ifndef TRANSFER_METADATA_V1_H
#define TRANSFER_METADATA_V1_H

#include <cstdint>
#include <memory>
#include <string>

#include "tent/runtime/segment.h"
#include "tent/runtime/segment_manager.h"
#include "tent/runtime/topology.h"

namespace mooncake {
namespace tent {

class TransferEngineImpl;

class ControlService {
   public:
    // Only `p2p`, without servers and engine.
    ControlService(const std::string& type, const std::string& servers,
                   TransferEngineImpl* impl);
    ~ControlService();
    ControlService(const ControlService&) = delete;
    ControlService& operator=(const ControlService&) = delete;

    SegmentManager& segmentManager() { return *manager_; }

    // Listens on the loopback address; port 0 takes a free one.
    Status start(uint16_t& port, bool ipv6 = false, size_t threads = 1);

   private:
    class Server;

    std::unique_ptr<SegmentManager> manager_;
    std::unique_ptr<Server> server_;
};

}  // namespace tent
}  // namespace mooncake

#endif  // TRANSFER_METADATA_V1_H
