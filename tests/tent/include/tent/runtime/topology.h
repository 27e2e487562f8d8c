// SPDX-License-Identifier: Apache-2.0

// Double of TENT's topology: what travels inside a segment's description.

#ifndef TENT_TOPOLOGY_H
#define TENT_TOPOLOGY_H

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "tent/common/config.h"
#include "tent/common/status.h"

namespace mooncake {
namespace tent {

class Topology {
   public:
    enum NicType { NIC_RDMA = 0, NIC_TCP = 1, NIC_UNKNOWN = 2, NIC_UB = 3 };
    enum MemType { MEM_HOST, MEM_CUDA, MEM_ROCM, MEM_ASCEND, MEM_UNKNOWN };

    using NicID = int;
    using MemID = int;

    struct NicEntry {
        std::string name;
        std::string pci_bus_id;
        NicType type{NIC_UNKNOWN};
        int numa_node{-1};
        std::unordered_map<std::string, std::string> device_attrs{};
    };

    struct MemEntry {
        std::string name;
        std::string pci_bus_id;
        MemType type;
        int numa_node;
        std::vector<NicID> device_list[3];
    };

    // The names only, as JSON.
    std::string toString() const;
    Status parse(const std::string& text);

    std::vector<NicEntry> nic_list_;
    std::vector<MemEntry> mem_list_;
};

// `npu:3` is type `npu`, index 3; anything without a colon is `*`, -1.
class LocationParser {
   public:
    LocationParser(const std::string& location);

    std::string type() const { return type_; }
    int index() const { return index_; }

   private:
    std::string type_ = kWildcardLocation;
    int index_ = -1;
};

struct RangeLocation {
    uint64_t start;
    size_t len;
    std::string location;
};

}  // namespace tent
}  // namespace mooncake

#endif  // TENT_TOPOLOGY_H
