// SPDX-License-Identifier: Apache-2.0

// What the shim is measured against: the least that TENT's interface allows.

#ifndef MEMFABRIC_BENCHES_BASELINE_H
#define MEMFABRIC_BENCHES_BASELINE_H

#include <memory>
#include <string>
#include <vector>

#include "tent/runtime/transport.h"

namespace memfabric_bench {

// A Transport that fills the argument arrays at submit, makes the vendor calls,
// asks once for each result at the first poll and answers every later poll from
// a plain field. Sub-batches are recycled, so that it allocates nothing either.
//
// Left out is whatever may be wrong: it checks no argument, no capacity and no
// code, takes no lock, takes one submission a sub-batch, and one result stands
// for all. Left out as well is reading a peer's endpoint from the metadata:
// `endpoints` are those of the segments 1, 2, ... .
//
// With one peer and one opcode there is no grouping at all; otherwise groups
// are found by position in a table.
std::unique_ptr<mooncake::tent::Transport> makeBaseline(
    const std::vector<std::string> &endpoints, bool one_opcode);

}  // namespace memfabric_bench

#endif  // MEMFABRIC_BENCHES_BASELINE_H
