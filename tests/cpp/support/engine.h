// SPDX-License-Identifier: Apache-2.0

// What a TENT engine is to a transport: metadata, a configuration, memory, and
// the calls in the order in which an engine makes them.

#ifndef MEMFABRIC_TESTS_SUPPORT_ENGINE_H
#define MEMFABRIC_TESTS_SUPPORT_ENGINE_H

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tent/common/config.h"
#include "tent/runtime/control_plane.h"
#include "tent/runtime/segment_manager.h"
#include "tent/transport/memfabric/memfabric_transport.h"

namespace memfabric_test {

using namespace mooncake::tent;  // NOLINT: every line here is about TENT

inline constexpr char kEndpointKey[] = "memfabric_unique_id";

// The value of an endpoint key in a description; "(none)" if it has none.
std::string endpointIn(const SegmentDesc& segment);

class Engine {
   public:
    // Metadata that peers can read on the loopback address. Protocol host_rdma,
    // so that no NPU is asked for.
    explicit Engine(bool ipv6 = false);
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Calls `install` as the engine does.
    Status install();
    // The same; throws if it fails.
    Engine& installed();

    // By TENT's interface alone.
    Transport& transport() { return *transport_; }
    // For quiesce(), which one generation of the interface lacks.
    MemFabricTransport& shim() { return *transport_; }
    // Destroys the transport as the engine does, without uninstall().
    void destroyTransport() { transport_.reset(); }
    void newTransport() { transport_ = std::make_unique<MemFabricTransport>(); }

    SegmentManager& segments() { return metadata->segmentManager(); }
    SegmentID open(const std::string& segment_name);
    // The same, with its description read.
    SegmentID openOfOtherProcess(const std::string& segment_name);
    // What peers read as our endpoint.
    std::string endpoint();
    // Sets, or with an empty value takes out, our endpoint in the metadata.
    void advertise(const std::string& endpoint);

    // Registers `length` bytes and describes them to peers; the transport's
    // status. Takes them back.
    Status add(void* address, size_t length);
    Status remove(void* address, size_t length);

    std::string name;
    std::shared_ptr<ControlService> metadata;
    std::shared_ptr<Config> config = std::make_shared<Config>();

   private:
    std::unique_ptr<MemFabricTransport> transport_ =
        std::make_unique<MemFabricTransport>();
};

// A sub-batch, freed at the end.
class SubBatch {
   public:
    SubBatch(Transport& transport, size_t max_size);
    ~SubBatch();
    SubBatch(const SubBatch&) = delete;
    SubBatch& operator=(const SubBatch&) = delete;

    Status submit(const std::vector<Request>& requests) {
        return transport_.submitTransferTasks(batch, requests);
    }
    // One poll; throws if it is not answered with OK.
    TransferStatus poll(int task);
    // Polls until the task has ended.
    TransferStatus await(int task);
    void free();

    Transport::SubBatchRef batch = nullptr;

   private:
    Transport& transport_;
};

Request makeRequest(Request::OpCode opcode, SegmentID target, void* source,
                    const void* remote, size_t length);

// Memory with a pattern that depends on the address and the seed.
class Memory {
   public:
    Memory(size_t length, uint8_t seed);

    uint8_t* at(size_t offset = 0) { return bytes_.data() + offset; }
    size_t size() const { return bytes_.size(); }
    void fill(uint8_t seed);
    // Whether it is what fill(seed) would make.
    bool holds(uint8_t seed) const;

   private:
    std::vector<uint8_t> bytes_;
};

// Runs `condition` until it holds; throws if it takes too long to be true.
template <typename Condition>
void until(Condition condition);

// Log lines written through glog in this object's life.
class LogCapture {
   public:
    LogCapture();
    ~LogCapture();
    LogCapture(const LogCapture&) = delete;
    LogCapture& operator=(const LogCapture&) = delete;

    struct Line {
        int severity;
        std::string file;
        int line;
        std::string message;
    };

    std::vector<Line> lines() const;
    // Lines that contain every one of the texts.
    size_t count(const std::vector<std::string>& texts) const;
    // All messages, for a failing test to show.
    std::string text() const;

   private:
    class Sink;
    std::unique_ptr<Sink> sink_;
};

}  // namespace memfabric_test

#include <chrono>
#include <stdexcept>
#include <thread>

namespace memfabric_test {

template <typename Condition>
void until(Condition condition) {
    const auto deadline =
        std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!condition()) {
        if (std::chrono::steady_clock::now() > deadline) {
            throw std::runtime_error("not true in 60 s");
        }
        std::this_thread::yield();
    }
}

}  // namespace memfabric_test

#endif  // MEMFABRIC_TESTS_SUPPORT_ENGINE_H
