// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <string_view>

#include "tent/common/types.h"
#include "tent/common/utils/ip.h"
#include "tent/runtime/topology.h"

namespace mooncake {
namespace tent {

namespace {

constexpr std::array<const char*, kNumTransportTypes> kTransportNames = {
    "unspec", "rdma",   "mnnvl",        "shm", "nvlink", "gds",    "io_uring",
    "tcp",    "ascend", "sunrise_link", "tpu", "ub",     "mpcomm", "memfabric"};

}  // namespace

const char* transportTypeName(TransportType type) {
    auto index = static_cast<size_t>(type);
    return index < kTransportNames.size() ? kTransportNames[index] : "unknown";
}

TransportType parseTransportType(const std::string& name) {
    for (size_t i = 0; i < kTransportNames.size(); ++i) {
        if (name == kTransportNames[i]) return static_cast<TransportType>(i);
    }
    return UNSPEC;
}

std::string buildIpAddrWithPort(const std::string& host, uint16_t port,
                                bool ipv6) {
    return (ipv6 ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

std::string Topology::toString() const {
    json names = {{"nics", json::array()}, {"mems", json::array()}};
    for (const auto& nic : nic_list_) names["nics"].push_back(nic.name);
    for (const auto& mem : mem_list_) names["mems"].push_back(mem.name);
    return names.dump();
}

Status Topology::parse(const std::string& text) {
    try {
        *this = Topology();
        const json names = json::parse(text);
        for (const json& name : names.at("nics")) {
            nic_list_.push_back({name, "", NIC_UNKNOWN, -1, {}});
        }
        for (const json& name : names.at("mems")) {
            mem_list_.push_back({name, "", MEM_UNKNOWN, -1, {}});
        }
    } catch (const std::exception& error) {
        return Status::MalformedJson(error.what());
    }
    return Status::OK();
}

LocationParser::LocationParser(const std::string& location) {
    size_t colon = location.find(':');
    if (colon == std::string::npos) return;
    type_ = location.substr(0, colon);
    try {
        index_ = std::stoi(location.substr(colon + 1));
    } catch (const std::exception&) {
        index_ = -1;
    }
}

}  // namespace tent
}  // namespace mooncake
