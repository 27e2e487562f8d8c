// SPDX-License-Identifier: Apache-2.0

// Knobs: what a peer answers when its description is asked for, instead of
// asking it. Names are those given to openRemote.

#ifndef TENT_DOUBLE_CLUSTER_H
#define TENT_DOUBLE_CLUSTER_H

#include <cstdint>
#include <optional>
#include <string>

#include "tent/runtime/segment.h"

namespace tent_double {

// The segment `name` is described so. A description that cannot be JSON throws
// here.
void describe(const std::string& name,
              const mooncake::tent::SegmentDesc& segment);

// The answer for `name` is this text, whether it is JSON or not.
void answer(const std::string& name, const std::string& text);

// The segment `name` is not to be reached.
void unreachable(const std::string& name, mooncake::tent::Status status);

// Forgets `name`, or all names and counts.
void forget(const std::string& name);
void forgetAll();

// How often the description of `name` was fetched, by whatever way.
uint64_t fetches(const std::string& name);

// For the doubles: counts a fetch; answers nothing if `name` has to be asked.
std::optional<mooncake::tent::Status> fetch(const std::string& name,
                                            std::string& text);

}  // namespace tent_double

#endif  // TENT_DOUBLE_CLUSTER_H
