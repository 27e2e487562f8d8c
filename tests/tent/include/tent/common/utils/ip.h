// SPDX-License-Identifier: Apache-2.0

// Double of TENT's address helpers.

#ifndef TENT_IP_H
#define TENT_IP_H

#include <cstdint>
#include <string>
#include <utility>

#include "tent/common/status.h"

namespace mooncake {
namespace tent {

// `host:port`, with brackets around the host if it is IPv6.
std::string buildIpAddrWithPort(const std::string& host, uint16_t port,
                                bool ipv6);

}  // namespace tent
}  // namespace mooncake

#endif  // TENT_IP_H
