// SPDX-License-Identifier: Apache-2.0

// Knobs: makes a call into the doubles fail. Observations: how often each was
// made. Both are the process's, for all threads.

#ifndef TENT_DOUBLE_FAULTS_H
#define TENT_DOUBLE_FAULTS_H

#include <cstdint>
#include <exception>

#include "tent/common/status.h"

namespace tent_double {

using mooncake::tent::Status;

enum class Call {
    kConfigGet,
    kGetLocal,
    kUpdateLocal,
    kSynchronizeLocal,
    kGetRemoteCached,
    kWithCachedSegment,
    kInvalidateRemote,
    kInvalidateAll,
    kAllocate,
    kCopy,
    kGetLocation,
    kCount,
};

const char* nameOf(Call call);

// The n-th call from now on, 1 being the next, throws `exception`. Replaces
// what was asked before for this call.
void throwAt(Call call, uint64_t n, std::exception_ptr exception);

// The n-th call from now on answers `status`. Not for the calls that answer no
// Status (get, getLocal, getLocation).
void failAt(Call call, uint64_t n, Status status);

// Every call from now on answers `status`; a Status::OK() ends it.
void failAlways(Call call, Status status);

// Calls since the start or the last reset, failed ones included.
uint64_t count(Call call);

// Forgets all faults and counts.
void reset();

// For the doubles: counts the call and answers, or throws, what was asked for.
Status pass(Call call);
void passOrThrow(Call call);

}  // namespace tent_double

#endif  // TENT_DOUBLE_FAULTS_H
