// SPDX-License-Identifier: Apache-2.0

#include "library.h"

#include "memfabric-transport/src/bridge.rs.h"

std::string installWithoutSettings() {
    const auto transport = mooncake::tent::memfabric::newTransport();
    const auto outcome = transport->install({});
    return std::to_string(outcome.code) + " " + std::string(outcome.message);
}
