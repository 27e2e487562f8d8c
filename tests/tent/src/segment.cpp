// SPDX-License-Identifier: Apache-2.0

#include "tent/runtime/segment.h"

#include <stdexcept>

namespace mooncake {
namespace tent {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(DeviceDesc, name, lid, gid, transport_attrs)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Region, size, location)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(BufferDesc, addr, length, location,
                                   transports, regions, transport_attrs, rkey,
                                   shm_path, mnnvl_handle, internal)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FileBufferDesc, path, length, offset)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(FileSegmentDesc, buffers)

BufferDesc* SegmentDesc::findBuffer(uint64_t base, uint64_t length) {
    if (type != SegmentType::Memory || base + length < base) return nullptr;
    for (auto& buffer : std::get<MemorySegmentDesc>(detail).buffers) {
        uint64_t end = buffer.addr + buffer.length;
        if (end >= buffer.addr && buffer.addr <= base && base + length <= end) {
            return &buffer;
        }
    }
    return nullptr;
}

void to_json(json& out, const SegmentDesc& segment) {
    out = {{"name", segment.name},
           {"machine_id", segment.machine_id},
           {"rpc_server_addr", segment.rpc_server_addr}};
    if (!segment.rdma_server_name.empty()) {
        out["rdma_server_name"] = segment.rdma_server_name;
    }
    if (segment.type == SegmentType::File) {
        out["type"] = "file";
        out["detail"] = std::get<FileSegmentDesc>(segment.detail);
        return;
    }
    const auto& memory = segment.getMemory();
    out["type"] = "memory";
    out["detail"] = {{"device_attrs", memory.device_attrs},
                     {"buffers", memory.buffers},
                     {"devices", memory.devices},
                     {"topology", memory.topology.toString()},
                     {"transport_attrs", memory.transport_attrs}};
}

void from_json(const json& in, SegmentDesc& segment) {
    in.at("name").get_to(segment.name);
    in.at("machine_id").get_to(segment.machine_id);
    in.at("rpc_server_addr").get_to(segment.rpc_server_addr);
    segment.rdma_server_name = in.value("rdma_server_name", "");
    const auto type = in.at("type").get<std::string>();
    const json& detail = in.at("detail");
    if (type == "file") {
        segment.type = SegmentType::File;
        segment.detail = detail.get<FileSegmentDesc>();
        return;
    }
    if (type != "memory") {
        throw std::runtime_error("no segment type: " + type);
    }
    MemorySegmentDesc memory;
    detail.at("device_attrs").get_to(memory.device_attrs);
    detail.at("buffers").get_to(memory.buffers);
    detail.at("devices").get_to(memory.devices);
    if (detail.contains("topology")) {
        // As in the real one, a topology that does not parse is dropped.
        (void)memory.topology.parse(detail.at("topology").get<std::string>());
    }
    if (detail.contains("transport_attrs")) {
        detail.at("transport_attrs").get_to(memory.transport_attrs);
    }
    segment.type = SegmentType::Memory;
    segment.detail = std::move(memory);
}

}  // namespace tent
}  // namespace mooncake
