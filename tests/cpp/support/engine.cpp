// SPDX-License-Identifier: Apache-2.0

#include "support/engine.h"

#include <glog/logging.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <mutex>
#include <set>

#include "tent/common/utils/ip.h"

namespace memfabric_test {

namespace {

void require(const Status& status, const char* what) {
    if (!status.ok()) {
        throw std::runtime_error(std::string(what) + ": " + status.ToString());
    }
}

BufferDesc describe(void* address, size_t length) {
    BufferDesc desc{};
    desc.addr = reinterpret_cast<uint64_t>(address);
    desc.length = length;
    desc.location = kWildcardLocation;
    return desc;
}

// A free port that this process has not used before. The engine's RPC keeps
// connections by address, and one to an earlier server fails the first call to
// its successor.
uint16_t newPort(bool ipv6) {
    static std::mutex mutex;
    static std::set<uint16_t> used;
    std::lock_guard<std::mutex> lock(mutex);
    for (;;) {
        // The port is at the same place in either family's structure.
        sockaddr_in6 address{};
        address.sin6_family = AF_INET6;
        address.sin6_addr = in6addr_loopback;
        if (!ipv6) {
            auto* ipv4 = reinterpret_cast<sockaddr_in*>(&address);
            *ipv4 = {};
            ipv4->sin_family = AF_INET;
            ipv4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        }
        socklen_t length = ipv6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
        auto* generic = reinterpret_cast<sockaddr*>(&address);
        const int fd =
            socket(ipv6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const bool bound = fd >= 0 && bind(fd, generic, length) == 0 &&
                           getsockname(fd, generic, &length) == 0;
        if (fd >= 0) close(fd);
        if (!bound) throw std::runtime_error("no free port");
        const uint16_t port = ntohs(address.sin6_port);
        if (used.insert(port).second) return port;
    }
}

uint8_t byteAt(size_t offset, uint8_t seed) {
    return static_cast<uint8_t>(offset * 31 + (offset >> 8) * 7 + seed);
}

}  // namespace

std::string endpointIn(const SegmentDesc& segment) {
    const auto& attrs = segment.getMemory().device_attrs;
    const auto found = attrs.find(kEndpointKey);
    return found == attrs.end() ? "(none)" : found->second;
}

Engine::Engine(bool ipv6)
    : metadata(std::make_shared<ControlService>("p2p", "", nullptr)) {
    uint16_t port = newPort(ipv6);
    require(metadata->start(port, ipv6), "metadata server");
    name = buildIpAddrWithPort(ipv6 ? "::1" : "127.0.0.1", port, ipv6);
    require(segments().updateLocal([&](SegmentDesc& segment) {
        segment.name = name;
        segment.type = SegmentType::Memory;
        segment.machine_id = "memfabric-test";
        segment.rpc_server_addr = name;
        return Status::OK();
    }),
            "local segment");
    config->set("transports/memfabric/protocol", std::string("host_rdma"));
}

Status Engine::install() {
    std::string segment_name = name;
    return transport().install(segment_name, metadata,
                               std::make_shared<Topology>(), config);
}

Engine& Engine::installed() {
    require(install(), "install");
    return *this;
}

SegmentID Engine::open(const std::string& segment_name) {
    SegmentID id = 0;
    require(segments().openRemote(id, segment_name), "openRemote");
    return id;
}

SegmentID Engine::openOfOtherProcess(const std::string& segment_name) {
    const SegmentID id = open(segment_name);
    // Its port may be one that this process had used.
    until([&] {
        SegmentDescRef description;
        return segments().getRemoteCached(description, id).ok();
    });
    return id;
}

std::string Engine::endpoint() { return endpointIn(*segments().getLocal()); }

void Engine::advertise(const std::string& endpoint) {
    require(segments().updateLocal([&](SegmentDesc& segment) {
        auto& attrs = std::get<MemorySegmentDesc>(segment.detail).device_attrs;
        if (endpoint.empty()) {
            attrs.erase(kEndpointKey);
        } else {
            attrs[kEndpointKey] = endpoint;
        }
        return Status::OK();
    }),
            "advertise");
}

Status Engine::add(void* address, size_t length) {
    std::vector<BufferDesc> list = {describe(address, length)};
    CHECK_STATUS(transport().addMemoryBuffer(list, MemoryOptions()));
    return segments().updateLocal([&](SegmentDesc& segment) {
        auto& memory = std::get<MemorySegmentDesc>(segment.detail);
        memory.buffers.push_back(list[0]);
        return Status::OK();
    });
}

Status Engine::remove(void* address, size_t length) {
    BufferDesc desc = describe(address, length);
    // As the engine does: what is no longer described is removed then.
    CHECK_STATUS(segments().updateLocal([&](SegmentDesc& segment) {
        auto& buffers = std::get<MemorySegmentDesc>(segment.detail).buffers;
        for (auto it = buffers.begin(); it != buffers.end(); ++it) {
            if (it->addr == desc.addr && it->length == desc.length) {
                buffers.erase(it);
                break;
            }
        }
        return Status::OK();
    }));
    return transport().removeMemoryBuffer(desc);
}

SubBatch::SubBatch(Transport& transport, size_t max_size)
    : transport_(transport) {
    require(transport.allocateSubBatch(batch, max_size), "allocateSubBatch");
}

SubBatch::~SubBatch() {
    if (batch != nullptr) (void)transport_.freeSubBatch(batch);
}

void SubBatch::free() {
    require(transport_.freeSubBatch(batch), "freeSubBatch");
}

TransferStatus SubBatch::poll(int task) {
    // As uninitialised as the engine's is, but always in the same way.
    TransferStatus status{TransferStatusEnum::INVALID, 0xdeadbeef};
    require(transport_.getTransferStatus(batch, task, status),
            "getTransferStatus");
    return status;
}

TransferStatus SubBatch::await(int task) {
    TransferStatus status{};
    until([&] {
        status = poll(task);
        return status.s != TransferStatusEnum::PENDING;
    });
    return status;
}

Request makeRequest(Request::OpCode opcode, SegmentID target, void* source,
                    const void* remote, size_t length) {
    Request request{};
    request.opcode = opcode;
    request.source = source;
    request.target_id = target;
    request.target_offset = reinterpret_cast<uint64_t>(remote);
    request.length = length;
    return request;
}

Memory::Memory(size_t length, uint8_t seed) : bytes_(length) { fill(seed); }

void Memory::fill(uint8_t seed) {
    for (size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = byteAt(i, seed);
}

bool Memory::holds(uint8_t seed) const {
    for (size_t i = 0; i < bytes_.size(); ++i) {
        if (bytes_[i] != byteAt(i, seed)) return false;
    }
    return true;
}

class LogCapture::Sink : public google::LogSink {
   public:
    void send(google::LogSeverity severity, const char* full_filename,
              const char* /*base_filename*/, int line,
              const google::LogMessageTime& /*time*/, const char* message,
              size_t message_len) override {
        std::lock_guard<std::mutex> lock(mutex);
        lines.push_back(
            {severity, full_filename, line, std::string(message, message_len)});
    }

    mutable std::mutex mutex;
    std::vector<Line> lines;
};

LogCapture::LogCapture() : sink_(std::make_unique<Sink>()) {
    google::AddLogSink(sink_.get());
}

LogCapture::~LogCapture() { google::RemoveLogSink(sink_.get()); }

std::vector<LogCapture::Line> LogCapture::lines() const {
    std::lock_guard<std::mutex> lock(sink_->mutex);
    return sink_->lines;
}

size_t LogCapture::count(const std::vector<std::string>& texts) const {
    size_t result = 0;
    for (const auto& line : lines()) {
        bool all = true;
        for (const auto& text : texts) {
            all = all && line.message.find(text) != std::string::npos;
        }
        result += all ? 1 : 0;
    }
    return result;
}

std::string LogCapture::text() const {
    std::string result;
    for (const auto& line : lines()) result += line.message + "\n";
    return result;
}

}  // namespace memfabric_test
