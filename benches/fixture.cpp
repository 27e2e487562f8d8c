// SPDX-License-Identifier: Apache-2.0

#include "fixture.h"

#include <cstdlib>
#include <stdexcept>

#include "baseline.h"
#include "tent/common/config.h"
#include "tent/transport/memfabric/memfabric_transport.h"
#include "tent_double/cluster.h"

namespace memfabric_bench {

namespace {

void require(const Status &status, const char *what) {
    if (!status.ok()) {
        throw std::runtime_error(std::string(what) + ": " + status.ToString());
    }
}

}  // namespace

std::string Case::name() const {
    return std::to_string(requests) + " requests, " + std::to_string(peers) +
           (peers == 1 ? " peer, " : " peers, ") +
           (one_opcode ? "one opcode" : "mixed");
}

std::vector<Case> allCases() {
    std::vector<Case> cases;
    for (size_t requests : {1, 16, 128, 1024, 8192}) {
        for (size_t peers : {size_t{1}, kPeers}) {
            for (bool one_opcode : {true, false}) {
                if (requests < peers * (one_opcode ? 1 : 2)) continue;
                cases.push_back({requests, peers, one_opcode});
            }
        }
    }
    return cases;
}

std::vector<Request> makeRequests(const Case &shape) {
    constexpr size_t kLength = 65536;
    std::vector<Request> requests(shape.requests);
    for (size_t i = 0; i < shape.requests; ++i) {
        auto &request = requests[i];
        request.opcode = shape.one_opcode || i / shape.peers % 2 == 0
                             ? Request::WRITE
                             : Request::READ;
        request.source = reinterpret_cast<void *>((i + 1) * kLength);
        request.target_id = 1 + i % shape.peers;
        request.target_offset = (i + 1) * kLength;
        request.length = kLength;
    }
    return requests;
}

Fixture::Fixture()
    : metadata_(std::make_shared<ControlService>("p2p", "", nullptr)),
      shim_(std::make_unique<MemFabricTransport>()) {
    // What the caller's shell sets must not decide.
    unsetenv("MF_PROTOCOL");
    unsetenv("MF_TRANSFER_TIMEOUT");
    auto &segments = metadata_->segmentManager();
    for (size_t i = 1; i <= kPeers; ++i) {
        const std::string name = "peer-" + std::to_string(i);
        endpoints_.push_back("192.168.100." + std::to_string(i) + ":45000");
        SegmentDesc desc{};
        desc.name = name;
        desc.type = SegmentType::Memory;
        MemorySegmentDesc memory;
        memory.device_attrs["memfabric_unique_id"] = endpoints_.back();
        desc.detail = memory;
        tent_double::describe(name, desc);
        SegmentID id = 0;
        require(segments.openRemote(id, name), "openRemote");
        if (id != i) throw std::logic_error("segments are not numbered from 1");
    }
    require(segments.updateLocal([](SegmentDesc &segment) {
        segment.rpc_server_addr = "127.0.0.1:1";
        return Status::OK();
    }),
            "updateLocal");
    lookUp(kPeers);
    auto config = std::make_shared<Config>();
    // Needs no NPU.
    config->set("transports/memfabric/protocol", std::string("host_rdma"));
    std::string name = "127.0.0.1:1";
    require(
        shim_->install(name, metadata_, std::make_shared<Topology>(), config),
        "install");
}

std::unique_ptr<Transport> Fixture::baseline(const Case &shape) const {
    return makeBaseline({endpoints_.begin(), endpoints_.begin() + shape.peers},
                        shape.one_opcode);
}

void Fixture::lookUp(size_t peers) {
    for (size_t i = 1; i <= peers; ++i) {
        SegmentDescRef pin;
        require(metadata_->segmentManager().withCachedSegment(
                    i, pin, [](SegmentDesc *) { return Status::OK(); }),
                "withCachedSegment");
    }
}

void cycle(Transport &transport, const std::vector<Request> &requests) {
    Transport::SubBatchRef batch = nullptr;
    require(transport.allocateSubBatch(batch, requests.size()), "allocate");
    require(transport.submitTransferTasks(batch, requests), "submit");
    pollAndFree(transport, batch, requests.size());
}

void pollAndFree(Transport &transport, Transport::SubBatchRef batch,
                 size_t tasks) {
    for (size_t task = 0; task < tasks; ++task) {
        TransferStatus status;
        require(
            transport.getTransferStatus(batch, static_cast<int>(task), status),
            "poll");
        if (status.s != COMPLETED) {
            throw std::runtime_error("a task is not completed");
        }
    }
    require(transport.freeSubBatch(batch), "free");
}

}  // namespace memfabric_bench
