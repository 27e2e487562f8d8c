// SPDX-License-Identifier: Apache-2.0

// Double of TENT's basic types: the same names, values and defaults.

#ifndef TENT_TYPES_H
#define TENT_TYPES_H

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace mooncake {
namespace tent {

using BatchID = uint64_t;
using SegmentID = uint64_t;

static constexpr uint8_t PRIO_HIGH = 0;
static constexpr uint8_t PRIO_MEDIUM = 1;
static constexpr uint8_t PRIO_LOW = 2;

struct Notification {
    std::string name;
    std::string msg;
};

// A macro in one generation of the interface and a constant in the next, so
// that code which asks with #ifdef builds with one of them only.
#ifdef TENT_DOUBLE_GENERATION_B
static constexpr SegmentID LOCAL_SEGMENT_ID = 0;
#else
#define LOCAL_SEGMENT_ID (0ull)
#endif

enum TransportType : int {
    UNSPEC = 0,
    RDMA,
    MNNVL,
    SHM,
    NVLINK,
    GDS,
    IOURING,
    TCP,
    AscendDirect,
    SUNRISE_LINK,
    TPU,
    UB,
    MPCOMM,
    MEMFABRIC,
    kNumTransportTypes,
};

const static int kSupportedTransportTypes =
    static_cast<int>(kNumTransportTypes);

const char* transportTypeName(TransportType type);

// UNSPEC for a name that is none of them.
TransportType parseTransportType(const std::string& name);

enum class IntentType : int {
    INTENT_UNSPEC = 0,
    FOREGROUND_GET,
    BACKGROUND_PREFETCH,
    MIGRATION,
    CHECKPOINT,
    WEIGHT_LOADING,
    STAGING_INTERNAL,
};

struct Request {
    enum OpCode { READ, WRITE };
    OpCode opcode;
    void* source;
    SegmentID target_id;
    uint64_t target_offset;
    size_t length;
    int priority = PRIO_HIGH;
    std::optional<std::string> policy_name;
    TransportType transport_hint = UNSPEC;
    uint64_t deadline_ns = 0;
    IntentType intent_type = IntentType::INTENT_UNSPEC;
};

enum TransferStatusEnum {
    INITIAL,
    PENDING,
    INVALID,
    CANCELED,
    COMPLETED,
    TIMEOUT,
    FAILED
};

struct TransferStatus {
    TransferStatusEnum s;
    size_t transferred_bytes;
};

struct NicLoadStats {
    std::string device_name;
    uint64_t inflight_bytes{0};
    double ewma_bandwidth_bps{0.0};
};

enum Permission {
    kLocalReadWrite,
    kGlobalReadOnly,
    kGlobalReadWrite,
};

using Location = std::string;
const static std::string kWildcardLocation = "*";

struct MemoryOptions {
    Location location = kWildcardLocation;
    Permission perm = kGlobalReadWrite;
    TransportType type = UNSPEC;
    std::string shm_path = "";
    size_t shm_offset = 0;
    bool internal = false;
};

const std::string kLocalFileSegmentPrefix = "file://";

}  // namespace tent
}  // namespace mooncake

#endif  // TENT_TYPES_H
