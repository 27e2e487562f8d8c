// SPDX-License-Identifier: Apache-2.0

// The shim over the null library, its peers, and the cases that are measured.

#ifndef MEMFABRIC_BENCHES_FIXTURE_H
#define MEMFABRIC_BENCHES_FIXTURE_H

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "tent/runtime/control_plane.h"
#include "tent/runtime/transport.h"

namespace memfabric_bench {

using namespace mooncake::tent;  // NOLINT: every line here is about TENT

inline constexpr size_t kPeers = 8;

// `peers` and opcodes alternate from request to request, which is the order in
// which grouping costs most.
struct Case {
    size_t requests;
    size_t peers;
    bool one_opcode;

    std::string name() const;
};

// Every case that an engine can ask for: a call has at least one request for
// each peer and opcode.
std::vector<Case> allCases();

std::vector<Request> makeRequests(const Case &shape);

// Installed, with peers in the segments 1, 2, ... of its metadata, whose
// descriptions this thread has cached.
class Fixture {
   public:
    Fixture();

    Transport &shim() { return *shim_; }
    std::unique_ptr<Transport> baseline(const Case &shape) const;
    // What the engine's metadata takes for the peers of a call.
    void lookUp(size_t peers);

   private:
    std::vector<std::string> endpoints_;
    std::shared_ptr<ControlService> metadata_;
    std::unique_ptr<Transport> shim_;
};

// A transfer as the engine makes it: allocate, submit, poll task by task until
// each is done, free. Throws if a task does not complete at its first poll.
void cycle(Transport &transport, const std::vector<Request> &requests);

// The second half of a cycle.
void pollAndFree(Transport &transport, Transport::SubBatchRef batch,
                 size_t tasks);

}  // namespace memfabric_bench

#endif  // MEMFABRIC_BENCHES_FIXTURE_H
