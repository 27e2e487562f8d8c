// SPDX-License-Identifier: Apache-2.0

// Double of TENT's segment descriptions, and of their JSON.

#ifndef SEGMENT_H
#define SEGMENT_H

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "tent/common/types.h"
#include "tent/runtime/topology.h"
#include "tent/thirdparty/nlohmann/json.h"

namespace mooncake {
namespace tent {

using json = nlohmann::json;

struct DeviceDesc {
    std::string name;
    std::unordered_map<TransportType, std::string> transport_attrs;
    uint16_t lid;
    std::string gid;
};

struct Region {
    uint64_t size;
    std::string location;
};

struct BufferDesc {
    uint64_t addr;
    uint64_t length;
    std::string location;
    std::vector<TransportType> transports;
    std::vector<Region> regions;
    std::unordered_map<TransportType, std::string> transport_attrs;
    int ref_count{0};  // stays at home
    std::vector<uint32_t> rkey;
    std::string shm_path;
    std::string mnnvl_handle;
    std::vector<uint32_t> lkey;  // stays at home
    bool internal{false};
};

struct FileBufferDesc {
    std::string path;
    uint64_t length;
    uint64_t offset;
};

struct MemorySegmentDesc {
    Topology topology;
    std::unordered_map<std::string, std::string> device_attrs;
    std::vector<BufferDesc> buffers;
    std::vector<DeviceDesc> devices;
    std::unordered_map<int, std::string> transport_attrs;
};

struct FileSegmentDesc {
    std::vector<FileBufferDesc> buffers;
};

enum class SegmentType { Memory, File };

struct SegmentDesc {
    std::string name;
    SegmentType type;
    std::string machine_id;
    std::string rpc_server_addr;
    std::variant<MemorySegmentDesc, FileSegmentDesc> detail;
    std::string rdma_server_name;

    // The buffer that holds the whole range; null if none does.
    BufferDesc* findBuffer(uint64_t base, uint64_t length);

    // Throws on a file.
    const MemorySegmentDesc& getMemory() const {
        return std::get<MemorySegmentDesc>(detail);
    }
};

using SegmentDescRef = std::shared_ptr<SegmentDesc>;

// A value that is not UTF-8 makes the dump of the result throw; text that is no
// description makes from_json throw.
void to_json(json& out, const SegmentDesc& segment);
void from_json(const json& in, SegmentDesc& segment);

}  // namespace tent
}  // namespace mooncake

#endif  // SEGMENT_H
